"""The C kernels that come compiled with a wheel: one library for each kind of processor, selected at run time.

Building them needs only the standard library: setup.py runs this file by itself.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = [HERE / "jump.c", HERE / "pack.c", HERE / "draws.c", HERE.parents[1] / "scan" / "cpu_scan.c"]
STEPS = sorted((HERE / "generated").glob("*.c"))
"""Generated steps of torch's cells, as files: texts.py, which writes them, needs more than the standard library."""
FLAGS = ["-O3", "-std=gnu11", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl"]
KINDS = {"AVX512": ["-mavx2", "-mfma", *AVX512], "AVX2": ["-mavx2", "-mfma"], "DEFAULT": ["-march=x86-64"]}
"""Instruction sets of processors by torch's names, and the compiler flags for them."""


def library() -> ctypes.CDLL | None:
    """The wheel's kernels for this processor; None if there are none, as in a source checkout."""
    import torch  # not at the top: setup.py runs without torch

    able = torch.backends.cpu.get_cpu_capability()
    path = library_path(Path(__file__).parent, able if able in KINDS else "DEFAULT")
    if not path.is_file():
        return None
    runtimes = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    for runtime in (None, *runtimes, "libgomp.so.1"):  # None: torch has loaded its OpenMP runtime globally
        try:
            if runtime is not None:
                ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(path))
        except OSError:
            continue
    return None


def library_path(folder: Path, kind: str) -> Path:
    return folder / f"kernels-{kind}.so"


def build(compiler: list[str], folder: Path) -> list[Path]:
    """Compile the libraries of a wheel. Raises CalledProcessError with the compiler's output, or OSError."""
    made = []
    for kind, flags in KINDS.items():
        path = library_path(folder, kind)
        sources = [*SOURCES, *STEPS]
        objects = [folder / f"{kind}-{source.stem}.o" for source in sources]
        common = [*compiler, *FLAGS, *flags, f"-I{HERE}", "-c"]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            commands = [[*common, str(of), "-o", str(to)] for of, to in zip(sources, objects, strict=True)]
            list(pool.map(_run, commands))
        # Not linked to an OpenMP runtime: torch brings one, and two would compete for the cores.
        _run([*compiler, "-shared", *map(str, objects), "-o", str(path), "-lm"])
        for compiled in objects:
            compiled.unlink()
        made.append(path)
    return made


def _run(command: list[str]) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True)
