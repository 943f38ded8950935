"""What `make release-check` runs in a fresh environment with the wheel: `python -I installed_wheel.py README.md SDIST`.

It checks that timeloom is the installed one, that its compiled kernels are used although there is no compiler, that
the kernels for each kind of processor give the same results, that the README's code and commands run, and that links
are valid: those of the README within the source distribution, those of the metadata only to web addresses.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import torch

import timeloom
from timeloom.kernels.cpu import build, packaged

DATA = "turning:length=2048,train=8,valid=4,test=4"
ONE_KIND = """
import torch, timeloom as tl
from timeloom.kernels.cpu import build
assert build.unavailable() is None, build.unavailable()
torch.manual_seed(0)
layer = torch.nn.GRU(5, 7)
x = torch.randn(300, 3, 5)
expected = layer(x)[0]
found = tl.parallelize(layer)(x)[0]
error = (found - expected).abs().max().item()
assert error < 1e-5, error
print(torch.backends.cpu.get_cpu_capability(), f"{error:.1e}")
"""


LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def main(readme: str, sdist: str) -> None:
    here = Path(timeloom.__file__).parent
    assert Path(sys.prefix) in here.parents, f"{here} is not of this environment"
    assert timeloom.__version__ == importlib.metadata.version("timeloom")
    assert (here / "py.typed").is_file()
    compilers = [name for name in ("cc", "gcc", "clang") if shutil.which(name)]
    assert not compilers, f"there is a compiler: {compilers}"
    assert build.unavailable() is None, build.unavailable()
    assert packaged.library() is not None
    print(f"timeloom {timeloom.__version__}, {torch.backends.cpu.get_cpu_capability()} kernels of the wheel")

    check_links(sdist)

    for kind in ("default", "avx2", "avx512"):  # torch takes no more than the processor can
        environment = {**os.environ, "ATEN_CPU_CAPABILITY": kind}
        subprocess.run([sys.executable, "-I", "-c", ONE_KIND], env=environment, check=True)

    blocks = re.findall(r"^```python\n(.*?)^```", Path(readme).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    space: dict[str, object] = {}
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"{readme}, block {number}", "exec"), space)
    print(f"{len(blocks)} blocks of Python in the README run")

    commands = re.findall(r"^timeloom (\w+)", importlib.metadata.metadata("timeloom")["Description"], re.MULTILINE)
    assert commands
    for words in (
        *([command, "--help"] for command in dict.fromkeys(commands)),
        ["train", "--data", DATA, "--epochs", "1", "--compare", "1", "--out", "run"],
        ["evaluate", "run"],
        ["predict", "run", "--data", DATA, "--out", "answers.csv"],
        ["doctor", "--steps", "1024"],
    ):
        print("$ timeloom", *words, flush=True)
        subprocess.run([str(Path(sys.executable).with_name("timeloom")), *words], check=True)


def check_links(sdist: str) -> None:
    metadata = importlib.metadata.metadata("timeloom")
    description = metadata["Description"]
    assert description.startswith("# timeloom"), description[:200]
    dead = [link for link in LINK.findall(description) if not link.startswith("https://")]
    assert not dead, f"the metadata lead to files: {dead}"
    of_a_checkout = [words for words in ("make ", "pip install .", "Read on", "![") if words in description]
    assert not of_a_checkout, f"the metadata speak of what a wheel does not hold: {of_a_checkout}"
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        (readme,) = (name for name in archive.getnames() if name.count("/") == 1 and name.endswith("/README.md"))
        found = archive.extractfile(readme)
        assert found is not None
        links = [link for link in LINK.findall(found.read().decode()) if ":" not in link]
    assert links
    missing = [link for link in links if link not in names]
    assert not missing, f"the source distribution lacks {missing}"
    print(f"{len(links)} links of the README lead to files of {Path(sdist).name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
