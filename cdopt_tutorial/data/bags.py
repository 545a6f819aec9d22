"""Handwritten digits as bags of (pixel, level) tokens, shared out to trainers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

NUM_LEVELS = 17  # of grey
VALID_SHARE, TEST_SHARE = 0.1, 0.2


@cache
def load_digits() -> tuple[Tensor, Tensor]:
    """UCI's digits: images (1797, 64) float64 from 0 to 1, and labels (1797,) int64."""
    from sklearn import datasets  # takes long to import

    levels, labels = datasets.load_digits(return_X_y=True)
    return torch.tensor(levels) / (NUM_LEVELS - 1), torch.tensor(labels)


@dataclass(frozen=True, eq=False)
class Bags:
    """Bags of as many tokens each, for ``nn.EmbeddingBag``, and their labels."""

    tokens: Tensor  #: (b, k) int64, a bag in each row
    labels: Tensor  #: (b,) int64

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, chosen: Tensor) -> "Bags":
        """The bags with these numbers, (c,) int64, which may be none."""
        return Bags(self.tokens[chosen], self.labels[chosen])


@dataclass(frozen=True, eq=False)
class BagSplit:
    """Bags in three parts."""

    train: Bags  #: to learn from
    valid: Bags  #: to watch a model and choose its settings
    test: Bags  #: for nothing but the final test
    num_tokens: int  #: distinct tokens, rows of an embedding table
    num_classes: int  #: distinct labels


def digit_bags(seed: int = 0) -> BagSplit:
    """The digits, of which a tenth is held out for validation and a fifth for testing.

    Pixel p with the level l, 0 to 16, is the token 17 p + l. The seed is of the split.
    """
    images, labels = load_digits()
    levels = (images * (NUM_LEVELS - 1)).round().long()
    total, num_pixels = levels.shape
    bags = Bags(levels + NUM_LEVELS * torch.arange(num_pixels), labels)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    sizes = [round(share * total) for share in (TEST_SHARE, VALID_SHARE)]
    parts = order.split([*sizes, total - sum(sizes)])
    test, valid, train = (bags.select(part) for part in parts)
    return BagSplit(train, valid, test, num_pixels * NUM_LEVELS, num_classes=10)


@dataclass(frozen=True, eq=False)
class Batch:
    """One trainer's part of a joint batch."""

    bags: Bags  #: this trainer's, perhaps none
    joint: int  #: number of bags of all trainers together


@dataclass(frozen=True, eq=False)
class Shard:
    """One trainer's own part of the training data, which never leaves it.

    All trainers draw the same joint batches, by number, and each takes the bags that it
    owns; how many these are is left to chance, as in the original.
    """

    bags: Bags  #: this trainer's
    begin: int  #: number of its first bag in the training data
    total: int  #: bags in the training data

    def batches(self, batch_size: int, seed: int) -> Iterator[Batch]:
        """One pass over the data in joint batches, in an order drawn with a seed."""
        generator = torch.Generator().manual_seed(seed)
        for drawn in torch.randperm(self.total, generator=generator).split(batch_size):
            chosen = drawn - self.begin
            chosen = chosen[(chosen >= 0) & (chosen < len(self.bags))]
            yield Batch(self.bags.select(chosen), len(drawn))


def shards(bags: Bags, shares: Sequence[float]) -> list[Shard]:
    """Cut training data by shares above 0; raises ValueError if one gets no bag."""
    sums = [0, *accumulate(shares)]
    ends = [round(len(bags) * part / sums[-1]) for part in sums]
    if len(set(ends)) < len(ends):
        raise ValueError(
            f"the smallest of {len(shares)} shares comes to none of {len(bags)} bags, "
            "but each trainer needs at least 1"
        )
    return [
        Shard(bags.select(torch.arange(begin, end)), begin, len(bags))
        for begin, end in pairwise(ends)
    ]
