"""The columns of the pieces' tables, and the notes above them."""

from __future__ import annotations

from benchmarks.gpu import table
from benchmarks.gpu.table import Column, milliseconds, number, ratio, words

NOTE = (
    "Forward + backward of one layer, float32 (products in tf32 in cuDNN, torch's default, never in ours) "
    "unless half precision is named. "
    "Milliseconds are medians of CUDA-event times taken in turns, the fastest in brackets; `graph` replays "
    "the same training step from a CUDA graph, ratios are over cuDNN's eager step. Ratios in bold: below the goal "
    "(in a graph) or below 0.95 (eager). Errors: the largest of outputs and all gradients, relative to the tensor's "
    "largest value, against float64; in bold: beyond twice cuDNN's own. MiB: peaks of a step, without "
    "what recordings of calls that are replayed hold. Floor: "
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
RUN_COLUMNS = (
    Column("run", words("case"), left=True),
    Column("updates", number("updates", "d")),
    Column("torch s", number("torch_seconds", ".1f")),
    Column("timeloom s", number("timeloom_seconds", ".1f")),
    Column("ratio", ratio("ratio")),
    Column("to the same loss", ratio("same_loss_ratio")),
    Column("an update, at the end", ratio("late_ratio")),
    Column("first update, s: torch", number("torch_first", ".2f")),
    Column("timeloom", number("timeloom_first", ".2f")),
    Column("with warm starts, s", number("warm_seconds", ".1f")),
    Column("without", number("unwarmed_seconds", ".1f")),
    Column("for updates", number("warm_updates", "d")),
    Column("an update with them, ms", number("warm_late", ".1f")),
    Column("without", number("unwarmed_late", ".1f")),
    Column("losses apart, first 20", number("early_difference", ".0e")),
    Column("last loss: torch", number("torch_loss", ".4g")),
    Column("timeloom", number("timeloom_loss", ".4g")),
    Column("fell in the last fifth: torch", number("torch_late_gain", ".1%")),
    Column("timeloom", number("timeloom_late_gain", ".1%")),
    Column("at the end", words("decision"), left=True),
    Column("notes", table.notes, left=True),
)
RUN_NOTE = (
    "Training from the first update to the last, torch's layer and timeloom's from the same weights on the same "
    "batches, eager, Adam at a rate that falls to nothing along half a cosine, float32 (cuDNN with tf32, torch's "
    "default). Seconds hold all of it: the first update with whatever is compiled or chosen there, the read-out, the "
    "optimizer; nobody waits for a loss between updates. `to the same loss`: wall-clock until the "
    "mean over the pool's batches is at the worse of the two last ones. Losses apart: the largest relative difference "
    "over the first 20 updates; later on rounding alone makes two runs of any one. Beyond 65,535 steps, which cuDNN "
    "refuses, torch runs blocks with the state carried and gradients cut; it knows no resets, so its episodes are "
    "packed. With warm starts: the same run with each batch's samples named (`tl.WarmStarts`), beside timeloom without "
    "over as many updates; an update of both in the second half of them. `fell in the last fifth`: how much of the "
    "loss that fifth of the updates still took away."
)
