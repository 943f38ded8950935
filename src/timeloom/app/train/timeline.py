"""Draws how a solve cut time: chunks that run side by side, and the warm-up before each, as SVG text."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from timeloom.app.train.chart import number
from timeloom.report import SolveReport

WIDTH, LEFT, RIGHT, ROW, HEAD, FOOT = 880, 150, 14, 46, 26, 34
MOST_CHUNKS = 200
"""More could not be told apart: they are drawn as one block with their number."""


def timeline(solves: Sequence[tuple[str, SolveReport]], steps: int) -> str:
    """A row for each solve over `steps` steps."""
    height = HEAD + ROW * len(solves) + FOOT
    scale = (WIDTH - LEFT - RIGHT) / steps
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="How time is cut" xmlns="http://www.w3.org/2000/svg">',
        f'<rect x="{LEFT}" y="6" width="14" height="12" fill="#0b66b0"/><text x="{LEFT + 19}" y="16">chunk</text>',
        f'<rect x="{LEFT + 80}" y="6" width="14" height="12" fill="#d9730d"/>',
        f'<text x="{LEFT + 99}" y="16">warm-up: steps run early, to guess where a chunk starts</text>',
    ]
    for row, (name, report) in enumerate(solves):
        parts += _row(name, report, steps, HEAD + ROW * row, scale)
    base = HEAD + ROW * len(solves)
    for step in sorted({0, steps // 4, steps // 2, 3 * steps // 4, steps}):
        at, anchor = LEFT + step * scale, "end" if step == steps else "middle"
        parts.append(f'<text x="{at:.1f}" y="{base + 14}" text-anchor="{anchor}">{number(step)}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{base + 29}" text-anchor="middle">time step</text>')
    return "\n".join([*parts, "</svg>"])


def _row(name: str, report: SolveReport, steps: int, top: float, scale: float) -> list[str]:
    chunks = -(-steps // report.chunk)
    parts = [f'<text x="4" y="{top + 20}">{escape(name)}</text>']
    if chunks == 1 or chunks > MOST_CHUNKS:
        says = "all steps in one chunk" if chunks == 1 else f"{chunks:,} chunks of {report.chunk}"
        parts.append(_box(LEFT, top + 6, steps * scale, 20, "#666666" if chunks == 1 else "#0b66b0"))
        parts.append(f'<text class="on" x="{LEFT + 8}" y="{top + 20}">{escape(says)}</text>')
        return parts
    for index in range(chunks):
        begin, end = index * report.chunk, min((index + 1) * report.chunk, steps)
        parts.append(_box(LEFT + begin * scale + 0.5, top + 6, max((end - begin) * scale - 1, 0.5), 20, "#0b66b0"))
        if index and report.warmup:
            early = min(report.warmup, begin)
            parts.append(_box(LEFT + (begin - early) * scale, top + 28, max(early * scale, 1.0), 8, "#d9730d"))
    return parts


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" rx="2" fill="{colour}"/>'
