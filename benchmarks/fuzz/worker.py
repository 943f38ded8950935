"""`python -m benchmarks.fuzz.worker DEVICE THREADS` judges one case per line; it is replaced when it dies or hangs."""

from __future__ import annotations

import json
import queue
import sys
import warnings
from typing import Any

import torch

from benchmarks.fuzz.case import Case
from benchmarks.fuzz.judge import judge
from benchmarks.process import Process, serve


class Worker:
    """A process that judges cases; the run continues whatever happens to it."""

    def __init__(self, device: str, threads: int) -> None:
        self.process = Process((sys.executable, "-m", "benchmarks.fuzz.worker", device, str(threads)))

    def judge(self, case: Case, seconds: float) -> dict[str, Any]:
        try:
            answer = self.process.ask(case.line(), seconds)
        except (queue.Empty, OSError) as error:
            self.close()
            said = f"no answer within {seconds:.0f} s" if isinstance(error, queue.Empty) else str(error)
            return _finding(case, "hang", said)
        if answer is None:
            status = self.process.status()
            self.close()
            return _finding(case, "crash", f"the process ended with status {status}")
        judged: dict[str, Any] = json.loads(answer)
        if judged.pop("broken", False):
            self.close()
        return judged

    def close(self) -> None:
        self.process.close()


def _finding(case: Case, kind: str, what: str) -> dict[str, Any]:
    return {"case": case.line(), "findings": [{"kind": kind, "what": what}], "errors": {}, "seconds": 0.0}


def main() -> None:
    device = sys.argv[1]
    torch.set_num_threads(int(sys.argv[2]))
    warnings.simplefilter("ignore")
    serve(lambda line: json.dumps(judge(Case.of(line), device)))


if __name__ == "__main__":
    main()
