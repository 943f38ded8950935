"""One sequence over many processes: each rank holds the inputs, states and outputs of a slice of time."""

from timeloom.distributed.context import time_parallel
from timeloom.distributed.faults import RankError
from timeloom.distributed.group import Traffic
from timeloom.distributed.mesh import time_mesh, traffic
from timeloom.distributed.parallel import TimeParallel, average_gradients
from timeloom.distributed.sharding import last_over_time, mean_over_time, shard, slice_of, sum_over_time

__all__ = [
    "RankError",
    "TimeParallel",
    "Traffic",
    "average_gradients",
    "last_over_time",
    "mean_over_time",
    "shard",
    "slice_of",
    "sum_over_time",
    "time_mesh",
    "time_parallel",
    "traffic",
]
