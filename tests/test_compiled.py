"""torch.compile(fullgraph=True) of models with timeloom's layers, beside the same models outside of graphs."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import timeloom as tl
from timeloom.nn import handles, operators
from timeloom.solvers import Shooting

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # by dynamo itself
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),  # by inductor itself
]
D, B, CHUNKS = 3, 2, Shooting(chunk=4)
LAYERS = {
    "gru": (tl.GRU, {"solver": CHUNKS}, 21),
    "gru, two directions": (tl.GRU, {"num_layers": 2, "bidirectional": True, "solver": CHUNKS}, 21),
    "gru without bias, auto": (tl.GRU, {"bias": False}, 50),
    "gru of one step": (tl.GRU, {"solver": CHUNKS}, 1),
    "gru, left to torch": (tl.GRU, {"num_layers": 2}, 7),
    "lstm": (tl.LSTM, {"num_layers": 2, "solver": CHUNKS}, 21),
    "lstm, projected": (tl.LSTM, {"proj_size": 2, "solver": CHUNKS}, 21),
    "lstm, left to torch": (tl.LSTM, {"bidirectional": True}, 21),
    "rnn": (tl.RNN, {"nonlinearity": "relu", "solver": CHUNKS}, 21),
    "rnn, sequential": (tl.RNN, {"solver": "sequential"}, 21),
    "implicit gru": (tl.ImplicitGRU, {"solver": CHUNKS}, 21),
}


class Model(nn.Module):
    """A layer between two others, its final state used as well."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        width = (layer.proj_size or layer.hidden_size) * (2 if layer.bidirectional else 1)
        self.encode, self.layer, self.decode = nn.Linear(D, D), layer, nn.Linear(width, 2)

    def forward(self, x: Tensor, hx: Any = None, **more: Any) -> tuple[Tensor, Tensor]:
        output, final = self.layer(torch.tanh(self.encode(x)), hx, **more)
        final = torch.cat([part.flatten() for part in final]) if isinstance(final, tuple) else final
        return self.decode(output).sin(), final


def results(model: nn.Module, x: Tensor, hx: Tensor | None = None) -> dict[str, Tensor]:
    x = x.detach().clone().requires_grad_()
    hx = None if hx is None else hx.detach().clone().requires_grad_()
    model.zero_grad()
    output, final = model(x, hx)
    (output.square().sum() + final.sin().sum()).backward()
    found = {key.removeprefix("_orig_mod."): value.grad.clone() for key, value in model.named_parameters()}
    found |= {"output": output.detach(), "final": final.detach(), "x": x.grad}
    return found if hx is None else {**found, "hx": hx.grad}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype
        error = float((found[key] - value).abs().max() / value.abs().max().clamp(min=1e-30))
        assert error < tolerance, f"{key}: off by {error:.1e}"


@pytest.fixture(autouse=True)
def graphs_of_recurrent_layers() -> Iterator[None]:
    """Torch takes nothing that is one of its recurrent layers into a graph unless told to."""
    from torch._dynamo import config

    torch.compiler.reset()
    with config.patch(allow_rnn=True):
        yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in LAYERS), ("gru", torch.float64), ("lstm", torch.float64)]
)
def test_as_outside_of_a_graph(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    make, options, steps = LAYERS[name]
    model, x = Model(make(D, 5, **options)).to(dtype), torch.randn(steps, B, D, dtype=dtype)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    assert_close(results(compiled, x), results(twin, x), tolerance)
    with torch.no_grad():
        for found, expected in zip(compiled(x), twin(x), strict=True):
            assert not found.requires_grad
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert len(model.layer.reports) == len(twin.layer.reports)
    for found, expected in zip(model.layer.reports, twin.layer.reports, strict=True):
        assert (found.solver, found.chunk, found.iterations) == (expected.solver, expected.chunk, expected.iterations)
        assert found.reason == expected.reason


@pytest.mark.parametrize(("hard", "batch_first"), [({"bias": 6.0}, False), ({"scale": 4.0}, True)])
def test_training_against_the_sequential_truth(hard: dict[str, float], batch_first: bool) -> None:
    torch.manual_seed(0)
    truth = Model(nn.GRU(D, 5, batch_first=batch_first)).double()
    with torch.no_grad():
        truth.encode.weight.mul_(2)
        truth.get_submodule("layer").get_parameter("bias_ih_l0")[5:10] += hard.get("bias", 0.0)
        truth.get_submodule("layer").get_parameter("weight_hh_l0").mul_(hard.get("scale", 1.0))
    ours = Model(tl.GRU(D, 5, batch_first=batch_first, solver=CHUNKS)).double()
    ours.load_state_dict(truth.state_dict())
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    x, hx = torch.randn(*((B, 33) if batch_first else (33, B)), D).double(), torch.randn(1, B, 5).double()
    optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in (truth, ours)]
    for _ in range(3):
        assert_close(results(compiled, x, hx), results(truth, x, hx), 1e-11)
        assert ours.layer.reports[0].backward is not None
        for optimizer in optimizers:
            optimizer.step()


def test_inductor_runs_torch_layers_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    calls, run_torch = [], operators._run_torch

    def count(*args: Any, **more: Any) -> Any:
        calls.append(args)
        return run_torch(*args, **more)

    monkeypatch.setattr(operators, "_run_torch", count)
    model, x = Model(tl.GRU(D, 5)), torch.randn(8, B, D)
    found = results(torch.compile(model, fullgraph=True), x)
    assert len(calls) == 1, "the backward pass ran the forward pass again"
    assert_close(found, results(model, x), 1e-5)


def test_lengths_of_sequences_compile_once_more_at_most() -> None:
    torch.manual_seed(0)
    model, graphs = Model(tl.GRU(D, 5, solver=CHUNKS)), []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for steps in (20, 21, 22, 35, 60):
        x = torch.randn(steps, B, D)
        assert_close(results(compiled, x), results(model, x), 1e-5)
    assert len(graphs) == 2, "one graph for the first length, one for all others"
    assert sum("timeloom.solve" in target for target in graphs[1]) == 1


@pytest.mark.parametrize("what", ["lengths", "autocast"])
def test_calls_that_no_graph_holds_run_outside(what: str) -> None:
    torch.manual_seed(0)
    model, x = Model(tl.GRU(D, 5, solver=CHUNKS)), torch.randn(20, B, D)
    more = {"lengths": torch.tensor([20, 9])} if what == "lengths" else {}
    with torch.autocast("cpu", torch.bfloat16, enabled=what == "autocast"):
        expected = model(x, **more)
        found = torch.compile(model, backend="aot_eager")(x, **more)
        torch.compiler.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="timeloom: "):
            torch.compile(model, backend="aot_eager", fullgraph=True)(x, **more)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["gru", "lstm", "lstm, projected", "rnn", "gru, left to torch"])
def test_operators_by_torch_own_check(name: str) -> None:
    torch.manual_seed(0)
    make, options, steps = LAYERS[name]
    layer = make(D, 5, **{**options, "num_layers": 1}).double()
    weights = layer._weights_of(0)
    size = layer._bare(*weights).size
    x, initial = torch.randn(steps, B, D).double().requires_grad_(), torch.randn(B, size).double().requires_grad_()
    torch.library.opcheck(torch.ops.timeloom.solve, (x, initial, *weights, None, None, layer._handle, 0, True))


def test_second_order_gradients_are_refused() -> None:
    compiled = torch.compile(tl.GRU(D, 5, solver=CHUNKS), backend="eager", fullgraph=True)
    x = torch.randn(20, B, D, requires_grad=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(compiled(x)[0].sum(), x, create_graph=True)


def test_copies_changes_of_solver_and_dtype_and_the_end() -> None:
    torch.manual_seed(0)
    layer, x = tl.GRU(D, 5, solver=CHUNKS), torch.randn(20, B, D)
    twin = copy.deepcopy(layer)
    assert twin._handle != layer._handle
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    compiled(x)
    assert layer.reports[0].chunk == 4
    assert not twin.reports
    layer.solver = Shooting(chunk=5)
    compiled(x)
    assert layer.reports[0].chunk == 5, "the graph still solves by the old solver"
    layer.double()
    assert compiled(x.double())[0].dtype == torch.float64
    known = set(handles._modules)
    handle = layer._handle
    del layer, compiled
    torch.compiler.reset()
    gc.collect()
    assert handle in known
    assert handle not in handles._modules, "a module that is gone is still known"
    with pytest.raises(RuntimeError, match="is gone"):
        handles.module_of(handle)


def test_failure_inside_a_graph_says_what_happened() -> None:
    torch.manual_seed(0)
    layer = tl.GRU(D, 5, solver=Shooting(chunk=2, warmup=0, max_iters=1, on_divergence="raise"))
    with pytest.raises(tl.ConvergenceError, match="did not converge"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(torch.randn(20, B, D))
