"""CUDA graphs of layers on a CPU: a replay runs what was recorded once more, into the same memory."""

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
from timeloom.kernels import AdjointData, ReferenceSweeper, replay
from timeloom.kernels.cuda import layer as cuda_layer
from timeloom.kernels.cuda.layer import CUDALayer
from timeloom.kernels.recording import Body, Recording, places_for
from timeloom.problem import Recurrence, Segments
from timeloom.solve import beside_torch, trunk
from timeloom.solve.driver import march
from timeloom.solve.plan import Plan
from timeloom.solve.residual import certificate, floors, relative, scales
from timeloom.solvers.auto import Auto
from timeloom.torch_state import streams

CHUNK, WARMUP = 16, 40


class StandIn(ReferenceSweeper):
    """The CUDA sweeper's methods. What it saves for the backward pass is its inputs, where kernels save gates."""

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
    """Chunks of a fixed length behind the warm-up that `auto` has learned."""

    def why_torch(self, *_: Any) -> str | None:
        return None

    @staticmethod
    def remembers(device: torch.device) -> bool:
        return True

    def _decide_anew(self, problem: Recurrence, experience: Experience, tolerance: float, linear: bool) -> Plan:
        warmup = min(experience.warmup(tolerance), problem.steps)
        chunk = CHUNK if warmup < problem.steps else problem.steps
        return Plan(
            chunk=chunk, warmup=warmup if chunk < problem.steps else 0, driver=march, tolerance=tolerance, max_iters=4,
            on_divergence=self.on_divergence, reason=f"auto: warm-up of {warmup} steps",
        )  # fmt: skip


class Graph:
    """What stands in for a recorded graph; `replays` counts those of all."""

    replays = 0

    def __init__(self, body: Body, places: Sequence[Tensor | None], results: list[Any]) -> None:
        self._body, self._places, self._results = body, places, results

    def replay(self) -> None:
        Graph.replays += 1
        for place, found in zip(self._results, self._body(self._places), strict=True):
            if isinstance(place, Tensor):
                place.copy_(found)


def record(given: Sequence[Tensor | None], size: int, body: Body, ground: Recording | None) -> Recording:
    with torch.inference_mode(False), torch.no_grad():
        places = places_for(given, ground)
        results = [found.clone() if isinstance(found, Tensor) else found for found in body(given)]
    graph: Any = Graph(body, places, results)
    stream: Any = SimpleNamespace(cuda_stream=streams.stream_of(torch.device("cpu")), synchronize=lambda: None)
    return Recording(graph, places, results, size, stream, results[-1], ground)


def _steadily(honest: Any) -> Any:
    """Warm-ups that do not get shorter from call to call, as they do until a network is known."""
    return lambda self, tolerance: max(honest(self, tolerance), WARMUP)


def install(patch: pytest.MonkeyPatch) -> None:
    """Layers on the CPU run as those on a GPU do, by `solver=Chunks()`."""
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
def on_a_cpu(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, layers run as on a GPU; their recordings are gone behind it."""
    install(patch)
    torch.manual_seed(0)
    yield
    replay.RECORDINGS.clear()
