"""Dissolving's rivals: as in their papers, and in parts as in one process."""

import copy
import itertools
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
from constrained import drawn, near
from hypothesis import given
from hypothesis import strategies as st
from shard_roles import off
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.utils.parametrizations import orthogonal

from cdopt_tutorial.constraints import rivals
from cdopt_tutorial.constraints.manifolds import manifold_of
from cdopt_tutorial.constraints.owners import OwnedMuon
from cdopt_tutorial.constraints.rivals import RULES, Rival
from cdopt_tutorial.constraints.sums import whole
from cdopt_tutorial.dissolving.eigenspace import polar
from cdopt_tutorial.probes.counted import Sent
from cdopt_tutorial.run import Role, launch, process_group

pytestmark = pytest.mark.xdist_group("rivals")

RANKS, STEPS = 3, 2
EXACT = dict.fromkeys(RULES, 1e-12) | {"muon": 1e-10, "spel": 1e-10}
LR = 0.05
SIZES = st.integers(1, 9)
# Of a block, and the number of blocks: uneven on two and on three ranks.
SHAPES = [(9, 4, 1), (4, 9, 1), (5, 5, 1), (2, 5, 4), (3, 3, 2)]
MUON = partial(Rival, "muon")
# Uneven on 2 and 3 ranks, fewer rows than ranks, fewer of a shape than ranks, a kernel.
UNEVEN = [(7, 3), (7, 3), (7, 3), (4, 9), (2, 5), (6, 2, 3, 3)]
ROWS, NUMBER = 24, 6  # rows and number of the weights whose messages are counted
COLUMNS = 4, 10


def start(rows: int, columns: int, blocks: int, seed: int, off: float = 0.01) -> Tensor:
    """A weight a little off the manifold."""
    weight = drawn((blocks * rows, columns), seed)
    return manifold_of("stiefel", weight, blocks).nearest(weight) + off * weight


def steps(rule: str, weight: Tensor, blocks: int, seed: int) -> Tensor:
    """The whole weight after a few steps, with gradients drawn from the seed."""
    weight = weight.clone().requires_grad_()
    rival = Rival(rule, [{"params": [weight], "blocks": blocks}], LR, 0.9)
    for number in range(STEPS):
        give(weight, seed + number + 1)
        rival.step()
    return whole(weight.detach())


def give(weight: Tensor, seed: int) -> None:
    """Give a weight a gradient, the same however it is cut."""
    weight.grad = drawn(weight.shape, seed)
    if isinstance(weight, DTensor):
        cut = weight.device_mesh, weight.placements
        weight.grad = distribute_tensor(weight.grad, *cut)


def furthest(meshes: list[DeviceMesh], rule: str, shapes: list[tuple]) -> float:
    """The largest difference on any mesh, cut either way, from one process."""
    tried = []
    for (rows, columns, blocks), mesh, cut in itertools.product(
        shapes, meshes, (Shard(0), Shard(1))
    ):
        # SPEL's tangent is that of a point on the manifold, and of no other.
        plain = start(rows, columns, blocks, 0, 0.0 if rule == "spel" else 0.01)
        weight = distribute_tensor(plain, mesh, [cut])
        tried.append(off(*(steps(rule, x, blocks, 0) for x in (weight, plain))))
    return max(tried)


def owned(mesh: DeviceMesh) -> float:
    """How far two steps of Muon by owners are from those of one process."""
    alone = [drawn(shape, seed) for seed, shape in enumerate(UNEVEN)]
    spread = [distribute_tensor(weight, mesh, [Shard(0)]) for weight in alone]
    for make, weights in (OwnedMuon, spread), (MUON, alone):
        groups = {"params": weights[:4]}, {"params": weights[4:], "lr": 0.3}
        optimizer = make([*groups], 0.1, momentum=0.9)
        for seed in range(STEPS):
            for number, weight in enumerate(weights):
                give(weight, 10 * seed + number)
            optimizer.step()
    return max(map(off, spread, alone))


def heard(mesh: DeviceMesh, make: Callable, p: int = 4, blocks: int = 1) -> tuple:
    """Messages and bytes of a step of weights of p columns, in rows."""
    weights = []
    for seed in range(NUMBER):
        plain = start(ROWS // blocks, p, blocks, seed, 1e-3)
        weights.append(distribute_tensor(plain, mesh, [Shard(0)]))
        give(weights[-1], seed)
    optimizer = make([{"params": weights, "blocks": blocks}], LR)
    with Sent() as sent:
        optimizer.step()
    return sent.collectives, sent.bytes


def play_rivals(rank: int) -> dict:
    """The largest difference by each rule, and what it sends."""
    process_group.join(rank, RANKS, gpus=())
    meshes = [DeviceMesh("cpu", range(number)) for number in (1, 2, 3)]
    here = [mesh for mesh in meshes if mesh.get_coordinate() is not None]
    found: dict = {rule: furthest(here, rule, SHAPES) for rule in RULES}
    found["sent"] = {rule: heard(meshes[2], partial(Rival, rule)) for rule in RULES}
    found["of heads"] = heard(meshes[2], partial(Rival, "projected"), blocks=6)
    found["torch's"] = heard(meshes[2], torch.optim.Muon)
    found["owned"] = [owned(mesh) for mesh in here]
    for mesh, p in itertools.product(here, COLUMNS):
        found[mesh.size(), p] = heard(mesh, MUON, p), heard(mesh, OwnedMuon, p)
    summed = "cdopt_tutorial.constraints.sums._all_reduced"
    with mock.patch(summed, lambda part, *_: part):
        found["control"] = furthest(meshes[2:], "projected", SHAPES[:1])
    return found


@pytest.fixture(scope="module")
def played():
    """What the ranks found."""
    roles = {f"rank{i}": Role(play_rivals, (i,)) for i in range(RANKS)}
    return [*launch(roles, deadline=300).values()]


@pytest.mark.parametrize("rule", EXACT)
def test_parts_are_moved_as_in_one_process(played, rule):
    for rank in played:
        assert 0 < rank[rule] <= EXACT[rule]
        assert rank["control"] > 1e-2  # without any communication


def test_a_step_sends_sums_of_p_by_p_and_for_whole_heads_nothing(played):
    sums = {"landing": 2, "spel": 3}
    for rank in played:
        for rule, sent in rank["sent"].items():
            assert sent == (1, sums.get(rule, 1) * NUMBER * 4 * 4 * 8), rule
        assert rank["of heads"] == (0, 0)
        # As the page to decide by says, and as torch 2.13 does.
        assert rank["torch's"][0] >= 5 * NUMBER


def test_owners_move_as_one_process_to_the_bit(played):
    for rank in played:
        assert set(rank["owned"]) == {0.0}


@pytest.mark.parametrize("p", COLUMNS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_of_owners_and_of_sums(played, ranks, p):
    """Sums send fewer if and only if a rank has more than p rows."""
    (one, sums), (two, owners) = played[0][ranks, p]
    assert (one, two) == (1, 2)
    assert sums == NUMBER * p * p * 8  # of which a ring sends 2 (k - 1) / k
    assert owners == 2 * NUMBER * ROWS * p * 8 / ranks * (ranks - 1) / ranks
    ring = sums * 2 * (ranks - 1) / ranks
    assert (ring < owners) == (ROWS / ranks > p)


def landed(x, g):
    skew = (g @ x.mT - x @ g.mT) / 2
    return x - LR * (skew @ x + x @ (x.mT @ x - torch.eye(x.shape[1]).to(x)))


def iterated(x: Tensor) -> Tensor:
    """Muon's step of a tall matrix, by products with the matrix itself."""
    a, b, c = rivals.NEWTON_SCHULZ
    x = x / x.norm()
    for _ in range(5):
        gram = x.mT @ x
        x = a * x + x @ (b * gram + c * gram @ gram)
    return x


def steepest(x, g):
    tangent = g - x @ (x.mT @ g + g.mT @ x) / 2
    left, sizes, right = torch.linalg.svd(tangent, full_matrices=False)
    least = rivals.FLOOR**0.5 * torch.linalg.matrix_norm(g, 2)
    return polar(x - LR * left * (sizes / sizes.clamp(min=least)) @ right)


#: Each with the matrix whole and tall, as in the paper; Muon's has the size of Adam's.
PAPERS = {
    "projected": lambda x, g: polar(x - LR * g),
    "landing": landed,
    "muon": lambda x, g: x - LR * 0.2 * len(x) ** 0.5 * iterated(g),
    "spel": steepest,
}


@given(st.sampled_from([*PAPERS]), SIZES, SIZES, SIZES)
def test_a_step_is_that_of_the_paper(rule, rows, columns, seed):
    x, g = start(rows, columns, 1, seed), drawn((rows, columns), seed + 1)
    found = nn.Parameter(x.clone())
    found.grad = g
    Rival(rule, [found], LR).step()
    if rows < columns:
        x, g, found = x.mT, g.mT, found.mT
    near(found.detach(), PAPERS[rule](x, g), 1e-12)


def test_a_polynomial_loses_more_digits_than_the_iteration_but_not_bfloat16s():
    left, right = (torch.linalg.qr(drawn((n, 16), n))[0] for n in (64, 16))
    grad = left * torch.logspace(0, -3, 16).double() @ right.T  # its condition: 1,000
    weight = torch.zeros(64, 16, requires_grad=True)
    weight.grad = grad.float()
    Rival("muon", [weight], lr=5 / 64**0.5).step()
    exact = iterated(grad)
    steps = iterated(grad.float()), -weight.detach(), iterated(grad.bfloat16())
    direct, polynomial, rounded = (off(step.double(), exact) for step in steps)
    assert 5 * direct < polynomial < rounded / 50


def test_without_a_rate_it_projects_what_another_optimizer_has_moved():
    weight = nn.Parameter(drawn((12, 4), 0))
    optimizer, keep = torch.optim.AdamW([weight]), Rival("projected", [weight], lr=0.0)
    weight.square().sum().backward()
    optimizer.step()
    moved = weight.detach().clone()
    keep.step()
    near(weight, polar(moved), 1e-12)


def test_muon_is_torchs_within_the_rounding_of_bfloat16():
    x, (first, second) = drawn((24, 8), 0), (drawn((24, 8), s) for s in (1, 2))
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    scale = {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0, "momentum": 0.9}
    one = Rival("muon", [ours], LR, 0.9)
    other = torch.optim.Muon([theirs], LR, **scale)
    for grad in first, second:
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        one.step()
        other.step()
    assert 0 < (ours - theirs).norm() < 0.02 * (ours - x).norm()


class TestOptimizer:
    """What every optimizer of torch promises."""

    @pytest.mark.parametrize("rule", RULES)
    def test_copies_and_saved_states_go_on_alike(self, rule, tmp_path):
        weight = nn.Parameter(start(6, 3, 1, 0))
        rival = Rival(rule, [weight], 0.1, momentum=0.9)
        weight.grad = torch.ones_like(weight)
        rival.step()
        other, copied = copy.deepcopy((weight, rival))
        torch.save(rival.state_dict(), tmp_path / "state")
        third = nn.Parameter(weight.detach().clone())
        loaded = Rival(rule, [third], 1.0)
        loaded.load_state_dict(torch.load(tmp_path / "state"))
        for each, moves in (weight, rival), (other, copied), (third, loaded):
            each.grad = torch.ones_like(each)
            moves.step()
            assert torch.equal(each, weight)

    @pytest.mark.parametrize(
        ("group", "line"),
        [
            ({"rule": "adam"}, "rule is 'adam', but must be one of muon, proj"),
            ({"lr": -1}, "lr is -1, but must be at least 0"),
            ({"blocks": 5}, "blocks is 5, but must be an int that divides the 6 rows"),
            ({"params": [torch.ones(3)]}, r"the weight has shape \(3,\)"),
            ({"weight_decay": 0.1}, "weight_decay is no setting of a Rival's group"),
            ({"rule": "spel"}, "spel needs a start near the manifold, such as manif"),
            ({"rule": "landing", "blocks": 2}, "landing needs a start near the manif"),
        ],
    )
    def test_refuses_a_group_before_anything_moves(self, group, line):
        rival = Rival("projected", [torch.ones(6, 3)], 0.1)
        with pytest.raises(ValueError, match=line):
            rival.add_param_group({"params": [torch.ones(6, 3)]} | group)
        assert len(rival.param_groups) == 1

    @pytest.mark.parametrize(("shape", "blocks"), [((32, 8), 4), ((6, 3, 3, 3), 1)])
    def test_a_step_of_muon_has_the_size_of_adams(self, shape, blocks):
        weight = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))
        weight.grad = drawn(shape, 0).bfloat16()
        Rival("muon", [{"params": [weight], "blocks": blocks}], 1.0).step()
        size = weight.float().square().mean().sqrt().item()
        assert size == pytest.approx(0.2, rel=0.3)


def test_weight_decay_makes_householders_weight_zero_and_cayleys_not():
    """As the page to decide by warns, and as torch 2.13 does by default."""
    norms = {}
    for orthogonal_map in (None, "cayley"):
        layer = orthogonal(nn.Linear(8, 4), orthogonal_map=orthogonal_map)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
        layer(torch.ones(8)).sum().backward()
        optimizer.step()
        norms[orthogonal_map] = layer.weight.norm().item()
    assert norms[None] == 0
    assert norms["cayley"] == pytest.approx(2, abs=1e-5)


def test_torchs_orthogonal_gives_a_shared_weight_twice():
    table, head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
    head.weight = table.weight
    for layer in (table, head):
        orthogonal(layer)
    assert (table.weight - head.weight).norm() > 0.1
