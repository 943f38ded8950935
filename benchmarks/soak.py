"""`python -m benchmarks.soak --device cpu|cuda --minutes N`: a long training with changing shapes, lengths and solvers.

Timeloom's model and torch's begin with the same weights and see the same batches, each with its own optimizer. So does
an echo, a second torch model with weights that are one rounding off: where training amplifies roundings, it shows how
far two correct runs diverge. Monitored throughout: the host's and the device's memory, the kernels' files, the number
of Python objects, and how far timeloom's loss, and the echo's, is from torch's. From time to time, in addition: threads
that use modules at once (each on its stream), DataLoader workers that run a layer, and a fork after the device was
used. It ends with status 1 if memory grows or losses diverge, or if it was too short to tell (`soak_rule.py`).
`--log FILE` judges the readings that a run with the same options has printed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
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
from benchmarks.soak_rule import BATCHES, LONGEST, all_drawn, calls, judged
from timeloom.kernels.cache import folders

SIDES = ("timeloom", "torch", "echo")
SOLVERS: dict[str, Any] = {
    "auto": "auto",
    "shooting in chunks of 32": tl.solvers.Shooting(chunk=32),
    "shooting": tl.solvers.Shooting(),
    "mgrit": "mgrit",
    "deer": "deer",
}
"""Those that `soak_rule` draws."""
PAIRS = 6
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
        for solver in reversed(SOLVERS.values()):  # the first one stays
            for lengths in (None, torch.randint(1, longest + 1, (BATCHES[-1],))):
                pair.step(torch.randn(longest, BATCHES[-1], 2, device=device), lengths, solver)


def run(device: str, minutes: float, seed: int) -> dict[str, Any]:
    pairs = [Pair(number, device) for number in range(PAIRS)]
    see_everything(pairs, LONGEST[device], device)
    began, steps, seen, failed = time.monotonic(), 0, list[dict[str, float]](), list[str]()
    next_look, next_beside, at_settled = 0.0, 0.0, dict[str, Counter[str]]()
    drawn, drawing = all_drawn(device, seed, PAIRS), calls(device, seed, PAIRS)
    while (spent := time.monotonic() - began) < 60 * minutes:
        call = next(drawing)
        x = torch.randn(call.length, call.batch, 2, device=device)
        lengths = torch.randint(1, call.length + 1, (call.batch,)) if call.ragged else None
        pairs[call.pair].step(x, lengths, SOLVERS[call.solver] if call.anew else None)
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
            if not at_settled and spent >= 20 * minutes and steps >= drawn:
                at_settled = {name: parts() for name, parts in PARTS.items()}
    seen.append(look(began, steps, device, pairs))
    print(json.dumps(seen[-1]), flush=True)
    for name, wrong in judged(seen, drawn).items():
        failed.append(wrong)
        if name in at_settled:
            more = (PARTS[name]() - at_settled[name]).most_common(6)
            failed[-1] += f" ({', '.join(f'{count:.0f} {kind}' for kind, count in more)})"
    return {"device": device, "minutes": minutes, "seed": seed, "steps": steps, "failed": failed, "seen": seen}


def read(log: Path, device: str, minutes: float, seed: int) -> dict[str, Any]:
    """What `run` returns, from what such a run has printed; what its checks found is not in its readings."""
    seen = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    steps, failed = int(seen[-1]["steps"]), list(judged(seen, all_drawn(device, seed, PAIRS)).values())
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
        "rounding off, are from torch's. Growth counts after a third of the time, and after "
        f"{all_drawn(device, found['seed'], PAIRS):,} steps, when all",
        "kinds of calls have come.",
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
    parser.add_argument("--log", type=Path, default=None, help="run nothing: judge what such a run has printed")
    given = parser.parse_args()
    options = given.device, given.minutes, given.seed
    if given.log is not None:
        if given.out is not None:
            parser.error("--log has no --out: a log says neither the machine nor the sources")
        found = read(given.log, *options)
    else:
        need_gpu(parser, given.device)
        about = facts(given.device)
        found = run(*options)
    if given.out is not None:
        paged = given.out.suffix == ".md"
        given.out.write_text(page(found, about) if paged else json.dumps(found | about, indent=1) + "\n")
    print("\n".join(found["failed"]) or f"{found['steps']:,} steps, nothing grew, losses stayed together")
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
