"""A process of its own for contenders, so that none can take the run down or hold it up.

`python -m benchmarks.gpu.worker` reads a request (JSON: contender, case) a line and answers with a row a line.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from benchmarks.cases import Case, Regime
from benchmarks.gpu.compare import Row, first_line
from benchmarks.gpu.contenders import CONTENDERS, Contender
from benchmarks.gpu.race import begin, measure

NO_ANSWER = "no answer"
COMMAND = (sys.executable, "-m", "benchmarks.gpu.worker")


class Worker:
    """The process of one group of contenders; started with the first request, and again after it had to be ended."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = command
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._answers: queue.Queue[str] = queue.Queue()

    def measure(self, contender: Contender, case: Case, seconds: float) -> Row:
        """The row, or one that says what went wrong: an error, the process's end, or no answer in time."""
        request = {"contender": contender.name, "case": asdict(case)}
        try:
            answer = self._ask(json.dumps(request), seconds)
        except queue.Empty:
            self.close()
            return begin(contender, case) | {"error": f"{NO_ANSWER} within {seconds:.0f} s"}
        except OSError as error:
            self.close()
            return begin(contender, case) | {"error": first_line(error)}
        if answer is None:
            status = self._process.wait() if self._process else None
            self.close()
            return begin(contender, case) | {"error": f"its process ended with status {status}"}
        row: Row = json.loads(answer)
        if row.pop("broken", False):
            self.close()
        return row

    def _ask(self, request: str, seconds: float) -> str | None:
        process = self._process or self._start()
        assert process.stdin is not None
        process.stdin.write(request + "\n")
        process.stdin.flush()
        return self._answers.get(timeout=seconds) or None

    def _start(self) -> subprocess.Popen[str]:
        pipe: Any = subprocess.PIPE
        process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, text=True, env=surroundings())
        self._process, answers = process, queue.Queue[str]()
        self._answers = answers

        def read() -> None:
            assert process.stdout is not None
            with process.stdout as lines:
                for line in lines:
                    answers.put(line)
            answers.put("")  # it has ended

        self._reader = threading.Thread(target=read, daemon=True)
        self._reader.start()
        return process

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is None or process.stdin is None or self._reader is None:
            return
        process.kill()
        process.wait()
        self._reader.join()
        with suppress(BrokenPipeError):  # a request that was never read
            process.stdin.close()


def surroundings() -> dict[str, str]:
    """The environment of a process that imports what this one does, whatever folder this one runs in."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def case_of(fields: dict[str, Any]) -> Case:
    """A case from JSON."""
    return Case(**{**fields, "regime": Regime(**fields["regime"])})


def answer(request: str) -> Row:
    """What the process does with a request."""
    fields = json.loads(request)
    contender, case = CONTENDERS[fields["contender"]], case_of(fields["case"])
    try:
        return measure(contender, case)
    except Exception as error:
        return begin(contender, case) | {"error": first_line(error), "broken": True}


def _main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for request in sys.stdin:
        print(json.dumps(answer(request)), file=answers, flush=True)


if __name__ == "__main__":
    _main()
