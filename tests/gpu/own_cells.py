"""Users' cells by generated kernels: every cell of `timeloom.cells` and random ones, against loops in float64."""

from __future__ import annotations

import copy
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import timeloom as tl
from tests.cell_equations import OPTIONS
from tests.gpu.checks import Check, Unfit, as_good_as_torch
from tests.random_cells import RandomCell
from timeloom import cells
from timeloom.compile import remember
from timeloom.kernels.cuda.fused import hindrance
from timeloom.solve import recurrence
from timeloom.solvers import Shooting

SIZES = ((3, 1, 1), (33, 40, 3), (129, 40, 2))
"""Units, steps and sequences."""
LONG = (66, 300, 2)
WIDE = (("LayerNormGRU", 300), ("SLSTM", 258), ("BlockGRU", 513))
MANY = (34, 60, 130)
"""The same for more sequences than a GPU has multiprocessors: blocks walk several rows then."""
RANDOM = range(30)


def own_cells() -> list[Check]:
    """Every cell, even and ragged, T = 1 and B = 1 too."""
    sizes = [(size, kind) for size in SIZES for kind in ("even", "ragged")] + [(LONG, "auto")]
    return [_check(name, *size, kind) for name, (size, kind) in product(OPTIONS, sizes)]


def more_cells() -> list[Check]:
    """Many rows, wide cells, and half precision."""
    found = [_check(name, *MANY, kind) for name, kind in product(("LayerNormGRU", "CfC"), ("even", "ragged"))]
    found += [_check(name, units, 40, 2, "even") for name, units in WIDE]
    halves = product(("LayerNormGRU", "SLSTM", "BlockGRU"), (torch.float16, torch.bfloat16))
    found += [_check(name, 33, 60, 2, "even", dtype) for name, dtype in halves]
    return [*found, Check("ImplicitGRU n=33 T=600 B=3", _implicit), Check("a captured graph", _captured)]


def random_cells() -> list[Check]:
    """Random steps from the operations that kernels cover."""
    return [Check(f"random cell {seed}", partial(_random, seed)) for seed in RANDOM]


def _check(name: str, units: int, steps: int, batch: int, kind: str, dtype: torch.dtype = torch.float32) -> Check:
    run = partial(_layer, name, OPTIONS[name], units, steps, batch, kind, dtype)
    return Check(f"{name} n={units} T={steps} B={batch} {kind} {str(dtype).removeprefix('torch.')}", run)


def _loop(cell: nn.Module, start: tuple[Tensor, ...], x: Tensor, lengths: Tensor, resets: Tensor) -> tuple[Tensor, ...]:
    """The first part of all states, zero after a sequence's end, and the final state."""
    state, states = start, []
    for t, (step, marks) in enumerate(zip(x, resets, strict=True)):
        alive = (lengths > t)[:, None]
        back = marks[:, None] & alive
        state = tuple(torch.where(back, first, part) for first, part in zip(start, state, strict=True))
        following = cell(state if len(state) > 1 else state[0], step)
        following = following if isinstance(following, tuple) else (following,)
        state = tuple(torch.where(alive, new, old) for new, old in zip(following, state, strict=True))
        states.append(torch.where(alive, state[0], 0))
    return torch.stack(states), *state


def _pulled(results: tuple[Tensor, ...], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Results and the gradients of all leaves, pulled from all of them."""
    loss = sum(
        (torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view(result.shape).to(result) * result).sum()
        for result in results
    )
    assert isinstance(loss, Tensor)
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    named = {f"result {number}": result.detach() for number, result in enumerate(results)}
    return named | {f"grad {name}": grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}


def _must_be_fused(reason: str, device: str) -> None:
    if device == "cuda" and hindrance(0) is None and "not fused" in reason:
        raise AssertionError(reason)


def _layer(
    name: str, options: dict[str, Any], units: int, steps: int, batch: int, kind: str, dtype: torch.dtype, device: str
) -> str:
    torch.manual_seed(0)
    remember.FEWEST_STEPS = 0
    exact = getattr(cells, name)(5, units, **options).to(dtype).double()
    with torch.no_grad():
        for parameter in exact.parameters():  # norms with weights of ones and zeros would hide errors
            parameter += (0.1 * torch.randn_like(parameter)).to(dtype).double()
            parameter.copy_(parameter.to(dtype))
    x = torch.randn(steps, batch, 5).to(dtype)
    start = [(0.5 * torch.rand(batch, units) + k).to(dtype) for k in range(exact.parts)]
    lengths = torch.full((batch,), steps)
    resets = torch.zeros(steps, batch, dtype=torch.bool)
    if kind == "ragged":
        lengths = torch.tensor([steps, steps // 3, 0]).repeat(-(-batch // 3))[:batch]
        resets = torch.rand(steps, batch) < 0.1

    def run(kind_of_numbers: torch.dtype, looped: bool, perturbed: float = 0.0) -> dict[str, Tensor]:
        cell = copy.deepcopy(exact).to(device)
        with torch.no_grad():
            for parameter in cell.parameters():
                parameter.mul_(1 + perturbed * (2 * torch.rand_like(parameter) - 1))
        cell = cell.to(kind_of_numbers)
        given = x.to(device, kind_of_numbers).requires_grad_()
        first = tuple(part.to(device, kind_of_numbers).requires_grad_() for part in start)
        leaves = {"x": given, **{f"start {k}": part for k, part in enumerate(first)}, **dict(cell.named_parameters())}
        if looped:
            return _pulled(_loop(cell, first, given, lengths.to(device), resets.to(device)), leaves)
        layer = tl.Layer(cell, solver="auto" if kind == "auto" else Shooting(chunk=7))
        hx = tuple(part.unsqueeze(0) for part in first)
        more = {"lengths": lengths, "resets": resets.to(device)} if kind == "ragged" else {}
        y, final = layer(given, hx if len(hx) > 1 else hx[0], **more)
        _must_be_fused(layer.reports[0].reason, device)
        return _pulled((y, *(part[0] for part in (final if isinstance(final, tuple) else (final,)))), leaves)

    again = partial(run, dtype, True, torch.finfo(dtype).eps)
    return as_good_as_torch(run(dtype, False), run(dtype, True), run(torch.float64, True), again)


def _random(seed: int, device: str) -> str:
    """A random step from the operations that kernels cover."""
    remember.FEWEST_STEPS = 0
    exact, steps, batch = RandomCell(seed), 19, 3
    generator = torch.Generator().manual_seed(seed)
    start = [torch.randn(batch, width, generator=generator) for width in exact.widths]
    x = torch.randn(steps, batch, exact.inputs, generator=generator)
    whole, none = torch.full((batch,), steps), torch.zeros(steps, batch, dtype=torch.bool)

    def run(dtype: torch.dtype, looped: bool) -> dict[str, Tensor]:
        cell = RandomCell(seed).to(device, dtype)  # its recipe refers to itself: it cannot be copied
        given = x.to(device, dtype).requires_grad_()
        first = tuple(part.to(device, dtype).requires_grad_() for part in start)
        leaves = {"x": given, **{f"start {k}": part for k, part in enumerate(first)}, **dict(cell.named_parameters())}
        if looped:
            return _pulled(_loop(cell, first, given, whole.to(device), none.to(device)), leaves)
        states, report = tl.unroll(cell, first if len(first) > 1 else first[0], given, solver=Shooting(chunk=5))
        _must_be_fused(report.reason, device)
        parts = states if isinstance(states, tuple) else (states,)
        return _pulled((parts[0], *(part[-1] for part in parts)), leaves)

    return as_good_as_torch(run(torch.float32, False), run(torch.float32, True), run(torch.float64, True))


def _implicit(device: str) -> str:
    """The multigrid paper's GRU, whose kernels are generated, too."""
    torch.manual_seed(0)
    exact = tl.ImplicitGRU(5, 33).double()
    x = torch.randn(600, 3, 5)

    def run(dtype: torch.dtype, solver: Any) -> dict[str, Tensor]:
        module = copy.deepcopy(exact).to(device, dtype)
        module.solver = solver
        given = x.to(device, dtype).requires_grad_()
        y, final = module(given)
        return _pulled((y, final), {"x": given, **dict(module.named_parameters())})

    with patch.object(recurrence, "runs_in_order", lambda _: False):
        looped, truth = (run(dtype, "sequential") for dtype in (torch.float32, torch.float64))
    ways = (Shooting(chunk=50), "sequential")
    return "; ".join(filter(None, (as_good_as_torch(run(torch.float32, way), looped, truth) for way in ways)))


def _captured(device: str) -> str:
    """A forward pass in a CUDA graph gives the same results as outside, and its report is certified."""
    if device != "cuda" or hindrance(0) is not None:
        raise Unfit("needs an NVIDIA GPU and NVRTC")
    torch.manual_seed(0)
    remember.FEWEST_STEPS = 0
    layer = tl.Layer(cells.SLSTM(5, 33)).to(device)
    x = torch.randn(2048, 2, 5, device=device)
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(4):
            expected = layer(x)[0]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = layer(x)[0]
        graph.replay()
        torch.cuda.synchronize()
        report = layer.reports[0]
    apart = float((y - expected).abs().max())
    if not (report.certified and apart < 2e-6):
        raise AssertionError(f"off by {apart:.1e}, {report}")
    return f"{apart:.1e} apart"
