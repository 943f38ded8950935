"""A layer's own CUDA graphs behind eager calls: what they read, when they are recorded anew, how much they hold."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import timeloom as tl
from tests.gpu.around import results, trio
from tests.gpu.checks import Check, Unfit, as_good_as_torch
from timeloom.auto import decide
from timeloom.auto.costs import cheapest_dense
from timeloom.kernels import replay
from timeloom.kernels.mending import Unless

CALLS = 9
OWN = ("LayerNormGRU", "SLSTM", "BlockGRU", "CfC")


def replays() -> list[Check]:
    sizes = (
        ("gru", 32, 1, 2048),
        ("lstm", 33, 2, 4096),
        ("rnn", 64, 3, 4000),
        ("gru", 200, 1, 2000),
        ("gru", 700, 2, 600),
    )
    found = [
        Check(f"{kind} n={n} B={batch} T={steps}", partial(_trained, kind, n, batch, steps))
        for kind, n, batch, steps in sizes
    ]
    found += [Check(f"weights that move, {kind}", partial(_moved, kind)) for kind in ("gru", "lstm")]
    found += [
        Check(f"dense transfers, {kind} n={n}", partial(_dense, kind, n)) for kind, n in (("gru", 32), ("gru", 5))
    ]
    found += [
        Check(f"what is not certified, {kind} n={n} B={batch}", partial(_missed, kind, n, batch))
        for kind, n, batch in (("gru", 32, 1), ("gru", 32, 9), ("lstm", 64, 2), ("gru", 200, 1), ("rnn", 33, 1))
    ]
    found += [
        Check(f"memory that grows, {kind} n={n} B={batch}", partial(_longer, kind, n, batch))
        for kind, n, batch in (("gru", 32, 1), ("lstm", 64, 2), ("gru", 200, 1))
    ]
    found += [Check(f"two calls in one loss, {kind}", partial(_twice, kind)) for kind in ("gru", "lstm")]
    found += [Check(f"a cell of one's own, {name}", partial(_own, name, torch.float32)) for name in OWN]
    mended = {
        f"{kind} n={n}": partial(_often, kind, n, "auto") for kind, n in (("gru", 32), ("lstm", 33), ("gru", 200))
    }
    mended |= {f"deer, {kind} n={n}": partial(_often, kind, n, "deer") for kind, n in (("gru", 8), ("lstm", 5))}
    mended |= {f"a cell of one's own, {name}": partial(_often_own, name) for name in OWN[:2]}
    found += [Check(f"mended at every replay, {name}", partial(_mended, check)) for name, check in mended.items()]
    found += [Check("a cell of one's own, BlockGRU in bfloat16", partial(_own, "BlockGRU", torch.bfloat16))]
    return [
        *found,
        Check("one module, many threads", _shared),
        Check("two streams at once", _overlapping),
        Check("cuBLAS' workspaces given back", _without_workspaces),
        Check("bounded memory", _bounded),
    ]


def _on_a_gpu(device: str) -> None:
    if device == "cpu":
        raise Unfit("CUDA graphs need a GPU")
    replay.RECORDINGS.clear()


def _recorded() -> int:
    return len(replay.RECORDINGS)


@torch.no_grad()
def _change(own: nn.Module, theirs: nn.Module, exact: nn.Module, by: float) -> None:
    """Change the weights of all three alike, in place, as an optimizer does."""
    for ours, right, truth in zip(own.parameters(), theirs.parameters(), exact.parameters(), strict=True):
        ours.add_(by * torch.randn_like(ours))
        right.copy_(ours)
        truth.copy_(ours)


def _trained(kind: str, n: int, batch: int, steps: int, device: str) -> str:
    """Weights change in place from call to call, and inputs differ; a replay must see both."""
    _on_a_gpu(device)
    own, theirs, exact = trio(kind, n, device)
    said = ""
    for _ in range(CALLS):
        x = torch.randn(steps, batch, 8, device=device)
        said = as_good_as_torch(results(own, x), results(theirs, x), results(exact, x.double()))
        _change(own, theirs, exact, 0.1 * n**-0.5)  # small enough to keep the plan, even in wide layers
    if _recorded() < 2:
        raise AssertionError(f"{_recorded()} recordings after {CALLS} calls, expected one for each pass")
    return said


def _moved(kind: str, device: str) -> str:
    _on_a_gpu(device)
    own, theirs, exact = trio(kind, 32, device)
    x, said = torch.randn(2048, 1, 8, device=device), ""
    for call in range(CALLS + 3):
        if call >= CALLS - 2:
            for ours, right, truth in zip(own.parameters(), theirs.parameters(), exact.parameters(), strict=True):
                ours.data = ours.data + 0.02 * torch.randn_like(ours)
                right.data, truth.data = ours.data.clone(), ours.data.double()
        said = as_good_as_torch(results(own, x), results(theirs, x), results(exact, x.double()))
    return said


def remember(kind: str, *models: nn.Module, by: float = 4.0) -> None:
    """Give all of these a longer memory, in place, by adding to the bias of the gate that keeps."""
    with torch.no_grad():
        for model in models:
            layer: Any = model.layer
            if kind == "rnn":
                layer.weight_hh_l0.copy_(torch.eye(len(layer.weight_hh_l0)) * 0.97)
            else:
                layer.bias_ih_l0[layer.hidden_size : 2 * layer.hidden_size] += by  # the update or the forget gate


def _missed(kind: str, n: int, batch: int, device: str) -> str:
    """Weights for which the learned chunks are not certified: the replay itself runs a longer warm-up or one chunk."""
    _on_a_gpu(device)
    own, theirs, exact = trio(kind, n, device)
    for _ in range(CALLS):
        results(own, torch.randn(4096, batch, 8, device=device))
    layer: Any = own.layer
    if not layer._steady:
        raise AssertionError(f"no replays after {CALLS} calls: {layer.reports[0]}")
    remember(kind, own, theirs, exact)
    x, said = torch.randn(4096, batch, 8, device=device), ""
    for call in range(3):
        said = as_good_as_torch(results(own, x), results(theirs, x), results(exact, x.double()))
        report = layer.reports[0]
        if call == 0 and not (report.certified and _was_mended(report) and _was_mended(report.backward)):
            raise AssertionError(f"it was not mended: {report}")
    return said


def _was_mended(report: Any) -> bool:
    return report.fell_back or "not enough this time" in report.reason


def _longer(kind: str, n: int, batch: int, device: str) -> str:
    """Weights that come to remember for a little longer, again and again: a longer warm-up, or one chunk."""
    _on_a_gpu(device)
    own, theirs, exact = trio(kind, n, device)
    layer: Any = own.layer
    said, reasons = "", set[str]()
    for call in range(4 * CALLS):
        if call and call % CALLS == 0:
            remember(kind, own, theirs, exact, by=0.7)
        x = torch.randn(8192, batch, 8, device=device)
        said = as_good_as_torch(results(own, x), results(theirs, x), results(exact, x.double()))
        for report in (layer.reports[0], layer.reports[0].backward):
            if not report.certified:
                raise AssertionError(f"it is not certified: {report}")
            reasons |= {part.split(" of ")[0] for part in report.reason.split("; ") if "not enough this time" in part}
    return "; ".join([said, *sorted(reasons)])


def _mended(check: Callable[[str], str], device: str) -> str:
    """Replays in which no certificate counts as met, so that all results come from one chunk."""
    _on_a_gpu(device)
    try:
        with mock.patch.object(Unless, "limit_on_device", -1.0):
            return check(device)
    finally:
        replay.RECORDINGS.clear()


def _often(kind: str, n: int, solver: str, device: str) -> str:
    own, theirs, exact = trio(kind, n, device, solver)
    said = ""
    for _ in range(CALLS):
        x = torch.randn(2048, 2, 8, device=device)
        said = as_good_as_torch(results(own, x), results(theirs, x), results(exact, x.double()))
    return said


def _often_own(name: str, device: str) -> str:
    torch.manual_seed(0)
    own = tl.Layer(getattr(tl.cells, name)(8, 32)).to(device)
    loop, exact = copy.deepcopy(own), copy.deepcopy(own).double()
    loop.solver = exact.solver = "sequential"
    x, said = torch.randn(300, 2, 8, device=device), ""
    right = [results(_First(loop), x), results(_First(exact), x.double())]
    for _ in range(CALLS):
        said = as_good_as_torch(results(_First(own), x), *right)
    return said


class _Twice(nn.Module):
    """A layer that is called twice before any backward pass: what the first call saves must outlast the second."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, _ = self.layer(x)
        second, final = self.layer(x.flip(0))
        return first + second.flip(0) * first, final[0] if isinstance(final, tuple) else final


def _twice(kind: str, device: str) -> str:
    _on_a_gpu(device)
    own, theirs, exact = (_Twice(model.layer) for model in trio(kind, 32, device))
    said = ""
    for _ in range(CALLS + 2):
        x = torch.randn(4096, 1, 8, device=device)
        said = as_good_as_torch(results(own, x), results(theirs, x), results(exact, x.double()))
    return said


def _own(name: str, dtype: torch.dtype, device: str) -> str:
    """Weights change in place from call to call, and inputs differ; a replay must see both.

    In the end the cell itself changes, which no replay may miss.
    """
    _on_a_gpu(device)
    torch.manual_seed(0)
    own = tl.Layer(getattr(tl.cells, name)(8, 32)).to(device, dtype)
    loop, exact = copy.deepcopy(own), copy.deepcopy(own).double()
    loop.solver = exact.solver = "sequential"
    said = ""
    for call in range(CALLS):
        if call == CALLS - 1:
            if _recorded() < 2 or not any(kind.cells for kind in own._known._kinds.values()):
                raise AssertionError(f"{_recorded()} recordings after {call} calls; {own._known.reasons}")
            for layer in (own, loop, exact):
                step = layer.cells[0]
                step.forward = partial(_halved, step.forward)
        x = torch.randn(600, 2, 8, device=device, dtype=dtype)  # BlockGRU remembers for more than half of 300
        if call < CALLS - 2:
            results(_First(own), x)
        else:
            found = [results(_First(layer), given) for layer, given in ((own, x), (loop, x), (exact, x.double()))]
            said = as_good_as_torch(*found)
        _change(own, loop, exact, 0.01)
    return said


def _halved(forward: Any, state: Any, x: Tensor) -> Any:
    found = forward(state, x)
    return tuple(0.5 * part for part in found) if isinstance(found, tuple) else 0.5 * found


class _First(nn.Module):
    """A layer that returns only the first part of its final state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, final = self.layer(x)
        return y, final[0] if isinstance(final, tuple) else final


def _dense(kind: str, n: int, device: str) -> str:
    """Gradients that fade over thousands of steps, joined by dense transfers whatever else may be as fast."""
    _on_a_gpu(device)
    free = mock.patch.object(decide, "cheapest_dense", lambda *given: (cheapest_dense(*given)[0], 0.0))
    own, theirs, exact = trio(kind, n, device)
    for model in (own, theirs, exact):
        with torch.no_grad():
            model.layer.bias_ih_l0[n : 2 * n] += 7.0  # the update gate, or the forget gate
    x, said, reasons = torch.randn(16384, 1, 8, device=device), "", set()
    for _ in range(4):
        with free:
            found = results(own, x)
        said = as_good_as_torch(found, results(theirs, x), results(exact, x.double()))
        layer = own.layer
        assert isinstance(layer, tl.GRU | tl.LSTM)
        backward = layer.reports[0].backward
        reasons.add("" if backward is None else backward.reason)
    if not any("dense" in reason for reason in reasons):
        raise AssertionError(f"no dense transfers: {reasons}")
    return said


def _shared(device: str) -> str:
    """Threads on one stream: replays of one recording must not mix."""
    _on_a_gpu(device)
    own, _, exact = trio("gru", 32, device)
    inputs = [torch.randn(4096, 2, 8, device=device) for _ in range(4)]
    with torch.no_grad():
        right = [exact.layer(torch.tanh(exact.encode(x.double())))[0] for x in inputs]
    worst: list[float] = []

    def work(index: int) -> None:
        for _ in range(15):
            y, _ = own.layer(torch.tanh(own.encode(inputs[index])))
            worst.append(float((y.detach().double() - right[index]).abs().max()))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(worst) != 60 or max(worst) > 1e-3:  # the linear layer before it may round to tf32
        raise AssertionError(f"{len(worst)} calls of 60, off by {max(worst, default=0):.1e}")
    return f"{max(worst):.1e}"


def _overlapping(device: str) -> str:
    """Recordings of two streams run at the same time on the GPU: they must not write to each other's memory."""
    _on_a_gpu(device)
    layers = [tl.GRU(64, 64, device=device) for _ in range(2)]
    inputs = [torch.randn(4096, 8, 64, device=device) for _ in layers]
    streams = [torch.cuda.Stream() for _ in layers]
    torch.cuda.synchronize()

    def gradients(turns: int, apart: bool) -> list[list[Tensor]]:
        found: list[list[Tensor]] = [[], []]
        for _ in range(turns):
            for index, (layer, x, stream) in enumerate(zip(layers, inputs, streams, strict=True)):
                with torch.cuda.stream(stream):
                    found[index] = list(torch.autograd.grad(layer(x)[0].sum(), list(layer.parameters())))
                if apart:
                    torch.cuda.synchronize()
        torch.cuda.synchronize()
        return found

    right = gradients(CALLS, apart=True)
    if _recorded() < 4:
        raise AssertionError(f"{_recorded()} recordings, expected one for each pass on each stream")
    off = 0.0
    for _ in range(20):
        for found, expected in zip(gradients(2, apart=False), right, strict=True):
            pairs = zip(found, expected, strict=True)
            off = max(off, *(float((value - one).abs().max() / one.abs().max()) for value, one in pairs))
    if off > 1e-4:
        raise AssertionError(f"gradients of two streams at once are off by {off:.1e} from one after the other")
    return f"{off:.1e}"


def _without_workspaces(device: str) -> str:
    """torch frees cuBLAS workspaces around graphs of its own: recordings must not write where these were."""
    _on_a_gpu(device)
    own, theirs, exact = trio("gru", 64, device)
    inputs = [torch.randn(steps, 4, 8, device=device) for steps in (2048, 4096)]
    for x in inputs:
        for _ in range(CALLS):
            results(own, x)
    with replay.RECORDINGS.lock:
        oldest = next(key for key, _ in replay.RECORDINGS._recordings())
        replay.RECORDINGS._drop(oldest)
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    filled = [torch.full((2**20,), 7.0, device=device) for _ in range(64)]
    said = ""
    for x in inputs:
        said = as_good_as_torch(results(own, x), results(theirs, x), results(exact, x.double()))
    torch.cuda.synchronize()
    if not all(bool((one == 7.0).all()) for one in filled):
        raise AssertionError("a replay wrote into memory of others")
    return said


def _bounded(device: str) -> str:
    _on_a_gpu(device)
    layer = tl.GRU(8, 64, device=device)
    limit = replay._memory(torch.device(device, torch.cuda.current_device())) // replay.SHARE_OF_ALL
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    for steps in range(4096, 4096 + 40 * 64, 64):
        for _ in range(5):
            layer(torch.randn(steps, 4, 8, device=device))[0].sum().backward()
    grown = torch.cuda.memory_reserved() - before
    if replay.RECORDINGS.size > limit or grown > 2 * limit + 2**31:
        raise AssertionError(f"recordings take {replay.RECORDINGS.size:,} of {limit:,} bytes; {grown:,} more reserved")
    return f"{_recorded()} recordings, {grown / 2**20:.0f} MiB more"
