"""The reports of a module's last call, read from the GPU only on request if replays correct missed certificates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn

from timeloom.report import SolveReport


class Telling(Protocol):
    """What knows what a layer did, and tells it once it is asked."""

    def report(self) -> SolveReport | None: ...


class Reporting(nn.Module):
    """A module with `reports`."""

    _reports: list[SolveReport]
    _verdicts: Sequence[Telling | None]

    @property
    def reports(self) -> list[SolveReport]:
        """One report for each layer and direction of the last call: forward and reverse of layer 0, then of layer 1, …

        Reading them may wait for the GPU, if nothing has waited for it before.
        """
        verdicts = self._verdicts
        if not verdicts:
            return self._reports
        told = [verdict.report() for verdict in verdicts if verdict is not None]
        found = [report for report in told if report is not None]
        if self._verdicts is verdicts:  # no call in another thread came between
            self._take_reports(found)
        return found

    @reports.setter
    def reports(self, reports: list[SolveReport]) -> None:
        self._take_reports(reports)

    def _take_reports(self, reports: list[SolveReport], verdicts: Sequence[Telling | None] = ()) -> None:
        """Store the reports of the last call, or the verdicts that give them on request."""
        self.__dict__["_reports"], self.__dict__["_verdicts"] = reports, verdicts

    def __getstate__(self) -> dict[str, Any]:
        state: Any = super().__getstate__()
        return dict(state, _reports=self.reports, _verdicts=())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        earlier = self.__dict__.pop("reports", [])  # where earlier versions kept them
        self._take_reports(state.get("_reports", earlier))
