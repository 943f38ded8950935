"""Charts as SVG text, small enough to stand in a page and large enough to be read on a phone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean

WIDTH, HEIGHT = 440, 290
LEFT, RIGHT, TOP, BOTTOM = 66, 26, 44, 42
COLOURS = tuple(f"var(--c{i})" for i in range(12))
"""As the page defines them, for light and for dark screens."""
LEGEND_ROW = 16
MOST_POINTS = 300
"""Longer lines are thinned: more could not be told apart."""
MOST_HOVERS = 60
"""Points of a line that tell their value."""


@dataclass(frozen=True)
class Line:
    """One curve."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    dots: bool = False
    """Mark every point, for few of them."""
    dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """From values to a stretch of pixels."""

    low: float
    high: float
    log: bool
    start: float
    stop: float
    whole: bool = False
    """Whether its values are counts, and ticks between them mean nothing."""

    def place(self, value: float) -> float:
        at, low, high = (
            (math.log10(v) for v in (value, self.low, self.high)) if self.log else (value, self.low, self.high)
        )
        return self.start + (at - low) / (high - low) * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Round values within the axis."""
        if self.log:
            decades = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            step = max(1, math.ceil(len(decades) / 6))
            return [10.0**decade for decade in decades[::step]]
        rough = (self.high - self.low) / 4
        power = 10 ** math.floor(math.log10(rough))
        factors = (1, 2, 5, 10) if self.whole and power < 10 else (1, 2, 2.5, 5, 10)
        step = next(power * factor for factor in factors if power * factor >= rough * (1 - 1e-9))
        step = max(step, 1.0) if self.whole else step
        first = math.ceil(self.low / step - 1e-9)
        return [step * i for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def line_chart(
    lines: Sequence[Line], title: str, x_label: str, y_label: str, log_x: bool = False, log_y: bool = False
) -> str:
    """The chart, nothing where there is nothing to show; values that a logarithmic axis cannot show are left out."""
    shown = [_showable(_thinned(line), log_x, log_y) for line in lines]
    shown = [line for line in shown if line.xs]
    if not shown:
        return ""
    x = _axis([v for line in shown for v in line.xs], log_x, LEFT, WIDTH - RIGHT)
    legend, rows = _legend(shown)
    top, height = TOP + LEGEND_ROW * (rows - 1), HEIGHT + LEGEND_ROW * (rows - 1)
    y = _axis([v for line in shown for v in line.ys], log_y, height - BOTTOM, top)
    middle = (top + height - BOTTOM) / 2
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}" xmlns="http://www.w3.org/2000/svg">',
        f'<text class="title" x="{LEFT - 52}" y="15">{escape(title)}</text>',
        *legend,
        *_grid(x, y),
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{height - 6}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate(12 {middle}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>',
    ]
    for index, line in enumerate(shown):
        parts += _curve(line, x, y, COLOURS[index % len(COLOURS)])
    return "\n".join([*parts, "</svg>"])


def bar_chart(bars: Sequence[tuple[str, float]], title: str, unit: str) -> str:
    """Horizontal bars from zero, each with its number."""
    left, row, head = 124, 24, 28
    most = max(value for _, value in bars)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {head + row * len(bars) + 6}" role="img" aria-label="{escape(title)}" '
        f'xmlns="http://www.w3.org/2000/svg">',
        f'<text class="title" x="{LEFT - 52}" y="15">{escape(title)}</text>',
    ]
    for index, (name, value) in enumerate(bars):
        top, width = head + row * index, (WIDTH - left - 84) * value / most
        parts.append(f'<text x="{left - 6}" y="{top + 14}" text-anchor="end">{escape(name)}</text>')
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f'<rect x="{left}" y="{top + 2}" width="{max(width, 1):.1f}" height="16" fill="{colour}"/>')
        parts.append(f'<text x="{left + max(width, 1) + 5:.1f}" y="{top + 14}">{value:,.1f} {escape(unit)}</text>')
    return "\n".join([*parts, "</svg>"])


def _axis(values: Sequence[float], log: bool, start: float, stop: float) -> Axis:
    low, high = min(values), max(values)
    if log:
        low, high = 10 ** math.floor(math.log10(low) + 1e-9), 10 ** math.ceil(math.log10(high) - 1e-9)
        return Axis(low, high if high > low else low * 10, log, start, stop)
    margin = 0.04 * (high - low) or 0.5 * abs(high) or 1.0
    whole = all(float(value).is_integer() for value in values)
    return Axis(0.0 if 0 <= low < 0.5 * high else low - margin, high + margin, log, start, stop, whole)


def _thinned(line: Line) -> Line:
    """At most MOST_POINTS, each the mean of its neighbours."""
    width = math.ceil(len(line.xs) / MOST_POINTS)
    if width <= 1:
        return line

    def average(values: Sequence[float]) -> list[float]:
        return [fmean(values[i : i + width]) for i in range(0, len(values), width)]

    return Line(line.label, average(line.xs), average(line.ys), line.dots, line.dashed)


def _showable(line: Line, log_x: bool, log_y: bool) -> Line:
    pairs = [
        (x, y)
        for x, y in zip(line.xs, line.ys, strict=True)
        if math.isfinite(x) and math.isfinite(y) and (x > 0 or not log_x) and (y > 0 or not log_y)
    ]
    return Line(line.label, [x for x, _ in pairs], [y for _, y in pairs], line.dots, line.dashed)


def _grid(x: Axis, y: Axis) -> list[str]:
    parts = []
    for value in x.ticks():
        at = x.place(value)
        parts.append(f'<path class="grid" d="M{at:.1f} {y.start}V{y.stop}"/>')
        parts.append(f'<text x="{at:.1f}" y="{y.start + 16}" text-anchor="middle">{number(value)}</text>')
    for value in y.ticks():
        at = y.place(value)
        parts.append(f'<path class="grid" d="M{x.start} {at:.1f}H{x.stop}"/>')
        parts.append(f'<text x="{x.start - 6}" y="{at + 4:.1f}" text-anchor="end">{number(value)}</text>')
    return parts


def _curve(line: Line, x: Axis, y: Axis, colour: str) -> list[str]:
    points = [(x.place(a), y.place(b)) for a, b in zip(line.xs, line.ys, strict=True)]
    path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
    dash = ' stroke-dasharray="6 4"' if line.dashed else ""
    parts = [f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-linejoin="round"{dash}/>']
    if line.dots or len(points) == 1:
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{colour}"/>' for a, b in points]
    every = -(-len(points) // MOST_HOVERS)
    for (a, b), at, value in list(zip(points, line.xs, line.ys, strict=True))[::every]:
        parts.append(_hover(a, b, f"{line.label}: {number(value)} at {number(at)}"))
    return parts


def _hover(x: float, y: float, text: str) -> str:
    """A place that tells its value when the pointer rests on it."""
    return f'<circle class="point" cx="{x:.1f}" cy="{y:.1f}" r="8"><title>{escape(text)}</title></circle>'


def scatter_chart(pairs: Sequence[tuple[float, float]], title: str, x_label: str, y_label: str) -> str:
    """Points, and the line on which both values are the same."""
    values = [value for pair in pairs for value in pair if math.isfinite(value)]
    if not values:
        return ""
    x, y = _axis(values, False, LEFT, WIDTH - RIGHT), _axis(values, False, HEIGHT - BOTTOM, TOP)
    ends = [(x.place(v), y.place(v)) for v in (min(values), max(values))]
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" xmlns="http://www.w3.org/2000/svg">',
        f'<text class="title" x="{LEFT - 52}" y="15">{escape(title)}</text>',
        *_grid(x, y),
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate(12 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>",
        f'<path d="M{ends[0][0]:.1f} {ends[0][1]:.1f}L{ends[1][0]:.1f} {ends[1][1]:.1f}" fill="none" '
        f'stroke="{COLOURS[7]}" stroke-dasharray="6 4"/>',
    ]
    for true, answer in pairs:
        if math.isfinite(true) and math.isfinite(answer):
            a, b = x.place(true), y.place(answer)
            parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{COLOURS[0]}" fill-opacity="0.6"/>')
            parts.append(_hover(a, b, f"true {number(true)}, predicted {number(answer)}"))
    return "\n".join([*parts, "</svg>"])


def _legend(lines: Sequence[Line]) -> tuple[list[str], int]:
    """The names of the lines, in as many rows as they need."""
    parts, at, row = list[str](), float(LEFT), 0
    for index, line in enumerate(lines):
        width = 30 + 7.4 * len(line.label)
        if at + width > WIDTH and at > LEFT:
            at, row = float(LEFT), row + 1
        colour, down = COLOURS[index % len(COLOURS)], 30 + LEGEND_ROW * row
        parts.append(f'<path d="M{at:.0f} {down}h14" stroke="{colour}" stroke-width="4"/>')
        parts.append(f'<text x="{at + 18:.0f}" y="{down + 4}">{escape(line.label)}</text>')
        at += width
    return parts, row + 1


def number(value: float) -> str:
    """A number as short as it can be read."""
    if value == 0:
        return "0"
    if abs(value) >= 1e5 or abs(value) < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:,.6g}"
