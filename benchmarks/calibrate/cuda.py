"""Constants of an NVIDIA GPU; those of concurrent rows are measured by `benchmarks.rows`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from benchmarks import rows
from benchmarks.calibrate.clock import INPUTS, call, largest_gain, newton_gains, seconds, steps_to_gain, swept
from benchmarks.calibrate.constants import measures
from timeloom.auto import cudnn
from timeloom.cells import GenericCell, LayerNormGRU
from timeloom.compile.call import fuse
from timeloom.kernels import ReferenceSweeper, sweeper
from timeloom.kernels.cuda import dense
from timeloom.kernels.cuda.fused import ROWS as ROWS_TOGETHER
from timeloom.kernels.cuda.sweeper import CUDASweeper
from timeloom.problem import Recurrence, cut_evenly

HIDDEN = 32
LONG = 4096


def cudnn_step(units: int, taped: bool, name: str = "GRU", batch: int = 1, half: bool = False) -> float:
    """Microseconds of a step of cuDNN's layer."""
    dtype = torch.float16 if half else torch.float32
    layer = getattr(nn, name)(INPUTS, units, device="cuda", dtype=dtype)
    x = torch.randn(LONG, batch, INPUTS, device="cuda", dtype=dtype)
    return 1e6 * seconds(lambda: call(layer, x, taped), "cuda") / LONG


def _by_units(table: tuple[tuple[int, float, float], ...], taped: bool) -> object:
    found = []
    for units, *_ in table:
        one, many = (cudnn_step(units, taped, batch=batch) for batch in (1, 32))
        row = (many - one) / 31
        found.append((units, round(one - row, 3), round(row, 4)))
    return tuple(found)


@measures("auto/cudnn.STEP", "cuda", "units, µs of a step, and of each sequence in it")
def step() -> object:
    return _by_units(cudnn.STEP, taped=True)


@measures("auto/cudnn.FORWARD_STEP", "cuda", "units, µs of a step, and of each sequence in it")
def forward_step() -> object:
    return _by_units(cudnn.FORWARD_STEP, taped=False)


@measures("auto/cudnn.BY_STEPS", "cuda", "µs, of a GRU of 256 units without gradients")
def by_steps() -> object:
    return round(cudnn_step(256, taped=False), 1)


@measures("auto/cudnn.SHARE", "cuda", "beside a GRU's step, the smallest of 32 and 128 units")
def share() -> object:
    widths = (32, 128)
    grus = {units: cudnn_step(units, taped=True) for units in widths}
    return {
        name: round(min(cudnn_step(units, True, name) / grus[units] for units in widths), 2) for name in cudnn.SHARE
    }


@measures("auto/cudnn.HALF_SHARE", "cuda", "beside float32, the smallest of 32 and 128 units")
def half_share() -> object:
    return round(min(cudnn_step(units, True, half=True) / cudnn_step(units, True) for units in (32, 128)), 2)


@measures(
    "auto/cudnn.LEAST_TIME_OF_REGISTERS", "cuda", "µs of our own calls of 512 steps, a GRU of 32 units: stay beyond"
)
def least_time_of_registers() -> object:
    return tuple(_own_call("GRU", HIDDEN, 1, taped) for taped in (True, False))


@measures("auto/cudnn.LEAST_TIME", "cuda", "µs, the same of an LSTM of 128 units, B=256, with gradients")
def least_time() -> object:
    return _own_call("LSTM", 128, 256, True)


@measures("auto/cudnn.LEAST_FORWARD_TIME", "cuda", "µs, the same without gradients")
def least_forward_time() -> object:
    return _own_call("LSTM", 128, 256, False)


def _own_call(name: str, units: int, batch: int, taped: bool) -> int:
    layer, x = swept(name, units, device="cuda"), torch.randn(512, batch, INPUTS, device="cuda")
    return round(1e6 * seconds(lambda: call(layer, x, taped), "cuda"))


@measures("auto/cudnn.SHORTEST_BY_STEPS", "cuda", "steps of a GRU of 256 units, of one sequence")
def shortest_by_steps() -> object:
    return steps_to_gain("GRU", True, 1, 256, "cuda", least=32)


@measures("auto/cudnn.SHORTEST_IN_TORCH", "cuda", "steps of a GRU in float64, of one sequence")
def shortest_in_torch() -> object:
    return steps_to_gain("GRU", True, 1, HIDDEN, "cuda", torch.float64, 512)


def sweep_step(problem: Recurrence, kind: Callable[[Recurrence], ReferenceSweeper] = sweeper) -> float:
    """Microseconds of a step of a forward sweep over all sequences, each in one chunk."""
    run, segments = kind(problem), cut_evenly(problem.steps, problem.batch, problem.steps, False)
    device = problem.u.device.type
    return 1e6 * seconds(lambda: run.forward(segments, problem.initial, None), device) / problem.steps


@measures("auto/costs.CLUSTER_STEP", "cuda", "µs, forward; 256 units of a GRU, one row")
def cluster_step(device: str = "cuda") -> object:
    return round(sweep_step(rows.problem_of("gru", 256, 1, device)), 2)


@measures("auto/costs.WIDE_STEP", "cuda", "µs, forward; 1,024 units of a GRU, without its rows")
def wide_step(device: str = "cuda") -> object:
    return round(_wide(device, 1024)[0], 1)


@measures(
    "auto/costs.WIDE_ROW", "cuda", "µs of each unit of a row, forward, by itself and times the units; 640 and 1,024"
)
def wide_row(device: str = "cuda") -> object:
    (less, one), (more, other) = ((units, _wide(device, units)[1] / units) for units in (640, 1024))
    squared = (other - one) / (more - less)
    return float(f"{one - squared * less:.2g}"), float(f"{squared:.2g}")


def _wide(device: str, units: int) -> tuple[float, float]:
    """Microseconds of a step by itself, and of each row."""
    few, many = (sweep_step(rows.problem_of("gru", units, count, device)) for count in (64, 256))
    row = (many - few) / (256 - 64)
    return few - 64 * row, row


@measures("auto/costs.BETWEEN_SWEEPS", "cuda", "µs of corrections and of each chunk in their chain; a GRU of 64 units")
def between_sweeps() -> object:
    problem = rows.problem_of("gru", 64, 1)
    run, found = CUDASweeper(problem), []
    for links in (64, 1024):
        starts, ends, decay = torch.rand(3, links, 64, device="cuda").unbind(0)
        found.append(1e6 * seconds(lambda: run.correct(starts, ends, decay, True), "cuda"))  # noqa: B023
    each = (found[1] - found[0]) / (1024 - 64)
    return round(found[0] - 64 * each, 1), round(each, 3)


@measures("auto/costs.DENSE_LINK", "cuda", "µs, of 64 numbers")
def dense_link() -> object:
    found = []
    for links in (64, 256):
        matrices, offsets = torch.randn(links * 64, 64, device="cuda") / 8, torch.randn(links, 64, device="cuda")
        found.append(1e6 * seconds(lambda: dense.chain(matrices, offsets, None, 1), "cuda"))  # noqa: B023
    return round((found[1] - found[0]) / (256 - 64), 2)


@measures("auto/costs.FOUR_ROWS", "cuda", "forward; a LayerNorm GRU of 64 units")
def four_rows(device: str = "cuda") -> object:
    return round(_generated(ROWS_TOGETHER, device) / _generated(1, device), 2)


@measures("auto/costs.SHARED_BLOCK", "cuda", "forward; a LayerNorm GRU of 64 units")
def shared_block(device: str = "cuda") -> object:
    return round(_generated(2 * ROWS_TOGETHER, device) / _generated(ROWS_TOGETHER, device) - 1, 2)


def _generated(each: int, device: str) -> float:
    """Microseconds of a step of generated kernels, with `each` rows on each multiprocessor."""
    count = each * (torch.cuda.get_device_properties(0).multi_processor_count if device == "cuda" else 2)
    cell, x = LayerNormGRU(INPUTS, 64).to(device), torch.randn(1024, count, INPUTS, device=device)
    state = torch.zeros(count, 64, device=device)
    generic = GenericCell(cell, state, x.shape[2:])
    with torch.no_grad():
        fused = fuse(generic, Recurrence(generic, x, state), x)
    if isinstance(fused, str):
        raise RuntimeError(f"no kernels: {fused}")
    return sweep_step(fused.detach())


@measures("auto/costs.TORCH_STEP_ON_GPU", "cuda", "a GRU's row of 32 units costs 0.38 here, as on a CPU; forward")
def torch_step_on_gpu(device: str = "cuda") -> object:
    few, many = (sweep_step(rows.problem_of("gru", HIDDEN, count, device), ReferenceSweeper) for count in (1, 4096))
    row = (many - few) / 4095
    return round(few / row * 0.38)


@measures("auto/costs.NEWTON_UP_TO_ON_GPU", "cuda", "units of a GRU with update-gate bias +6, T=2,048, in float64")
def newton_up_to_on_gpu() -> object:
    return largest_gain((4, 8, 16, 32, 64, 128), lambda size: newton_gains(size, "cuda"))
