"""Results that are to be stored: who makes each, on what machine, in how many minutes, and what a stored one lacks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from experiments.harness import Results, good
from experiments.readings import read_result
from experiments.readings_deer import learned_from_all

Lacks = Callable[[Results], str]


def _nothing(results: Results) -> str:
    return ""


@dataclass(frozen=True)
class Wanted:
    """A result, as `deer/grid_cuda`; `lacks` says in words what one that is there has not, or nothing."""

    result: str
    experiment: str
    arguments: tuple[str, ...] = ()
    minutes: float = 3
    """At most, of its machine."""
    device: str = "cuda"
    cores: int = 1
    """Of the machine, at least."""
    data: str = ""
    """Files that it needs, which are not generated here."""
    lacks: Lacks = _nothing

    @property
    def command(self) -> list[str]:
        """The options that make it, but for where it goes."""
        device = ["--device", self.device] if self.device == "cuda" else []
        return [*self.arguments, *device, "--minutes", f"{self.minutes:g}"]

    def missing(self, out: Path | None = None) -> str:
        """What is to be done, in words; nothing where all of it is stored, or lies in `out`."""
        found = self.found(out)
        return "not stored" if found is None else self.lacks(found)

    def found(self, out: Path | None = None) -> Results | None:
        """The result in a folder of folders by experiment, or else the stored one."""
        fresh = read_result(out / self.experiment / f"{self.result.partition('/')[2]}.json") if out else None
        return fresh or read_result(self.stored_at)

    @property
    def stored_at(self) -> Path:
        folder, _, name = self.result.partition("/")
        return Path(__file__).parent / folder / "results" / f"{name}.json"

    def needs(self) -> str:
        """What this machine lacks to make it, in words."""
        lacking = [f"--data {self.data}"] if self.data else []
        if self.device == "cuda" and not torch.cuda.is_available():
            lacking.append("a GPU")
        if (os.cpu_count() or 1) < self.cores:
            lacking.append(f"{self.cores} cores")
        return ", ".join(lacking)


# What stored results lack


def _cases(results: Results, keys: Sequence[str], wanted: set[Any]) -> str:
    """How many of the wanted cases have no row, not even one that says why it was not run."""
    absent = wanted - {tuple(row.get(key) for key in keys) for row in results["rows"]}
    return f"{len(absent)} of {len(wanted)} cases" if absent else ""


def _speed_grid(results: Results) -> str:
    """All ways at the coarse points; DEER and what it is compared with at all sizes and lengths of the paper."""
    from experiments.deer.grid import BETWEEN, COARSE, LENGTHS, SIZES, WAYS

    fine = product(BETWEEN, SIZES, LENGTHS, COARSE[-1])
    return _cases(results, ("way", "n", "T", "B"), {*product(WAYS, *COARSE), *fine})


def _scan_grid(results: Results) -> str:
    from experiments.bppsa_bitstream.grid import BATCHES, LENGTHS, ON_GPU, PAPERS

    places = [*product(LENGTHS, BATCHES), *PAPERS]
    return _cases(results, ("way", "steps", "batch"), {(way, *place) for way in ON_GPU for place in places})


def _ranks(*lengths: int, rounds: int = 1) -> Lacks:
    def lacks(results: Results) -> str:
        from experiments.mgrit.rank_worker import WAYS
        from experiments.mgrit.ranks import LENGTHS, RANKS

        short = min((len(row.get("rounds_ms", [0])) for row in good(results["rows"])), default=0)
        if short < rounds:
            return f"rows of {short} of {rounds} rounds"
        shapes = {(count, count, steps) for count in RANKS for steps in lengths or LENGTHS if steps >= count}
        keys = ("way", "ranks", "time_ranks", "steps")
        serial = {("GRU, serial", 1, None, steps) for steps in lengths or LENGTHS}
        return _cases(results, keys, {(way, *shape) for way in WAYS for shape in shapes} | serial)

    return lacks


def _processes(most: int) -> Lacks:
    def lacks(results: Results) -> str:
        here = max((row["ranks"] for row in results["rows"]), default=0)
        return f"no more than {here} processes" if here < most else ""

    return lacks


def _every_way(most: int) -> Lacks:
    def lacks(results: Results) -> str:
        counts: dict[str, int] = {}
        for row in good(results["rows"]):
            counts[row["way"]] = max(row["ranks"], counts.get(row["way"], 0))
        short = [f"{way}: no more than {count}" for way, count in counts.items() if count < most]
        return f"processes of {'; '.join(short)}" if short else ""

    return lacks


def _all_lengths(results: Results) -> str:
    from experiments.bppsa_irmas.run import HOPS

    if results.get("forward") != "in order":
        return "its forward pass is not in order"
    done = len(results["lengths"])
    return f"{done} of {len(HOPS)} lengths" if done < len(HOPS) else ""


def _all_problems(results: Results) -> str:
    from experiments.ode.run import PROBLEMS

    done = {(row["problem"], row["dtype"]) for row in results["rows"]}
    return f"{len(done)} of {2 * len(PROBLEMS)} problems" if len(done) < 2 * len(PROBLEMS) else ""


def _every_epoch(results: Results) -> str:
    about = results["training"]
    short = [f"{name} {one['steps']:,}" for name, one in about["ways"].items() if one["steps"] < about["steps"]]
    return f"of {about['steps']:,} training steps {', '.join(short)}" if short else ""


def _by_epoch(results: Results) -> str:
    return "" if all("test_accuracy" in one for one in results["ways"].values()) else "no test accuracy by epoch"


def _implicit(results: Results) -> str:
    rows = [row for rows in results["regimes"].values() for row in rows]
    return "" if any("implicit GRU, multigrid" in row for row in rows) else "no implicit GRU"


def _orbits(results: Results) -> str:
    if not learned_from_all(results):
        return f"{len(results['found']['losses'])} training steps, too few to learn from"
    if results["sizes"].get("drawn") != "as in the paper":
        return "not the paper's orbits"
    check = results["found"]["validation"]
    found = f"errors of {check['error']:.2g}, standing still {check['standing_still']:.2g}"
    return f"not learned: {found}" if check["error"] > LEARNED * check["standing_still"] else ""


def _three_ways(results: Results) -> str:
    absent = [name for name in ("torch", "parallel", "DEER") if "losses" not in results["ways"].get(name, {})]
    return f"not trained: {', '.join(absent)}" if absent else ""


def _by_the_clock(results: Results) -> str:
    return f"times are {results['machine']['clock']}" if "clock" in results["machine"] else ""


def _dated(results: Results) -> str:
    return "" if "day" in results["machine"] else "older than its script: it bears no date"


LEARNED = 0.5
"""Share of the error of bodies that stand still, from which a run counts as learned."""
BY_CORES = {"device": "cpu", "cores": 16}
HERE: dict[str, Any] = {"device": "cpu"}
WANTED = (
    # a GPU
    Wanted("deer/grid_cuda", "deer.grid", ("--batch", "1", "16", "--resume"), 8, lacks=_speed_grid),
    Wanted("bppsa_bitstream/grid_rnn_cuda", "bppsa_bitstream.grid", ("--resume",), 4, lacks=_scan_grid),
    Wanted("bppsa_bitstream/grid_gru_cuda", "bppsa_bitstream.grid", ("--cell", "gru", "--resume"), 6, lacks=_scan_grid),
    Wanted("bppsa_bitstream/bitstream_cuda", "bppsa_bitstream", (), 4),
    Wanted("bppsa_bitstream/bitstream_cuda_paper", "bppsa_bitstream", ("--protocol", "paper", "--epochs", "5"), 4,
           lacks=_every_epoch),
    Wanted("bppsa_irmas/generated_cuda", "bppsa_irmas", (), 3, lacks=_all_lengths),
    Wanted("bppsa_irmas/generated_paper_features_batch_64_cuda", "bppsa_irmas",
           ("--features", "paper", "--batch", "64"), 3, lacks=_all_lengths),
    Wanted("bppsa_vgg/generated_cuda", "bppsa_vgg", (), 1, lacks=_dated),
    Wanted("bppsa_vgg/generated_norm_cuda", "bppsa_vgg", ("--norm",), 1),
    Wanted("deer_two_body/two_body_paper_cuda", "deer_two_body",
           ("--size", "paper", "--pieces", "--batch", "32", "--rate", "0.005"), 4, lacks=_orbits),
    Wanted("deer_cifar/generated_large_cuda", "deer_cifar", ("--size", "large"), 6, lacks=_three_ways),
    Wanted("deer_eigenworms/generated_cuda", "deer_eigenworms", (), 3),
    Wanted("deer/warm_cuda", "deer.warm", (), 2),
    Wanted("deer/scan_cuda", "deer.scan", (), 2),
    Wanted("ode/ode_cuda", "ode", ("--resume",), 3, lacks=_all_problems),
    Wanted("mgrit/scaling_cuda", "mgrit.scaling", (), 3, lacks=_implicit),
    Wanted("mgrit_har/generated_cuda", "mgrit_har", (), 2, lacks=_by_epoch),
    Wanted("mgrit_hmdb51/generated_cuda", "mgrit_hmdb51", (), 4),
    # 16 cores
    Wanted("mgrit/ranks", "mgrit.ranks", ("--resume",), 8, lacks=_ranks(), **BY_CORES),
    Wanted("mgrit/ranks_rounds", "mgrit.ranks", ("--steps", "16384", "--rounds", "3"), 4,
           lacks=_ranks(16384, rounds=3), **BY_CORES),
    Wanted("mgrit/ranks_100x10", "mgrit.ranks", ("--hidden", "100", "--batch", "10", "--steps", "16384", "--resume"), 6,
           lacks=_ranks(16384), **BY_CORES),
    Wanted("mgrit_hmdb51/nets", "mgrit_hmdb51.nets", ("--ranks", "1", "4", "16", "--size", "240", "--batch", "1"), 8,
           lacks=_processes(16), **BY_CORES),
    Wanted("bppsa_vgg/ranks", "bppsa_vgg.ranks", ("--resume",), 4, lacks=_every_way(16), **BY_CORES),
    # any machine
    Wanted("bppsa_bitstream/bitstream", "bppsa_bitstream", (), 6, lacks=_by_the_clock, **HERE),
    Wanted("deer_two_body/two_body", "deer_two_body", (), 12, lacks=_by_the_clock, **HERE),
    Wanted("ode/ode", "ode", (), 8, lacks=_by_the_clock, **HERE),
    Wanted("bppsa_irmas/generated", "bppsa_irmas", (), 4, lacks=_all_lengths, **HERE),
    # files that are not generated here
    Wanted("mgrit_hmdb51/HMDB51_hmdb6_9_1", "mgrit_hmdb51", ("--split", "9:1"), 240, data="HMDB51", **HERE),
    Wanted("mgrit_har/har", "mgrit_har", (), 60, data="UCI HAR Dataset", **HERE),
    Wanted("bppsa_irmas/irmas_paper_features_cuda", "bppsa_irmas", ("--features", "paper"), 60,
           data="IRMAS-TrainingData"),
    Wanted("bppsa_vgg/cifar10_cuda", "bppsa_vgg", (), 30, data="cifar-10-batches-bin"),
    Wanted("deer_eigenworms/eigenworms_paper_cuda", "deer_eigenworms", ("--protocol", "paper", "--twin"), 600,
           data="EigenWorms"),
    Wanted("deer_cifar/cifar10_large_cuda", "deer_cifar", ("--size", "large"), 240, data="cifar-10-batches-bin"),
)  # fmt: skip
