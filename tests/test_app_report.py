"""Pages and charts: whole by themselves, with the numbers that were measured."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

import timeloom
from timeloom.app import cli
from timeloom.app.train import page
from timeloom.app.train.chart import HEIGHT, MOST_HOVERS, MOST_POINTS, WIDTH, Line, line_chart, number, scatter_chart

SVG = "{http://www.w3.org/2000/svg}"
OPEN_ENDED = {"meta", "link", "br"}


class Reader(HTMLParser):
    """Gathers tags and text, and checks that what is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in OPEN_ENDED:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def curves(svg: str) -> list[list[tuple[float, float]]]:
    """The points of every curve of a chart."""
    paths = [
        e.get("d", "") for e in ElementTree.fromstring(svg).iter(f"{SVG}path") if e.get("fill") and e.get("stroke")
    ]
    return [[(float(a), float(b)) for a, b in (p.split() for p in d[1:].split("L"))] for d in paths]


def test_a_chart_places_values_in_proportion() -> None:
    (points,) = curves(line_chart([Line("a", [0, 5, 10], [0, 1, 4])], "t", "x", "y"))
    xs, ys = zip(*points, strict=True)
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)
    assert (ys[0] - ys[2]) == pytest.approx(4 * (ys[0] - ys[1]), abs=0.5)
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)


def test_a_logarithmic_axis_is_even_in_factors_and_leaves_out_zeros() -> None:
    (points,) = curves(line_chart([Line("a", [1, 2, 3, 4], [1e-6, 1e-4, 0, 1e-2])], "t", "x", "y", log_y=True))
    assert len(points) == 3
    ys = [y for _, y in points]
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2)


@pytest.mark.parametrize("ys", [[3.0], [2.0, 2.0], [0.0, 0.0], [-1.0, -1.0], [1e-12, 1e12]])
@pytest.mark.parametrize("log", [False, True])
def test_awkward_values_still_make_a_chart(ys: list[float], log: bool) -> None:
    made = line_chart([Line("a<b", list(range(1, len(ys) + 1)), ys)], "x & y", "x", "y", log_y=log)
    if log and max(ys) <= 0:
        assert made == ""  # nothing to show is not shown
    else:
        assert len(curves(made)) == 1
    assert "a<b" not in made


def test_points_tell_their_values() -> None:
    svg = ElementTree.fromstring(line_chart([Line("loss", range(200), [0.5] * 200)], "t", "x", "y"))
    told = [title.text for title in svg.iter(f"{SVG}title")]
    assert told[0] == "loss: 0.5 at 0"
    assert len(told) <= MOST_HOVERS


def test_numbers_are_drawn_beside_the_true_ones() -> None:
    svg = ElementTree.fromstring(scatter_chart([(1.0, 1.5), (2.0, 2.0), (math.nan, 1.0)], "t", "true", "predicted"))
    assert [title.text for title in svg.iter(f"{SVG}title")] == ["true 1, predicted 1.5", "true 2, predicted 2"]
    assert scatter_chart([(math.nan, math.nan)], "t", "x", "y") == ""


def test_a_count_stands_out_from_its_colour() -> None:
    made = page.counts(["a", "b"], [[9, 1], [5, 5]])
    assert made.count('class="full"') == 1


def test_long_lines_are_thinned_to_means() -> None:
    count = 10 * MOST_POINTS
    (points,) = curves(line_chart([Line("a", list(range(count)), [i % 2 for i in range(count)])], "t", "x", "y"))
    assert len(points) == MOST_POINTS
    assert len({y for _, y in points}) == 1


def test_a_long_legend_takes_more_rows() -> None:
    def heights(count: int) -> tuple[float, set[str | None]]:
        svg = ElementTree.fromstring(
            line_chart([Line(f"solver {i}", [1, 2], [1, 2]) for i in range(count)], "t", "x", "y")
        )
        labels = [e for e in svg.iter(f"{SVG}text") if (e.text or "").startswith("solver")]
        assert all(float(e.get("x", "0")) + 6 * len(e.text or "") < WIDTH for e in labels)
        return float(svg.get("viewBox", "").split()[3]), {e.get("y") for e in labels}

    assert heights(2) == (HEIGHT, {"34"})
    tall, rows = heights(11)
    assert tall > HEIGHT
    assert len(rows) > 1


def test_numbers_are_short() -> None:
    assert [number(v) for v in (0, 0.5, 1e-6, 2e5, 1234)] == ["0", "0.5", "1e-6", "2e5", "1,234"]


def test_pages_escape_what_users_name_things() -> None:
    made = page.page(
        "<b>", page.heading("<i>"), page.counts(["<u>", "b"], [[3, 1], [0, 0]]), page.table([["<s>", "1"]])
    )
    assert not {"b", "i", "u", "s"} & set(Reader(made).tags)


def test_a_run_writes_a_report_that_needs_nothing_else(tmp_path: Path) -> None:
    data = "turning:length=1024,train=8,valid=4,test=6"
    options = [
        "--data",
        data,
        "--hidden",
        "6",
        "--epochs",
        "2",
        "--compare",
        "2",
        "--bidirectional",
        "--solver",
        "shooting:chunk=64",
    ]
    assert cli.run("train", [*options, "--out", str(tmp_path / "run"), "--debug"]) == 0
    text = (tmp_path / "run" / "report.html").read_text()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    read = Reader(text)
    words = " ".join(" ".join(read.words).split())
    assert read.links == ["data:,"]
    assert not {"script", "img", "iframe"} & set(read.tags)
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "width=device-width" in text
    assert read.tags.count("svg") == 7
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        assert curves(svg)
    assert f"{summary['speedup']:.1f}x" in words
    assert "layer 1 reversed backward" in words
    assert f"timeloom {timeloom.__version__}" in words
    assert summary["made"] in words
    assert summary["command"] in words
    assert "of time ran in parallel" in words
    assert "right when answered" in words
    assert sum(sum(row) for row in summary["confusion"]) == 6
    assert "weight decay" in words
