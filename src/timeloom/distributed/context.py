"""Which ranks share the sequences that are being solved just now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh

from timeloom.distributed.group import TimeGroup
from timeloom.distributed.mesh import group_of

_current: ContextVar[TimeGroup | None] = ContextVar("time_group", default=None)
_called: WeakKeyDictionary[Any, TimeGroup] = WeakKeyDictionary()
"""Layers and cells whose last call was over ranks, and over which."""
entered: list[TimeGroup] = []
"""Groups that some thread is in: what torch.compile, which can read neither of the above, looks at instead."""
shared: list[bool] = []
"""Not empty where `_called` is not: torch.compile cannot read `_called`, either."""


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


@contextmanager
def on_this_rank() -> Iterator[None]:
    """Inside, recurrences are this process's own: those along another time than the sequence's."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


def alone() -> bool:
    """Whether this process has all of every sequence, and had of every call so far: the quick half of `time_group`."""
    return not _called and _current.get() is None


def time_group(owner: Any = None) -> TimeGroup | None:
    """The ranks that share a sequence; None where this process has all of it.

    owner: the layer or cell that is called. In a backward pass a checkpoint runs its forward pass again, outside of
    `time_parallel`, and perhaps on another thread: it is then over the ranks of the owner's last call.
    """
    group = _current.get()
    group = None if group is None or group.size == 1 else group
    if group is None and not _called:
        return None
    try:
        if group is not None:
            _called[owner] = group
            shared[:] = [True]
        elif torch._C._current_graph_task_id() != -1:
            return _called.get(owner)
        else:
            _called.pop(owner, None)
            shared[:] = [True] if _called else []
    except TypeError:  # an owner that cannot be kept
        pass
    return group
