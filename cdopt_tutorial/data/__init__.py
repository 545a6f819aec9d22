"""Data for the models: real text, a language of known entropy, and baselines."""

from cdopt_tutorial.data.baselines import ngram_perplexity, perplexity
from cdopt_tutorial.data.grammar import Grammar
from cdopt_tutorial.data.near import load_near
from cdopt_tutorial.data.text import Corpus, Stream, Vocabulary, load_corpus
