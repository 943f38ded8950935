"""A module's life beside torch's: made, copied, saved, cast, wrapped, compiled, differentiated twice."""

from __future__ import annotations

import copy
import io
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from module_zoo import (
    B,
    D,
    H,
    T,
    as_double,
    assert_same,
    call,
    distance,
    each_layer,
    each_option,
    each_way,
    hidden,
    inputs,
    loss_of,
    pair,
    parts_of,
    raised,
    timeloom_layer,
    torch_layer,
    used_sweeps,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import timeloom as tl
from timeloom.solvers import Shooting

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]
PACKAGE = Path(tl.__file__).parent
CHUNKS = Shooting(chunk=4)
HALVES = [torch.float16, torch.bfloat16]


# --- made, saved, copied -----------------------------------------------------------------------------------------


@each_option
@each_layer
def test_initialisation_is_bit_equal(name: str, options: dict[str, Any]) -> None:
    theirs, ours = torch_layer(name, seed=3, **options), timeloom_layer(name, seed=3, **options)
    after = torch.rand(1)
    torch_layer(name, seed=3, **options)
    assert torch.rand(1) == after  # as many random numbers were drawn
    torch.manual_seed(4)
    theirs.reset_parameters()
    torch.manual_seed(4)
    ours.reset_parameters()
    for (key, value), (other_key, other) in zip(theirs.named_parameters(), ours.named_parameters(), strict=True):
        assert key == other_key
        assert torch.equal(value, other)


@each_option
@each_layer
def test_state_dict_goes_both_ways(name: str, options: dict[str, Any]) -> None:
    theirs, ours = torch_layer(name, seed=3, **options), timeloom_layer(name, seed=4, solver=CHUNKS, **options)
    x = inputs(theirs)
    call(ours, x)  # what a solver learned is not part of a state_dict
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict(), strict=True)
    assert_same(call(ours, x), call(theirs, x))
    another = torch_layer(name, seed=5, **options)
    another.load_state_dict(ours.state_dict(), strict=True)
    assert_same(call(another, x), call(theirs, x))


def test_repr_tells_a_solver_that_is_not_the_default() -> None:
    assert repr(tl.GRU(3, 5, num_layers=2)) == repr(nn.GRU(3, 5, num_layers=2))
    assert repr(tl.GRU(3, 5, solver="sequential")) == "GRU(3, 5, solver='sequential')"
    assert repr(tl.LSTM(3, 5, proj_size=2, solver=CHUNKS)) == f"LSTM(3, 5, proj_size=2, solver={CHUNKS!r})"


def learned(layer: Any) -> list[Any]:
    """What a layer's solves have taught it, by layer and direction."""
    return [copy.deepcopy(layer._memories[key]) for key in sorted(layer._memories)]


def saved(layer: Any) -> Any:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "torch.save": saved,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
@each_way
@each_layer
def test_copies_are_whole_and_their_own(name: str, solver: Any, copied: Callable[[Any], Any]) -> None:
    theirs, ours = pair(name, solver, num_layers=2, bidirectional=True)
    x, hx = inputs(theirs), hidden(theirs)
    expected = call(ours, x, hx)
    twin = copied(ours)
    assert type(twin) is type(ours)
    assert (twin.solver, twin.training, repr(twin)) == (ours.solver, ours.training, repr(ours))
    assert twin.reports == ours.reports
    assert_same(call(twin, x, hx), expected)
    with torch.no_grad():
        twin.weight_hh_l0.zero_()
    assert_same(call(ours, x, hx), expected)
    assert distance(call(twin, x, hx)["output"], expected["output"]) > 1e-3


@pytest.mark.usefixtures("auto_takes_sweeps")
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
def test_copies_know_what_was_learned(copied: Callable[[Any], Any]) -> None:
    ours = tl.GRU(D, H)
    untaught = learned(ours)
    call(ours, torch.randn(300, 1, D))
    assert learned(ours) != untaught
    twin = copied(ours)
    assert learned(twin) == learned(ours)
    before = learned(ours)
    for _ in range(3):
        call(twin, 3 * torch.randn(400, 1, D))
    assert learned(twin) != before
    assert learned(ours) == before


@pytest.mark.usefixtures("auto_takes_sweeps")
def test_another_solver_starts_afresh() -> None:
    ours = tl.GRU(D, H)
    ours(torch.randn(300, 1, D))
    ours.solver = "auto"
    assert (ours.reports, learned(ours)) == ([], [])


def test_copies_work_in_threads() -> None:
    torch.manual_seed(0)
    ours = tl.GRU(D, H, num_layers=2, solver=CHUNKS)
    x = [torch.randn(50, B, D) for _ in range(4)]
    expected = [call(ours, part) for part in x]
    results: list[Any] = [None] * len(x)

    def work(index: int, layer: Any) -> None:
        results[index] = [call(layer, x[index]) for _ in range(5)][-1]

    threads = [threading.Thread(target=work, args=(i, copy.deepcopy(ours))) for i in range(len(x))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result, wanted in zip(results, expected, strict=True):
        assert_same(result, wanted, 1e-6)


@pytest.mark.usefixtures("auto_takes_sweeps")
def test_one_module_serves_many_threads() -> None:
    torch.manual_seed(0)
    ours = tl.GRU(D, H, num_layers=2).eval()
    x = [torch.randn(100 + 30 * i, B, D) for i in range(4)]
    with torch.no_grad():
        expected = [ours(part)[0] for part in x]
    results: list[Any] = [None] * len(x)

    def work(index: int) -> None:
        with torch.inference_mode():
            results[index] = [ours(x[index])[0] for _ in range(5)][-1]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(x))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result, wanted in zip(results, expected, strict=True):
        assert distance(result, wanted) < 1e-5


# --- cast --------------------------------------------------------------------------------------------------------


@each_way
@each_layer
def test_to_another_dtype_and_back(name: str, solver: Any) -> None:
    theirs, ours = pair(name, solver, dtype=torch.float32, num_layers=2)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        x = inputs(theirs, dtype=dtype)
        assert_same(call(ours.to(dtype), x), call(theirs.to(dtype), x), tolerance)


@each_way
@pytest.mark.parametrize("dtype", HALVES)
@each_layer
def test_half_precision(name: str, dtype: torch.dtype, solver: Any) -> None:
    theirs, ours = pair(name, solver, dtype=torch.float32, num_layers=2)
    cast: Any = {torch.float16: nn.Module.half, torch.bfloat16: nn.Module.bfloat16}[dtype]
    theirs, ours = cast(theirs), cast(ours)
    x, hx = inputs(theirs, dtype=dtype), hidden(theirs, dtype=dtype)
    actual, torchs = call(ours, x, hx), call(theirs, x, hx)
    truth = call(theirs.double(), x.double(), as_double(hx))
    for key, value in truth.items():
        assert actual[key].dtype == torchs[key].dtype == dtype
        allowed = 2 * distance(torchs[key], value) + 2 * torch.finfo(dtype).eps
        assert distance(actual[key], value) <= allowed, key


@each_way
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_state", [False, True])
@each_layer
def test_autocast_returns_torchs_dtypes(name: str, with_state: bool, given: torch.dtype, solver: Any) -> None:
    theirs, ours = pair(name, solver, dtype=torch.float32, num_layers=2, bidirectional=True)
    x, hx = inputs(theirs, dtype=given), hidden(theirs, dtype=given) if with_state else None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torchs, actual = call(theirs, x, hx), call(ours, x, hx)
    truth = call(theirs.double(), x.double(), as_double(hx))
    for key, value in truth.items():
        assert actual[key].dtype == torchs[key].dtype, key
        assert distance(actual[key], value) <= 2 * distance(torchs[key], value) + 2 * torch.finfo(torch.bfloat16).eps, (
            key
        )


def test_autocast_draws_no_random_numbers() -> None:
    ours = tl.GRU(D, H, solver=CHUNKS)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.float16):
        ours(torch.zeros(T, B, D))
    assert torch.rand(1) == expected


@each_layer
def test_autocast_around_the_backward_pass_too(name: str) -> None:
    _, ours = pair(name, CHUNKS, dtype=torch.float32, num_layers=2)
    x, results = inputs(ours, 40, B, D, dtype=torch.float32), []
    for enabled in (False, True):
        ours.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output, _ = ours(x)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            output.float().square().sum().backward()
        results.append({key: value.grad.clone() for key, value in ours.named_parameters()})
    assert_same(results[1], results[0], 1e-5)  # the solve and its gradients stay in float32


def test_autocast_leaves_float64_alone() -> None:
    theirs, ours = pair("gru", CHUNKS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(call(ours, inputs(theirs)), call(theirs, inputs(theirs)))


# --- modes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@each_way
@each_layer
def test_without_gradients(name: str, solver: Any, mode: Any) -> None:
    theirs, ours = pair(name, solver, num_layers=2, dropout=0.5)
    theirs.eval()
    ours.eval()
    with mode():
        (expected, _), (actual, final) = theirs(inputs(theirs)), ours(inputs(theirs))
    assert distance(actual, expected) < 1e-12
    for value in (actual, *parts_of(final)):
        assert (value.requires_grad, value.is_inference()) == (False, expected.is_inference())
    assert all(report.backward is None for report in ours.reports)


@each_way
@each_layer
def test_flatten_parameters_is_harmless(name: str, solver: Any) -> None:
    theirs, ours = pair(name, solver)
    expected = call(ours, inputs(theirs))
    ours.flatten_parameters()
    assert_same(call(ours, inputs(theirs)), expected, 0.0)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


@contextmanager
def determinism() -> Iterator[None]:
    """Refuses operations that may vary, and fills new memory with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


SETTINGS: dict[str, Callable[[], Any]] = {
    "another default device": lambda: torch.device("meta"),
    "a wider default dtype": lambda: default_dtype(torch.float64),
    "a narrower default dtype": lambda: default_dtype(torch.float16),
    "determinism": determinism,
    "anomaly detection": lambda: torch.autograd.detect_anomaly(check_nan=True),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize(("dtype", "correction"), [(torch.float64, "newton"), (torch.float32, "auto")])
@each_layer
def test_global_settings_do_no_harm(name: str, dtype: torch.dtype, correction: Any, setting: Callable[[], Any]) -> None:
    _, ours = pair(name, Shooting(chunk=4, correction=correction), dtype=dtype, num_layers=2, bidirectional=True)
    x, hx = inputs(ours, dtype=dtype), hidden(ours, dtype=dtype)
    lengths, resets = torch.tensor([T, 9, 2]), torch.arange(T * B).view(T, B) % 5 == 4
    cases: list[dict[str, Any]] = [{}, {"lengths": lengths}, {"resets": resets}, {"lengths": lengths, "resets": resets}]

    def run(more: dict[str, Any]) -> dict[str, Tensor]:
        leaves = [x.clone().requires_grad_(), *(part.clone().requires_grad_() for part in parts_of(hx))]
        output, final = ours(leaves[0], tuple(leaves[1:]) if isinstance(ours, nn.LSTM) else leaves[1], **more)
        grads = torch.autograd.grad(
            sum(part.sum() for part in (output, *parts_of(final))), [*leaves, *ours.parameters()]
        )
        return dict(enumerate([output.detach(), *(part.detach() for part in parts_of(final)), *grads]))

    for more in cases:
        expected = run(more)
        with setting():
            actual = run(more)
        assert_same(actual, expected, 0.0)


# --- weights from elsewhere --------------------------------------------------------------------------------------


@each_way
@each_layer
def test_weights_shared_with_another_module(name: str, solver: Any) -> None:
    results = []
    for make, options in ((torch_layer, {}), (timeloom_layer, {"solver": solver})):
        first, second = make(name, **options), make(name, seed=9, **options)
        second.weight_hh_l0 = first.weight_hh_l0
        x = inputs(first)
        loss_of([first(x)[0], second(x)[0]]).backward()
        results.append({key: value.grad for key, value in first.named_parameters()})
        assert second.weight_hh_l0.grad is first.weight_hh_l0.grad
    assert_same(results[1], results[0])


@each_way
@each_layer
def test_weights_replaced_and_changed_in_place(name: str, solver: Any) -> None:
    theirs, ours = pair(name, solver)
    for layer in (theirs, ours):
        call(layer, inputs(theirs))
        layer.weight_hh_l0 = nn.Parameter(layer.weight_hh_l0.detach() * 2)
        with torch.no_grad():
            layer.weight_ih_l0.mul_(0.5)
    assert_same(call(ours, inputs(theirs)), call(theirs, inputs(theirs)))


PARAMETRIZATIONS: dict[str, Callable[[nn.Module, str], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": lambda layer, key: parametrizations.spectral_norm(layer, key, n_power_iterations=3),
    "orthogonal": parametrizations.orthogonal,
}


@pytest.mark.parametrize("apply", PARAMETRIZATIONS.values(), ids=PARAMETRIZATIONS.keys())
@each_way
@each_layer
def test_parametrizations(name: str, solver: Any, apply: Callable[[nn.Module, str], nn.Module]) -> None:
    theirs, ours = pair(name, solver)
    results = []
    for layer in (theirs, ours):
        torch.manual_seed(0)
        apply(layer, "weight_hh_l0")
        with parametrize.cached():  # one power iteration a call, however often torch looks at the weight
            results.append(call(layer, inputs(theirs)))
        layer.eval()
        results.append(call(layer, inputs(theirs)))
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        optimizer.step()
        results.append(call(layer, inputs(theirs)))
        parametrize.remove_parametrizations(layer, "weight_hh_l0")
        results.append(call(layer, inputs(theirs)))
    for actual, expected in zip(results[4:], results[:4], strict=True):
        assert_same(actual, expected)
    assert type(ours) is type(timeloom_layer(name))


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@each_way
@each_layer
def test_weight_norm_by_hooks(name: str, solver: Any) -> None:
    theirs, ours = pair(name, solver)
    for layer in (theirs, ours):
        nn.utils.weight_norm(layer, "weight_hh_l0")
    assert_same(call(ours, inputs(theirs)), call(theirs, inputs(theirs)))


def test_a_parametrized_module_can_be_copied_after_a_call() -> None:
    _, ours = pair("gru", CHUNKS)
    parametrizations.weight_norm(ours, "weight_hh_l0")
    x = inputs(ours)
    expected = call(ours, x)
    assert_same(call(copy.deepcopy(ours), x), expected)


@each_way
@each_layer
def test_functional_call(name: str, solver: Any) -> None:
    theirs, ours = pair(name, solver, dtype=torch.float32)
    results = []
    for layer in (theirs, ours):
        weights = {key: value.double().detach() for key, value in torch_layer(name, seed=8).named_parameters()}
        for value in weights.values():
            value.requires_grad_()
        output, _ = torch.func.functional_call(layer, weights, (inputs(theirs),))
        loss_of([output]).backward()
        results.append({"output": output.detach(), **{key: value.grad for key, value in weights.items()}})
        assert all(parameter.grad is None for parameter in layer.parameters())
        layer(inputs(theirs, dtype=torch.float32))  # and back to its own
    assert_same(results[1], results[0])


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch itself uses it
@each_way
@each_layer
def test_torch_func_transforms(name: str, solver: Any) -> None:
    theirs, ours = pair(name, solver)
    x = inputs(theirs)
    results = []
    for layer in (theirs, ours):

        def loss(weights: dict[str, Tensor], layer: Any = layer) -> Tensor:
            return loss_of([torch.func.functional_call(layer, weights, (x,))[0]])

        weights = {key: value.detach() for key, value in layer.named_parameters()}
        _, slope = torch.func.jvp(lambda x, layer=layer: layer(x)[0], (x,), (torch.ones_like(x),))
        results.append({**torch.func.grad(loss)(weights), "slope": slope.detach()})
    assert_same(results[1], results[0])


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_mode_differentiation() -> None:
    theirs, ours = pair("gru", CHUNKS)
    tangents = []
    for layer in (theirs, ours):
        with torch.autograd.forward_ad.dual_level(), torch.no_grad():
            dual = torch.autograd.forward_ad.make_dual(inputs(theirs), torch.ones_like(inputs(theirs)))
            tangents.append(torch.autograd.forward_ad.unpack_dual(layer(dual)[0]).tangent)
    assert distance(tangents[1], tangents[0]) < 1e-12


# --- wrapped, traced, compiled -----------------------------------------------------------------------------------


class Model(nn.Module):
    """A layer between two others."""

    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.encode, self.recurrent, self.decode = nn.Linear(D, D), recurrent, nn.Linear(H, 2)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.recurrent(torch.tanh(self.encode(x)))
        decoded: Tensor = self.decode(output)
        return decoded.sin()


class Outer(nn.Module):
    """A model around a model: torch.compile does make graphs of this one's layers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(D, D), inner, nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.inner(torch.tanh(self.first(x))))
        return output.sin()


def loss_and_gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    output = model(x)
    output.square().sum().backward()
    grads = {key.removeprefix("module.").removeprefix("_orig_mod."): p.grad for key, p in model.named_parameters()}
    return {"output": output.detach(), "x": x.grad, **{key: value.clone() for key, value in grads.items()}}


@pytest.fixture
def process_group() -> Iterator[None]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("solver", [CHUNKS, "auto", "sequential"])
def test_distributed_data_parallel(solver: Any) -> None:
    torch.manual_seed(0)
    model = Model(tl.GRU(D, H, num_layers=2, solver=solver)).double()
    x = inputs(model.recurrent)
    expected = loss_and_gradients(model, x)
    assert_same(loss_and_gradients(nn.parallel.DistributedDataParallel(model), x), expected)


def test_training_follows_torch_step_by_step() -> None:
    torch.manual_seed(0)
    theirs, ours = Model(nn.GRU(D, H, num_layers=2)).double(), Model(tl.GRU(D, H, num_layers=2, solver=CHUNKS)).double()
    ours.load_state_dict(theirs.state_dict())
    x, losses = inputs(theirs.recurrent), []
    for model in (theirs, ours):
        optimizer = torch.optim.Adam(model.parameters(), 0.02)
        losses.append([])
        for _ in range(20):
            optimizer.zero_grad()
            loss = (model(x) - x[..., :2]).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("solver", [CHUNKS, "auto"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by dynamo itself
def test_compiled_model(solver: Any) -> None:
    torch.manual_seed(0)
    model = Outer(Model(tl.GRU(D, H, num_layers=2, solver=solver)))
    graphs: list[str] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append("\n".join(str(node.meta.get("stack_trace")) for node in graph.graph.nodes))
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(model, backend=count)
    made = []
    for steps in (20, 20, 21, 22, 35, 36, 37, 38, 39, 40, 41, 42):
        x = torch.randn(steps, B, D)
        assert_same(loss_and_gradients(compiled, x), loss_and_gradients(model, x), 1e-5)
        made.append(len(graphs))
    assert made[-1] == made[-5], "a new length compiles anew"
    assert graphs
    assert not any(str(PACKAGE) in graph for graph in graphs), "the solve was taken apart"
    with torch.no_grad():
        assert distance(compiled(x), model(x)) < 1e-5
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_training_step() -> None:
    torch.manual_seed(0)
    layer = tl.GRU(D, H, num_layers=2, solver=CHUNKS)
    graphs: list[str] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append("\n".join(str(node.meta.get("stack_trace")) for node in graph.graph.nodes))
        return graph.forward

    def step(x: Tensor) -> Tensor:
        output, _ = layer(x.sin())
        loss = output.square().sum()
        loss.backward()
        return loss.detach()

    torch.compiler.reset()
    compiled = torch.compile(step, backend=count)
    for steps in range(20, 31):
        x, results = torch.randn(steps, B, D), []
        for function in (step, compiled):
            layer.zero_grad()
            loss = function(x)
            results.append({"loss": loss, **{key: value.grad.clone() for key, value in layer.named_parameters()}})
        assert_same(results[1], results[0], 1e-5)
    assert not any(str(PACKAGE) in graph for graph in graphs), "the solve was taken apart"
    torch.compiler.reset()


def test_compiled_module_itself() -> None:
    theirs, ours = pair("lstm", CHUNKS)
    torch.compiler.reset()
    compiled = torch.compile(ours, backend="eager")
    results = [call(layer, inputs(theirs), hidden(theirs)) for layer in (theirs, compiled)]
    assert_same({key.replace("_orig_mod.", ""): value for key, value in results[1].items()}, results[0])
    torch.compiler.reset()


def test_neither_the_import_nor_a_call_loads_the_compiler() -> None:
    code = "import sys, timeloom as tl, torch; tl.GRU(3, 5)(torch.randn(99, 1, 3))[0].sum().backward()"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print('torch._dynamo' in sys.modules)"],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["False"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@each_layer
def test_traced(name: str) -> None:
    theirs, ours = pair(name, CHUNKS)
    traced = torch.jit.trace(ours, (inputs(theirs),))
    x = inputs(theirs, seed=7)
    with torch.no_grad():
        assert distance(traced(x)[0], theirs(x)[0]) < 1e-12


@pytest.mark.filterwarnings("ignore:The tensor attributes self._flat_weights")  # as with torch's own layer
def test_exported() -> None:
    theirs, ours = pair("gru", CHUNKS)
    program = torch.export.export(ours, (inputs(theirs),))
    x = inputs(theirs, seed=7)
    with torch.no_grad():
        assert distance(program.module()(x)[0], theirs(x)[0]) < 1e-12


# --- differentiated ----------------------------------------------------------------------------------------------


@each_way
@each_layer
def test_backward_twice_with_a_retained_graph(name: str, solver: Any) -> None:
    theirs, ours = pair(name, solver)
    results = []
    for layer in (theirs, ours):
        x = inputs(theirs).requires_grad_()
        loss = loss_of([layer(x)[0]])
        loss.backward(retain_graph=True)
        loss.backward()
        results.append({"x": x.grad, **{key: value.grad for key, value in layer.named_parameters()}})
    assert_same(results[1], results[0])


@each_way
@each_layer
def test_backward_twice_without_it_raises(name: str, solver: Any) -> None:
    messages = []
    for layer in pair(name, solver):
        loss = layer(inputs(layer))[0].sum()
        loss.backward()
        error = raised(loss.backward)
        assert isinstance(error, RuntimeError)
        messages.append(str(error))
    assert messages[0] == messages[1]
    assert "second time" in messages[1]


@each_way
@pytest.mark.parametrize("batch_first", [False, True])
@each_layer
def test_output_changed_in_place_is_right_or_refused(name: str, batch_first: bool, solver: Any) -> None:
    theirs, ours = pair(name, solver, batch_first=batch_first)

    def gradients(layer: Any, in_place: bool) -> dict[Any, Tensor]:
        layer.zero_grad()
        output, _ = layer(inputs(theirs))
        output = output.mul_(3) if in_place else output * 3
        loss_of([output]).backward()
        return {key: value.grad.clone() for key, value in layer.named_parameters()}

    try:
        changed = gradients(ours, True)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017 - either outcome is right
    else:
        assert_same(changed, gradients(theirs, False))


@each_layer
def test_weights_changed_before_the_backward_pass_are_refused(name: str) -> None:
    _, ours = pair(name, CHUNKS)
    output, _ = ours(inputs(ours))
    with torch.no_grad():
        ours.weight_hh_l0.mul_(2)
    assert "modified by an inplace operation" in str(raised(output.sum().backward))


@each_layer
def test_second_derivatives(name: str) -> None:
    theirs, ours = pair(name, CHUNKS)
    x = inputs(theirs).requires_grad_()
    error = raised(lambda: torch.autograd.grad(ours(x)[0].square().sum(), x, create_graph=True))
    assert isinstance(error, RuntimeError)
    assert "create_graph" in str(error)
    assert "solver='sequential'" in str(error)
    ours.solver = "sequential"
    results = []
    for layer in (theirs, ours):
        (slope,) = torch.autograd.grad(layer(x)[0].square().sum(), x, create_graph=True)
        grads = torch.autograd.grad(slope.square().sum(), [x, *layer.parameters()], allow_unused=True)
        results.append(dict(enumerate(grads)))
    assert_same(results[1], results[0])


@each_way
@pytest.mark.parametrize("reentrant", [False, True])
@each_layer
def test_checkpointed(name: str, reentrant: bool, solver: Any) -> None:
    theirs, ours = pair(name, solver, num_layers=2, dropout=0.3)
    results = []
    for layer in (theirs, ours):
        torch.manual_seed(0)
        x = inputs(theirs).requires_grad_()
        output = checkpoint(lambda x, layer=layer: layer(x)[0], x, use_reentrant=reentrant)
        loss_of([output]).backward()
        results.append({"x": x.grad, **{key: value.grad for key, value in layer.named_parameters()}})
    assert_same(results[1], results[0])


@pytest.mark.usefixtures("auto_takes_sweeps")
def test_checkpoint_survives_what_auto_learns_meanwhile() -> None:
    torch.manual_seed(0)
    theirs, ours = nn.GRU(D, H), tl.GRU(D, H)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(300, 1, D)
    for _ in range(3):
        grads = []
        for layer in (theirs, ours):
            layer.zero_grad()
            checkpoint(lambda x, layer=layer: layer(x)[0], x, use_reentrant=False).square().mean().backward()
            grads.append({key: value.grad.clone() for key, value in layer.named_parameters()})
        assert used_sweeps(ours)
        assert_same(grads[1], grads[0], 1e-4)


@each_way
@each_layer
def test_hooks_of_modules_and_tensors(name: str, solver: Any) -> None:
    theirs, ours = pair(name, solver)
    seen: list[list[Any]] = []
    for layer in (theirs, ours):
        log: list[Any] = []
        layer.register_forward_pre_hook(lambda module, args, log=log: log.append(("before", args[0].shape)))
        layer.register_forward_hook(lambda module, args, result, log=log: log.append(("after", result[0].shape)))
        layer.register_full_backward_hook(lambda module, into, out, log=log: log.append(("backward", out[0].shape)))
        layer.weight_hh_l0.register_hook(lambda grad, log=log: log.append(("weight", grad.shape)))
        loss_of([layer(inputs(theirs).requires_grad_())[0]]).backward()
        seen.append(sorted(log, key=str))
    assert seen[0] == seen[1]
    assert len(seen[0]) == 4


def test_saved_tensors_are_autograds_own() -> None:
    _, ours = pair("gru", CHUNKS)
    counts = {"packed": 0, "unpacked": 0}

    def pack(tensor: Tensor) -> Tensor:
        counts["packed"] += 1
        return tensor.clone()

    def unpack(tensor: Tensor) -> Tensor:
        counts["unpacked"] += 1
        return tensor

    expected = call(ours, inputs(ours))
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert_same(call(ours, inputs(ours)), expected)
    assert counts["packed"] == counts["unpacked"] > 0


@each_layer
def test_reports_tell_of_both_passes(name: str) -> None:
    _, ours = pair(name, CHUNKS, num_layers=2, bidirectional=True)
    output, _ = ours(inputs(ours))
    assert [report.backward for report in ours.reports] == [None] * 4
    output.sum().backward()
    for report in ours.reports:
        assert report.converged
        assert report.chunk == 4
        assert report.backward.converged
    ours(inputs(ours, T + 1, B, D))
    assert [report.backward for report in ours.reports] == [None] * 4
