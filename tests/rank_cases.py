"""Results of ranks compared with those of one process: cases that the processes of `test_ranks` run."""

from __future__ import annotations

import copy
import traceback
import zlib
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import zoo
from rank_processes import mesh_of, takes_part
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import timeloom as tl
from timeloom.compile import remember
from timeloom.distributed import (
    TimeParallel,
    Traffic,
    average_gradients,
    group,
    last_over_time,
    mean_over_time,
    multigrid,
    shard,
    shared_memory,
    slice_of,
    sum_over_time,
    time_parallel,
    traffic,
)
from timeloom.distributed.mesh import group_of
from timeloom.solvers import DEER, MGRIT, Auto, Jacobi, Picard, QuasiDEER, Sequential, Shooting, Solver

D, H, B = 3, 5, 3
Case = Callable[[DeviceMesh], None]

SOLVERS: dict[str, Solver] = {
    "none": Shooting(chunk=5, correction="none"),
    "diag": Shooting(chunk=4, correction="diag", warmup=3),
    "newton": Shooting(chunk=7, correction="newton"),
    "secant": Shooting(chunk=4, correction="secant", warmup=3),
    "lowrank": Shooting(chunk=4, correction="lowrank", rank=2),
    "one chunk a rank": Shooting(chunk=1000, correction="diag", warmup=2),
    "auto": Auto(),
    "sequential": Sequential(),
    "gives up": Shooting(chunk=4, correction="none", max_iters=1),
    "sequential adjoint": Shooting(chunk=4, adjoint="sequential"),
    "scan adjoint": Shooting(chunk=4, adjoint="scan"),
    "scan adjoint, all levels": Shooting(chunk=4, adjoint="scan", adjoint_levels=20),
    "mgrit": MGRIT(),
    "mgrit, F": MGRIT(coarsening=3, cycle="F", guess="nested"),
    "mgrit, in order": MGRIT(coarsening=(2, 2), coarse_inputs="inject", relaxation=("F", "FCFCF"), weight=0.9),
    "mgrit, comes up": MGRIT(coarsening=2, skip_down=True),
    "mgrit adjoint": Shooting(chunk=4, adjoint="mgrit"),
    "deer": DEER(),
    "quasi-deer": QuasiDEER(max_iters=60),
    "picard": Picard(max_iters=60),
    "jacobi": Jacobi(max_iters=60),
}


class Model(nn.Module):
    """A layer between two others, a learned initial state, and a head on the final state."""

    def __init__(self, kind: str, solver: Solver, **options: Any) -> None:
        super().__init__()
        self.encoder = nn.Linear(D, D)
        self.layer = getattr(tl, kind)(D, H, solver=solver, **options)
        both = 2 if self.layer.bidirectional else 1
        self.start = nn.Parameter(0.3 * torch.randn(self.layer.num_layers * both, 1, H))
        self.decoder, self.head = nn.Linear(H * both, 2), nn.Linear(H, 2)

    def forward(self, x: Tensor, h0: Tensor | None = None, **ragged: Tensor) -> tuple[Tensor, Tensor]:
        start = self.start.expand(-1, B, -1) + (0 if h0 is None else h0)
        hx = (start, start.tanh()) if isinstance(self.layer, nn.LSTM) else start
        y, final = self.layer(torch.tanh(self.encoder(x)), hx, **ragged)
        final = torch.cat(final, -1)[..., H:] if isinstance(final, tuple) else final
        return self.decoder(y), self.head(final).sum(0)


def results(
    model: Model, x: Tensor, h0: Tensor | None, mesh: DeviceMesh | None, ragged: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Outputs, loss and all gradients; with a mesh, of this rank's slice of x."""
    net: Any = model if mesh is None else TimeParallel(model, mesh)
    x, h0 = x.clone().requires_grad_(), None if h0 is None else h0.clone().requires_grad_()
    model.zero_grad()
    y, score = net(x, h0, **ragged)
    last, mean = (y[-1], y.square().mean(0)) if mesh is None else (
        last_over_time(y, mesh), mean_over_time(y.square(), mesh)
    )  # fmt: skip
    loss = mean.sum() + score.pow(3).sum() + (last * last.detach().cos()).sum()
    loss.backward()
    found = {"y": y, "score": score, "loss": loss, "last": last, "grad x": x.grad}
    found |= {} if h0 is None else {"grad h0": h0.grad}
    return found | {f"grad {name}": value.grad for name, value in model.named_parameters()}


def compare(
    kind: str,
    solver: Solver,
    mesh: DeviceMesh,
    steps: int = 43,
    ragged: str = "",
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-12,
    regime: tuple[float, float] = (0.0, 1.0),
    again: int = 1,
    same: bool = False,
    **options: Any,
) -> Model:
    """Ranks against one process by torch's own layer (by our own sweeps for ragged sequences), in float64.

    same: compare with one process by the same solver instead, reports too.
    """
    torch.manual_seed(0)
    model = Model(kind, solver, **options).double()
    with torch.no_grad():
        for name, weight in model.layer.named_parameters():
            if "weight_hh" in name:
                weight *= regime[1]
            if "bias_ih" in name and kind != "RNN":
                weight[H : 2 * H] += regime[0]
    x, h0 = torch.randn(steps, B, D, dtype=torch.float64), torch.randn(1, B, H, dtype=torch.float64)
    marks: dict[str, Tensor] = {}
    if "lengths" in ragged:
        marks["lengths"] = torch.tensor([steps, steps // 3, 0 if "zero" in ragged else 2])
    if "resets" in ragged:
        marks["resets"] = torch.rand(steps, B) < 0.1
        marks["resets"][steps // 2 :, 0] = True
    truth = copy.deepcopy(model)
    if not same:
        truth.layer.solver = Sequential() if not ragged else Shooting(chunk=steps)
    expected = results(truth, x, h0, None, marks)
    model.to(dtype)
    local = dict(marks)
    if "resets" in marks:
        local["resets"] = shard(marks["resets"], mesh)
    for _ in range(again):
        found = results(model, shard(x, mesh).to(dtype), h0.to(dtype), mesh, local)
    mine = slice_of(steps, mesh)
    for name, value in found.items():
        whole = expected[name].detach()
        wanted = whole[mine] if name in ("y", "grad x") else whole
        error = float((value.detach().double() - wanted).abs().max() / whole.abs().max())
        assert error <= tolerance, f"{name} is off by {error:.1e}: {model.layer.reports}"
    for ours, theirs in zip(model.layer.reports, truth.layer.reports, strict=True) if same else ():
        for mine, one in ((ours, theirs), (ours.backward, theirs.backward)):
            assert (mine.iterations, mine.fell_back) == (one.iterations, one.fell_back), (mine, one)
    return model


def layers(kind: str, solver: str, **more: Any) -> Case:
    def case(mesh: DeviceMesh) -> None:
        model = compare(kind, SOLVERS[solver], mesh, **more)
        for report in model.layer.reports:
            backward = report.backward or report
            assert solver == "gives up" or not (report.fell_back or backward.fell_back), report
            if "scan" in solver and mesh["time"].size() > 1:
                assert backward.iterations <= 2, backward  # linear: one correction is exact

    return case


def gives_up_exactly(mesh: DeviceMesh) -> None:
    """Chaos: no sweep contracts; the fallback is exact, and auto does not sweep again afterwards."""
    model = compare("GRU", Auto(), mesh, steps=60, regime=(0.0, 8.0), tolerance=1e-9)
    if mesh["time"].size() > 2:
        assert model.layer.reports[0].fell_back or model.layer.reports[0].iterations > 1
    hard = Shooting(chunk=3, correction="none", max_iters=2)
    model = compare("GRU", hard, mesh, steps=60, regime=(6.0, 1.0))
    if mesh["time"].size() > 1:
        assert model.layer.reports[0].fell_back
        assert model.layer.reports[0].backward.fell_back


def float32(mesh: DeviceMesh) -> None:
    """Compiled sweeps, many calls on one module: what auto learns stays the same on all ranks."""
    for kind in ("GRU", "LSTM", "RNN"):
        model = compare(kind, Auto(), mesh, steps=401, dtype=torch.float32, tolerance=1e-5, again=3)
        assert model.layer.reports[0].converged
    model = compare("GRU", Auto(), mesh, steps=801, dtype=torch.float32, tolerance=1e-5, again=3, num_layers=2)
    if mesh["time"].size() > 1:
        for report in (model.layer.reports[1], model.layer.reports[1].backward):
            assert report.iterations == 1, report
            assert "[none] over" in report.solver, report  # by the express lane


def float32_solvers(mesh: DeviceMesh) -> None:
    """Compiled sweeps inside ranks, by every kind of solver, with long memory too."""
    single = {"dtype": torch.float32, "steps": 201, "again": 2}
    for regime, tolerance in (((0.0, 1.0), 1e-5), ((3.0, 1.0), 1e-4)):
        for solver in (MGRIT(), MGRIT(coarsening=16, guess="nested"), DEER(), Shooting(chunk=20, adjoint="scan")):
            model = compare("GRU", solver, mesh, regime=regime, tolerance=tolerance, **single)
            report = model.layer.reports[0]
            assert not report.fell_back, report
            assert not report.backward.fell_back, report
            if solver.adjoint == "scan" and mesh["time"].size() > 1:
                assert "scan of slices" in report.backward.solver
                assert report.backward.iterations <= 3, report.backward  # the third mends what rounding left
    compare("LSTM", Shooting(chunk=20, adjoint="scan"), mesh, tolerance=1e-5, bidirectional=True, **single)


def misses_the_express_lane(mesh: DeviceMesh) -> None:
    """Long memory in float32: one sweep is not certified, and the general driver continues."""
    model = compare("GRU", Auto(), mesh, steps=401, dtype=torch.float32, tolerance=2e-5, regime=(4.0, 1.0))
    if mesh["time"].size() > 1:
        assert model.layer.reports[0].iterations > 1
    compare("LSTM", Auto(), mesh, steps=401, dtype=torch.float32, tolerance=2e-5, regime=(4.0, 1.0), again=3)
    both_ways = {"bidirectional": True, "dtype": torch.float32, "tolerance": 2e-5}
    compare("GRU", Shooting(chunk=30, warmup=40), mesh, steps=401, regime=(2.0, 1.0), **both_ways)


def converges_as_one_process(mesh: DeviceMesh) -> None:
    """The corrections cross ranks: long memory takes as few sweeps as on one process."""
    for correction, most in (("diag", 14), ("secant", 14), ("lowrank", 8), ("newton", 6)):
        solver = Shooting(chunk=4, correction=correction, warmup=0, tol=1e-10)
        model = compare("GRU", solver, mesh, steps=16 * mesh["time"].size(), regime=(4.0, 1.0), tolerance=1e-6)
        assert not model.layer.reports[0].fell_back
        assert model.layer.reports[0].iterations <= most, model.layer.reports[0]


def cycles_as_one_process(mesh: DeviceMesh) -> None:
    """Slices of whole coarse intervals: the same grids, so the same iterates, converged or not."""
    long_memory = {"steps": 384, "regime": (3.0, 1.0), "same": True}
    for kind in ("ImplicitGRU", "GRU"):
        compare(kind, MGRIT.paper(), mesh, **long_memory)
    for options in ({"cycle": "F"}, {"weight": 0.8, "relaxation": ("F", "FCF")}):
        fixed = MGRIT(levels=3, coarsening=4, guess="initial", cycles=2, backward_cycles=2, tol=1e-15, **options)
        compare("GRU", replace(fixed, on_divergence="ignore"), mesh, **long_memory)
    compare("LSTM", MGRIT(levels=3, coarsening=4, guess="nested", tol=1e-9), mesh, **long_memory, tolerance=1e-7)
    ragged = MGRIT(levels=3, coarsening=4, cycles=1, backward_cycles=1, skip_down=True, on_divergence="ignore")
    compare("GRU", ragged, mesh, **long_memory, ragged="lengths resets")


def levels_of_all_ranks(mesh: DeviceMesh) -> None:
    """Beyond so many ranks the level that all of them take over is coarsened, too."""
    before, multigrid.COARSEST = multigrid.COARSEST, 4
    try:
        solver, hard = MGRIT(coarsening=4, cycle="F", guess="nested"), {"steps": 60, "regime": (3.0, 1.0)}
        model = compare("GRU", solver, mesh, ragged="lengths", bidirectional=True, **hard)
        assert not model.layer.reports[0].fell_back, model.layer.reports
    finally:
        multigrid.COARSEST = before


def many_ranks_gather_in_rounds(mesh: DeviceMesh) -> None:
    """With more ranks, exchanges double what is known in every round instead of using a ring."""
    before, group.RING_UP_TO, group.SHARE_MEMORY = group.RING_UP_TO, 1, False
    try:
        ranks, own = group_of(mesh), torch.full((2, 3), float(mesh.get_local_rank("time")), dtype=torch.float64)
        for dtype in (torch.float64, torch.int64, torch.uint8):
            gathered = ranks.gather(own.to(dtype).t())
            assert gathered.shape == (ranks.size, 3, 2)
            assert gathered[:, 2, 1].tolist() == list(range(ranks.size))
        assert ranks.sum(own)[0, 0] == sum(range(ranks.size))
        compare("LSTM", SOLVERS["diag"], mesh, bidirectional=True, ragged="lengths resets")
        compare("GRU", SOLVERS["mgrit, in order"], mesh)
    finally:
        group.RING_UP_TO, group.SHARE_MEMORY = before, True


def ranks_of_many_machines_send_messages(mesh: DeviceMesh) -> None:
    """Without memory that all ranks share, exchanges use torch's collectives."""
    group.SHARE_MEMORY = False
    try:
        compare("GRU", SOLVERS["newton"], mesh, ragged="lengths")
        compare("RNN", SOLVERS["mgrit, in order"], mesh)
    finally:
        group.SHARE_MEMORY = True


def memory_carries_any_tensor(mesh: DeviceMesh) -> None:
    """Exchanges of any dtype and size, smaller and larger than slots; sums are those of messages."""
    ranks, place = group_of(mesh), mesh.get_local_rank("time")
    for numbers in (1, 7, 1024, shared_memory.SLOT // 8, shared_memory.SLOT // 8 + 1, shared_memory.SLOT):
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
            own = torch.arange(numbers).add(place).remainder(2 if dtype == torch.bool else 100).to(dtype)
            heard = ranks.gather(own)
            assert heard.dtype == dtype
            for rank, row in enumerate(heard):
                assert row.equal(torch.arange(numbers).add(rank).remainder(2 if dtype == torch.bool else 100).to(dtype))
        own = torch.randn(numbers, dtype=torch.float64, generator=torch.Generator().manual_seed(place))
        everyone = [torch.randn(numbers, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
                    for rank in range(ranks.size)]  # fmt: skip
        assert torch.allclose(ranks.sum(own), torch.stack(everyone).sum(0), rtol=0, atol=1e-13)
    assert ranks.gather(torch.zeros(0, 3)).shape == (ranks.size, 0, 3)
    assert ranks.sum(torch.full((2, 3), 1.0).t()).equal(torch.full((3, 2), float(ranks.size)))
    assert (ranks._memory is not None) == (shared_memory.possible() and ranks.size > 1)


def any_cell(mesh: DeviceMesh) -> None:
    """`unroll` of cells that only autograd can differentiate."""
    pairs = {"module": "none", "elementwise": "diag", "function of tuple": "newton", "function": "auto"}
    more = {"module": "mgrit, F", "function": "deer", "function of tuple": "scan adjoint, all levels"}
    for name, solver in (*pairs.items(), *more.items()):
        net = zoo.network(name)
        x, initial = zoo.data(net, 29, 2)
        cell = net.recurrence(x, initial).cell
        states, _ = zoo.truth(net, x, initial)
        expected = torch.autograd.grad(states.square().sum(), [x, initial, *net.parameters.values()])
        local = shard(x.detach(), mesh).requires_grad_()
        with time_parallel(mesh):
            found, report = tl.unroll(cell.function, cell.unpack(initial), local, solver=SOLVERS[solver])
        flat = torch.cat([part.flatten(2) for part in (found if isinstance(found, tuple) else (found,))], -1)
        loss = sum_over_time(flat.square().sum(), mesh)
        mine, ranks = slice_of(29, mesh), mesh["time"].size()
        assert zoo.difference(flat, states[mine]) < 1e-12, report
        grads = torch.autograd.grad(loss, [local, initial, *net.parameters.values()])
        assert zoo.difference(grads[0] / ranks, expected[0][mine]) < 1e-12
        for grad, wanted in zip(grads[1:], expected[1:], strict=True):
            total = sum_over_time(grad, mesh) / ranks
            assert zoo.difference(total, wanted) < 1e-12, name


def generated_kernels(mesh: DeviceMesh) -> None:
    """Slices long enough for kernels to be made for their cell, which save a tape for the backward pass."""
    steps = (remember.FEWEST_STEPS + 7) * mesh["time"].size()
    try:
        compare("ImplicitGRU", MGRIT(), mesh, steps=steps)
        compare("ImplicitGRU", Shooting(chunk=100, warmup=3), mesh, steps=steps, ragged="resets")
        compare("ImplicitGRU", Shooting(chunk=100, correction="none", max_iters=1), mesh, steps=steps, ragged="lengths")
        remember._kept.clear()
        uneven = (remember.FEWEST_STEPS - 1) * mesh[
            "time"
        ].size() + 1  # long enough for kernels on the first rank alone
        compare("ImplicitGRU", MGRIT(guess="initial"), mesh, steps=uneven, regime=(4.0, 1.0))
        compare("ImplicitGRU", MGRIT.paper(), mesh, steps=48 * 12, regime=(3.0, 1.0), same=True)
    finally:
        remember._kept.clear()  # ranks that were not here have no kernels, and inexact solves would tell them apart


def few_bytes(mesh: DeviceMesh) -> None:
    """Traffic does not grow with T: per iteration one exchange of O(B n), or O(B n²) with dense transfers."""
    ranks = mesh["time"].size()
    dense = 3 * H + H * H + 3
    widths = {"none": 2 * H + 3, "diag": 4 * H + 3, "secant": dense, "lowrank": dense, "newton": dense}
    for correction, width in widths.items():
        for steps in (40, 400) if ranks > 1 else ():
            solver = Shooting(chunk=steps, correction=correction, warmup=0, max_iters=50)
            (forward, backward), report = sent(solver, steps, mesh)
            agreeing, lone = 80, 8 * B * H  # at the beginning; the final state's gradient, which ranks add up
            assert forward.collectives == 1 + report.iterations
            assert forward.bytes == agreeing + 8 * B * width * report.iterations
            assert backward.collectives == 1 + report.backward.iterations
            assert backward.bytes == lone + 8 * B * (width + 2) * report.backward.iterations


def few_bytes_a_cycle(mesh: DeviceMesh) -> None:
    """Multigrid sends a few states for each level and cycle, and has more levels for longer sequences, no more."""
    for steps in (300, 3000) if mesh["time"].size() > 1 else ():
        solver = MGRIT(coarsening=4, guess="initial", cycles=2, backward_cycles=2, tol=1e-15, on_divergence="ignore")
        (forward, _), report = sent(solver, steps, mesh)
        levels = len(report.levels[-1]) + 1  # the coarsest, which leaves nothing, is not in the report
        sweeps = 6  # first, C, correction, C, correction, and the last C-relaxation
        exchanges = 2 * (1 + 2 * (levels - 2) + 1)  # down from the fine level, two on each between, one at the last
        gathered = 4  # what the ranks' coarsest level is made of, once
        assert forward.messages == 0
        assert forward.collectives == 1 + sweeps + exchanges + gathered, (forward, levels)
        assert forward.bytes <= 80 + 8 * B * (2 * H + 3) * (sweeps + exchanges) + 8 * B * 6 * H


def sent(solver: Solver, steps: int, mesh: DeviceMesh) -> tuple[tuple[Traffic, Traffic], tl.SolveReport]:
    """The traffic of a forward and a backward pass of one layer."""
    torch.manual_seed(0)
    layer = tl.GRU(D, H, solver=solver).double()
    x, before = shard(torch.randn(steps, B, D, dtype=torch.float64), mesh), traffic(mesh)
    with time_parallel(mesh):
        y, _ = layer(x)
    between = traffic(mesh)
    y.square().sum().backward()
    return (between.since(before), traffic(mesh).since(between)), layer.reports[0]


def beyond_the_layer(mesh: DeviceMesh) -> None:
    """Without a wrapper: gradients averaged by hand, twice in a row; and evaluation without gradients."""
    torch.manual_seed(0)
    model = Model("GRU", Auto()).double()
    x = torch.randn(21, B, D, dtype=torch.float64)
    for _ in range(2):
        model.zero_grad()
        y, score = model(x)
        (y.square().mean(0).sum() + score.sum()).backward()
        expected = {name: value.grad.clone() for name, value in model.named_parameters()}
        model.zero_grad()
        with time_parallel(mesh):
            local, final = model(shard(x, mesh))
            (mean_over_time(local.square(), mesh).sum() + final.sum()).backward()
        average_gradients(model, mesh)
        for name, value in model.named_parameters():
            assert zoo.difference(value.grad, expected[name]) < 1e-12, name
    with torch.no_grad():
        local, final = TimeParallel(model, mesh)(shard(x, mesh))
    assert not local.requires_grad
    assert zoo.difference(local, y[slice_of(21, mesh)]) < 1e-12
    assert zoo.difference(final, score) < 1e-12


def begins_alike(mesh: DeviceMesh) -> None:
    """Weights and buffers initialised differently by ranks become the first one's, as under DistributedDataParallel."""
    torch.manual_seed(mesh.get_local_rank("time"))
    model = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, 1).double())
    model.register_buffer("chosen", torch.rand(9) < 0.5)
    model[1].num_batches_tracked += mesh.get_local_rank("time")
    own = [value.clone() for value in model.state_dict().values()]
    ranks = group_of(mesh)
    firsts = [ranks.gather(value.to(torch.float64))[0] for value in own]
    TimeParallel(model, mesh)
    for found, first in zip(model.state_dict().values(), firsts, strict=True):
        assert torch.equal(found.to(torch.float64), first)


def forgets_together(mesh: DeviceMesh) -> None:
    """If a rank has not seen the calls that the others have, all of them learn anew, and continue."""
    torch.manual_seed(0)
    layer, x = tl.GRU(D, H).double(), torch.randn(40, B, D, dtype=torch.float64)
    wanted, known = layer(x)[0], group_of(mesh).experiences(layer)
    for call in range(3):
        if call == 2 and mesh.get_local_rank("time") == 1:
            known.clear()
        with time_parallel(mesh):
            found, _ = layer(shard(x, mesh))
        assert zoo.difference(found, wanted[slice_of(40, mesh)]) < 1e-12
        assert len(group_of(mesh).gather(torch.tensor(zlib.crc32(repr(known).encode()))).unique()) == 1


class Nested(nn.Module):
    """A module that takes its initial state nested in another object."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = tl.LSTM(D, H)

    def forward(self, x: Tensor, state: Any) -> Tensor:
        h, c = state["of"][0] if isinstance(state, dict) else state
        y, _ = self.layer(x, (h, c))
        return y


def nested_arguments(mesh: DeviceMesh) -> None:
    """Gradients of arguments in tuples, lists and dicts."""
    torch.manual_seed(0)
    model, x = Nested().double(), torch.randn(20, B, D, dtype=torch.float64)
    parts = [torch.randn(1, B, H, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    wanted = torch.autograd.grad(model(x, parts).square().mean(0).sum(), parts)
    for state in (tuple(parts), parts, {"of": [parts]}):
        y = TimeParallel(model, mesh)(shard(x, mesh), state)
        found = torch.autograd.grad(mean_over_time(y.square(), mesh).sum(), parts)
        assert all(zoo.difference(*pair) < 1e-12 for pair in zip(found, wanted, strict=True)), type(state)


class Checkpointed(nn.Module):
    """A module that runs its forward pass again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = tl.GRU(D, H)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda u: self.layer(u)[0], x, use_reentrant=False)
        return y


def checkpoints(mesh: DeviceMesh) -> None:
    """A forward pass rerun in a backward pass uses the same ranks as before, or only this process if it did before."""
    for steps, dtype, tolerance in ((2001, torch.float32, 1e-5), (40, torch.float64, 1e-12)):
        torch.manual_seed(0)
        model = Checkpointed().to(dtype)
        with torch.no_grad():
            model.layer.bias_ih_l0[H : 2 * H] += 3  # the start of a slice matters for long
        x = torch.randn(steps, B, D, dtype=dtype, requires_grad=True)
        y, _ = model.layer(x)
        wanted = torch.autograd.grad(y.square().mean(0).sum(), list(model.parameters()))
        for ranks in (True, False, True):
            model.zero_grad()
            local = shard(x, mesh).detach().requires_grad_() if ranks else x
            y = (TimeParallel(model, mesh) if ranks else model)(local)
            mean = mean_over_time(y.square(), mesh) if ranks else y.square().mean(0)
            mean.sum().backward()
            for value, grad in zip(model.parameters(), wanted, strict=True):
                assert zoo.difference(value.grad, grad) < tolerance, (steps, ranks)


def other_times(mesh: DeviceMesh) -> None:
    """Ranks do not share the time of a differential equation."""
    times, y0 = torch.linspace(0, 1, 9, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)
    with time_parallel(mesh):
        found = tl.odeint(lambda t, y: -y, y0, times, solver="sequential")
    assert zoo.difference(found, (-times).exp().view(-1, 1, 1).expand(-1, 2, 1)) < 1e-5


CASES: dict[str, Case] = {
    **{f"GRU, {name}": layers("GRU", name) for name in SOLVERS},
    **{f"LSTM, {name}": layers("LSTM", name) for name in ("diag", "newton", "auto", "gives up", "mgrit", "quasi-deer")},
    **{f"RNN, {name}": layers("RNN", name) for name in ("none", "diag", "auto", "deer")},
    **{
        f"{name}, both ways, ragged": layers(
            "GRU", name, bidirectional=True, num_layers=2, ragged="zero lengths resets", tolerance=1e-11
        )
        for name in ("mgrit, in order", "mgrit, comes up", "deer", "scan adjoint, all levels")
    },
    **{
        f"{name}, both ways, lengths": layers("GRU", name, bidirectional=True, ragged="lengths", tolerance=1e-11)
        for name in ("none", "mgrit, in order", "mgrit, F", "scan adjoint", "scan adjoint, all levels")
    },
    "two layers both ways": layers("GRU", "diag", num_layers=2, bidirectional=True),
    "LSTM both ways, ragged": layers("LSTM", "diag", bidirectional=True, ragged="lengths resets"),
    "GRU both ways, ragged": layers("GRU", "newton", bidirectional=True, num_layers=2, ragged="zero lengths resets"),
    "ragged, sequential": layers("GRU", "sequential", bidirectional=True, ragged="zero lengths resets"),
    "ragged, gives up": layers("GRU", "gives up", bidirectional=True, ragged="zero lengths resets"),
    "ragged, one chunk a rank": layers("LSTM", "one chunk a rank", ragged="lengths"),
    "resets": layers("GRU", "diag", ragged="resets"),
    "one step a rank": layers("GRU", "diag", steps=8),
    "one step a rank, auto": layers("LSTM", "auto", steps=8, bidirectional=True),
    "one step a rank, mgrit": layers("GRU", "mgrit, F", steps=8),
    "one step a rank, deer": layers("GRU", "deer", steps=8),
    "long memory": layers("GRU", "diag", regime=(4.0, 1.0), steps=61),
    "gives up exactly": gives_up_exactly,
    "float32": float32,
    "float32, all solvers": float32_solvers,
    "misses the express lane": misses_the_express_lane,
    "converges as one process": converges_as_one_process,
    "cycles as one process": cycles_as_one_process,
    "many ranks gather in rounds": many_ranks_gather_in_rounds,
    "messages": ranks_of_many_machines_send_messages,
    "shared memory": memory_carries_any_tensor,
    "any cell": any_cell,
    "generated kernels": generated_kernels,
    "few bytes": few_bytes,
    "few bytes a cycle": few_bytes_a_cycle,
    "beyond the layer": beyond_the_layer,
    "begins alike": begins_alike,
    "forgets together": forgets_together,
    "nested arguments": nested_arguments,
    "checkpoints": checkpoints,
    "other times": other_times,
}


def weights_after_two_steps(train: Callable[[Model, list[Tensor]], None]) -> list[Tensor]:
    """A model's parameters, trained on two batches of four sequences that are the same on all ranks."""
    torch.manual_seed(0)
    model = Model("GRU", Shooting(chunk=4), num_layers=2).double()
    train(model, list(torch.randn(2, 23, 2 * B, D, dtype=torch.float64)))
    return [value.full_tensor() if hasattr(value, "full_tensor") else value for value in model.parameters()]


def steps_of(net: Callable[..., Any], model: nn.Module, batches: list[Tensor], mesh: DeviceMesh | None) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.3)
    for x in batches:
        optimiser.zero_grad()
        for half in x.chunk(2, 1) if mesh is None else [shard(x.chunk(2, 1)[mesh.get_local_rank("data")], mesh)]:
            y, score = net(half)
            mean = y.square().mean(0) if mesh is None else mean_over_time(y.square(), mesh)
            loss = mean.sum() + score.pow(3).sum()
            (loss / 2 if mesh is None else loss).backward()
        if not isinstance(net, TimeParallel | nn.parallel.DistributedDataParallel) and mesh is not None:
            average_gradients(model, mesh)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert norm > 1  # so that the clipping is seen
        optimiser.step()


def one_process(model: Model, batches: list[Tensor]) -> None:
    steps_of(model, model, batches, None)


def with_ddp(mesh: DeviceMesh) -> None:
    """DistributedDataParallel over the data dimension."""

    def train(model: Model, batches: list[Tensor]) -> None:
        wrapped = nn.parallel.DistributedDataParallel(TimeParallel(model, mesh), process_group=mesh.get_group("data"))
        steps_of(wrapped, model, batches, mesh)

    for found, wanted in zip(weights_after_two_steps(train), weights_after_two_steps(one_process), strict=True):
        assert zoo.difference(found, wanted) < 1e-11


def with_fsdp(mesh: DeviceMesh) -> None:
    """`fully_shard` over the data dimension."""

    def train(model: Model, batches: list[Tensor]) -> None:
        fully_shard(model, mesh=mesh["data"])

        def call(x: Tensor) -> Any:
            with time_parallel(mesh):
                return model(x)

        steps_of(call, model, batches, mesh)

    for found, wanted in zip(weights_after_two_steps(train), weights_after_two_steps(one_process), strict=True):
        assert zoo.difference(found, wanted) < 1e-11


DATA_CASES: dict[str, Case] = {"DDP": with_ddp, "FSDP": with_fsdp}
SLOW = ("float32, all solvers", "any cell", "generated kernels", "messages")
FEW = (
    *(f"GRU, {name}" for name in ("none", "newton", "auto", "sequential", "gives up", "scan adjoint", "mgrit", "deer")),
    *("LSTM both ways, ragged", "ragged, gives up", "one step a rank", "cycles as one process"),
    "converges as one process",
)
few = {name: CASES[name] for name in FEW}
many = {
    "levels of all ranks": levels_of_all_ranks,
    "gather in rounds": many_ranks_gather_in_rounds,
    "shared memory": memory_carries_any_tensor,
}
MESHES: dict[tuple[int, int], dict[str, Case]] = {
    (1, 1): few,
    (1, 2): CASES,
    (1, 3): {name: case for name, case in CASES.items() if name not in SLOW},
    (1, 4): few,
    (1, 8): few | many,
    (2, 2): DATA_CASES,
}


def run_all(rank: int) -> dict[tuple[str, tuple[int, int]], str]:
    """The error ("" if none) by case and mesh in which this rank takes part; run by eight processes."""
    found: dict[tuple[str, tuple[int, int]], str] = {}
    for shape, cases in MESHES.items():
        mesh = mesh_of(shape)
        try:
            dist.barrier()  # those that had nothing to do must not wait in the first case of this mesh
        except RuntimeError:
            return found  # a rank has failed
        for name, case in cases.items() if takes_part(mesh) else ():
            ranks = group_of(mesh, timedelta(seconds=60))
            try:
                case(mesh)
                found[name, shape] = ""
            except Exception as error:
                found[name, shape] = traceback.format_exc()
                ranks.stopped(error)  # the others may be waiting for this rank
                return found
    return found
