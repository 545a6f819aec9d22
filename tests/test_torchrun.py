"""The systems under torchrun, on hosts of their own: as in one process, or named."""

import json
import re

import pytest
from hosts import NET, hosts, wait_until
from running import listeners, wait_for_end

from cdopt_tutorial.cli import main
from cdopt_tutorial.commands.train import GRAMMAR_TOKENS
from cdopt_tutorial.data import Grammar
from cdopt_tutorial.parameter_server import Job, RNNConfig, checkpoint
from cdopt_tutorial.parameter_server import run_locally as run_rnn_locally
from cdopt_tutorial.reinforce import ReinforceConfig, run_locally
from cdopt_tutorial.run import Role, launch, serve
from cdopt_tutorial.torchrun import INTERFACE

pytestmark = pytest.mark.engines

SMOKE = ("--smoke", "--against-local")
NARROW = ("--embedding", "16", "--hidden", "16")
#: Arguments, and the number of workers on each host; `rnn` is killed below.
RUNS = {
    "reinforce": (("reinforce", "--max-episodes", "40"), [2, 1]),
    "hybrid": (("hybrid", *SMOKE, "--manifold", "stiefel"), [1, 2, 1]),
    "shard": (("shard", *SMOKE, "--strategy", "tp"), [1, 1]),
    "rollouts": (("rollouts", *SMOKE), [3]),
}


@pytest.mark.parametrize(("arguments", "workers"), RUNS.values(), ids=RUNS)
def test_trains_as_one_process(arguments, workers, tmp_path):
    file = tmp_path / "found.json"
    with hosts(len(workers)) as made:
        ends = made.torchrun(workers, *arguments, "--json", str(file)).end()
    found = json.loads(file.read_text())
    if arguments[0] == "reinforce":
        alone = run_locally(ReinforceConfig(max_episodes=40))
        assert found["rewards"] == alone.score.rewards
    else:
        assert [code for code, _ in ends] == [0] * len(workers), ends
        assert found["max_parameter_difference"] <= 1e-10
    # Only the first process prints results.
    said = [re.search("pisode|difference", text) is not None for _, text in ends]
    assert said == [True] + [False] * (len(workers) - 1)


@pytest.fixture
def under_way():
    """A run that would take hours: the agent and an observer here, another there."""
    endless = ("--lr", "1e-9", "--max-episodes", "10000000")
    with hosts(2) as made:
        run = made.torchrun([2, 1], "reinforce", *endless)
        run.wait_for("Episode")  # before it, they may not have joined
        yield made, run, [run.workers(host) for host in (1, 2)]


def test_a_killed_worker_is_named_by_torchrun(under_way):
    _, run, workers = under_way
    for host, there in enumerate(workers, start=1):
        for worker in there.values():  # which listen on one device only
            places, names = listeners(worker.pid)
            assert {address for address, _ in places} == {f"{NET}.{host}"}
            assert names == []
    workers[1]["observer1"].kill()
    (code, here), (other, there) = run.end()
    assert code == other == 1
    assert "exitcode  : -9" in there  # of the process that is the worker
    assert "observer1 died" not in here and "agent raised" not in here
    lost = "has lost another worker, which torchrun names"
    assert f"cdopt-tutorial: agent {lost}" in here


def test_a_host_that_is_cut_off_is_named():
    """By the worker that did not answer there, once a call has waited long enough."""
    with hosts(2) as made:
        run = made.torchrun([2, 1], module="cut_off")
        run.wait_for("round 2")
        made.cut(2)
        ranks = run.ranks(1)
        wait_for_end(ranks)  # torchrun itself waits minutes for the other host
        run.kill()
        here, _ = (text for _, text in run.end())
    assert "observer1 did not answer a call that agent made" in here


def test_processes_that_list_other_workers_are_told():
    with hosts(1) as made:
        run = made.torchrun([2], "sets", module="cut_off")
        ((code, said),) = run.end()
    assert code == 1
    assert "all must list the same in the same order" in said


def place(kept):
    """Epoch and window of the checkpoint that a run keeps there."""
    found = checkpoint.load(kept) if kept.exists() else None
    return (found.epoch, found.window) if found else (0, 0)


def test_a_run_that_is_killed_goes_on_where_it_was(tmp_path):
    file, kept = tmp_path / "found.json", tmp_path / "kept.pt"
    keep = ("--checkpoint", str(kept), "--save-every", "20", "--max-steps", "500")
    exact = ("--against-local", "--json", str(file), "--corpus", "grammar")
    with hosts(1) as made:
        alone = ("--interface", "lo")  # by default it would be eth0
        run = made.torchrun([2], "rnn", *NARROW, *keep, *exact, *alone, max_restarts=1)
        trainer = run.workers(1)["trainer0"]
        wait_until(lambda: place(kept) != (0, 0))
        assert {on for on, _ in listeners(trainer.pid)[0]} == {"127.0.0.1"}
        ranks = run.ranks(1)
        trainer.kill()
        wait_for_end(ranks)  # all of which begin again
        before = place(kept)
        # From the start, it would first keep an earlier place.
        wait_until(lambda: place(kept) != before)
        assert place(kept) > before
        ((code, output),) = run.end()
    assert code == 0, output
    found = json.loads(file.read_text())
    narrow = {"embedding": 16, "hidden": 16, "dropout": 0.0, "dtype": "float64"}
    config = RNNConfig(max_steps=500, save_every=20, **narrow)
    corpus = Grammar(seed=config.seed).corpus(*GRAMMAR_TOKENS)
    alone = run_rnn_locally(Job(config, corpus))
    assert found["losses"] == [pytest.approx(alone.losses, abs=1e-10)]
    assert found["valid_perplexity"] == pytest.approx(alone.perplexity, rel=1e-10)


@pytest.fixture
def by_torchrun(monkeypatch):
    """As if torchrun had started this process, the first of two."""
    started = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2"}
    for name, value in (started | {"MASTER_ADDR": "localhost"}).items():
        monkeypatch.setenv(name, value)


def test_a_device_that_is_not_there_is_refused(by_torchrun, monkeypatch, capsys):
    refused = "interface is 'none0', but must be one of .*lo"
    monkeypatch.setenv(INTERFACE, "none0")  # for a reader's own program
    with pytest.raises(ValueError, match=refused):
        launch({"a": Role(serve), "b": Role(serve)})
    assert main(["reinforce", "--interface", "none0"]) == 2
    assert re.match(f"cdopt-tutorial: {refused}", capsys.readouterr().err)


def test_each_process_has_one_worker(by_torchrun, capsys):
    assert main(["reinforce"]) == 2
    workers = "3 workers, agent, observer0, observer1"
    line = f"torchrun has started 2 processes, but this run has {workers}"
    assert capsys.readouterr().err == f"cdopt-tutorial: {line}\n"
