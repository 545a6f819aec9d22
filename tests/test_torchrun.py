"""The systems under torchrun, on hosts of their own: as in one process, or named."""

import json
import re

import pytest
from hosts import NET, hosts, kill, wait_until
from running import listeners, wait_for_end
from torch.distributed import TCPStore

from cdopt_tutorial.parameter_server import checkpoint
from cdopt_tutorial.reinforce import ReinforceConfig, run_locally
from cdopt_tutorial.run import Role, launch, serve, under_torchrun
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


def test_a_killed_worker_is_named_by_torchrun():
    endless = ("--lr", "1e-9", "--max-episodes", "10000000")
    with hosts(2) as made:
        run = made.torchrun([2, 1], "reinforce", *endless)
        run.wait_for("Episode")  # before it, they may not have joined
        for host in 1, 2:
            for worker in run.ranks(host):  # which listen on one device only
                places, names = listeners(worker.pid)
                assert {address for address, _ in places} == {f"{NET}.{host}"}
                assert names == []
        (observer,) = run.ranks(2)
        observer.kill()
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
        kill(run.agents)
        here, _ = (text for _, text in run.end())
    assert "observer1 did not answer a call that agent made" in here


def place(kept):
    """Epoch and window of the checkpoint that a run keeps there."""
    found = checkpoint.load(kept) if kept.exists() else None
    return (found.epoch, found.window) if found else (0, 0)


def test_a_run_that_is_killed_goes_on_where_it_was(tmp_path):
    file, kept = tmp_path / "found.json", tmp_path / "kept.pt"
    keep = ("--checkpoint", str(kept), "--save-every", "20", "--max-steps", "500")
    exact = ("--against-local", "--json", str(file), "--corpus", "grammar")
    alone = ("--interface", "lo")  # by default it would be eth0
    with hosts(1) as made:
        run = made.torchrun([2], "rnn", *NARROW, *keep, *exact, *alone, max_restarts=1)
        wait_until(lambda: place(kept) != (0, 0))
        ranks = run.ranks(1)
        _, trainer = ranks
        assert {on for on, _ in listeners(trainer.pid)[0]} == {"127.0.0.1"}
        trainer.kill()
        wait_for_end(ranks)  # all of which begin again
        before = place(kept)
        # From the start, it would first keep an earlier place.
        wait_until(lambda: place(kept) != before)
        assert place(kept) > before
        ((code, output),) = run.end()
    assert code == 0, output
    assert json.loads(file.read_text())["max_parameter_difference"] <= 1e-10


#: What is refused, the device that is named, and the workers, for two processes.
REFUSED = [
    ("interface is 'none0', but must be one of .*lo", "none0", "ab"),
    ("torchrun has started 2 processes, but this run has 1 workers, a$", "lo", "a"),
    ("workers a, b, but another one b, a: all must list the same in the", "lo", "ab"),
]


@pytest.mark.parametrize("said, device, workers", REFUSED)
def test_what_does_not_fit_is_refused(said, device, workers, monkeypatch):
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    started = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2"}
    started |= {"MASTER_ADDR": "localhost", "MASTER_PORT": f"{store.port}"}
    for name, value in (started | {INTERFACE: device}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(under_torchrun, "_run", 7)
    under_torchrun._open_store("results").set("names", "b, a")  # by the other one
    monkeypatch.setattr(under_torchrun, "_run", 6)
    with pytest.raises(ValueError, match=said):
        launch({worker: Role(serve) for worker in workers})
