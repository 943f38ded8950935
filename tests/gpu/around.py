"""The surroundings of a layer: torch.compile, captured graphs, streams, threads, several devices, large tensors."""

from __future__ import annotations

import copy
import threading
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

import timeloom as tl
from tests.gpu.checks import Check, Unfit, as_good_as_torch

KINDS: dict[str, tuple[Any, Any]] = {"gru": (tl.GRU, nn.GRU), "lstm": (tl.LSTM, nn.LSTM), "rnn": (tl.RNN, nn.RNN)}


class Model(nn.Module):
    """A layer between others, its final state used as well."""

    def __init__(self, layer: nn.RNNBase, inputs: int) -> None:
        super().__init__()
        self.encode, self.layer, self.decode = nn.Linear(inputs, inputs), layer, nn.Linear(layer.hidden_size, 2)

    def forward(self, x: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        y, final = self.layer(torch.tanh(self.encode(x)), **more)
        return self.decode(y), final[0] if isinstance(final, tuple) else final


def trio(kind: str, n: int, device: str, solver: Any = "auto") -> tuple[Model, Model, Model]:
    """The same model by timeloom, by torch, and by torch in float64."""
    torch.manual_seed(0)
    own, theirs = KINDS[kind]
    right = Model(theirs(8, n), 8)
    ours = Model(own(8, n, solver=solver), 8)
    ours.load_state_dict(right.state_dict())
    return ours.to(device), right.to(device), copy.deepcopy(right).double().to(device)


def results(model: Any, x: Tensor, parameters: nn.Module | None = None) -> dict[str, Tensor]:
    x = x.detach().clone().requires_grad_()
    owner = parameters or model
    owner.zero_grad()
    y, final = model(x)
    ((y.sin() * _wave(y)).sum() + final.square().sum()).backward()
    grads = {f"grad {name}": part.grad.clone() for name, part in owner.named_parameters()}
    return {"y": y.detach().clone(), "final": final.detach().clone(), "grad x": x.grad, **grads}


def _wave(y: Tensor) -> Tensor:
    """Weights of the loss, all positive.

    If they cancelled, gradients of biases would be all rounding of a sum that the compiler adds up in its own order.
    """
    return torch.linspace(0.2, 1, len(y), dtype=y.dtype, device=y.device)[:, None, None]


def compiled() -> list[Check]:
    found = []
    for backend, (kind, n) in product(("aot_eager", "inductor"), (("gru", 16), ("lstm", 33), ("rnn", 5), ("gru", 200))):
        found.append(Check(f"{backend} {kind} n={n}", partial(_compiled, backend, kind, n, None)))
    for kind, layers, bias in (("gru", 1, False), ("lstm", 2, False), ("rnn", 3, False), ("gru", 2, True)):
        found.append(Check(f"left to torch, {layers} {kind}, bias={bias}", partial(_short, kind, layers, bias)))
    found.append(Check("reduce-overhead gru n=32", partial(_compiled, "inductor", "gru", 32, "reduce-overhead")))
    found.append(Check("reduce-overhead lstm n=64", partial(_compiled, "inductor", "lstm", 64, "reduce-overhead")))
    return found


def _compiled(backend: str, kind: str, n: int, mode: str | None, device: str) -> str:
    import torch._dynamo

    if mode is not None and device == "cpu":
        raise Unfit("CUDA graphs need a GPU")
    solver = tl.solvers.Shooting(chunk=32) if mode is None else "auto"
    own, theirs, exact = trio(kind, n, device, solver)
    inputs = [torch.randn(steps, 2, 8, device=device) for steps in (200, 200, 301)]
    torch.compiler.reset()
    # The compiler handles everything around the layer on both sides; torch's own layer stays outside of its graph.
    beside = torch.compile(theirs, backend=backend)
    expected = [(results(beside, x, theirs), results(exact, x.double())) for x in inputs]
    said = ""
    with torch._dynamo.config.patch(allow_rnn=True):
        options: dict[str, Any] = {"mode": mode} if mode else {"backend": backend}
        fast = torch.compile(own, fullgraph=True, **options)
        for x, (theirs_found, right) in zip(inputs, expected, strict=True):
            if mode is not None:
                results(own, x)  # learns
                torch.compiler.cudagraph_mark_step_begin()
            said = as_good_as_torch(results(fast, x, own), theirs_found, right)
    torch.compiler.reset()
    return said


def _short(kind: str, layers: int, bias: bool, device: str) -> str:
    """Few steps in a graph, run by torch's own layer, one layer at a time; a single layer in both directions."""
    import torch._dynamo

    own, theirs = KINDS[kind]
    shape: dict[str, Any] = {"num_layers": layers, "bias": bias, "bidirectional": layers == 1}
    torch.manual_seed(0)
    right = Model(theirs(8, 200, **shape), 8)
    right.decode = nn.Linear(200 * (1 + (layers == 1)), 2)
    ours = Model(own(8, 200, **shape), 8)
    ours.decode = nn.Linear(200 * (1 + (layers == 1)), 2)
    ours.load_state_dict(right.state_dict())
    ours, right, exact = ours.to(device), right.to(device), copy.deepcopy(right).double().to(device)
    x = torch.randn(5, 3, 8, device=device)
    torch.compiler.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        found = results(torch.compile(ours, backend="aot_eager", fullgraph=True), x, ours)
    torch.compiler.reset()
    return as_good_as_torch(found, results(right, x), results(exact, x.double()))


def graphs() -> list[Check]:
    """A training step in a user's CUDA graph, replayed on other inputs."""
    return [
        Check(f"{kind} n={n} B={batch} T={steps}", partial(_captured, kind, n, batch, steps))
        for kind, n, batch, steps in (
            ("gru", 32, 1, 2048), ("lstm", 32, 4, 1024), ("rnn", 16, 2, 512), ("gru", 256, 2, 512),
            ("gru", 600, 1, 300), ("lstm", 300, 2, 300), ("gru", 33, 1, 8),
        )
    ] + [
        Check(f"{kind} n={n} whose memory grows", partial(_captured, kind, n, 2, 4096, grows=True))
        for kind, n in (("gru", 32), ("lstm", 64), ("gru", 160))
    ]  # fmt: skip


def _captured(kind: str, n: int, batch: int, steps: int, device: str, grows: bool = False) -> str:
    if device == "cpu":
        raise Unfit("CUDA graphs need a GPU")
    own, theirs, exact = trio(kind, n, device)
    x = torch.randn(steps, batch, 8, device=device).requires_grad_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())

    def step() -> tuple[Tensor, Tensor]:
        own.zero_grad(set_to_none=True)
        x.grad = None
        y, final = own(x)
        ((y.sin() * _wave(y)).sum() + final.square().sum()).backward()
        return y, final

    with torch.cuda.stream(side):
        for _ in range(4):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    own.zero_grad(set_to_none=True)
    x.grad = None
    with torch.cuda.graph(graph):
        y, final = step()
    said = ""
    for turn in range(3):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        if grows and turn == 1:
            with torch.no_grad():
                for model in (own, theirs, exact):  # an LSTM that remembers for longer amplifies roundings, torch's too
                    model.layer.bias_ih_l0[n : 2 * n] += 2.0 if kind == "lstm" else 4.0
        graph.replay()
        torch.cuda.synchronize()
        grads = {f"grad {name}": part.grad.clone() for name, part in own.named_parameters() if part.grad is not None}
        assert x.grad is not None
        found = {"y": y.clone(), "final": final.clone(), "grad x": x.grad.clone(), **grads}
        said = as_good_as_torch(found, results(theirs, x), results(exact, x.double()))
        if grows and not all(report.certified for report in own.layer.reports):  # type: ignore[union-attr]
            raise AssertionError(f"not certified: {own.layer.reports[0]}")  # type: ignore[union-attr, index]
    return said


def streams() -> list[Check]:
    return [
        Check(f"{kind} n={n}", partial(_at_once, kind, n))
        for kind, n in (("gru", 16), ("lstm", 64), ("gru", 200), ("rnn", 33))
    ]


def _at_once(kind: str, n: int, device: str) -> str:
    """Several modules in threads, each on its own stream; and one module used by all."""
    models = [trio(kind, n, device, tl.solvers.Shooting(chunk=32)) for _ in range(3)]
    inputs = [torch.randn(300 + 50 * index, 2, 8, device=device) for index in range(3)]
    expected = [
        (results(right, x), results(exact, x.double())) for (_, right, exact), x in zip(models, inputs, strict=True)
    ]
    shared = models[0][0]
    said: list[str] = []
    failed: list[BaseException] = []
    if device == "cuda":
        torch.cuda.synchronize()

    def work(index: int) -> None:
        stream = torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext()
        try:
            with stream:
                for _ in range(5):
                    found = results(models[index][0], inputs[index])
                    said.append(as_good_as_torch(found, *expected[index]))
                    with torch.no_grad():
                        y, _ = shared(inputs[index])
                        _assert_near(y, models[0][2](inputs[index].double())[0])
        except BaseException as error:  # raised below, in the main thread
            failed.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return max(said)


def _assert_near(value: Tensor, right: Tensor) -> None:
    error = float((value.double() - right).abs().max() / right.abs().max())
    if not error < 2e-3:  # torch may round to tf32 in the layers around
        raise AssertionError(f"a module that threads share is off by {error:.1e}")


def machines() -> list[Check]:
    """Checks that need a large or a second GPU."""
    return [Check("two devices", _two_devices), Check("more than 2³¹ numbers", _large)]


def _two_devices(device: str) -> str:
    if device == "cpu" or torch.cuda.device_count() < 2:
        raise Unfit("needs two GPUs")
    said = ""
    for name in ("cuda:1", "cuda:0", "cuda:1"):
        own, theirs, exact = trio("gru", 32, name, tl.solvers.Shooting(chunk=32))
        x = torch.randn(300, 2, 8, device=name)
        said = as_good_as_torch(results(own, x), results(theirs, x), results(exact, x.double()))
    return said


def _large(device: str) -> str:
    """Addresses beyond 32 bits: the last steps match a float64 run over them only, since this network forgets."""
    if device == "cpu" or torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        raise Unfit("needs 60 GiB of GPU memory")
    torch.manual_seed(0)
    steps, batch, n, tail = 70_000, 64, 512, 500
    layer = tl.GRU(1, n, device=device, solver=tl.solvers.Shooting(chunk=1000, warmup=100))
    exact = nn.GRU(1, n, device=device, dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(steps, batch, 1, device=device)
    with torch.no_grad():
        y, final = layer(x)
        right = exact(x[-tail:].double())[0][-50:]
    error = max(float((y[-50:].double() - right).abs().max()), float((final[0].double() - right[-1]).abs().max()))
    if not error < 1e-4:
        raise AssertionError(f"the last steps are off by {error:.1e}")
    return f"{error:.1e}"
