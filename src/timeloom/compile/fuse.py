"""A user's step, compiled: its normal form, and how its weights and inputs are computed from the user's tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from timeloom.cells.fused import FusedCell
from timeloom.cells.generic import GenericCell
from timeloom.compile.bindings import GRADIENT_HOOKS, Bindings, held_by
from timeloom.compile.graph import Place
from timeloom.compile.hoist import ByRows, Constants, Evaluation, in_single, widened
from timeloom.compile.lanes import Lanes
from timeloom.compile.lower import Hoisted, Lowering, stack
from timeloom.compile.program import Fused, complete
from timeloom.compile.refusal import NotFused
from timeloom.compile.trace import some_rows, trace, traced_by_rows
from timeloom.torch_state.precision import HALF

Function = Callable[[Any, Tensor], Any]
AGREES = {torch.float32: 2e-4, torch.float64: 1e-9, torch.float16: 2e-2, torch.bfloat16: 0.1}
"""Relative difference between a step and its normal form that counts as rounding, on random rows."""


@dataclass(frozen=True)
class Compiled:
    """A step in its normal form, and the trace it came from."""

    fused: Fused
    module: fx.GraphModule
    lanes: Lanes
    rows: int
    inputs: tuple[Hoisted, ...]
    units: tuple[Hoisted, ...]
    weights: tuple[Tensor, ...]
    """Lanes of the stacks of matrices, `(count, blocks, out, in)`."""
    bindings: Bindings
    text: str
    """The code of the trace."""
    indexed: dict[str, Tensor]
    """Copies of the user's tensors whose values are part of the normal form (indices), by their names in the trace. Of
    all other tensors the normal form holds only the paths."""

    def indexes_alike(self, held: dict[str, Tensor]) -> bool:
        """Whether these tensors, by their names in the trace, have the values that are part of the normal form."""
        return all(torch.equal(held[name], values) for name, values in self.indexed.items())

    def traced_alike(self, function: Function, state: tuple[Tensor, ...], is_tuple: bool, x: Tensor) -> bool:
        """Whether a step, traced anew on rows like those it was compiled from, is the same."""
        try:
            examples = tuple(some_rows(part, self.rows) for part in state)
            module = trace(function, examples, is_tuple, some_rows(x, self.rows))
        except NotFused:
            return False
        bindings = Bindings.find(function, module)
        text, own, made = self.text, self.bindings, bindings.fixed
        alike = text == module.code and own.paths == bindings.paths and _all_equal(own.fixed, made)
        return alike and self.indexes_alike(bindings.tensors(function))

    def prepare(self, function: Function, x: Tensor, like: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Weights and inputs `(rows, K)` of the normal form, on autograd's tape.

        They are computed from x `(rows, ...)` and the tensors that the function holds now.
        """
        return self.prepare_from(self.bindings.tensors(function), x, like)

    def prepare_from(self, held: dict[str, Tensor], x: Tensor, like: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """The same from tensors by their names in the trace."""
        x = x.float() if x.dtype in HALF else x
        constants, by_x = Evaluation(self.module, self.rows, held), Evaluation(self.module, self.rows, held, x)
        gathered = self._gathered
        weights = [constant.gather(constants, like) for constant in gathered.weights]
        units = [_times(unit.gather(constants, like), by, constants, like) for unit, by in gathered.units]
        inputs = [_times(vector.gather(by_x), by, constants, like) for vector, by in gathered.inputs]
        joined = inputs[0] if len(inputs) == 1 else torch.cat(inputs, -1) if inputs else x.new_zeros(len(x), 0)
        return (*weights, *units), joined.to(like)

    def index(self) -> str | None:
        """The path of a tensor whose values are part of the normal form; None if there is none."""
        name = next(iter(self.indexed), None)
        return None if name is None else ".".join(map(str, self.bindings.paths[name]))

    @cached_property
    def _gathered(self) -> _Gathered:
        """How weights, per-unit vectors and inputs are assembled."""

        def by(vector: Hoisted) -> Constants | None:
            return None if vector.weights is None else Constants(vector.weights, self.lanes)

        with torch.device("cpu"):
            return _Gathered(
                [Constants(lanes, self.lanes) for lanes in self.weights],
                [(Constants(unit.lanes, self.lanes), by(unit)) for unit in self.units],
                [(ByRows(vector.lanes, self.lanes), by(vector)) for vector in self._joined_inputs],
            )

    @cached_property
    def _joined_inputs(self) -> list[Hoisted]:
        """The input vectors, where neighbours from one tensor are joined."""
        joined: list[Hoisted] = []
        for vector in self.inputs:
            last = joined[-1] if joined else None
            if last is not None and last.weights is None and vector.weights is None:
                both = torch.cat([last.lanes, vector.lanes])
                if len(torch.unique(self.lanes.source_numbers(both))) == 1:
                    joined[-1] = Hoisted(both)
                    continue
            joined.append(vector)
        return joined


@dataclass(frozen=True)
class _Gathered:
    """How weights, per-unit vectors and inputs are assembled; the latter two may be multiplied by weights."""

    weights: list[Constants]
    units: list[tuple[Constants, Constants | None]]
    inputs: list[tuple[ByRows, Constants | None]]


def _all_equal(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(_equal(some[name], others[name]) for name in some)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are interchangeable for a step: if they require gradients, only the very same one is."""
    return one is other or (not (one.requires_grad or other.requires_grad) and torch.equal(one, other))


def _indexed(lanes: Lanes, held: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the tensors whose values determine where lanes are moved."""
    pending, seen = list(lanes.indices), set[fx.Node]()
    found: dict[str, Tensor] = {}
    while pending:
        node = pending.pop()
        if node.op == "get_attr" and str(node.target) in held:
            found[str(node.target)] = held[str(node.target)].detach().clone()
        pending += [arg for arg in node.all_input_nodes if arg not in seen]
        seen.update(node.all_input_nodes)
    return found


def _times(value: Tensor, weights: Constants | None, evaluate: Evaluation, like: Tensor) -> Tensor:
    return value if weights is None else value.to(like) @ weights.gather(evaluate, like).t()


def compile_step(
    function: Function, state: tuple[Tensor, ...], is_tuple: bool, x: Tensor, folds: bool = False
) -> Compiled:
    """Compile a step from example rows of its state and x; raises NotFused with the reason if that is impossible.

    The result has been compared with the step itself on random rows, values and gradients. `folds`: whether kernels
    compute small products with x, too.
    """
    like = state[0]
    if like.dtype not in AGREES:
        raise NotFused(f"states of {like.dtype}: kernels for a step of one's own are for floating-point numbers")
    if any(part.dtype != like.dtype for part in state) or (x.is_floating_point() and x.dtype != like.dtype):
        raise NotFused(f"x of {x.dtype} for states of {like.dtype}")
    if any(path[-1] in GRADIENT_HOOKS for path, _ in held_by(function) if path):
        raise NotFused("a hook on a gradient inside of the step (register_full_backward_hook)")
    module, rows = traced_by_rows(function, state, is_tuple, x)
    example, inputs = tuple(some_rows(part, rows) for part in state), some_rows(x, rows)
    text = module.code
    bindings = Bindings.find(function, module)
    wide = like.dtype in HALF
    lanes = Lanes(module, len(state), rows, Evaluation(module, rows, bindings.tensors(function)), wide, folds)
    widths = tuple(part[:1].numel() for part in state)
    try:
        lowering, places = _lowered(lanes, widths)
    except NotFused:
        raise
    except Exception as error:  # no rule was written for it: the step runs uncompiled
        said = str(error).splitlines()
        raise NotFused(f"it has no normal form: {type(error).__name__}: {said[0] if said else ''}"[:300]) from error
    graph, matrices, weights, roots, vectors = stack(lowering, [place.value for place in places])
    outputs = [type(p)(p.part, p.offset, p.width, root) for p, root in zip(places, roots, strict=True)]
    fused = complete(
        lowering.parts, graph, outputs, matrices, [v.width for v in vectors], [v.width for v in lowering.units]
    )
    units = tuple(lowering.units)
    held = bindings.tensors(function)
    indexed = _indexed(lanes, {name: held[name] for name in bindings.paths})
    compiled = Compiled(fused, module, lanes, rows, tuple(vectors), units, tuple(weights), bindings, text, indexed)
    if wide:
        again = _Widened(module, bindings.tensors(function))
        verify(compiled, again, tuple(part.float() for part in example), is_tuple, again.given(inputs), function)
    else:
        verify(compiled, function, example, is_tuple, inputs, function)
    lanes.forget()
    return compiled


def _lowered(lanes: Lanes, widths: tuple[int, ...]) -> tuple[Lowering, list[Place]]:
    """The graph of a trace, and the places of its values in the next state."""
    with torch.no_grad(), torch.device("cpu"):  # lanes are integers on the host
        parts = lanes.walk()
        first = Lowering(lanes, widths)
        first.outputs(parts)
        lowering = Lowering(lanes, widths, edges=first.demanded)  # again, now that all stretches needed are known
        return lowering, lowering.outputs(parts)


class _Widened(fx.Interpreter):
    """A traced step of half precision, run in float32."""

    def __init__(self, module: fx.GraphModule, tensors: dict[str, Tensor]) -> None:
        super().__init__(module)
        self._tensors = widened(tensors)

    @staticmethod
    def given(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype in HALF else tensor

    def __call__(self, state: Any, x: Tensor) -> Any:
        found = self.run(*(state if isinstance(state, tuple) else (state,)), x)
        return found if isinstance(state, tuple) else found[0]

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._tensors[str(target)]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(target, in_single(args), in_single(kwargs))


def verify(
    compiled: Compiled, step: Function, state: Sequence[Tensor], is_tuple: bool, x: Tensor, holder: Function
) -> None:
    """Compare the normal form with the step on random rows near the examples; raises NotFused if they differ.

    Compared are the next state, and its gradients with respect to the state, x and every parameter. `holder`: the
    function that holds the parameters.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    near = [
        part + 0.5 * torch.randn(part.shape, generator=generator, dtype=part.dtype).to(part.device) for part in state
    ]
    probe = [torch.randn(part.shape, generator=generator, dtype=part.dtype).to(part.device) for part in state]
    x = x.detach().requires_grad_(x.is_floating_point())
    own = [] if step is not holder else _parameters(compiled.bindings.tensors(holder))
    outer = [tensor for tensor in (x, *own) if tensor.requires_grad]
    expected, by_state, by_outer = _by_autograd(step, near, probe, is_tuple, x, outer)
    flat, grads = (torch.cat([_as_rows(part) for part in parts], -1) for parts in (near, probe))
    with torch.enable_grad():
        weights, u = compiled.prepare(holder, x, near[0])
    with torch.no_grad():
        cell = FusedCell(compiled.fused, weights)
        found = cell.step(flat, u)
        back, gates = cell.vjp(flat, u, grads)
        by_weight = cell.weight_grads(flat.split(cell.parts, -1), gates)
    through = _pulled_back([u, *weights], [cell.input_grads(gates), *by_weight], outer)
    tolerance, what = AGREES[near[0].dtype], "its gradient by {} (a torch.autograd.Function of its own?)"
    for given, value in zip(found.split(cell.parts, -1), expected, strict=True):
        _compare(given, _as_rows(value), tolerance, "its result")
    for given, value in zip(back.split(cell.parts, -1), by_state, strict=True):
        _compare(given, _as_rows(value), 10 * tolerance, what.format("the state"))
    largest = max(_largest(grad) for grad in (*by_state, *by_outer))
    for tensor, given, value in zip(outer, through, by_outer, strict=True):  # a bias before a norm: all rounding
        _compare(given, value, 10 * tolerance, what.format("x" if tensor is x else "what it refers to"), largest / 10)


def apart(cell: GenericCell, state: Tensor, x: Tensor, following: Tensor, dtype: torch.dtype) -> float:
    """How far the kernels' results are from the step itself on a few rows: far, if the step has changed unnoticed.

    States are whole, `(N, S)`; `dtype` is the step's own. Uses few operations, since it runs in every call.
    """
    with torch.no_grad():
        expected = cell.step(state.to(dtype), x.reshape(len(x), -1)).to(following)
        gaps = (following - expected).abs_() / expected.nan_to_num(nan=0, posinf=0, neginf=0).abs_().amax().clamp_(1e-3)
        worst = gaps.masked_fill_(expected.isfinite().logical_not_(), 0).amax()
    return float(worst)


def _as_rows(part: Tensor) -> Tensor:
    """A part as `(B, ·)`, also if it is one number for each sequence, `(B,)`."""
    return part.reshape(len(part), -1)


def _parameters(tensors: dict[str, Tensor]) -> list[Tensor]:
    """The tensors that require a gradient, each once."""
    return list({id(tensor): tensor for tensor in tensors.values() if tensor.requires_grad}.values())


def _by_autograd(
    function: Function, state: list[Tensor], probe: list[Tensor], is_tuple: bool, x: Tensor, outer: list[Tensor]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The next state, and the gradients of the state and of `outer`."""
    with torch.enable_grad():
        leaves = [part.detach().requires_grad_() for part in state]
        out = function(tuple(leaves) if is_tuple else leaves[0], x)
        out = list(out) if isinstance(out, tuple) else [out]
    if [o.shape for o in out] != [leaf.shape for leaf in leaves]:
        raise NotFused("it returns a state of another shape")
    found = _pulled_back(out, probe, [*leaves, *outer])
    return [o.detach() for o in out], found[: len(leaves)], found[len(leaves) :]


def _pulled_back(values: Sequence[Tensor], grads: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of the leaves, zeros where there are none."""
    tracked = [(value, grad) for value, grad in zip(values, grads, strict=True) if value.requires_grad]
    found: Sequence[Tensor | None] = [None] * len(leaves)
    if tracked and leaves:
        found = torch.autograd.grad([v for v, _ in tracked], leaves, [g for _, g in tracked], allow_unused=True)
    return [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, found, strict=True)]


def _compare(given: Tensor, expected: Tensor, tolerance: float, what: str, least: float = 0.0) -> None:
    """Raise NotFused if values differ by more than `tolerance`, relative to the largest one, or at least to `least`."""
    gaps = (given - expected)[expected.isfinite()].abs()
    difference = float(gaps.max()) / max(_largest(expected), 1e-3, least) if gaps.numel() else 0.0
    if not difference <= tolerance:
        raise NotFused(f"the compiled step differs from the step itself by {difference:.1e} (relative) in {what}")


def _largest(tensor: Tensor) -> float:
    """The largest finite magnitude."""
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
