"""Muon with an owner for each weight: as in one process, to the bit."""

import pytest
import torch
from constrained import drawn
from shard_roles import off
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from cdopt_tutorial.constraints.owners import OwnedMuon
from cdopt_tutorial.constraints.rivals import Rival
from cdopt_tutorial.probes.counted import Sent
from cdopt_tutorial.run import Role, launch, process_group

# Uneven on 2 and 3 ranks, fewer rows than ranks, fewer of a shape than ranks, a kernel.
SHAPES = [(7, 3), (7, 3), (7, 3), (4, 9), (2, 5), (6, 2, 3, 3)]
N, NUMBER = 24, 6  # rows and number of the weights whose messages are counted
COLUMNS = 4, 10


def gradients(shapes, seed):
    return [drawn(shape, seed + number) for number, shape in enumerate(shapes)]


def give(weights, number, mesh=None):
    """Give them the gradients of a step."""
    grads = gradients([w.shape for w in weights], 10 * number + 100)
    for weight, grad in zip(weights, grads, strict=True):
        weight.grad = distribute_tensor(grad, mesh, [Shard(0)]) if mesh else grad


def step(optimizer, weights, mesh=None):
    for number in range(2):
        give(weights, number, mesh)
        optimizer.step()


def sent_by(kind, mesh, columns, *args):
    """Messages and bytes of a step of weights of N rows."""
    starts = gradients(NUMBER * [(N, columns)], 0)
    weights = [distribute_tensor(start, mesh, [Shard(0)]) for start in starts]
    optimizer = kind(*args, weights, 0.1)
    give(weights, 0, mesh)
    with Sent() as sent:
        optimizer.step()
    return sent.collectives, sent.bytes


def play(rank):
    process_group.join(rank, 3, gpus=())
    found = {}
    for mesh in [DeviceMesh("cpu", range(number)) for number in (1, 2, 3)]:
        if mesh.get_coordinate() is None:
            continue
        alone = gradients(SHAPES, 0)
        spread = [distribute_tensor(w, mesh, [Shard(0)]) for w in alone]
        groups = [{"params": spread[:4]}, {"params": spread[4:], "lr": 0.3}]
        step(OwnedMuon(groups, 0.1, 0.9), spread, mesh)
        plain = [{"params": alone[:4]}, {"params": alone[4:], "lr": 0.3}]
        step(Rival("muon", plain, 0.1, 0.9), alone)
        whole = [weight.full_tensor() for weight in spread]
        found["off", mesh.size()] = max(map(off, whole, alone))
        if mesh.size() > 1:
            for columns in COLUMNS:
                sums = sent_by(Rival, mesh, columns, "muon")
                owners = sent_by(OwnedMuon, mesh, columns)
                found["sent", (mesh.size(), columns)] = sums, owners
    return found


@pytest.fixture(scope="module")
def played():
    return launch({f"rank{i}": Role(play, (i,)) for i in range(3)})


def test_a_step_is_that_of_one_process_on_one_to_three_ranks(played):
    results = [pair for found in played.values() for pair in found.items()]
    assert [off_by for (what, _), off_by in results if what == "off"] == 6 * [0.0]


@pytest.mark.parametrize("p", COLUMNS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_of_owners_and_of_sums(played, ranks, p):
    """Sums send fewer if and only if a rank has more than p rows."""
    (one, sums), (two, owners) = played["rank0"]["sent", (ranks, p)]
    assert (one, two) == (1, 2)
    assert sums == NUMBER * p * p * 8  # of which a ring sends 2 (k - 1) / k
    assert owners == 2 * NUMBER * N * p * 8 / ranks * (ranks - 1) / ranks
    ring = sums * 2 * (ranks - 1) / ranks
    assert (ring < owners) == (N / ranks > p)


def test_a_weight_that_is_not_in_rows_is_refused():
    with pytest.raises(ValueError, match="an owner's weight must be cut into rows"):
        OwnedMuon([nn.Parameter(torch.ones(3, 2))], 0.1)
