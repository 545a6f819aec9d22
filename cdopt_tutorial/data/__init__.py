"""What the models read: real text, a language of known entropy, and baselines."""

from cdopt_tutorial.data.baselines import (
    bigram_perplexity,
    ngram_perplexity,
    perplexity,
    unigram_perplexity,
)
from cdopt_tutorial.data.grammar import Grammar
from cdopt_tutorial.data.near import load_near
from cdopt_tutorial.data.text import (
    Corpus,
    Stream,
    Vocabulary,
    detokenize,
    load_corpus,
)

__all__ = [
    "Corpus", "Grammar", "Stream", "Vocabulary", "bigram_perplexity", "detokenize",
    "load_corpus", "load_near", "ngram_perplexity", "perplexity", "unigram_perplexity",
]  # fmt: skip
