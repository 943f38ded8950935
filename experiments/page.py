"""docs/papers.md: every claim, the paper's number, ours from the stored results, and what differs."""

from __future__ import annotations

import sys
from pathlib import Path

from experiments.catalogue import BPPSA, DEER, EXPERIMENTS, MGRIT
from experiments.claims import CLAIMS
from experiments.harness import ROOT, markdown
from experiments.readings import FOLDER

PAGE = ROOT / "docs" / "papers.md"
PAPERS = {
    MGRIT: 'Moon and Cyr, "Parallel Training of GRU Networks with a Multi-Grid Solver for Long Sequences", 2022',
    BPPSA: 'Wang, Bai and Pekhimenko, "BPPSA: Scaling Back-propagation by Parallel Scan Algorithm", 2020',
    DEER: 'Lim, Zhu, Selfridge and Kasim, "Parallelizing non-linear sequential models over the sequence length" '
    "(DEER), 2024",
}
PICTURES = (
    ("mgrit/results/ranks.png", "Multigrid over processes"),
    ("bppsa_bitstream/results/grid_rnn_cuda.png", "Both speedups of BPPSA by length and batch"),
    ("deer/results/grid_cuda.png", "The speed grid"),
    ("mgrit_hmdb51/results/generated.png", "Five ways to train on clips"),
)
HEAD = """# The papers, claim by claim

`python -m experiments page` writes this page from the results stored in `experiments/`. Only the papers' own numbers
and the column on what differs are typed in by hand. `python -m experiments` lists the experiments, and
`python -m experiments run NAME` runs one (`--fast` in small, `--device cuda`, `--minutes`, `--out FOLDER`). Only
`--store` replaces stored results. `python -m experiments missing` lists what is not measured yet, and what it takes.

How to read it: a ratio is the baseline's time over ours, so below 1× ours is slower. Goals that were missed are in bold
in the column on what differs. The real data were not available where this was measured. Accuracies on generated data
compare ways to train, and say nothing about the papers' data sets. Most GPU runs shared the machine; the tables give
the load as each began, where it is known.
"""


def text() -> str:
    """The page as the stored results make it."""
    lines = [HEAD]
    for paper, title in PAPERS.items():
        lines += [f"## {title}", ""]
        cells, more = list[list[str]](), list[str]()
        for number, claim in enumerate((one for one in CLAIMS if one.paper == paper), 1):
            found, source = claim.found()
            folder, _, name = (source or "").partition("/")
            file = FOLDER / folder / "results" / f"{name}.md"
            link = f" ([table](../experiments/{folder}/results/{name}.md))" if source and file.exists() else ""
            cells.append(
                [f"{number}. {claim.says}", claim.number, found.short + link, claim.differs, f"`{claim.command}`"]
            )
            more += [f"- {number}: {line}." for line in found.more]
        head = ["claim", "the paper", "ours", "what differs and why", "`python -m experiments.` …"]
        lines += [*markdown(head, cells, 5), "", *(["More of the same results:", "", *more, ""] if more else [])]
    for path, title in PICTURES:
        if (FOLDER / path).exists():
            lines += [f"![{title}](../experiments/{path})", ""]
    lines += ["## All experiments", ""]
    cells = [
        [
            f"`{one.name}`",
            one.paper,
            one.shows,
            f"`--data {one.real_data}`" if one.real_data else "none: generated, or part of a package",
        ]
        for one in EXPERIMENTS
    ]
    lines += markdown(["name", "paper", "shows", "real data"], cells, 4)
    return "\n".join(lines) + "\n"


def main(check: bool = False, path: Path = PAGE) -> int:
    """Write the page, or tell whether it is as the results make it."""
    made = text()
    if not check:
        path.write_text(made)
        print(f"written: {path}")
        return 0
    if path.exists() and path.read_text() == made:
        return 0
    print(f"{path} is not what the stored results make it: python -m experiments page", file=sys.stderr)
    return 1
