"""Chapter 9: each problem's answer again, by another route than its cell's formula."""

import math
from functools import cache
from types import SimpleNamespace

import nbformat
import numpy as np
import pytest
from scipy import optimize, stats

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


def test_as_many_servers_hold_the_tables_and_keep_the_pace_as_fill_up_in_turn():
    found = ran("tables-1", "tables-3")
    room, row = 64e9 * 0.9, 128 * 4 * 2
    for of_row, servers in (row, found.servers), (129 * 4, found.lean_servers):
        # Each server takes what fits.
        filled = range(0, sum(found.rows_of), int(room // of_row))
        assert len(filled) == servers
    sizes = sorted(count * row for count in found.rows_of)
    # No two of the five largest fit together, and the others fit beside one of them.
    assert 2 * sizes[-5] > room >= sizes[-1] + sum(sizes[:-5])
    assert len(found.free) == 5 and 5 * room - sum(found.free) == sum(sizes)
    # Seconds of a step in which a link carries what is its own, in one direction.
    ways = (found.for_pace, 32, 1), (found.in_turns, 32, 2), (found.halved, 16, 1)
    for count, bits, directions in ways:
        for links, keeps in (count, True), (count - 1, False):
            carries = 65_536 * 26 * 128 * bits / links / 50e9 * directions
            assert (65_536 / carries >= 5_373_952) == keeps


@pytest.mark.parametrize("n", [2, 3, 8, 32])
def test_a_ring_that_adds_up_chunk_by_chunk_sends_what_the_formula_says(n):
    found = ran("ring-1")
    has = np.random.default_rng(n).normal(size=(n, n))  # (machine, chunk)
    sums, sent = has.sum(0), np.zeros(n)
    for step in range(2 * (n - 1)):
        before = has.copy()
        for rank in range(n):  # n - 1 times a neighbour adds what comes, then keeps it
            chunk, to = (rank - step) % n, (rank + 1) % n
            has[to, chunk] = before[rank, chunk] + (step < n - 1) * before[to, chunk]
            sent[rank] += 1 / n
    assert np.allclose(has, sums)
    by_ring = found.ring(n, 1e6, 1e9)
    assert by_ring == pytest.approx(sent.max() * 1e6 / 1e9)
    tie = n**2 / (2 * (n - 1))  # so many servers take as long
    if tie < n:
        assert found.server(n, 1e6, 1e9, servers=tie) == pytest.approx(by_ring)
    assert n != found.machines or found.enough == math.ceil(tie)
    # In turns, a trainer's own link takes longer than the ring.
    assert found.server(n, 1e6, 1e9, servers=10**9, turns=2) > by_ring


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


def test_halving_sends_a_rings_bytes_in_as_many_steps_as_the_chapter_counts():
    n = ran("ring-1").machines
    has, sent, steps = np.random.default_rng(0).normal(size=(n, n)), np.zeros(n), 0
    sums, mine = has.sum(0), [range(n) for _ in range(n)]  # chunks that a rank adds up
    for far in (16, 8, 4, 2, 1):  # each gives its partner that half of its chunks
        before, steps = has.copy(), steps + 1
        for rank, chunks in enumerate(mine):
            low = rank & far == 0
            half = len(chunks) // 2
            mine[rank] = chunks[:half] if low else chunks[half:]
            sent[rank] += half / n
            for chunk in mine[rank]:
                has[rank, chunk] += before[rank ^ far, chunk]
    for far in (1, 2, 4, 8, 16):  # and gets it back
        before, steps, old = has.copy(), steps + 1, list(mine)
        for rank in range(n):
            sent[rank] += len(old[rank]) / n
            for chunk in old[rank ^ far]:
                has[rank, chunk] = before[rank ^ far, chunk]
            mine[rank] = sorted({*old[rank], *old[rank ^ far]})
    assert np.allclose(has, sums)
    assert sent == pytest.approx(np.full(n, 2 * (n - 1) / n))
    found = ran("ring-1", "ring-5", alpha=1e-3, busy=1e-6, hop=1e-4)
    assert found.steps_of["halving"] == steps


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


@pytest.mark.parametrize("rank, name", [(100, "slowest"), (96, "without")])
def test_the_last_of_exponential_times_is_the_mean_of_an_order_statistic(rank, name):
    # The k-th of n quantiles is Beta(k, n - k + 1) distributed.
    mean = stats.beta(rank, 101 - rank).expect(lambda u: -np.log1p(-u))
    assert getattr(ran("slowest-1"), name) == pytest.approx(mean, rel=1e-6)


def test_the_simulated_tails_have_the_quantiles_of_their_distributions():
    tails = ran("slowest-1", "slowest-2").tails(np.random.default_rng(8), (20_000, 100))
    laws = stats.uniform(0, 2), stats.expon(), stats.pareto(1.5, scale=1 / 3)
    for law, times in zip(laws, tails.values(), strict=True):
        assert law.mean() == pytest.approx(1)
        below = times.max(1) < law.ppf(0.5 ** (1 / 100))  # the slowest one's median
        assert np.mean(below) == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(20_000))


def test_youngs_interval_is_nearly_the_best_for_exponential_deaths():
    found = ran("save-1", "save-2")

    def lost(interval):  # exactly: a geometric number of intervals is saved
        survives = math.exp(-(interval + found.save) / found.between)
        return 1 - interval / found.between * survives / (1 - survives)

    best = optimize.minimize_scalar(lost, bounds=(10, 1e5), method="bounded")
    assert found.interval == pytest.approx(best.x, rel=0.03)
    assert found.lost == pytest.approx(best.fun, abs=0.003)
    simulated = found.share_lost(found.interval, found.save, found.lives)
    assert simulated == pytest.approx(best.fun, abs=0.001)
    # The days have so many times ten minutes, and each death costs one.
    assert found.restarts == pytest.approx(419 / (54 * 24 * 6))
    assert found.save == pytest.approx(405 * 14 / 2000)


def test_saves_as_large_as_the_papers_largest_contradict_its_effective_time():
    found = ran("save-1")
    terabytes = 16_384 * 4 / 1000
    intervals = np.linspace(60, 3600, 35_401)
    losses = terabytes / 2 / intervals + intervals / 2 / found.between
    assert found.most_interval == pytest.approx(intervals[losses.argmin()], abs=0.1)
    assert found.most_lost == pytest.approx(losses.min(), abs=1e-6)
    assert found.lost + found.restarts < 0.1 < losses.min() + found.restarts


def test_published_rates_grow_with_the_actors():
    names = "by_one", "ceiling", "by_model", "in_flight", "limit"
    given = dict.fromkeys(names, 1.0)
    found = ran("observers-5", observers=1000, bounds={"calls": 1.0}, **given)
    line = stats.linregress(*zip(*found.published.items(), strict=True))
    assert line.slope == pytest.approx(found.by_actor, rel=0.1)
    assert (found.fed, found.impala_off) == pytest.approx((250 / 80 * 150, 1 / 15))


@pytest.mark.parametrize("n, p, ranks", [(48, 4, 4), (60, 2, 6), (1024, 1024, 1024)])
def test_sums_and_owners_send_what_each_message_of_theirs_carries(n, p, ranks):
    found = ran("sums-1")
    ring = sum(p * p / ranks for _ in range(2 * (ranks - 1)))
    # Every rank owns one weight, so it gets as many parts as it sends.
    owners = sum(2 * (n // ranks) * p for owner in range(ranks) if owner != 0) / ranks
    assert found.sent_by(n, p, ranks) == pytest.approx((ring, owners))
    assert n < 1024 or found.times == pytest.approx(ring / owners)


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
