"""Jobs shared out over workers."""

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
