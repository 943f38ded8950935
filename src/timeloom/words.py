"""A solve's report in words."""

from __future__ import annotations

from collections.abc import Iterable

from timeloom.report import SolveReport


def describe(report: SolveReport, length: int) -> str:
    """What one solve over `length` steps did, and why."""
    chunks = -(-length // report.chunk)
    if report.solver == "sequential" or chunks == 1:
        text = f"ran all {length:,} steps one after the other ({report.solver})"
    else:
        sweeps = "1 sweep" if report.iterations == 1 else f"{report.iterations} sweeps"
        text = (
            f"cut {length:,} steps into {chunks:,} chunks of {report.chunk} and ran them all at once, "
            f"{sweeps} of {report.solver}"
        )
        if report.residuals:
            text += (
                f"; the largest jump left between two chunks is {report.residuals[-1]:.1e} "
                f"(tolerance {report.tolerance:.0e})"
            )
        if report.fell_back:
            text += "; the sweeps did not contract, so the rest was run one step after the other"
    return f"{text}. Why: {report.reason}." if report.reason else f"{text}."


def of_reports(reports: Iterable[tuple[str, SolveReport]], length: int) -> list[tuple[str, str]]:
    """Reports with the layers they are of in words, forward and backward."""
    told = []
    for where, report in reports:
        told.append((f"{where} forward", describe(report, length)))
        if report.backward is not None:
            told.append((f"{where} backward", describe(report.backward, length)))
    return _by_text(told)


def _by_text(told: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The same words once, with all the places they are of."""
    places: dict[str, list[str]] = {}
    for where, text in told:
        places.setdefault(text, []).append(where)
    return [(", ".join(found), text) for text, found in places.items()]
