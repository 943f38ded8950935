"""torch.compile(fullgraph=True) of models with timeloom's layers, beside the same models outside of graphs."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import timeloom as tl
from timeloom.nn.graphs import handles
from timeloom.solvers import Shooting

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk"),  # by cuDNN: copies
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # by dynamo itself
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),  # by inductor itself
]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
D, B, CHUNKS = 3, 2, Shooting(chunk=4)
LAYERS: dict[str, tuple[Any, dict[str, Any], int]] = {
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
CASES = [*((name, torch.float32) for name in LAYERS), ("gru", torch.float64), ("lstm", torch.float64)]
CASES += [("rnn", torch.float64), ("gru", torch.bfloat16)]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}


class Model(nn.Module):
    """A layer between others, its final state used as well."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        width = (layer.proj_size or layer.hidden_size) * (2 if layer.bidirectional else 1)
        self.encode, self.layer, self.norm, self.decode = (
            nn.Linear(D, D),
            layer,
            nn.LayerNorm(width),
            nn.Linear(width, 2),
        )

    def forward(self, x: Tensor, hx: Any = None, **more: Any) -> tuple[Tensor, Tensor]:
        output, final = self.layer(torch.tanh(self.encode(x)), hx, **more)
        final = torch.cat([part.flatten() for part in final]) if isinstance(final, tuple) else final
        return self.decode(self.norm(output)).sin(), final


def results(model: nn.Module, x: Tensor, hx: Tensor | None = None, **more: Any) -> dict[str, Tensor]:
    x = x.detach().clone().requires_grad_()
    hx = None if hx is None else hx.detach().clone().requires_grad_()
    model.zero_grad()
    output, final = model(x, *(() if hx is None else (hx,)), **more)
    (output.square().sum() + final.sin().sum()).backward()
    found = {key.removeprefix("_orig_mod."): value.grad.clone() for key, value in model.named_parameters()}
    found |= {"output": output.detach().clone(), "final": final.detach().clone(), "x": x.grad}
    return found if hx is None else {**found, "hx": hx.grad}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype
        error = float((found[key] - value).abs().max() / value.abs().max().clamp(min=1e-30))
        assert error < tolerance, f"{key}: off by {error:.1e}"


def whole(model: nn.Module, **more: Any) -> Any:
    """The model as one graph."""
    return torch.compile(model, backend=more.pop("backend", "aot_eager"), fullgraph=True, **more)


@pytest.fixture(autouse=True)
def graphs_of_recurrent_layers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch takes nothing that is one of its recurrent layers into a graph unless told to."""
    from torch._dynamo import config

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.compiler.reset()
    with config.patch(allow_rnn=True):
        yield
    torch.compiler.reset()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_as_outside_of_a_graph(name: str, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    make, options, steps = LAYERS[name]
    model = Model(make(D, 5, **options)).to(device, dtype)
    x, twin, compiled = torch.randn(steps, B, D, dtype=dtype, device=device), copy.deepcopy(model), whole(model)
    assert_close(results(compiled, x), results(twin, x), TOLERANCE[dtype])
    with torch.no_grad():
        for found, expected in zip(compiled(x), twin(x), strict=True):
            assert not found.requires_grad
            torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert len(model.layer.reports) == len(twin.layer.reports)
    for found, expected in zip(model.layer.reports, twin.layer.reports, strict=True):
        assert (found.solver, found.chunk, found.iterations) == (expected.solver, expected.chunk, expected.iterations)
        assert found.reason == expected.reason


def test_torch_is_given_states_as_cudnn_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contiguous: h and c are parts of one state."""
    given: list[bool] = []
    plain = torch._VF.lstm

    def lstm(x: Tensor, hidden: tuple[Tensor, Tensor], *more: Any) -> Any:
        given.extend(part.is_contiguous() for part in hidden)
        return plain(x, hidden, *more)

    monkeypatch.setattr(torch._VF, "lstm", lstm)
    make, options, steps = LAYERS["lstm, left to torch"]
    whole(Model(make(D, 5, **options)))(torch.randn(steps, B, D))
    assert given == [True] * 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("hard", "batch_first"), [({"bias": 6.0}, False), ({"scale": 4.0}, True)])
def test_training_against_the_sequential_truth(hard: dict[str, float], batch_first: bool, device: str) -> None:
    torch.manual_seed(0)
    truth = Model(nn.GRU(D, 5, batch_first=batch_first)).double()
    with torch.no_grad():
        truth.encode.weight.mul_(2)
        truth.get_submodule("layer").get_parameter("bias_ih_l0")[5:10] += hard.get("bias", 0.0)
        truth.get_submodule("layer").get_parameter("weight_hh_l0").mul_(hard.get("scale", 1.0))
    truth.to(device)
    ours = tl.parallelize(copy.deepcopy(truth), CHUNKS)
    compiled = whole(ours)
    x, hx = torch.randn(*((B, 33) if batch_first else (33, B)), D).double(), torch.randn(1, B, 5).double()
    x, hx = x.to(device), hx.to(device)
    optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in (truth, ours)]
    for _ in range(3):
        assert_close(results(compiled, x, hx), results(truth, x, hx), 1e-11)
        assert ours.get_submodule("layer").reports[0].backward is not None
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("marks", ["lengths", "resets", "both"])
@pytest.mark.parametrize("name", ["gru, two directions", "lstm, projected"])
def test_ragged_sequences(name: str, marks: str, device: str) -> None:
    torch.manual_seed(0)
    make, options, steps = LAYERS[name]
    model = Model(make(D, 5, batch_first=True, **options)).to(device)
    x, more = torch.randn(B, steps, D, device=device), {}
    if marks != "resets":
        more["lengths"] = torch.tensor([steps, 9])
    if marks != "lengths":
        more["resets"] = torch.rand(B, steps, device=device) < 0.2
    twin, compiled = copy.deepcopy(model), whole(model)
    assert_close(results(compiled, x, **more), results(twin, x, **more), 1e-5)
    if marks == "lengths":
        more["lengths"] = torch.tensor([0, 20])  # other values, the same graph
        assert_close(results(compiled, x, **more), results(twin, x, **more), 1e-5)
        with pytest.raises(ValueError, match=r"between 0 and T=21; sequence 1 has length 22"):
            compiled(x, lengths=torch.tensor([3, 22]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", ["unbatched", "batch first", "one sequence"])
def test_shapes_and_strides(shape: str, device: str) -> None:
    torch.manual_seed(0)
    first = shape == "batch first"
    layer = tl.LSTM(D, 5, 2, bidirectional=True, batch_first=first, solver=CHUNKS).to(device)
    sizes = {"unbatched": (13, D), "batch first": (B, 13, D), "one sequence": (13, 1, D)}[shape]
    x = torch.randn(sizes, device=device)
    found, expected = whole(layer)(x), copy.deepcopy(layer)(x)
    for one, other in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["gru", "lstm", "gru, left to torch"])
def test_autocast(name: str, device: str) -> None:
    torch.manual_seed(0)
    make, options, steps = LAYERS[name]
    layer, x = make(D, 5, **options).to(device), torch.randn(steps, B, D, device=device, requires_grad=True)
    twin, compiled, grads = copy.deepcopy(layer), whole(layer), []
    with torch.autocast(device, torch.bfloat16):
        found, expected = compiled(x)[0], twin(x)[0]
    for output in (found, expected):
        grads.append(torch.autograd.grad(output.float().square().sum(), x)[0])
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(*grads, rtol=5e-2, atol=5e-2)


def test_dynamic_lengths_share_a_graph() -> None:
    torch.manual_seed(0)
    model, graphs = Model(tl.GRU(D, 5, solver=CHUNKS)), []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    twin, compiled = copy.deepcopy(model), whole(model, backend=backend, dynamic=True)
    for steps in (20, 21, 35, 60):
        x = torch.randn(steps, B, D)
        assert_close(results(compiled, x), results(twin, x), 1e-5)
    assert len(graphs) == 1
    assert sum("timeloom.solve" in target for target in graphs[0]) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_inductor(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    calls = count_calls_of_torch_layers(monkeypatch)
    layers = nn.Linear(D, D), Last(tl.GRU(D, 5, 2, solver=CHUNKS)), nn.LayerNorm(5), Last(tl.GRU(5, 4))
    model, x = nn.Sequential(*layers).to(device), torch.randn(8, B, D, device=device)
    twin, compiled, grads = copy.deepcopy(model), whole(model, backend="inductor"), []
    outputs = [network(x) for network in (compiled, twin)]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
    for output, network in zip(outputs, (model, twin), strict=True):
        grads.append(torch.autograd.grad(output.square().sum(), tuple(network.parameters())))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    assert len(calls) == (1 if device == "cpu" else 2), "on a CPU, the backward pass has the forward pass's tape"


def count_calls_of_torch_layers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list that grows by one each time that an operator runs torch's own layer."""
    from timeloom.nn.graphs import by_torch  # not above: with it comes Triton, which other tests must set up first

    calls, run_torch = [], by_torch.run_torch

    def count(*args: Any, **more: Any) -> Any:
        calls.append(args)
        return run_torch(*args, **more)

    monkeypatch.setattr(by_torch, "run_torch", count)
    return calls


class Last(nn.Module):
    """A recurrent layer's outputs alone."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)[0]
        return output


@on_gpu
@pytest.mark.parametrize("steps", [16384, 64])  # timeloom's sweeps, and cuDNN's layer
@pytest.mark.parametrize("make", [nn.GRU, nn.LSTM, nn.RNN])
def test_cuda_graphs(make: Any, steps: int) -> None:
    torch.manual_seed(0)
    model = tl.parallelize(Model(make(D, 16))).cuda()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    optimizers = [torch.optim.SGD(network.parameters(), 1e-7) for network in (model, twin)]
    for step in range(8):
        x = torch.randn(steps, B, D, device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        assert_close(results(compiled if step > 2 else model, x), results(twin, x), 1e-4)
        for optimizer in optimizers:
            optimizer.step()
    report = model.get_submodule("layer").reports[0]
    if steps == 16384:
        assert "CUDA graph" in report.reason
        assert report.certified


@on_gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")  # as of any graphed module
@pytest.mark.parametrize("make", [nn.GRU, nn.LSTM])
def test_graphed_by_torch(make: Any) -> None:
    torch.manual_seed(0)
    model = tl.parallelize(Model(make(D, 16))).cuda()
    twin = copy.deepcopy(model)
    x = torch.randn(16384, B, D, device="cuda")
    for _ in range(4):
        results(model, x)
    graphed: Any = torch.cuda.make_graphed_callables(model, (x.clone().requires_grad_(),))
    for _ in range(3):
        x = torch.randn(16384, B, D, device="cuda")
        assert_close(results(graphed, x), results(twin, x), 1e-4)
    assert model.get_submodule("layer").reports[0].certified


OUTSIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "packed": ("a graph holds padded tensors", {}),
    "list": ("a graph holds padded tensors", {"lengths": [20, 9]}),
    "guess": ("cannot hold guess=", {"guess": torch.zeros(20, B, 5)}),
    "dropout": ("cannot hold dropout between layers over lengths=", {"lengths": torch.tensor([20, 9])}),
    "ranks": ("shared with other ranks", {}),
    "not allowed": ("allow_rnn *= *True", {}),
}


@pytest.mark.parametrize("what", OUTSIDE)
def test_calls_that_no_graph_holds_run_outside(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import config

    from timeloom.nn.graphs import call as graph

    says, more = OUTSIDE[what]
    torch.manual_seed(0)
    layer = tl.GRU(D, 5, 2, dropout=0.5, solver=CHUNKS) if what == "dropout" else tl.GRU(D, 5, solver=CHUNKS)
    x = torch.randn(20, B, D)
    given: Any = pack_padded_sequence(x, torch.tensor([20, 9])) if what == "packed" else x
    if what == "ranks":
        monkeypatch.setattr(graph, "entered", [None])
    nodes: list[str] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        nodes.extend(str(node.stack_trace) for node in module.graph.nodes)
        return module.forward

    with config.patch(allow_rnn=what != "not allowed"):
        torch.manual_seed(1)
        found = torch.compile(layer, backend=backend)(given, **more)
        torch.compiler.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=says):
            torch.compile(layer, backend=backend, fullgraph=True)(given, **more)
    torch.manual_seed(1)
    for one, other in zip(found, layer(given, **more), strict=True):
        torch.testing.assert_close(one, other)
    assert not any("timeloom" in trace for trace in nodes), "the solver was taken apart into graphs"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["gru", "lstm", "lstm, projected", "rnn", "gru, left to torch", "gru, ragged"])
def test_operators_by_torch_own_check(name: str, device: str) -> None:
    from timeloom.nn.graphs import operators

    torch.manual_seed(0)
    make, options, steps = LAYERS[name.replace(", ragged", "")]
    layer = make(D, 5, **{**options, "num_layers": 1}, device=device)
    weights = layer._weights_of(0)
    size = layer._bare(*weights).size
    x, initial = (torch.randn(*sizes, device=device, requires_grad=True) for sizes in ((steps, B, D), (B, size)))
    marks = (None, None)
    if name == "gru, ragged":
        marks = (torch.tensor([21, 9]), torch.rand(steps, B, device=device) < 0.2)
        torch.library.opcheck(torch.ops.timeloom.check_lengths, (marks[0], steps, B))
    given = (x, initial, *weights, *marks)
    torch.library.opcheck(torch.ops.timeloom.solve, (*given, layer._handle, 0, True))
    with torch.no_grad():
        states, final, kept = torch.ops.timeloom.solve(*given, layer._handle, 0, True)
        like = operators._like_solve(*given, layer._handle, 0, True)
    assert [(t.shape, t.dtype, t.stride()) for t in (states, final, *kept)] == [
        (t.shape, t.dtype, t.stride()) for t in (*like[:2], *like[2])
    ]
    grads = (torch.randn_like(states), torch.randn_like(final))
    given = tuple(None if tensor is None else tensor.detach() for tensor in given)
    torch.library.opcheck(torch.ops.timeloom.solve_backward, (*grads, *given, states, kept, layer._handle, 0, True))


def test_a_second_backward_pass_runs_torch_layers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, calls = tl.LSTM(D, 5), count_calls_of_torch_layers(monkeypatch)
    given = (torch.randn(7, B, D), torch.randn(B, 10), *layer._weights_of(0), None, None)
    with torch.no_grad():
        states, final, kept = torch.ops.timeloom.solve(*given, layer._handle, 0, True)
        back = (torch.randn_like(states), torch.randn_like(final), *given, states, kept, layer._handle, 0, True)
        first, second = (torch.ops.timeloom.solve_backward(*back) for _ in range(2))
    assert len(calls) == 2
    torch.testing.assert_close(first, second)


def test_second_order_gradients_are_refused() -> None:
    compiled = whole(tl.GRU(D, 5, solver=CHUNKS), backend="eager")
    x = torch.randn(20, B, D, requires_grad=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(compiled(x)[0].sum(), x, create_graph=True)


def test_copies_changes_of_solver_and_dtype_and_the_end() -> None:
    torch.manual_seed(0)
    layer, x = tl.GRU(D, 5, solver=CHUNKS), torch.randn(20, B, D)
    twin = copy.deepcopy(layer)
    assert twin._handle != layer._handle
    compiled = whole(layer)
    compiled(x)
    assert layer.reports[0].chunk == 4
    assert not twin.reports
    layer.solver = Shooting(chunk=5)
    compiled(x)
    assert layer.reports[0].chunk == 5, "the graph still solves by the old solver"
    layer.double()
    assert compiled(x.double())[0].dtype == torch.float64
    handle = layer._handle
    assert handle in handles._modules
    del layer, compiled
    torch.compiler.reset()
    gc.collect()
    assert handle not in handles._modules, "a module that is gone is still known"
    with pytest.raises(RuntimeError, match="is gone"):
        handles.module_of(handle)


@pytest.mark.parametrize(("before", "after"), [("sequential", CHUNKS), (CHUNKS, "sequential"), ("auto", "deer")])
@pytest.mark.parametrize("make", [tl.GRU, tl.LSTM])
def test_a_change_of_solver_between_the_passes(make: Any, before: Any, after: Any) -> None:
    """Where torch's own layer ran forward, nothing is kept for a backward pass of ours."""
    torch.manual_seed(0)
    layer, x = make(D, 5, solver=before), torch.randn(20, B, D)
    loss = whole(layer)(x)[0].square().sum()
    layer.solver = after
    expected = torch.autograd.grad(layer(x)[0].square().sum(), list(layer.parameters()))
    for one, other in zip(torch.autograd.grad(loss, list(layer.parameters())), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_failure_inside_a_graph_says_what_happened() -> None:
    torch.manual_seed(0)
    layer = tl.GRU(D, 5, solver=Shooting(chunk=2, warmup=0, max_iters=1, on_divergence="raise"))
    with pytest.raises(tl.ConvergenceError, match="did not converge"):
        whole(layer)(torch.randn(20, B, D))


@pytest.mark.parametrize(
    ("lengths", "message"),
    [([20, 3, 1], "lengths must have shape"), ([1.0, 2.0], "whole numbers"), ([21, 3], "lengths must lie between")],
)
def test_wrong_lengths_are_told_as_outside_of_a_graph(lengths: list[float], message: str) -> None:
    with pytest.raises(Exception, match=message):
        whole(tl.GRU(D, 5))(torch.randn(20, B, D), lengths=torch.tensor(lengths))


@pytest.mark.filterwarnings("ignore:The tensor attributes self.layer._flat_weights")  # by torch's own layers too
def test_exported_programs_hold_torch_own_layer() -> None:
    torch.manual_seed(0)
    model, x = Last(tl.GRU(D, 5, solver=CHUNKS)), torch.randn(9, B, D)
    program = torch.export.export(model, (x,))
    assert not any("timeloom" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(x), model(x))


def test_nothing_of_a_compiler_is_imported_before_it_is_at_work() -> None:
    code = "import sys, torch, timeloom; timeloom.GRU(2, 3)(torch.zeros(50, 1, 2))[0].sum().backward()\n"
    code += "print([name for name in ('torch._dynamo', 'timeloom.nn.graphs.call') if name in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"
