"""A check on a device: a name and a function that raises if something is wrong; it does not need pytest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.fuzz.case import DTYPES, Case
from benchmarks.fuzz.judge import PERTURBED, error_of, floor, judge, scales


@dataclass(frozen=True)
class Check:
    """`run(device)` returns the result in a few words, and raises Unfit if the device cannot run it."""

    name: str
    run: Callable[[str], str]


class Unfit(Exception):
    """A check that needs another machine; the message says which."""


def cases(given: Iterable[Case]) -> list[Check]:
    """Configurations judged like the fuzzer's: outputs and all gradients against float64, compared with torch's own."""
    numbered = enumerate(given)
    return [of_case(replace(case, seed=index)) for index, case in numbered]


def of_case(case: Case) -> Check:
    def run(device: str) -> str:
        answer = judge(case, device)
        if answer.get("broken"):
            raise RuntimeError(f"the device is lost: {answer}")
        if "skipped" in answer:
            if _has_to_run(case, device):
                raise AssertionError(f"{answer['skipped']}, and it was not to be skipped")
            raise Unfit(answer["skipped"])
        if answer["findings"]:
            first = answer["findings"][0]
            raise AssertionError(f"{first['kind']}: {first['what']}; {answer.get('report', '')}")
        worst = max(answer["errors"].values(), key=lambda pair: pair[0])
        return f"{worst[0]:.1e}, torch {worst[1]:.1e}"

    return Check(case.line(), run)


def _has_to_run(case: Case, device: str) -> bool:
    """Whether a case must not be skipped: torch itself may lack only half precision and autocast on a device."""
    return DTYPES[case.dtype] not in (torch.float16, torch.bfloat16) and not case.autocast


def as_good_as_torch(
    own: dict[str, Tensor],
    theirs: dict[str, Tensor],
    truth: dict[str, Tensor],
    again: Callable[[], dict[str, Tensor]] | None = None,
) -> str:
    """Raise if a tensor's error against float64 is more than twice torch's (plus the dtype's floor).

    again: another run of torch on numbers changed by a rounding: where a network amplifies roundings, the error of one
    run is luck.
    """
    exact = {name: value.detach().double() for name, value in truth.items()}
    sizes, runs = scales(exact), [theirs]

    def error(side: dict[str, Tensor], name: str) -> float:
        return error_of(side[name].detach().double(), exact[name], sizes[name])

    for left in range(0 if again is None else PERTURBED, -1, -1):
        pairs = {name: (error(own, name), max(error(run, name) for run in runs)) for name in exact}
        off = [name for name, pair in pairs.items() if not pair[0] <= 2 * pair[1] + _least(own[name])]
        if not off:
            break
        if again is None or left == 0:
            raise AssertionError("{} is off by {:.1e}, torch's by {:.1e}".format(off[0], *pairs[off[0]]))
        runs.append(again())
    worst = max(pairs.values())
    return f"{worst[0]:.1e}, torch {worst[1]:.1e}"


def _least(value: Tensor) -> float:
    return floor(value.dtype if value.dtype in DTYPES.values() else torch.float32)
