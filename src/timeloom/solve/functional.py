"""A layer's solve inside `torch.func` transforms and forward-mode differentiation, as three autograd Functions.

    SolvedLayer       states and final state                             grad, vjp, jvp, vmap
    LayerGradients    its gradients, as a function of the loss's own     grad (of grad), jvp (of grad), vmap
    LayerCurvature    the gradients of these gradients                   vmap

Torch unwraps the transforms around each of them, which then solves plain tensors parallel in time as usual. `vmap` runs
models one after the other, each parallel in time; if only inputs are mapped, the mapped dimension joins the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from timeloom.compile.call import telling
from timeloom.report import SolveReport
from timeloom.solve.inputs import Inputs
from timeloom.solve.recurrence import Record, noting, raise_if_asked
from timeloom.solve.second_order import layer_gradients
from timeloom.solve.trunk import LayerSolve
from timeloom.torch_state.autocast import without_autocast

Tensors = tuple[Tensor, ...]
GIVEN = len(Inputs._fields)
LIVE = GIVEN - 2
"""Number of leading fields of `Inputs` that may require gradients; lengths and resets come after them."""


class Call:
    """The arguments of one call of a layer that are not tensors."""

    def __init__(self, solve: LayerSolve, record: Record, reports: list[SolveReport] | None = None) -> None:
        self.solve, self.record = solve, record
        self.reports: list[SolveReport] = [] if reports is None else reports
        """The report of the forward solve (of many models, the last), to which the backward report is attached."""

    def one_of(self, models: int) -> Call:
        """The same call for one of many models."""
        return Call(self.solve, telling(self.record, f"one of {models} models, one after the other"), self.reports)


def run(solve: LayerSolve, inputs: Inputs, record: Record) -> tuple[Tensor, Tensor]:
    """Outputs `(T, B, n)` and final state `(B, S)`, differentiable by every transform."""
    states, final, *_ = SolvedLayer.apply(Call(solve, record), *inputs)
    return states[1:], final


class SolvedLayer(torch.autograd.Function):
    """States of h `(T + 1, B, n)`, the final state `(B, S)`, and whatever else the gradients need."""

    @staticmethod
    def forward(call: Call, *given: Any) -> Tensors:
        inputs, solve = _plain(given), call.solve
        cell = solve.cell_of(inputs)
        with torch.no_grad(), without_autocast(inputs.x.device):
            solution = solve.forward(inputs, True, cell, solve.kind_of(inputs, cell))
        raise_if_asked(solution.report, solve.solver)
        call.reports[:] = [solution.report]
        call.record(solution.report)
        states, *kept = solution.kept
        return states, solution.final.clone(), *kept  # no output may be a view of another

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        call, *given = inputs
        states, _, *kept = output
        ctx.call = call
        ctx.mark_non_differentiable(*kept)
        ctx.save_for_backward(*given, states, *kept)
        ctx.save_for_forward(*given, states, *kept)

    @staticmethod
    def backward(ctx: Any, d_states: Tensor, d_final: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        found = iter(LayerGradients.apply(ctx.call, d_states, d_final, *saved))
        return None, *(None if tensor is None else next(found) for tensor in saved[:LIVE]), None, None

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """The states' derivative along a direction: the gradient of ⟨direction, LayerGradients⟩ by `d_states`."""
        saved = ctx.saved_tensors
        live, states = saved[:LIVE], saved[GIVEN]
        directions = _directions(live, tangents)
        zeros = torch.zeros_like(states), torch.zeros_like(saved[1])
        along_states, along_final, *_ = LayerCurvature.apply(ctx.call, len(directions), *directions, *zeros, *saved)
        return along_states, along_final, *(None for _ in saved[GIVEN + 1 :])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: Call, *given: Any) -> tuple[Tensors, tuple[int, ...]]:
        if any(dim is not None for dim in in_dims[3:]):
            return _one_by_one(SolvedLayer, info, in_dims, call, *given)
        x, initial, *others = given  # shared weights: all models' sequences are one batch
        count = info.batch_size
        x = _joined(x, in_dims[1], count, 1)
        initial = _joined(initial, in_dims[2], count, 0)
        states, final, *kept = SolvedLayer.apply(call, x, initial, *others)
        apart = [states.unflatten(1, (count, -1)), final.unflatten(0, (count, -1))]
        apart += [part.unflatten(1, (count, -1)) for part in kept]
        return tuple(apart), (1, 0, *(1 for _ in kept))


class LayerGradients(torch.autograd.Function):
    """Gradients of all live tensors that are not None, from the gradients of the states and of the final state."""

    @staticmethod
    def forward(call: Call, d_states: Tensor, d_final: Tensor, *saved: Any) -> Tensors:
        inputs, kept = _plain(saved[:GIVEN]), [part.contiguous() for part in saved[GIVEN:]]
        solve = call.solve
        note = noting(call.reports[-1], solve.solver, solve.experience, call.record)
        plan = solve.plan_backward(inputs, solve.cell_of(inputs))
        with torch.no_grad(), without_autocast(inputs.x.device):
            found = list(solve.backward(inputs, kept, (d_states[1:].contiguous(), d_final), True, plan, note))
        found[1] = _with_first(found[1], d_states)
        live = [(grad, of) for grad, of in zip(found, inputs.live, strict=True) if of is not None]
        return tuple(torch.zeros_like(of) if grad is None else grad.clone() for grad, of in live)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.call = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *directions: Tensor) -> tuple[Tensor | None, ...]:
        d_states, d_final, *saved = ctx.saved_tensors
        found = iter(LayerCurvature.apply(ctx.call, len(directions), *directions, d_states, d_final, *saved))
        by_grads = next(found), next(found)
        by_live = (None if tensor is None else next(found) for tensor in saved[:LIVE])
        return None, *by_grads, *by_live, *(None for _ in saved[LIVE:])

    @staticmethod
    def jvp(
        ctx: Any, _: None, along_states: Tensor | None, along_final: Tensor | None, *along: Tensor | None
    ) -> Tensors:
        """The gradients are linear in the loss's gradients, and their derivative by the live tensors is symmetric.

        So their derivative in a direction is the gradient that `LayerCurvature` computes for that direction.
        """
        d_states, d_final, *saved = ctx.saved_tensors
        directions = _directions(saved[:LIVE], along)
        _, _, *found = LayerCurvature.apply(ctx.call, len(directions), *directions, d_states, d_final, *saved)
        if along_states is None and along_final is None:
            return tuple(found)
        given = _directions((d_states, d_final), (along_states, along_final))
        linear = LayerGradients.apply(ctx.call, *given, *saved)
        return tuple(one + other for one, other in zip(found, linear, strict=True))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensors, tuple[int, ...]]:
        return _one_by_one(LayerGradients, info, in_dims, *args)


class LayerCurvature(torch.autograd.Function):
    """Gradients of `⟨directions, LayerGradients⟩` by the loss's gradients and by all live tensors that are not None."""

    @staticmethod
    def forward(call: Call, count: int, *args: Any) -> Tensors:
        directions, (d_states, d_final, *saved) = args[:count], args[count:]
        inputs = _plain(saved[:GIVEN])
        states = [part.detach() for part in saved[GIVEN : GIVEN + len(call.solve.cell_of(inputs).parts)]]
        with torch.enable_grad(), without_autocast(inputs.x.device):
            given: list[Any] = [
                None if one is None else one.detach().requires_grad_() for one in (d_states, d_final, *inputs.live)
            ]
            d_states, d_final, *live = given
            found = list(
                layer_gradients(
                    call.solve.project, live, states, (d_states[1:], d_final), inputs.lengths, inputs.resets
                )
            )
            found[1] = _with_first(found[1], d_states)
            grads = [grad for grad, of in zip(found, live, strict=True) if of is not None]
            leaves = [leaf for leaf in given if leaf is not None]
            pairs = [(g, d) for g, d in zip(grads, directions, strict=True) if g is not None and g.requires_grad]
        results = torch.autograd.grad([g for g, _ in pairs], leaves, [d for _, d in pairs], allow_unused=True)
        return tuple(torch.zeros_like(leaf) if r is None else r for leaf, r in zip(leaves, results, strict=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        """Saves nothing: there is no backward pass."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "timeloom's layers can be differentiated twice, not three times, and jvp not at all again (take hessian, "
            "jvp of grad or grad of grad): for more use solver='sequential'"
        )

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        return LayerCurvature.backward(ctx)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensors, tuple[int, ...]]:
        return _one_by_one(LayerCurvature, info, in_dims, *args)


def _directions(tensors: Sequence[Tensor | None], tangents: Sequence[Tensor | None]) -> list[Tensor]:
    """A tangent for every tensor that is not None; zeros if none is given."""
    pairs = zip(tensors, tangents, strict=False)
    return [torch.zeros_like(one) if along is None else along for one, along in pairs if one is not None]


def _plain(given: Any) -> Inputs:
    """The inputs, detached and contiguous, as kernels read them."""
    plain: Any = (None if tensor is None else tensor.detach().contiguous() for tensor in given)
    return Inputs(*plain)


def _with_first(at_initial: Any, d_states: Tensor) -> Tensor:
    """The initial state's gradient, plus that of the state before the first step, which is the same state."""
    return torch.add(at_initial, pad(d_states[0], (0, at_initial.shape[1] - d_states.shape[2])))


def _joined(tensor: Tensor, dim: int | None, count: int, batch: int) -> Tensor:
    """The tensor with its mapped dimension folded into the batch dimension `batch`; expanded if it is not mapped."""
    many = tensor.unsqueeze(batch).expand(*tensor.shape[:batch], count, *tensor.shape[batch:]) if dim is None else (
        tensor.movedim(dim, batch)
    )  # fmt: skip
    return many.flatten(batch, batch + 1)


def _one_by_one(function: Any, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensors, tuple[int, ...]]:
    """`vmap` by running one model after the other."""
    call, *others = args
    call, dims = call.one_of(info.batch_size), in_dims[1:]
    found = [
        function.apply(call, *(a if dim is None else a.select(dim, row) for a, dim in zip(others, dims, strict=True)))
        for row in range(info.batch_size)
    ]
    stacked = tuple(torch.stack(parts) for parts in zip(*found, strict=True))
    return stacked, (0,) * len(stacked)
