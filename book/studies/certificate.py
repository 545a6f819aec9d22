"""Digits certified by networks trained in twelve ways: the study of chapter 3.

A way's rate and the scale of its loss move on a grid until the next ones up and down
certify no more, at radius 0.5, of the training digits that each tuning seed holds out.
The other seeds report on the test digits.

The book's results are stored in cdopt_tutorial/dissolving/certificate.json.
"""

import argparse
import math
import time
from collections.abc import Sequence
from itertools import product
from typing import Any

from climb import BESIDE, Cell, best, climb, setting
from runs import arguments, keep, write
from torch import Tensor, cdist, linalg, manual_seed
from ways import WAYS, prepare

from cdopt_tutorial.dissolving import certificate
from cdopt_tutorial.dissolving.certificate import Digits

RADII, RADIUS = [step / 20 for step in range(26)], 0.5  # of the tuning and the attack
HELD_OUT, TUNING_SEEDS = 300, (101, 102, 103, 104)
SEEDS, STEPS = (1, 2, 3, 4, 5), 400
NOTHING = {"trained": 0.0, "projected": 0.0, "certified": [0.0] * len(RADII)}
NOTHING |= {"withstood": 0.0, "beaten": 0}
FIRST = [*product((-9, -6, -3), (-5, 0, 2))]  # rates and scales, see `setting`


def one(way: str, lr: float, scale: float, seed: int, steps: int) -> dict[str, Any]:
    """Train a network: percentages of digits that it certifies at each of ``RADII``.

    At ``RADIUS`` also with the weights as "trained", and with them "projected"; what is
    dissolved is used so. Of the test's digits also how many "withstood" the attack, and
    the number of certified ones that it has "beaten". A diverged run certifies nothing.
    """
    begin, tuning = time.process_time(), seed in TUNING_SEEDS
    known, digits = certificate.split()
    if tuning:
        known, digits = certificate.hold_out(known, HELD_OUT, seed)
    layers = certificate.network(seed)
    manual_seed(seed)  # of torch's parametrizations
    how = prepare(way, layers, lr) | {"scale": scale, "seed": seed, "steps": steps}
    try:
        last = certificate.train(layers, known, **how)
        ends = {"trained": last, "projected": certificate.projected(last)}
        radii = {name: certificate.radii(end, digits) for name, end in ends.items()}
    except (linalg.LinAlgError, ValueError):  # of weights that are not finite
        return NOTHING | {"seconds": time.process_time() - begin}
    used = "projected" if way == "dissolved" else "trained"
    found: dict[str, Any] = {name: share(r > RADIUS) for name, r in radii.items()}
    found["certified"] = [share(radii[used] > radius) for radius in RADII]
    if not tuning:
        right = certificate.withstands(ends[used], digits, RADIUS)
        found["withstood"] = share(right)
        found["beaten"] = ((radii[used] > RADIUS) & ~right).sum().item()
    return found | {"seconds": time.process_time() - begin}


def share(chosen: Tensor) -> float:
    """In percent."""
    return 100 * chosen.double().mean().item()


def main(options: argparse.Namespace) -> None:
    """Tune each way, and train it with the other seeds."""
    ways, first, few, steps, beside = WAYS, FIRST, None, STEPS, BESIDE
    if options.smoke:
        ways, first, few, steps, beside = WAYS[:1], FIRST[:2], 1, 5, ()
    tuning_seeds, seconds = TUNING_SEEDS[:few], 0.0

    def run(cells: Sequence[tuple[str, Cell]], seeds: Sequence[int]) -> list[dict]:
        nonlocal seconds
        jobs = [
            {"way": way, **setting(cell), "seed": seed, "steps": steps}
            for (way, cell), seed in product(cells, seeds)
        ]
        runs = keep(options.out, one, jobs)
        seconds += sum(each.pop("seconds") for each in runs)
        return runs

    def score(cells: Sequence[tuple[str, Cell]]) -> list[list[float]]:
        at, each = RADII.index(RADIUS), iter(run(cells, tuning_seeds))
        return [[next(each)["certified"][at] for _ in tuning_seeds] for _ in cells]

    scores = climb(score, ways, first, beside)
    chosen = {way: best(scores[way]) for way in ways}
    runs = run([*chosen.items()], SEEDS[:few])
    known, digits = certificate.split()
    write(
        options.out,
        radii=RADII,
        chosen=[[way, *setting(cell).values()] for way, cell in chosen.items()],
        tuned=[
            [way, *setting(cell).values(), *found]
            for way in ways
            for cell, found in scores[way].items()
        ],
        yardstick=[share(neighbours(known, digits) > radius) for radius in RADII],
        cpu_seconds=seconds,
        runs=runs,
    )


def neighbours(known: Digits, digits: Digits) -> Tensor:
    """Certified radii of the nearest neighbour's class, (n,): a yardstick.

    Half of what the nearest digit of another class is farther than that of the same.
    """
    (images, labels), (others, classes) = digits, known
    distances, same = cdist(images, others), labels[:, None] == classes
    least = [distances.where(which, math.inf).amin(1) for which in (~same, same)]
    return (least[0] - least[1]) / 2


if __name__ == "__main__":
    main(arguments(__doc__))
