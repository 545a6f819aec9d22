"""Chapter 5: DDP and RPC together equal one process, free and constrained."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hosts import PATIENCE
from roles import WAYS, raise_error
from running import LONG
from torch import nn
from torch.distributed import rpc
from torch.nn import functional as F

from cdopt_tutorial.calls import gradients
from cdopt_tutorial.data.bags import Bags, BagSplit, Shard, digit_bags, shards
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.hybrid import (
    HybridConfig,
    Job,
    run,
    run_locally,
    system,
)
from cdopt_tutorial.hybrid.model import SEMANTICS
from cdopt_tutorial.hybrid.system import first_weights
from cdopt_tutorial.hybrid.table import Table
from cdopt_tutorial.run import (
    Role,
    Trace,
    Wire,
    WorkerError,
    launch,
    process_group,
    serve,
)

# The last joint batch of a pass has 11 of 32 images, few or none of some trainer.
STEPS = 11  # two passes of FEW images and a part of a third
FEW = 4 * 32 + 11
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
    """A part of the digits: 11 joint batches a pass, the last one uneven."""
    whole = digit_bags()
    return replace(
        whole,
        train=whole.train.select(torch.arange(10 * 32 + 11)),
        valid=whole.valid.select(torch.arange(50)),
        test=whole.test.select(torch.arange(50)),
    )


@pytest.fixture
def few(data):
    """Fewer of them: 5 joint batches a pass."""
    return replace(data, train=data.train.select(torch.arange(FEW)))


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
    def test_with_one_process(self, few, way):
        for how in EXACTLY:
            job = Job(replace(EXACT, **how), few)
            result = run(job, attach=WAYS[way])
            assert_equal_to_local(result, job)
        assert min(result.trainers[1].images) == 0


class Twin:
    """The same training in plain torch, by formulas and a loop of its own."""

    def __init__(self, config, begin):
        self.config = config
        self.weights = {name: w.clone().requires_grad_() for name, w in begin.items()}

    def scores(self, bags):
        """Scores, and the penalty."""
        penalty = 0.0
        table, dense, bias = self.weights.values()
        if self.config.constrained == "table":  # columns of norm 1
            squares = table.square().sum(0)
            table, penalty = 2 * table / (1 + squares), (squares - 1).square().sum()
        if self.config.constrained == "dense":  # orthonormal rows
            gram = dense @ dense.T
            penalty = (gram - torch.eye(len(gram))).square().sum()
            dense = 1.5 * dense - 0.5 * gram @ dense
        vectors = table[bags.tokens].sum(1)
        return vectors @ dense.T + bias, self.config.penalty_param * penalty

    def losses_of_epoch(self, epoch, train, optimizer):
        generator = torch.Generator().manual_seed(1000 * self.config.seed + epoch)
        order = torch.randperm(len(train), generator=generator)
        for chosen in order.split(self.config.batch_size):
            bags = train.select(chosen)
            scores, penalty = self.scores(bags)
            loss = F.cross_entropy(scores, bags.labels)
            optimizer.zero_grad()
            (loss + penalty).backward()
            optimizer.step()
            yield loss.item()

    @torch.no_grad()
    def score(self, bags):
        scores, _ = self.scores(bags)
        right = sum(s.argmax() == k for s, k in zip(scores, bags.labels, strict=True))
        return right.item() / len(bags), F.cross_entropy(scores, bags.labels).item()


def drawn(config, data):
    """Initial parameters on their manifolds, which no layer drew."""
    table = torch.randn(data.num_tokens, config.embedding, dtype=torch.float64)
    dense = torch.randn(10, config.embedding, dtype=torch.float64)
    names = {part: "weight" for part in ("table", "dense")}
    if config.constrained is not None:
        names[config.constrained] = "parametrizations.weight.original"
    return {
        f"table.{names['table']}": table / table.norm(dim=0),
        f"dense.{names['dense']}": torch.linalg.qr(dense.T)[0].T.contiguous(),
        "dense.bias": torch.randn(10, dtype=torch.float64),
    }


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [("free", "adam"), ("stiefel", "sgd"), ("oblique table", "adam")],
)
def test_one_process_is_plain_torch(data, kind, optimizer):
    config = replace(
        EXACT, max_steps=None, epochs=2, seed=5, optimizer=optimizer, lr=0.02,
        penalty_param=0.3, **KINDS[kind],
    )  # fmt: skip
    begin = drawn(config, data)
    twin, losses, valid = Twin(config, begin), [], []
    if optimizer == "adam":
        stepper = torch.optim.Adam(twin.weights.values(), 0.02)
    else:
        stepper = torch.optim.SGD(twin.weights.values(), 0.02, momentum=0.9)
    for epoch in range(2):
        losses.append(list(twin.losses_of_epoch(epoch, data.train, stepper)))
        valid.append(twin.score(data.valid))
    found = run_locally(Job(config, data, begin))
    assert found.losses == pytest.approx(losses[0] + losses[1], rel=1e-10)
    assert max_difference(found.weights, twin.weights) <= 1e-10
    notes = found.trainers[0].progress
    assert [(note.epoch, note.step) for note in notes] == [(1, 11), (2, 22)]
    scores = [(note.valid.accuracy, note.valid.loss) for note in notes]
    scores.append((found.test.accuracy, found.test.loss))
    for one, other in zip(scores, [*valid, twin.score(data.test)], strict=True):
        assert one == pytest.approx(other, rel=1e-10)
    assert sum(found.trainers[0].images) == 2 * 331
    means = [(32 * sum(each[:10]) + 11 * each[10]) / 331 for each in losses]
    assert [n.train_loss for n in notes] == pytest.approx(means, rel=1e-10)


def phases_of(trainer, *watched):
    """By name, the phases between two barriers in which a trainer calls what."""
    found, now = {name: set() for _, name in watched}, [0]

    def watch(owner, name):
        function = getattr(owner, name)

        def run(*args):
            found[name].add(now[0])
            return function(*args)

        setattr(owner, name, run)

    for each in watched:
        watch(*each)
    trainer.barrier = lambda: now.append(now.pop() + 1)
    trainer.train()
    return found


def test_nobody_goes_on_while_another_one_is_needed_or_evaluates(data):
    """The original's steps do not wait for each other, so the loop has to."""
    few = replace(data, train=data.train.select(torch.arange(8)))
    config = replace(
        EXACT, semantics="original", epochs=2, max_steps=None, **KINDS["oblique table"]
    )
    job = Job(config, few)
    table = system.make_table(job)
    one, two = (system.Trainer(table, task) for task in system.tasks(job))
    names = (one, "step"), (one, "score"), (one.constraints, "project_")
    first = phases_of(one, *names)
    second = phases_of(two, (two, "step"), (two.constraints, "feasibility"))
    at_once = {(a, b) for a in first for b in second if first[a] & second[b]}
    assert at_once == {("step", "step"), ("score", "feasibility")}
    assert all(first.values()) and first["score"].isdisjoint(first["project_"])


class TestOriginalSemantics:
    def test_the_table_moves_by_the_sum_and_the_layer_by_the_mean(self, data):
        """In one step of plain SGD, of trainers with different numbers of images."""
        config = replace(
            EXACT, semantics="original", shares=(3.0, 1.0), momentum=0.0, lr=0.5,
            max_steps=1,
        )  # fmt: skip
        job = Job(config, data)
        begin, found, alone = first_weights(job), run(job), []
        for shard in shards(data.train, config.shares):
            batch = next(shard.batches(config.batch_size, 1000 * config.seed))
            twin = Twin(config, begin)
            scores, _ = twin.scores(batch.bags)
            F.cross_entropy(scores, batch.bags.labels).backward()
            alone.append({name: w.grad for name, w in twin.weights.items()})
        for name, weight in found.weights.items():
            total = sum(each[name] for each in alone)
            expected = total if name.startswith("table") else total / 2
            moved = weight - begin[name]
            torch.testing.assert_close(moved, -0.5 * expected, rtol=0, atol=1e-13)
        assert found.replica_difference == 0

    def test_every_trainer_has_a_momentum_of_its_own(self):
        """Shown where the trainers' images have no token in common."""
        tokens = torch.tensor([[0, 1], [1, 2], [2, 0], [3, 4], [4, 5]])
        labels = torch.tensor([0, 1, 1, 0, 1])
        bags = Bags(tokens, labels)
        config = HybridConfig(
            semantics="original", shares=(3, 2), embedding=3, batch_size=5, epochs=4,
            lr=0.3, dtype="float64",
        )  # fmt: skip
        job = Job(config, BagSplit(bags, bags, bags, num_tokens=6, num_classes=2))
        found = run(job).weights
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
        assert max_difference(found, begin) <= 1e-12


def stall():
    """Have this process stall in every lookup."""

    def stalled(*_):
        time.sleep(LONG)

    Table.forward = stalled


@dataclass(frozen=True, eq=False)
class Slow(Shard):
    """Data that call a function at the third batch."""

    disturb: Callable[[], object]

    def batches(self, batch_size, seed):
        for number, batch in enumerate(super().batches(batch_size, seed)):
            if number == 2:
                self.disturb()
            yield batch


def play(job, master, *args, **options):
    """What a master of one's own returns, which drives a job's workers."""
    serving = [f"trainer{rank}" for rank in range(job.config.num_trainers)] + ["ps"]
    roles = {name: Role(serve, num_threads=1) for name in serving}
    return launch(roles | {"master": Role(master, (job, *args))}, **options)["master"]


def disturbed_master(job, numbers, disturb):
    """A master with some trainers that are disturbed before their third step."""
    tasks = system.tasks(job)
    for number in numbers:
        slow = Slow(**vars(tasks[number].shard), disturb=disturb)
        tasks[number] = replace(tasks[number], shard=slow)
    return system.drive(job, tasks)


STEP = 12  # seconds for a call, or a sum: enough on a busy machine


class TestTrouble:
    def failure(self, data, disturb, **options):
        job = Job(replace(EXACT, max_steps=None), data)
        with pytest.raises(WorkerError) as caught:
            play(job, disturbed_master, [1], disturb, deadline=PATIENCE, **options)
        return caught.value

    @pytest.mark.parametrize(
        ("disturb", "named", "place"),
        [
            (partial(time.sleep, LONG), "trainer1", "batches"),  # others in DDP's sum
            (partial(rpc.rpc_sync, "ps", stall), "ps", "stalled"),
        ],
    )
    def test_whoever_stalls_is_named_not_who_waits(self, data, disturb, named, place):
        error = self.failure(data, disturb, rpc_timeout=STEP)
        assert error.worker == named and f"in {place}" in error.details
        assert "deadline" not in error.reason  # a call or a sum has timed out

    def test_a_trainer_that_raises_is_named(self, data):
        error = self.failure(data, raise_error)
        assert error.worker == "trainer1"
        assert "seven times six" in error.details


def test_the_loops_may_take_longer_than_the_time_out(data):
    job = Job(replace(EXACT, max_steps=4), data)
    nap = [0, 1], partial(time.sleep, 8.5)
    histories = play(job, disturbed_master, *nap, rpc_timeout=8.0)
    assert [len(each.losses) for each in histories] == [4, 4]


def counting_master(job):
    """A master that returns what is left on the server after a run with cuts."""
    system.drive(job, system.tasks(job))
    return rpc.rpc_sync("ps", kept)


def kept():
    return len(gradients._kept_gradients), len(gradients._kept_graphs)


@pytest.mark.parametrize("semantics", SEMANTICS)
def test_no_step_leaves_anything_on_the_server(data, semantics):
    job = Job(replace(EXACT, max_steps=3, semantics=semantics), data)
    attach = gradients.cut_always
    assert play(job, counting_master, attach=attach) == (0, 0)


class TestBegin:
    def test_depends_on_the_seed_alone(self, data):
        jobs = [Job(replace(EXACT, seed=seed), data) for seed in (3, 3, 4)]
        one, again, other = map(first_weights, jobs)
        assert max_difference(one, again) == 0
        assert not any(torch.equal(one[name], other[name]) for name in one)
        assert one["table.weight"].std().item() == pytest.approx(0.01, rel=0.05)


def test_who_calls_whom(data):
    trace, trainers = Trace(), ("trainer0", "trainer1")
    run(Job(replace(EXACT, max_steps=2, epochs=1), data), trace=trace)
    called = {(call.caller, call.callee) for call in trace.calls}
    assert called >= {(trainer, "ps") for trainer in ("master", *trainers)}
    assert called >= {("master", trainer) for trainer in trainers}
    own = {"lookup", "dense forward", "backward", "all-reduce", "optimizer"}
    spans = {(span.worker, span.name) for span in trace.spans}
    expected = {(trainer, name) for trainer in trainers for name in own}
    assert spans == expected | {("ps", "table backward")}


def test_a_trainer_is_handed_its_own_part_of_the_data_only(data):
    wire = Wire()
    job = Job(replace(EXACT, max_steps=1, epochs=1), data)
    run(job, wire=wire)
    shard = data.train.tokens.nbytes / 2
    # The first one has the held-out parts, too.
    assert shard < wire.received["trainer1"] < 1.5 * shard < wire.received["trainer0"]


def differ(rank):
    """A trainer's role: the difference of two replicas before and after one moves."""
    process_group.join(rank, 2, gpus=())
    layer = nn.Linear(2, 3, dtype=torch.float64)
    system.replicate(layer, "cpu")
    differences = [system.replica_difference(layer)]
    with torch.no_grad():
        for perturbed in (0, 1, 1):
            layer.weight[1, 1] += 0.25 * (rank == perturbed)
            layer.bias[2] -= 0.125 * (rank == perturbed)
            differences.append(system.replica_difference(layer))
    return differences


def test_a_replica_that_is_not_like_the_other_is_noticed():
    found = launch({f"trainer{i}": Role(differ, (i,)) for i in range(2)})
    assert found["trainer0"] == found["trainer1"]
    assert found["trainer0"] == pytest.approx([0.0, 0.25, 0.0, 0.25], rel=1e-12)


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


class TestBags:
    def test_a_bag_has_a_token_for_each_pixel_and_a_split_its_seed(self):
        data = digit_bags()
        assert data.num_tokens == 64 * 17
        sizes = [len(part) for part in (data.train, data.valid, data.test)]
        assert sizes == [1258, 180, 359]  # of 1797; a tenth and a fifth are held out
        assert (data.train.tokens // 17 == torch.arange(64)).all()
        again, other = digit_bags(), digit_bags(seed=1)
        assert torch.equal(data.test.tokens, again.test.tokens)
        assert not torch.equal(data.test.labels, other.test.labels)

    @pytest.mark.parametrize("shares", [(3.0, 1.0), (5.0, 1.0, 2.0)])
    def test_the_shards_batches_are_the_joint_ones(self, data, shares):
        (whole,), parts = shards(data.train, (1.0,)), shards(data.train, shares)
        each = [part.batches(32, seed=3) for part in (whole, *parts)]
        sizes = []
        for joint, *own in zip(*each, strict=True):
            assert {one.joint for one in own} == {len(joint.bags)}
            together = [t for one in own for t in as_set(one.bags)]
            assert sorted(together) == sorted(as_set(joint.bags))
            sizes.append(joint.joint)
        assert sizes == [32] * 10 + [11]


def as_set(bags):
    return [tuple(tokens) for tokens in bags.tokens.tolist()]
