"""A weight in shards is mapped as the whole one is, by no more talk than is said."""

import pytest
import shard_roles

from cdopt_tutorial.engines import Role, launch

pytestmark = pytest.mark.xdist_group("sharded_maps")

# Numbers that a rank hands in: in sums of C, of one number, or of a part of the weight.
P_BY_P, SCALAR, PART, HALF = 4 * 4, 1, 12 * 4, 6 * 4
IN_BLOCKS = 4 * P_BY_P


@pytest.fixture(scope="module")
def played():
    """What 4 ranks found."""
    roles = {f"rank{i}": Role(shard_roles.play_maps, (i,)) for i in range(4)}
    return launch(roles, deadline=240)


@pytest.mark.parametrize("kind", shard_roles.KINDS)
@pytest.mark.parametrize("mesh", ["2", "3", "2 x 2", "strided"])
def test_parts_are_mapped_as_the_whole(played, mesh, kind):
    assert_equal(played, mesh, kind)


@pytest.mark.parametrize("kind", shard_roles.OTHERS)
@pytest.mark.parametrize("mesh", ["2", "3", "2 x 2"])
def test_what_has_no_map_in_parts_is_gathered(played, mesh, kind):
    assert_equal(played, mesh, kind)


def assert_equal(played, mesh, kind):
    every = [rank["differences"].get((mesh, kind)) for rank in played.values()]
    found = [each for each in every if each is not None]
    assert len(found) == (int(mesh) if mesh in "23" else 4)
    for each in found:
        off = {name: by for name, by in each.items() if name != "cases"}
        assert each["cases"] >= 2
        assert len(off) == 7 and max(off.values()) <= 1e-12, off


def test_a_rank_by_itself_would_be_far_off(played):
    assert all(rank["control"] > 0.1 for rank in played.values())


def test_autocast_changes_nothing(played):
    for rank in played.values():
        assert rank["autocast"]["control"] > 1e-4
        assert rank["autocast"]["ours"] <= 1e-6


def test_a_partial_sum_is_no_weight(played):
    expected = "a weight is placed as a partial sum: redistribute it first"
    assert all(rank["partial"] == expected for rank in played.values())


@pytest.mark.parametrize(
    ("placement", "expected"),
    {
        "replicated": [],
        "long side": [P_BY_P, P_BY_P],
        "long side, wide": [P_BY_P, P_BY_P],
        "long side, twice": [P_BY_P] * 4,
        "short side": [PART, P_BY_P, PART, PART, P_BY_P, PART],
        "short side, wide": [PART, P_BY_P, PART, PART, P_BY_P, PART],
        "both sides": [HALF, P_BY_P, P_BY_P, HALF] * 2,
        "square": [8 * 8] * 2,
        "square, columns": [8 * 8] * 2,
        "whole blocks": [SCALAR],
        "within blocks, long": [IN_BLOCKS, IN_BLOCKS],
        "within blocks, short": [PART, PART],
        "oblique, rows": [SCALAR],
        "oblique, in rows": [24, 24],
        "sphere": [SCALAR, SCALAR],
        "others": [PART, PART],
    }.items(),
)
def test_the_talk_of_a_map_and_its_way_back(played, placement, expected):
    """What `sharded.map_and_distance` says, in float64."""
    for rank in played.values():
        assert rank["talk"][placement] == (len(expected), 8 * sum(expected))
