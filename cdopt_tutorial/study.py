"""Studies: kinds of training compared, each at its best, and stored with the book."""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Protocol

import torch

from cdopt_tutorial.engines import share
from cdopt_tutorial.equality import max_difference


class Learner(Protocol):
    """A run of a study, as its loop sees it."""

    def step(self, lr: float) -> None:
        """Train on the next batch."""

    def look(self) -> tuple[float, float]:
        """The losses of both halves of the held-out text, in nats."""

    def distance(self) -> float:
        """‖C‖ of what could be constrained, as the model computes with it."""


@dataclass(frozen=True)
class Study:
    """What is compared, and for how long each is trained."""

    package: str  #: that has the stored runs, in ``study.json``
    kinds: Sequence[str]
    learner: Callable[[str, float, int, str], Learner]  #: of kind, lr, seed, device
    steps: int
    every: int  #: steps between two looks at the held-out text
    patience: int  #: steps without a gain after which a run is in vain

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
        """Train a kind for some steps, or until the text gets no easier for long.

        The rate rises over ``warm_up`` steps, and then stays ("none") or falls to 0
        with the last step ("cosine"). At each look both halves of the held-out text are
        read: the first says when to stop, and which weights are the best. With
        ``until`` the run ends after so many steps, as if it were stopped there.

        Returned are the losses of both halves ("tuning", "test", in nats) at the best
        of these "steps", ‖C‖ there ("distance"), the "last" step, "step_seconds", and
        the "curve": (tuning, test, step) of each look. Raises ValueError for a kind or
        rate that there is none of.
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
        """What the study's bench has written for the book.

        "tuned" has a row of each run that tuned, "chosen" the setting of each kind, and
        "runs" those of the other seeds, with a "curve" as :meth:`converge` has it.
        """
        return json.loads((files(self.package) / "study.json").read_text())

    def by_rate(self, kind: str) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
        """A curve for each seed that tuned a kind: rates, over the best; perplexities.

        Of what is stored, with the schedule that all rates were tried with.
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
        """The stored runs of each kind, by the seeds that did not tune it."""
        runs = self.stored()["runs"]
        return {kind: [r for r in runs if r["kind"] == kind] for kind in self.kinds}

    def slower(self, kind: str) -> float:
        """Mean time of a step in a kind's fastest run, over the fastest free run's."""
        kept, seconds = self.stored(), {}
        for run in kept["tuned"] + kept["runs"]:  # other work slows some
            seconds.setdefault(run["kind"], []).append(run["step_seconds"])
        return min(seconds[kind]) / min(seconds["free"])

    def repeat(
        self, kinds: Sequence[str], until: int, device: str = "cpu", **options: Any
    ) -> float:
        """Run the first steps of each kind's first stored run again, by two workers.

        Returned is by how many nats any look differs from the stored one, at most;
        infinite if one is no number. The options are those of :func:`~.share.share`.
        """
        names, stored = ("kind", "lr", "decay", "warm_up", "seed"), self.by_kind()
        first = [stored[kind][0] for kind in kinds]
        jobs = [(*(of[n] for n in names), self.steps, device, until) for of in first]
        again = share(self.converge, jobs, **options)
        looks = [len(run["curve"]) for run in again]  # what is stored goes on
        was, now = (
            dict(zip(kinds, map(_looks, runs, looks), strict=True))
            for runs in (first, again)
        )
        return max_difference(was, now)


def _looks(run: dict[str, Any], number: int) -> torch.Tensor:
    return torch.tensor(run["curve"][:number], dtype=torch.float64)


def factor(step: int, steps: int, decay: str, warm_up: int) -> float:
    """On a learning rate at a step, from 0."""
    falling = (1 + math.cos(math.pi * step / steps)) / 2 if decay == "cosine" else 1
    return falling * min(1.0, (step + 1) / warm_up) if warm_up else falling
