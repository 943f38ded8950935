"""The one base of timeloom's modules: torch's layers with another forward pass."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from timeloom.auto import cudnn
from timeloom.auto.experience import LayerExperience
from timeloom.distributed.context import alone, time_group
from timeloom.distributed.group import TimeGroup
from timeloom.distributed.span import Span, agree
from timeloom.kernels.layer_kinds import multiplies_as_given
from timeloom.nn import steady, torch_layer
from timeloom.nn.dropping import Weights
from timeloom.nn.graphs.handles import handle_of, traced_apart
from timeloom.nn.sequence import (
    check_input,
    check_lengths,
    check_resets,
    mask_padding,
    pack_like,
    permute,
    reverse,
    unpack,
)
from timeloom.nn.stacked import Hidden, Stacked
from timeloom.nn.states import AllStates
from timeloom.report import SolveReport
from timeloom.solve import functional
from timeloom.solve.warm_starts import GivenStates, Guess, WarmBatch, check_batch, check_states, current
from timeloom.solvers.base import Solver, resolve
from timeloom.torch_state.autocast import without_autocast
from timeloom.torch_state.precision import products_in, returned_in, solved_in
from timeloom.torch_state.transforms import WHERE, transformed

MOST_KNOWN = 64
"""Shapes that a layer remembers to leave to torch."""
ANY_LENGTH = 2**62
"""No bound on lengths yet, where other ranks hold the rest of the sequences."""


class Recurrent(Stacked):
    """Everything that GRU, LSTM and RNN share: parameters and checks are torch's, the forward pass is timeloom's."""

    reports: list[SolveReport]
    """One report for each layer and direction of the last call: forward and reverse of layer 0, then of layer 1, …"""

    def _start(self, solver: str | Solver) -> None:
        """What this class adds to torch's: the solver, what it learned, and the last call's reports."""
        self._solver = resolve(solver)
        self._solver_given = solver
        self._experiences: dict[int, LayerExperience] = {}
        self._known: dict[Any, list[SolveReport]] = {}
        """Inputs that torch's own layer is to run, by shape, dtype, device, autocast and gradients, and what to report;
        no reports where it was found out that it is not to."""
        self._last: torch_layer.LeftToTorch | None = None
        """The last call, where torch's layer ran it and is to run the next one like it."""
        self._steady: dict[Any, steady.SteadyCall] = {}
        """Calls that are replays alone, by kind."""
        if "_handle" not in vars(self):  # the operators of a graph ask the module for its solver
            self._handle = handle_of(self)
        self.reports = []

    @property
    def solver(self) -> str | Solver:
        """How to solve: a name or an object from `timeloom.solvers`. Set it at any time."""
        return self._solver_given

    @solver.setter
    def solver(self, solver: str | Solver) -> None:
        self._start(solver)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._handle = handle_of(self)  # a copy is a module of its own
        self._last, self._steady = None, {}

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._steady = {}  # weights may move, and what replays hold of them is to be free
        return super()._apply(fn, recurse)

    def __prepare_scriptable__(self) -> Any:
        raise RuntimeError(
            "torch.jit.script does not know timeloom's layers: call timeloom.sequentialize(model) first: it makes them "
            "torch's own again, weights and all"
        )

    def extra_repr(self) -> str:
        text = f"{super().extra_repr()}{self._dropping}"
        return text if self._solver_given == "auto" else f"{text}, solver={self._solver_given!r}"

    def _check_given(self, hx: Any) -> None:
        """Refuse an initial state over which torch's own layer would stumble without saying why."""

    @abstractmethod
    def _hidden_in(self, hx: Any, batched: bool, batch: int, like: Tensor, permutation: Tensor | None) -> Hidden:
        """The user's initial state, checked as torch does, as a tuple of its parts; zeros where none is given."""

    @abstractmethod
    def _hidden_out(self, parts: Hidden) -> Any:
        """Final states as torch returns them."""

    @traced_apart
    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: Any = None,
        *,
        lengths: Tensor | None = None,
        resets: Tensor | None = None,
        guess: Tensor | tuple[Tensor, ...] | WarmBatch | None = None,
        return_states: bool = False,
    ) -> tuple[Any, ...]:
        """As torch's module, and beyond it:

        lengths: `(B,)`, whole numbers: steps past a sequence's length are padding. Their outputs are zero, their inputs
            are not looked at, and the final state is the one after the last real step.
        resets: bool, `(T, B)`, or `(B, T)` if batch_first, or `(T,)` if unbatched: the state is put back to hx before a
            marked step, as if a new sequence began there (in both directions of a bidirectional module).
        guess: where iterations begin: a batch of `timeloom.WarmStarts`; or, for one layer and direction, the states
            after every step, with the shape of the output (an LSTM: a pair h, c). It changes how many sweeps are
            needed, not the result, and nothing where torch's own layer runs.
        return_states: whether to return, behind output and final state, the states after every step of every layer and
            direction, `(layers · directions, T, B, n)`, B before T if batch_first (an LSTM: a pair h, c).
        """
        unmarked = lengths is None and guess is None and not return_states
        if self._steady and unmarked and type(input) is Tensor:
            replayed = steady.call_again(self, input, hx, resets)
            if replayed is not None:
                return replayed
        masks, weights = self._masks, None  # drawn below: dropout inside the recurrence
        inside = transformed()
        repeats = unmarked and not inside and type(input) is Tensor
        unmarked = unmarked and resets is None and not (inside or self._drops)
        last = self._last
        if last is not None and unmarked and type(input) is Tensor and last.fits(input) and alone():
            self.__dict__["reports"] = list(last.reports)
            return torch_layer.call_again(self, input, hx, last)  # type: ignore[no-any-return]
        key, group = None, time_group(self)
        if group is None and type(input) is Tensor and unmarked:
            lowered = input.is_cuda and torch.is_autocast_enabled("cuda")
            key = (input.shape, input.dtype, input.device, lowered, torch.is_grad_enabled())
        known = self._known.get(key)
        if known:
            result: tuple[Any, Any] = torch_layer.call(self, input, hx)
            self.__dict__["reports"] = list(known)
            if type(input) is Tensor and input.dim() == 3:
                self._last = torch_layer.LeftToTorch.of(self, input, known)
            return result
        packed = input if isinstance(input, PackedSequence) else None
        ragged = lengths is not None or resets is not None
        if packed is not None and ragged:
            raise ValueError(
                "a PackedSequence carries its own lengths: give a padded tensor to use lengths= or resets="
            )
        data: Any = input if packed is None else packed.data
        if not isinstance(data, Tensor) and not hasattr(type(data), "__torch_function__"):
            raise TypeError(f"input must be a Tensor or a PackedSequence, got {type(input).__name__}")
        obstacle = torch_layer.obstacle(data, hx)
        if inside and (group is not None or guess is not None or (return_states and masks)):
            no = (
                "time ranks" if group is not None else "guess=" if guess is not None else "return_states= with zoneout="
            )
            raise NotImplementedError(f"there are no {no} {WHERE}")
        if obstacle and (ragged or return_states):
            given = "lengths= and resets= are" if ragged else "return_states= is"
            raise NotImplementedError(f"{given} for timeloom's own sweeps, and there are {obstacle}")
        traced = torch._C._get_tracing_state() is not None  # of a loop over steps it would keep their number
        if obstacle and masks and (traced or type(data) not in (Tensor, nn.Parameter) or data.layout != torch.strided):
            raise NotImplementedError(
                f"recurrent_dropout= and zoneout= are for timeloom's own steps, and there are {obstacle}: set them to 0"
            )
        if return_states and (packed is not None or group is not None):
            where = "over many ranks" if packed is None else "for a PackedSequence: give a padded tensor and lengths="
            raise NotImplementedError(f"there is no return_states= {where}")
        if group is not None and self._drops:
            raise NotImplementedError(
                f"over many ranks there is no dropout inside the recurrence{self._dropping}: every rank would draw its "
                "own masks; set it to 0"
            )
        if group is not None and (obstacle or packed is not None or guess is not None):
            no = "no guess=" if guess is not None else "no packed sequences: give a padded tensor and lengths="
            raise NotImplementedError(f"over many ranks there are {obstacle or no}")
        asked = not inside or (self._solver.on_tape and self.has_torch_twin)  # cuDNN and its kin know no transforms
        reason = obstacle or ""
        if not reason and group is None and known is None and asked:
            reason = torch_layer.why(self, input) or ""
        weights = self._present_weights() if self._drops else None
        if reason and not ragged and not return_states and not masks:
            result = self._run_torch_layer(input, hx, reason, weights)
            if guess is not None:  # of no use here, but a wrong one is wrong for longer sequences too
                permutation = None if packed is None else packed.sorted_indices
                self._guess(guess, packed is not None or data.dim() == 3, *torch_layer.size(self, input), permutation)
            passing = obstacle or reason == cudnn.RESTING  # it may be gone next time
            if key is not None and not passing and len(self._known) < MOST_KNOWN:
                self._known[key] = self.reports
            return result
        if key is not None and known is None and data.device.type == "cpu" and len(self._known) < MOST_KNOWN:
            self._known[key] = []  # there, size alone decides
        result = self._run_own(
            data, packed, hx, lengths, resets, guess, group, return_states, weights or self._present_weights(), obstacle
        )
        if repeats and group is None and not obstacle:
            steady.settle(self, data, hx, resets)
        return result

    def _run_torch_layer(
        self, input: Tensor | PackedSequence, hx: Any, reason: str, weights: list[Weights] | None = None
    ) -> tuple[Any, Any]:
        """Torch's own layer: what is fastest, or what was asked for."""
        if not self.has_torch_twin:
            raise NotImplementedError(f"{self._get_name()} runs by timeloom's sweeps alone, and there are {reason}")
        result: tuple[Any, Any] = torch_layer.call(self, input, hx, weights)
        self.reports = [torch_layer.report(self, input, reason)] * self._stacked
        return result

    def _run_own(
        self,
        data: Tensor,
        packed: PackedSequence | None,
        hx: Any,
        lengths: Tensor | None,
        resets: Tensor | None,
        guess: Tensor | tuple[Tensor, ...] | WarmBatch | None,
        group: TimeGroup | None,
        return_states: bool,
        weights: list[Weights],
        obstacle: str | None = None,
    ) -> tuple[Any, ...]:
        """By timeloom's sweeps; where there is an obstacle to them, and torch has no such layer, step by step."""
        if packed is None and data.dim() not in (2, 3):
            raise ValueError(f"{self._get_name()}: Expected input to be 2D or 3D, got {data.dim()}D instead")
        batched = packed is not None or data.dim() == 3
        check_input(data, packed, self.input_size, weights[0][0])
        if packed is not None:
            x, lengths = unpack(packed)
        else:
            x = data if batched else data.unsqueeze(1)
            x = x.transpose(0, 1) if self.batch_first and batched else x
        steps, batch = x.shape[:2]
        if steps == 0 and group is None:
            raise RuntimeError(f"Expected sequence length to be larger than 0 in RNN, got input {tuple(data.shape)}")
        permutation = None if packed is None else packed.sorted_indices
        hidden = self._hidden_in(hx, batched, batch, x, permutation)
        span = None if group is None else self._agree(group, x, hidden, weights, lengths, resets)
        if span is not None:
            lengths = span.lengths_on(span.group.rank)
        if lengths is not None:
            lengths = lengths if packed is not None else check_lengths(lengths, steps, batch)
            x = x if packed is not None else mask_padding(x, lengths)
        if resets is not None:
            resets = resets if batched or not isinstance(resets, Tensor) else resets.unsqueeze(1)
            resets = check_resets(resets, steps, batch, self.batch_first and batched, x.device)
        if guess is None and group is None:
            guess = current(self, batch)
        begin = None if guess is None else self._guess(guess, batched, steps, batch, permutation)
        every = AllStates(lengths, resets) if return_states else None
        y, final = self._solve(x, hidden, weights, lengths, resets, begin, span, every, obstacle)
        if packed is not None:
            assert lengths is not None
            final = tuple(permute(part, packed.unsorted_indices) for part in final)
            return pack_like(y, lengths, packed), self._hidden_out(final)
        if not batched:
            y, final = y.squeeze(1), tuple(part.squeeze(1) for part in final)
        elif self.batch_first:
            y = y.transpose(0, 1)
        # Without a gradient, not a view for autograd: users may write into it later, with gradients on.
        result = y if y.requires_grad or transformed() else y.detach(), self._hidden_out(final)
        return result if every is None else (*result, self._hidden_out(every.stacked(self.batch_first, batched)))

    def _guess(self, guess: Any, batched: bool, steps: int, batch: int, permutation: Tensor | None) -> Guess:
        """The user's guess, checked, in the order of the batch."""
        if isinstance(guess, WarmBatch):
            check_batch(guess, batch)
            return guess if permutation is None else guess.permuted(permutation)
        if self._stacked > 1 or permutation is not None:
            raise ValueError(
                f"guess as tensors is for one layer, one direction and a padded input; this call has {self._stacked} "
                "layers and directions: use timeloom.WarmStarts"
            )
        lead = (steps,) if not batched else (batch, steps) if self.batch_first else (steps, batch)
        width = self.proj_size or self.hidden_size
        shapes = tuple((*lead, part) for part in ((width, self.hidden_size) if self.mode == "LSTM" else (width,)))
        states = torch.cat(check_states(guess, shapes, len(shapes) > 1), -1)
        states = states if batched else states.unsqueeze(1)
        return GivenStates(states.transpose(0, 1) if self.batch_first and batched else states)

    def _solve(
        self, x: Tensor, hidden: Hidden, weights: list[Weights], lengths: Tensor | None, resets: Tensor | None,
        guess: Guess | None, span: Span | None, every: AllStates | None = None, obstacle: str | None = None,
    ) -> tuple[Tensor, Hidden]:  # fmt: skip
        """All layers: x `(T, B, D)` to outputs `(T, B, directions · part)` and final states."""
        compute, inside = solved_in(x), transformed()
        whole = lengths is None and resets is None and guess is None and span is None
        in_one_call = whole and self._solver.in_given_precision and self._has_kernels and not self._masks
        if in_one_call and multiplies_as_given(x):
            compute = products_in(x)
        returned = returned_in(torch_layer.layer(self), self.proj_size > 0, weights[0][0], x, hidden)
        reports: list[SolveReport] = [None] * self._stacked  # type: ignore[list-item]
        known = self._experiences if span is None else span.group.experiences(self)

        def solve_one(index: int, y: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
            backwards, widths = self.bidirectional and index % 2 == 1, [part.shape[-1] for part in hidden]
            shown, own = self._with_masks(y, weights[index], widths)
            given = self._inputs(shown, initial, own, lengths, resets, backwards, span)
            whole_states = every is not None and given.masked  # what masks leave of c cannot be told from h
            solve, record = self._solve_of(index, known, span), partial(reports.__setitem__, index)
            solve = replace(solve, whole_states=True) if whole_states else solve
            if obstacle:
                out, final = solve.on_tape(given, record, obstacle)
            elif inside:
                out, final = functional.run(solve, given, record)
            else:
                out, final = solve.run(given, record, guess)
            out = reverse(out, lengths) if backwards else out
            if every is not None and whole_states:
                every.parts.append(out.split(widths, -1))
            elif every is not None:
                every.add(y, out, tuple(part[index] for part in hidden), own, backwards)
            return out[..., : widths[0]] if whole_states else out, final

        with without_autocast(x.device):
            y, final = self._run_layers(x.to(compute), hidden, solve_one, lengths)
        self.__dict__["reports"] = reports
        return y.to(returned[0]), tuple(part.to(dtype) for part, dtype in zip(final, returned, strict=True))

    def _agree(
        self, group: TimeGroup, x: Tensor, hidden: Hidden, weights: list[Weights], lengths: Any, resets: Any
    ) -> Span:
        """What all ranks must know of each other before they solve together."""
        batch = x.shape[1]
        if lengths is not None:
            lengths = check_lengths(lengths, ANY_LENGTH, batch)
        live = (x, *hidden, *(weight for layer in weights for weight in layer))
        taped = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in live)
        network = f"{self._get_name()}({super().extra_repr()})"
        span = agree(group, x, lengths, resets, network, taped, self._solver, group.experiences(self))
        if lengths is not None:
            check_lengths(lengths, span.steps, batch)
        return span
