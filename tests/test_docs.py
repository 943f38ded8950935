"""README and documentation: every block of Python runs, every command line is one that exists, every link leads on."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tomllib
import types
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro

import timeloom
from timeloom.app import cli
from timeloom.app.cli.train import parse

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
BEFORE = {
    "docs/usage.md": """
        import torch, timeloom as tl
        x, xs, h0 = torch.randn(300, 2, 32), torch.randn(40, 2, 5), torch.zeros(2, 5)
        model = torch.nn.Sequential(torch.nn.GRU(3, 4))
        lengths, done = torch.tensor([300, 7]), torch.rand(300, 2) < 0.1
        W, a, b = torch.randn(5, 5) / 5, torch.rand(30, 2, 4), torch.randn(30, 2, 4)
        loader = [(torch.tensor([4, 2]), torch.randn(30, 2, 3), torch.zeros(30, 2, 4))] * 2
        criterion = lambda found, target: (found[0] - target).square().mean()
    """,
    "docs/bppsa.md": """
        import torch
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        x, target, optimiser = torch.randn(5, 4), torch.randint(3, (5,)), torch.optim.SGD(model.parameters(), 0.1)
    """,
    "docs/choose.md": "import torch, timeloom as tl; x = torch.randn(1200, 2, 8)",
    "docs/distributed.md": """
        import torch
        from pathlib import Path
        from timeloom.distributed import time_parallel
        steps, optimiser = 1, torch.optim.SGD([torch.zeros(1)])
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        Model = lambda: tl.GRU(3, 4)
        batches = [(torch.randn(30, 2, 3), torch.randn(30, 2, 4))]
    """,
    "docs/mgrit.md": "import torch; x = torch.randn(100, 2, 32)",
    "docs/newton.md": """
        import torch, timeloom as tl
        x, xs, h0 = torch.randn(50, 2, 4), torch.randn(50, 2, 3), torch.zeros(2, 3)
        cell = lambda h, x: torch.tanh(0.5 * h + x)
    """,
}
"""What a reader has at hand before the first block of a page."""
pytestmark = pytest.mark.usefixtures("one_thread")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", [name for name in NAMES if "```python" in (ROOT / name).read_text()])
def test_every_block_of_python_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "docs/app.md":
        data = "turning:length=64,train=4,valid=2,test=2"
        assert cli.run("train", ["--data", data, "--epochs", "1", "--out", "runs/a", "--compare", "0", "--debug"]) == 0
    torch.manual_seed(0)
    space: dict[str, object] = {"__name__": "page"}
    exec("\n".join(line.strip() for line in BEFORE.get(name, "").splitlines()), space)
    try:
        for number, block in enumerate(blocks(ROOT / name, "python"), start=1):
            exec(compile(block, f"{name}, block {number}", "exec"), space)
    finally:
        if "torch._dynamo" in sys.modules:
            torch._dynamo.config.allow_rnn = False  # as torch has it
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def command_lines() -> list[tuple[str, list[str]]]:
    """Every command in a block of shell, without its comment."""
    found = []
    for page, name in zip(PAGES, NAMES, strict=True):
        for block in blocks(page, "sh"):
            lines = block.replace("\\\n", " ").splitlines()
            found += [(name, words) for words in (shlex.split(line, comments=True) for line in lines) if words]
    return found


@pytest.mark.parametrize(
    ("name", "words"), command_lines(), ids=[f"{name}: {' '.join(words)}" for name, words in command_lines()]
)
def test_every_command_exists(name: str, words: list[str]) -> None:
    program, *rest = words
    if program == "timeloom":
        command, *options = rest
        if command == "train":
            if options[:1] == ["--config"]:  # a file of a run of the reader's
                options = options[2:]
            if options[:1] != ["--resume"]:
                parse(options)
        elif command != "bench":
            tyro.cli(import_module(f"timeloom.app.cli.{command}").Options, args=options)
    elif program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        asked = [extra for word in rest for found in re.findall(r"\[(.*)\]", word) for extra in found.split(",")]
        assert set(asked) <= set(extras)
    elif program == "python":
        if rest[0] == "-m":
            assert importlib.util.find_spec(rest[1])
        else:
            assert (ROOT / rest[0]).is_file()
    elif program in ("torchrun", "srun"):
        assert "--nproc-per-node" in rest
    elif program == "export" or "=" in program:  # variables for the lines below
        assert rest or "=" in program
    else:
        pytest.fail(f"{name}: what is {program!r}?")


@pytest.mark.parametrize("name", NAMES)
def test_every_link_to_a_file_leads_somewhere(name: str) -> None:
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if ":" not in target:
            assert ((ROOT / name).parent / target).exists(), target


def files_named(text: str) -> set[str]:
    """Paths of sources in marks of code, those with a part left open aside."""
    named = re.findall(r"`([\w./*]+\.(?:py|c|h|cu|cuh))`", text)
    return {name for name in named if "*" not in name}


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/design.md"])
def test_every_source_that_is_named_exists(name: str) -> None:
    package = ROOT / "src" / "timeloom"
    held = {path.name for path in package.rglob("*.*")}
    for path in files_named((ROOT / name).read_text()):
        known = path in held if "/" not in path else (package / path).exists() or (ROOT / path).exists()
        assert known, f"{name} names {path}, which is not there"


@pytest.mark.parametrize("folder", ["solve", "auto"])
def test_the_page_on_the_design_tells_of_every_file(folder: str) -> None:
    """Of those that a call goes through."""
    text = (ROOT / "docs" / "design.md").read_text().partition("\n## Who does what")[2].partition("\n### ")[0]
    told = {Path(name).stem for name in re.findall(r"`([\w./]+)`", text)}
    files = {path.stem for path in (ROOT / "src" / "timeloom" / folder).glob("*.py")} - {"__init__"}
    assert not files - told


def table(page: str, head: str) -> list[list[str]]:
    """The rows of a page's first table whose first line begins so, without marks of emphasis."""
    lines = (ROOT / page).read_text().partition(f"\n{head}")[2].splitlines()[2:]
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.strip(" *") for cell in row.strip("|").split("|")] for row in rows]


def stored(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def test_the_readme_tells_the_ratios_that_were_measured() -> None:
    """Its table and the picture above it are of the same results."""
    from benchmarks.shares import README, RESULTS, readme_rows

    rows = readme_rows(RESULTS)
    assert len(rows) == len(README)
    assert "\n".join(rows) in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", ["README.md", "docs/numbers.md"])
def test_what_is_told_of_trained_networks_was_measured(page: str) -> None:
    from benchmarks.zoo.layers import OWN_CELLS

    rows = [row for row in stored("trained-cuda")["rows"] if not any(cell in row["network"] for cell in OWN_CELLS)]
    ratios = [row["torch ms"] / row["auto ms"] for row in rows]
    text = (ROOT / page).read_text()
    for ratio in (min(ratios), statistics.median(ratios), max(ratios)):
        assert f"{ratio:.1f}×" in text


def test_the_page_of_defaults_tells_what_was_measured() -> None:
    from benchmarks.defaults import page

    assert (ROOT / "benchmarks" / "results" / "defaults.md").read_text() == page(stored("defaults")["runs"])


def test_the_page_of_numbers_tells_the_ratios_that_were_measured() -> None:
    measured = [
        [case["cell"], *(str(case[key]) for key in ("length", "batch", "hidden")), case["regime"]["name"], one["ratio"]]
        for one in stored("headline")["measurements"]
        for case in [one["case"]]
    ]
    told = [[*row[:5], row[7]] for row in table("docs/numbers.md", "| layer | T | B | n |")]
    assert [row[:5] for row in told] == [row[:5] for row in measured]
    for (*_, text), (*_, ratio) in zip(told, measured, strict=True):
        assert text == (f"{ratio:.1f}×" if ratio < 10 else f"{ratio:.0f}×")


@pytest.mark.parametrize(
    ("line", "name", "key", "case"),
    [
        ("GRU, called as usual", "gpu", "ratio", "GRU T=16384 B=1 n={} default"),
        ("in a CUDA graph", "gpu", "graph_ratio", "GRU T=16384 B=1 n={} default"),
        ("16 sequences, called as usual", "gpu", "ratio", "GRU T=16384 B=16 n={} default"),
        ("in a graph", "gpu", "graph_ratio", "GRU T=16384 B=16 n={} default"),
        ("long memory (bias +4)", "gpu-regimes", "graph_ratio", "GRU T=16384 B=1 n={} bias+4"),
        ("bfloat16", "gpu-half", "graph_ratio", "GRU T=16384 B=1 n={} default bfloat16"),
    ],
)
def test_the_page_of_numbers_tells_the_ratios_that_were_measured_on_a_gpu(
    line: str, name: str, key: str, case: str
) -> None:
    widths = (16, 32, 64, 128, 256, 512, 1024) if name == "gpu" else (32, 128, 256, 512, 1024)
    rows = {row[0]: row[1:] for row in table("docs/numbers.md", f"| units | {widths[0]} |")}
    measured = {row["case"]: row[key] for row in stored(name)["rows"] if key in row}
    for units, text in zip(widths, rows[line], strict=True):
        ratio = measured.get(case.format(units))
        assert text == ("–" if ratio is None else f"{ratio:.1f}×" if ratio < 10 else f"{ratio:,.0f}×")


def test_the_page_on_odes_tells_the_times_that_were_measured() -> None:
    measured = {(row[0], row[1], row[2]): row for row in table("experiments/ode/results/ode.md", "| problem | dtype |")}
    for problem, dtype, *cells in table("docs/ode.md", "| | dtype |"):
        loop, ours = (measured[problem, dtype, way] for way in ("loop of rk4", "odeint, rk4"))
        times = [float(cell.split()[0]) for cell in (loop[3], loop[4], ours[3], ours[4])]
        faster = " / ".join(f"{float(cell[:-1]):.0f}×" for cell in ours[5:7])
        assert cells[:4] == [
            f"{times[0]:.0f} ms",
            f"{times[1] / 1000:.1f} s",
            *(f"{time:.0f} ms" for time in times[2:]),
        ]
        assert cells[4:] == [faster, loop[7], ours[7]]


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    pages = {path.parent.name for path in tmp_path.glob("*/index.html")}
    assert {"choose", "cells", "ragged", "app", "design", "numbers", "api"} <= pages
    assert (tmp_path / "files" / "benchmarks" / "results" / "grid.png").is_file()
    api = (tmp_path / "api" / "index.html").read_text()
    missing = [
        name
        for name in timeloom.__all__
        if not isinstance(getattr(timeloom, name), types.ModuleType) and f'id="timeloom.{name}"' not in api
    ]
    assert missing == []
