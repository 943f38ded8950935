"""Compiles the CPU kernels into the wheel, for several kinds of x86-64 processors, and makes its description of the
README; all else is in pyproject.toml.

A wheel made where there is no C compiler, or for another processor, is pure Python: the kernels are then built on first
use, as in an editable install.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ModuleNotFoundError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel  # type: ignore[no-redef, import-not-found]

ROOT = Path(__file__).parent
PACKAGE = "timeloom/kernels/cpu"
COMMANDS = """```sh
pip install 'timeloom[app]'             # the command line's libraries; timeloom itself needs torch alone
timeloom doctor                         # what this machine has, and a self-test with a speedup
timeloom train                          # trains a GRU on a built-in task, torch beside timeloom
timeloom train --data my_folder         # CSV, NPY or Parquet files with labels: timeloom train --help
```

The files named here, the documentation (`docs/`), the examples and the programs that measured the numbers
(`python -m benchmarks …`) are in the source distribution. Apache-2.0.
"""
spec = importlib.util.spec_from_file_location("packaged", ROOT / "src" / PACKAGE / "packaged.py")
assert spec is not None
assert spec.loader is not None
packaged = importlib.util.module_from_spec(spec)
spec.loader.exec_module(packaged)


def compiled_here() -> bool:
    return sys.platform == "linux" and platform.machine() == "x86_64"


class BuildWithKernels(build_py):
    """Puts the compiled kernels beside their source, in the build folder alone."""

    def run(self) -> None:
        super().run()
        if compiled_here() and not self.editable_mode:
            folder = Path(self.build_lib) / PACKAGE
            try:
                made = packaged.build(shlex.split(os.environ.get("CC", "cc")), folder)
            except (OSError, subprocess.CalledProcessError) as error:
                said = getattr(error, "stderr", None) or error
                print(f"warning: the wheel has no compiled kernels, they will be built on first use: {said}")
                for left in (*folder.glob("*.o"), *folder.glob("*.so")):
                    left.unlink()
                return
            print(f"compiled {', '.join(path.name for path in made)}")


class PlatformWheel(bdist_wheel):
    """A wheel with compiled kernels suits one kind of machine, any Python, and any C library that has their symbols."""

    def get_tag(self) -> tuple[str, str, str]:
        made = sorted((Path(self.bdist_dir) / PACKAGE).glob("*.so"))
        if not made:
            return "py3", "none", "any"
        needed = [int(found) for path in made for found in re.findall(rb"GLIBC_2\.(\d+)", path.read_bytes())]
        return "py3", "none", f"manylinux_2_{max([17, *needed])}_x86_64"


def description() -> str:
    """The README as it is true without a checkout: no pictures, no links to files, no commands that need one."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    pictures, commands, pages = r"^!\[[^]]*\]\([^)]*\)\n+", r"^```sh\n.*?^```\n+", r"^\*\*Read on:\*\*.*?(?:\n\n|\Z)"
    for of_a_checkout in (pictures, commands, pages):
        text = re.sub(of_a_checkout, "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"\[([^]]*)\]\((?!https?:)([^)]*)\)", r"\1 (`\2`)", text) + COMMANDS


setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel},
)
