"""torch.compile takes a constrained layer with its penalty as one graph, quietly."""

import re
import shutil
import warnings

import pytest
import torch
import torch._inductor.config
from cdopt.manifold_torch import oblique_torch, stiefel_torch
from cdopt.nn import Conv2d_cdopt, Linear_cdopt
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from cdopt_tutorial import constraints

F64 = {"dtype": torch.float64}
#: What torch warns of in its own code.
OF_TORCH = "`torch.jit.script_method` is deprecated", "`torch._prims_common.check` is"


@pytest.fixture(autouse=True)
def forgotten():
    """What a test compiled stays with it."""
    yield
    torch._dynamo.reset()


def layer(shape=(9, 4), **options):
    """Dissolved, and off its manifold."""
    rows, columns = shape
    made = constraints.dissolve(nn.Linear(columns, rows, **F64), **options)
    with torch.no_grad():
        made.parametrizations.weight.original.mul_(1.1)
    return made


def results(loss, model, x):
    """The loss, and the gradients by name."""
    model.zero_grad()
    found = loss(x)
    found.backward()
    moving = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    gradients = {name: p.grad.clone() for name, p in moving}
    return {"": found.detach(), **gradients}


def assert_compiles(model, x, backend):
    held = constraints.Constraints(model)

    def loss(x):
        return model(x).square().mean() + held.penalty()

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        # What another test of this process left open is noticed whenever it is freed.
        warnings.simplefilter("ignore", ResourceWarning)
        compiled = torch.compile(loss, fullgraph=True, backend=backend)
        given = results(compiled, model, x)
    said = [str(warning.message) for warning in heard]
    assert [line for line in said if not line.startswith(OF_TORCH)] == []
    for name, expected in results(loss, model, x).items():
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(given[name], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"transpose": True, "blocks": 3}])
def test_a_layer_with_its_penalty(options):
    """Those that are not among all the manifolds below."""
    model = layer(manifold="oblique", **options)
    assert_compiles(model, torch.randn(5, model.in_features, **F64), "aot_eager")


def test_a_convolution():
    model = constraints.dissolve(nn.Conv2d(3, 5, 2, **F64))
    with torch.no_grad():
        model.parametrizations.weight.original.mul_(1.1)
    assert_compiles(model, torch.randn(2, 3, 6, 6, **F64), "aot_eager")


def test_all_manifolds_down_to_the_machines_code():
    # Torch does not quote its own path for the linker.
    compiles = shutil.which("g++") and not re.search(r"\s", torch.__file__)
    backend = "inductor" if compiles else "aot_eager"
    tall, wide = layer(), layer(shape=(4, 9))
    columns = layer(manifold="oblique", transpose=True)
    last = layer(shape=(6, 9), manifold="sphere"), layer(shape=(6, 6), blocks=3)
    model = nn.Sequential(tall, wide, columns, *last)
    with torch._inductor.config.patch(compile_threads=1):  # or it starts processes
        assert_compiles(model, torch.randn(5, 4, **F64), backend)


def test_the_compiled_layer_goes_on_as_its_weights_move():
    """What was computed for one step must not be kept for the next."""
    model = layer()
    held, x = constraints.Constraints(model), torch.randn(5, 4, **F64)

    def loss(x):
        return model(x).square().mean() + held.penalty()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(3):
        expected = results(loss, model, x)
        given = results(compiled, model, x)
        losses.append(given[""].item())
        for name, value in expected.items():
            torch.testing.assert_close(given[name], value, rtol=1e-12, atol=1e-12)
        optimizer.step()
    assert losses[0] > losses[1] > losses[2]


class TestOfCdopt:
    @pytest.mark.parametrize("manifold", [stiefel_torch, oblique_torch])
    def test_a_linear_layer(self, manifold):
        options = {"manifold_class": manifold, "penalty_param": 0.1, **F64}
        model = Linear_cdopt(9, 4, **options)
        with torch.no_grad():
            model.weight.mul_(1.1)
        assert_compiles(model, torch.randn(5, 9, **F64), "aot_eager")

    @pytest.mark.filterwarnings("ignore:Error detected in MmBackward0")
    def test_a_convolution_fails(self):
        """The way out is `dissolve`, whose convolution compiles."""
        options = {"manifold_class": stiefel_torch, "penalty_param": 0.1, **F64}
        model = Conv2d_cdopt(3, 5, 2, **options)
        x = torch.randn(2, 3, 6, 6, **F64)
        with pytest.raises(BackendCompilerFailed, match="data-dependent"):
            torch.compile(model, fullgraph=True, backend="aot_eager")(x)
