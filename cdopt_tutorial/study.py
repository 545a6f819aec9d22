"""Studies, which compare kinds of training, each at its best; the book stores them."""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch

from cdopt_tutorial.engines import share
from cdopt_tutorial.equality import max_difference


@dataclass(frozen=True)
class Study:
    """The kinds to compare, and how long each is trained."""

    package: str  #: whose ``study.json`` has the stored runs
    kinds: Sequence[str]
    #: makes a run of a kind, lr, seed and device, which has three methods: ``step(lr)``
    #: trains on the next batch, ``look()`` returns the losses of both halves of the
    #: held-out text in nats, and ``distance()`` ‖C‖ of what could be constrained.
    learner: Callable[[str, float, int, str], Any]
    steps: int
    every: int  #: steps between two evaluations on the held-out text
    patience: int  #: steps without an improvement after which a run stops

    def converge(
        self,
        kind: str,
        lr: float,
        decay: str,
        warm_up: int,
        seed: int,
        steps: int | None = None,
        device: str = "cpu",
        until: int | None = None,
    ) -> dict[str, Any]:
        """Train a kind for ``steps``, or until it has stopped improving.

        The rate rises over ``warm_up`` steps, and then stays ("none") or falls to 0 at
        the last step ("cosine"). Each evaluation reads both halves of the held-out
        text; the first half decides when to stop and which weights are the best. With
        ``until``, the run is cut off after that many steps.

        Returns the losses of both halves ("tuning", "test", in nats) at the best of the
        "steps", ‖C‖ there ("distance"), the "last" step, "step_seconds", and the
        "curve": (tuning, test, step) of each evaluation. Raises ValueError for an
        unknown kind.
        """
        if kind not in self.kinds:
            allowed = " or ".join(self.kinds)
            raise ValueError(f"kind is {kind!r}, but must be {allowed}")
        steps, learner = steps or self.steps, self.learner(kind, lr, seed, device)
        curve, best, seconds = [], (math.inf, math.inf, 0, 0.0), 0.0
        for step in range(1, (until or steps) + 1):
            begin = time.perf_counter()
            learner.step(lr * factor(step - 1, steps, decay, warm_up))
            seconds += time.perf_counter() - begin
            if step % self.every == 0:
                found = *learner.look(), step
                curve.append(found)
                if found[0] < best[0]:
                    best = *found, learner.distance()
                elif step - best[2] >= self.patience or not math.isfinite(found[0]):
                    break
        names = "tuning", "test", "steps", "distance"
        of_best = dict(zip(names, best, strict=True))
        return {**of_best, "last": step, "step_seconds": seconds / step, "curve": curve}

    def stored(self) -> dict[str, Any]:
        """The results that the study's bench wrote for the book.

        "tuned" has a row for each tuning run, "chosen" the setting of each kind, and
        "runs" the runs of the other seeds, each with its "curve".
        """
        return json.loads((files(self.package) / "study.json").read_text())

    def by_rate(self, kind: str) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
        """For each tuning seed, the rates tried, over the best, and their perplexities.

        All were tried with the same schedule.
        """
        kept = self.stored()
        best = next(lr for name, lr, *_ in kept["chosen"] if name == kind)
        points: dict[int, list[tuple[float, float]]] = {}
        for run in kept["tuned"]:
            if (run["kind"], run["decay"]) == (kind, "cosine") and run["warm_up"]:
                point = run["lr"] / best, math.exp(run["tuning"])
                points.setdefault(run["seed"], []).append(point)
        return [tuple(zip(*sorted(of), strict=True)) for of in points.values()]

    def by_kind(self) -> dict[str, list[dict[str, Any]]]:
        """The stored runs of each kind, with the seeds that did not tune it."""
        runs = self.stored()["runs"]
        return {kind: [r for r in runs if r["kind"] == kind] for kind in self.kinds}

    def slower(self, kind: str) -> float:
        """Mean step time of a kind's fastest run, relative to the fastest free run."""
        kept, seconds = self.stored(), {}
        for run in kept["tuned"] + kept["runs"]:  # other work slowed some
            seconds.setdefault(run["kind"], []).append(run["step_seconds"])
        return min(seconds[kind]) / min(seconds["free"])

    def repeat(
        self, kinds: Sequence[str], until: int, device: str = "cpu", **options: Any
    ) -> float:
        """Repeat the first steps of each kind's first stored run, on two workers.

        Returns the largest difference, in nats, from the stored losses; infinite for
        NaN. The options are those of :func:`~.share.share`.
        """
        names, stored = ("kind", "lr", "decay", "warm_up", "seed"), self.by_kind()
        first = [stored[kind][0] for kind in kinds]
        jobs = [(*(of[n] for n in names), self.steps, device, until) for of in first]
        again = share(self.converge, jobs, **options)
        was, now = {}, {}
        for kind, old, new in zip(kinds, first, again, strict=True):
            both = old["curve"][: len(new["curve"])], new["curve"]  # the stored goes on
            was[kind], now[kind] = torch.tensor(both, dtype=torch.float64)
        return max_difference(was, now)


def factor(step: int, steps: int, decay: str, warm_up: int) -> float:
    """The factor on the learning rate at a step, counted from 0."""
    falling = (1 + math.cos(math.pi * step / steps)) / 2 if decay == "cosine" else 1
    return falling * min(1.0, (step + 1) / warm_up) if warm_up else falling
