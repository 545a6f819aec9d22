"""Where each tensor is: every system's training, with "meta" in place of a GPU.

Without CDOpt's own layer, whose constant is a frozen parameter: moving to a GPU changes
it in place, which "meta" can't.
"""

from functools import partial

import pytest
import torch
from elsewhere import Elsewhere, tensors_in, where
from torch import nn

from cdopt_tutorial import data, hybrid, reinforce, sharding, training
from cdopt_tutorial import parameter_server as rnn
from cdopt_tutorial.calls import reference, references
from cdopt_tutorial.calls.device import pick_device
from cdopt_tutorial.dissolving import eigenspace, memory
from cdopt_tutorial.dissolving.costs import VARIANTS, make_step
from cdopt_tutorial.parameter_server import model
from cdopt_tutorial.reinforce.speed import run_alone

CORPUS = data.Grammar().corpus(300, 100)
META = {"device": "meta", "batch_size": 4, "max_steps": 2}
RNN = META | {"embedding": 4, "hidden": 4, "seq_len": 5}
PICKING = "training", "reinforce.agent", "sharding.model", "dissolving.memory"


def run(system, job, config, **options):
    return system.run_locally(job(config(**options), CORPUS))


def run_hybrid(**options):
    return hybrid.run_locally(hybrid.Job(hybrid.HybridConfig(**META, **options)))


def act(conversation):
    limits = {"num_observers": 1, "num_envs": 2, "max_episodes": 2}
    return run_alone(reinforce.ReinforceConfig(conversation, device="meta", **limits))


text = partial(run, rnn, rnn.Job, rnn.RNNConfig, **RNN)
shards = partial(
    run, sharding, sharding.Job, sharding.ShardConfig,
    width=8, num_heads=2, seq_len=4, clip=1.0, **META,
)  # fmt: skip
SERVER = {"where": "server"}
VECTORS = {"manifold": "oblique", **SERVER}
DECODER = {"manifold": "stiefel", **SERVER}
RUNS = {
    "text": partial(text, cut="loss"),
    "text, trainer": partial(text, cut="logits", manifold="stiefel"),
    "text, decoder": partial(text, cut="logits", **DECODER),
    "text, vectors": partial(text, cut="loss", **VECTORS),
    "hybrid": partial(run_hybrid, semantics="original"),
    "hybrid, trainer": partial(run_hybrid, semantics="exact", manifold="stiefel"),
    "hybrid, vectors": partial(run_hybrid, semantics="exact", **VECTORS),
    **{f"acting, {way}": partial(act, way) for way in reinforce.CONVERSATIONS},
    **{f"shards, {on}": partial(shards, manifold=on) for on in ("none", "stiefel")},
}


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch):
    """Operators obey a GPU's rules, and "meta" is one of the devices."""
    for module in PICKING:
        monkeypatch.setattr(f"cdopt_tutorial.{module}.pick_device", lambda wish: wish)
    with Elsewhere():
        yield


@pytest.fixture(autouse=True)
def on_the_wire(monkeypatch):
    """All tensors that calls by reference send and return: they must be on the CPU."""
    seen = []

    def call(value, method, /, *args, **kwargs):
        result = plain(value, method, *args, **kwargs)
        found = tensors_in((args, kwargs, result))
        assert where(found) <= {"cpu"}, method
        seen.extend(found)
        return result

    plain = references.call_method
    monkeypatch.setattr(references, "call_method", call)
    return seen


@pytest.mark.parametrize("name", RUNS)
def test_a_training(name, spy):
    """Its layers are there, and its weights come home."""
    linear, recurrent = spy(nn.Linear, "forward"), spy(nn.LSTM, "forward")
    result = RUNS[name]()
    assert where(result.weights.values()) == {"cpu"}
    layers = [layer for layer, *_ in linear + recurrent]
    assert where(p for layer in layers for p in layer.parameters()) == {"meta"}


@pytest.mark.parametrize("cut", ["loss", "logits"])
def test_a_trainer_that_pulls_the_lstm(cut):
    config = rnn.RNNConfig(cut=cut, num_trainers=2, **RNN)
    parts = {name: model.build_own(name, 9, config, 2) for name in model.PARTS}
    references = {name: reference(part) for name, part in parts.items()}
    whole = model.RNNModel(references, config, "meta")
    whole.rnn = model.PulledLSTM(references["rnn"])
    tokens = torch.zeros(5, 2, dtype=torch.int64)
    loss, hidden = whole.loss(tokens, tokens, whole.start(2))
    loss.backward()
    assert where([loss]) == {"cpu"} and where(hidden) == {"meta"}
    for part in parts.values():
        assert where(each.grad for each in part.parameters()) == {"meta"}


def test_a_checkpoint_goes_on_elsewhere(tmp_path, monkeypatch):
    file = tmp_path / "checkpoint"
    config = rnn.RNNConfig(**RNN)
    rnn.run_locally(rnn.Job(config, CORPUS, keep=file))
    monkeypatch.setattr(training, "pick_device", pick_device)  # "meta" is not here
    found = rnn.checkpoint.load(file)
    kept = found.weights, found.optimizer, found.hidden
    assert where(tensors_in(kept)) == {"cpu"} and found.optimizer
    here = rnn.RNNConfig(**RNN | {"max_steps": 3, "device": "cpu"})
    again = rnn.run_locally(rnn.Job(here, CORPUS, resume=found))
    assert len(again.losses) == 3


class TestDissolving:
    @pytest.mark.parametrize("name", memory.MODELS)
    def test_a_model_that_remembers(self, name, spy, monkeypatch):
        passes = spy(memory.Model, "forward")
        monkeypatch.setattr(memory, "INTERVAL", 2)
        small = {"hidden": 4, "batch_size": 2, "steps": 2}
        short = memory.NextWord(seq_len=5, text_len=50)
        for of in short, memory.CopyingMemory(2, 2, 2):
            config = memory.MemoryConfig(of, device="meta", **small)
            memory.train(name, 1, config)
        memory.flows((1,), hidden=4, device="meta")
        seen = [t for of, *args in passes for t in (*args, *of.parameters())]
        assert where(seen) == {"meta"}

    @pytest.mark.parametrize("method", eigenspace.METHODS)
    def test_a_problem_of_eigenvectors(self, method):
        problem = eigenspace.digits_problem("meta")
        assert where([problem.matrix]) == {"meta"}
        assert len(eigenspace.solve(method, problem, steps=1).gap) == 2

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_a_step_that_is_timed(self, variant):
        make_step(variant, 4, 2, "meta")()
