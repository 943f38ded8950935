"""Pages in a real headless browser: its console messages, its requests, and drawings that do not fit."""

from __future__ import annotations

import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--enable-logging=stderr", "--virtual-time-budget=5000",
)  # fmt: skip
FRAME = """<!DOCTYPE html><meta charset="utf-8"><title>frame</title><link rel="icon" href="data:,">
<style>body { margin: 0 }</style>
<iframe id="frame" src="PAGE" style="width: WIDTHpx; height: 4000px; border: 0"></iframe>
<script>
frame.onload = () => {
  const inner = frame.contentDocument, found = [];
  for (const text of inner.querySelectorAll("svg text")) {
    const a = text.getBoundingClientRect(), b = text.closest("svg").getBoundingClientRect();
    if (a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1 || a.bottom > b.bottom + 1)
      found.push(text.textContent);
  }
  const sizes = [...inner.querySelectorAll("svg text")].map(text => text.getBoundingClientRect().height);
  const result = { width: inner.documentElement.scrollWidth, height: inner.documentElement.scrollHeight,
                   cut: found, smallest: Math.min(...sizes), drawings: inner.querySelectorAll("svg").length };
  document.title = "measured " + JSON.stringify(result);
};
</script>"""


def browser() -> str | None:
    """The browser's command, or None."""
    return next((found for found in map(shutil.which, NAMES) if found), None)


@dataclass(frozen=True)
class Visit:
    """What a page did in a window of some width."""

    complaints: list[str]
    """What it wrote to the console."""
    asked_for: list[str]
    """Paths that were fetched, the page's own first."""
    width: int
    """Width of its contents, in pixels."""
    height: int
    cut: list[str]
    """Texts that extend beyond their drawings."""
    smallest: float
    """Height of the smallest text of a drawing."""
    drawings: int


def visit(page: Path, width: int, profile: Path) -> Visit:
    """Open a page in a frame of this width, as a phone or a screen would show it."""
    (page.parent / "frame.html").write_text(FRAME.replace("PAGE", page.name).replace("WIDTH", str(width)))
    with _served(page.parent) as (address, asked):
        shown, log = _run(f"{address}/frame.html", profile, "--dump-dom", f"--window-size={max(width, 600)},1000")
    measured = re.search(r"<title>measured (\{.*?\})</title>", shown)
    assert measured, f"the page was not measured: {log}"
    complaints = [line for line in log.splitlines() if ":CONSOLE" in line]
    return Visit(
        complaints, [path for path in asked if path != "/frame.html"], **json.loads(html.unescape(measured[1]))
    )


def picture(page: Path, width: int, height: int, out: Path, profile: Path) -> None:
    """A screenshot of the page at this width."""
    (page.parent / "frame.html").write_text(FRAME.replace("PAGE", page.name).replace("WIDTH", str(width)))
    with _served(page.parent) as (address, _):
        _run(f"{address}/frame.html", profile, f"--screenshot={out}", f"--window-size={width},{height}")


def _run(address: str, profile: Path, *options: str) -> tuple[str, str]:
    command = [browser() or "", *FLAGS, f"--user-data-dir={profile}", *options, address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, done.stderr


@contextmanager
def _served(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve the folder on a local port; yields the address and the list of requested paths."""
    asked: list[str] = []

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            asked.append(self.path)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()
