"""`python -m benchmarks.soak --device cpu|cuda --minutes N`: a long training with changing shapes, lengths and solvers.

Timeloom's model and torch's begin with the same weights and see the same batches, each with its own optimizer. So does
an echo, a second torch model with weights that are one rounding off: where training amplifies roundings, it shows how
far two correct runs diverge. Monitored throughout: the host's and the device's memory, the kernels' files, the number
of Python objects, and how far timeloom's loss, and the echo's, is from torch's. From time to time, in addition: threads
that use modules at once (each on its stream), DataLoader workers that run a layer, and a fork after the device was
used. It ends with status 1 if memory grows or losses diverge.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import timeloom as tl
from benchmarks.fuzz.record import facts
from benchmarks.results import need_gpu
from timeloom.kernels.cache import folders

MOST_GROWTH = {"host": 64.0, "libraries": 256.0, "device": 64.0, "reserved": 256.0, "kernels": 64.0}
"""Most growth in MiB from the first third of a run to its end; every layer has used every solver before it begins."""
MOST_OBJECTS = 2000
"""The same for the number of Python objects."""
MOST_DRIFT = 0.02
"""Largest mean relative distance of the two running losses, beyond twice the echo's."""
SIDES = ("timeloom", "torch", "echo")
SOLVERS: tuple[Any, ...] = (
    "auto",
    "auto",
    "auto",
    tl.solvers.Shooting(chunk=32),
    tl.solvers.Shooting(),
    "mgrit",
    "deer",
)
BATCHES = (1, 2, 3, 8)
KINDS: tuple[tuple[Any, Any], ...] = ((tl.GRU, nn.GRU), (tl.LSTM, nn.LSTM), (tl.RNN, nn.RNN))


class Pair:
    """A layer with a head, by timeloom and by torch, on a memory task: the sign of the running mean."""

    def __init__(self, number: int, device: str) -> None:
        self.kind, n = number % 3, (8, 24, 40, 64)[number % 4]
        own, theirs = KINDS[self.kind]
        torch.manual_seed(number)
        self.models = [nn.ModuleList([kind(2, n), nn.Linear(n, 1)]).to(device) for kind in (own, theirs, theirs)]
        weights = self.models[1].state_dict()
        self.models[0].load_state_dict(weights)
        eps = torch.finfo(torch.float32).eps
        self.models[2].load_state_dict({name: value * (1 + eps) for name, value in weights.items()})
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.02) for model in self.models]
        self.running: list[float | None] = [None] * len(SIDES)

    def step(self, x: Tensor, lengths: Tensor | None, solver: Any) -> None:
        target = (x[..., :1].cumsum(0) > 0).to(x.dtype)
        if solver is not None:
            self.models[0][0].solver = solver
        for side, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            layer, head = model
            if lengths is None:
                y, _ = layer(x)
            elif side == 0:
                y, _ = layer(x, lengths=lengths)
            else:
                packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), enforce_sorted=False)
                y, _ = nn.utils.rnn.pad_packed_sequence(layer(packed)[0], total_length=len(x))
            loss = nn.functional.binary_cross_entropy_with_logits(head(y), target)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            value, before = float(loss.detach()), self.running[side]
            self.running[side] = value if before is None else 0.98 * before + 0.02 * value

    def drift(self, side: str) -> float:
        """How far the running loss of a side is from torch's, relative."""
        own, theirs = (self.running[SIDES.index(name)] for name in (side, "torch"))
        return 0.0 if own is None or theirs is None else abs(own - theirs) / theirs


class Lines(Dataset[Tensor]):
    """A dataset whose items a DataLoader worker computes by a timeloom layer."""

    def __init__(self) -> None:
        self.layer = tl.GRU(2, 8, solver=tl.solvers.Shooting(chunk=16))

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        with torch.no_grad():
            found: Tensor = self.layer(torch.full((100, 2), float(index)))[0]
        return found


@cache
def _member(index: int) -> ThreadPoolExecutor:
    """A thread, the same in all checks: torch keeps 33 MiB for cuBLAS for each thread and stream."""
    return ThreadPoolExecutor(1)


@cache
def _stream(index: int) -> torch.cuda.Stream:
    """The stream of a thread, the same in all checks."""
    return torch.cuda.Stream()


def threads(device: str) -> None:
    """Three threads, each with its own module, and all with a shared one; results must be those of one thread."""
    modules = [tl.GRU(2, 16, device=device, solver=tl.solvers.Shooting(chunk=32)) for _ in range(3)]
    inputs = [torch.randn(200, 2, 2, device=device) for _ in range(3)]
    with torch.no_grad():
        expected = [(module(x)[0], modules[0](x)[0]) for module, x in zip(modules, inputs, strict=True)]
    wrong: list[str] = []

    def work(index: int) -> None:
        with torch.cuda.stream(_stream(index)) if device == "cuda" else nullcontext(), torch.no_grad():
            for module, right in zip((modules[index], modules[0]), expected[index], strict=True):
                if not torch.allclose(module(inputs[index])[0], right, atol=1e-4):
                    wrong.append(f"thread {index}")

    for job in [_member(index).submit(work, index) for index in range(3)]:
        job.result()
    if wrong:
        raise AssertionError(f"threads at once disagree with one: {wrong}")


def workers(device: str) -> None:
    """DataLoader workers forked from a process that has run kernels."""
    data = Lines()
    found = torch.cat(list(DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork")))
    right = torch.stack([data[index] for index in range(len(data))])
    if not torch.allclose(found, right, atol=1e-5):
        raise AssertionError("DataLoader workers found other numbers")


def _in_child(answers: Any, trains: bool) -> None:
    torch.set_num_threads(1)  # after a fork more would hang, in torch's own layers too
    torch.manual_seed(1)
    layer = tl.LSTM(2, 8, solver=tl.solvers.Shooting(chunk=16))
    x = torch.randn(64, 2, 2)
    with torch.set_grad_enabled(trains):
        y: Tensor = layer(x)[0]
    found = torch.autograd.grad(y.sum(), list(layer.parameters()))[1] if trains else y
    answers.put(float(found.abs().sum()))


def fork(device: str) -> None:
    """A child forked after the CPU was used trains there, and so does a spawned one.

    After a GPU was used, torch does not allow a forked child to train: both only run forward then.
    """
    found = []
    for method in ("fork", "spawn"):
        context: Any = multiprocessing.get_context(method)
        answers = context.Queue()
        child = context.Process(target=_in_child, args=(answers, device == "cpu"))
        child.start()
        found.append(answers.get(timeout=300))
        child.join()
        if child.exitcode != 0:
            raise AssertionError(f"a {method} child ended with status {child.exitcode}")
    if abs(found[0] - found[1]) > 1e-4 * abs(found[0]):
        raise AssertionError(f"forked and spawned children disagree: {found}")


BESIDE: tuple[Callable[[str], None], ...] = (threads, workers, fork)


def memory(device: str) -> dict[str, float]:
    """MiB of host (libraries, whose files are mapped when first needed, apart) and device; number of Python objects."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # memory that the allocator only caches is no growth
    held = resident()
    libraries = sum(held[name] for name in held if is_library(name))
    found = {"host": sum(held.values()) - libraries, "libraries": libraries, "objects": float(len(gc.get_objects()))}
    cache = next((folder for folder in folders() if folder.is_dir()), None)
    found["kernels"] = sum(_bytes(path) for path in cache.iterdir()) / 2**20 if cache is not None else 0.0
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        found["device"] = torch.cuda.memory_allocated() / 2**20
        found["reserved"] = torch.cuda.memory_reserved() / 2**20
    return found


def resident() -> Counter[str]:
    """MiB of this process in the host's memory, by the file that is mapped there; "anonymous" where there is none."""
    found: Counter[str] = Counter()
    maps = Path("/proc/self/smaps")
    name = ""
    for line in maps.read_text().splitlines() if maps.exists() else ():
        first, *rest = line.split(maxsplit=5)
        if not first.endswith(":"):
            name = rest[-1] if len(rest) == 5 else "anonymous"
        elif first == "Rss:":
            found[name] += int(rest[0]) / 2**10  # type: ignore[assignment]  # a Counter adds up any numbers
    return found


def is_library(name: str) -> bool:
    """Whether a mapping is of a file that lasts: not shared or removed memory, nor a device."""
    return name.startswith("/") and not name.startswith(("/dev/", "/memfd:")) and not name.endswith("(deleted)")


def _bytes(path: Path) -> int:
    """A file's size; 0 if another process has just removed it."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def kinds() -> Counter[str]:
    """Counts of Python objects by type."""
    return Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())


PARTS: dict[str, Callable[[], Counter[str]]] = {"objects": kinds, "host": resident, "libraries": resident}
"""What some of the readings consist of."""


def look(began: float, steps: int, device: str, pairs: list[Pair]) -> dict[str, float]:
    """The current readings, with the largest drift of all pairs."""
    seen = {"minutes": round((time.monotonic() - began) / 60, 2), "steps": steps, **memory(device)}
    return seen | {
        "drift": max(pair.drift("timeloom") for pair in pairs),
        "echo": max(pair.drift("echo") for pair in pairs),
    }


def see_everything(pairs: list[Pair], longest: int, device: str) -> None:
    """Run a step of each layer with each solver, whole and ragged, at the largest size.

    What is loaded only once, such as Triton, then does not count as growth.
    """
    for pair in pairs:
        for solver in reversed(dict.fromkeys(SOLVERS)):  # the last one stays
            for lengths in (None, torch.randint(1, longest + 1, (BATCHES[-1],))):
                pair.step(torch.randn(longest, BATCHES[-1], 2, device=device), lengths, solver)


def run(device: str, minutes: float, seed: int) -> dict[str, Any]:
    chance, pairs = random.Random(seed), [Pair(number, device) for number in range(6)]
    longest = 2000 if device == "cuda" else 600
    see_everything(pairs, longest, device)
    began, steps, seen, failed = time.monotonic(), 0, list[dict[str, float]](), list[str]()
    some = [1, 7, 33, 64, 200, *(chance.randrange(2, longest) for _ in range(12))]
    next_look, next_beside, at_third = 0.0, 0.0, dict[str, Counter[str]]()
    while (spent := time.monotonic() - began) < 60 * minutes:
        pair = chance.choice(pairs)
        length, batch = chance.choice(some), chance.choice(BATCHES)
        x = torch.randn(length, batch, 2, device=device)
        lengths = torch.randint(1, length + 1, (batch,)) if chance.random() < 0.3 else None
        solver = chance.choice(SOLVERS) if chance.random() < 0.05 else None  # else as before: `auto` learns
        pair.step(x, lengths, solver)
        steps += 1
        if spent >= next_beside:
            next_beside = spent + 60 * minutes / 5
            for check in BESIDE:
                try:
                    check(device)
                except Exception as error:
                    failed.append(f"{check.__name__}: {type(error).__name__}: {error}")
        if spent >= next_look:
            next_look = spent + 60 * minutes / 30
            seen.append(look(began, steps, device, pairs))
            print(json.dumps(seen[-1]), flush=True)
            if not at_third and spent >= 20 * minutes:
                at_third = {name: parts() for name, parts in PARTS.items()}
    seen.append(look(began, steps, device, pairs))
    settled = seen[len(seen) // 3 : len(seen) // 3 + max(1, len(seen) // 6)]
    for name, most in {**MOST_GROWTH, "objects": MOST_OBJECTS}.items():
        if name in seen[-1]:
            growth = seen[-1][name] - max(look[name] for look in settled)
            if growth > most:
                failed.append(f"{name} grew by {growth:.0f} since the first third of the run")
                if name in at_third:
                    more = (PARTS[name]() - at_third[name]).most_common(6)
                    failed[-1] += f" ({', '.join(f'{count:.0f} {kind}' for kind, count in more)})"
    drift, echo = (statistics.mean(one[name] for one in seen[len(seen) // 3 :]) for name in ("drift", "echo"))
    if drift > MOST_DRIFT + 2 * echo:
        failed.append(f"the loss is {100 * drift:.1f} % from torch's, the echo's {100 * echo:.1f} %")
    return {"device": device, "minutes": minutes, "seed": seed, "steps": steps, "failed": failed, "seen": seen}


def page(found: dict[str, Any], about: dict[str, Any]) -> str:
    """The readings as a page."""
    device, seen = found["device"], found["seen"]
    where = about.get("gpu") or about["processor"]
    names = ("minutes", "steps", "host", "libraries", "device", "reserved", "kernels", "objects", "drift", "echo")
    columns = [name for name in names if name in seen[0]]
    lines = [
        f"# A long training on a {device.upper().replace('CUDA', 'GPU')}, watched",
        "",
        f"Written by `python -m benchmarks.soak --device {device} --minutes {found['minutes']:g} --seed "
        f"{found['seed']}`: {about['date']}, {where}, torch {about['torch']}, timeloom {about['timeloom']} of sources "
        f"{about['code']}.",
        "Host, libraries (files that are mapped there), device (tensors; reserved: with what graphs keep) and kernels",
        "are MiB; drift and echo are how far the running losses of timeloom, and of torch with weights that are one",
        "rounding off, are from torch's.",
        "",
        f"**{found['steps']:,} steps: {'; '.join(found['failed']) or 'nothing grew, losses stayed together'}.**",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    shown = {"minutes": ".1f", "steps": ",.0f", "drift": ".4f", "echo": ".4f"}
    lines += [f"| {' | '.join(format(row[name], shown.get(name, '.0f')) for name in columns)} |" for row in seen]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description="A long training, watched.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="a JSON file for what was seen, or a page (.md)")
    given = parser.parse_args()
    need_gpu(parser, given.device)
    about = facts(given.device)
    found = run(given.device, given.minutes, given.seed)
    if given.out is not None:
        paged = given.out.suffix == ".md"
        given.out.write_text(page(found, about) if paged else json.dumps(found | about, indent=1) + "\n")
    print("\n".join(found["failed"]) or f"{found['steps']:,} steps, nothing grew, losses stayed together")
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
