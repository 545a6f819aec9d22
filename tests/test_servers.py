"""A table over several servers equals one on one server, and outlives a change."""

import os
import resource
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_hybrid import Slow
from torch.distributed import rpc

from cdopt_tutorial.calls import alone, gradients, remote
from cdopt_tutorial.constraints import dissolve, project_
from cdopt_tutorial.data.bags import Bags, BagSplit
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.hybrid import HybridConfig, Job, run, run_locally, system, table
from cdopt_tutorial.run import Role, Wire, WorkerError, launch, serve

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
    for how in ({"num_trainers": 1}, {"num_servers": 3, **ADAM}):
        assert_as_one_process(Job(replace(config, **how), drawn(11)), attach=attach)


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from(sorted(KINDS)), st.integers(1, 3), st.integers(1, 3),
    st.integers(4, 40), st.integers(0, 99), st.sampled_from([{}, ADAM]),
)  # fmt: skip
@example("orthonormal", 3, 2, 4, 0, {})  # fewer rows on a server than columns
def test_whatever_the_shape_and_the_seed(kind, servers, trainers, tokens, seed, how):
    config = replace(EXACT, max_steps=4, seed=seed, **KINDS[kind], **how)
    config = replace(config, num_servers=servers, num_trainers=trainers)
    assert_as_one_process(Job(config, drawn(tokens, seed)))


@settings(deadline=None)
@given(
    st.sampled_from(["free", "orthonormal", "columns"]), st.integers(2, 4),
    st.integers(4, 30), st.integers(0, 99),
)  # fmt: skip
def test_a_lookup_its_gradient_and_projection_are_those_of_one_table(
    kind, servers, tokens, seed
):
    """Of parts in this process, against torch's table with this book's constraint."""
    config = replace(EXACT, num_servers=servers, seed=seed, **KINDS[kind])
    data = drawn(tokens, seed)
    start = torch.randn(tokens, 3, dtype=torch.float64)
    one = torch.nn.EmbeddingBag.from_pretrained(start.clone(), False, mode="sum")
    if config.constrained:
        dissolve(one, "weight", config.manifold, 0.5, transpose=kind == "columns")
    with alone():
        spread = system.make_table(Job(config, data, begin={
            table.name_of_table(config): next(one.parameters()).detach() * 1.1
        }))  # fmt: skip
        with torch.no_grad():
            next(one.parameters()).mul_(1.1)
        bags, factors = data.train.tokens, torch.randn(20, 3, dtype=torch.float64)
        found, expected = spread.lookup(bags), one(bags)
        torch.testing.assert_close(found, expected)
        (found * factors).sum().backward()
        (expected * factors).sum().backward()
        parts = [each.local_value() for each in spread._parts]
        for server, part in enumerate(parts):
            (weight,), (whole,) = part.parameters(), one.parameters()
            torch.testing.assert_close(weight.grad, whole.grad[server::servers])
        if config.constrained:
            spread.project_()
            project_(one)
        torch.testing.assert_close(spread.weight(), next(one.parameters()).detach())


def test_columns_that_depend_on_each_other_have_norm_1_after_a_projection():
    config = replace(EXACT, **KINDS["columns"])
    columns = torch.randn(9, 1, dtype=torch.float64).expand(9, 3)
    begin = {table.name_of_table(config): 1.2 * columns / columns.norm(dim=0)}
    with alone():
        spread = system.make_table(Job(config, drawn(9), begin))
        spread.project_()
        torch.testing.assert_close(spread.weight().norm(dim=0), torch.ones(3).double())


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_rows_drawn_in_chunks_are_those_of_one_table(servers, monkeypatch):
    config = replace(EXACT, num_servers=servers)
    whole = table.Table(40, replace(config, num_servers=1)).weight
    monkeypatch.setattr(table, "CHUNK", 16)
    for server in range(servers):
        part = table.Table(40, config, server).weight
        assert torch.equal(part, whole[server::servers])


class TestRefused:
    @pytest.mark.parametrize(
        ("config", "said"),
        [
            ({"num_servers": 12}, "num_servers is 12, but must be 1 to 11"),
            (KINDS["orthonormal"] | {"embedding": 12}, "embedding is 12"),
        ],
    )
    def test_in_one_line_before_any_process_starts(self, config, said):
        with pytest.raises(ValueError, match=said) as refused:
            run(Job(replace(EXACT, **config), drawn(11)))
        assert "\n" not in str(refused.value)


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


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def master(job, disturb):
    """A master whose second trainer disturbs the run before its third step."""
    tasks = system.tasks(job)
    tasks[1] = replace(tasks[1], shard=Slow(**vars(tasks[1].shard), disturb=disturb))
    return system.drive(job, tasks)


def end_of(worker):
    rpc.rpc_sync(worker, die)


def test_one_of_two_servers_that_dies_is_named():
    job = Job(EXACT, drawn(11))
    roles = {name: Role(serve) for name in ("trainer0", "trainer1", "ps0", "ps1")}
    roles["master"] = Role(master, (job, partial(end_of, "ps1")))
    with pytest.raises(WorkerError) as caught:
        launch(roles)
    assert caught.value.worker == "ps1" and "SIGKILL" in str(caught.value)


def test_each_server_is_sent_its_own_part_of_the_bags():
    config = replace(EXACT, num_servers=4, max_steps=1, batch_size=4000)
    data, wire = drawn(400, count=4000), Wire()
    even = replace(data.train, tokens=data.train.tokens // 2 * 2)  # none of odd servers
    run(Job(config, replace(data, train=even)), wire=wire)
    received = [wire.received[f"ps{server}"] for server in range(4)]
    half = even.tokens.nbytes / 2
    for one in 0, 2:
        for none in 1, 3:
            assert 0.8 * half < received[one] - received[none] < 1.2 * half


class TestCheckpoint:
    def parts(self, tmp_path, **kind):
        config = replace(EXACT, **kind)
        data = drawn(11)
        kept = run(Job(replace(config, epochs=2), data, keep=tmp_path / "kept"))
        return config, data, tmp_path / "kept", kept

    @pytest.mark.parametrize("kind", KINDS)
    def test_of_two_servers_is_resumed_by_three(self, kind, tmp_path):
        how = ADAM if kind in ("rows", "free") else {}
        config, data, keep, _ = self.parts(tmp_path, **KINDS[kind], **how)
        assert os.listdir(keep) == ["epoch-2"]  # older ones are gone
        more = {"num_servers": 3, "num_trainers": 3, "shares": (3, 1, 2)}
        found = run(Job(replace(config, **more), data, resume=keep))
        whole = run_locally(Job(config, data))
        assert max_difference(found.weights, whole.weights) <= TOLERANCE
        assert found.losses == pytest.approx(whole.losses[6:], abs=TOLERANCE)
        alone = run_locally(Job(config, data, resume=keep))
        assert max_difference(alone.weights, whole.weights) <= TOLERANCE

    def test_that_is_not_complete_is_passed_over(self, tmp_path):
        config, data, keep, _ = self.parts(tmp_path)
        (keep / "epoch-10").mkdir()  # its servers had saved, the trainers had not
        (keep / "epoch-2").rename(keep / "epoch-3")
        assert system.load(keep).folder.name == "epoch-3"

    def test_that_does_not_fit_is_refused_in_one_line(self, tmp_path):
        config, data, keep, _ = self.parts(tmp_path)
        file = keep / "epoch-2" / "trainers.pt"
        wrong: list[tuple[Job, str]] = [
            (Job(replace(config, embedding=2), data), "has embedding 3, but 2"),
            (Job(replace(config, seed=2), data), "has seed 1, but 2"),
            (Job(config, drawn(12)), "has 11 tokens, the data 12"),
            (Job(replace(config, epochs=2), data), "epochs is 2, but the checkpoint"),
        ]
        for job, said in wrong:
            self.assert_refused(replace(job, resume=keep), said)
        more = {"lr": 1.0, "epochs": 9, "max_steps": 9, "gather": False}
        system.load(keep).fits(replace(config, **more), 11)  # these may change
        job = Job(config, data, resume=keep)
        file.write_bytes(file.read_bytes()[:-100])
        self.assert_refused(job, "is damaged, or no checkpoint")
        torch.save({"format": "another"}, file)
        self.assert_refused(job, "is damaged, or no checkpoint")
        self.assert_refused(replace(job, resume=Path("nowhere")), "no complete")
        original = replace(config, semantics="original")
        self.assert_refused(Job(original, data, keep=keep), "must be exact")

    def assert_refused(self, job, said):
        with pytest.raises(ValueError, match=said) as refused:
            run(job)
        assert "\n" not in str(refused.value)

    def test_whose_file_of_a_server_is_damaged_or_gone_names_it(self, tmp_path):
        config, data, keep, _ = self.parts(tmp_path)
        file = keep / "epoch-2" / "rows-1.pt"
        content = file.read_bytes()
        weight = torch.load(file)["weight"].numpy().tobytes()
        assert content.count(weight) == 1
        file.write_bytes(content.replace(weight, weight[:-1] + b"~"))
        with pytest.raises(WorkerError, match=r"rows-1\.pt'?: it is damaged"):
            run(Job(config, data, resume=keep))
        file.unlink()
        with pytest.raises(WorkerError, match=r"rows-1\.pt"):
            run(Job(config, data, resume=keep))


def test_a_call_that_was_not_waited_for_refuses_a_backward_pass():
    found = launch({"ps0": Role(serve), "trainer0": Role(ask_in_vain)})["trainer0"]
    assert (
        found == "a call of this context has failed or was not waited for: "
        "begin another one"
    )


def ask_in_vain():
    layer = remote("ps0", torch.nn.Linear, 2, 2)
    with gradients.context() as context:
        first = gradients.call(layer, "forward", torch.ones(2))
        gradients.ask(layer, "forward", torch.ones(2))
        with pytest.raises(RuntimeError) as caught:
            gradients.backward(context, first.sum())
    return str(caught.value)
