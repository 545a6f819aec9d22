"""Text for a model: tokens, a vocabulary, a corpus, and the windows of a stream."""

import ast
import copy
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from cdopt_tutorial.checks import check

UNKNOWN = "<unk>"  # no token of a text: `tokenize` would cut it in three
MIN_COUNT = 2  # of a word of the vocabulary
MIN_TOKENS = 1_000  # of a corpus; fewer are too few to learn from or to measure on
BLOCK_TOKENS = 1_000  # of each block of the documentation

_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_TOKEN = re.compile(r"\w+|[^\w\s]")
_PARAGRAPH = re.compile(r"\n\s*\n")
_RULED_LINE = re.compile(r"^[ \t]*[-=+*~|#^]{3,}[ \t]*(?:\n|\Z)", re.MULTILINE)


@cache  # reading all files takes a second
def documentation() -> str:
    """The docstrings of IPython, under the BSD License.

    Ruled lines and repeated paragraphs, which would flatter a model, are left out. The
    text depends only on IPython's version.
    """
    kept: dict[str, None] = {}
    for code in source_files("IPython"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
                paragraphs = _PARAGRAPH.split(_RULED_LINE.sub("", text))
                kept |= dict.fromkeys(" ".join(p.split()) for p in paragraphs)
    kept.pop("", None)
    return "\n\n".join(kept) + "\n"


def source_files(package: str) -> list[str]:
    """What is in each source file of an installed package, which is not imported."""
    if (spec := find_spec(package)) is None or spec.origin is None:
        raise ValueError(f"package is {package!r}, but must be an installed one")
    files = sorted(Path(spec.origin).parent.rglob("*.py"))
    return [file.read_text("utf-8") for file in files]


def tokenize(text: str) -> list[str]:
    r"""Cut a text into lower-cased words, ``\w+``, and single punctuation marks."""
    return _TOKEN.findall(text.lower())


@dataclass(frozen=True)
class Vocabulary:
    """The distinct words that a model knows, and their numbers."""

    words: tuple[str, ...]  #: by number; ``<unk>``, if present, stands for all others

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, tokens: Iterable[str]) -> Tensor:
        """Numbers (n,) int64 of n tokens; a KeyError for one without a number."""
        ids = {word: number for number, word in enumerate(self.words)}
        known = [ids[token if token in ids else UNKNOWN] for token in tokens]
        return torch.tensor(known, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text in numbers, with a part held out."""

    vocabulary: Vocabulary  #: of the training part
    train: Tensor  #: tokens (n,) int64 to learn from, in the order of the text
    valid: Tensor  #: tokens (m,) int64 that are held out


def load_corpus(
    path: str | PathLike | None = None, max_vocab: int | None = None
) -> Corpus:
    """Read a text in UTF-8, hold out a tenth of it, and number its words.

    The vocabulary is ``<unk>`` and then the words of the training part, most frequent
    first, ``max_vocab`` in all. A word that occurs only once becomes ``<unk>``, so that
    a model learns the contexts of unknown words.

    Of a file, the end is held out. Without a path, it reads :func:`documentation`,
    whose subject changes towards the end: it is cut between paragraphs into blocks of
    about 1,000 tokens, and the fifth of every ten is held out. Raises ValueError, of
    one line, if the file is not text or too short.
    """
    if path is None:
        train, valid = _hold_out_blocks(documentation())
    else:
        tokens = _read(path)
        end = len(tokens) - round(len(tokens) / 10)
        train, valid = tokens[:end], tokens[end:]
    counts = Counter(sorted(train)).most_common()  # ties in alphabetical order
    known = (word for word, count in counts if count >= MIN_COUNT)
    vocabulary = Vocabulary((UNKNOWN, *known)[:max_vocab])
    if len(vocabulary) < 2:
        raise ValueError(f"corpus {str(path)!r}: no word to learn occurs twice")
    return Corpus(vocabulary, vocabulary.encode(train), vocabulary.encode(valid))


class Stream:
    """A text cut into columns that are read side by side, window by window.

    For truncated back-propagation through time (Williams and Peng 1990): of tokens
    (n,), column b has those from b·L to (b + 1)·L, L = (n - 1) // batch_size, and each
    window takes the next ``seq_len`` rows, the last one the rest. Raises ValueError if
    the text is too short for the columns.
    """

    def __init__(self, tokens: Tensor, seq_len: int, batch_size: int):
        self.seq_len, self.batch_size = seq_len, batch_size
        allowed = f"below {len(tokens)}, the tokens of the text"
        check(self, "batch_size", batch_size < len(tokens), allowed)
        rows = (len(tokens) - 1) // batch_size
        # One row more than the inputs: the last target of each column.
        self._columns = tokens.unfold(0, rows + 1, rows)[:batch_size].T.contiguous()

    @property
    def num_tokens(self) -> int:
        """Targets in all windows together."""
        return (len(self._columns) - 1) * self.batch_size

    def __len__(self) -> int:
        return -(-(len(self._columns) - 1) // self.seq_len)

    def windows(self, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and next tokens, (seq_len, batch_size) each, from window ``start``."""
        begins = range(start * self.seq_len, len(self._columns) - 1, self.seq_len)
        windows = (self._columns[at : at + self.seq_len + 1] for at in begins)
        return ((rows[:-1], rows[1:]) for rows in windows)

    def shard(self, rank: int, num_trainers: int) -> "Stream":
        """One trainer's columns; the first trainers may have one more than the rest."""
        shard = copy.copy(self)
        columns = self._columns.tensor_split(num_trainers, dim=1)[rank]
        # A copy, so that pickling sends only these columns.
        shard._columns, shard.batch_size = columns.contiguous(), columns.shape[1]
        return shard


def _read(path: str | PathLike) -> list[str]:
    """The tokens of a file."""
    file = f"corpus {str(path)!r}"
    try:
        tokens = tokenize(Path(path).read_text("utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"{file}: it cannot be read ({why})") from error
    if len(tokens) < MIN_TOKENS:
        raise ValueError(
            f"{file}: it has {len(tokens)} tokens (words and punctuation marks), but "
            f"at least {MIN_TOKENS} are needed"
        )
    return tokens


def _hold_out_blocks(text: str) -> tuple[list[str], list[str]]:
    blocks: list[list[str]] = [[]]
    for paragraph in _PARAGRAPH.split(text):
        if len(blocks[-1]) >= BLOCK_TOKENS:
            blocks.append([])
        blocks[-1] += tokenize(paragraph)
    parts: tuple[list[str], list[str]] = [], []
    for number, block in enumerate(blocks):
        parts[number % 10 == 4].extend(block)
    return parts
