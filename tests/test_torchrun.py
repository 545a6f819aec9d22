"""The systems under torchrun, on hosts of their own: as in one process, or named."""

import json
import re
from datetime import timedelta

import pytest
from hosts import NET, hosts, wait_until
from running import listeners, wait_for_end
from torch.distributed import HashStore, PrefixStore

from cdopt_tutorial import torchrun
from cdopt_tutorial.cli import main
from cdopt_tutorial.commands.rnn import GRAMMAR_TOKENS
from cdopt_tutorial.data import Grammar
from cdopt_tutorial.engines.torchrun import peers, store
from cdopt_tutorial.engines.watch.errors import WorkerError
from cdopt_tutorial.engines.watch.pace import LOST
from cdopt_tutorial.own_network import VARIABLE
from cdopt_tutorial.parameter_server import Job, RNNConfig, checkpoint
from cdopt_tutorial.parameter_server import run_locally as run_rnn_locally
from cdopt_tutorial.reinforce import ReinforceConfig, run_locally

pytestmark = pytest.mark.engines

SMOKE = ("--smoke", "--against-local")
ON_SERVER = ("--manifold", "stiefel", "--where", "server")
NARROW = ("--embedding", "16", "--hidden", "16")
#: Arguments, the number of workers on each host, and the rate of the last host's link.
RUNS = {
    "reinforce": (("reinforce", "--max-episodes", "40"), [2, 1], None),
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
        ends = made.torchrun(workers, *arguments, "--json", str(file)).end()
    found = json.loads(file.read_text())
    if arguments[0] == "reinforce":
        alone = run_locally(ReinforceConfig(max_episodes=40))
        assert found["rewards"] == alone.score.rewards
    else:
        assert [code for code, _ in ends] == [0] * len(workers), ends
        assert found["max_parameter_difference"] <= 1e-10
    # Only the first process prints results.
    said = [re.search("pisode|from one process", text) is not None for _, text in ends]
    assert said == [True] + [False] * (len(workers) - 1)


@pytest.fixture
def under_way():
    """A run that would take hours: the agent and an observer here, another there."""
    endless = ("--lr", "1e-9", "--max-episodes", "10000000")
    with hosts(2) as made:
        run = made.torchrun([2, 1], "reinforce", *endless)
        run.wait_for("Episode")  # before it, they may not have joined
        yield made, run, [run.workers(host) for host in (1, 2)]


def test_a_killed_worker_is_named_with_its_host(under_way):
    _, run, workers = under_way
    for host, there in enumerate(workers, start=1):
        for worker in there.values():  # which listen on one device only
            places, names = listeners(worker.pid)
            assert {address for address, _ in places} == {f"{NET}.{host}"}
            assert names == []
    workers[1]["observer1"].kill()
    (code, here), (other, there) = run.end()
    assert code == other == 1
    assert "cdopt-tutorial: observer1 was killed by SIGKILL\n" in there
    assert "observer1 was killed by SIGKILL (on host2)\n" in here


def test_a_host_that_is_cut_off_is_named(under_way):
    made, run, _ = under_way
    ranks = [*run.ranks(1), *run.ranks(2)]
    made.cut(2)
    # By then they have said why. Torchrun itself waits minutes for the other hosts.
    wait_for_end(ranks)
    run.kill()
    here, there = (text for _, text in run.end())
    silence = "has not been heard from for 15 s\n"
    assert f"cdopt-tutorial: observer1 on host2 {silence}" in here
    assert f"cdopt-tutorial: agent on host1 {silence}" in there


@pytest.fixture
def join(monkeypatch):
    """Makes the peers of a run as a process sees them; all share one store."""
    kept = HashStore()
    monkeypatch.setattr(peers, "open_store", lambda path: PrefixStore(path, kept))
    monkeypatch.setattr(peers, "_hosts", {})
    monkeypatch.setenv("WORLD_SIZE", "3")

    def enter(rank, names):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setattr("socket.gethostname", lambda: f"host{1 + (rank == 2)}")
        return peers.Peers(names, None, join_deadline=60)

    return enter


def test_a_peer_that_has_gone_is_explained_once_each_has_been_borne(join):
    run = join(0, ["agent", "observer0", "observer1"])
    assert run.explains_in() == 60 + LOST
    for worker in run._workers.values():
        worker.patience = LOST  # as once it was heard from
    assert run.explains_in() == 2 * LOST


def test_the_host_of_who_has_not_come_to_this_run_is_known_from_another(join):
    for rank, names in (2, "agent observer0 observer1"), (0, "ps trainer0 trainer1"):
        with join(rank, names.split()) as run:
            wait_until(lambda own=run._workers[run.own]: own.patience == LOST)
    hosts = {name: worker.host for name, worker in run._workers.items()}
    assert hosts == {"ps": "host1", "trainer0": "its host", "trainer1": "host2"}


def test_torchrun_that_is_no_more_as_a_run_begins_is_named(monkeypatch):
    nobody = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (nobody | {"RANK": "0", "WORLD_SIZE": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(store, "PATIENCE", timedelta(seconds=0.2))
    with pytest.raises(WorkerError, match="^torchrun can't be reached\n"):
        peers.Peers(["agent"], None, join_deadline=60)


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
    for name, value in (started | {VARIABLE: "host"}).items():
        monkeypatch.setenv(name, value)


def test_a_device_that_is_not_there_is_refused(by_torchrun, monkeypatch, capsys):
    refused = "interface is 'none0', but must be one of .*lo"
    assert main(["reinforce", "--interface", "none0"]) == 2
    assert re.match(f"cdopt-tutorial: {refused}", capsys.readouterr().err)
    monkeypatch.setenv(store.INTERFACE, "none0")  # for a reader's own program
    with pytest.raises(torchrun.Unfit, match=refused):
        store.interface()


def test_each_process_has_one_worker(by_torchrun, capsys):
    assert main(["reinforce"]) == 2
    workers = "3 workers, agent, observer0, observer1"
    line = f"torchrun has started 2 processes, but this run has {workers}"
    assert capsys.readouterr().err == f"cdopt-tutorial: {line}\n"
