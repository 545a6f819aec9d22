"""What the models read: real text, a language of known entropy, and baselines."""

from cdopt_tutorial.data.bags import Bags, BagSplit, Shard, digit_bags, shards
from cdopt_tutorial.data.baselines import (
    Bigram,
    Unigram,
    bigram_perplexity,
    unigram_perplexity,
)
from cdopt_tutorial.data.copying import CopyingMemory
from cdopt_tutorial.data.grammar import Grammar
from cdopt_tutorial.data.text import (
    Corpus,
    Stream,
    Vocabulary,
    detokenize,
    load_corpus,
    read_text,
    reference_text,
    tokenize,
)

__all__ = [
    "BagSplit",
    "Bags",
    "Bigram",
    "CopyingMemory",
    "Corpus",
    "Grammar",
    "Shard",
    "Stream",
    "Unigram",
    "Vocabulary",
    "bigram_perplexity",
    "detokenize",
    "digit_bags",
    "load_corpus",
    "read_text",
    "reference_text",
    "shards",
    "tokenize",
    "unigram_perplexity",
]
