"""Chapter 5: DDP and RPC together equal one process, free and constrained."""

import time
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from hosts import PATIENCE
from roles import WAYS, raise_error
from running import LONG
from torch.distributed import rpc
from torch.nn import functional as F

from cdopt_tutorial.calls import gradients
from cdopt_tutorial.data.bags import Bags, BagSplit, digit_bags
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.hybrid import HybridConfig, Job, run, run_locally, system
from cdopt_tutorial.hybrid.model import SEMANTICS
from cdopt_tutorial.hybrid.system import first_weights
from cdopt_tutorial.hybrid.table import Table
from cdopt_tutorial.probes.attach import wrap
from cdopt_tutorial.run import Trace, Wire, WorkerError, process_group

# The last joint batch of a pass has 11 of 32 images, few or none of some trainer.
STEPS = 11  # two passes and a part of a third
EXACT = HybridConfig(
    embedding=12, batch_size=32, epochs=99, max_steps=STEPS, dtype="float64"
)
KINDS = {
    "free": {},
    "stiefel": {"manifold": "stiefel"},
    "stiefel by cdopt": {"manifold": "stiefel", "by": "cdopt"},
    "oblique": {"manifold": "oblique"},
    "oblique table": {"manifold": "oblique", "where": "server"},
}


@pytest.fixture(scope="module")
def data() -> BagSplit:
    """A part of the digits: 5 joint batches a pass, the last one uneven."""
    whole = digit_bags()
    return replace(
        whole,
        train=whole.train.select(torch.arange(4 * 32 + 11)),
        valid=whole.valid.select(torch.arange(50)),
        test=whole.test.select(torch.arange(50)),
    )


def assert_equal_to_local(found, job):
    local, constrained = run_locally(job), job.config.constrained
    assert len(found.losses) == len(local.losses) == STEPS
    assert max_difference(local.weights, first_weights(job)) > 0.01  # they moved
    assert max_difference(found.weights, local.weights) <= 5e-11
    assert found.losses == pytest.approx(local.losses, abs=5e-10)
    assert found.replica_difference == 0
    # Every replica of the layer measures itself; the one table is measured once.
    first, *others = (each.feasibility for each in found.trainers)
    assert others == [[] if constrained == "table" else first] * len(others)
    assert len(first) == (STEPS if constrained else 0)
    for one, other in zip(first, local.trainers[0].feasibility, strict=True):
        assert one.weight == pytest.approx(other.weight, abs=1e-9)
    for history in found.trainers if constrained else ():
        assert history.projected.feasibility.mapped < 1e-6


THREE = {"num_trainers": 3, "shares": (5.0, 1.0, 2.0)}
EXACTLY = [
    {"num_trainers": 1} | KINDS["stiefel"],
    THREE | KINDS["stiefel by cdopt"],
    THREE | KINDS["oblique"],
    THREE | {"optimizer": "adam", "lr": 0.01} | KINDS["oblique table"],
    {"num_trainers": 3, "shares": (40.0, 1.0, 1.0)},  # of some batches none
]


class TestEquality:
    @pytest.mark.parametrize("way", WAYS)
    def test_with_one_process(self, data, way):
        for how in EXACTLY:
            job = Job(replace(EXACT, **how), data)
            result = run(job, attach=WAYS[way])
            assert_equal_to_local(result, job)
        assert min(result.trainers[1].images) == 0


def train_plainly(config, data, begin):
    """The same training in plain torch: losses, scores and parameters."""
    weights = {name: w.clone().requires_grad_() for name, w in begin.items()}
    bias = weights["dense.bias"]
    table, dense = (w for w in weights.values() if w is not bias)

    def forward(bags):
        squares, gram = table.square().sum(0), dense @ dense.T
        vectors, w, penalty = table[bags.tokens].sum(1), dense, 0.0
        if config.constrained == "table":  # columns of norm 1
            vectors, penalty = 2 * vectors / (1 + squares), (squares - 1).square().sum()
        if config.constrained == "dense":  # orthonormal rows
            w = 1.5 * dense - 0.5 * gram @ dense
            penalty = (gram - torch.eye(len(gram))).square().sum()
        return vectors @ w.T + bias, config.penalty_param * penalty

    @torch.no_grad()
    def score(bags):
        scores, _ = forward(bags)
        right = sum(s.argmax() == k for s, k in zip(scores, bags.labels, strict=True))
        return right.item() / len(bags), F.cross_entropy(scores, bags.labels).item()

    kind = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[config.optimizer]
    more = {} if config.optimizer == "adam" else {"momentum": config.momentum}
    optimizer = kind(weights.values(), config.lr, **more)
    losses, scores = [], []
    for epoch in range(config.epochs):
        generator = torch.Generator().manual_seed(1000 * config.seed + epoch)
        order = torch.randperm(len(data.train), generator=generator)
        for chosen in order.split(config.batch_size):
            bags = data.train.select(chosen)
            found, penalty = forward(bags)
            loss = F.cross_entropy(found, bags.labels)
            optimizer.zero_grad()
            (loss + penalty).backward()
            optimizer.step()
            losses.append(loss.item())
        scores.append(score(data.valid))
    return losses, [*scores, score(data.test)], weights


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [("free", "adam"), ("stiefel", "sgd"), ("oblique table", "adam")],
)
def test_one_process_is_plain_torch(data, kind, optimizer):
    config = replace(
        EXACT, max_steps=None, epochs=2, seed=5, optimizer=optimizer, lr=0.02,
        penalty_param=0.3, **KINDS[kind],
    )  # fmt: skip
    job = Job(config, data)
    losses, scores, weights = train_plainly(config, data, first_weights(job))
    found = run_locally(job)
    assert found.losses == pytest.approx(losses, rel=1e-10)
    assert max_difference(found.weights, weights) <= 1e-10
    progress = found.trainers[0].progress
    assert [(note.epoch, note.step) for note in progress] == [(1, 5), (2, 10)]
    means = [(32 * sum(e[:4]) + 11 * e[4]) / 139 for e in (losses[:5], losses[5:])]
    assert [n.train_loss for n in progress] == pytest.approx(means, rel=1e-10)
    notes = [*(note.valid for note in found.trainers[0].progress), found.test]
    for note, expected in zip(notes, scores, strict=True):
        assert (note.accuracy, note.loss) == pytest.approx(expected, rel=1e-10)


def order_of(trainer):
    """What a trainer does with the table, and its barriers."""
    done = []

    def note(plain, name, *args):
        done.append(name)
        return plain(*args)

    for name in "step", "score":
        setattr(trainer, name, partial(note, getattr(trainer, name), name))
    for name in "feasibility", "project_":
        plain = getattr(trainer.constraints, name)
        setattr(trainer.constraints, name, partial(note, plain, name))
    trainer.barrier = lambda: done.append("|")
    trainer.train()
    return " ".join(done)


def test_nobody_goes_on_while_another_one_is_needed_or_evaluates(data):
    """The original's steps do not wait for each other, so the loop has to."""
    few = replace(data, train=data.train.select(torch.arange(8)))
    config = replace(
        EXACT, semantics="original", epochs=2, max_steps=None, **KINDS["oblique table"]
    )
    job = Job(config, few)
    table = system.make_table(job)
    one, two = (order_of(system.Trainer(table, *of)) for of in system.divide(job))
    end = "score | project_ | score feasibility"
    assert one == "step feasibility | score | " * 2 + end
    assert two == "step | score | " * 2 + "| | score feasibility"


class TestOriginalSemantics:
    def test_the_table_moves_by_the_sum_and_the_layer_by_the_mean(self):
        """For the table every trainer has a momentum of its own.

        Which shows where the trainers' images have no token in common.
        """
        tokens = torch.tensor([[0, 1], [1, 2], [2, 0], [3, 4], [4, 5]])
        labels = torch.tensor([0, 1, 1, 0, 1])
        bags = Bags(tokens, labels)
        config = HybridConfig(
            semantics="original", shares=(3, 2), embedding=3, batch_size=5, epochs=4,
            lr=0.3, dtype="float64",
        )  # fmt: skip
        job = Job(config, BagSplit(bags, bags, bags, num_tokens=6, num_classes=2))
        found = run(job)
        begin = {n: w.requires_grad_() for n, w in first_weights(job).items()}
        table, *dense = begin.values()
        parts = [(tokens[:3], labels[:3]), (tokens[3:], labels[3:])]
        moves = [torch.optim.SGD([table], 0.3, momentum=0.9) for _ in parts]
        move_dense = torch.optim.SGD(dense, 0.3, momentum=0.9)
        for _ in range(4):
            move_dense.zero_grad()
            for move, (some, right) in zip(moves, parts, strict=True):
                move.zero_grad()
                scores = F.linear(table[some].sum(1), *dense)
                F.cross_entropy(scores, right).backward()
                move.step()
            for weight in dense:
                weight.grad /= 2
            move_dense.step()
        assert max_difference(found.weights, begin) <= 1e-12
        assert found.replica_difference == 0


def stall():
    """Have this process stall in every lookup."""

    def stalled(*_):
        time.sleep(LONG)

    Table.forward = stalled


def disturb(ranks, how):
    """Attached: some trainers are disturbed before their third step."""

    def disturbed(step, trainer, batch):
        if trainer.rank in ranks and len(trainer.history.losses) == 2:
            how()
        return step(trainer, batch)

    wrap(system.Trainer.step, disturbed)


STEP = 12  # seconds for a call, or a sum: enough on a busy machine


class TestTrouble:
    def failure(self, data, how, **options):
        job = Job(replace(EXACT, max_steps=None), data)
        with pytest.raises(WorkerError) as caught:
            run(job, attach=partial(disturb, [1], how), deadline=PATIENCE, **options)
        return caught.value

    @pytest.mark.parametrize(
        ("how", "named", "place"),
        [
            (partial(time.sleep, LONG), "trainer1", "disturbed"),  # others in DDP's sum
            (partial(rpc.rpc_sync, "ps", stall), "ps", "stalled"),
        ],
    )
    def test_whoever_stalls_is_named_not_who_waits(self, data, how, named, place):
        error = self.failure(data, how, rpc_timeout=STEP)
        assert error.worker == named and f"in {place}" in error.details
        assert "deadline" not in error.reason  # a call or a sum has timed out

    def test_a_trainer_that_raises_is_named(self, data):
        error = self.failure(data, raise_error)
        assert error.worker == "trainer1"
        assert "seven times six" in error.details


def test_the_loops_may_take_longer_than_the_time_out(data):
    nap = partial(disturb, [0, 1], partial(time.sleep, 8.5))
    found = run(Job(replace(EXACT, max_steps=4), data), attach=nap, rpc_timeout=8.0)
    assert [len(trainer.losses) for trainer in found.trainers] == [4, 4]


def kept():
    return len(gradients._kept_gradients), len(gradients._kept_graphs)


def cut_and_look():
    """Attached: graphs are cut, and trainers end by a look at what is left."""

    def look(train, trainer):
        history = train(trainer)
        history.left = rpc.rpc_sync("ps", kept)
        return history

    gradients.cut_always()
    wrap(system.Trainer.train, look)


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_no_step_leaves_anything_on_the_server(data, semantics):
    job = Job(replace(EXACT, max_steps=3, semantics=semantics), data)
    found = run(job, attach=cut_and_look)
    assert [trainer.left for trainer in found.trainers] == [(0, 0), (0, 0)]


class TestBegin:
    def test_depends_on_the_seed_alone(self, data):
        jobs = [Job(replace(EXACT, seed=seed), data) for seed in (3, 3, 4)]
        one, again, other = map(first_weights, jobs)
        assert max_difference(one, again) == 0
        assert not any(torch.equal(one[name], other[name]) for name in one)
        assert one["table.weight"].std().item() == pytest.approx(0.01, rel=0.05)


def test_who_calls_whom_and_who_is_handed_which_data():
    trace, wire, trainers = Trace(), Wire(), ("trainer0", "trainer1")
    data = digit_bags()
    run(Job(replace(EXACT, max_steps=1), data), trace=trace, wire=wire)
    called = {(call.caller, call.callee) for call in trace.calls}
    assert called >= {(trainer, "ps") for trainer in ("master", *trainers)}
    assert called >= {("master", trainer) for trainer in trainers}
    own = {"lookup", "dense forward", "backward", "all-reduce", "optimizer"}
    spans = {(span.worker, span.name) for span in trace.spans}
    expected = {(trainer, name) for trainer in trainers for name in own}
    assert spans == expected | {("ps", "table backward")}
    shard = data.train.tokens.nbytes / 2
    # The first one has the held-out parts, too.
    assert shard < wire.received["trainer1"] < 1.5 * shard < wire.received["trainer0"]


def move_a_bias(step, trainer, batch):
    if trainer.rank == 1 and len(trainer.history.losses) == 2:
        trainer.dense.bias.data[2] -= 0.25
    return step(trainer, batch)


def test_a_replica_that_is_not_like_the_other_is_noticed(data):
    attach = partial(wrap, system.Trainer.step, move_a_bias)
    found = run(Job(replace(EXACT, max_steps=3), data), attach=attach)
    assert found.replica_difference == pytest.approx(0.25, rel=1e-12)


@pytest.mark.parametrize("num_trainers", range(1, 4))
@pytest.mark.parametrize("num_gpus", range(4))
def test_gloo_wherever_trainers_share_a_gpu(num_trainers, num_gpus):
    gpus = [f"cuda:{number}" for number in range(num_gpus)]
    of = {"world_size": num_trainers, "gpus": gpus}
    found = [process_group.devices(i, **of, ddp_only=True) for i in range(num_trainers)]
    placed = Counter(each.device for each in found)
    shared = max(placed.values()) > 1
    assert set(placed) <= set(gpus or ["cpu"])
    assert len(placed) == min(num_trainers, max(num_gpus, 1))  # none is idle
    assert max(placed.values()) - min(placed.values()) <= 1
    backend = "gloo" if shared or not gpus else "nccl"
    assert {each.backend for each in found} == {backend}
    assert all(each.why.startswith(backend) for each in found)
    # Other strategies than DDP can't share one; by gloo they compute on the CPU.
    others = [process_group.devices(i, **of) for i in range(num_trainers)]
    assert {each.device for each in others} == ({"cpu"} if shared else set(placed))


def test_a_bag_has_a_token_for_each_pixel_and_a_split_its_seed():
    data, again, other = digit_bags(), digit_bags(), digit_bags(seed=1)
    assert data.num_tokens == 64 * 17
    sizes = [len(part) for part in (data.train, data.valid, data.test)]
    assert sizes == [1258, 180, 359]  # of 1797; a tenth and a fifth are held out
    assert (data.train.tokens // 17 == torch.arange(64)).all()
    assert torch.equal(data.test.tokens, again.test.tokens)
    assert not torch.equal(data.test.labels, other.test.labels)
