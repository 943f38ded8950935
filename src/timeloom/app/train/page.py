"""Pages that need nothing but themselves: no network, no script, readable on a phone and in the dark."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from timeloom.app.files import write_text

STYLE = """
:root { color-scheme: light dark; --ink: #17202a; --soft: #55616e; --line: #dfe5ea; --card: #ffffff; --page: #f4f6f8;
  --note: #fff4d6; --note-line: #e0b13f; --full: 11,102,176;
  --c0: #0b66b0; --c1: #b85c00; --c2: #1f7a4a; --c3: #96309a; --c4: #b8301f; --c5: #6b5d00;
  --c6: #0f7c7c; --c7: #666666; --c8: #b8488f; --c9: #7a463b; --c10: #4b4bc4; --c11: #5c7a10 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8edf2; --soft: #a3b0bd; --line: #34404c; --card: #1b232b; --page: #12181e;
    --note: #3a3113; --note-line: #8f7427; --full: 70,150,220;
    --c0: #5fb0f0; --c1: #f0a050; --c2: #5fc892; --c3: #da86de; --c4: #f07f70; --c5: #d2c04a;
    --c6: #4fcaca; --c7: #b0b0b0; --c8: #f090c8; --c9: #d0a090; --c10: #a0a0ff; --c11: #b2d25a }
}
* { box-sizing: border-box }
body { margin: 0; padding: 16px; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif }
main { max-width: 1080px; margin: 0 auto }
h1 { overflow-wrap: anywhere; font-size: 1.6rem; line-height: 1.25; margin: .3em 0 }
h2 { font-size: 1.2rem; margin: 1.8em 0 .5em }
p { margin: .4em 0; max-width: 75ch }
li { max-width: 75ch }
.soft { color: var(--soft) }
pre { margin: .5em 0 1em; padding: 8px 12px; border-radius: 8px; background: var(--card); border: 1px solid var(--line);
  white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem }
pre span { display: inline-block; max-width: 100% }
.notice { background: var(--note); border: 1px solid var(--note-line); border-radius: 8px; padding: 8px 12px;
  margin: .8em 0; max-width: none }
.tiles { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); margin: .8em 0 }
.charts { display: grid; gap: 12px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 380px), 1fr)) }
.tile, .chart, .block { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px }
.tile b { display: block; font-size: 1.6rem; line-height: 1.2 }
.tile span { display: block }
.tile small { color: var(--soft); font-size: .85rem }
.block { overflow-x: auto; margin: .6em 0 }
.charts .block { margin: 0 }
.wide { min-width: 760px }
details { margin: 1.8em 0 }
summary { cursor: pointer; font-weight: 600 }
svg { display: block; width: 100%; height: auto }
.chart svg { max-width: 620px }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif }
svg text.title { font-weight: 600; font-size: 13px }
svg text.on { fill: #ffffff }
svg .grid { stroke: var(--line); fill: none }
svg .point { fill: transparent }
svg .point:hover { fill: var(--ink); fill-opacity: .25 }
table { border-collapse: collapse; font-size: .92rem }
td, th { padding: 4px 10px; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap }
table.numbers td:not(:first-child), table.numbers th:not(:first-child) { text-align: right }
table.counts td, table.counts th { text-align: center }
table.counts td.full { color: #ffffff }
@media (prefers-color-scheme: dark) { table.counts td.full { color: #0b1016 } }
@media (max-width: 500px) {
  svg text { font-size: 13px } svg text.title { font-size: 15px } h1 { font-size: 1.35rem }
  th, table:not(.counts) td { white-space: normal }
  td, th { padding: 4px 7px }
  .tiles { grid-template-columns: 1fr 1fr }
  .tiles > :last-child:nth-child(odd) { grid-column: 1 / -1 }
}
"""


@dataclass(frozen=True)
class Tile:
    """A number with what it means."""

    value: str
    meaning: str
    more: str = ""


def page(title: str, *parts: str) -> str:
    """A whole page from parts that are HTML already."""
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{STYLE}</style>'
    )
    body = "\n".join(parts)
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body><main>\n{body}\n</main></body></html>\n'


def write_page(path: Path, title: str, *parts: str) -> None:
    write_text(path, page(title, *parts))


def heading(text: str, level: int = 2) -> str:
    return f"<h{level}>{escape(text)}</h{level}>"


def paragraph(text: str, soft: bool = False) -> str:
    unbroken = re.sub(r"(?<=\de)-(?=\d)", "\u2011", text)  # a line may end at the sign of 2e-07 otherwise
    return f'<p class="soft">{escape(unbroken)}</p>' if soft else f"<p>{escape(unbroken)}</p>"


def notice(text: str) -> str:
    """What must not be overlooked."""
    return f'<p class="notice">{escape(text)}</p>'


def code(text: str) -> str:
    """Commands, a line each, which are broken between words, inside of one only where it is longer than a line."""
    lines = (" ".join(f"<span>{escape(word)}</span>" for word in line.split(" ")) for line in text.splitlines())
    return f"<pre>{chr(10).join(lines)}</pre>"


def folded(title: str, part: str) -> str:
    """A part that is opened by those who want it."""
    return f"<details><summary>{escape(title)}</summary>{part}</details>"


def tiles(shown: Iterable[Tile]) -> str:
    """Numbers, each with what it means."""
    made = "".join(
        f'<div class="tile"><b>{escape(tile.value)}</b><span>{escape(tile.meaning)}</span>'
        f"{f'<small>{escape(tile.more)}</small>' if tile.more else ''}</div>"
        for tile in shown
    )
    return f'<div class="tiles">{made}</div>'


def told(pairs: Iterable[tuple[str, str]]) -> str:
    """Sentences, each with what it is about."""
    items = (f"<li><b>{escape(about)}</b>: {escape(text)}</li>" for about, text in pairs)
    return f"<ul>{''.join(items)}</ul>"


def side_by_side(made: Iterable[str]) -> str:
    """Parts in columns, or below each other on a narrow screen."""
    return f'<div class="charts">{"".join(made)}</div>'


def charts(made: Iterable[str]) -> str:
    """Charts side by side, or below each other on a narrow screen."""
    return side_by_side(f"<div class=chart>{chart}</div>" for chart in made if chart)


def block(made: str) -> str:
    """One wide drawing, to be scrolled on a narrow screen."""
    return f'<div class="block"><div class="wide">{made}</div></div>'


def table(rows: Iterable[Sequence[str]], header: Sequence[str] = (), numbers: bool = False) -> str:
    """Rows of text; with `numbers` all but the first column are aligned at their ends."""
    head = f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in header)}</tr>" if header else ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    kind = ' class="numbers"' if numbers else ""
    return f'<div class="block"><table{kind}>{head}{body}</table></div>'


def counts(classes: Sequence[str], numbers: Sequence[Sequence[int]]) -> str:
    """A confusion matrix: rows are the true classes, columns the answers, darker where there is more of the row."""
    head = "".join(f"<th>{escape(name)}</th>" for name in classes)
    rows = []
    for name, row in zip(classes, numbers, strict=True):
        total = max(sum(row), 1)
        cells = "".join(_count(count, count / total) for count in row)
        rows.append(f"<tr><th>{escape(name)}</th>{cells}</tr>")
    return (
        f'<div class="block"><table class="counts"><tr><th>true \\ answer</th>{head}</tr>{"".join(rows)}</table></div>'
    )


def _count(count: int, share: float) -> str:
    """A cell of the matrix; its number stands out from its colour."""
    full = ' class="full"' if share > 0.6 else ""
    return f'<td{full} style="background:rgba(var(--full),{share:.2f})">{count}</td>'
