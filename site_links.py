"""A hook of mkdocs: pages link to files of the repository as they do on disk, and these come along in the site.

A link from docs/ to a picture, a table of results or a source file outside of it, as `../benchmarks/results/grid.png`,
leads to a copy under `files/`; Markdown among these becomes a page, whose own links are followed in the same way.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent
DOCS, COPIES = "docs", "files"
_LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")


def on_files(files: Files, config: Any) -> Files:
    """Add what the pages link to, and what that links to."""
    waiting = [f"{DOCS}/{file.src_uri}" for file in files.documentation_pages()]
    known = set(waiting)
    while waiting:
        page = waiting.pop()
        for target in _targets(page):
            if target in known or target.startswith(f"{DOCS}/"):
                continue
            known.add(target)
            files.append(File.generated(config, f"{COPIES}/{target}", abs_src_path=str(ROOT / target)))
            if target.endswith(".md"):
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links between files of the repository into links between files of the site."""
    here = _origin(page.file.src_uri)

    def turned(match: re.Match[str]) -> str:
        target = _target(here, match[2])
        if target is None:
            return match[0]
        place = target.removeprefix(f"{DOCS}/") if target.startswith(f"{DOCS}/") else f"{COPIES}/{target}"
        return match[1] + posixpath.relpath(place, posixpath.dirname(page.file.src_uri)) + match[3]

    return _LINK.sub(turned, markdown)


def _origin(site_path: str) -> str:
    """Where a page of the site lies in the repository."""
    return site_path.removeprefix(f"{COPIES}/") if site_path.startswith(f"{COPIES}/") else f"{DOCS}/{site_path}"


def _targets(page: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = (_target(page, match[2]) for match in _LINK.finditer(text))
    return [target for target in found if target is not None]


def _target(page: str, link: str) -> str | None:
    """The file of the repository that a page links to; None for addresses and for what is not there."""
    if ":" in link or link.startswith("/"):
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    return target if (ROOT / target).is_file() else None
