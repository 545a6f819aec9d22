"""A transformer in copies, shards, parts or stages trains as in one process."""

import itertools
from dataclasses import replace
from functools import cache
from itertools import islice

import pytest
import torch
from shard_roles import fake_group
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from cdopt_tutorial import data, sharding
from cdopt_tutorial.calls.steps import make_optimizer
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.probes import counted
from cdopt_tutorial.sharding import Job, Result, ShardConfig, costs, owned
from cdopt_tutorial.sharding.model import Block, constrain, transformer
from cdopt_tutorial.sharding.system import Trainer, spread, stage_of

pytestmark = pytest.mark.xdist_group("shards")

CORPUS = data.load_corpus(max_vocab=200)
CORPUS = replace(CORPUS, valid=CORPUS.valid[:2_000])
RANKS = {"ddp": 2, "fsdp": 2, "tp": 2, "2d": 4, "pipeline": 2, "pipeline-ddp": 4}
EXACT = 1e-12


def settings(**changed) -> ShardConfig:
    """Those of a short run on the CPU, with three blocks; every step is clipped."""
    shape = {"width": 24, "num_heads": 6, "num_layers": 3, "seq_len": 16}
    constraint = {"manifold": "sphere", "where": "mlp"}
    runs = {"max_steps": 4, "clip": 0.1, "dtype": "float64", "device": "cpu"}
    return ShardConfig(**shape | constraint | runs | changed)


@cache
def job(strategy: str) -> Job:
    """A strategy's job, on the fewest ranks that it needs."""
    return Job(settings(strategy=strategy, num_ranks=RANKS[strategy]), CORPUS)


@cache
def played(strategy: str) -> Result:
    """A run of each, once."""
    return sharding.run(job(strategy))


@cache
def alone() -> Result:
    """The same in one process."""
    return sharding.run_locally(job("fsdp"))


def test_the_longest_window_is_one_column():
    longest = (len(CORPUS.train) - 1) // 16
    Job(settings(seq_len=longest), CORPUS)
    with pytest.raises(ValueError, match=f"must be at most {longest} in"):
        Job(settings(seq_len=longest + 1), CORPUS)


class TestModel:
    def test_the_stages_have_each_layer_once_and_in_order(self):
        for num_layers, num_ranks in itertools.product(range(2, 7), range(1, 5)):
            model = transformer(settings(num_layers=num_layers), 9)
            stages = [stage_of(model, rank, num_ranks) for rank in range(num_ranks)]
            assert [part for stage in stages for part in stage] == list(model)
            blocks = [sum(isinstance(p, Block) for p in stage) for stage in stages]
            assert max(blocks) - min(blocks) <= 1
            assert min(blocks) >= 1 or num_ranks > num_layers

    @pytest.mark.parametrize("optimizer", ["adam", "landing"])
    def test_each_head_is_constrained_by_itself(self, optimizer):
        config = settings(manifold="stiefel", where="attention", optimizer=optimizer)
        model = transformer(config, 9)
        constrain(model, config)
        heads = model.block0.attention.q.weight.unflatten(0, (6, 4))
        one = torch.eye(4, dtype=torch.float64).expand(6, 4, 4)
        torch.testing.assert_close(heads @ heads.mT, one)
        whole = model.block0.attention.q.weight
        assert (whole @ whole.T - torch.eye(24)).abs().max() > 0.1

    def test_2d_cuts_a_layer_for_the_pair_and_again_for_the_copies(self):
        config = settings(strategy="2d", num_ranks=4)
        with fake_group(4):
            model = spread(transformer(config, 9), config, "cpu")
            weight = model.block0.attention.q.weight
            assert weight.to_local().numel() == weight.numel() / 4

    def test_no_token_sees_a_later_one(self):
        model = transformer(settings(), 200)
        tokens = torch.randint(200, (2, 16))
        changed = tokens.clone()
        changed[:, 9:] = (changed[:, 9:] + 1) % 200
        before, after = model(tokens), model(changed)
        torch.testing.assert_close(before[:, :9], after[:, :9])
        assert (before[:, 9:] - after[:, 9:]).abs().amin(dim=(0, 2)).max() > 0


def by_hand(config: ShardConfig) -> tuple[list[float], dict[str, Tensor]]:
    """The training in plain torch: no layer is dissolved, no batch is a stream's."""
    model = transformer(config, len(CORPUS.vocabulary))
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    constrained = [n for n in weights if n.endswith(("up.weight", "down.weight"))]
    for name in constrained:
        weights[name] /= weights[name].norm()
    for weight in weights.values():
        weight.requires_grad_()
    optimizer = torch.optim.Adam(weights.values(), config.lr)
    length = (len(CORPUS.train) - 1) // config.batch_size
    begins, losses = torch.arange(config.batch_size)[:, None] * length, []
    for step in range(config.max_steps):
        at = begins + step * config.seq_len + torch.arange(config.seq_len)
        squares = {name: weights[name].square().sum() for name in constrained}
        mapped = {n: 2 * weights[n] / (1 + square) for n, square in squares.items()}
        scores = functional_call(model, weights | mapped, CORPUS.train[at])
        loss = cross_entropy(scores.transpose(1, 2), CORPUS.train[at + 1])
        losses.append(loss.item())
        penalty = sum((square - 1) ** 2 for square in squares.values())
        optimizer.zero_grad()
        (loss + config.penalty_param * penalty).backward()
        norm = clip_grad_norm_(weights.values(), config.clip)
        assert norm > 2 * config.clip
        optimizer.step()
    return losses, weights


def compare(found: Result, local: Result, exact: float = EXACT) -> None:
    """Parameters, losses and feasibility of ranks and of one process agree."""
    assert max_difference(found.weights, local.weights) <= exact
    assert found.losses == pytest.approx(local.losses, abs=exact)
    ours, theirs = found.feasibility, local.feasibility
    assert ours.layers.keys() == theirs.layers.keys()
    assert ours.weight == pytest.approx(theirs.weight, abs=exact)
    assert ours.mapped == pytest.approx(theirs.mapped, abs=exact)


class TestRun:
    @pytest.mark.parametrize("strategy", RANKS)
    def test_trains_as_one_process(self, strategy):
        found = played(strategy)
        compare(found, alone())
        assert len(found.ranks) == RANKS[strategy]
        assert 0 < found.feasibility.mapped < found.feasibility.weight

    def test_free_stages_in_replicas_train_as_one_process(self):
        free = Job(replace(job("pipeline-ddp").config, manifold="none"), CORPUS)
        found, local = sharding.run(free), sharding.run_locally(free)
        assert max_difference(found.weights, local.weights) <= EXACT

    def test_as_plain_torch_does_that_shares_no_loop(self):
        losses, weights = by_hand(job("fsdp").config)
        assert alone().losses == pytest.approx(losses, abs=EXACT)
        for name, found in alone().weights.items():
            name = name.replace(".parametrizations", "").removesuffix(".original")
            torch.testing.assert_close(found, weights[name], rtol=0, atol=EXACT)

    @pytest.mark.parametrize(
        ("strategy", "optimizer", "off"),
        [("fsdp", "projected", 1e-12), ("2d", "muon", 1), ("pipeline", "landing", 1)],
    )
    def test_rivals_of_dissolving_train_as_one_process(self, strategy, optimizer, off):
        """Muon moves dissolved weights; the others enforce the constraint alone."""
        ranks = 3 if strategy == "fsdp" else RANKS[strategy]
        how = {"manifold": "stiefel", "where": "attention", "lr": 0.05}
        how |= {"strategy": strategy, "num_ranks": ranks, "batch_size": 12}
        job = Job(settings(**how, optimizer=optimizer), CORPUS)
        found = sharding.run(job)
        exact = 1e-10 if optimizer == "muon" else EXACT
        compare(found, sharding.run_locally(job), exact)
        assert found.feasibility.mapped < off
        assert len(found.feasibility.layers) == 12

    @torch.no_grad()
    def test_perplexity_is_of_all_held_out_tokens_and_falls(self):
        config = job("fsdp").config
        model = transformer(config, len(CORPUS.vocabulary))
        constrain(model, config)
        rows = (len(CORPUS.valid) - 1) // 16
        begins, losses = torch.arange(16)[:, None] * rows, []
        for at in torch.arange(rows).split(config.seq_len):
            scores, targets = model(CORPUS.valid[begins + at]), begins + at + 1
            wanted = CORPUS.valid[targets].flatten()
            losses.append(cross_entropy(scores.flatten(0, 1), wanted, reduction="none"))
        start = sharding.perplexity(job("fsdp"), dict(model.named_parameters()))
        assert start == pytest.approx(torch.cat(losses).mean().exp().item(), rel=1e-10)
        assert sharding.perplexity(job("fsdp"), alone().weights) < 0.95 * start


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_parameters_move_one_by_one(name):
    """By torch's default a GPU moves lists, which can't mix plain and sharded ones."""
    optimizer = make_optimizer([torch.ones(2)], settings(optimizer=name))
    assert optimizer.defaults["foreach"] is False


CUT = "q.weight", "k.weight", "v.weight", "out.weight", "up.weight", "down.weight"


@pytest.mark.parametrize(
    ("strategy", "times", "owners"),
    [("ddp", 3, 3), ("fsdp", 1, 3), ("pipeline", 1, 1), ("tp", 3, 3)],
)
def test_each_number_is_owned_by_as_many_of_three_ranks_as_its_strategy_says(
    strategy, times, owners
):
    """Three cut the words and the layers unevenly."""
    shape = {"num_ranks": 3, "batch_size": 15, "num_layers": 4}
    config = settings(strategy=strategy, **shape)
    parts_of = owned(Job(config, CORPUS))
    for name, weight in transformer(config, len(CORPUS.vocabulary)).named_parameters():
        count = torch.zeros(weight.shape, dtype=int)
        found = [parts[name] for parts in parts_of if name in parts]
        for part in found:
            ends = [b + s for b, s in zip(part.begin, part.size, strict=True)]
            count[tuple(map(slice, part.begin, ends))] += 1
            assert part.shape == count.shape and min(part.begin) >= 0
        is_cut = strategy == "tp" and name.startswith("block") and name.endswith(CUT)
        assert (count == (1 if is_cut else times)).all(), name
        assert len(found) == owners
    if strategy == "tp":
        names = "attention.q", "attention.out", "up", "down"
        begins = [parts_of[2][f"block1.{name}.weight"].begin for name in names]
        assert begins == [(16, 0), (0, 16), (64, 0), (0, 64)]


class TestMemory:
    def test_a_peak_is_of_what_is_allocated_at_a_time(self):
        kept = []

        def step():
            for _ in range(3):
                torch.empty(1000, dtype=torch.float64)
            kept.append(torch.empty(500, dtype=torch.float64))
            torch.empty(250, dtype=torch.float64)

        assert counted.peak_memory(step) == 8000
        assert counted.peak_memory(lambda: kept.clear()) == 0

    def test_a_step_is_timed_and_counted_in_a_process_by_itself(self):
        taken = []
        found = costs.cost(lambda: taken.append(torch.empty(1000, dtype=torch.float64)))
        assert found.seconds > 0 and found[1:] == (0, 8000) and len(taken) == 7

    def test_is_that_of_the_parameters_of_adam_and_of_a_step(self):
        """A step takes about as much as is kept, so that each part counts."""
        how = {"strategy": "pipeline", "num_ranks": 1, "manifold": "none"}
        job = Job(settings(**how, num_layers=1, batch_size=4), CORPUS)
        model = transformer(job.config, len(CORPUS.vocabulary))
        trainer = Trainer(job, model, model)
        first, second = islice(trainer.batches(), 2)
        trainer.step(*first)
        step = counted.peak_memory(lambda: trainer.step(*second))
        # Adam keeps two numbers for each parameter.
        kept = 3 * sum(parameter.nbytes for parameter in model.parameters())
        assert kept / 2 < step < 2 * kept
        # A stage keeps a copy of its output.
        assert kept + step <= costs.measured_memory(job) <= 1.2 * (kept + step)
