"""The C kernels that come compiled with a wheel, one library for each kind of processor; chosen as timeloom is used.

Making them needs the standard library alone: setup.py runs this file by itself.
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
"""Steps of torch's cells, written by texts.py: this file needs the standard library alone."""
FLAGS = ["-O3", "-std=gnu11", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl"]
KINDS = {"AVX512": ["-mavx2", "-mfma", *AVX512], "AVX2": ["-mavx2", "-mfma"], "DEFAULT": ["-march=x86-64"]}
"""What a processor can do, as torch names it, and the compiler's words for it."""


def library() -> ctypes.CDLL | None:
    """The kernels of the wheel for this processor; None where there are none, as in a source checkout."""
    import torch  # not at the top: setup.py has none

    able = torch.backends.cpu.get_cpu_capability()
    path = library_path(Path(__file__).parent, able if able in KINDS else "DEFAULT")
    if not path.is_file():
        return None
    runtimes = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    for runtime in (None, *runtimes, "libgomp.so.1"):  # torch has loaded its own OpenMP runtime, for all to see
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
    """Compile the libraries of a wheel. Raises CalledProcessError with what the compiler said, or OSError."""
    made = []
    for kind, flags in KINDS.items():
        path = library_path(folder, kind)
        sources = [*SOURCES, *STEPS]
        objects = [folder / f"{kind}-{source.stem}.o" for source in sources]
        common = [*compiler, *FLAGS, *flags, f"-I{HERE}", "-c"]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            commands = [[*common, str(of), "-o", str(to)] for of, to in zip(sources, objects, strict=True)]
            list(pool.map(_run, commands))
        # Linked against no OpenMP runtime: torch brings one, and two would fight for the cores.
        _run([*compiler, "-shared", *map(str, objects), "-o", str(path), "-lm"])
        for compiled in objects:
            compiled.unlink()
        made.append(path)
    return made


def _run(command: list[str]) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True)
