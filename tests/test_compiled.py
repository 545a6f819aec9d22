"""torch.compile takes a constrained layer with its penalty as one graph, quietly."""

import re
import shutil
import warnings

import pytest
import torch
import torch._inductor.config
from constrained import CASES, F64, RNNS, dissolved, move_, near
from torch import nn

from cdopt_tutorial import constraints

#: Warnings about torch's own code.
OF_TORCH = "`torch.jit.script_method` is deprecated", "`torch._prims_common.check` is"


@pytest.fixture(autouse=True)
def forgotten():
    """No test sees what another one compiled."""
    yield
    torch._dynamo.reset()


def results(loss, model, x):
    """The loss, and the gradients."""
    model.zero_grad()
    found = loss(x)
    found.backward()
    return [found.detach(), *(p.grad.clone() for p in model.parameters())]


def assert_compiles(model, x, backend):
    """In two steps, since nothing computed in one may be kept for the next."""
    constrained = constraints.Constraints(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss(x):
        return model(x).square().mean() + constrained.penalty()

    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            # Whatever another test left open is noticed when it is freed.
            warnings.simplefilter("ignore", ResourceWarning)
            given = results(compiled, model, x)
        lines = [str(warning.message) for warning in caught]
        assert [line for line in lines if not line.startswith(OF_TORCH)] == []
        expected = results(loss, model, x)
        assert all(result.abs().max() > 1e-3 for result in expected)
        near(given, expected, 1e-12)
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


@pytest.mark.parametrize("case", ["wide", *RNNS])
def test_export(case, monkeypatch):
    monkeypatch.setattr(torch._dynamo.config, "allow_rnn", True)
    layer, x = CASES[case].build()
    exported = torch.export.export(layer, (x,), strict=case in RNNS).module()
    near(exported(x), layer(x))
