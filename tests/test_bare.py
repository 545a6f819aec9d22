"""The bare programs: complete, independent, private, and equal to the package."""

import ast
import importlib
import os
import random
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
from hosts import kill, tree
from running import wait_for_end
from torch.futures import Future
from torch.nn.functional import cross_entropy

from cdopt_tutorial import hybrid
from cdopt_tutorial import parameter_server as rnn
from cdopt_tutorial.calls import reference
from cdopt_tutorial.data import Corpus, Vocabulary
from cdopt_tutorial.data.bags import Bags, BagSplit
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.publish.chapter import programs, read_chapter
from cdopt_tutorial.publish.project import this_project
from cdopt_tutorial.reinforce import Episodes, Policy, ReinforceConfig, run_locally
from cdopt_tutorial.reinforce.learner import policy_loss
from cdopt_tutorial.run import Role, launch, serve

LINES, COLUMNS = 60, 88
TEXTS = {
    name.removesuffix(".py"): text
    for path in this_project().chapters()
    for name, text in programs(read_chapter(path)).items()
}
MODULES = {
    "bare_reinforce": {"torch", "gymnasium"},
    "bare_hosts": {"torch", "gymnasium"},
    "bare_ahead": {"torch", "gymnasium"},
    "bare_ray": {"ray", "bare_hosts"},
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
    assert imported(text) == MODULES.get(name, {"torch"})


# What makes a run short, after the definitions; chapter 7 runs and checks its own two.
SHORT = {
    "bare_reinforce": "GOAL = 5",
    "bare_ahead": "GOAL = 5",
    "bare_rnn": "WIDTH, all_tokens = 32, read_tokens\ntorch.manual_seed(1)\n"
    "def read_tokens(): return all_tokens()[:3_600]",
    "bare_hybrid": "TRAINED, EPOCHS = 320, 1",
    "bare_servers": "TRAINED, EPOCHS = 320, 1",
    "bare_shards": "STEPS = 2",
    "bare_fsdp": "STEPS = 2",
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
for name in sys.argv[1:]:
    if not os.fork():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(f"{name}.err", os.O_CREAT | os.O_WRONLY), 2)
        runpy.run_path(f"{name}.py", run_name="__main__")
        sys.exit()
    print(name, os.waitstatus_to_exitcode(os.wait()[1]))
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
    options = {"cwd": tmp_path, "env": env, "text": True, "stdout": subprocess.PIPE}
    seen, listening = set(), set()
    with subprocess.Popen(command, **options) as running:
        while running.poll() is None:
            for process in tree([running]):
                seen.add(process)
                with suppress(psutil.Error):  # it has just ended
                    ends = process.net_connections(kind="inet")
                    listening |= {c.laddr.ip for c in ends if c.status == "LISTEN"}
            time.sleep(0.3)
        codes = running.stdout.read().split()[1::2]
    said = {name: (tmp_path / f"{name}.err").read_text() for name in SHORT}
    assert (codes, said) == (["0"] * len(SHORT), dict.fromkeys(SHORT, ""))
    assert listening == {"127.0.0.1"}
    wait_for_end(seen)
    # Torch's own cache, which is made with the first optimizer.
    left = [path.name for path in tmp_path.glob("tmp/*")]
    assert all(name.startswith("torchinductor_") for name in left), left
    files = {f"{name}.{kind}" for name in SHORT for kind in ("py", "err")}
    assert {path.name for path in tmp_path.iterdir()} == files | {"tmp"}


@pytest.fixture
def importable(tmp_path, monkeypatch):
    """Makes a program a module that workers can import, too."""

    def write(name, more=""):
        (tmp_path / f"{name}.py").write_text(program(name, more))
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
    torch.manual_seed(1)
    policy, lengths = Policy(), torch.tensor([7, 3])
    names = zip(policy.state_dict(), module.policy.state_dict().values(), strict=True)
    policy.load_state_dict({name: value.clone() for name, value in names})
    taken = torch.arange(7)[:, None] < lengths
    states, actions = torch.randn(7, 2, 4), torch.randint(2, (7, 2))
    before = torch.linspace(0.1, 0.9, 14).reshape(7, 2)  # of the policy that played
    for i, steps in enumerate(lengths.tolist()):
        parts = actions[:steps, i, None], before[:steps, i, None].log()
        module.rollouts.put((0, states[:steps, i], *parts))
    module.train()
    episodes = Episodes(states, actions, 1.0 * taken, lengths, lengths < 0)
    order = taken.T  # one episode after the other
    old = before.T[order]
    now = policy(states.transpose(0, 1)[order]).softmax(1)
    ratios = now.gather(1, actions.T[order][:, None])[:, 0].detach() / old
    assert ratios.min() < module.MOST < ratios.max()
    padded = torch.zeros(2, 7).masked_scatter(order, ratios).T[taken]
    weighting = padded.clamp(max=module.MOST)
    policy_loss(policy, [episodes], module.GAMMA, weighting).backward()
    for one, other in zip(module.policy.parameters(), policy.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5)


def test_the_rnn_comes_to_the_parameters_of_the_package_in_one_process(importable):
    steps = 12
    small = "VOCAB_SIZE, WIDTH, SEQ_LEN, BATCH_SIZE = 40, 8, 7, 5"
    module = importable("bare_rnn", small)
    rows = steps * module.SEQ_LEN + 1
    tokens = module.read_tokens()[: rows * module.BATCH_SIZE + 1]
    roles = {"trainer": Role(bare_roles.train_rnn, (tokens,)), "ps": Role(serve)}
    found = launch(roles, attach=bare_roles.attach)["trainer"]
    width, seq_len = module.WIDTH, module.SEQ_LEN
    config = rnn.RNNConfig(
        embedding=width, hidden=width, dropout=0.0, seq_len=seq_len, lr=module.LR,
        batch_size=module.BATCH_SIZE, clip=None, max_steps=steps, dtype="float64",
    )  # fmt: skip
    words = tuple(f"word{number}" for number in range(module.VOCAB_SIZE))
    corpus = Corpus(Vocabulary(words), tokens, tokens)
    begin = {name: bare_roles.values(w.shape) for name, w in found.items()}
    history = rnn.run_locally(rnn.Job(config, corpus, begin=begin))
    assert len(history.losses) == steps
    assert max_difference(found, begin) > 0.01  # they moved
    assert max_difference(found, history.weights) <= 1e-10


def test_the_hybrid_comes_to_the_parameters_of_the_package_in_one_process(importable):
    module = importable("bare_hybrid", "TRAINED, EPOCHS = 320, 1")
    roles = {f"trainer{rank}": Role(serve) for rank in range(2)}
    roles |= {"master": Role(bare_roles.drive_hybrid), "ps": Role(serve)}
    found, other = launch(roles, attach=bare_roles.attach)["master"]
    assert max_difference(found, other) == 0
    begin = {name: bare_roles.values(w.shape) for name, w in found.items()}
    begin["table.weight"] = torch.zeros_like(found["table.weight"])
    assert max_difference(found, begin) > 0.01  # they moved
    config = hybrid.HybridConfig(
        embedding=module.WIDTH, lr=module.LR, momentum=0.0, epochs=1,
        batch_size=module.BATCH_SIZE, dtype="float64", device="cpu",
    )  # fmt: skip
    # The package shuffles; in this order its joint batches are the program's.
    rows = module.read_bags()[: module.TRAINED]
    generator = torch.Generator().manual_seed(1000 * config.seed)
    rows = rows[torch.randperm(len(rows), generator=generator).argsort()]
    bags = Bags(rows[:, 1:], rows[:, 0])
    few = bags.select(torch.arange(8))
    data = BagSplit(bags, few, few, num_tokens=module.TOKENS, num_classes=8)
    weights = hybrid.run_locally(hybrid.Job(config, data, begin)).weights
    assert max_difference(found, weights) <= 1e-10


def test_the_servers_come_to_the_table_of_one_process(importable):
    module = importable("bare_servers", "TRAINED, EPOCHS = 320, 2")
    roles = {f"trainer{i}": Role(bare_roles.train_servers, (i,)) for i in range(2)}
    roles |= {name: Role(serve) for name in module.SERVERS}
    found = launch(roles, attach=bare_roles.in_float64)["trainer0"]
    table = torch.zeros(module.TOKENS, 8, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([table], module.LR)
    for rows in module.read_bags()[: module.TRAINED].split(module.BATCH_SIZE) * 2:
        loss = cross_entropy(table[rows[:, 1:]].sum(1), rows[:, 0])
        table.grad, *_ = torch.autograd.grad(loss, table)
        adam.step()
    for server, part in enumerate(found):
        assert part.abs().max() > 0.01  # it moved
        torch.testing.assert_close(part, table[server::2].detach(), rtol=0, atol=1e-10)


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
def test_hosts_go_on_if_another_process_dies_while_they_restart(tmp_path):
    (tmp_path / "bare_hosts.py").write_text(program("bare_hosts", DEATHS))
    lo = dict.fromkeys(("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), "lo")
    # Below the ports that the system gives to clients.
    meet = f"--master-addr 127.0.0.1 --master-port {random.randrange(20_000, 30_000)}"
    options = f"--local-addr 127.0.0.1 --nnodes 2 --max-restarts 3 {meet}".split()
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    hosts = ["--node-rank=0", "--nproc-per-node=2"], ["--node-rank=1"]
    runs = [
        subprocess.Popen(
            [*command, *host, "bare_hosts.py"],
            cwd=tmp_path, env=os.environ | lo, text=True, stdout=subprocess.PIPE,
        )
        for host in hosts
    ]  # fmt: skip
    try:
        said, _ = runs[0].communicate(timeout=300)  # it hung
        assert [each.wait(300) for each in runs] == [0, 0]
    finally:
        kill(runs)
    assert re.findall(r"^round (\d)", said, re.MULTILINE) == ["0", "1"]
    assert (tmp_path / "died").exists()


def test_shards_come_to_the_parameters_of_the_package(importable, tmp_path):
    steps = 12
    sizes = "CONTEXT, WIDTH, HIDDEN, BATCH, LR = 4, 3, 32, 8, 0.05"
    importable("bare_shards", f"{sizes}\nSTEPS = {steps}")
    path = f"file://{tmp_path}/ranks"
    ranks = {f"rank{i}": Role(bare_roles.train_shards, (i, path)) for i in range(2)}
    for found in launch(ranks, attach=bare_roles.in_float64).values():
        assert max_difference(found["bare"], found["start"]) > 0.01  # they moved
        assert max_difference(found["bare"], found["package"]) <= 1e-10
        # In a step: for the constraint and the scores; for the constraint's gradient
        # with respect to both factors; and for that of the vectors, within Adam.
        assert found["all-reduces"] == (2 + 2 + 1) * steps


def test_fsdp_comes_to_the_parameters_of_the_package_in_one_process(
    importable, tmp_path
):
    module = importable("bare_fsdp", "STEPS, WIDTH, CONTEXT = 8, 8, 6")
    path = f"file://{tmp_path}/ranks"
    roles = {f"rank{i}": Role(bare_roles.train_fsdp, (i, path)) for i in range(2)}
    roles |= {"alone": Role(bare_roles.train_fsdp_alone)}
    ranks = launch(roles, attach=bare_roles.in_float64)
    alone = ranks.pop("alone")
    dissolved = [weight for name, weight in alone.items() if name.endswith("original")]
    assert len(dissolved) == module.BLOCKS
    for weight in dissolved:
        assert torch.dist(weight.T @ weight, torch.eye(8).double()) < 1e-12
    for found in ranks.values():
        assert max_difference(found, alone) <= 1e-10
