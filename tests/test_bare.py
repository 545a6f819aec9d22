"""The bare programs: complete, alone, private, and equal to the package's systems."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import bare_roles
import numpy as np
import psutil
import pytest
import torch
from running import FORKED, wait_for_end
from torch.futures import Future
from torch.nn import functional as F
from torch.utils.benchmark import set_torch_threads

from cdopt_tutorial import hybrid
from cdopt_tutorial import parameter_server as rnn
from cdopt_tutorial.bench import bare
from cdopt_tutorial.data import Corpus, Vocabulary
from cdopt_tutorial.data.bags import Bags, BagSplit
from cdopt_tutorial.engines import Role, launch, serve
from cdopt_tutorial.engines.seam.reference import LocalRef
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.publish.programs import read_programs
from cdopt_tutorial.publish.project import this_project
from cdopt_tutorial.reinforce import ReinforceConfig, run_locally

LINES, COLUMNS = 60, 88
PROGRAMS = [name.removesuffix(".py") for name in read_programs(this_project())]

PROCESSES = {"bare_reinforce": 3, "bare_rnn": 2, "bare_hybrid": 4, "bare_shards": 2}
MODULES = {
    "bare_reinforce": {"torch", "gymnasium"},
    "bare_hosts": {"torch", "gymnasium"},
    "bare_ray": {"ray", "bare_hosts"},
}
# What makes a run short, behind the definitions. The chapters run each as it stands;
# here all but one fork their workers, since each that is spawned imports torch anew,
# and reads what the program sets.
READ = {"PYTORCH_JIT": "0", "PYTHONWARNINGS": "ignore:You are using a Backend"}
SHORT = {
    "bare_reinforce": f"GOAL = 30{FORKED}",
    "bare_rnn": "WIDTH = 32\ntorch.manual_seed(1)",
    "bare_hybrid": f"EPOCHS = 4{FORKED}",
    "bare_shards": f"STEPS = 51{FORKED}",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_fits_a_page_and_needs_torch_and_gymnasium_only(name):
    text = bare.program(name)
    assert len(text.splitlines()) <= LINES
    assert max(map(len, text.splitlines())) <= COLUMNS
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.partition(".")[0])
    assert imported - sys.stdlib_module_names == MODULES.get(name, {"torch"})


def test_a_program_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="no chapter has a bare_sums.py"):
        bare.program("bare_sums")


class Run:
    """A short run of a program, by itself in an empty folder, and what was seen."""

    def __init__(self, name, folder):
        path, self.temporary = bare.write(folder, name, SHORT[name]), folder / "tmp"
        self.temporary.mkdir()
        environment = bare.alone() | {"TMPDIR": str(self.temporary)}
        environment |= READ if FORKED in SHORT[name] else {}
        with subprocess.Popen(
            [sys.executable, path.name], cwd=folder, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            self.seen, self.listening = set(), set()
            while process.poll() is None:
                self.look(psutil.Process(process.pid))
                try:
                    process.wait(0.2)
                except subprocess.TimeoutExpired:
                    continue
            self.output, self.error = process.communicate()
        self.code = process.returncode

    def look(self, process):
        try:
            for each in process.children(recursive=True):
                self.seen.add(each)
                found = each.net_connections(kind="inet")
                self.listening |= {c.laddr.ip for c in found if c.status == "LISTEN"}
        except psutil.Error:  # it has just gone
            pass

    @property
    def numbers(self):
        """The last number of each line."""
        lines = map(re.compile(r"[\d.]+").findall, self.output.splitlines())
        return [float(line[-1]) for line in lines if line]  # two may share a line


@pytest.fixture(scope="module", params=PROCESSES)  # chapter 7 runs its own, and checks
def done(request, tmp_path_factory):
    return request.param, Run(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.xdist_group("bare")
class TestByItself:
    def test_ends_without_a_word_of_complaint(self, done):
        _, run = done
        assert (run.code, run.error) == (0, "")

    def test_learns(self, done):
        name, run = done
        numbers = run.numbers
        if name == "bare_reinforce":  # at random an episode is worth about 20
            assert numbers[0] < 20 and 30 <= numbers[-1] <= 500
        elif name == "bare_rnn":
            tokens = load(name).read_tokens()
            shares = tokens.bincount() / len(tokens)
            unigram = torch.special.entr(shares).sum().exp()
            assert round(unigram.item()) == 111  # as chapter 2 says
            # It starts at random, and the first steps bring it half way at the least.
            assert numbers[-1] < numbers[0] / 2 and numbers[-1] < unigram / 1.5
        elif name == "bare_shards":
            text = load(name).read_text()
            unigram = torch.special.entr(text.bincount() / len(text)).sum()
            losses = [float(n) for n in re.findall(r"loss ([\d.]+)", run.output)]
            assert losses[0] > unigram and losses[-1] < 0.9 * unigram
            assert max(numbers[-len(losses) :]) < 0.1  # the squared distance
        else:
            labels = load(name).read_bags()[:, 0]
            frequent = 100 * (labels.bincount().max() / len(labels))
            assert len(numbers) == 1 and 2 * frequent < numbers[0] <= 100

    def test_listens_on_loopback_only(self, done):
        _, run = done
        assert run.listening == {"127.0.0.1"}

    def test_leaves_nothing_behind(self, done):
        name, run = done
        assert len(run.seen) >= PROCESSES[name]
        wait_for_end(list(run.seen))
        # Torch's own cache, which every program that makes an optimizer begins.
        left = [path.name for path in run.temporary.iterdir()]
        assert all(name.startswith("torchinductor_") for name in left), left
        left = {path.name for path in run.temporary.parent.iterdir()}
        assert left == {"tmp", f"{name}.py"}


def load(name):
    """A program's definitions, which no worker can import."""
    found = {"__name__": name}
    exec(bare.program(name), found)
    return SimpleNamespace(**found)


@pytest.fixture
def importable(tmp_path, monkeypatch):
    """Makes a program a module that workers import, too."""

    def write(name, more=""):
        bare.write(tmp_path, name, more)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return write


class OneProcess:
    """Stands for `rpc` in the agent's program: runs every call here, and at once.

    Observers have the package's random streams, environments and actions each.
    """

    RRef = LocalRef

    def __init__(self, config):
        self.config, self.streams, self.rewards = config, {}, []

    def remote(self, worker, make, args):
        number, env = int(worker.removeprefix("observer")), make(*args)
        seed = self.config.seed_of(number, "environments")
        env.np_random = np.random.default_rng(seed)
        actions = torch.Generator().manual_seed(self.config.seed_of(number, "actions"))
        self.streams[worker] = actions.get_state()
        return LocalRef(env)

    def rpc_async(self, worker, function, args):
        torch.set_rng_state(self.streams[worker])
        function(*args)
        self.streams[worker] = torch.get_rng_state()
        self.agent = args[-1].local_value()
        self.rewards.append(sum(self.agent.rewards[worker]))
        future = Future()
        future.set_result(None)
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
    assert max(plain.rewards) < 500  # else the time limit, which it does not know
    assert len(plain.rewards) > 20 and ours.score.rewards == plain.rewards
    for one, other in zip(ours.weights.values(), plain.agent.parameters(), strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-3, atol=1e-4)


def test_the_rnn_comes_to_the_parameters_of_the_package(importable):
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
    (history,) = rnn.run(rnn.Job(config, corpus, begin=begin))
    assert len(history.losses) == steps
    assert max_difference(found, begin) > 0.01  # they moved
    assert max_difference(found, history.weights) <= 1e-10


class TestHybrid:
    @pytest.fixture
    def trained(self, importable):
        """The program, its joint batches, what it came to, and where it began."""
        module = importable("bare_hybrid", "TRAINED, EPOCHS = 320, 1")
        roles = {f"trainer{rank}": Role(serve) for rank in range(2)}
        roles |= {"master": Role(bare_roles.drive_hybrid), "ps": Role(serve)}
        one, other = launch(roles, attach=bare_roles.attach)["master"]
        assert max_difference(one, other) == 0
        begin = {name: bare_roles.values(w.shape) for name, w in one.items()}
        begin["table.weight"] = torch.zeros_like(one["table.weight"])
        assert max_difference(one, begin) > 0.01  # they moved
        return module, module.read_bags()[: module.TRAINED], one, begin

    def test_comes_to_the_parameters_of_one_process_and_of_the_package(self, trained):
        module, rows, found, begin = trained
        here = self.one_process(module, rows, begin)
        assert max_difference(found, here) <= 1e-10
        there = self.package(module, rows, begin)
        assert max_difference(found, there) <= 1e-10

    @staticmethod
    def one_process(module, rows, begin):
        weights = {name: w.clone().requires_grad_() for name, w in begin.items()}
        optimizer = torch.optim.SGD(weights.values(), lr=module.LR)
        for batch in rows.split(module.BATCH_SIZE):
            vectors = weights["table.weight"][batch[:, 1:]].sum(1)
            scores = F.linear(vectors, weights["dense.weight"], weights["dense.bias"])
            optimizer.zero_grad()
            F.cross_entropy(scores, batch[:, 0]).backward()
            optimizer.step()
        return {name: w.detach() for name, w in weights.items()}

    @staticmethod
    def package(module, rows, begin):
        config = hybrid.HybridConfig(
            embedding=module.WIDTH, lr=module.LR, momentum=0.0, epochs=1,
            batch_size=module.BATCH_SIZE, dtype="float64", device="cpu",
        )  # fmt: skip
        # The package shuffles; laid out so, its joint batches are the program's.
        generator = torch.Generator().manual_seed(1000 * config.seed)
        rows = rows[torch.randperm(len(rows), generator=generator).argsort()]
        offsets = module.BAG * torch.arange(len(rows))
        bags = Bags(rows[:, 1:].flatten(), offsets, rows[:, 0])
        held = bags.select(torch.arange(8))
        data = BagSplit(bags, held, held, num_tokens=module.TOKENS, num_classes=8)
        return hybrid.run(hybrid.Job(config, data, begin)).weights


class TestHosts:
    def test_threads_of_the_caller_do_not_matter(self, importable, monkeypatch):
        # Threads cut the sum over a round of more than 32,768 steps.
        module = importable("bare_hosts", "EPISODES, ROUNDS = 900, 1")
        monkeypatch.chdir(Path(module.__file__).parent)
        parts, found = [], []

        def ask(policy, seeds):  # the first round's policy is the same
            parts.extend([] if parts else [module.play(policy, seed) for seed in seeds])
            return parts

        for threads in (1, 2):
            with set_torch_threads(threads):
                module.train(2, ask, f"{threads}.pt")
            found.append(torch.load(f"{threads}.pt")[1])
        assert sum(len(actions) for _, actions, _ in parts) > 32_768
        assert max_difference(*found) == 0


class TestShards:
    STEPS = 12

    def test_come_to_the_parameters_of_the_package(self, importable):
        sizes = "CONTEXT, WIDTH, HIDDEN, BATCH, LR = 4, 3, 32, 8, 0.05"
        importable("bare_shards", f"{sizes}\nSTEPS = {self.STEPS}")
        ranks = {f"rank{i}": Role(bare_roles.train_shards, (i,)) for i in range(2)}
        found = launch(ranks, attach=bare_roles.attach_shards)
        parts = {f"rank{i}": Role(bare_roles.train_parts, (i,)) for i in range(2)}
        there = launch(parts, attach=bare_roles.attach_shards)
        for one, other in zip(found.values(), there.values(), strict=True):
            (whole, sent), (begin, end) = one, other
            assert max_difference(whole, begin) > 0.01  # they moved
            assert max_difference(whole, end) <= 1e-10
            # A step: the constraint and the scores; the constraint's gradient by both
            # factors; and that of the vectors, within Adam.
            assert sent == (2 + 2 + 1) * self.STEPS
