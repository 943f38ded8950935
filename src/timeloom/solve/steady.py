"""A layer whose plan has settled: copy in, replay a CUDA graph, copy out, check the certificate.

Most calls of a training run are like the one before. Their plan then stands until more is learned, and a CUDA graph of
it is recorded. Such a call bypasses the trunk, which costs the host more than everything else, and returns to it
whenever something differs: a missed certificate, gradients of gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from timeloom.auto.experience import Experience
from timeloom.kernels import replayed_layers
from timeloom.kernels.layer import Gradients, Layer
from timeloom.kernels.replay import RECORDINGS
from timeloom.problem import Recurrence
from timeloom.solve.autograd import side_by_side
from timeloom.solve.inputs import Inputs, layer_of, sizes_of
from timeloom.solve.newton import StandingNewton
from timeloom.solve.plan import Direction, Planner, StandingPlan
from timeloom.solve.recurrence import noting
from timeloom.solve.residual import SHARE_OF_BOX
from timeloom.solve.second_order import layer_gradients
from timeloom.solve.steady_pass import Call, Dropped, Pass, replayed_gradients
from timeloom.solve.trunk import LayerSolve
from timeloom.torch_state.autocast import without_autocast
from timeloom.torch_state.batched import one_by_one
from timeloom.torch_state.eager import eager

LIVE = 6
"""Number of live tensors of a layer: x, the initial state, w_ih, w_hh, b_ih, b_hh."""

Kind = tuple[tuple[bool, ...], torch.dtype | None, torch.dtype | None]
"""A kind of backward pass: which live tensors need gradients, and the dtypes of the incoming gradients of the outputs
and of the final state."""


class SteadyLayer:
    """One layer and direction of a module, for calls with the same sizes, weights and gradients, on one stream.

    It holds no tensors of a call. Weights are the same if their addresses are.
    """

    def __init__(self, layer: Layer, solve: LayerSolve, forward: Pass, taped: bool) -> None:
        self.forward, self.taped, self.steps = forward, taped, len(layer.x)
        self._layer, self._solver, self._experience = layer, solve.solver, solve.experience
        inputs = Inputs(layer.x, layer.initial, *_weights(layer), None, None, layer.resets)
        self._sizes = sizes_of(layer.cell, inputs)
        self._parts = len(layer.parts)
        self._zeros = torch.zeros_like(layer.initial)
        names = list(layer.fresh)
        self._fresh = [2 + index for index, name in enumerate(("w_ih", "w_hh", "b_ih", "b_hh")) if name in names]
        """Indices of the live tensors that are weights made anew by every call."""
        self._places = self._places_of(inputs)
        self._backward: dict[Kind, Pass] = {}

    @staticmethod
    def of(solve: LayerSolve, inputs: Inputs, taped: bool) -> SteadyLayer | None:
        """The steady layer for calls like this, with detached `inputs`; None if they are not replayed, or not yet."""
        experience = solve.experience.forward
        if not solve.solver.adapts and experience.counts.newton_steps is None:
            return None
        cell = solve.cell_of(inputs)
        kind = solve.kind_of(inputs, cell)
        if kind is None or not kind.corrects:
            return None
        layer, sizes = layer_of(kind, cell, inputs), sizes_of(cell, inputs)
        standing = _standing(solve.solver, layer, sizes, experience, "forward", experience.counts.newton_steps)
        if standing is None:
            return None
        recording = replayed_layers.recorded_forward(layer, standing.cutting, SHARE_OF_BOX, taped)
        if recording is None or not recording.readable:
            return None
        kept = recording.results[:-1]
        finals = [part[-1:] for part in kept[: len(layer.parts)]]  # type: ignore[index]
        wanted, lent = [kept[0][1:], *finals], len(kept) if taped else 0  # type: ignore[index]
        places = [*recording.inputs, *recording.fresh]
        found = Pass.of(standing, experience, recording, places, wanted, lent)
        return SteadyLayer(layer, solve, found, taped)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the initial state."""
        return self._zeros.dtype

    def run(
        self, call: Call, x: Tensor, initial: Tensor | None, weights: Sequence[Tensor | None]
    ) -> tuple[Tensor, ...] | None:
        """Outputs `(T, B, n)` and the parts of the final state, `(1, B, n)` each, valid once `call` is certified.

        None if the recording has been dropped.
        """
        initial = self._zeros if initial is None else initial
        try:
            return apply(call, x, initial, *weights) if self.taped else self.sweep(call, (x, initial, *weights))[0]
        except Dropped:
            return None

    def sweep(self, call: Call, live: Sequence[Any]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Outputs and parts of the final state, and the tensors kept for the backward pass, lent by the recording."""
        initial = None if live[1] is self._zeros else live[1]
        found = call.run((live[0], initial, *self._made_for(call, live)))
        wanted = 1 + self._parts
        return tuple(found[:wanted]), found[wanted:]

    def gradients(self, call: Call, saved: Sequence[Any], grads: list[Tensor | None], kind: Kind) -> Gradients:
        """Gradients of the live tensors from the saved ones: the live tensors, those kept, and the outputs."""
        found = self._backward.get(kind)
        may = (
            found is not None and self._places_of(saved) == self._places
        )  # weights that are gathered anew have other addresses
        replayed = self._replayed(found, call, saved, grads) if found is not None and may else None
        if replayed is None:
            result = self._by_trunk(call, saved, grads, kind[0][0])
            self._settle(kind, grads, call)
            return tuple([grad if asked else None for grad, asked in zip(result, kind[0], strict=True)])
        if len(replayed) == LIVE:
            return tuple(replayed)
        wanted = iter(replayed)
        return tuple([next(wanted) if asked else None for asked in kind[0]])

    def _replayed(
        self, found: Pass, call: Call, saved: Sequence[Any], grads: Sequence[Tensor | None]
    ) -> list[Tensor] | None:
        """The wanted gradients by a replay; None if that is not possible."""
        tensors = [saved[0], saved[1], *saved[LIVE:-1], *self._made_for(call, saved)]
        return replayed_gradients(call, found, tensors, grads, self._experience.learn_backward)

    def _made_for(self, call: Call, live: Sequence[Any]) -> list[Tensor]:
        """The weights made anew for this call, and its resets."""
        if not self._fresh and call.resets is None:
            return []
        return [live[index] for index in self._fresh] + ([] if call.resets is None else [call.resets])

    def _places_of(self, live: Sequence[Any]) -> list[int | None]:
        """Addresses of the weights that are not copied in."""
        own = [live[index] for index in range(2, LIVE) if index not in self._fresh]
        return [None if weight is None else weight.data_ptr() for weight in own]

    def _by_trunk(self, call: Call, saved: Sequence[Any], grads: Sequence[Tensor | None], want_x: bool) -> Gradients:
        solve, inputs = call.solve(), Inputs._make([*saved[:LIVE], None, None, call.resets])
        plan = solve.plan_backward(inputs, self._layer.cell)
        note = noting(call.report, solve.solver, solve.experience, lambda _: None)
        with RECORDINGS.lock, torch.no_grad(), without_autocast(inputs.x.device):  # no replay into lent memory
            return solve.backward(inputs, list(saved[LIVE:-1]), grads, want_x, plan, note)[:LIVE]

    def recorded_gradients(self, call: Call, saved: Sequence[Any], grads: Sequence[Tensor | None]) -> Gradients:
        """The same gradients, but so that they can be differentiated again."""
        with RECORDINGS.lock:  # copies, since autograd keeps them
            kept = [part.clone() for part in saved[LIVE : LIVE + self._parts]]
        return layer_gradients(call.solve().project, (*saved[:LIVE], None), kept, grads, None, call.resets)[:LIVE]

    def final_gradient(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        """The gradient of the final state `(B, S)`, from those of its parts `(1, B, n)`."""
        found = side_by_side(grads, self._layer.parts, whole=True)
        return None if found is None else found[0]

    def _settle(self, kind: Kind, grads: Sequence[Tensor | None], call: Call) -> None:
        """Have the next backward pass of this kind replayed, if the one by the trunk was."""
        experience, recording = self._experience.backward, None
        last = None if call.report.backward is None else call.report.backward.iterations
        standing = _standing(self._solver, self._layer, self._sizes, experience, "backward", last)
        if standing is not None:
            given, ground = (grads[0], grads[1]), self.forward.recording
            recording = replayed_layers.recorded_backward(self._layer, standing.cutting, given, kind[0][0], ground)
        if standing is None or recording is None or not recording.readable:
            self._backward.pop(kind, None)
            return
        wanted = [result for result, asked in zip(recording.results, kind[0], strict=False) if asked]
        places = recording.incoming
        self._backward[kind] = Pass.of(standing, experience, recording, places, wanted)


def _standing(
    solver: Planner, layer: Layer, sizes: Recurrence, experience: Experience, way: Direction, count: int | None
) -> StandingPlan | StandingNewton | None:
    """The plan for the next call, if it is known by now; `count`: Newton steps or sweeps of the last call."""
    if solver.adapts:
        return solver.standing(sizes, experience, way)
    return StandingNewton.of(layer, solver.plan(sizes, experience, way), count, way == "backward")


def _weights(layer: Layer) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    return layer.w_ih, layer.w_hh, layer.b_ih, layer.b_hh


class Replayed(torch.autograd.Function):
    """Outputs `(T, B, n)` and final state, `(1, B, n)` of each part; saves the same tensors as the trunk."""

    @staticmethod
    def forward(ctx: Any, call: Call, *live: Tensor | None) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        results, kept = call.layer.sweep(call, live)
        ctx.call = call
        ctx.save_for_backward(*live, *kept, results[0])
        return results

    @staticmethod
    @eager
    @one_by_one
    def backward(ctx: Any, output: Tensor | None, *final: Tensor | None) -> Gradients:
        call: Call = ctx.call
        layer, at_end = call.layer, call.layer.final_gradient(final)
        wanted = ctx.needs_input_grad[1:]
        if output is None and at_end is None:
            return (None,) * (1 + LIVE)
        if torch.is_grad_enabled():
            return None, *layer.recorded_gradients(call, ctx.saved_tensors, (output, at_end))
        dtypes = None if output is None else output.dtype, None if at_end is None else at_end.dtype
        return None, *layer.gradients(call, ctx.saved_tensors, [output, at_end], (wanted, *dtypes))


apply = super(torch.autograd.Function, Replayed).apply
"""`apply` without the search for dead wrappers of functorch: no transform is active where layers are steady."""
