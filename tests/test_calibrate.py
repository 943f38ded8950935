"""The constants of `auto`: which were measured, by which command, and which are choices."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import timeloom
from benchmarks.calibrate import __main__ as calibrate
from benchmarks.calibrate import clock, cpu, cuda
from benchmarks.calibrate.constants import BY_OTHERS, MEASURED, stored
from timeloom.kernels.cpu.build import unavailable

ROOT = Path(timeloom.__file__).parent
CHOSEN = """
    auto/beginnings: AMORTISED FIRST_LOOKS FIRST_WAIT LEARNING LEAST_SHARE LOOK ON_GPU SWEEPS TRIED WORTH
    auto/costs: LEAST_CORRECTED LITTLE_MORE MOST_DENSE MOST_HELD MOST_STEPS WORTH_CUTTING WORTH_DRIVING
    auto/cudnn: MOST_STEPS
    auto/decide: LEAST_ERROR LOOK_SHARE PATIENCE RETRY_FACTORS RETRY_SHARE SHARE_OF_ERRORS SHARE_OF_JUMPS SWEEPS
    auto/decide: WORTH_CHANGING
    auto/experience: FIRST_PAUSE LEAST_CONTRACTION LONGEST_PAUSE MOST_FALLBACKS MOST_MISSES MUCH_SHORTER NEVER NOISE
    auto/experience: PART_OF_TOLERANCE STAYS
    auto/rounding: ABOVE_ROUNDING LONGER MOST_ROUNDING MOST_ROUNDING_SHOWN NEARLY
    auto/sweep_counts: FEW_SWEEPS FIRST_LOOK KNOWN_FOR LAST_LOOK LONGER_CHUNKS LONGEST_WAIT LOOKS LOOK_AFTER
    auto/sweep_counts: MANY_MORE MOST_BLINDLY MOST_CORRECTED OVER_LONGER SPARE SPARE_SOLVES STRETCHES TINY TOO_MANY
    auto/trials: FINENESS NEAR TIMED
    auto/warmups: A_LITTLE FINENESS LONGER LONGEST_WAIT LOOK_AFTER LOOK_AFTER_MISS MOST_LONGER NARROW SHORTER TELLING
    auto/warmups: WORTH
"""
"""Numbers that no machine tells: tolerances, limits, how often to try, how much a gain must be."""


def chosen() -> set[str]:
    lines = (line.split(":") for line in CHOSEN.strip().splitlines())
    return {f"{file.strip()}.{name}" for file, names in lines for name in names.split()}


def constants(file: Path) -> Iterator[str]:
    """Names in capitals that a file gives numbers to."""
    for statement in ast.parse(file.read_text()).body:
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
            continue
        numbers = (node for node in ast.walk(statement.value) if isinstance(node, ast.Constant))
        if not any(isinstance(node.value, int | float) and not isinstance(node.value, bool) for node in numbers):
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name) and node.id.isupper())


def of_auto() -> set[str]:
    return {f"auto/{file.stem}.{name}" for file in (ROOT / "auto").glob("*.py") for name in constants(file)}


def test_every_constant_of_auto_is_measured_by_a_command_or_chosen() -> None:
    """One that is neither: give it a measurement in benchmarks/calibrate, or call it chosen above."""
    derived = {"auto/cudnn.PERSISTENT"}
    assert of_auto() - derived == {name for name in {*MEASURED, *BY_OTHERS, *chosen()} if name.startswith("auto/")}
    assert not chosen() & {*MEASURED, *BY_OTHERS}
    assert not MEASURED.keys() & BY_OTHERS.keys()


@pytest.mark.parametrize("name", [*MEASURED, *BY_OTHERS])
def test_a_measured_constant_stands_with_its_command(name: str) -> None:
    stored(name)
    command = BY_OTHERS.get(name, "python -m benchmarks.calibrate")
    text = (ROOT / f"{name.rsplit('.', 1)[0]}.py").read_text()
    assert re.sub(r"\s+", " ", text).count(command), f"the file does not say that `{command}` measures {name}"


def test_all_constants_are_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, constant in MEASURED.items():
        monkeypatch.setitem(MEASURED, name, replace(constant, measure=lambda: "this much"))
    calibrate.main(["--threads", str(torch.get_num_threads())])
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split(":")[0] for line in lines] == [*MEASURED, *BY_OTHERS]
    for line, constant in zip(lines, MEASURED.values(), strict=False):
        measured = constant.device == "cpu" or torch.cuda.is_available()
        assert f"here {'this much' if measured else 'not measured, no GPU'}" in line


def test_the_first_that_gains_is_no_single_win() -> None:
    assert clock.first_gain((1, 2, 4, 8, 16), lambda size: size in (2, 8, 16)) == 8
    assert clock.first_gain((1, 2, 4), lambda size: False) is None
    assert clock.largest_gain((1, 2, 4, 8), lambda size: size < 4) == 2
    assert clock.largest_gain((1, 2), lambda size: True) == "over 2"


RUN_HERE: list[Callable[..., object]] = [
    *(constant.measure for constant in MEASURED.values() if constant.device == "cpu"),
    *(cuda.cluster_step, cuda.four_rows, cuda.shared_block, cuda.torch_step_on_gpu),
]
"""Of a GPU's, what a CPU can run in their place."""


@pytest.mark.skipif(unavailable() is not None, reason="no compiled kernels")
@pytest.mark.parametrize("measure", RUN_HERE, ids=lambda measure: measure.__name__)
def test_a_measurement_runs(measure: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call is made once, and takes longer than the one before: the first of two is always the faster one."""
    taken = iter(range(1, 10**6))

    def once(run: Callable[[], object], *_: object, **__: object) -> float:
        run()
        return 1e-6 * next(taken)

    for module in (clock, cpu, cuda):
        monkeypatch.setattr(module, "seconds", once)
    measure(**({"device": "cpu"} if measure.__module__ == cuda.__name__ else {}))
