"""The bare programs: complete, independent, private, and equal to the package."""

import ast
import importlib
import os
import re
import subprocess
import sys
import time
from contextlib import suppress

import bare_roles
import numpy as np
import psutil
import pytest
import torch
from hosts import hosts, tree
from running import wait_for_end
from torch.futures import Future

from cdopt_tutorial.calls import reference
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.publish.chapter import programs, read_chapter
from cdopt_tutorial.publish.project import this_project
from cdopt_tutorial.reinforce import Episodes, Policy, ReinforceConfig, run_locally
from cdopt_tutorial.reinforce.learner import policy_loss
from cdopt_tutorial.run import launch

LINES, COLUMNS = 60, 88
TEXTS = {
    name.removesuffix(".py"): text
    for path in this_project().chapters()
    for name, text in programs(read_chapter(path)).items()
}


def program(name, more=""):
    """A program's text, with more code between its definitions and its main part."""
    definitions, *start = TEXTS[name].partition('\nif __name__ == "__main__":\n')
    return "".join([definitions, f"\n{more}\n" if more else "", *start])


def imported(text):
    """The modules outside of Python's library that a program imports."""
    names = []
    for node in ast.walk(ast.parse(text)):
        names += [each.name for each in node.names] if type(node) is ast.Import else []
        names += [node.module] if type(node) is ast.ImportFrom else []
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names


def fits_a_page(text):
    lines = text.splitlines()
    return len(lines) <= LINES and max(map(len, lines)) <= COLUMNS


@pytest.mark.parametrize("name", TEXTS)
def test_fits_a_page_and_needs_torch_and_gymnasium_only(name):
    assert fits_a_page(text := program(name))
    libraries = {"ray", "bare_hosts"} if name == "bare_ray" else {"torch", "gymnasium"}
    assert imported(text) <= libraries


# What makes a run short, after the definitions; chapter 7 runs and checks its own two.
SHORT = {
    "bare_reinforce": "GOAL = 5",
    "bare_ahead": "GOAL = 5",
    "bare_rnn": "WIDTH, all_tokens = 32, read_tokens\ntorch.manual_seed(1)\n"
    "def read_tokens(): return all_tokens()[:3_511]",
    "bare_hybrid": "TRAINED, EPOCHS = 320, 1",
    "bare_servers": "TRAINED = 320",
    "bare_shards": "STEPS, CONTEXT, WIDTH, HIDDEN, BATCH, LR = 12, 4, 3, 32, 8, 0.05",
    "bare_fsdp": "STEPS, WIDTH, CONTEXT = 8, 8, 6",
}
# Runs them in processes that have already imported torch, and so have their workers.
# The chapters run each as it stands.
RUNNER = """
import functools, os, runpy, sys
import gymnasium, IPython, torch._dynamo
import torch.distributed.fsdp, torch.distributed.optim
from torch import multiprocessing

spawn = functools.partial(multiprocessing.start_processes, start_method="fork")
multiprocessing.spawn = spawn
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
for name in sys.argv[1:]:
    if not os.fork():
        runpy.run_path(f"{name}.py", run_name="__main__")
        sys.exit()
    if os.wait()[1]:
        sys.exit(f"{name} failed")
"""


def test_short_runs_say_nothing_listen_on_loopback_and_leave_nothing(tmp_path):
    for name, more in SHORT.items():
        (tmp_path / f"{name}.py").write_text(program(name, more))
    (tmp_path / "tmp").mkdir()
    env = {n: v for n, v in os.environ.items() if n != "PYTHONPATH"}
    # The programs set two of these too late for workers that are forked.
    env |= {"PYTORCH_JIT": "0", "PYTHONWARNINGS": "ignore:You are using a Backend"}
    env["TMPDIR"] = str(tmp_path / "tmp")
    command = [sys.executable, "-c", RUNNER, *SHORT]
    options = {"cwd": tmp_path, "env": env, "text": True, "stderr": subprocess.PIPE}
    seen, listening = set(), set()
    with subprocess.Popen(command, **options) as running:
        while running.poll() is None:
            for process in tree([running]):
                seen.add(process)
                with suppress(psutil.Error):  # it has just ended
                    ends = process.net_connections(kind="inet")
                    listening |= {c.laddr.ip for c in ends if c.status == "LISTEN"}
            time.sleep(0.3)
        assert (running.returncode, running.stderr.read()) == (0, "")
    assert listening == {"127.0.0.1"}
    wait_for_end(seen)
    # Torch's own cache, which is made with the first optimizer.
    left = [path.name for path in tmp_path.glob("tmp/*")]
    assert all(name.startswith("torchinductor_") for name in left), left
    assert {path.stem for path in tmp_path.iterdir()} == {*SHORT, "tmp"}


@pytest.fixture
def importable(tmp_path, monkeypatch):
    """Makes a program a module that workers can import, too."""

    def write(name, more=None):
        text = program(name, SHORT[name] if more is None else more)
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return write


class OneProcess:
    """Replaces `rpc` in the agent's program: runs every call here, at once.

    Each observer has the package's random streams for environments and actions.
    """

    RRef = staticmethod(reference)

    def __init__(self, config):
        self.config, self.streams, self.rewards = config, {}, []

    def remote(self, worker, make, args):
        number, env = int(worker.removeprefix("observer")), make(*args)
        seed = self.config.seed_of(number, "environments")
        env.np_random = np.random.default_rng(seed)
        actions = torch.Generator().manual_seed(self.config.seed_of(number, "actions"))
        self.streams[worker] = actions.get_state()
        return reference(env)

    def rpc_async(self, worker, function, args):
        torch.set_rng_state(self.streams[worker])
        function(*args)
        self.streams[worker] = torch.get_rng_state()
        self.agent = args[-1].local_value()
        self.rewards.append(sum(self.agent.rewards[worker]))
        (future := Future()).set_result(None)
        return future


def test_the_agent_gets_the_rewards_of_the_package(importable, monkeypatch):
    module, config = importable("bare_reinforce"), ReinforceConfig("per-step", seed=3)
    assert (config.gamma, config.lr) == (module.GAMMA, module.LR)
    plain = OneProcess(config)
    monkeypatch.setattr(module, "rpc", plain)
    monkeypatch.setattr(module, "GOAL", 45)
    torch.manual_seed(config.seed)
    module.train()
    limits = {"seed": config.seed, "max_episodes": len(plain.rewards)}
    ours = run_locally(ReinforceConfig("per-step", **limits))
    assert max(plain.rewards) < 500  # the time limit, which it does not know
    assert len(plain.rewards) > 20 and ours.score.rewards == plain.rewards
    for one, other in zip(ours.weights.values(), plain.agent.parameters(), strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-3, atol=1e-4)


def test_the_agent_ahead_has_the_gradient_of_the_package(importable):
    module = importable("bare_ahead", "EPISODES, GOAL = 2, 0.1")
    policy, lengths = Policy(), torch.tensor([7, 3])
    start = zip(policy.state_dict(), module.policy.state_dict().values(), strict=True)
    policy.load_state_dict(dict(start))
    states, actions = torch.randn(7, 2, 4), torch.randint(2, (7, 2))
    before = torch.linspace(0.1, 0.9, 14).reshape(7, 2)  # of the policy that played
    for i, steps in enumerate(lengths.tolist()):
        parts = actions[:steps, i, None], before[:steps, i, None].log()
        module.rollouts.put((0, states[:steps, i], *parts))
    module.train()
    taken = torch.arange(7)[:, None] < lengths
    now = policy(states).softmax(2).gather(2, actions[:, :, None])[:, :, 0]
    ratios = (now.detach() / before)[taken]
    assert ratios.min() < module.MOST < ratios.max()
    episodes = Episodes(states, actions, 1.0 * taken, lengths, lengths < 0)
    weighting = ratios.clamp(max=module.MOST)
    policy_loss(policy, [episodes], module.GAMMA, weighting).backward()
    for one, other in zip(module.policy.parameters(), policy.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", bare_roles.SYSTEMS)
def test_workers_come_to_the_parameters_of_the_package_in_one_process(name, importable):
    importable(f"bare_{name}")
    ended = launch(bare_roles.roles(name), attach=bare_roles.attach)
    start, alone = ended.pop("alone")
    assert max_difference(alone, start) > 0.01  # they moved
    for weights in sum(filter(None, ended.values()), []):
        assert max_difference(weights, alone) <= 1e-10


# What disturbs a run on two hosts: in its second round observer 2 dies, and when all
# start again, so does observer 1.
DEATHS = """
ROUNDS, undisturbed = 2, play
if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "1"):
    os._exit(1)
def play(policy, seed):
    if seed == 3 and not os.path.exists("died"):
        open("died", "w").close(), os._exit(1)
    return undisturbed(policy, seed)
"""


@pytest.mark.engines
def test_hosts_go_on_if_another_process_dies_while_they_restart(tmp_path, monkeypatch):
    (tmp_path / "bare_hosts.py").write_text(program("bare_hosts", DEATHS))
    monkeypatch.chdir(tmp_path)
    for library in "TP", "GLOO":
        monkeypatch.setenv(f"{library}_SOCKET_IFNAME", "eth0")
    with hosts(2) as made:
        ends = made.torchrun([2, 1], module="bare_hosts", max_restarts=3).end()
    assert [code for code, _ in ends] == [0, 0], ends
    assert re.findall(r"^round (\d)", ends[0][1], re.MULTILINE) == ["0", "1"]
    assert (tmp_path / "died").exists()
