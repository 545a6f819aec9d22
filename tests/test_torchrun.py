"""The systems under torchrun, on hosts of their own: as in one process, or named."""

import json
import re
import subprocess
import sys
import time

import pytest
from hosts import NET, hosts, wait_until
from running import listeners, wait_for_end
from torch.distributed import HashStore, PrefixStore

from cdopt_tutorial import torchrun
from cdopt_tutorial.cli import main
from cdopt_tutorial.commands.rnn import GRAMMAR_TOKENS
from cdopt_tutorial.data import Grammar
from cdopt_tutorial.engines.torchrun import peers, store
from cdopt_tutorial.parameter_server import Job, RNNConfig, checkpoint
from cdopt_tutorial.parameter_server import run_locally as run_rnn_locally
from cdopt_tutorial.reinforce import ReinforceConfig, run_locally

pytestmark = pytest.mark.engines

SMOKE = ("--smoke", "--against-local")
ON_SERVER = ("--manifold", "stiefel", "--where", "server")
NARROW = ("--embedding", "16", "--hidden", "16")
#: Arguments, how many workers each host has, and how fast the last host's link is.
RUNS = {
    "rnn": (("rnn", *SMOKE, *ON_SERVER, *NARROW, "--num-trainers", "2"), [1, 2], None),
    "hybrid": (("hybrid", *SMOKE, "--manifold", "stiefel"), [1, 2, 1], "2mbit"),
    "shard": (("shard", *SMOKE, "--strategy", "tp"), [1, 1], None),
}


@pytest.mark.parametrize(("arguments", "workers", "rate"), RUNS.values(), ids=RUNS)
def test_trains_as_one_process(arguments, workers, rate, tmp_path):
    file = tmp_path / "found.json"
    with hosts(len(workers)) as made:
        if rate is not None:
            made.slow(len(workers), rate)
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
        for host in (1, 2):
            for worker in run.workers(host).values():
                places, names = listeners(worker.pid)
                assert {address for address, _ in places} <= {f"{NET}.{host}"}
                assert names == []
        told = run.end()
    assert {code for code, _ in told} <= {0, 1}, told  # it need not have solved it
    config = ReinforceConfig(max_episodes=episodes)
    assert json.loads(file.read_text())["rewards"] == run_locally(config).score.rewards


@pytest.fixture
def under_way():
    """A run that would take hours: the agent and an observer here, another there."""
    endless = ("--lr", "1e-9", "--max-episodes", "10000000")
    with hosts(2) as made:
        run = made.torchrun([2, 1], "reinforce", *endless)
        run.wait_for("Episode")  # before it, they may not have joined
        yield made, run, run.workers(2)


def test_a_killed_worker_is_named_with_its_host(under_way):
    _, run, there = under_way
    there["observer1"].kill()
    (code, here), (other, there) = run.end(60)
    assert code == other == 1
    assert "cdopt-tutorial: observer1 was killed by SIGKILL\n" in there
    assert "observer1 was killed by SIGKILL (on host2)\n" in here


def test_a_host_that_is_cut_off_is_named(under_way):
    made, run, there = under_way
    below = [*run.workers(1).values(), *there.values()]
    made.cut(2)
    wait_for_end(below, peers.LOST + 15)
    # Torchrun itself waits for the other hosts for minutes.
    time.sleep(2)
    run.kill()
    here, there = (text for _, text in run.end())
    silence = "was not heard of for 15 s\n"
    assert f"cdopt-tutorial: observer1 on host2 {silence}" in here
    assert f"cdopt-tutorial: agent on host1 {silence}" in there


@pytest.fixture
def join(monkeypatch):
    """What a process knows of a run's workers; all of them have one store."""
    kept = HashStore()
    monkeypatch.setattr(peers, "open_store", lambda path: PrefixStore(path, kept))
    monkeypatch.setenv("WORLD_SIZE", "3")

    def enter(rank, names):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setattr("socket.gethostname", lambda: f"host{1 + (rank == 2)}")
        return peers.Peers(names, None, join_deadline=60)

    return enter


def test_a_peer_that_has_gone_is_explained_once_each_has_been_borne(join):
    run = join(0, ["agent", "observer0", "observer1"])
    assert run.explains_in() == 60 + peers.LOST
    for worker in run._workers.values():
        worker.patience = peers.LOST  # as of who has been heard of
    assert run.explains_in() == 2 * peers.LOST


def test_the_host_of_who_has_not_come_to_this_run_is_known_from_another(join):
    for rank, names in (2, "agent observer0 observer1"), (0, "ps trainer0 trainer1"):
        with join(rank, names.split()) as run:
            wait_until(lambda run=run: run._beats)
    hosts = {name: worker.host for name, worker in run._workers.items()}
    assert hosts == {"ps": "host1", "trainer0": "its host", "trainer1": "host2"}


def place(kept):
    """How far a run has come that keeps its checkpoints there: pass and window."""
    found = checkpoint.load(kept) if kept.exists() else None
    return (found.epoch, found.window) if found else (0, 0)


def test_a_run_that_is_killed_twice_goes_on_where_it_was(tmp_path):
    file, kept = tmp_path / "found.json", tmp_path / "kept.pt"
    keep = ("--checkpoint", str(kept), "--save-every", "20", "--max-steps", "300")
    exact = ("--against-local", "--json", str(file), "--corpus", "grammar")
    with hosts(1) as made:
        alone = ("--interface", "lo")  # by default it would be eth0
        run = made.torchrun([2], "rnn", *NARROW, *keep, *exact, *alone, max_restarts=2)
        for _ in range(2):
            trainer, before = run.workers(1)["trainer0"], place(kept)
            # Had it begun again, it would first keep an earlier place.
            wait_until(lambda before=before: place(kept) != before)
            assert place(kept) > before
            assert {on for on, _ in listeners(trainer.pid)[0]} == {"127.0.0.1"}
            ranks = run.ranks(1)
            trainer.kill()
            wait_for_end(ranks)  # all of which begin again
        ((code, told),) = run.end()
    assert code == 0, told
    found = json.loads(file.read_text())
    narrow = {"embedding": 16, "hidden": 16, "dropout": 0.0, "dtype": "float64"}
    config = RNNConfig(max_steps=300, save_every=20, **narrow)
    corpus = Grammar(seed=config.seed).corpus(*GRAMMAR_TOKENS)
    alone = run_rnn_locally(Job(config, corpus))
    assert found["losses"] == [pytest.approx(alone.losses, abs=1e-10)]
    assert found["valid_perplexity"] == pytest.approx(alone.perplexity, rel=1e-10)


def test_a_device_that_is_not_there_is_refused(monkeypatch, capsys):
    refused = "interface is 'none0', but must be one of .*lo"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", "0")
    assert main(["reinforce", "--interface", "none0"]) == 2
    assert re.match(f"cdopt-tutorial: {refused}", capsys.readouterr().err)
    monkeypatch.setenv(store.INTERFACE, "none0")  # for a program of one's own
    with pytest.raises(torchrun.Unfit, match=refused):
        store.interface()


def test_each_process_has_one_worker(tmp_path):
    command = [sys.executable, "-m", "cdopt_tutorial", "reinforce"]
    env = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    workers = "3 workers, agent, observer0, observer1"
    told = f"torchrun has started 2 processes, but this run has {workers}"
    assert (done.returncode, done.stderr) == (2, f"cdopt-tutorial: {told}\n")
