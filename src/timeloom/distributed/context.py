"""The ranks that share the sequences of the current call."""

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
"""The group of each layer or cell whose last call was over ranks."""
entered: list[TimeGroup] = []
"""Groups that are active in some thread, for torch.compile, which cannot read the two variables above."""
shared: list[bool] = []
"""Not empty if `_called` is not, for torch.compile, which cannot read `_called`."""


@contextmanager
def time_parallel(mesh: DeviceMesh, timeout: timedelta | None = None) -> Iterator[None]:
    """A context in which timeloom's layers and `unroll` treat their input as this rank's slice of a sequence in time.

    They return the outputs of that slice, and the final state of the whole sequence on all ranks. Gradients are those
    of the sum of all time ranks' losses; the gradient of a parameter is this rank's part of them (`TimeParallel` adds
    them up). An error inside stops the other ranks, too, with a message that names the rank and the cause.

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
    """A context in which recurrences run on this process alone, as they do along another axis than the shared time."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


def alone() -> bool:
    """Whether no call is or was over ranks: a quick check before `time_group`."""
    return not _called and _current.get() is None


def time_group(owner: Any = None) -> TimeGroup | None:
    """The ranks that share a sequence; None if this process has all of it.

    owner: the layer or cell that is called. In a backward pass, checkpointing runs the forward pass again, outside of
    `time_parallel`, and perhaps in another thread: the group is then that of the owner's last call.
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
    except TypeError:  # an owner that cannot be a key
        pass
    return group
