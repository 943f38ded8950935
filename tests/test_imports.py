"""Imports point one way: every module can be imported alone, and none imports from a layer above its own."""

from __future__ import annotations

import ast
import os
import sys
import traceback
import types
from pathlib import Path

import pytest
import torch  # noqa: F401  # before the forks: each child would import it anew

ROOT = Path(__file__).parents[1] / "src" / "timeloom"
MODULES = sorted(
    ".".join(("timeloom", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
    if path.name != "__main__.py"
)
LAYERS = (
    ("options", "report", "torch_state", "buffers", "version"),
    ("compile",),
    ("cells",),
    ("problem", "known", "compile.hoist", "compile.fuse", "compile.remember"),
    ("kernels",),
    ("scan", "mgrit", "auto.warmups", "auto.sweep_counts", "auto.rounding", "auto.trials", "auto.costs"),
    ("auto.experience", "auto.layer_experience"),
    ("solve", "compile.call"),
    ("mgrit.driver", "auto"),
    ("solvers",),
    ("distributed",),
    ("nn",),
    ("bppsa", "check", "windows", "unroll", "inspection"),
    ("ode", "forcing"),
    ("",),
    ("app",),
)
"""Modules and folders from the lowest layer up; the longest name that fits counts. "" is the package itself."""
OPTIONAL = {"triton", "cv2", "matplotlib", "huggingface_hub", "pyarrow", "torchvision", "rich", "tensorboard"}
"""Libraries that a module may need beyond torch, where it is about them."""


def layer_of(module: str) -> int:
    """The place of a module's layer."""
    name = module.removeprefix("timeloom").removeprefix(".")
    fits = [(len(each), place) for place, layer in enumerate(LAYERS) for each in layer if _belongs(name, each)]
    assert fits, f"{module} belongs to no layer: add it to LAYERS"
    return max(fits)[1]


def _belongs(name: str, folder: str) -> bool:
    return name == folder or (folder != "" and name.startswith(folder + "."))


def imported_by(module: str) -> set[str]:
    """The modules of the package that a module imports when it runs, in functions too; not for its types alone."""
    path = ROOT.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {part if part in MODULES else node.module for part in parts}
    return {name for name in found if name.split(".")[0] == "timeloom"}


@pytest.mark.parametrize("module", MODULES)
def test_no_module_imports_from_a_layer_above(module: str) -> None:
    own = layer_of(module)
    above = sorted(name for name in imported_by(module) if layer_of(name) > own)
    assert not above, f"{module} (layer {own}) imports from above: {above}"


def test_no_circle_of_imports() -> None:
    """Within a layer too, packages' own __init__ aside: those hold what their modules export."""
    left = {module: imported_by(module) - {module} for module in MODULES}
    left["timeloom.nn.graphs.handles"] = set()  # what torch.compile traces is imported by its tracing alone
    while True:
        done = {module for module, needs in left.items() if not needs & left.keys()}
        if not done:
            break
        left = {module: needs for module, needs in left.items() if module not in done}
    assert not left, f"these import each other: {sorted(left)}"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a fresh interpreter for each module would take minutes")
@pytest.mark.parametrize("module", MODULES)
def test_every_module_can_be_imported_alone(module: str) -> None:
    """In a process where nothing of the package has been imported, not even its __init__, which would come first."""
    if module == "timeloom":
        return
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, _import_alone(module).encode()[-60_000:])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        error = pipe.read()
    os.waitpid(child, 0)
    missing = error.splitlines()[-1] if error else ""
    if missing.startswith("ModuleNotFoundError") and any(f"'{name}" in missing for name in OPTIONAL):
        pytest.skip(missing)
    assert not error, error


def _import_alone(module: str) -> str:
    """What went wrong, or nothing."""
    for name in [name for name in sys.modules if name.split(".")[0] == "timeloom"]:
        del sys.modules[name]
    bare = types.ModuleType("timeloom")
    bare.__path__ = [str(ROOT)]
    sys.modules["timeloom"] = bare
    try:
        __import__(module)
    except BaseException:
        return traceback.format_exc()
    return ""
