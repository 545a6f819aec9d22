"""Chapter 4: constrained weights, on the trainer or the server: no promise changes."""

import json
from dataclasses import replace

import pytest
import torch

from cdopt_tutorial.cli import main
from cdopt_tutorial.constraints import Constraints, feasibility
from cdopt_tutorial.data import Grammar
from cdopt_tutorial.engines import Trace
from cdopt_tutorial.engines.one_process import OneProcess
from cdopt_tutorial.engines.seam.gradients import WAYS
from cdopt_tutorial.engines.seam.reference import LocalRef
from cdopt_tutorial.engines.torch_rpc import TorchRPC
from cdopt_tutorial.parameter_server import (
    Job,
    RNNConfig,
    Trainer,
    checkpoint,
    compare,
    run,
    run_locally,
    sample,
)
from cdopt_tutorial.parameter_server.model import build

EXACT = RNNConfig(
    embedding=6, hidden=5, num_layers=2, dropout=0.0, seq_len=7, batch_size=6,
    optimizer="sgd", lr=0.1, momentum=0.9, clip=1.0, epochs=3, max_steps=50,
    dtype="float64", manifold="stiefel", penalty_param=0.5,
)  # fmt: skip
GRAMMAR = Grammar(num_words=9, branching=3)
CORPUS = GRAMMAR.corpus(900, 200)
SHORT = GRAMMAR.corpus(360, 50)  # of 9 windows
HELD = {
    "stacked": {},
    "per gate": {"per_gate": True},
    "oblique LSTM": {"manifold": "oblique"},
    "Stiefel decoder": {"where": "server"},
    "unit word vectors": {"manifold": "oblique", "where": "server"},
}
every_way = pytest.mark.parametrize("way", HELD.values(), ids=HELD)


def difference(one, other):
    """Largest difference of any parameter; all of them have to be there."""
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


@pytest.mark.parametrize(
    ("name", "num_trainers"),
    [
        ("stacked", 3), ("per gate", 1), ("oblique LSTM", 1), ("Stiefel decoder", 3),
        ("unit word vectors", 3),
    ],
)  # fmt: skip
@pytest.mark.parametrize("crossing", WAYS)
def test_equals_one_process(name, num_trainers, crossing):
    # A pass, and a part of the next one.
    config = replace(EXACT, num_trainers=num_trainers, max_steps=11, **HELD[name])
    distributed = run(Job(config, SHORT), engine=TorchRPC(crossing))[0]
    local = run_locally(Job(config, SHORT))
    begin = run_locally(Job(replace(config, max_steps=1, lr=1e-300), SHORT))
    free = run_locally(Job(replace(config, manifold="none", per_gate=False), SHORT))
    assert len(local.losses) == len(distributed.feasibility) == 11
    assert difference(local.weights, begin.weights) > 0.01  # they moved
    assert local.losses[-1] != free.losses[-1]  # and are held
    assert difference(distributed.weights, local.weights) <= 5e-11
    one, other = distributed.feasibility[-1], local.feasibility[-1]
    assert one.weight == pytest.approx(other.weight, rel=1e-8)
    assert one.mapped == pytest.approx(other.mapped, rel=1e-6)


@every_way
def test_stays_near_the_manifold_and_projects_onto_it(way):
    history = run_locally(Job(replace(EXACT, **way), CORPUS))
    assert max(found.mapped for found in history.feasibility) < 0.05
    assert history.feasibility[-1].weight > 1e-6  # penalised, not exact
    projected = history.projected
    assert projected.feasibility.weight < 1e-12
    assert projected.valid_loss == pytest.approx(
        history.progress[-1].valid_loss, rel=0.01
    )


def test_only_the_named_part_is_constrained():
    for way in HELD.values():
        config = replace(EXACT, **way)
        for part in ("embedding", "rnn", "decoder"):
            module = build(part, 9, config)
            if part == config.constrained:
                assert Constraints(module).feasibility().weight < 1e-12
            else:
                with pytest.raises(ValueError, match="no weight"):
                    Constraints(module)


def test_what_the_constraint_means():
    stacked = build("rnn", 9, EXACT)
    gates = build("rnn", 9, replace(EXACT, per_gate=True))
    words = build("embedding", 9, replace(EXACT, manifold="oblique", where="server"))
    decoder = build("decoder", 9, replace(EXACT, where="server")).decoder.weight
    eye = torch.eye(5, dtype=torch.float64)
    whole, single = stacked.weight_hh_l1, gates.weight_hh_l1.unflatten(0, (4, 5))
    assert torch.allclose(whole.mT @ whole, eye)
    assert torch.allclose(single.mT @ single, eye.expand(4, 5, 5))
    assert torch.allclose(words.encoder.weight.norm(dim=1), torch.ones(9).double())
    assert torch.allclose(decoder.mT @ decoder, eye)


def test_the_penalty_reaches_the_server():
    # The original's penalty looks at the trainer's model only: what the server owns
    # would count zero.
    config = replace(EXACT, where="server", clip=None)
    trace = Trace()
    (history,) = run(Job(config, CORPUS), trace=trace)
    calls = [call for call in trace.calls if call.method == "penalty_on_cpu"]
    back = [span for span in trace.spans if span.name == "penalty backward"]
    assert len(calls) == len(back) == len(history.losses)
    assert {span.worker for span in back} == {"ps"}
    held = history.feasibility[-1].weight
    loose = run(Job(replace(config, penalty_param=1e-12), CORPUS))[0].feasibility[-1]
    assert held < 0.3 * loose.weight


@pytest.mark.parametrize("sync", [True, False])
def test_the_penalty_counts_once_for_each_step(sync):
    for rank in (0, 1):
        config = replace(EXACT, num_trainers=2, sync=sync)
        trainer = Trainer(OneProcess(), rank, Job(config, CORPUS))
        off = {name: 1.1 * weight for name, weight in trainer.gather("weights").items()}
        trainer.on_owners("load", off, {})
        loss, mean, _ = trainer.loss(*next(trainer.stream.windows()), trainer.hidden(0))
        own = mean / 2 if sync else mean  # half of the joint batch
        penalty = 0.0 if sync and rank == 1 else trainer.constraints.penalty().item()
        assert loss.item() - own == pytest.approx(penalty, rel=1e-9, abs=1e-12)
        assert penalty > 0.1 or (sync and rank == 1)


def test_trainers_out_of_step_can_share_constrained_weights():
    for name in ("stacked", "Stiefel decoder"):
        way = HELD[name]
        config = replace(EXACT, num_trainers=2, sync=False, lr=0.02, **way)
        histories = run(Job(config, CORPUS))
        assert [len(h.losses) for h in histories] == [50, 50]
        assert sum(sum(h.staleness) for h in histories) > 0
        assert histories[0].feasibility[-1].mapped < 0.05


def test_goes_on_from_a_checkpoint(tmp_path):
    config = replace(EXACT, dropout=0.3, optimizer="adam", lr=0.01, save_every=3)
    config = replace(config, max_steps=20, **HELD["Stiefel decoder"])
    whole = run(Job(config, SHORT))[0]
    file = tmp_path / "kept"
    # Where chance begins anew in a pass of 9 windows, after the 3rd of the second.
    run(Job(replace(config, max_steps=12), SHORT, keep=file))
    again = run(Job(config, SHORT, resume=checkpoint.load(file)))[0]
    assert again.losses == whole.losses
    assert difference(again.weights, whole.weights) == 0.0


def test_a_checkpoint_of_another_constraint_does_not_fit(tmp_path):
    file = tmp_path / "kept"
    run_locally(Job(replace(EXACT, max_steps=1), CORPUS, keep=file))
    for other in ({"manifold": "none"}, {"per_gate": True}, {"where": "server"}):
        (name,) = other
        job = Job(replace(EXACT, **other), CORPUS, resume=checkpoint.load(file))
        with pytest.raises(ValueError, match=f"the checkpoint has {name} "):
            run_locally(job)


def test_a_checkpoint_from_before_constraints_is_one_without(tmp_path):
    file, free = tmp_path / "kept", replace(EXACT, manifold="none")
    run_locally(Job(replace(free, max_steps=1), CORPUS, keep=file))
    saved = checkpoint.load(file)
    for name in ("manifold", "where", "per_gate", "penalty_param"):
        del saved.config[name]
    assert len(run_locally(Job(free, CORPUS, resume=saved)).losses) == 50
    with pytest.raises(ValueError, match="has manifold 'none', but 'stiefel'"):
        run_locally(Job(EXACT, CORPUS, resume=saved))


def test_a_constrained_model_writes():
    history = run_locally(Job(replace(EXACT, where="server"), CORPUS))
    config = replace(EXACT, where="server")
    words = CORPUS.vocabulary
    begin = words.words[1]
    text = sample.write(history.weights, config, words, begin, length=5)
    assert text.split()[0] == begin


@every_way
def test_a_control_begins_alike_and_is_free(way):
    config = replace(EXACT, max_steps=1, **way)
    job = Job(config, CORPUS)
    held, control = run_locally(job), run_locally(compare.control(job))
    assert control.losses == pytest.approx(held.losses, rel=1e-12)
    assert control.projected is None


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ({"manifold": "flat"}, "manifold is 'flat', but must be none or stiefel"),
        ({"where": "moon"}, "where is 'moon', but must be trainer or server"),
        ({"penalty_param": 0.0}, "penalty_param is 0.0, but must be above 0"),
        ({"where": "server", "per_gate": True}, "stiefel on the server"),
        ({"manifold": "none", "per_gate": True}, "none on the trainer"),
    ],
)
def test_refuses(way, message):
    with pytest.raises(ValueError, match=message):
        replace(EXACT, **way)


def test_a_stiefel_decoder_needs_as_many_words_as_its_width():
    # Its short side is what gets orthonormal: that is the words' then.
    decoder = build("decoder", 3, replace(EXACT, where="server"))
    weight = decoder.decoder.weight
    assert torch.allclose(weight @ weight.mT, torch.eye(3).double())
    assert feasibility(LocalRef(decoder)).weight < 1e-12


class TestCommand:
    SMALL = ["--embedding", "6", "--hidden", "6", "--seq-len", "5", "--batch-size", "4"]

    @pytest.fixture
    def text(self, tmp_path):
        file = tmp_path / "text"
        file.write_text("the cat sat on the mat , and the dog saw it .\n" * 100)
        return str(file)

    def test_writes_feasibility_for_each_step(self, text, tmp_path):
        file = tmp_path / "out.json"
        args = ["--corpus", text, *self.SMALL, "--json", str(file), "--max-steps", "50"]
        how = ["--manifold", "stiefel", "--where", "server", "--penalty", "0.5"]
        assert main(["rnn", *args, *how]) == 0
        found = json.loads(file.read_text())
        assert len(found["feasibility"]["weight"]) == 50
        assert 0 < found["feasibility"]["mapped"][-1] < 1e-2
        assert found["projected_feasibility"] < 1e-6
        assert 1 < found["projected_perplexity"] < 30

    def test_against_local(self, text, tmp_path):
        file = tmp_path / "out.json"
        args = ["--corpus", text, *self.SMALL, "--json", str(file), "--smoke"]
        how = ["--manifold", "oblique", "--where", "server", "--against-local"]
        assert main(["rnn", *args, *how]) == 0
        assert json.loads(file.read_text())["max_parameter_difference"] <= 1e-10
