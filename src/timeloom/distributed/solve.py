"""One recurrence over many ranks, forward and backward: the counterpart of `timeloom.solve.recurrence`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from timeloom.auto.layer_experience import LayerExperience
from timeloom.distributed.boundaries import Check, Marched, Settle
from timeloom.distributed.faults import RankError
from timeloom.distributed.march import march_over_ranks, pipeline_over_ranks
from timeloom.distributed.multigrid import cycle_over_ranks
from timeloom.distributed.span import Line, Span
from timeloom.kernels import AdjointData, with_tape
from timeloom.kernels import sweeper as choose_sweeper
from timeloom.problem import Recurrence, Segments, empty_states
from timeloom.report import SolveReport
from timeloom.solve.autograd import attach, outputs_of
from timeloom.solve.backward import solve_backwards
from timeloom.solve.chain import Chain
from timeloom.solve.forward import forward_chain
from timeloom.solve.plan import Planner, RankPlan
from timeloom.solve.recurrence import Record, needs_grad, noting, raise_if_asked


@dataclass(frozen=True)
class Ranks:
    """Over which ranks and in which direction of time a recurrence is solved; `tag`: its index within the call."""

    span: Span
    backwards: bool
    tag: int

    def line(self, batch: int, adjoint: bool = False) -> Line:
        """The ranks in marching order."""
        return self.span.line(self.backwards != adjoint, batch, 2 * self.tag + adjoint)


def run_over_ranks(
    problem: Recurrence, solver: Planner, experience: LayerExperience, record: Record, ranks: Ranks, plan: RankPlan
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Outputs of this rank's steps, `(T_local, B, part)` each, and the final state of the whole sequence `(B, S)`.

    Both are differentiable, and all ranks get the final state. `problem` is this rank's slice, with the initial state
    of the whole sequence.
    """
    detached = with_tape(problem.detach()) if needs_grad(problem) else problem.detach()
    with torch.no_grad():
        states, marched = solve_states(detached, plan, ranks.line(problem.batch))
    report = marched.report
    experience.forward.learn(report)
    raise_if_asked(report, solver)
    record(report)
    if not needs_grad(problem):
        return outputs_of(detached, states), marched.final
    line = ranks.line(problem.batch, adjoint=True)
    backward = solver.plan_over_ranks(detached, experience.backward, ranks.span.sizes, "backward")
    adjoint = partial(solve_adjoint, plan=backward, line=line)
    note = noting(report, solver, experience, record)
    return attach(detached, states, marched.final, adjoint, note, problem)


def solve_states(problem: Recurrence, plan: RankPlan, line: Line) -> tuple[list[Tensor], Marched]:
    """This rank's states, before every step and after the last."""
    first = forward_guess(problem, plan.lead, line) if plan.lead else problem.initial
    # Resets restore the true initial state, so sweeps must know that state, not this rank's entry.
    entered = problem if problem.resets is not None else replace(problem, initial=first)
    sweeper = choose_sweeper(entered)
    states = empty_states(problem.steps, first, problem.cell.parts, zeroed=problem.lengths is not None)

    def settle(entry: Tensor) -> None:
        for part, value in zip(states, entry.split(problem.cell.parts, -1), strict=True):
            part[0] = value

    chain = forward_chain(entered, plan.inside, sweeper, states, line.goes_on)
    chain = replace(chain, first=first, neutral=problem.initial, bound=problem.cell.bound(problem.initial))
    return states, _march(chain, plan, line, settle, partial(_blame, line, problem), problem.resets is not None)


def solve_adjoint(
    problem: Recurrence, states: list[Tensor], incoming: Tensor | None, final_grad: Tensor | None, plan: RankPlan,
    line: Line,
) -> tuple[Tensor, Tensor, SolveReport]:  # fmt: skip
    """`timeloom.solve.backward.solve_adjoint` over ranks, for a loss that is the sum of what the ranks compute.

    So `final_grad` is the gradient of this rank's loss by the final state, which all ranks have, and the returned
    gradient of the initial state is this rank's contribution.
    """
    if incoming is None and plan.way == "cycles":  # other ranks may have incoming gradients
        incoming = problem.initial.new_zeros(problem.steps, problem.batch, problem.cell.parts[0])
    try:
        first = backward_guess(problem, states, incoming, final_grad, plan.lead, line, problem.ends())
        gate_grads, begin_grad, into_resets, marched = solve_backwards(
            problem, states, plan.inside, incoming, first,
            lambda chain: _march(chain, plan, line, lambda _: None, lambda: None, False), line.goes_on,
        )  # fmt: skip
    except BaseException as error:
        line.group.stopped(error)
        raise
    initial_grad = torch.where(head_of_sequence(line, begin_grad), begin_grad, 0)
    return gate_grads, initial_grad if into_resets is None else initial_grad + into_resets, marched.report


def head_of_sequence(line: Line, like: Tensor) -> Tensor:
    """Whether a sequence begins on this rank, so that a backward march ends here, `(B, 1)`.

    A sequence without any steps belongs to the last rank in line.
    """
    ends_here = line.alive[line.place] & (line.alive[line.place + 1 :].sum(0) == 0)
    if line.place == len(line.alive) - 1:
        ends_here = ends_here | ~line.alive.any(0)
    return ends_here.to(like.device).unsqueeze(-1)


def forward_guess(problem: Recurrence, lead: int, line: Line) -> Tensor:
    """The state to enter this rank with, `(B, S)`: the initial state if a sequence begins here, else a guess.

    The guess comes from the last `lead` steps of the rank before; only the last steps of `problem` are used.
    """
    lengths = problem.ends()
    rows = Segments(torch.arange(problem.batch, device="cpu"), (lengths - lead).clamp(min=0), lengths)
    guesses = line.gather(choose_sweeper(replace(problem, tape=None)).forward(rows, problem.initial)[0])
    if line.place == 0:
        return problem.initial
    joint = line.joints[line.place].to(guesses.device).unsqueeze(-1)
    return torch.where(joint, guesses[line.place - 1], problem.initial)


def backward_guess(
    problem: Recurrence, states: list[Tensor], incoming: Tensor | None, final_grad: Tensor | None, lead: int,
    line: Line, lengths: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient to enter this rank with, `(B, S)`: that of the final state if a sequence ends here, else a guess.

    The guess comes from the first `lead` steps of the next rank in time. `problem` may hold the first steps only;
    `lengths` `(B,)` are those of the whole slice.
    """
    size = problem.cell.size
    own = torch.zeros_like(problem.initial) if final_grad is None else final_grad
    told = own
    if lead:
        everyone = torch.arange(problem.batch, device="cpu")
        rows = Segments(everyone, torch.zeros_like(lengths), lengths.clamp(max=lead))
        # Most losses on the final state are the same on all ranks.
        whole = (line.heads[line.place] & (rows.end == lengths)).to(own.device).unsqueeze(-1)
        entry = torch.where(whole, own * len(line.alive), 0)
        guess, _ = choose_sweeper(problem).adjoint(rows, entry, AdjointData(states, incoming))
        told = torch.cat([own, guess], -1)
    heard = line.gather(told)
    total, guesses = heard[..., :size].sum(0), heard[..., size:]
    if line.place == 0:
        return total
    known = (~line.joints[line.place]).to(own.device).unsqueeze(-1)
    return torch.where(known, total, guesses[line.place - 1] if lead else 0)


WAYS = {"sweeps": march_over_ranks, "cycles": cycle_over_ranks, "in order": pipeline_over_ranks}


def _march(chain: Chain, plan: RankPlan, line: Line, settle: Settle, check: Check, reenter: bool) -> Marched:
    return WAYS[plan.way](chain, plan.inside, line, settle, check, plan.lead, reenter)


def _blame(line: Line, problem: Recurrence) -> None:
    """Raise on all ranks, naming the rank, if one has inputs that are not finite; otherwise the network overflows."""
    bad = ~problem.u.isfinite().all(-1)
    if problem.lengths is not None:
        bad &= (torch.arange(problem.steps, device="cpu")[:, None] < problem.lengths.cpu()).to(bad.device)
    found = bad.any(1).to(torch.uint8)
    first = found.argmax() if bool(found.any()) else torch.tensor(-1, device=found.device)
    for rank, step in enumerate(line.group.gather(first).tolist()):
        if step >= 0:
            raise RankError(
                f"rank {rank} has inputs that are not finite, from step {step} of its slice on (in the layer's "
                f"direction): look at x, the layer before, and the weights"
            )
