"""Processes on one machine that share sequences: how tests start them and get their results."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import timeloom as tl

NAMES = ("data", "time")


def launch(work: Callable[..., Any], size: int, *args: Any, seconds: float = 120) -> list[Any]:
    """Run `work(rank, *args)` on each of `size` ranks and return the results.

    For a rank that raised, that is the error's text; for one that died, its exit code.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "timeloom"])
    port, ranks = _free_port(), []
    for rank in range(size):
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(work, rank, size, port, send, args), daemon=True)
        process.start()
        send.close()
        ranks.append((process, receive))
    results = []
    for process, receive in ranks:
        try:
            results.append(receive.recv() if receive.poll(seconds) else "no answer")
        except EOFError:
            process.join(10)
            results.append(process.exitcode)
    for process, _ in ranks:
        process.join(10)
        if process.is_alive():
            process.kill()
    return results


def mesh_of(shape: tuple[int, int]) -> DeviceMesh:
    """The first `data · time` processes as a mesh; all processes must call this."""
    data, time = shape
    return DeviceMesh("cpu", torch.arange(data * time).view(data, time), mesh_dim_names=NAMES)


def takes_part(mesh: DeviceMesh) -> bool:
    return mesh.get_coordinate() is not None


def _run(work: Callable[..., Any], rank: int, size: int, port: int, send: Connection, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    try:
        result = work(rank, *args)
    except tl.distributed.RankError as error:
        result = f"RankError: {error}"
    except Exception:
        result = traceback.format_exc()
    send.send(result)
    send.close()
    clean = isinstance(result, dict) and not any(result.values())
    if clean:  # otherwise the others may be in any state
        dist.barrier()
        dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
