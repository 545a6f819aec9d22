"""Word vectors to an accuracy, end to end, in one process per rank, of one thread.

The words are IPython's, or torch's, of which there are more: the largest matrix shows
which ways fit into a rank's memory.
"""

import math
import time
from dataclasses import replace
from functools import partial

from scipy import sparse

from cdopt_tutorial.bench.rows import Measured, Progress, Variants, interleave, rows
from cdopt_tutorial.data.near import load_near
from cdopt_tutorial.engines import WorkerError
from cdopt_tutorial.sharding.vectors import SHARDED, WAYS, VectorsConfig, minimum, run

UNITS = {"to the accuracy": "s", "steps": "1"}
PAIRS = [(way, ranks) for way in SHARDED for ranks in (2, 1)]
ALL = PAIRS + [(way, 1) for way in WAYS if way not in SHARDED]
EXACT = [(way, 1) for way in ("dissolved", "cayley", "householder")]
# Whose words, n, p, ways and ranks, turns
SIZES = (
    ("IPython", 1000, 32, ALL, 1),
    ("IPython", 2000, 32, EXACT, 1),
    ("IPython", 40_000, 64, [*PAIRS, ("geoopt", 1)], 5),
    ("torch", 400_000, 64, [("dissolved", 2), ("dissolved", 1)], 3),
)
SMOKE_SIZES = (("IPython", 200, 4, ALL, 1),)
LIMITED = (
    ("dissolved", 1), ("projected", 1), ("geoopt", 1), ("gathered", 2),
    ("dissolved", 2), ("projected", 2), ("dissolved", 4),
)  # fmt: skip
MEMORY = 2**30  # bytes that a limited rank may allocate
LARGEST = 500_000, 64  # n, p


def measure(progress: Progress, smoke: bool) -> Measured:
    """Time each way at the sizes it can handle, in turns; smoke sizes are small."""
    measured, values = [], {}
    for of, n, p, chosen, turns in SMOKE_SIZES if smoke else SIZES:
        found = interleave(_variants(of, n, p, chosen, progress), turns, progress)
        measured += rows(found, UNITS)
        values |= found
    return measured, {"vectors": values, "limited": {} if smoke else limited(progress)}


def _variants(
    of: str, n: int, p: int, chosen: list[tuple[str, int]], progress: Progress
) -> Variants:
    matrix, config = load_near(of, n).matrix, VectorsConfig(p=p)
    began = time.perf_counter()
    least = minimum(matrix, p)
    progress(f"scipy's svds, n={n}: {time.perf_counter() - began:.3g} s")
    return {
        f"{way}, ranks={ranks}, n={n}": partial(
            _figures, replace(config, way=way, num_ranks=ranks), matrix, least
        )
        for way, ranks in chosen
    }


def _figures(
    config: VectorsConfig, matrix: sparse.csr_matrix, least: float, _: int
) -> dict[str, float]:
    """Steps, and the slowest rank's time unless it missed the accuracy."""
    found = run(config, matrix, least)
    if found[0].gap[-1] > config.accuracy:
        return {"steps": found[0].steps}
    seconds = max(each.seconds for each in found)
    return {"steps": found[0].steps, "to the accuracy": seconds}


def limited(progress: Progress) -> dict[str, str]:
    """How five steps of each way end where a rank's memory is limited."""
    (n, p), found = LARGEST, {}
    matrix = load_near("torch", n).matrix
    for way, ranks in LIMITED:
        name = f"{way}, ranks={ranks}, n={n}, {MEMORY} B"
        progress(name)
        config = VectorsConfig(way, p, ranks, max_steps=5, memory=MEMORY)
        try:
            took = run(config, matrix, -math.inf)[0].seconds
            found[name] = f"{took / 5:.3g} s a step"
        except WorkerError as error:
            found[name] = str(error).strip().splitlines()[-1]
    return found
