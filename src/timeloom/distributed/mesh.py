"""All processes as a device mesh with a time dimension, and the group of ranks in it that share a sequence."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from timeloom.distributed.group import TIMEOUT, TimeGroup, Traffic

_groups: dict[str, TimeGroup] = {}
"""Groups by the name of torch's group. Meshes are no suitable keys: meshes of the same ranks are equal, so an entry
would be lost with the first of them while another one is in use."""


def time_mesh(time: int | None = None, *, device: str | None = None) -> DeviceMesh:
    """All processes as a mesh with the dimensions "data" and "time"; starts torch.distributed if needed.

    time: number of ranks that share a sequence, neighbours in the launcher's order; all of them if None. The others
        hold other sequences of the batch ("data").
    device: "cpu" (gloo) or "cuda" (NCCL); None takes "cuda" if there is a GPU.
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
    """Start torch.distributed.

    After a restart, torchrun's store still holds the entries of the earlier processes, such as their addresses, so it
    is used under another prefix. Each node counts its restarts by itself.
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
    """The time group of a mesh, created once."""
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
    """What this rank has sent within its time group so far; use `since` for the difference to an earlier count."""
    counted = group_of(mesh).traffic
    return Traffic(counted.collectives, counted.messages, counted.bytes)
