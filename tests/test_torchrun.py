"""The systems under torchrun, on hosts of their own: as in one process, or named."""

import json
from functools import partial

import pytest
from hosts import NET, hosts
from running import listeners

from cdopt_tutorial.reinforce import ReinforceConfig, run_locally

SMOKE = ("--smoke", "--against-local")
#: Arguments, and how many workers each host has.
RUNS = {
    "rnn": (("rnn", *SMOKE, "--num-trainers", "2"), [1, 2]),
    "rnn, held": (
        ("rnn", *SMOKE, "--manifold", "stiefel", "--where", "server"),
        [1, 1],
    ),
    "hybrid, three hosts": (("hybrid", *SMOKE, "--manifold", "stiefel"), [1, 2, 1]),
    "shard": (("shard", *SMOKE, "--strategy", "tp"), [1, 1]),
}


@pytest.mark.parametrize(("arguments", "workers"), RUNS.values(), ids=RUNS)
def test_trains_as_one_process(arguments, workers, tmp_path):
    file = tmp_path / "found.json"
    with hosts(len(workers)) as made:
        told = made.torchrun(workers, *arguments, "--json", str(file)).end()
    assert [code for code, _ in told] == [0] * len(workers), told
    assert json.loads(file.read_text())["max_parameter_difference"] <= 1e-10
    # The first one tells of it, and no other.
    said = ["largest difference from one process" in text for _, text in told]
    assert said == [True] + [False] * (len(workers) - 1)


def test_has_the_rewards_of_one_process_and_listens_on_one_device_only(tmp_path):
    file, episodes = tmp_path / "found.json", 640
    with hosts(2) as made:
        limit = ("--max-episodes", str(episodes), "--num-observers", "2")
        run = made.torchrun([2, 1], "reinforce", *limit, "--json", str(file))
        here, there = run.workers(1), run.workers(2)
        for number, workers in enumerate((here, there), start=1):
            for worker in workers:
                places, names = listeners(worker.pid)
                assert {address for address, _ in places} <= {f"{NET}.{number}"}
                assert names == []
        told = run.end()
    assert {code for code, _ in told} <= {0, 1}, told  # it need not have solved it
    config = ReinforceConfig(max_episodes=episodes)
    assert json.loads(file.read_text())["rewards"] == run_locally(config).score.rewards


@pytest.fixture
def under_way():
    """A run that would take minutes: the agent and an observer here, one there."""
    with hosts(2) as made:
        run = made.torchrun(
            [2, 1], "reinforce", "--lr", "1e-9", "--max-episodes", "10000000"
        )
        yield made, run, [run.workers(1), run.workers(2)]
        run.end(1)


@pytest.mark.parametrize("host", [1, 2])
def test_a_killed_worker_and_its_host_are_named_on_all(under_way, host):
    _, run, workers = under_way
    workers[host - 1][-1].kill()
    name = "observer0" if host == 1 else "observer1"
    for code, text in run.end(60):
        assert code == 1
        assert (
            f"cdopt-tutorial: {name} was killed by SIGKILL" in text
            or "terminated" in text
        )
