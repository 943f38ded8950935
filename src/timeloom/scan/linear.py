"""`linear_scan`: the public, differentiable linear recurrence."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from timeloom.kernels import faults
from timeloom.options import check_count
from timeloom.scan import blelloch, chunked, cpu, gpu, reference
from timeloom.scan import elements as el
from timeloom.scan.elements import DIMS, Structure
from timeloom.torch_state.autocast import without_autocast
from timeloom.torch_state.eager import eager
from timeloom.torch_state.transforms import transformed
from timeloom.torch_state.wrapped import wrapped

Method = Literal["auto", "reference", "chunked", "blelloch"]


@eager
def linear_scan(
    a: Tensor,
    b: Tensor,
    h0: Tensor | None = None,
    reverse: bool = False,
    *,
    transpose: bool = False,
    structure: Structure | None = None,
    method: Method = "auto",
    levels: int | None = None,
) -> Tensor:
    """Solve `h[t] = a[t] h[t-1] + b[t]` for all t; differentiable, any number of times. Real or complex.

    a: transfers: diagonal with the shape of b, `(T, B, n)`; dense, `(T, B, n, n)`; or blocks of 2 × 2, `(T, B, 2, 2,
        n)` with b `(T, B, 2, n)`. Any leading batch shape will do.
    b: sources, `(T, B, n)`.
    h0: state before the first step, `(B, n)`; zero by default.
    reverse: run from the last step to the first: `h[t] = a[t] h[t+1] + b[t]`, with h0 the state after the last.
    transpose: use every a[t] transposed.
    structure: `diagonal`, `dense` or `block`; None tells the first two apart by their shapes.
    method: `reference` (a loop), `chunked` (√T steps, side by side), `blelloch` (a tree of log T levels), or `auto`:
        compiled code on a CPU, kernels on a GPU, else chunked. All give the same result up to rounding.
    levels: levels of the tree for `blelloch`; above them the roots are run one after the other. None takes all.
    Returns h, `(T, B, n)`.
    """
    structure = _check(a, b, h0, structure, method, levels)
    if transformed() or wrapped((a, b, h0)):  # plain operations, which any transform and any tensor support
        plain: Method = "reference" if method == "reference" else "chunked"
        return _Way(structure, plain, None, reverse, transpose).run(a, b, h0)
    result: Tensor = _LinearScan.apply(a, b, h0, _Way(structure, method, levels, reverse, transpose))
    return result


class _Way:
    """The method and options of a scan."""

    def __init__(self, structure: Structure, method: Method, levels: int | None, reverse: bool, transpose: bool):
        self.structure: Structure = structure
        self.method: Method = method
        self.levels, self.reverse, self.transpose = levels, reverse, transpose

    def by_kernels(self, b: Tensor) -> bool:
        return self.method == "auto" and gpu.supports(b, self.structure) and faults.broken(self.kernel) is None

    @property
    def kernel(self) -> str:
        """The kernel's name in messages to users."""
        return f"triton {self.structure} scan"

    def run(self, a: Tensor, b: Tensor, h0: Tensor | None) -> Tensor:
        if self.by_kernels(b):
            with suppress(faults.KernelFault):  # the user has been warned
                given = self.structure, self.reverse, self.transpose
                return faults.guarded(self.kernel, lambda: gpu.scan(a, b, h0, *given))
        h0 = el.start(b, h0)
        if (self.method == "auto" or self.levels == 0) and cpu.supports(b):
            return cpu.scan(a, b, h0, self.structure, self.reverse, self.transpose)
        if self.transpose:
            a = el.transpose(a, self.structure)
        with without_autocast(b.device):  # the dtype of the inputs decides the precision
            if self.method == "blelloch":
                return blelloch.scan(a, b, h0, self.structure, self.levels, self.reverse)
            scan = reference.scan if self.method == "reference" else chunked.scan
            if self.reverse:
                return scan(a.flip(0), b.flip(0), h0, self.structure).flip(0)
            return scan(a, b, h0, self.structure)


def _check(
    a: Tensor, b: Tensor, h0: Tensor | None, structure: Structure | None, method: str, levels: int | None
) -> Structure:
    for name, value in (("a", a), ("b", b), ("h0", h0)):
        if not isinstance(value, Tensor) and not (name == "h0" and value is None):
            raise TypeError(f"{name} must be a Tensor, got {type(value).__name__}")
    if not (b.is_floating_point() or b.is_complex()):
        raise TypeError(f"b must be floating point or complex, got {b.dtype}")
    if b.dim() < 1:
        raise ValueError("b must have a time dimension, got a scalar")
    shapes: dict[Structure, tuple[int, ...]] = {"diagonal": tuple(b.shape)}
    if b.dim() >= 2:
        shapes["dense"] = (*b.shape, b.shape[-1])
    if b.dim() >= 3 and b.shape[-2] == 2:
        shapes["block"] = (*b.shape[:-2], 2, 2, b.shape[-1])
    if structure is not None and not (isinstance(structure, str) and structure in DIMS):
        raise ValueError(f"structure must be one of {', '.join(map(repr, DIMS))} or None; got {structure!r}")
    asked = ("diagonal", "dense") if structure is None else (structure,)
    wanted = {name: shape for name, shape in shapes.items() if name in asked}
    found = next((name for name, shape in wanted.items() if tuple(a.shape) == shape), None)
    if found is None:
        choices = " or ".join(f"{shape} ({name})" for name, shape in wanted.items())
        if structure is None and tuple(a.shape) == shapes.get("block"):
            choices += "; for blocks of 2 × 2 give structure='block'"
        raise ValueError(
            f"a has shape {tuple(a.shape)}; with b of shape {tuple(b.shape)} it must be {choices}"
            if wanted
            else f"b has shape {tuple(b.shape)}; {structure} elements need it to be "
            + ("(T, ..., n)" if structure == "dense" else "(T, ..., 2, n)")
        )
    if h0 is not None and h0.shape != b.shape[1:]:
        raise ValueError(f"h0 has shape {tuple(h0.shape)}, expected {tuple(b.shape[1:])} (b without time)")
    for name, other in (("a", a), ("h0", h0)):
        if other is not None and (other.dtype, other.device) != (b.dtype, b.device):
            raise ValueError(
                f"{name} is {other.dtype} on {other.device}, b is {b.dtype} on {b.device}: they must agree"
            )
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(map(repr, get_args(Method)))}; got {method!r}")
    check_count("levels", levels, least=0)
    if levels is not None and method != "blelloch":
        raise ValueError(f"levels={levels} goes with method='blelloch'; the method is {method!r}")
    return found


class _LinearScan(torch.autograd.Function):
    """The adjoint of a linear scan is a linear scan over reversed time, so its backward is differentiable too.

    λ[t] = g[t] + a[t+1]ᵀ λ[t+1];  db = λ,  da[t] = λ[t] ⊗ h[t-1],  dh0 = a[0]ᵀ λ[0]; with a and h conjugated where they
    are complex.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, h0: Tensor | None, way: _Way) -> Tensor:
        states = way.run(a, b, h0)
        ctx.save_for_backward(a, h0, states)
        ctx.way = way
        return states

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        a, h0, states = ctx.saved_tensors
        (grad,), way, structure = grads, ctx.way, ctx.way.structure
        if len(states) == 0:
            return torch.zeros_like(a), grad, None if h0 is None else torch.zeros_like(h0), None
        # in the order in which the steps are taken: first, all but the first, all but the last
        first, later, earlier, last = (
            (-1, slice(-1), slice(1, None), 0) if way.reverse else (0, slice(1, None), slice(-1), -1)
        )
        wants_a, wants_h0 = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
        if structure == "diagonal" and way.by_kernels(grad) and not torch.is_grad_enabled():
            with suppress(faults.KernelFault):
                given = a, grad, h0, states, way.reverse, wants_a
                adjoint, d_a = faults.guarded(way.kernel, lambda: gpu.diagonal_adjoint(*given))
                return d_a, adjoint, a[first] * adjoint[first] if wants_h0 else None, None
        rest = linear_scan(
            a[later].conj(), grad[earlier], grad[last], not way.reverse,
            transpose=not way.transpose, structure=structure, method=way.method, levels=way.levels,
        )  # fmt: skip
        ends, start = grad[last].unsqueeze(0), el.start(grad, h0).unsqueeze(0)
        adjoint = torch.cat([ends, rest] if way.reverse else [rest, ends])
        d_a = None
        if wants_a:
            previous = torch.cat([states[1:], start] if way.reverse else [start, states[:-1]])
            d_a = _outer(adjoint, previous.conj(), structure)
            d_a = el.transpose(d_a, structure) if way.transpose else d_a
        d_h0 = None
        if wants_h0:
            first_a = a[first] if way.transpose else el.transpose(a[first], structure)
            d_h0 = _transferred(first_a.conj(), adjoint[first], structure)
        return d_a, adjoint, d_h0, None


def _outer(grad: Tensor, h: Tensor, structure: Structure) -> Tensor:
    """Gradient of an element from the adjoint behind it and the state before it."""
    if structure == "diagonal":
        return grad * h
    if structure == "dense":
        return grad.unsqueeze(-1) * h.unsqueeze(-2)
    return grad.unsqueeze(-2) * h.unsqueeze(-3)


def _transferred(a: Tensor, h: Tensor, structure: Structure) -> Tensor:
    """Apply an element to a state without a matrix product, whose precision autocast, if on here, would lower."""
    return (a * h.unsqueeze(-2)).sum(-1) if structure == "dense" else el.apply(a, h, structure)
