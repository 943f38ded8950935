"""report.html and inspect.html in a real browser: no complaints, no network, everything fits, on a phone too."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import manual_seed

import timeloom.inspection.trials
from tests.browser import NAMES, Visit, browser, picture, visit
from timeloom.app import cli

pytestmark = pytest.mark.skipif(browser() is None, reason=f"no browser here; install one of {', '.join(NAMES)}")
PHONE, DESKTOP = 390, 1280
BROKEN = """<!DOCTYPE html><meta charset="utf-8"><link rel="icon" href="data:,"><body style="margin: 0">
<svg width="50" height="20"><text x="40" y="15">too long for its drawing</text></svg>
<div style="width: 900px">wide</div><img src="nowhere.png"><script>undefined_name.call()</script>"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with both pages: two directions and layers, long names, a fallback in the legend."""
    manual_seed(0)
    run = tmp_path_factory.mktemp("pages") / "run"
    data = "turning:length=512,train=8,valid=4,test=6"
    options = ["--data", data, "--hidden", "6", "--layers", "2", "--bidirectional", "--epochs", "3", "--compare", "3"]
    options += ["--solver", "shooting:chunk=128"]
    assert cli.run("train", [*options, "--out", str(run), "--debug"]) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeloom.inspection.trials, "REPEATS", 0)
        assert cli.run("inspect", [str(run), "--batch", "1", "--debug"]) == 0
    return run


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profile")


@pytest.mark.parametrize(("name", "drawings"), [("report.html", 7), ("inspect.html", 10)])
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_a_page_fits_and_needs_nothing(name: str, drawings: int, width: int, pages: Path, profile: Path) -> None:
    seen = visit(pages / name, width, profile)
    assert seen.complaints == []
    assert seen.asked_for == [f"/{name}"]
    assert seen.width == width
    assert seen.cut == []
    assert seen.drawings == drawings
    assert seen.smallest > 10


def test_what_is_wrong_with_a_page_is_seen(tmp_path: Path, profile: Path) -> None:
    (tmp_path / "broken.html").write_text(BROKEN)
    seen: Visit = visit(tmp_path / "broken.html", PHONE, profile)
    assert any("undefined_name" in line for line in seen.complaints)
    assert "/nowhere.png" in seen.asked_for
    assert seen.width == 900
    assert seen.cut == ["too long for its drawing"]


def test_pictures_show_something(pages: Path, profile: Path, tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    picture(pages / "report.html", PHONE, 800, tmp_path / "phone.png", profile)
    pixels = image.imread(tmp_path / "phone.png")
    assert pixels.shape[:2] == (800, PHONE)
    assert pixels[..., :3].std() > 0.05
