"""Which ranks share the sequences that are being solved just now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta

from torch.distributed.device_mesh import DeviceMesh

from timeloom.distributed.group import TimeGroup, group_of

_current: ContextVar[TimeGroup | None] = ContextVar("time_group", default=None)
entered: list[TimeGroup] = []
"""Groups that some thread is in: what torch.compile, which cannot read the above, may look at."""


@contextmanager
def time_parallel(mesh: DeviceMesh, timeout: timedelta | None = None) -> Iterator[None]:
    """Inside, timeloom's layers and `unroll` take their input for this rank's slice of a sequence in time.

    They return the outputs of that slice, and the final state of the whole sequence on all ranks. Gradients are those
    of the sum of all time ranks' losses, and a parameter's are this rank's part of them (`TimeParallel` adds them up).
    An error inside stops the other ranks too, and they are told which rank it was and why.

    timeout: how long to wait for other ranks; 10 minutes by default.
    """
    group = group_of(mesh, timeout)
    token = _current.set(group)
    entered.append(group)
    try:
        yield
    except BaseException as error:
        group.stopped(error)
        raise
    finally:
        entered.pop()
        _current.reset(token)


def time_group() -> TimeGroup | None:
    """The ranks that share a sequence; None where this process has all of it."""
    group = _current.get()
    return None if group is None or group.size == 1 else group
