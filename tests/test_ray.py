"""The systems on Ray: as in one process, also where workers die."""

import json
import re
import signal
import threading
import time
from functools import partial
from http.server import ThreadingHTTPServer
from importlib.util import find_spec
from ipaddress import ip_address

import psutil
import pytest
import ray_roles
import roles
from browsing import Quiet
from hosts import NET, PATIENCE, RAY_PORT, hosts
from reinforce_roles import train_each
from running import COMMAND, LONG, endless, listeners, wait_for_end

from cdopt_tutorial import data, sharding
from cdopt_tutorial import parameter_server as rnn
from cdopt_tutorial.engines import Role, Trace, WorkerError, serve
from cdopt_tutorial.engines.on_ray import OnRay
from cdopt_tutorial.engines.torch_rpc import TorchRPC
from cdopt_tutorial.engines.watch.errors import WorkerLost
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.parameter_server import RNNConfig
from cdopt_tutorial.reinforce import CONVERSATIONS, ReinforceConfig, run, run_locally
from cdopt_tutorial.sharding import ShardConfig

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]

TOLERANCE = 1e-10
LOOPBACK = "127.0.0.1", "::ffff:127.0.0.1"
EXACT = {"embedding": 16, "hidden": 16, "dropout": 0.0, "dtype": "float64"}
# Of a daemon that may be gone before Ray is up.
EARLY = "ray could not be started on this host|ray has lost"
JOINT = {"num_trainers": 2, "manifold": "stiefel", "where": "server"}


def test_every_conversation_has_the_rewards_of_one_process():
    configs = [ReinforceConfig(c, num_envs=2, max_episodes=20) for c in CONVERSATIONS]
    system = {"agent": Role(train_each, (OnRay(), configs))}
    system |= {f"observer{i}": Role(serve) for i in range(2)}
    found = [each.score.rewards for each in OnRay().launch(system)["agent"]]
    assert found == [run_locally(config).score.rewards for config in configs]


def test_shards_have_the_parameters_of_one_process():
    config = ShardConfig("tp", max_steps=5, width=16, seq_len=8, dtype="float64")
    job = sharding.Job(config)
    result, local = sharding.run(job, OnRay()), sharding.run_locally(job)
    assert max_difference(result.weights, local.weights) <= TOLERANCE


def test_an_observer_that_dies_is_named():
    # With a conversation in which the agent answers all observers together.
    with pytest.raises(WorkerError, match="^observer1 died"):
        run(ReinforceConfig("batched"), OnRay(), attach=ray_roles.lose_observer)


KILLED = "was killed by SIGKILL"
DEATHS = [
    (TorchRPC, {}, [(f"trainer0 {KILLED}", 0, 20), (f"ps {KILLED}", 1, 0)]),
    (OnRay, JOINT, [("ps died", 0, 10)]),
]


@pytest.mark.parametrize("engine, more, deaths", DEATHS, ids=["torch RPC", "Ray"])
def test_a_training_that_dies_ends_as_that_of_one_process(
    engine, more, deaths, tmp_path
):
    config = RNNConfig(max_steps=50, save_every=10, **more, **EXACT)
    corpus = data.Grammar(seed=1).corpus(20_000, 5_000)
    job = rnn.Job(config, corpus, keep=tmp_path / "kept.pt")
    if len(deaths) == 1:
        (tmp_path / "trainer").touch()  # as if it had died already
    restarts = []
    histories = rnn.run(
        job,
        engine(),
        max_restarts=len(deaths),
        on_restart=lambda error, job: restarts.append((error.headline, job.resume)),
        attach=partial(ray_roles.die_once, tmp_path, 25, 15),
    )
    places = [(reason, kept.epoch, kept.window) for reason, kept in restarts]
    assert places == deaths
    alone = rnn.run_locally(rnn.Job(config, corpus))
    if len(histories) == 1:  # else each has the losses of its own columns
        assert histories[0].losses == pytest.approx(alone.losses, abs=TOLERANCE)
    assert max_difference(histories[0].weights, alone.weights) <= TOLERANCE


@pytest.mark.usefixtures("limited")
def test_who_gets_no_further_is_named():
    keep = {"a": (0, 0.5, 0), "b": (0, LONG, 0)}
    system = {name: Role(roles.keep_pace, steps) for name, steps in keep.items()}
    with pytest.raises(WorkerError, match="^b missed its deadline of 8 s for its part"):
        OnRay().launch(system, attach=partial(roles.between, 8.0))


def test_nobody_else_reaches_it_and_nothing_is_left(tmp_path):
    with endless("ray", tmp_path) as (running, below):
        (raylet,) = (each for each in below if each.name() == "raylet")
        places = {place for each in below for place, _ in listeners(each.pid)[0]}
        assert places <= {str(ip_address(each)) for each in LOOPBACK}
        # The driver has no time to end what it started; Ray itself would take a minute.
        raylet.parent().kill()
        running.kill()
        wait_for_end(below)
    assert not list(tmp_path.iterdir())


def test_on_two_hosts_it_is_as_in_one_process_until_one_is_cut_off(tmp_path):
    file = tmp_path / "found.json"
    smoke = ("--smoke", "--against-local", "--manifold", "stiefel", "--json", file)
    endless = ("--manifold", "stiefel", "--epochs", "1000000")
    with hosts(2) as made, made.cluster() as environment:

        def begin(*arguments):
            there = ("--engine", "ray", "--address", f"{NET}.1:{RAY_PORT}")
            command = [*COMMAND, "hybrid", *map(str, arguments), *there]
            return made.start(1, *command, env=environment)

        output, _ = begin(*smoke).communicate(timeout=PATIENCE)
        assert json.loads(file.read_text())["max_parameter_difference"] <= TOLERANCE
        running = begin(*endless)
        while "epoch" not in (line := running.stdout.readline()):
            assert line, running.wait()
        there = [each for each in made.processes() if "RayWorker" in each.name()]
        made.cut(2)
        output, _ = running.communicate(timeout=PATIENCE)
        assert running.returncode == 1
        named = r"^cdopt-tutorial: \w+ on host2 has not been heard from for 15 s$"
        assert re.search(named, output, re.M), output
        wait_for_end(there)
        assert len(there) == 4  # also those behind the cut


def test_who_is_cut_off_before_it_has_joined_or_is_late_is_not_called_dead():
    from ray.exceptions import ActorUnavailableError, GetTimeoutError

    from cdopt_tutorial.engines.actors.ray_worker import RayActors

    with pytest.raises(WorkerLost, match="^observer1 can't be reached\n"):
        with RayActors().named("observer1"):
            raise ActorUnavailableError("Network is unreachable", bytes(16))
    with pytest.raises(TimeoutError, match="^observer1 did not answer in time$"):
        with RayActors().named("observer1"):
            raise GetTimeoutError("not ready")


@pytest.mark.parametrize("other", ["none", "silent", "http"])
def test_what_does_not_answer_as_a_cluster_is_named(other):
    # A cluster with TLS is silent to a client without.
    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        there = f"127.0.0.1:{1 if other == 'none' else server.server_port}"
        if other == "http":
            threading.Thread(target=server.serve_forever, daemon=True).start()
        expected = f"^ray can't join the cluster at {there}"
        expected += "" if other == "none" else " in 10 s$"
        with pytest.raises(WorkerError, match=expected):
            run(ReinforceConfig(), OnRay(address=there), join_deadline=10)
        if other == "http":
            server.shutdown()


@pytest.mark.parametrize(
    "name, number, late",
    [
        ("gcs_server", "KILL", False), ("gcs_server", "KILL", True),
        ("raylet", "KILL", True), ("gcs_server", "STOP", True),
    ],
)  # fmt: skip
def test_a_daemon_that_is_killed_or_stopped_is_named(name, number, late):
    expected = f"^ray has lost its {name}$" if late else EARLY
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    rounds = threading.Event()

    def kill():
        while True:
            for each in psutil.Process().children(recursive=True):
                if each.pid not in before and each.name() == name:
                    rounds.wait(None if late else 0)
                    each.send_signal(signal.Signals[f"SIG{number}"])
                    return
            time.sleep(0.02)

    threading.Thread(target=kill, daemon=True).start()
    endless = ReinforceConfig(lr=1e-9, max_episodes=10**7)
    with pytest.raises(WorkerError, match=expected):
        run(endless, OnRay(), on_report=lambda *_: rounds.set())


def test_what_it_does_not_do_is_refused(monkeypatch, no_process_starts):
    refused = "trace is for torch RPC, and not for the engine ray"
    with pytest.raises(ValueError, match=refused):
        OnRay().launch({"a": Role(serve)}, trace=Trace())
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(
        ValueError, match="the engine ray starts its workers itself, not torchrun"
    ):
        OnRay()
