"""The sweeps that disturb runs: what they do, and what they take for wrong."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hosts import need_hosts
from sweeps import lost, soak
from sweeps.disturbed import Way

from cdopt_tutorial.reinforce import ReinforceConfig, run_locally
from cdopt_tutorial.reinforce.steady import Anew

TWO = lost.WAYS["torch RPC, two hosts"]
REINFORCE, RNN, *_ = lost.SYSTEMS
NAMED = "cdopt-tutorial: observer1 was killed by SIGKILL"
CUT_OFF = "cdopt-tutorial: agent on host1 was not heard of for 15 s"


def test_loses_50_workers_and_20_hosts_each_in_its_turn_over_a_whole_run():
    planned = [
        run for name, way in lost.WAYS.items() for run in lost._planned(name, way)
    ]
    kinds = Counter(run.kind for run in planned)
    whole = len(lost.WAYS) * len(lost.SYSTEMS)
    assert kinds == {"no loss": whole, "kill": 50, "cut": 20}
    killed = {(run.system, run.whom) for run in planned if run.kind == "kill"}
    assert killed == {
        (s, w) for s, names in lost.SYSTEMS.items() for w in names.split()
    }
    for name in lost.WAYS:
        for kind in ("kill", "cut"):
            found = [r.moment for r in planned if (r.way, r.kind) == (name, kind)]
            even = [(number + 0.5) / len(found) for number in range(len(found))]
            assert sorted(found) == even


@pytest.mark.parametrize(
    ("run", "way", "told", "is_right"),
    [
        (("kill", "observer1"), TWO, [f"{NAMED} (on host2)", NAMED], True),
        (("kill", "observer1"), TWO, [NAMED, NAMED], False),  # on which host?
        (("kill", "observer0"), TWO, [f"{NAMED} (on host2)", NAMED], False),
        (("kill", "observer1"), Way("rpc", 1, 1), [NAMED], True),
        (("kill", "observer1"), Way("ray", 1, 1), [NAMED], False),
        (("cut", "cut host1"), TWO, ["", CUT_OFF], False),
        (("cut", "unplug host1"), Way("ray", 2, 0, 1), [CUT_OFF], False),  # its own
        (("cut", ""), Way("ray", 2, 0, 1), [CUT_OFF], False),  # nobody was cut off
    ],
)
def test_who_is_lost_must_be_named_everywhere(run, way, told, is_right, tmp_path):
    found = lost.Found("", REINFORCE, *run)
    wrong = lost._wrong(found, way, tmp_path / "none", [(1, text) for text in told])
    assert (wrong == "") == is_right


@pytest.mark.parametrize(("gap", "is_right"), [(1e-11, True), (1e-9, False)])
def test_a_result_must_be_that_of_one_process(gap, is_right, tmp_path):
    file = tmp_path / "found.json"
    file.write_text(json.dumps({"max_parameter_difference": gap}))
    wrong = lost._wrong(lost.Found("", RNN, "kill", "ps"), TWO, file, [(0, "")])
    assert (wrong == "") == is_right


def test_of_no_loss_the_rewards_are_those_of_one_process():
    config = ReinforceConfig(num_envs=2, max_episodes=20)
    assert lost.without(config, ()) == run_locally(config).score.rewards


def test_no_two_observers_draw_from_one_stream_whichever_lives_they_are_in():
    """The oracle above makes new observers by the same class, so it can't tell."""
    config = ReinforceConfig(num_observers=3)
    first = [config.seed_of(number, "actions") for number in range(3)]
    seeds = first + [
        Anew(**vars(config), life=life).seed_of(number, "actions")
        for life in range(1, 6)
        for number in range(3)
    ]
    assert len(set(seeds)) == len(seeds) == 18


def test_a_run_in_which_nobody_can_be_lost_is_tried_only_so_often(monkeypatch):
    def end_at_once(run, *_):
        run.whom = ""
        moments.append(run.moment)

    moments: list[float] = []
    monkeypatch.setattr(lost, "_run", end_at_once)
    planned = lost.Found("", RNN, "kill", "ps", moment=1.0)
    found = lost._until_lost(planned, Way("rpc", 1, 1), (None, None))
    assert (found.whom, moments) == ("", [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32])


@pytest.mark.engines
def test_a_smoke_run_finds_all_as_promised(tmp_path):
    need_hosts()
    rows = smoke_run("lost", tmp_path)
    kinds = {name.rpartition(":")[0] for name in rows}
    assert len(kinds) == 2 * len(lost.SMOKE) + 1  # no loss, a kill, and one cut
    for kind in kinds:
        assert rows[f"{kind}: as promised"] == rows[f"{kind}: runs"] > 0
        assert rows[f"{kind}: processes left"] == 0


@pytest.mark.engines  # since it takes as long
def test_a_smoke_run_that_stops_launches_commands_and_kernels_leaves_nothing(tmp_path):
    rows = smoke_run("soak", tmp_path)
    for way in soak.WAYS:
        assert rows[f"{way}: not as promised"] == 0
        assert 50 < rows[f"{way}: memory in MB"] < 5000
        assert rows[f"{way}: processes below"] == 2  # fork server, resource tracker


def smoke_run(sweep: str, folder: Path) -> dict[str, float]:
    """The values of its rows, from a process of its own."""
    file = folder / "rows.json"
    command = [sys.executable, "-m", "sweeps", sweep, "--smoke", "--json", file]
    here = Path(__file__).parent
    subprocess.run(command, cwd=here, check=True)
    return {row["name"]: row["value"] for row in json.loads(file.read_text())["rows"]}
