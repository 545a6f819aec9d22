"""A weight in shards is mapped as the whole one is, by no more talk than is said."""

import pytest
import shard_roles
from shard_roles import KINDS, TALK

from cdopt_tutorial.run import Role, launch

pytestmark = pytest.mark.xdist_group("sharded_maps")

RANKS = {"3": 3, "2 x 2": 4}  # by mesh


@pytest.fixture(scope="module")
def played():
    """What 4 ranks found."""
    roles = {f"rank{i}": Role(shard_roles.play_maps, (i,)) for i in range(4)}
    return launch(roles, deadline=240).values()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", RANKS)
def test_parts_are_mapped_as_the_whole(played, mesh, kind):
    found = [rank[mesh, kind] for rank in played if (mesh, kind) in rank]
    assert len(found) == RANKS[mesh]
    for off in found:
        assert len(off) == 7 and max(off.values()) <= 1e-12, off


def test_fsdp_sends_one_sum_more_for_a_constraint(played):
    """Each of two: twice half a weight, half a gradient, and p x p for a penalty."""
    half, square = 8 * 4 * 6 // 2, 8 * 4 * 4
    found = [rank["under fsdp"] for rank in played if "under fsdp" in rank]
    assert found == 2 * [[(3, 3 * half), (4, 3 * half + square)]]


def test_the_distances_of_several_weights_take_one_sum(played):
    tried = {key: each for rank in played for key, each in rank.items()}
    for mesh in "2", "3", "2 x 2":
        assert tried["together", mesh]["collectives"] == 1
        assert tried["together", mesh]["off"] <= 1e-13


def test_autocast_changes_nothing(played):
    for rank in played:
        assert rank["autocast"]["control"] > 1e-4
        assert rank["autocast"]["ours"] <= 1e-6


@pytest.mark.parametrize("name", TALK)
def test_the_talk_of_a_map_and_its_way_back(played, name):
    sent = TALK[name][-1]  # in float64
    assert all(rank["talk"][name] == (len(sent), 8 * sum(sent)) for rank in played)
