"""Jobs shared out over workers."""

import importlib
import math

import pytest
import torch

from cdopt_tutorial.run import WorkerError, share


@pytest.mark.parametrize(
    ("num_workers", "sizes"), [(2, [3, 1, 4, 1, 5]), (9, [2, 1]), (2, [])]
)
def test_results_come_in_the_order_of_the_jobs(num_workers, sizes):
    counts = []
    note = lambda number, result: counts.append((number, len(result)))  # noqa: E731
    found = share(torch.arange, [(size,) for size in sizes], num_workers, note)
    assert [len(tensor) for tensor in found] == sizes
    assert [number for number, _ in counts] == [*range(1, len(sizes) + 1)]
    assert sorted(size for _, size in counts) == sorted(sizes)


def test_a_job_that_fails_is_named_by_its_worker():
    with pytest.raises(WorkerError, match="worker1"):
        share(torch.arange, [(1,), ("x",)])


def test_refuses():
    with pytest.raises(ValueError, match="num_workers is 0"):
        share(torch.arange, [(1,)], num_workers=0)
    with pytest.raises(ValueError, match="cannot pickle"):
        share(torch.arange, [((n for n in "ab"),)])


def test_a_busy_machine_ends_no_jobs_unless_it_is_asked_to(monkeypatch):
    module, deadlines = importlib.import_module("cdopt_tutorial.run.share"), []
    note = lambda roles, deadline, **_: deadlines.append(deadline)  # noqa: E731
    monkeypatch.setattr(module, "launch", note)
    for given in {}, {"deadline": 5}:
        with pytest.raises(KeyError):  # since nobody reports a result
            share(torch.arange, [(1,)], **given)
    assert deadlines == [math.inf, 5]
