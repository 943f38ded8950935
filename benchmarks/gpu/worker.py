"""Separate processes for contenders, so that none can crash the run or hold it up.

`python -m benchmarks.gpu.worker` reads one request (JSON: contender, case) per line and answers with one row per line.
"""

from __future__ import annotations

import json
import queue
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.cases import Case, Regime
from benchmarks.gpu.compare import Row, first_line
from benchmarks.gpu.contenders import CONTENDERS, Contender
from benchmarks.gpu.race import begin, measure
from benchmarks.process import Process, serve

NO_ANSWER = "no answer"
COMMAND = (sys.executable, "-m", "benchmarks.gpu.worker")


class Worker:
    """The process of one group of contenders."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self.process = Process(command)

    def measure(self, contender: Contender, case: Case, seconds: float) -> Row:
        """The row, or one with what went wrong: an error, the end of the process, or no answer in time."""
        request = {"contender": contender.name, "case": asdict(case)}
        try:
            answer = self.process.ask(json.dumps(request), seconds)
        except queue.Empty:
            self.close()
            return begin(contender, case) | {"error": f"{NO_ANSWER} within {seconds:.0f} s"}
        except OSError as error:
            self.close()
            return begin(contender, case) | {"error": first_line(error)}
        if answer is None:
            status = self.process.status()
            self.close()
            return begin(contender, case) | {"error": f"its process ended with status {status}"}
        row: Row = json.loads(answer)
        if row.pop("broken", False):
            self.close()
        return row

    def close(self) -> None:
        """End the process."""
        self.process.close()


def case_of(fields: dict[str, Any]) -> Case:
    """A case from JSON."""
    return Case(**{**fields, "regime": Regime(**fields["regime"])})


def answer(request: str) -> Row:
    """The process's answer to a request."""
    fields = json.loads(request)
    contender, case = CONTENDERS[fields["contender"]], case_of(fields["case"])
    try:
        return measure(contender, case)
    except Exception as error:
        return begin(contender, case) | {"error": first_line(error), "broken": True}


if __name__ == "__main__":
    serve(lambda request: json.dumps(answer(request)))
