"""Rows as a Markdown table with its notes, and as a line on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.cases import NEVER_SLOWER
from benchmarks.gpu.compare import Row

NONE = "–"


@dataclass(frozen=True)
class Column:
    """A title, and the text of a row under it."""

    title: str
    text: Callable[[Row], str]
    left: bool = False


def milliseconds(key: str) -> Callable[[Row], str]:
    """The median, and the fastest in brackets."""

    def text(row: Row) -> str:
        fastest = row.get(f"{key}_min_ms")
        return f"{_short(row.get(f'{key}_ms'))} ({_short(fastest)})" if fastest is not None else NONE

    return text


def ratio(key: str, goal: bool = False) -> Callable[[Row], str]:
    """A speedup; in bold below the row's goal, or below 0.95."""

    def text(row: Row) -> str:
        value = row.get(key)
        if value is None:
            return NONE
        least = row["goal"] if goal else NEVER_SLOWER
        shown = f"{value:.1f}×" if value >= 10 else f"{value:.2f}×"
        return shown if value >= least else f"**{shown}**"

    return text


def number(key: str, form: str) -> Callable[[Row], str]:
    """A number in this format."""
    return lambda row: NONE if row.get(key) is None else format(row[key], form)


def words(key: str) -> Callable[[Row], str]:
    """A text."""
    return lambda row: str(row.get(key, "")) or NONE


def _short(value: float | None) -> str:
    return NONE if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def error(row: Row) -> str:
    """timeloom's error; in bold beyond twice cuDNN's own."""
    ours, theirs = row.get("timeloom_error"), row.get("cudnn_error")
    if ours is None:
        return NONE
    return f"**{ours:.1e}**" if theirs is not None and ours > 2 * theirs else f"{ours:.1e}"


def memory(row: Row) -> str:
    """Peaks of a training step, and their ratio."""
    ours, theirs = row.get("timeloom_peak_bytes"), row.get("cudnn_peak_bytes")
    if ours is None:
        return NONE
    beside = "" if not theirs else f" / {theirs / 2**20:.0f} ({ours / theirs:.2f})"
    return f"{ours / 2**20:.0f}{beside}"


def sweeps(row: Row) -> str:
    """Sweeps, forward + backward."""
    both = row.get("sweeps")
    return NONE if both is None else "+".join("?" if each is None else str(each) for each in both)


def notes(row: Row) -> str:
    """Notes: fallbacks, and what could not be measured."""
    told = ["fell back"] if row.get("fell_back") else []
    told += ["cuDNN ran"] if "torch's own layer" in row.get("reason", "") else []
    told += ["graph not certified"] if row.get("graph_certified") is False else []
    told += [f"cuDNN refuses: {row['cudnn_refuses']}"] if "cudnn_refuses" in row else []
    told += [f"no graph: {row[key]}" for key in ("graph_fails", "forward_graph_fails") if key in row]
    told += [f"no float64: {row['truth_fails']}"] if "truth_fails" in row else []
    told += [row["note"]] if row.get("note") else []
    return "; ".join(told)


def head(title: str, facts: dict[str, Any], note: str) -> list[str]:
    """Title, machine and explanation."""
    speed = f", copies at {facts['bandwidth'] / 1e12:.2f} TB/s" if facts.get("bandwidth") else ""
    machine = f"{facts['device']}{speed}, torch {facts['torch']}, {facts['date']}. Command: `{facts['command']}`."
    return [f"# {title}", "", machine, "", note, ""]


def markdown(columns: Sequence[Column], rows: Sequence[Row]) -> list[str]:
    """The table. A row that failed says so behind its name."""
    lines = [
        "| " + " | ".join(column.title for column in columns) + " |",
        "|" + "|".join("---" if column.left else "--:" for column in columns) + "|",
    ]
    for row in rows:
        if "error" in row:
            texts = [column.text(row) if column.left else NONE for column in columns[:-1]]
            texts.append(f"failed: {row['error']}")
        else:
            texts = [column.text(row) for column in columns]
        lines.append("| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |")
    return lines


def line(columns: Sequence[Column], row: Row) -> str:
    """A row for the terminal."""
    if "error" in row:
        return f"{row['name']}: failed: {row['error']}"
    pairs = ((column.title, column.text(row)) for column in columns[1:])
    shown = [f"{title} {text}" for title, text in pairs if text not in ("", NONE)]
    return f"{row['name']}: " + "  ".join(shown).replace("**", "")


def left_out(reasons: dict[str, str]) -> list[str]:
    """What was not measured, by the reason."""
    lines = []
    for reason in dict.fromkeys(reasons.values()):
        names = [name for name, told in reasons.items() if told == reason]
        lines += ["", f"Not measured, {reason}: {'; '.join(names)}."]
    return lines
