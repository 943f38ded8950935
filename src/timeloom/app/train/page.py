"""Pages that need nothing but themselves: no network, no script, readable on a phone and in the dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from timeloom.app.files import write_text

STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --soft: #5d6b7a; --line: #dfe5ea; --card: #ffffff; --page: #f4f6f8 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6ebf0; --soft: #9aa8b5; --line: #34404c; --card: #1b232b; --page: #12181e }
}
* { box-sizing: border-box }
body { margin: 0; padding: 16px; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif }
main { max-width: 1080px; margin: 0 auto }
h1 { overflow-wrap: anywhere; font-size: 1.5rem; line-height: 1.25; margin: .3em 0 }
h2 { font-size: 1.15rem; margin: 1.6em 0 .5em }
p { margin: .4em 0 }
.soft { color: var(--soft) }
.tiles { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(138px, 1fr)) }
.charts { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 380px), 1fr)) }
.tile, .chart, .block { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px }
.tile b { display: block; font-size: 1.5rem; line-height: 1.2 }
.tile span { color: var(--soft); font-size: .9rem }
.block { overflow-x: auto; margin: .6em 0 }
.wide { min-width: 760px }
svg { display: block; width: 100%; height: auto }
.chart svg { max-width: 620px }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif }
svg text.title { font-weight: 600; font-size: 13px }
svg text.on { fill: #ffffff }
svg .grid { stroke: var(--line); fill: none }
table { border-collapse: collapse; font-size: .92rem }
td, th { padding: 4px 10px; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap }
table.counts td, table.counts th { text-align: center }
@media (max-width: 500px) { svg text { font-size: 14px } svg text.title { font-size: 15px } }
"""


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
    return f'<p class="soft">{escape(text)}</p>' if soft else f"<p>{escape(text)}</p>"


def tiles(pairs: Iterable[tuple[str, str]]) -> str:
    """Numbers, each with what it means."""
    made = (f'<div class="tile"><b>{escape(value)}</b><span>{escape(meaning)}</span></div>' for value, meaning in pairs)
    return f'<div class="tiles">{"".join(made)}</div>'


def told(pairs: Iterable[tuple[str, str]]) -> str:
    """Sentences, each with what it is about."""
    items = (f"<li><b>{escape(about)}</b>: {escape(text)}</li>" for about, text in pairs)
    return f"<ul>{''.join(items)}</ul>"


def charts(made: Iterable[str]) -> str:
    """Charts side by side, or below each other on a narrow screen."""
    return f'<div class="charts">{"".join(f"<div class=chart>{chart}</div>" for chart in made)}</div>'


def block(made: str) -> str:
    """One wide drawing, to be scrolled on a narrow screen."""
    return f'<div class="block"><div class="wide">{made}</div></div>'


def table(rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> str:
    head = f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in header)}</tr>" if header else ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="block"><table>{head}{body}</table></div>'


def counts(classes: Sequence[str], numbers: Sequence[Sequence[int]]) -> str:
    """A confusion matrix: rows are the true classes, columns the answers, darker where there is more of the row."""
    head = "".join(f"<th>{escape(name)}</th>" for name in classes)
    rows = []
    for name, row in zip(classes, numbers, strict=True):
        total = max(sum(row), 1)
        cells = "".join(
            f'<td style="background:rgba(11,102,176,{0.75 * count / total:.2f})">{count}</td>' for count in row
        )
        rows.append(f"<tr><th>{escape(name)}</th>{cells}</tr>")
    return (
        f'<div class="block"><table class="counts"><tr><th>true \\ answer</th>{head}</tr>{"".join(rows)}</table></div>'
    )
