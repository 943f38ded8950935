"""The trunk: problem → plan → sweeps → certificate → tape, for one layer in one direction.

A module's call, the operators in torch.compile's graphs and a layer over ranks all come this way. Kernels that run a
whole layer make the first sweep (`first_sweep`). Most calls end there: the warm-up, learned from earlier calls, is long
enough, as one certificate shows. After a sweep that is not certified, `auto` makes another plan from what the sweep
showed; other solvers pass its results to the driver, which corrects them. If there are no such kernels, sweeps run over
projected inputs (`recurrence`). Autograd saves the same tensors in all cases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from timeloom.auto.layer_experience import LayerExperience
from timeloom.cells.base import NO_MASKS, Cell, Masks
from timeloom.cells.masked import MaskedCell
from timeloom.compile.call import telling
from timeloom.kernels import ReferenceSweeper, replayed_layers, sweeper_kind
from timeloom.kernels import sweeper as choose_sweeper
from timeloom.kernels.layer import Found, Gradients, Layer
from timeloom.kernels.layer_kinds import layer_kind
from timeloom.known import KnownStates
from timeloom.problem import Recurrence, joined
from timeloom.report import SolveReport
from timeloom.solve import beside_torch
from timeloom.solve.autograd import Adjoint, Note, Solved, Tape, attach, output_of
from timeloom.solve.backward import solve_adjoint
from timeloom.solve.beside_torch import Beside
from timeloom.solve.first_sweep import first_sweep
from timeloom.solve.forward import final_state, solve_states
from timeloom.solve.inputs import Grads, Inputs, Solution, layer_of, sizes_of
from timeloom.solve.look import look
from timeloom.solve.newton import PLAIN, newton_states, scanned_gradients
from timeloom.solve.plan import Plan, Planner
from timeloom.solve.recurrence import Record, noting, on_tape, plan_from_known, raise_if_asked, run
from timeloom.solve.residual import SHARE_OF_BOX
from timeloom.solve.second_order import layer_gradients
from timeloom.solve.warm_starts import Guess

Bare = Callable[..., Cell]
"""`bare(*weights)`: a layer's cell."""
Sweep = Callable[..., tuple[list[Tensor], Tensor | float]]
"""`sweep(plan)`: the tensors that a layer keeps of a forward pass, and its certificate."""
Project = Callable[..., tuple[Cell, Tensor]]
"""`project(x, *weights)`: a layer's cell and its projected inputs."""


@dataclass(frozen=True)
class LayerSolve:
    """How one layer and direction is solved. It holds no tensors of a call: autograd's tape does.

    slot: the index of this layer and direction in its module.
    masks: which masks stand behind masked inputs.
    whole_states: whether `run` returns whole states in place of outputs, for masked inputs.
    """

    bare: Bare
    project: Project
    solver: Planner
    experience: LayerExperience
    slot: int = 0
    masks: Masks = NO_MASKS
    whole_states: bool = False

    def run(self, inputs: Inputs, record: Record, guess: Guess | None = None) -> tuple[Tensor, Tensor]:
        """Outputs `(T, B, n)`, or whole states `(T, B, S)`, and final state `(B, S)`, differentiable.

        record: receives the report, and again with the backward report in it once the backward pass has run.
        """
        cell = self.cell_of(inputs)
        if guess is not None and not self._begins(inputs, cell):
            guess.refuse()
            guess = None
        if guess is not None:
            return self._run_own(inputs, cell, record, guess=guess)
        chosen = Beside()
        if self.solver.adapts and beside_torch.is_rival(cell, inputs):
            ratio = beside_torch.own_beside_torchs(inputs, self._in_one_chunk, self.experience)
            self._look(inputs, cell, inputs.taped, *beside_torch.bounds_of_look(cell, inputs, ratio))
            chosen = beside_torch.choose(cell, inputs, self.solver, self.experience, ratio)
        else:
            self._look(inputs, cell, inputs.taped)
        if chosen.why is not None:
            record(SolveReport.by_torch(len(inputs.x), chosen.why))
            return beside_torch.lstm(inputs)
        return self._run_own(inputs, cell, record, chosen.plans)

    def _run_own(
        self, inputs: Inputs, cell: Cell, record: Record, plans: tuple[Plan, ...] = (), guess: Guess | None = None
    ) -> tuple[Tensor, Tensor]:
        """`run` by our own sweeps, with these plans if there are any."""
        kind = None if self.whole_states else self.kind_of(inputs, cell)
        if kind is None:
            problem = self._problem(inputs)
            record = telling(record, problem.cell.told)
            parts = None if self.whole_states else 1
            outputs, final = run(problem, self.solver, self.experience, record, guess, self.slot, parts, plans=plans)
            return joined(outputs), final
        taped = inputs.taped
        with torch.no_grad():
            solution = self._forward(inputs, taped, cell, kind, guess, plans)
        return self._on_tape(inputs, solution, record, taped, plans)

    def _in_one_chunk(self, inputs: Inputs) -> Tensor:
        """Outputs by our own sweeps in one chunk, whatever is known about the network; nothing is learned."""
        unknown = LayerExperience()
        for side in (unknown.forward, unknown.backward):
            side.rest_once()
        return replace(self, experience=unknown)._run_own(inputs, self.cell_of(inputs), lambda _: None)[0]

    def _look(self, inputs: Inputs, cell: Cell, taped: bool, needed: float = 1.0, most: int | None = None) -> None:
        """Measure how long an unknown network remembers, before plans are made."""
        if self.solver.adapts:
            sides = [self.experience.forward, self.experience.backward][: 1 + taped]
            look(inputs, sizes_of(cell, inputs), sides, self._problem, needed, most)

    def _begins(self, inputs: Inputs, cell: Cell) -> bool:
        """Whether to begin at known states: kernels that run warm-ups themselves save more than known states do."""
        kind = None if self.whole_states or not self.solver.adapts else self.kind_of(inputs, cell)
        return kind is None or kind.begins_anywhere

    def on_tape(self, inputs: Inputs, record: Record, reason: str) -> tuple[Tensor, Tensor]:
        """`run` by the plain loop, for devices and transforms that sweeps do not support."""
        outputs, final = on_tape(self._problem(inputs), record, reason, None if self.whole_states else 1)
        return joined(outputs), final

    def forward(self, inputs: Inputs, taped: bool, cell: Cell, kind: type[Layer] | None) -> Solution:
        """Problem, plan, sweeps and certificate, by the kernels of `kind` if given; call it with gradients off."""
        self._look(inputs, cell, taped)
        return self._forward(inputs, taped, cell, kind)

    def _forward(
        self,
        inputs: Inputs,
        taped: bool,
        cell: Cell,
        kind: type[Layer] | None,
        guess: Guess | None = None,
        plans: tuple[Plan, ...] = (),
    ) -> Solution:
        sizes = sizes_of(cell, inputs)
        if guess is not None:
            sizes = replace(sizes, guess=guess.load(self.slot, sizes))
        experience = self.experience.beginning(sizes.guess is not None)
        plan = plans[0] if plans else plan_from_known(self.solver, sizes, experience)
        if kind is not None:
            kept, report = self._sweep(kind, inputs, sizes, plan, taped)
            final = joined([part[-1] for part in kept[: len(cell.parts)]])
        else:
            problem = self._problem(inputs)
            kept, report = solve_states(problem, plan, choose_sweeper(problem))
            final = final_state(problem, kept)
        experience.learn(report)
        if guess is not None and report.converged:
            guess.save(self.slot, sizes, kept[: len(cell.parts)], plan.chunk)
        return Solution(cell, kept, final, report)

    def backward(
        self, inputs: Inputs, kept: list[Tensor], grads: Grads, want_x: bool, plan: Plan, note: Note
    ) -> Gradients:
        """Gradients of all live tensors, in their order, from the tensors that a solution has kept."""
        cell = self.cell_of(inputs)
        kind = self.kind_of(inputs, cell)
        if kind is not None:
            layer = layer_of(kind, cell, inputs)
            if layer.has_newton and plan.linearization == PLAIN:
                learned, at = self.experience.backward, (grads[0], grads[1])
                scanned = scanned_gradients(layer, plan, learned, kept, at, want_x)
                if scanned is not None:
                    note(scanned[1])
                    return *scanned[0], None
            sweep = partial(replayed_layers.backward, layer, kept=kept, grads=(grads[0], grads[1]), want_x=want_x)
            replan = partial(self.plan_backward, inputs, cell) if self.solver.adapts else None
            swept = first_sweep(sweep, layer, plan, self.experience.backward, replan)
            if swept.report is not None:
                note(swept.report)
                return *swept.result, None
        return self._solve_adjoint(inputs, kept, grads, partial(solve_adjoint, plan=plan), note)

    def plan_backward(self, inputs: Inputs, cell: Cell) -> Plan:
        """The plan of the backward pass through a solved layer."""
        return self.solver.plan(sizes_of(cell, inputs), self.experience.backward, "backward")

    def cell_of(self, inputs: Inputs) -> Cell:
        """The layer's cell."""
        cell = self.bare(*inputs.weights)
        return MaskedCell(cell, self.masks) if inputs.masked else cell

    @staticmethod
    def kind_of(inputs: Inputs, cell: Cell) -> type[Layer] | None:
        """The kind of layer whose kernels can run the whole layer, if there is one."""
        kind = layer_kind(cell, inputs.x) if inputs.lengths is None else None
        marked = inputs.resets is not None
        return None if kind is None or (marked and (inputs.masked or not kind.takes_resets)) else kind

    def _sweep(
        self, kind: type[Layer], inputs: Inputs, sizes: Recurrence, plan: Plan, taped: bool
    ) -> tuple[list[Tensor], SolveReport]:
        """Kept tensors and report: by the planned sweeps if they are certified; else the driver continues from them."""
        cell, known, steps = sizes.cell, sizes.guess, sizes.steps
        layer, found, experience = layer_of(kind, cell, inputs), Found(), self.experience.beginning(known is not None)
        replan = partial(plan_from_known, self.solver, sizes, experience) if self.solver.adapts else None
        if known is not None and plan.chunk < steps and (plan.linearization is not None or not layer.begins_anywhere):
            return self._march(layer, replace(self._problem(inputs), guess=known), plan, taped)
        if layer.has_newton and plan.linearization == PLAIN:
            solved = newton_states(layer, plan, self.experience.forward, taped)
            if solved is not None:
                return solved
        sweep: Sweep
        if replan is not None:  # other plans follow a missed certificate, not the driver
            sweep = partial(replayed_layers.forward, layer, share_of_box=SHARE_OF_BOX, keep=taped)
        else:
            sweep = partial(layer.forward, share_of_box=SHARE_OF_BOX, keep=taped, found=found)
        if known is not None:
            sweep = partial(_entering, sweep, known, steps)
        swept = first_sweep(sweep, layer, plan, experience, replan)
        if swept.report is not None:
            return swept.result, swept.report
        problem = self._problem(inputs) if found.u is None else replace(sizes, u=found.u)
        problem = replace(problem, guess=known)
        if swept.result is None or found.starts is None or found.ends is None:
            return self._march(layer, problem, plan, taped)
        states, tape = swept.result[: len(cell.parts)], swept.result[len(cell.parts) :]
        sweeper, _ = layer.sweeper(problem, taped, tape)
        entered = (found.starts, found.ends, found.decay)
        states, report = solve_states(problem, swept.plan, sweeper, states, entered)
        return [part.to(inputs.x.dtype) for part in states] + tape, report

    @staticmethod
    def _march(layer: Layer, problem: Recurrence, plan: Plan, taped: bool) -> tuple[list[Tensor], SolveReport]:
        """Kept tensors and report by the driver alone."""
        sweeper, tape = layer.sweeper(problem, taped)
        if not type(sweeper).supports(problem):  # its kernels cannot run, as already reported
            sweeper = choose_sweeper(problem)
        states, report = solve_states(problem, plan, sweeper)
        return [part.to(layer.x.dtype) for part in states] + tape, report

    def _problem(self, inputs: Inputs) -> Recurrence:
        """The recurrence over projected inputs, cast to the state's dtype if no kernels take narrower inputs."""
        dtype = inputs.initial.dtype
        cell, u = self.project(inputs.x, *inputs.weights)
        problem = Recurrence(cell, u, inputs.initial, inputs.lengths, inputs.resets)
        if u.dtype == dtype or sweeper_kind(problem) is not ReferenceSweeper:
            return problem
        cast = (None if tensor is None else tensor.to(dtype) for tensor in inputs.live)
        return self._problem(inputs.with_live(cast))

    def _on_tape(
        self, inputs: Inputs, solution: Solution, record: Record, taped: bool, plans: tuple[Plan, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """Report a solution, and put it on autograd's tape if `taped`."""
        raise_if_asked(solution.report, self.solver)
        record(solution.report)
        if not taped:
            return solution.kept[0][1:], solution.final
        note = noting(solution.report, self.solver, self.experience, record)
        plan = plans[1] if plans else self.plan_backward(inputs, solution.cell)
        back = partial(_back, self, plan, note)
        outputs, shared = output_of(solution.kept[: len(solution.cell.parts)])
        saved = {"inputs": inputs, "kept": solution.kept, "shared": (shared,)}
        tape = Tape((outputs,), back, saved, partial(_recorded, self.project, len(solution.cell.parts)))
        return Solved.apply(tape, solution.final, *inputs.live)  # type: ignore[no-any-return]

    def _solve_adjoint(
        self, inputs: Inputs, kept: list[Tensor], grads: Grads, adjoint: Adjoint, note: Note
    ) -> Gradients:
        """Gradients of all live tensors by the driver, over projected inputs."""
        with torch.enable_grad():
            leaves = tuple(None if tensor is None else tensor.detach().requires_grad_() for tensor in inputs.live)
            again = inputs.with_live(leaves)
            live = self._problem(again)
            problem = live.detach()
            states = [part.to(problem.initial.dtype) for part in kept[: len(problem.cell.parts)]]
            (output,), final = attach(problem, states, final_state(problem, states), adjoint, note, live, parts=1)
        asked = [(result, grad) for result, grad in zip((output, final), grads, strict=True) if grad is not None]
        given = [leaf for leaf in leaves if leaf is not None]
        found = iter(torch.autograd.grad([result for result, _ in asked], given, [grad for _, grad in asked]))
        return tuple(None if leaf is None else next(found) for leaf in leaves)


def _entering(sweep: Sweep, known: KnownStates, steps: int, plan: Plan) -> tuple[list[Tensor], Tensor | float]:
    """A sweep whose chunks, if there are several, are entered from known states."""
    if plan.chunk >= steps:
        return sweep(plan)
    return sweep(plan, entry=known.entry(steps, plan.chunk, plan.warmup))


def _back(solve: LayerSolve, plan: Any, note: Note, saved: dict[str, Any], grads: Grads, wanted: Any) -> Gradients:
    """The backward pass that autograd calls: from saved tensors to gradients."""
    return solve.backward(Inputs(*saved["inputs"]), saved["kept"], grads, wanted[0], plan, note)


def _recorded(project: Project, parts: int, saved: dict[str, Any], grads: Grads, _: Any) -> Gradients:
    """The same gradients, but so that they can be differentiated again."""
    inputs = Inputs(*saved["inputs"])
    return layer_gradients(project, inputs.live, saved["kept"][:parts], grads, inputs.lengths, inputs.resets)
