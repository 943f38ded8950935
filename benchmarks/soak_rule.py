"""What `benchmarks.soak` draws, and how it judges its readings: growth counts when all kinds of calls have come."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

MOST_GROWTH = {"host": 64.0, "libraries": 256.0, "device": 64.0, "reserved": 256.0, "kernels": 64.0, "objects": 2000.0}
"""Most growth from where a run has settled to its end: MiB, and the number of Python objects."""
MOST_DRIFT = 0.02
"""Largest mean relative distance of the two running losses, beyond twice the echo's."""
LONGEST = {"cuda": 2000, "cpu": 600}
BATCHES = (1, 2, 3, 8)
SOLVERS = ("auto", "auto", "auto", "shooting in chunks of 32", "shooting", "mgrit", "deer")
"""What a layer's solver is drawn from; layers begin with the first."""


class Call(NamedTuple):
    """A call that was drawn. Solvers stay for a while, as `auto` learns from call to call until one is set anew."""

    pair: int
    length: int
    batch: int
    ragged: bool
    solver: str
    anew: bool


def lengths(chance: random.Random, device: str) -> list[int]:
    return [1, 7, 33, 64, 200, *(chance.randrange(2, LONGEST[device]) for _ in range(12))]


def calls(device: str, seed: int, pairs: int) -> Iterator[Call]:
    """The calls of a run, without an end."""
    chance = random.Random(seed)
    some = lengths(chance, device)
    solvers = [SOLVERS[0]] * pairs
    while True:
        pair, length, batch = chance.choice(range(pairs)), chance.choice(some), chance.choice(BATCHES)
        ragged = chance.random() < 0.3
        anew = chance.random() < 0.05
        if anew:
            solvers[pair] = chance.choice(SOLVERS)
        yield Call(pair, length, batch, ragged, solvers[pair], anew)


def all_drawn(device: str, seed: int, pairs: int) -> int:
    """The steps after which a run has called with each length, batch and solver together; until then memory grows."""
    missing = set(product(lengths(random.Random(seed), device), BATCHES, SOLVERS))
    for steps, call in enumerate(calls(device, seed, pairs), 1):
        missing.discard((call.length, call.batch, call.solver))
        if not missing:
            return steps
    raise AssertionError("calls end")


def settled(seen: list[dict[str, float]], drawn: int) -> int:
    """The first reading from which growth counts: after a third of all, and after `drawn` steps."""
    return max(len(seen) // 3, sum(one["steps"] < drawn for one in seen))


def judged(seen: list[dict[str, float]], drawn: int) -> dict[str, str]:
    """What is wrong with a run's readings, by what is wrong; a run of which less than a third is left has not passed.

    Growth is how far the last reading is above the highest of a sixth of the readings from where the run has settled.
    """
    first, failed = settled(seen, drawn), dict[str, str]()
    if 3 * first > 2 * len(seen) or first == len(seen) - 1:
        steps = f"{seen[-1]['steps']:,.0f} steps"
        failed["steps"] = f"too short to be judged: {steps}, all kinds of calls come in {drawn:,}, a third must follow"
        first = len(seen) // 3  # what has grown by too much is told all the same
    base = seen[first : first + max(1, len(seen) // 6)]
    for name, most in MOST_GROWTH.items():
        if name in seen[-1]:
            growth = seen[-1][name] - max(one[name] for one in base)
            if growth > most:
                failed[name] = f"{name} grew by {growth:.0f} since minute {base[0]['minutes']:.0f}"
    drift, echo = (statistics.mean(one[name] for one in seen[len(seen) // 3 :]) for name in ("drift", "echo"))
    if drift > MOST_DRIFT + 2 * echo:
        failed["drift"] = f"the loss is {100 * drift:.1f} % from torch's, the echo's {100 * echo:.1f} %"
    return failed
