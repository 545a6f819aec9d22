"""torch.compile takes a constrained layer with its penalty as one graph, quietly."""

import re
import shutil

import pytest
import torch
import torch._inductor.config
from constrained import CASES, F64, dissolved, move_, near
from torch import nn

from cdopt_tutorial import constraints

#: Warnings about torch's own code.
OF_TORCH = "`torch.jit.script", "`torch._prims_common.check` is"


@pytest.fixture(autouse=True)
def quietly(recwarn):
    """Nothing warns, and no test sees what another one compiled."""
    yield
    torch._dynamo.reset()
    # Whatever another test left open is noticed when it is freed.
    lines = [str(w.message) for w in recwarn if w.category is not ResourceWarning]
    assert [line for line in lines if not line.startswith(OF_TORCH)] == []


def assert_compiles(model, x, backend):
    """In two steps, since nothing computed in one may be kept for the next."""
    constrained = constraints.Constraints(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss(x):
        return model(x).square().mean() + constrained.penalty()

    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    for _ in range(2):
        results = []
        for function in compiled, loss:
            model.zero_grad()
            value = function(x)
            value.backward()
            gradients = [p.grad.clone() for p in model.parameters()]
            results.append([value.detach(), *gradients])
        near(*results, 1e-12)
        assert all(result.abs().max() > 1e-3 for result in results[0])
        optimizer.step()


def test_all_manifolds_as_one_graph():
    model = nn.Sequential(
        dissolved(4, 9, manifold="oblique"), dissolved(9, 4),
        dissolved(4, 9, manifold="oblique", transpose=True, blocks=3),
        dissolved(9, 6, manifold="sphere"), dissolved(6, 6, blocks=3),
    )  # fmt: skip
    assert_compiles(move_(model), torch.randn(5, 4, **F64), "aot_eager")
    assert_compiles(*CASES["conv2d"].build(), "aot_eager")


def test_a_layer_down_to_the_machines_code():
    # Torch passes its own path to the linker unquoted.
    compiles = shutil.which("g++") and not re.search(r"\s", torch.__file__)
    backend = "inductor" if compiles else "aot_eager"
    with torch._inductor.config.patch(compile_threads=1):  # or it starts processes
        assert_compiles(*CASES["tall"].build(), backend)


@pytest.mark.parametrize("case", ["wide", "rnn", "lstm"])
def test_export(case, monkeypatch):
    monkeypatch.setattr(torch._dynamo.config, "allow_rnn", True)
    layer, x = CASES[case].build()
    exported = torch.export.export(layer, (x,), strict=case != "wide").module()
    near(exported(x), layer(x))
