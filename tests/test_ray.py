"""The systems on Ray: as in one process, and what becomes of those that die."""

import itertools
import json
import os
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from ipaddress import ip_address

import cut_off
import pytest
import roles
import torch
from hosts import NET, PATIENCE, RAY_PORT, hosts
from running import COMMAND, LONG, endless, listeners, wait_for_end

from cdopt_tutorial import data, hybrid, rollouts, sharding
from cdopt_tutorial import parameter_server as rnn
from cdopt_tutorial.calls import network
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.parameter_server import RNNConfig
from cdopt_tutorial.parameter_server.system import Owner
from cdopt_tutorial.probes.attach import wrap
from cdopt_tutorial.reinforce import (
    CONVERSATIONS,
    ReinforceConfig,
    run_agent,
    run_locally,
)
from cdopt_tutorial.run import Role, Trace, WorkerError, launch, serve

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]

TOLERANCE = 1e-10
FEW = {"max_steps": 5, "dtype": "float64"}
ON_SERVERS = {**FEW, "where": "server"}
JOBS = [
    (hybrid, hybrid.HybridConfig(num_servers=2, manifold="stiefel", **ON_SERVERS)),
    (hybrid, hybrid.HybridConfig(num_servers=3, manifold="oblique", **ON_SERVERS)),
    (sharding, sharding.ShardConfig("tp", width=16, seq_len=8, **FEW)),
]


def test_every_conversation_has_the_rewards_of_one_process():
    configs = [ReinforceConfig(c, num_envs=2, max_episodes=20) for c in CONVERSATIONS]
    system = {"agent": Role(lambda: [run_agent(each) for each in configs])}
    system |= {f"observer{i}": Role(serve) for i in range(2)}
    found = [each.score.rewards for each in launch(system, on="ray")["agent"]]
    assert found == [run_locally(config).score.rewards for config in configs]


def test_observers_that_run_ahead_are_repeated_by_one_process():
    few = {"num_envs": 2, "max_episodes": 24, "seed": 3}
    config = rollouts.RolloutsConfig(2, max_lag=1, **few)
    found = rollouts.run(config, on="ray")
    again = rollouts.run_locally(config, found.schedule)
    assert found.score.rewards == again.score.rewards


@pytest.mark.parametrize("system, config", JOBS)
def test_tables_and_shards_are_those_of_one_process(system, config):
    job = system.Job(config)
    result, local = system.run(job, on="ray"), system.run_locally(job)
    assert max_difference(result.weights, local.weights) <= TOLERANCE


def die_once(file):
    """Attached: the server dies in its 15th step, unless there is the file."""
    calls = itertools.count(1)

    def step(function, *args):
        on_server = network.current().own_name() == "ps"  # a trainer owns a part, too
        if on_server and next(calls) == 15 and not file.exists():
            file.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args)

    wrap(Owner._move, step)


@pytest.mark.parametrize(
    ("on", "said"), [("rpc", "ps was killed by SIGKILL"), ("ray", "ps died")]
)
def test_a_training_that_dies_ends_as_that_of_one_process(on, said, tmp_path):
    joint = {"num_trainers": 2, "manifold": "stiefel", "where": "server"}
    small = {"embedding": 16, "hidden": 16, "dropout": 0.0, "dtype": "float64"}
    config = RNNConfig(max_steps=50, save_every=10, **joint, **small)
    corpus = data.Grammar(seed=1).corpus(20_000, 5_000)
    job = rnn.Job(config, corpus, keep=tmp_path / "kept.pt")
    restarts = []
    histories = rnn.run(
        job,
        on=on,
        max_restarts=1,
        on_restart=lambda error, job: restarts.append((error.headline, job.resume)),
        attach=partial(die_once, tmp_path / "died"),
    )
    ((reason, kept),) = restarts
    assert (reason, kept.epoch, kept.window) == (said, 0, 10)
    alone = rnn.run_locally(rnn.Job(config, corpus))
    assert max_difference(histories[0].weights, alone.weights) <= TOLERANCE


SERVE = Role(serve)
#: What is said, the system that fails so, and its options. Nothing answers at port 1.
FAILURES = {
    "a raised KeyboardInterrupt":
        ({"a": Role(roles.throw, (KeyboardInterrupt(),)), "b": SERVE}, {}),
    "a died": ({"a": Role(roles.send_self, ("SIGKILL",)), "b": SERVE}, {}),
    "b did not answer a call that a made":
        ({"a": Role(roles.call_through, ("b", time.sleep, LONG)), "b": SERVE},
         {"rpc_timeout": 5}),
    "late missed the deadline of 60 s to join":
        ({"late": Role(roles.identify, (roles.SlowToArrive(LONG),)), "b": SERVE},
         {"join_deadline": 60}),
    "ray could not join the cluster at 127.0.0.1:1|ray missed the deadline of 20 s.*":
        ({"a": SERVE}, {"on": "ray:127.0.0.1:1", "join_deadline": 10}),
}  # fmt: skip


def failure(system, options):
    with pytest.raises(WorkerError) as caught:
        launch(system, **{"on": "ray"} | options)
    return caught.value


@pytest.mark.usefixtures("limited")
class TestWorkers:
    def test_what_they_return_report_and_print_arrives(self, capsys):
        records = []
        system = {
            "worker": Role(roles.speak, (range(50),)),
            "caller": Role(roles.call_through, ("other", print, "half")),
            "other": Role(torch.arange, (3,)),
        }
        report = lambda *record: records.append(record)  # noqa: E731
        results = launch(system, on="ray", on_report=report)
        assert torch.equal(results["other"], torch.arange(3))
        assert records == [("worker", number) for number in range(50)]  # in order
        said = ["[other] half", "[worker] to be heard"]
        assert sorted(capsys.readouterr().out.splitlines()) == said

    def test_who_fails_is_named(self):
        with ThreadPoolExecutor() as threads:  # most of which wait
            errors = threads.map(failure, *zip(*FAILURES.values(), strict=True))
        for said, error in zip(FAILURES, errors, strict=True):
            assert re.fullmatch(said, error.headline)


def test_nobody_else_reaches_it_and_nothing_is_left(tmp_path):
    with endless("ray", tmp_path) as (running, below):
        (raylet,) = (each for each in below if each.name() == "raylet")
        places = {place for each in below for place, _ in listeners(each.pid)[0]}
        loopback = "127.0.0.1", "::ffff:127.0.0.1"
        assert places <= {str(ip_address(each)) for each in loopback}
        # The driver has no time to end what it started; Ray itself would take a minute.
        raylet.parent().kill()
        running.kill()
        wait_for_end(below)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("limited")
def test_on_two_hosts_it_is_as_in_one_process_until_one_is_cut_off(tmp_path):
    file, address = tmp_path / "found.json", f"{NET}.1:{RAY_PORT}"
    smoke = "--smoke", "--against-local", "--manifold", "stiefel", "--json", str(file)
    with hosts(2) as made, made.cluster() as environment:
        command = *COMMAND, "hybrid", *smoke, "--engine", "ray", "--address", address
        made.start(1, *command, env=environment).communicate(timeout=PATIENCE)
        assert json.loads(file.read_text())["max_parameter_difference"] <= TOLERANCE
        command = sys.executable, cut_off.__file__, f"ray:{address}"
        running = made.start(1, *command, env=environment)
        assert any("round 2" in line for line in running.stdout)
        made.cut(2)
        output, _ = running.communicate(timeout=PATIENCE)
        assert running.returncode == 1
        lost = "can't be reached|died|did not answer"
        assert re.search(rf"^\S+: (agent|observer\d) ({lost})", output, re.M), output


def test_what_it_does_not_do_is_refused(monkeypatch, no_process_starts):
    with pytest.raises(ValueError, match="a trace or a wire is of torch RPC, and not"):
        launch({"a": SERVE}, on="ray", trace=Trace())
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="starts its workers itself, not torchrun"):
        launch({"a": SERVE}, on="ray")
