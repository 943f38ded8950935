"""Kernels that come compiled with a wheel: made for several kinds of processors, run on the threads of torch."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch

import timeloom
from timeloom.kernels.cpu import build, packaged
from timeloom.version import VERSION

ROOT = Path(__file__).parents[1]


def test_the_version_comes_from_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version", "readme"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "timeloom.version.VERSION"}
    assert timeloom.__version__ == VERSION
    assert f"[Unreleased]: {VERSION}" in (ROOT / "CHANGELOG.md").read_text()


def test_a_checkout_has_no_packaged_kernels() -> None:
    """They would hide a change of the source."""
    if Path(timeloom.__file__).is_relative_to(ROOT):
        assert packaged.library() is None


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_packaged_kernels_are_made_and_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged, "FLAGS", [flag for flag in packaged.FLAGS if flag != "-O3"])  # fast to compile
    monkeypatch.setattr(packaged, "KINDS", {"DEFAULT": packaged.KINDS["DEFAULT"]})
    (made,) = packaged.build(["cc"], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [made.name]
    needed = subprocess.run(["readelf", "-d", str(made)], capture_output=True, text=True, check=False)
    assert "libgomp" not in needed.stdout  # torch's own runtime is used
    monkeypatch.setattr(packaged, "library_path", lambda folder, kind: tmp_path / f"kernels-{kind}.so")
    found = packaged.library()
    assert found is not None
    assert hasattr(found, "timeloom_jump")
    monkeypatch.setenv("PATH", str(tmp_path))  # no compiler
    monkeypatch.delenv("CC", raising=False)
    build._load.cache_clear()
    try:
        assert build.unavailable() is None
        torch.manual_seed(0)
        layer, x = torch.nn.GRU(3, 5), torch.randn(200, 2, 3)
        expected = layer(x)[0]
        assert torch.allclose(timeloom.parallelize(layer)(x)[0], expected, atol=1e-5)
    finally:
        build._load.cache_clear()


def test_a_compiler_that_fails_is_told(tmp_path: Path) -> None:
    with pytest.raises((OSError, subprocess.CalledProcessError)):
        packaged.build([str(tmp_path / "no-compiler")], tmp_path)
