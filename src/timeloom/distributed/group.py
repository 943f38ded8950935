"""The ranks that share a sequence: their exchanges, which are counted and which detect failing ranks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from timeloom.auto.layer_experience import LayerExperience
from timeloom.distributed.faults import LOOK_EVERY, Faults, RankError
from timeloom.distributed.lent_tensors import lend
from timeloom.distributed.shared_memory import SharedMemory
from timeloom.distributed.waiting import Blocking, Queued, done, first_line
from timeloom.report import ConvergenceError

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others in one exchange."""
RING_UP_TO = 8
"""Number of ranks up to which torch gathers, in most backends along a ring with a hop for every rank. With more ranks,
each doubles the tensors that it holds in every round (`python -m benchmarks.ranks`)."""
SMALL = 4096
"""Number of elements up to which many ranks compute a sum by gathering."""
SHARE_MEMORY = True
"""Whether ranks of one machine exchange CPU tensors through shared memory."""
PATH_BYTES = 256
"""Bytes of the path under which all ranks find that memory."""


@dataclass
class Traffic:
    """Counts of what this rank has sent to the other ranks of its time group so far."""

    collectives: int = 0
    """Exchanges in which all ranks take part."""
    messages: int = 0
    """Messages to one other rank, by the sequential fallback."""
    bytes: int = 0
    """Bytes of this rank's own contributions to both."""

    def since(self, before: Traffic) -> Traffic:
        """The difference to an earlier count."""
        return Traffic(
            self.collectives - before.collectives, self.messages - before.messages, self.bytes - before.bytes
        )


class TimeGroup:
    """This rank's place among the ranks that share a sequence, in order of time."""

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.timeout = timeout
        self.traffic = Traffic()
        self._memory: SharedMemory | None = None
        self._asked_for_memory = False
        self._experiences: WeakKeyDictionary[Any, dict[int, LayerExperience]] = WeakKeyDictionary()
        self.faults = Faults(_get_default_store(), group.group_name, self.rank, self.size)

    def gather(self, tensor: Tensor) -> Tensor:
        """Every rank's tensor, `(R, ...)`; all ranks must give the same shape."""
        tensor = tensor.detach().contiguous()
        if self.size == 1:
            return tensor.unsqueeze(0)
        self._count(tensor, collective=True)
        memory = self._memory_for(tensor)
        if memory is not None:
            return self._through(lambda look: memory.gather(tensor, look))
        return self._gather_by_messages(tensor)

    def _gather_by_messages(self, tensor: Tensor) -> Tensor:
        if self.size > RING_UP_TO:
            return self._gather_by_doubling(tensor)
        gathered = tensor.new_empty(self.size, *tensor.shape)
        self._wait(
            lambda: dist.all_gather(
                [lend(row) for row in gathered.unbind(0)], lend(tensor), group=self.group, async_op=True
            ),
            gathered.device,
        )
        return gathered

    def _gather_by_doubling(self, tensor: Tensor) -> Tensor:
        """Gather in ⌈log₂ R⌉ rounds: a rank with k tensors sends them to the rank k places before it."""
        held = tensor.unsqueeze(0)  # of this rank and those behind it, cyclically
        while len(held) < self.size:
            told, heard = held[: self.size - len(held)], len(held)
            arriving = torch.empty_like(told, memory_format=torch.contiguous_format)
            to, source = (self.rank - heard) % self.size, (self.rank + heard) % self.size
            messages = [
                dist.P2POp(dist.isend, told, group=self.group, group_peer=to),
                dist.P2POp(dist.irecv, arriving, group=self.group, group_peer=source),
            ]
            self._wait(partial(self._messages, messages, tensor.device), tensor.device)
            held = torch.cat([held, arriving])
        return held.roll(self.rank, 0)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, as a new tensor."""
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        if self.size == 1:
            return total
        memory = self._memory_for(total)
        if memory is None and self.size > RING_UP_TO and tensor.numel() <= SMALL:
            return self.gather(tensor).sum(0)
        self._count(total, collective=True)
        if memory is not None:
            return self._through(lambda look: memory.sum(total, look))
        self._wait(lambda: dist.all_reduce(lend(total), group=self.group, async_op=True), total.device)
        return total

    def share(self, tensor: Tensor) -> Tensor:
        """The first rank's tensor, as a new one; all ranks must give the same shape."""
        told = tensor.detach().clone(memory_format=torch.contiguous_format)
        self._count(told, collective=True)
        self._wait(lambda: dist.broadcast(lend(told), group=self.group, group_src=0, async_op=True), told.device)
        return told

    def _memory_for(self, tensor: Tensor) -> SharedMemory | None:
        """The shared memory for a tensor, if all ranks are processes of one machine, which they find out together."""
        if not SHARE_MEMORY or tensor.device.type != "cpu":
            return None
        if not self._asked_for_memory:
            self._asked_for_memory = True
            self._memory = self._open_memory()
        return self._memory

    def _open_memory(self) -> SharedMemory | None:
        named = SharedMemory.create(self.size) if self.rank == 0 else ""
        try:
            return self._share_memory(named)
        finally:
            if named:
                os.unlink(named)  # ranks that have it open keep it

    def _share_memory(self, named: str) -> SharedMemory | None:
        """Open the memory that rank 0 has named; None unless all ranks can."""
        told = torch.tensor([*named.encode().ljust(PATH_BYTES, b"\0")], dtype=torch.uint8, device="cpu")
        self._wait(lambda: dist.broadcast(lend(told), group=self.group, group_src=0, async_op=True), told.device)
        path, memory = bytes(told.tolist()).rstrip(b"\0").decode(), None
        if path:
            with contextlib.suppress(OSError):  # on another machine, or not accessible
                memory = SharedMemory(path, self.rank, self.size)
        everywhere = bool(self._gather_by_messages(torch.tensor([memory is not None], device="cpu")).all())
        return memory if everywhere else None

    def _through(self, exchange: Callable[[Callable[[], None]], Tensor]) -> Tensor:
        """The result of an exchange through shared memory, while checking for ranks that fail."""
        began = looked = time.monotonic()

        def look() -> None:
            nonlocal looked
            now = time.monotonic()
            if now - looked < LOOK_EVERY.total_seconds():
                return
            looked = now
            self.faults.look()
            gone = self._memory.gone() if self._memory is not None else []
            if gone:
                raise self.faults.diagnose(f"the process of rank {gone[0]} has ended")
            if now - began > self.timeout.total_seconds():
                raise self.faults.diagnose(f"no answer within {self.timeout.total_seconds():g} s")

        try:
            return exchange(look)
        except RankError:
            raise
        except RuntimeError as error:
            raise self.faults.diagnose(first_line(error)) from error

    def send(self, tensor: Tensor, rank: int) -> None:
        tensor = tensor.contiguous()
        self._count(tensor, collective=False)
        message = dist.P2POp(dist.isend, tensor, group=self.group, group_peer=rank)
        self._wait(partial(self._messages, [message], tensor.device), tensor.device)

    def receive(self, like: Tensor, rank: int) -> Tensor:
        tensor = torch.empty_like(like, memory_format=torch.contiguous_format)
        message = dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=rank)
        self._wait(partial(self._messages, [message], tensor.device), tensor.device)
        return tensor

    def _messages(self, messages: list[dist.P2POp], device: torch.device) -> Any:
        works = dist.batch_isend_irecv(messages)
        return Blocking(works, self.timeout + LOOK_EVERY) if device.type == "cpu" else Queued(works)

    def experiences(self, owner: Any) -> dict[int, LayerExperience]:
        """The experience with a module or cell over these ranks.

        It is the same on all of them, so it is kept apart from the experience of one rank alone.
        """
        try:
            return self._experiences.setdefault(owner, {})
        except TypeError:  # cannot be a key
            return {}

    def stopped(self, error: BaseException | None) -> None:
        """Report an error on this rank to the other ranks, unless they have it, too."""
        if error is not None and not isinstance(error, RankError | ConvergenceError):
            self.faults.post(error)

    def _count(self, tensor: Tensor, collective: bool) -> None:
        self.traffic.collectives += collective
        self.traffic.messages += not collective
        self.traffic.bytes += tensor.numel() * tensor.element_size()

    def _wait(self, start: Callable[[], Any], device: torch.device) -> None:
        """Start an exchange and wait for it, while checking for ranks that fail."""
        until = time.monotonic() + self.timeout.total_seconds()
        try:
            work = start()
            if device.type != "cpu":
                work.wait()  # on the device's stream, where torch's own watchdog detects failures
                return
        except RuntimeError as error:
            raise self.faults.diagnose(first_line(error)) from error
        while not done(work, self.faults):
            self.faults.look()
            if time.monotonic() > until:
                raise self.faults.diagnose(f"no answer within {self.timeout.total_seconds():g} s")
