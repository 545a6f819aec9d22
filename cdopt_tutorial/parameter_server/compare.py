"""Compare models over several seeds, each with a control that only begins alike."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from cdopt_tutorial.data import Corpus
from cdopt_tutorial.engines import share
from cdopt_tutorial.parameter_server.model import History, RNNConfig, build_all
from cdopt_tutorial.parameter_server.system import Job, run_locally


def control(job: Job) -> Job:
    """A constrained run's control: it begins as that one, but nothing is held."""
    config = job.config
    begin = build_all(len(job.corpus.vocabulary), config).state_dict()
    scale = begin.pop("decoder.scale", 1.0)
    weights = {
        name.replace("parametrizations.", "").removesuffix(".original"): value
        for name, value in begin.items()
    }
    weights["decoder.decoder.weight"] = scale * weights["decoder.decoder.weight"]
    free = replace(config, manifold="none", per_gate=False)
    return replace(job, config=free, begin=weights)


def with_controls(
    configs: Mapping[str, RNNConfig], corpus: Corpus, seeds: Iterable[int]
) -> dict[str, list[Job]]:
    """Jobs by name, one a seed; a constrained config has a "NAME, control", too."""
    jobs: dict[str, list[Job]] = {}
    for seed in seeds:
        for name, config in configs.items():
            job = Job(replace(config, seed=seed), corpus)
            jobs.setdefault(name, []).append(job)
            if config.constrained is not None:
                jobs.setdefault(f"{name}, control", []).append(control(job))
    return jobs


def train(
    jobs: Mapping[str, list[Job]], on_done: Callable[[int, History], None] | None = None
) -> dict[str, list[History]]:
    """The histories of all jobs, each trained in one process, shared out over two."""
    flat = [(job,) for group in jobs.values() for job in group]
    found = iter(share(run_locally, flat, on_done=on_done))
    return {name: [next(found) for _ in group] for name, group in jobs.items()}
