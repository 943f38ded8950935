"""CUDA graphs of layers, simulated on a CPU: a replay runs the recorded function again, into the same memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from timeloom.auto.experience import Experience
from timeloom.auto.thresholds import Fewest
from timeloom.kernels import AdjointData, ReferenceSweeper, mending, replay
from timeloom.kernels.cuda import layer as cuda_layer
from timeloom.kernels.cuda.layer import CUDALayer
from timeloom.kernels.host_certificate import MOST_READ, is_heard, listening
from timeloom.kernels.mending import Unless
from timeloom.kernels.recording import Body, Recording, places_for
from timeloom.problem import Recurrence, Segments, cut_evenly
from timeloom.solve import beside_torch, trunk
from timeloom.solve.driver import march
from timeloom.solve.plan import Plan
from timeloom.solve.residual import certificate, floors, relative, scales
from timeloom.solvers.auto import Auto
from timeloom.torch_state import streams

CHUNK, WARMUP = 16, 40


class Mending(ReferenceSweeper):
    """A sweeper with sweeps that run only if a certificate is missed."""

    mends = True

    def retry(
        self, unless: Unless, segments: Segments, lead: int, starts: Tensor, states: list[Tensor], want_decay: bool
    ) -> Tensor:
        ends = torch.full_like(starts, torch.nan)
        if _missed(unless):
            found, reached, _ = self.forward_entering(segments, lead, states, want_decay)
            starts.copy_(found)
            ends.copy_(reached)
        return ends

    def retry_adjoint(
        self, unless: Unless, segments: Segments, lead: int, ends: Tensor, final: Tensor | None, data: AdjointData,
        begins: Tensor, want_decay: bool,
    ) -> None:  # fmt: skip
        if _missed(unless):
            found, reached, _ = self.adjoint_entering(segments, lead, final, data, want_decay)
            ends.copy_(found)
            begins.copy_(reached)

    def mend(self, unless: Unless, states: list[Tensor], want_decay: bool = False) -> None:
        if _missed(unless):
            self.forward(self._whole(reverse=False), self.problem.initial, states, want_decay)

    def mend_adjoint(
        self, unless: Unless, final: Tensor, data: AdjointData, begins: Tensor, want_decay: bool = False
    ) -> None:
        if _missed(unless):
            begins.copy_(self.adjoint(self._whole(reverse=True), final, data, want_decay)[0])

    def _whole(self, reverse: bool) -> Segments:
        return cut_evenly(self.problem.steps, self.problem.batch, self.problem.steps, reverse)


def _missed(unless: Unless) -> bool:
    return not float(unless.certificate) <= unless.limit_on_device


class StandIn(Mending):
    """The CUDA sweeper's methods by the reference, saving inputs for the backward pass where kernels save gates."""

    told_as = "stand-in"

    def __init__(self, problem: Recurrence, saved: Tensor | None = None, mask: Tensor | None = None) -> None:
        if problem.u.shape[-1] == 0:
            assert saved is not None
            problem = replace(problem, u=saved)
        elif saved is not None:
            saved.copy_(problem.u)
        self.saved = saved
        super().__init__(problem)

    @staticmethod
    def room_for_saved(problem: Recurrence) -> Tensor | None:
        return torch.full_like(problem.u, torch.nan)

    def adjoint_entering(
        self, segments: Segments, lead: int, final: Tensor | None, data: AdjointData, want_decay: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        final = torch.zeros_like(self.problem.initial) if final is None else final
        return super().adjoint_entering(segments, lead, final, data, want_decay)

    def certify(
        self, starts: Tensor, ends: Tensor, share: float, decay: Tensor | None = None, fading: bool = False
    ) -> Tensor:
        shape, size = (-1, self.problem.batch, self.cell.size), self.cell.size
        starts = starts.view(shape)
        arriving = torch.cat([starts[:1], ends.view(shape)[:-1]])
        floor = floors(None, self.problem.initial, (size,), share)
        return certificate(relative(arriving - starts, scales(starts, arriving, (size,), floor, fading), (size,)))


@dataclass(frozen=True)
class Chunks(Auto):
    """Chunks of a fixed length with the warm-up that `auto` has learned.

    longer: how many times as long the warm-up of a retry is; 0 for no retry.
    """

    longer: int = 0

    def why_torch(self, *_: Any) -> str | None:
        return None

    def fewest_steps(self, *_: Any) -> Fewest:
        return Fewest()

    @staticmethod
    def remembers(device: torch.device) -> bool:
        return True

    def _decide_anew(self, problem: Recurrence, experience: Experience, tolerance: float, linear: bool) -> Plan:
        warmup = min(experience.warmup(tolerance), problem.steps)
        chunk = CHUNK if warmup < problem.steps else problem.steps
        plan = Plan(
            chunk=chunk, warmup=warmup if chunk < problem.steps else 0, driver=march, tolerance=tolerance, max_iters=4,
            on_divergence=self.on_divergence, reason=f"auto: warm-up of {warmup} steps",
        )  # fmt: skip
        if not self.longer or chunk == problem.steps:
            return plan
        return replace(plan, retry=replace(plan, warmup=self.longer * warmup, reason="auto: a longer warm-up"))


class Graph:
    """A stand-in for a recorded graph; `replays` counts the replays of all."""

    replays = 0

    def __init__(self, body: Body, places: Sequence[Tensor | None], results: list[Any], room: Tensor) -> None:
        self._body, self._places, self._results, self._room = body, places, results, room

    def replay(self) -> None:
        Graph.replays += 1
        with listening(self._room) as listener:
            found = self._body(self._places)
            listener.take(found[-1])
        for place, result in zip(self._results, found, strict=True):
            if isinstance(place, Tensor):
                place.copy_(result)


def record(given: Sequence[Tensor | None], size: int, body: Body, ground: Recording | None) -> Recording:
    with torch.inference_mode(False), torch.no_grad():
        places = places_for(given, ground)
        room = torch.empty(MOST_READ, device="cpu")
        with listening(room) as listener:
            results = [found.clone() if isinstance(found, Tensor) else found for found in body(given)]
            listener.take(results[-1])
    graph: Any = Graph(body, places, results, room)
    stream: Any = SimpleNamespace(cuda_stream=streams.stream_of(torch.device("cpu")), synchronize=lambda: None)
    return Recording(graph, places, results, size, stream, listener.numbers, ground, listener.mended)


def _steadily(honest: Any) -> Any:
    """A `warmup` that does not get shorter from call to call, as it otherwise does until a network is known."""
    return lambda self, tolerance: max(honest(self, tolerance), WARMUP)


def install(patch: pytest.MonkeyPatch, mended: bool = False) -> None:
    """Make layers on the CPU run as on a GPU, by `solver=Chunks()`.

    mended: whether graphs redo what is not certified, as those of layers that are not too wide do.
    """
    patch.setattr(mending, "in_a_graph", lambda _: mended and is_heard())
    patch.setattr(cuda_layer, "launches_each_step", lambda *_: False)
    replay.RECORDINGS.clear()
    patch.setattr(trunk, "layer_kind", lambda cell, x: CUDALayer if cell.kernel is not None else None)
    patch.setattr(cuda_layer, "CUDASweeper", StandIn)
    patch.setattr(CUDALayer, "recordable", lambda *_: True)
    patch.setattr(beside_torch, "is_rival", lambda *_: False)
    patch.setattr(Experience, "warmup", _steadily(Experience.warmup))
    patch.setattr(replay, "record", record)
    patch.setattr(replay, "_memory", lambda _: 2**40)
    patch.setattr(streams, "may_replay", lambda _: True)
    patch.setattr(streams, "stream_of", lambda _: 0)


@contextmanager
def on_a_cpu(patch: pytest.MonkeyPatch, mended: bool = False) -> Iterator[None]:
    """Context in which layers run as on a GPU; their recordings are dropped at its end."""
    install(patch, mended)
    torch.manual_seed(0)
    yield
    replay.RECORDINGS.clear()
