"""Modules inside torch's machinery, beside torch's own: parametrized, transformed, distributed, traced, compiled."""

from __future__ import annotations

import copy
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from module_zoo import (
    B,
    D,
    H,
    assert_same,
    call,
    distance,
    each_layer,
    each_way,
    hidden,
    inputs,
    loss_of,
    pair,
    timeloom_layer,
    torch_layer,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import timeloom as tl
from timeloom.solvers import Shooting

pytestmark = pytest.mark.usefixtures("one_thread")
PACKAGE = Path(tl.__file__).parent
CHUNKS = Shooting(chunk=4)


# --- weights from elsewhere ------------------------------------------------------------------------------------------


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


# --- wrapped, traced, compiled ---------------------------------------------------------------------------------------


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
