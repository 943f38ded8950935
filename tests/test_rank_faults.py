"""A rank that fails stops the others, soon, with an error that names it and says why."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from rank_processes import launch, mesh_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import timeloom as tl
from timeloom.distributed import (
    RankError,
    TimeParallel,
    group,
    shard,
    slice_of,
    sum_over_time,
    time_mesh,
    time_parallel,
)
from timeloom.solvers import MGRIT, Shooting

RANKS = 3


def layer(hidden: int = 4, **options: Any) -> tl.GRU:
    torch.manual_seed(0)
    return tl.GRU(2, hidden, **options)


class Windowed(nn.Module):
    def __init__(self, net: tl.GRU) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Any:
        return tl.windowed(self.net, x, window=3)


def said(action: Callable[[], Any]) -> str:
    """The error that an action ends with."""
    try:
        action()
    except (RankError, ValueError, NotImplementedError, tl.ConvergenceError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def disagreeing(rank: int) -> dict[str, str]:
    """What all ranks can see together, so that they may go on afterwards."""
    mesh = mesh_of((1, RANKS))
    odd = rank == 1
    dtype = torch.float64 if odd else torch.float32
    poisoned = torch.randn(30, 2, 2, generator=torch.Generator().manual_seed(0))
    poisoned[14, 1, 0] = torch.nan

    def call(net: nn.Module, x: Tensor, **more: Any) -> Callable[[], Any]:
        return lambda: TimeParallel(net, mesh)(x, **more)

    def bare(net: nn.Module, x: Tensor) -> Callable[[], Any]:
        def act() -> Any:
            with time_parallel(mesh):
                return net(x)

        return act

    hard = layer(solver=Shooting(chunk=2, correction="none", warmup=0, max_iters=1, on_divergence="raise"))
    found = {
        "batch": said(call(layer(), torch.zeros(4, 2 + odd, 2))),
        "dtype": said(bare(layer(dtype=dtype), torch.zeros(4, 2, 2, dtype=dtype))),
        "network": said(bare(layer(5 if odd else 4), torch.zeros(4, 2, 2))),
        "parameters": said(call(layer(5 if odd else 4), torch.zeros(4, 2, 2))),
        "solver": said(call(layer(solver="shooting" if odd else "auto"), torch.zeros(4, 2, 2))),
        "lengths": said(call(layer(), torch.zeros(4, 2, 2), lengths=torch.tensor([4, 7 + odd]))),
        "resets": said(call(layer(), torch.zeros(4, 2, 2), **({"resets": torch.ones(4, 2) > 0} if odd else {}))),
        "no steps": said(call(layer(), torch.zeros(0 if odd else 4, 2, 2))),
        "too few steps": said(lambda: slice_of(RANKS - 1, mesh)),
        "nan": said(call(layer(), shard(poisoned, mesh))),
        "nan, sequential": said(call(layer(solver="sequential"), shard(poisoned, mesh))),
        "nan, mgrit": said(call(layer(solver=MGRIT(coarsening=2)), shard(poisoned, mesh))),
        "nan, mgrit, inexact": said(call(layer(solver=MGRIT.paper()), shard(poisoned, mesh))),
        "nan, deer": said(call(layer(solver="deer"), shard(poisoned, mesh))),
        "does not converge": said(call(hard, torch.randn(8, 2, 2))),
    }  # fmt: skip
    y, _ = TimeParallel(layer(), mesh)(shard(poisoned.nan_to_num(), mesh))
    expected, _ = layer()(poisoned.nan_to_num())
    found["after all"] = "" if torch.allclose(y, expected[slice_of(30, mesh)], atol=1e-6) else "wrong"
    found["slow"] = said(lambda: wait_for_a_slow_rank(rank, mesh))
    return found | {  # at last: a rank cannot know that the others refuse it, too
        "elk": said(call(layer(solver="elk"), shard(poisoned, mesh))),
        "checks": said(call(layer(solver=MGRIT(check_gradient_every=2)), shard(poisoned, mesh))),
        "guess": said(call(layer(), torch.zeros(4, 2, 2), guess=torch.zeros(4, 2, 4))),
        "windows": said(call(Windowed(layer()), torch.zeros(4, 2, 2))),
    }


def wait_for_a_slow_rank(rank: int, mesh: DeviceMesh) -> None:
    """Rank 0 takes longer than the others look for failures, in a collective and in the fallback's messages."""

    def cell(h: Tensor, x: Tensor) -> Tensor:
        if rank == 0:
            time.sleep(0.15)
        return torch.tanh(h + x)

    x, h0 = torch.ones(3 * RANKS, 1, 2), torch.zeros(1, 2)
    wanted, _ = tl.unroll(lambda h, u: torch.tanh(h + u), h0, x, solver="sequential")
    for solver in ("sequential", Shooting(correction="none")):
        with time_parallel(mesh), torch.no_grad():
            states, _ = tl.unroll(cell, h0, shard(x, mesh), solver=solver)
        assert torch.allclose(states, wanted[slice_of(3 * RANKS, mesh)])


def test_ranks_that_disagree_all_say_so_and_can_go_on() -> None:
    answers = launch(disagreeing, RANKS)
    expected = {
        "batch": r"RankError: .*batch size: rank 1 differs from rank 0 \(2 on rank 0, 3 on rank 1\)",
        "dtype": "RankError: .*dtype: rank 1 differs",
        "network": "RankError: .*the network: rank 1 differs",
        "parameters": "RankError: .*the model's parameters and buffers: rank 1 differs",
        "solver": "RankError: .*the solver: rank 1 differs",
        "lengths": "RankError: .*lengths: rank 1 differs",
        "resets": "RankError: .*resets: rank 1 differs",
        "no steps": "RankError: rank 1 has no time steps",
        "too few steps": "ValueError: 2 steps cannot be split over 3",
        "nan": "RankError: rank 1 has inputs that are not finite, from step 4",
        "nan, sequential": "RankError: rank 1 has inputs that are not finite, from step 4",
        "nan, mgrit": "RankError: rank 1 has inputs that are not finite, from step 4",
        "nan, mgrit, inexact": "RankError: rank 1 has inputs that are not finite, from step 4",
        "nan, deer": "RankError: rank 1 has inputs that are not finite, from step 4",
        "elk": "NotImplementedError: ELK does not run over many ranks.*Use 'auto', 'shooting', 'mgrit'",
        "checks": "NotImplementedError: check_gradient_every",
        "guess": "NotImplementedError: over many ranks there are no guess=",
        "windows": "NotImplementedError: windows follow each other",
        "does not converge": "ConvergenceError",
        "after all": "^$",
        "slow": "^$",
    }
    for answer in answers:
        assert isinstance(answer, dict), answer
        for name, pattern in expected.items():
            assert re.match(pattern, answer[name]), f"{name}: {answer[name]}"


def train(rank: int, how: str) -> str:
    """A training loop in which rank 1 fails; what the others see, and when."""
    mesh = mesh_of((1, RANKS))
    group.SHARE_MEMORY = "by messages" not in how  # as on many machines
    if "in rounds" in how:  # as with many ranks
        group.RING_UP_TO = 1
    net = layer()
    wrapped = TimeParallel(net, mesh, timeout=timedelta(seconds=1.5 if "hangs" in how else 60))
    began = time.monotonic()
    try:
        with time_parallel(mesh):
            for step in range(4):
                y, _ = wrapped(torch.randn(10 + rank, 2, 2))
                if rank == 1 and step == 2:
                    if "dies" in how:
                        os._exit(7)
                    if "hangs" in how:
                        time.sleep(8)
                    raise ValueError("no more data")
                began = time.monotonic()
                sum_over_time(y.square().sum(), mesh).backward()
    except RankError as error:
        return f"{error} [{time.monotonic() - began:.1f} s]"
    except ValueError:
        if how == "raises":
            time.sleep(4)  # still there, with its connections open
        return "raised"
    return "nothing"


@pytest.mark.parametrize(
    ("how", "pattern"),
    [
        ("raises", r"rank 1 stopped with ValueError: no more data \[[012]\.\d s\]"),
        ("dies", r"rank 1 stopped answering: killed, cut off, or hanging; .* \[[2345]\.\d s\]"),
        ("dies by messages", r"rank 1 stopped answering: killed, cut off, or hanging; .* \[[2345]\.\d s\]"),
        ("dies by messages in rounds", r"rank 1 stopped answering: killed, cut off, or hanging; .* \[[2345]\.\d s\]"),
        ("hangs", r"rank 1 stopped answering: .*no answer within 1.5 s \[[3456]\.\d s\]"),
        ("hangs by messages", r"rank 1 stopped answering: .*no answer within 1.5 s \[[3456]\.\d s\]"),
    ],
)
def test_a_rank_that_fails_stops_the_others(how: str, pattern: str) -> None:
    first, second, third = launch(train, RANKS, how)
    assert second == (7 if "dies" in how else "raised")
    for answer in (first, third):
        assert re.fullmatch(pattern, answer), answer


def test_packed_sequences_and_torch_layers_are_refused() -> None:
    with pytest.raises(TypeError, match=r"0 is torch's own GRU.*parallelize"):
        TimeParallel(nn.Sequential(nn.GRU(2, 3)), None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='DeviceMesh with a dimension "time", got NoneType'):
        TimeParallel(layer(), None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='DeviceMesh with a dimension "time", got NoneType'), time_parallel(None):  # type: ignore[arg-type]
        pass


def test_processes_that_no_launcher_started_are_told_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match=r"no launcher has set WORLD_SIZE, .*: start with torchrun"):
        time_mesh(device="cpu")
