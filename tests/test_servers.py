"""A table over several servers equals one on one server, and outlives a change."""

import os
import resource
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cdopt_tutorial.calls import alone, gradients
from cdopt_tutorial.constraints import dissolve, project_
from cdopt_tutorial.data.bags import Bags, BagSplit
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.hybrid import HybridConfig, Job, run, run_locally, system, table
from cdopt_tutorial.hybrid.checkpoint import load
from cdopt_tutorial.run import WorkerError
from cdopt_tutorial.training import save_whole

KINDS = {
    "free": {},
    "dense": {"manifold": "stiefel"},
    "orthonormal": {"manifold": "stiefel", "where": "server"},
    "columns": {"manifold": "oblique", "where": "server"},
    "rows": {"manifold": "oblique", "where": "server", "unit": "rows"},
}
ADAM = {"optimizer": "adam", "lr": 0.01}
EXACT = HybridConfig(
    embedding=3, batch_size=8, epochs=4, num_servers=2, dtype="float64"
)
TOLERANCE = 1e-10


def drawn(num_tokens: int, seed: int = 0, count: int = 20) -> BagSplit:
    """Bags of random tokens, of which some servers may have none."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(num_tokens, (count, 5), generator=generator)
    bags = Bags(tokens, torch.randint(3, (count,), generator=generator))
    return BagSplit(bags, bags, bags, num_tokens, num_classes=3)


def assert_as_one_process(job, **options):
    found, local = run(job, **options), run_locally(job)
    assert max_difference(found.weights, local.weights) <= TOLERANCE
    assert found.losses == pytest.approx(local.losses, abs=TOLERANCE)
    assert found.test.loss == pytest.approx(local.test.loss, abs=TOLERANCE)
    if job.config.constrained:
        pairs = [(r.feasibility, r.projected.feasibility) for r in (found, local)]
        for there, here in zip(*pairs, strict=True):
            assert there.weight == pytest.approx(here.weight, abs=1e-9)
            assert there.mapped == pytest.approx(here.mapped, abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attach", [None, gradients.cut_always])
def test_workers_have_the_parameters_of_one_process(kind, attach):
    config = replace(EXACT, max_steps=7, **KINDS[kind])
    one, three = {"num_trainers": 1}, {"num_servers": 3, **ADAM}
    # Of four rows a server has fewer than there are columns.
    for how, num_tokens in (one, 11), (three, 4):
        job = Job(replace(config, **how), drawn(num_tokens))
        assert_as_one_process(job, attach=attach)


@settings(deadline=None)
@given(
    st.sampled_from(["free", "orthonormal", "columns"]), st.integers(2, 4),
    st.integers(4, 30), st.integers(0, 99), st.booleans(),
)  # fmt: skip
def test_a_lookup_its_gradient_and_projection_are_those_of_one_table(
    kind, servers, tokens, seed, dependent
):
    """Of parts in this process, against torch's table with this book's constraint."""
    config = replace(EXACT, num_servers=servers, seed=seed, **KINDS[kind])
    data = drawn(tokens, seed)
    start = torch.randn(tokens, 3, dtype=torch.float64)
    if kind == "columns" and dependent:
        start = start[:, :1].repeat(1, 3)
    one = torch.nn.EmbeddingBag.from_pretrained(start, False, mode="sum")
    if config.constrained:
        dissolve(one, "weight", config.manifold, 0.5, transpose=kind == "columns")
    (whole,) = one.parameters()
    with torch.no_grad():
        whole.mul_(1.1)
    begin = {table.name_of_table(config): whole.detach().clone()}
    with alone():
        spread = system.make_table(Job(config, data, begin))
        bags, factors = data.train.tokens, torch.randn(20, 3, dtype=torch.float64)
        found, expected = spread.lookup(bags), one(bags)
        torch.testing.assert_close(found, expected)
        (found * factors).sum().backward()
        (expected * factors).sum().backward()
        for server, part in enumerate(spread.parts):
            (weight,) = part.local_value().parameters()
            torch.testing.assert_close(weight.grad, whole.grad[server::servers])
        if config.constrained:
            spread.project_()
            project_(one)
        torch.testing.assert_close(spread.weight(), whole.detach())


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_rows_drawn_in_chunks_are_those_of_one_table(servers, monkeypatch):
    config = replace(EXACT, num_servers=servers)
    whole = table.Table(40, replace(config, num_servers=1)).weight
    monkeypatch.setattr(table, "CHUNK", 16)
    for server in range(servers):
        part = table.Table(40, config, server).weight
        assert torch.equal(part, whole[server::servers])


def limited(spare: int) -> None:
    """Allow this worker so many bytes more of data than it has; see `attach`."""
    most = psutil.Process().memory_info().data + spare
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


class TestMemory:
    """A worker's own threads and buffers take less than 150 MiB."""

    OWN = 150 * 2**20

    @pytest.mark.parametrize("kind", ["free", "orthonormal"])
    def test_two_servers_hold_what_one_can_not(self, kind):
        tokens = 600_000  # a part has more than 32 MiB: below, freed memory may be kept
        config = replace(
            EXACT, embedding=32, max_steps=2, gather=False, dtype="float32",
            **KINDS[kind],
        )  # fmt: skip
        data = drawn(tokens)
        spare = self.OWN + table.training_bytes(tokens // 2, config)
        attach = partial(limited, spare)
        with pytest.raises(WorkerError) as caught:
            run(Job(replace(config, num_servers=1), data), attach=attach)
        needed = table.training_bytes(tokens, config) / 2**20
        assert caught.value.worker == "ps"
        assert f"no {needed:,.0f} MiB to train 600,000 rows" in str(caught.value)
        found = run(Job(config, data), attach=attach)
        assert found.losses == pytest.approx(run_locally(Job(config, data)).losses)


class TestCheckpoint:
    @pytest.mark.parametrize("kind", KINDS)
    def test_of_two_servers_is_resumed_by_three(self, kind, tmp_path):
        how = ADAM if kind in ("rows", "free") else {}
        config, data = replace(EXACT, **KINDS[kind], **how), drawn(11)
        run(Job(replace(config, epochs=2), data, keep=tmp_path))
        assert os.listdir(tmp_path) == ["epoch-2"]  # older ones are gone
        more = {"num_servers": 3, "num_trainers": 3, "shares": (3, 1, 2)}
        found = run(Job(replace(config, **more), data, resume=tmp_path))
        whole = run_locally(Job(config, data))
        assert max_difference(found.weights, whole.weights) <= TOLERANCE
        assert found.losses == pytest.approx(whole.losses[6:], abs=TOLERANCE)
        alone = run_locally(Job(config, data, resume=tmp_path))
        assert max_difference(alone.weights, whole.weights) <= TOLERANCE

    def test_that_is_damaged_or_does_not_fit_is_refused_in_one_line(self, tmp_path):
        job = Job(EXACT, drawn(11), resume=tmp_path)
        kept = run_locally(Job(replace(EXACT, epochs=2), job.data, keep=tmp_path))
        done = run_locally(replace(job, config=replace(EXACT, epochs=2)))
        assert (done.losses, done.test) == ([], kept.test)  # only evaluated
        (tmp_path / "epoch-2").rename(tmp_path / "epoch-10")
        (tmp_path / "epoch-11").mkdir()  # its servers had saved, the trainers had not
        folder = load(tmp_path).folder
        assert folder.name == "epoch-10" and load(folder).folder == folder
        (tmp_path / "epoch-x").mkdir()  # another program's
        (tmp_path / "epoch-x/trainers.pt").touch()
        assert load(tmp_path).folder == folder
        for name, value in (("embedding", 2), ("seed", 2), ("lr", 1.0)):
            other = replace(job, config=replace(EXACT, **{name: value}))
            assert_refused(other, f"has {name} {getattr(EXACT, name)}, but {value} was")
        assert_refused(replace(job, data=drawn(12)), "has num_tokens 11, but 12 was")
        assert_refused(replace(job, resume=Path("nowhere")), "no complete")
        original = replace(EXACT, semantics="original")
        with pytest.raises(ValueError, match="must be exact"):
            run(Job(original, job.data, keep=tmp_path))
        file = folder / "rows-0.pt"
        content, weight = file.read_bytes(), torch.load(file)["weight"].numpy()
        flipped = weight.tobytes()[:-1] + b"~"
        file.write_bytes(content.replace(weight.tobytes(), flipped))
        assert_refused(job, r"rows-0\.pt': it is damaged")
        trainers = folder / "trainers.pt"
        trainers.write_bytes(trainers.read_bytes()[:-100])
        assert_refused(job, r"trainers\.pt': it is damaged")
        save_whole(trainers, {"weights": torch.ones(2)})
        assert_refused(job, r"trainers\.pt': another program made it")


def assert_refused(job, said):
    with pytest.raises(ValueError, match=said) as refused:
        run_locally(job)
    assert "\n" not in str(refused.value)
