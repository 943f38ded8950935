"""How the tables of the pieces look, and what is said above them."""

from __future__ import annotations

from benchmarks.gpu import table
from benchmarks.gpu.table import Column, milliseconds, number, ratio, words

NOTE = (
    "Forward + backward of one layer, float32 with tf32 products in both (torch's default) unless half precision is "
    "named. Milliseconds are medians of CUDA-event times taken in turns, the fastest in brackets; `graph` replays "
    "the same training step from a CUDA graph, ratios are over cuDNN's eager step. Ratios in bold: below the goal "
    "(in a graph) or below 0.95 (eager). Errors: the largest of outputs and all gradients, relative to the tensor's "
    "largest value, against float64; in bold: beyond twice cuDNN's own. MiB: peaks of a step. Floor: "
    "the larger of the bytes that any method must move over the bandwidth of a copy, and the steps that the sweeps "
    "take one after the other at the time of one step of a lone chunk (`benchmarks/gpu/floor.py`); `× floor` is the "
    "best time over it. Chunk and warm-up: of the forward pass."
)
FORWARD_COLUMNS = (
    Column("case", words("case"), left=True),
    Column("cuDNN ms", milliseconds("cudnn_forward")),
    Column("timeloom ms", milliseconds("timeloom_forward")),
    Column("ratio", ratio("forward_ratio")),
    Column("graph ms", milliseconds("graph_forward")),
    Column("ratio", ratio("forward_graph_ratio")),
)
TIMES = (
    Column("case", words("case"), left=True),
    Column("cuDNN ms", milliseconds("cudnn")),
    Column("timeloom ms", milliseconds("timeloom")),
    Column("ratio", ratio("ratio")),
)
COLUMNS = (
    *TIMES,
    Column("graph ms", milliseconds("graph")),
    Column("ratio", ratio("graph_ratio", goal=True)),
    Column("goal", number("goal", "g")),
    Column("cuDNN error", number("cudnn_error", ".1e")),
    Column("error", table.error),
    Column("MiB: ours / cuDNN's", table.memory),
    Column("chunk", number("chunk", "d")),
    Column("warm-up", number("warmup", "d")),
    Column("sweeps", table.sweeps),
    Column("floor ms", number("floor_ms", ".3g")),
    Column("× floor", number("over_floor", ".1f")),
    Column("notes", table.notes, left=True),
)
GRID_COLUMNS = (
    *TIMES[:-1],
    Column("ratio", ratio("ratio", goal=True)),
    Column("cuDNN error", number("cudnn_error", ".1e")),
    Column("error", table.error),
    Column("chunk", number("chunk", "d")),
    Column("sweeps", table.sweeps),
    Column("notes", table.notes, left=True),
)
CONTENDER_COLUMNS = (
    Column("case", words("case"), left=True),
    Column("who", words("contender"), left=True),
    Column("forward ms", milliseconds("forward")),
    Column("forward + backward ms", milliseconds("both")),
    Column("in a graph ms", milliseconds("graph")),
    Column("error", number("error_to_float64", ".1e")),
    Column("peak MiB", number("peak_mib", ".0f")),
    Column("chunk", number("chunk", "d")),
    Column("sweeps", table.sweeps),
    Column("notes", table.notes, left=True),
)
CONTENDER_NOTE = (
    "One GRU layer, default weights, float32. Milliseconds are medians, the fastest in brackets, by CUDA events "
    "unless the notes say otherwise; forward is without gradients. Errors: the largest of outputs and all gradients "
    "against float64. Peak: of torch's allocator. Every group of contenders runs in a process of its own with a "
    "limit on its time."
)
