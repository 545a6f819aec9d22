"""Chapter 9: formulas that its checks take for granted, again by another route."""

import math
from functools import cache
from types import SimpleNamespace

import nbformat
import numpy as np
import pytest

from cdopt_tutorial.publish.project import this_project


@cache
def sources() -> dict[str, str]:
    """The chapter's cells, by their ids."""
    path = this_project().root / "notebooks/09_costs.ipynb"
    return {c.id: c.source for c in nbformat.read(path, as_version=4).cells}


def ran(*cells: str, **given) -> SimpleNamespace:
    """What cells of the chapter compute, with nothing but what is given."""
    unseen = dict.fromkeys(("glue", "guess"), lambda *_, **__: None)
    names = {"math": math, "np": np, "show": SimpleNamespace(**unseen), **given}
    for cell in cells:
        exec(compile(sources()[cell], cell, "exec"), names)
    return SimpleNamespace(**names)


@pytest.mark.parametrize("n, k", [(2, 1), (8, 3), (32, 16), (32, 17), (32, 32), (5, 9)])
def test_servers_take_as_long_as_the_busiest_link_in_its_busier_direction(n, k):
    found, speed = ran("ring-1"), 1e9
    there = np.full((n, k), 1e6 / k)  # bytes from each trainer to each server
    out, into = np.zeros(n + k), np.zeros(n + k)
    for traffic, senders, receivers in (
        (there, slice(n), slice(n, None)), (there.T, slice(n, None), slice(n)),
    ):  # fmt: skip
        out[senders] += traffic.sum(1)
        into[receivers] += traffic.sum(0)
    both = max(out.max(), into.max()) / speed
    assert found.server(n, 1e6, speed, servers=k) == pytest.approx(both)
    in_turns = (out + into).max() / speed
    assert found.server(n, 1e6, speed, servers=k, turns=2) == pytest.approx(in_turns)
    at_once = found.server(n, 1e6, speed, servers=k) <= found.ring(n, 1e6, speed)
    assert n != found.machines or at_once == (k >= found.enough)


@pytest.mark.parametrize("busy, wins", [(1e-6, 2), (1e-4, 1), (1e-3, 0)])
def test_the_server_is_faster_below_the_size_where_both_take_as_long(busy, wins):
    hop, n = 1e-4, 32
    found = ran("ring-1", "ring-5", alpha=4e-4, busy=busy, hop=hop)
    call = max(4e-4, n * busy)
    assert sum(size > 0 for size in found.below.values()) == wins
    for name, size in found.below.items():
        waits = found.steps_of[name] * hop
        for bytes_of, sign in (0.5 * size, -1), (size, 0), (2 * size + 1e3, 1):
            carried = found.ring(n, bytes_of, found.link)
            later = found.server(n, bytes_of, found.link, call) - carried - waits
            assert size == 0 or np.sign(round(later, 9)) == sign
            assert size > 0 or later > 0


@pytest.mark.parametrize("ranks, count", [(4, 1), (4, 3), (4, 4), (4, 6), (1024, 126)])
def test_the_busiest_owner_sends_its_weights_to_all_and_parts_to_other_owners(
    ranks, count
):
    n, p = ranks * 4, 3
    found = ran("sums-1", "sums-2", hop=1e-4)
    owners = [number % ranks for number in range(count)]
    sent = np.zeros(ranks)
    for owner in owners:
        sent += n // ranks * p  # every rank sends its rows there, but for the owner
        sent[owner] += (ranks - 2) * (n // ranks) * p  # which answers all others
    assert found.busiest(n, p, ranks, count) == sent.max()
    assert count * found.sent_by(n, p, ranks)[1] == pytest.approx(sent.mean())
    of_a_rank = count * sum(p * p / ranks for _ in range(2 * (ranks - 1)))
    if count == 126:  # of square weights, so both count in weights
        square = of_a_rank / p**2 / (sent.max() / (n * p))
        assert found.busy_times == pytest.approx(square)
