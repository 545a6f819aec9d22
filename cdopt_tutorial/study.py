"""What the scripts in ``book/studies`` have stored in the package."""

import json
import math
from functools import cache
from importlib.resources import files
from typing import Any

Points = tuple[tuple[float, ...], tuple[float, ...]]


@cache
def stored(name: str) -> dict[str, Any]:
    """The content of a JSON file of the package, such as ``rollouts/lag.json``.

    Read once, so don't change it.
    """
    return json.loads((files("cdopt_tutorial") / name).read_text())


class Study:
    """Chapter 4's or 6's, by its folder: kinds of training, each at its best."""

    def __init__(self, folder: str):
        study = stored(f"{folder}/study.json")
        #: (kind, lr, decay, warm-up) of each kind, as it was tuned.
        self.chosen: list[list[Any]] = study["chosen"]
        self.tuned: list[dict[str, Any]] = study["tuned"]  #: the runs that tuned them
        #: the runs of the other seeds; the losses are those of the best of its steps.
        self.runs: list[dict[str, Any]] = study["runs"]
        #: the runs of other seeds in which weights decay, by kind.
        self.decayed: dict[str, list[dict[str, Any]]] = {}
        for run in stored("decay.json")["runs"]:
            chapter, kind = run["name"].split("/")
            if chapter == folder:
                self.decayed.setdefault(kind, []).append(run)

    def by_rate(self, kind: str) -> list[Points]:
        """For each tuning seed, the rates tried, over the best, and their perplexities.

        All were tried with the same schedule.
        """
        best = next(lr for name, lr, *_ in self.chosen if name == kind)
        points: dict[int, list[tuple[float, float]]] = {}
        for run in self.tuned:
            if (run["kind"], run["decay"]) == (kind, "cosine") and run["warm_up"]:
                point = run["lr"] / best, math.exp(run["tuning"])
                points.setdefault(run["seed"], []).append(point)
        pairs = (zip(*sorted(of), strict=True) for of in points.values())
        return [(rates, perplexities) for rates, perplexities in pairs]

    def by_kind(self) -> dict[str, list[dict[str, Any]]]:
        """The runs of each kind, with the seeds that did not tune it."""
        kinds = [kind for kind, *_ in self.chosen]
        return {kind: [r for r in self.runs if r["kind"] == kind] for kind in kinds}

    def slower(self, kind: str) -> float:
        """Step time of a kind's fastest run, relative to the fastest free run."""
        seconds: dict[str, list[float]] = {}
        for run in self.tuned + self.runs:  # other work slowed some
            seconds.setdefault(run["kind"], []).append(run["step_seconds"])
        return min(seconds[kind]) / min(seconds["free"])
