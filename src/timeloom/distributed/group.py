"""The ranks that share a sequence: what they send each other, counted, with a watch on failing ranks."""

from __future__ import annotations

import contextlib
import os
import threading
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.distributed.rendezvous import rendezvous

from timeloom.auto.experience import LayerExperience
from timeloom.distributed.faults import LOOK_EVERY, Faults, RankError
from timeloom.distributed.lent_tensors import lend
from timeloom.distributed.shared_memory import SharedMemory
from timeloom.report import ConvergenceError

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others in one exchange."""
RING_UP_TO = 8
"""Ranks up to which torch gathers, round a ring in most backends, with a hop for every rank. Beyond, ranks double what
they have in every round."""
SMALL = 4096
"""Numbers up to which many ranks form a sum by gathering."""
SHARE_MEMORY = True
"""Whether ranks of one machine exchange what is on the CPU through its memory."""
PATH_BYTES = 256
"""Of the name under which all ranks find that memory."""


@dataclass
class Traffic:
    """What this rank has sent to the other ranks of its time group so far."""

    collectives: int = 0
    """Exchanges in which all ranks take part."""
    messages: int = 0
    """Messages to one other rank: the sequential fallback."""
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
        """In ⌈log₂ R⌉ rounds: every rank passes all it has to the one as many places before it as it has tensors."""
        held = tensor.unsqueeze(0)  # of this rank and those behind it, the first rank being behind the last
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
        """What to exchange a tensor through where all ranks are processes of one machine; they find out together."""
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
                os.unlink(named)  # those that have it keep it

    def _share_memory(self, named: str) -> SharedMemory | None:
        """Memory under a name, told by rank 0, that all ranks have opened."""
        told = torch.tensor([*named.encode().ljust(PATH_BYTES, b"\0")], dtype=torch.uint8, device="cpu")
        self._wait(lambda: dist.broadcast(lend(told), group=self.group, group_src=0, async_op=True), told.device)
        path, memory = bytes(told.tolist()).rstrip(b"\0").decode(), None
        if path:
            with contextlib.suppress(OSError):  # of another machine, or none that it may see
                memory = SharedMemory(path, self.rank, self.size)
        everywhere = bool(self._gather_by_messages(torch.tensor([memory is not None], device="cpu")).all())
        return memory if everywhere else None

    def _through(self, exchange: Callable[[Callable[[], None]], Tensor]) -> Tensor:
        """What an exchange through memory brings, with an eye on ranks that fail meanwhile."""
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
            raise self.faults.diagnose(_first_line(error)) from error

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
        return _Blocking(works, self.timeout + LOOK_EVERY) if device.type == "cpu" else _Queued(works)

    def experiences(self, owner: Any) -> dict[int, LayerExperience]:
        """What solves over these ranks have shown about a module or cell: the same on all of them, so kept apart from
        what one rank may see on its own.
        """
        try:
            return self._experiences.setdefault(owner, {})
        except TypeError:  # cannot be kept
            return {}

    def stopped(self, error: BaseException | None) -> None:
        """Tell the other ranks of an error on this one, unless they have it too."""
        if error is not None and not isinstance(error, RankError | ConvergenceError):
            self.faults.post(error)

    def _count(self, tensor: Tensor, collective: bool) -> None:
        self.traffic.collectives += collective
        self.traffic.messages += not collective
        self.traffic.bytes += tensor.numel() * tensor.element_size()

    def _wait(self, start: Callable[[], Any], device: torch.device) -> None:
        """Start an exchange and wait for it, with an eye on ranks that fail meanwhile."""
        until = time.monotonic() + self.timeout.total_seconds()
        try:
            work = start()
            if device.type != "cpu":
                work.wait()  # on the device's stream: torch's own watchdog looks after it
                return
        except RuntimeError as error:
            raise self.faults.diagnose(_first_line(error)) from error
        while not _done(work, self.faults):
            self.faults.look()
            if time.monotonic() > until:
                raise self.faults.diagnose(f"no answer within {self.timeout.total_seconds():g} s")


def _done(work: Any, faults: Faults) -> bool:
    """Wait a while for a collective; raises if it failed."""
    try:
        work.wait(LOOK_EVERY)
        return True
    except RuntimeError as error:
        if not work.is_completed():
            return False  # it takes longer
        seen = error
    try:
        work.wait()  # it may have ended just after the first wait gave up
        return True
    except RuntimeError as error:
        raise faults.diagnose(_first_line(error)) from seen


class _Blocking:
    """Messages between ranks as a collective's work: to stop waiting for one would break gloo's connections, so
    another thread waits.
    """

    def __init__(self, works: list[Any], timeout: timedelta) -> None:
        self._error: RuntimeError | None = None
        self._thread = threading.Thread(target=self._run, args=(works, timeout), daemon=True)
        self._thread.start()

    def _run(self, works: list[Any], timeout: timedelta) -> None:
        try:
            for work in works:
                work.wait(timeout)
        except RuntimeError as error:
            self._error = error

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout: timedelta | None = None) -> None:
        self._thread.join(None if timeout is None else timeout.total_seconds())
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise RuntimeError("it takes longer")


class _Queued:
    """Messages on a device's stream, as a collective's work."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _first_line(error: RuntimeError) -> str:
    return str(error).strip().split("\n")[0][:200]


_groups: dict[str, TimeGroup] = {}
"""By the name of torch's group. Meshes will not do as keys: those of the same ranks are equal, so that an entry would
be lost with the first of them while another is in use."""


def time_mesh(time: int | None = None, *, device: str | None = None) -> DeviceMesh:
    """All processes as a mesh with the dimensions "data" and "time"; starts torch.distributed where needed.

    time: ranks that share a sequence, neighbours in the launcher's order; all of them if None. The others hold other
        sequences of the batch ("data").
    device: "cpu" (gloo) or "cuda" (NCCL); "cuda" if None and there is a GPU.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if not dist.is_initialized():
        _start("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    world = dist.get_world_size()
    time = world if time is None else time
    if time < 1 or world % time:
        raise ValueError(f"time={time} does not divide the {world} processes: give a divisor of {world}")
    return init_device_mesh(device, (world // time, time), mesh_dim_names=("data", "time"))


def _start(backend: str) -> None:
    """Start torch.distributed. After a restart torchrun's store still holds what the processes before wrote, their
    addresses among it, so it is used under another name then. Nodes count their restarts each for itself.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"no launcher has set {', '.join(missing)}: start with torchrun --nproc-per-node 2 train.py, or call "
            "torch.distributed.init_process_group yourself before time_mesh()"
        )
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    if attempt == 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend)
        return
    if int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1:
        raise RuntimeError(
            "torchrun has restarted the processes of several nodes with a store that holds the addresses of the old "
            "ones: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on all nodes"
        )
    store, rank, size = next(rendezvous("env://"))
    store = PrefixStore(f"attempt/{attempt}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)


def group_of(mesh: DeviceMesh, timeout: timedelta | None = None) -> TimeGroup:
    """The time group of a mesh, made once."""
    names = mesh.mesh_dim_names if isinstance(mesh, DeviceMesh) else None
    if not names or "time" not in names:
        given = f"one with dimensions {names}" if isinstance(mesh, DeviceMesh) else type(mesh).__name__
        raise ValueError(f'mesh must be a DeviceMesh with a dimension "time", got {given}; time_mesh() makes one')
    group = mesh.get_group("time")
    found = _groups.get(group.group_name)
    if found is None or found.group is not group:  # torch.distributed may have been started anew
        found = _groups[group.group_name] = TimeGroup(group, TIMEOUT)
    if timeout is not None:
        found.timeout = timeout
    return found


def traffic(mesh: DeviceMesh) -> Traffic:
    """What this rank has sent within its time group so far; take one before and one after, and `since`."""
    counted = group_of(mesh).traffic
    return Traffic(counted.collectives, counted.messages, counted.bytes)
