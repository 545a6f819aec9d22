"""Where each tensor is: every system's training, with "meta" in place of a GPU.

Without CDOpt's own layer, whose constant is a frozen parameter: moving to a GPU changes
it in place, which "meta" can't.
"""

import pytest
import torch
from elsewhere import Elsewhere, tensors_in, where

from cdopt_tutorial import data, hybrid, reinforce, sharding, training
from cdopt_tutorial import parameter_server as rnn
from cdopt_tutorial.calls import reference, references
from cdopt_tutorial.calls.device import pick_device
from cdopt_tutorial.dissolving import eigenspace, memory
from cdopt_tutorial.dissolving.costs import VARIANTS, make_step
from cdopt_tutorial.parameter_server import model
from cdopt_tutorial.parameter_server.system import Owner
from cdopt_tutorial.reinforce.speed import run_alone

CORPUS = data.Grammar().corpus(300, 100)
META = {"device": "meta", "batch_size": 4, "max_steps": 2}
RNN = META | {"embedding": 4, "hidden": 4, "seq_len": 5}
SHARD = META | {"width": 8, "num_heads": 2, "seq_len": 4}
PICKING = "training", "reinforce.agent", "sharding.model", "dissolving.memory"
CONSTRAINED = {  # manifold, and where
    "free": {},
    "trainer": {"manifold": "stiefel"},
    "decoder": {"manifold": "stiefel", "where": "server"},
    "vectors": {"manifold": "oblique", "where": "server"},
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


class TestParameterServer:
    @pytest.mark.parametrize("kind", CONSTRAINED)
    def test_a_training(self, kind, spy, on_the_wire):
        owners = spy(Owner, "__init__")
        cut = "loss" if kind in ("free", "vectors") else "logits"
        config = rnn.RNNConfig(cut=cut, num_layers=2, **CONSTRAINED[kind], **RNN)
        history = rnn.run_locally(rnn.Job(config, CORPUS))
        assert len(history.losses) == 2 and on_the_wire
        assert where(history.weights.values()) == {"cpu"}
        for owner, *_ in owners:
            assert where(owner._parts.parameters()) == {"meta"}
            states = owner._optimizer.state.values()
            moments = [each for s in states for each in tensors_in(s) if each.ndim]
            assert len(states) and where(moments) == {"meta"}

    @pytest.mark.parametrize("cut", ["loss", "logits"])
    def test_a_trainer_that_pulls_the_lstm(self, cut, on_the_wire):
        config = rnn.RNNConfig(cut=cut, num_trainers=2, **RNN)
        parts = {name: model.build_own(name, 9, config, 2) for name in model.PARTS}
        references = {name: reference(part) for name, part in parts.items()}
        whole = model.RNNModel(references, config, "meta")
        whole.rnn = model.PulledLSTM(references["rnn"], config)
        tokens = torch.zeros(5, 2, dtype=torch.int64)
        loss, hidden = whole.loss(tokens, tokens, whole.start(2))
        loss.backward()
        assert where([loss]) == {"cpu"} and where(hidden) == {"meta"}
        for part in parts.values():
            assert where(each.grad for each in part.parameters()) == {"meta"}

    def test_a_checkpoint_goes_on_elsewhere(self, tmp_path, monkeypatch):
        file = tmp_path / "checkpoint"
        config = rnn.RNNConfig(**RNN)
        rnn.run_locally(rnn.Job(config, CORPUS, keep=file))
        monkeypatch.setattr(training, "pick_device", pick_device)  # "meta" is not here
        found = rnn.checkpoint.load(file)
        assert found.config["device"] == "meta"
        kept = found.weights, found.optimizer, found.hidden
        assert where(tensors_in(kept)) == {"cpu"} and found.optimizer
        here = rnn.RNNConfig(**RNN | {"max_steps": 3, "device": "cpu"})
        again = rnn.run_locally(rnn.Job(here, CORPUS, resume=found))
        assert len(again.losses) == 3


@pytest.mark.parametrize(
    ("semantics", "kind"),
    [("exact", "trainer"), ("exact", "vectors"), ("original", "free")],
)
def test_the_hybrid(kind, semantics, on_the_wire):
    config = hybrid.HybridConfig(semantics=semantics, **META, **CONSTRAINED[kind])
    result = hybrid.run_locally(hybrid.Job(config))
    assert len(result.losses) == 2 and on_the_wire
    assert where(result.weights.values()) == {"cpu"}


@pytest.mark.parametrize("conversation", reinforce.CONVERSATIONS)
def test_an_agent_and_its_observer(conversation, spy):
    acting = spy(reinforce.Policy, "scores")
    limits = {"num_observers": 1, "num_envs": 2, "max_episodes": 2}
    config = reinforce.ReinforceConfig(conversation, device="meta", **limits)
    training = run_alone(config)
    assert where(training.weights.values()) == {"cpu"}
    # Of the agent's policy, or the observer's.
    assert where(policy.affine1.weight for policy, _ in acting) == {"meta"}


class TestShards:
    @pytest.mark.parametrize("manifold", ["none", "stiefel", "oblique"])
    def test_a_training(self, manifold, spy):
        steps = spy(sharding.system.Trainer, "step")
        config = sharding.ShardConfig(manifold=manifold, clip=1.0, **SHARD)
        result = sharding.run_locally(sharding.Job(config, CORPUS))
        assert len(result.losses) == len(steps) == 2
        assert where(steps[0][0].model.parameters()) == {"meta"}
        assert where(result.weights.values()) == {"cpu"}


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
        seen = [t for of, inputs in passes for t in (inputs, *of.parameters())]
        assert where(seen) == {"meta"}

    @pytest.mark.parametrize("method", eigenspace.METHODS)
    def test_a_problem_of_eigenvectors(self, method):
        problem = eigenspace.digits_problem("meta")
        assert where([problem.matrix]) == {"meta"}
        assert len(eigenspace.solve(method, problem, steps=1).gap) == 2

    def test_how_a_gradient_fares(self, spy):
        given = spy(memory, "gradient_norms")
        memory.flows((1,), hidden=4, device="meta")
        seen = [t for of, *args in given for t in (*args, *of.parameters())]
        assert where(seen) == {"meta"}

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_a_step_that_is_timed(self, variant):
        make_step(variant, 4, 2, "meta")()
