"""The base class of timeloom's modules: torch's layers with another forward pass."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from timeloom.auto import cudnn, thresholds
from timeloom.auto.beginnings import Beginning
from timeloom.auto.layer_experience import LayerExperience
from timeloom.distributed.context import alone, time_group
from timeloom.nn import by_samples, by_size, own_sweeps, steady, torch_layer
from timeloom.nn.asked import Asked, check, guess_of
from timeloom.nn.dropping import Weights
from timeloom.nn.graphs.handles import handle_of, traced_apart
from timeloom.nn.reporting import Reporting
from timeloom.nn.stacked import Hidden, Stacked
from timeloom.report import SolveReport
from timeloom.solve.warm_starts import BATCH, WarmBatch
from timeloom.solvers.base import Solver, resolve
from timeloom.torch_state.saved_tensors import saved_through_hooks
from timeloom.torch_state.transforms import transformed

MOST_KNOWN = 64
"""Largest number of input shapes for which a module remembers what to run."""


class Recurrent(Reporting, Stacked):
    """Everything that GRU, LSTM and RNN share: parameters and checks are torch's, the forward pass is timeloom's."""

    def _start(self, solver: str | Solver) -> None:
        """Initialise what this class adds to torch's: the solver, its experience, and the last call's reports."""
        self._solver = resolve(solver)
        self._solver_given = solver
        self._experiences: dict[int, LayerExperience] = {}
        self._known: dict[Any, list[SolveReport]] = {}
        """Reports for inputs that torch's own layer runs, by shape, dtype, device, autocast and gradients; an empty
        list for inputs that it is known not to run."""
        self._last: torch_layer.LeftToTorch | None = None
        """The last call, if torch's layer ran it and runs the next one like it."""
        self._fewest: dict[Any, thresholds.Fewest] = {}
        """Steps below which calls run by torch's layer, by the number of sequences, dtype and gradients."""
        self._left: dict[Any, tuple[int, list[SolveReport]]] = {}
        """By the same keys: for how many more calls torch's own layer runs the whole stack, since it was chosen for
        each single layer, and the reports."""
        self._steady: dict[Any, steady.SteadyCall] = {}
        """Calls that can be made by replays alone, by kind."""
        if "_handle" not in vars(self):  # the operators of a graph ask the module for its solver
            self._handle = handle_of(self)
        self._beginnings: dict[Hashable, Beginning] = {}
        """Whether calls begin at known states, by their kind."""
        self._take_reports([])

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
        self._last, self._left, self._steady, self._beginnings = None, {}, {}, {}

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._steady = {}  # weights may move, and replays must not keep the old ones alive
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
        """Raise for an initial state on which torch's own layer would fail without a clear message."""

    @abstractmethod
    def _hidden_in(self, hx: Any, batched: bool, batch: int, like: Tensor, permutation: Tensor | None) -> Hidden:
        """The user's initial state, checked as torch does, as a tuple of its parts; zeros if none is given."""

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
        """The forward pass of torch's module, with these additional arguments:

        lengths: `(B,)`, whole numbers: steps past a sequence's length are padding. Their outputs are zero, their inputs
            are ignored, and the final state is the one after the last real step.
        resets: bool, `(T, B)`, or `(B, T)` if batch_first, or `(T,)` if unbatched: the state is set back to hx before a
            marked step, as if a new sequence began there (in both directions of a bidirectional module).
        guess: initial guess of the states: a batch of `timeloom.WarmStarts`; or, for one layer and direction, the
            states after every step, with the shape of the output (an LSTM: a pair h, c). It changes how many sweeps are
            needed, not the result, and has no effect if torch's own layer runs.
        return_states: whether to return, after output and final state, the states after every step of every layer and
            direction, `(layers · directions, T, B, n)`, B before T if batch_first (an LSTM: a pair h, c).
        """
        if guess is not None or BATCH.get() is not None:
            call = partial(self._call, input, hx, lengths, resets, return_states=return_states)
            return by_samples.call_with(self, call, guess, input, lengths is not None or resets is not None)
        return self._call(input, hx, lengths, resets, None, return_states)

    def _call(
        self,
        input: Tensor | PackedSequence,
        hx: Any,
        lengths: Tensor | None,
        resets: Tensor | None,
        guess: Tensor | tuple[Tensor, ...] | WarmBatch | None,
        return_states: bool,
    ) -> tuple[Any, ...]:
        """The forward pass from this guess, whatever samples are set."""
        x: Any = input  # a plain tensor in plain calls
        bare = lengths is None and guess is None and not return_states
        plain = bare and type(x) is Tensor
        if plain and self._steady:
            replayed = steady.call_again(self, x, hx, resets)
            if replayed is not None:
                return replayed
        inside, drops = transformed(), self._drops
        repeats = plain and not inside
        bare = bare and resets is None and not (inside or drops)
        plain = plain and bare
        if bare and (plain or type(x) is PackedSequence) and alone():
            short = by_size.call(self, x, hx)
            if short is not None:
                return short
            last = self._last
            if plain and last is not None and last.fits(x):
                self._take_reports(list(last.reports))
                return torch_layer.call_again(self, x, None, x, hx, last.batch)  # type: ignore[no-any-return]
        key, group = None, time_group(self)
        if plain and group is None:
            lowered = x.is_cuda and torch.is_autocast_enabled("cuda")
            key = (x.shape, x.dtype, x.device, lowered, torch.is_grad_enabled())
        known = self._known.get(key)
        if known:
            result: tuple[Any, Any] = torch_layer.call(self, x, hx)
            self._take_reports(list(known))
            if x.dim() in (2, 3):
                self._last = torch_layer.LeftToTorch.of(self, x, known)
            return result
        left, reports = self._left.pop(key, (0, []))
        if left and not saved_through_hooks():
            self._left[key] = left - 1, reports
            for experience in self.experiences():
                experience.skip_call()
            self._take_reports(list(reports))
            return torch_layer.call(self, x, hx)  # type: ignore[no-any-return]
        packed = input if isinstance(input, PackedSequence) else None
        data: Any = input if packed is None else packed.data
        asked = Asked(data, packed, hx, lengths, resets, guess, return_states, group, inside)
        obstacle = check(self, asked)
        reason = obstacle or ""
        if not reason and group is None and known is None and self._may_be_torchs(inside):
            reason = torch_layer.why(self, input) or ""
        weights = self._present_weights() if drops else None  # drawn once
        if reason and not asked.marked and not return_states and not self._masks:
            result = self._run_torch_layer(input, hx, reason, weights)
            if guess is not None:  # unused here, but a wrong guess is an error at any length
                guess_of(self, asked, guess, *torch_layer.size(self, input))
            passing = obstacle or reason in (cudnn.RESTING, thresholds.RESTING)  # may not hold next time
            if key is not None and not passing and len(self._known) < MOST_KNOWN:
                self._known[key] = self.reports
            return result
        if key is not None and known is None and len(self._known) < MOST_KNOWN and thresholds.by_size(self, data):
            self._known[key] = []
        found = own_sweeps.call(self, asked, weights or self._present_weights(), obstacle)
        if key is not None and not obstacle and len(self._left) < MOST_KNOWN:
            left = torch_layer.calls_left(self, data)
            if left:
                self._left[key] = left, self.reports
        if repeats and group is None and not obstacle:
            steady.settle(self, data, hx, resets)
        return found

    def _may_be_torchs(self, inside: bool) -> bool:
        """Whether torch's own layer can run a call: its fused layers, as cuDNN's, do not support transforms."""
        return not inside or (self._solver.on_tape and self.has_torch_twin)

    def _run_torch_layer(
        self, input: Tensor | PackedSequence, hx: Any, reason: str, weights: list[Weights] | None
    ) -> tuple[Any, Any]:
        """Run torch's own layer, which is the fastest or was asked for."""
        if not self.has_torch_twin:
            raise NotImplementedError(f"{self._get_name()} runs by timeloom's sweeps alone, and there are {reason}")
        result: tuple[Any, Any] = torch_layer.call(self, input, hx, weights)
        self._take_reports([torch_layer.report(self, input, reason)] * self._stacked)
        return result
