"""Compare models over several seeds, each with a control that only begins alike."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from cdopt_tutorial.data import Corpus
from cdopt_tutorial.engines import share
from cdopt_tutorial.parameter_server.config import RNNConfig
from cdopt_tutorial.parameter_server.start import left_free
from cdopt_tutorial.parameter_server.training import History, Job, run_locally


def with_controls(
    configs: Mapping[str, RNNConfig], corpus: Corpus, seeds: Iterable[int]
) -> dict[str, list[Job]]:
    """A job for each config and seed; for a constrained one, its control's, too.

    Args:
        configs: by name; the control's name gets ", control" behind it.
        corpus: what is read.
        seeds: of all chance.
    """
    jobs: dict[str, list[Job]] = {}
    for seed in seeds:
        for name, config in configs.items():
            config = replace(config, seed=seed)
            jobs.setdefault(name, []).append(Job(config, corpus))
            if config.constrained is not None:
                free, begin = left_free(config, corpus.vocabulary.words)
                control = Job(free, corpus, resume=begin)
                jobs.setdefault(f"{name}, control", []).append(control)
    return jobs


def train(
    jobs: Mapping[str, list[Job]], on_done: Callable[[int, History], None] | None = None
) -> dict[str, list[History]]:
    """Train every job in one process, shared out over two.

    Args:
        jobs: by name, for each seed.
        on_done: see :func:`~cdopt_tutorial.engines.share.share`.

    Returns:
        Their histories, by name and in the same order.

    Raises:
        WorkerError: a job failed.
    """
    flat = [(job,) for group in jobs.values() for job in group]
    found = iter(share(run_locally, flat, on_done=on_done))
    return {name: [next(found) for _ in group] for name, group in jobs.items()}
