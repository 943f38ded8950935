"""Newton's method on all states at once by CUDA kernels that keep Jacobians on the chip: the host's side of newton.cuh.

For states of up to 32 numbers: GRU and RNN of up to 32 units, LSTM of up to 16. Twin: `solve.newton_reference`.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from timeloom.kernels.cuda import nvrtc
from timeloom.kernels.cuda.chain import aligned, on_device
from timeloom.kernels.cuda.driver import Function
from timeloom.kernels.cuda.nvrtc import compile_source
from timeloom.kernels.cuda.programs import MOST_UNITS, architecture, headers, text_of
from timeloom.kernels.faults import broken, guarded
from timeloom.kernels.newton import Maps, NewtonSteps, States
from timeloom.kernels.reference import floor_of, units_of
from timeloom.problem import Recurrence

MOST_NUMBERS = 32
"""Largest state size: each lane of a warp holds one row of the map."""
CHAIN_SHARE = 16.0
"""Time of a chunk's step in the two walks relative to a link of the chain; balances chunk length and chunk count."""
ONE_GROUP = 32
"""Links up to which the chain is sequential; longer ones are chained in groups."""
WARPS = 2048
"""Chunks, over all sequences, that keep the device busy; more of them only make the chain longer."""
SHORTEST, FINISHING = 8, 4096
"""For `finish`, which only evaluates steps: the shortest chunk, and about how many chunks over all sequences."""
FORWARD, ADJOINT, BOTH = ("compose", "apply", "finish"), ("compose_adjoint",), ("chain", "gather")


@dataclass(frozen=True)
class NewtonVariant:
    """What the kernels are compiled for: a cell and its width."""

    kernel: str
    units: int

    @property
    def split(self) -> int:
        """Lanes that share a unit."""
        return next(32 // lanes for lanes in (8, 16, 32) if self.units <= lanes)

    def source(self, adjoint: bool) -> str:
        lines = [f"#define UNITS {self.units}", f"#define SPLIT {self.split}"]
        return "\n".join([*lines, f'#include "newton{"_adjoint" * adjoint}.cu"', ""])


class NewtonArgs(ctypes.Structure):
    """The structure of newton.cuh; missing arguments are NULL or zero."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("inputs", "weights", "vectors", "origin")],
        ("states", ctypes.c_void_p * 2),
        ("found", ctypes.c_void_p * 2),
        *[(name, ctypes.c_void_p) for name in ("saved", "incoming", "maps", "sources", "gathered", "gathered_sources")],
        *[(name, ctypes.c_void_p) for name in ("starts", "first", "worst")],
        *[(name, ctypes.c_int) for name in ("steps", "batch", "chunk", "links", "span")],
        ("floor", ctypes.c_float * 2),
    ]


@cache
def newton_function(device: int, variant: NewtonVariant, name: str) -> Function:
    """The kernel of a name in FORWARD, ADJOINT or BOTH."""
    text = headers(text_of(variant.kernel).file)
    code = compile_source(variant.source(name in ADJOINT), architecture(device), text)
    return Function(device, code, name, 32, 0)


def fits(kernel: str | None, size: int, device: torch.device) -> bool:
    """Whether there are kernels for this cell with states of this size on this device."""
    if device.type != "cuda" or kernel not in MOST_UNITS or size > MOST_NUMBERS or nvrtc.unavailable() is not None:
        return False
    return _capable(device) and broken(fault_of(kernel)) is None


@cache
def _capable(device: torch.device) -> bool:
    """Whether kernels can run on a device; cached, since every training step asks twice."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def fault_of(kernel: str) -> str:
    """The name under which the kernels' faults are reported."""
    return f"cuda newton {kernel}"


def chunk_for(steps: int, batch: int) -> int:
    """Steps of a chunk: the time of the walks grows with a chunk's length, that of the chain with the chunk count."""
    balanced = math.sqrt(steps / CHAIN_SHARE)
    return max(1, math.ceil(max(balanced, steps * batch / WARPS)))


class CUDANewton(NewtonSteps):
    """Newton steps of a problem; its `u` `(T, B, K)`, float32, may have width 0 if only gradients are computed.

    saved: `(T, B, SAVED n)`, gate values, written by `finish` and read by `compose_adjoint`.
    """

    def __init__(
        self, problem: Recurrence, share_of_box: float, saved: Tensor | None, chunk: int | None = None
    ) -> None:
        cell, batch = problem.cell, problem.batch
        super().__init__(problem.steps, chunk or chunk_for(problem.steps, batch))
        self._cell, self._steps, self._batch, self._saved = cell, problem.steps, batch, saved
        self._variant = NewtonVariant(str(cell.kernel), cell.parts[0])
        self._initial, self._device = problem.initial.contiguous(), problem.initial.device.index or 0
        self._fixed = {
            "inputs": problem.u if problem.u.shape[-1] == 0 else aligned(problem.u),
            "weights": cell.weights[0].float().contiguous(),
            "vectors": units_of(cell).float().contiguous(),
            "origin": self._initial,
        }
        self._floor = floor_of(cell, share_of_box)

    def compose(self, states: States | None, residual: Tensor) -> Maps:
        return self._compose("compose", states, worst=residual)

    def compose_adjoint(self, states: States, incoming: Tensor | None) -> Maps:
        incoming = None if incoming is None else incoming.contiguous()
        return self._compose("compose_adjoint", states, incoming=incoming)

    def _compose(self, name: str, states: States | None, **tensors: Any) -> Maps:
        maps = self._room_for_maps(self.links)
        self._run(name, self.links * self._batch, states, maps=maps.matrices, sources=maps.sources, **tensors)
        return maps

    def _room_for_maps(self, links: int) -> Maps:
        size, empty = self._cell.size, self._initial.new_empty
        return Maps(empty(links, self._batch, size, size), empty(links, self._batch, size))

    def chain(self, maps: Maps, first: Tensor | None = None) -> Tensor:
        """Long chains run in groups: compose each group's map, chain these maps, then walk all groups side by side."""
        links = len(maps.sources)
        if links > ONE_GROUP:
            span = math.ceil(math.sqrt(links / 2))
            groups = self._room_for_maps(-(-links // span))
            gathered = {"gathered": groups.matrices, "gathered_sources": groups.sources}
            self._over_links("gather", maps, span, **gathered)
            return self._chained(maps, self.chain(groups, first), span)
        return self._chained(maps, None if first is None else first.contiguous(), links)

    def _chained(self, maps: Maps, first: Tensor | None, span: int) -> Tensor:
        starts = torch.empty_like(maps.sources)
        self._over_links("chain", maps, span, starts=starts, first=first)
        return starts

    def _over_links(self, name: str, maps: Maps, span: int, **more: Any) -> None:
        links = len(maps.sources)
        more |= {"maps": maps.matrices, "sources": maps.sources, "links": links, "span": span}
        self._run(name, -(-links // span) * self._batch, None, **more)

    def correct(self, maps: Maps, starts: Tensor, ends: Tensor) -> Tensor:
        jumps = torch.zeros_like(starts)
        torch.sub(ends.view_as(starts)[:-1], starts[1:], out=jumps[:-1])
        return self.chain(Maps(maps.matrices, jumps)).add_(starts)

    def apply(self, states: States | None, starts: Tensor) -> States:
        found = self._room()
        self._run("apply", self.links * self._batch, states, found, starts=starts)
        return found

    def finish(self, states: States | None, residual: Tensor) -> States:
        found, chunk = self._room(), min(self.chunk, max(SHORTEST, -(-self._steps * self._batch // FINISHING)))
        links = -(-self._steps // chunk)  # steps are independent here
        self._run(
            "finish", links * self._batch, states, found, saved=self._saved, worst=residual, chunk=chunk, links=links
        )
        return found

    def _room(self) -> States:
        return [self._initial.new_empty(self._steps + 1, self._batch, width) for width in self._cell.parts]

    def _run(self, name: str, blocks: int, states: States | None, found: States | None = None, **more: Any) -> None:
        given = {"steps": self._steps, "batch": self._batch, "chunk": self.chunk, "links": self.links}
        for key, value in (self._fixed | more).items():
            if value is not None:
                given[key] = value.data_ptr() if isinstance(value, Tensor) else value
        if name in ADJOINT and self._saved is not None:
            given["saved"] = self._saved.data_ptr()
        args = NewtonArgs(**given)
        for field, parts in (("states", states), ("found", found)):
            for i, part in enumerate(parts or ()):
                getattr(args, field)[i] = part.data_ptr()
        args.floor[0] = self._floor
        self._launch(name, blocks, args)

    def _launch(self, name: str, blocks: int, args: NewtonArgs) -> None:
        with on_device(self._device):
            guarded(
                fault_of(self._variant.kernel), lambda: newton_function(self._device, self._variant, name)(blocks, args)
            )
