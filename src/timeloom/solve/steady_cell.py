"""A user's cell whose plan has settled: a pass is one replay, from x and the cell's tensors to outputs or gradients.

The counterpart of `solve.steady` for users' cells. A recording holds all of a pass: the weights and inputs of the
step's normal form, computed from the cell's own tensors in place, the sweeps, and the certificate; for a backward pass,
also the gradients through all that, by autograd. The step itself is not run, so its `Surroundings` are compared to see
whether it is still the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from timeloom.auto.layer_experience import LayerExperience
from timeloom.cells.fused import FusedCell
from timeloom.cells.generic import GenericCell
from timeloom.compile.following import look_around
from timeloom.compile.fuse import Compiled
from timeloom.compile.surroundings import Surroundings, Unseen
from timeloom.kernels import ReferenceSweeper
from timeloom.kernels.replay import RECORDINGS
from timeloom.problem import Recurrence
from timeloom.solve.adjoint_sweeps import Summed
from timeloom.solve.autograd import side_by_side
from timeloom.solve.backward import solve_summed, weight_grads_of
from timeloom.solve.live_form import LiveForm, through
from timeloom.solve.plan import Plan, Planner
from timeloom.solve.recurrence import noting
from timeloom.solve.replayed import recorded_kind, swept_states, swept_sums
from timeloom.solve.second_order import layer_gradients
from timeloom.solve.steady_pass import Call, Dropped, Pass, replayed_gradients
from timeloom.torch_state import tf32
from timeloom.torch_state.autocast import without_autocast
from timeloom.torch_state.batched import one_by_one
from timeloom.torch_state.eager import eager
from timeloom.torch_state.precision import HALF

Gradients = tuple[Tensor | None, ...]
"""Gradients of x, of the initial state, and of the tensors that the cell holds."""
ROWS = 2
"""Number of rows on which a step is run to see what its code does."""


class SteadyCell:
    """One cell, for calls with the same sizes, gradients and tensors, on one stream. It holds no tensors of a call.

    shown: number of leading parts of all states that a call returns.
    ends: whether a call returns the parts of the final state, too.
    """

    def __init__(
        self, cell: GenericCell, compiled: Compiled, x: Tensor, initial: Tensor, solver: Planner,
        experience: LayerExperience, shown: int, ends: bool, taped: bool,
    ) -> None:  # fmt: skip
        self.cell, self.steps, self.taped = cell, len(x), taped
        self.compiled, self._solver, self._experience = compiled, solver, experience
        self._shown, self._ends, self._parts = shown, ends, len(cell.parts)
        self._returned, self.dtype = initial.dtype, torch.float32 if initial.dtype in HALF else initial.dtype
        self._token = object()
        """Identifies this object in the keys of its recordings, which may outlive it."""
        self.bound = tuple(compiled.bindings.tensors(cell.function)[name] for name in compiled.bindings.paths)
        self._places = [tensor.data_ptr() for tensor in self.bound]
        self._width = x[:1, :1].numel()
        zeros = torch.zeros_like(initial, dtype=self.dtype, requires_grad=False)
        u = zeros.new_empty(()).expand(*x.shape[:2], sum(compiled.fused.inputs))
        self._sizes, self._form = Recurrence(FusedCell(compiled.fused, ()), u, zeros), LiveForm(compiled, zeros)
        self._rounds = _rounding()
        self.around: Surroundings
        self.forward: Pass
        self._backward: dict[Any, Pass] = {}
        self._wanted: dict[Any, list[bool]] = {}
        """Which gradients each kind of backward pass returns."""

    @staticmethod
    def of(
        cell: GenericCell, compiled: Compiled, x: Tensor, initial: Tensor, solver: Planner,
        experience: LayerExperience, shown: int, ends: bool, taped: bool,
    ) -> SteadyCell | None:  # fmt: skip
        """The steady cell for calls like one with inputs x `(T, B, ...)` and this initial state `(B, S)`.

        None if no plan stands yet. Raises Unseen if such calls can never be replayed.
        """
        found = SteadyCell(cell, compiled, x, initial, solver, experience, shown, ends, taped)
        standing = solver.standing(found._sizes, experience.forward, "forward")
        kind = None if standing is None else recorded_kind(found._sizes, standing.plan)
        if standing is None or kind is None:
            return None
        index = compiled.index()
        if index is not None:
            raise Unseen(f"it indexes by {index}, whose values may change")
        rows, states = x[0, :ROWS].detach(), initial[:ROWS].detach()
        found.around = look_around(cell.function, x.device, lambda: cell.step(states, rows.reshape(len(rows), -1)))
        if not all(id(tensor) in found.around.tensors for tensor in found.bound):
            raise Unseen("it reads a tensor where its code was not seen to look")
        given, key = (x.detach(), initial.detach().to(found.dtype)), (found._token, "forward")
        RECORDINGS.run(key, given, found._size(backward=False), partial(found._swept, kind, standing.plan), before=0)
        recording = RECORDINGS.known(key, x.device)
        if recording is None or not recording.readable:
            raise Unseen("it is too large to be recorded, or cannot be")
        kept, others = recording.results[: found._parts], recording.results[found._parts : -1]
        wanted = others or found._of_states(kept)
        standing = standing._replace(plan=replace(standing.plan, reason=_told(standing.plan)))
        lent = len(kept) if taped else 0
        found.forward = Pass.of(standing, experience.forward, recording, recording.given, wanted, lent)
        return found

    def _size(self, backward: bool) -> int:
        """Approximate bytes of a recording.

        Forward: x, the inputs, the values that they are computed from, and states. Backward: the inputs again with
        their gradients, gate gradients, and gradients of x.
        """
        u, fused = self._sizes.u, self.compiled.fused
        inputs, own = u.shape[-1], fused.gate_width if backward else self._sizes.cell.size
        return (
            self._sizes.initial.element_size()
            * u.shape[0]
            * u.shape[1]
            * (self._width + (3 if backward else 2) * inputs + own)
        )

    def stands(self) -> bool:
        """Whether the next call of this kind can be replayed, provided that the step is unchanged."""
        return self._rounds == _rounding() and self.forward.stands()

    def drop(self) -> None:
        """Free the memory of its recordings."""
        RECORDINGS.forget(self._token)

    def call(self) -> Call:
        """A new call."""
        return Call(self, lambda: None)  # type: ignore[arg-type, return-value]

    def run(self, call: Call, x: Tensor, initial: Tensor | None) -> tuple[Tensor, ...] | None:
        """Parts of all states `(T, B, part)`, and of the final one `(1, B, part)`, valid once `call` is certified.

        None if the recording has been dropped.
        """
        initial = self._sizes.initial if initial is None else initial.to(self.dtype)
        try:
            return apply(call, x, initial, *self.bound) if self.taped else self.sweep(call, x, initial)[0]
        except Dropped:
            return None

    def sweep(self, call: Call, x: Any, initial: Any) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """The results of a call, and the states for its backward pass, lent by the recording."""
        found = call.run((x, None if initial is self._sizes.initial else initial))
        wanted = len(self.forward.wanted)
        return tuple(found[:wanted]), found[wanted:]

    # ---- what is recorded --------------------------------------------------------------------------------------------

    def _swept(self, kind: type[ReferenceSweeper], plan: Plan, given: Sequence[Tensor | None]) -> list[Any]:
        """States, the returned ones once more if their dtype differs, and the certificate."""
        x, initial = given
        assert x is not None
        assert initial is not None
        with torch.no_grad():
            cell, u = self._form.of(x, [tensor.detach() for tensor in self.bound])
            states, _, error = swept_states(kind, Recurrence(cell, u, initial), plan)
        others = [] if self._returned == self.dtype else [part.to(self._returned) for part in self._of_states(states)]
        return [*states, *others, error]

    def _of_states(self, states: Sequence[Any]) -> list[Tensor]:
        """The parts of these states that a call returns."""
        return [part[1:] for part in states[: self._shown]] + [part[-1:] for part in states if self._ends]

    def _pulled(
        self, kind: type[ReferenceSweeper], plan: Plan, wanted: Sequence[bool], given: Sequence[Tensor | None]
    ) -> list[Any]:
        """The wanted gradients, and the certificate."""
        x, initial, incoming, final, *others = given
        states: list[Any] = others
        assert initial is not None
        cell, u, leaves = self._form.on_tape(x, self.bound, wanted)
        at = Recurrence(cell, u, initial).detach()
        with torch.no_grad():
            incoming, final = (None if grad is None else grad.to(self.dtype) for grad in (incoming, final))
            inputs, at_initial, by_weight, error = swept_sums(kind, at, plan, states, incoming, final)
        return [*through(cell, u, leaves, at_initial, inputs, by_weight), error]

    # ---- the backward pass -------------------------------------------------------------------------------------------

    def gradients(self, call: Call, saved: Sequence[Tensor], grads: Sequence[Tensor | None], wanted: Any) -> Gradients:
        """Gradients of x, the initial state and the cell's tensors, from the saved tensors: these, and the states."""
        live, kept = saved[: 2 + len(self.bound)], saved[2 + len(self.bound) :]
        incoming, final = self._joined(grads)
        way = wanted, *(None if grad is None else (grad.shape[-1], grad.dtype) for grad in (incoming, final))
        found = self._backward.get(way)
        if found is not None and [tensor.data_ptr() for tensor in live[2:]] == self._places:
            given, learn = (*live[:2], *kept), self._experience.learn_backward
            results = replayed_gradients(call, found, given, (incoming, final), learn)
            if results is not None:
                there = iter(results)
                return tuple(next(there) if one else None for one in self._wanted[way])
        result = self._by_trunk(call, live, kept, (incoming, final), wanted)
        self._settle(way, live, kept, (incoming, final), wanted)
        return result

    def _key(self, way: Any, plan: Plan) -> Hashable:
        """The key of a recording of its backward pass."""
        return self._token, way, plan.chunk, plan.warmup, plan.limit

    def _joined(self, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of the leading parts of all states, joined to `(T, B, ·)`, and of the final state `(B, S)`."""
        widths = self.compiled.fused.parts
        incoming = side_by_side(grads[: self._shown], widths[: self._shown], whole=False)
        final = side_by_side(grads[self._shown :], widths, whole=True)
        return incoming, None if final is None else final[0]

    def _by_trunk(
        self, call: Call, live: Sequence[Tensor], kept: Sequence[Tensor], grads: Sequence[Tensor | None], wanted: Any
    ) -> Gradients:
        """The gradients by the driver, with a new plan."""
        cell, u, leaves = self._form.on_tape(live[0], live[2:], wanted)
        problem = Recurrence(cell, u, live[1]).detach()
        incoming, final = (None if grad is None else grad.to(self.dtype) for grad in grads)
        note = noting(call.report, self._solver, self._experience, lambda _: None)
        with RECORDINGS.lock, torch.no_grad():  # no replay into lent memory
            plan = self._solver.plan(problem, self._experience.backward, "backward")
            gates, at_initial, report = solve_summed(problem, list(kept), incoming, final, plan)
            if isinstance(gates, Summed):
                assert gates.inputs is not None  # problems ask for them by themselves
                inputs, by_weight = gates.inputs, gates.weights
            else:
                inputs, by_weight = problem.cell.input_grads(gates), weight_grads_of(problem, list(kept), gates)
        note(report)
        found = through(cell, u, leaves, at_initial, inputs, by_weight)
        return tuple(grad if asked else None for grad, asked in zip(found, wanted, strict=True))

    def _settle(
        self, way: Any, live: Sequence[Tensor], kept: Sequence[Tensor], grads: Sequence[Tensor | None], wanted: Any
    ) -> None:
        """Have the next backward pass of this kind replayed."""
        ground, experience = self.forward.recording, self._experience.backward
        self._backward.pop(way, None)
        standing = self._solver.standing(self._sizes, experience, "backward")
        kind = None if standing is None or standing.plan.check_gradient else recorded_kind(self._sizes, standing.plan)
        same = [tensor.data_ptr() for tensor in live[2:]] == self._places
        if standing is None or kind is None or not same:
            return
        with RECORDINGS.lock:
            if not ground.here or not ground.has(kept[0]):
                return
            given, key = (*live[:2], *grads, *kept), self._key(way, standing.plan)
            body = partial(self._pulled, kind, standing.plan, wanted)
            RECORDINGS.run(key, given, self._size(backward=True), body, before=0, ground=ground)
            recording = RECORDINGS.known(key, live[0].device)
        if recording is None or not recording.readable:
            return
        results = recording.results[:-1]
        self._wanted[way] = [asked and grad is not None for grad, asked in zip(results, wanted, strict=True)]
        found = [grad for grad, asked in zip(results, self._wanted[way], strict=True) if asked]
        places = recording.incoming
        self._backward[way] = Pass.of(standing, experience, recording, places, found)

    def recorded_gradients(self, saved: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Gradients:
        """The same gradients, but so that they can be differentiated again."""
        live, kept = saved[: 2 + len(self.bound)], saved[2 + len(self.bound) :]
        with RECORDINGS.lock:  # copies, since autograd keeps them
            states = [part.clone() for part in kept]
        incoming, final = (None if grad is None else grad.to(self.dtype) for grad in self._joined(grads))
        return layer_gradients(lambda x, *bound: self._form.of(x, bound), live, states, (incoming, final))


def _told(plan: Plan) -> str:
    return "; ".join(filter(None, (plan.reason, "fused")))


def _rounding() -> tuple[Any, ...]:
    """Global settings that torch's products and a step's code depend on."""
    return tf32.matmul_rounds(), torch.get_default_dtype(), torch._C._len_torch_function_stack()


class Replayed(torch.autograd.Function):
    """The results of a call of a `SteadyCell`, as a function of x, the initial state and the cell's tensors."""

    @staticmethod
    def forward(ctx: Any, call: Any, *live: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        results, kept = call.layer.sweep(call, live[0], live[1])
        ctx.call = call
        ctx.save_for_backward(*live, *kept)
        return results  # type: ignore[no-any-return]

    @staticmethod
    @eager
    @one_by_one
    def backward(ctx: Any, *grads: Tensor | None) -> Gradients:
        cell, wanted = ctx.call.layer, ctx.needs_input_grad[1:]
        if all(grad is None for grad in grads):
            return (None,) * (1 + len(wanted))
        if torch.is_grad_enabled():
            return None, *cell.recorded_gradients(ctx.saved_tensors, grads)
        device = next(grad.device for grad in grads if grad is not None)
        with without_autocast(device):  # the backward pass may be called under autocast
            return None, *cell.gradients(ctx.call, ctx.saved_tensors, grads, wanted)


apply = super(torch.autograd.Function, Replayed).apply
"""`apply` without the search for dead wrappers of functorch: no transform is active where cells are steady."""
