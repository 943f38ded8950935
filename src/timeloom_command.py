"""The command `timeloom`. It stands outside the package so that help appears without waiting for torch."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

STOPPED = 130
"""Exit status after Ctrl-C, as shells have it."""
COMMANDS = {
    "train": "train a model on a built-in task, CSV/NPY/Parquet files, a .ts file, a UEA/UCR set or video clips",
    "evaluate": "measure a trained model, with and without timeloom",
    "predict": "write a trained model's answers for new data to a CSV file",
    "stream": "answer a series that arrives row by row, with the state carried on",
    "export": "write a trained model for other programs: torch.export or ONNX, checked against the checkpoint",
    "compare": "show several runs side by side",
    "inspect": "show how solvers converge on a trained model, and what auto does and why",
    "doctor": "check this machine: versions, devices, kernels, and a short self-test with a speedup",
    "bench": "run the benchmarks of a source checkout",
}


def usage() -> str:
    lines = [f"  {name:<10}{text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: timeloom COMMAND [options]",
            "",
            "Train recurrent networks parallel in time. `timeloom train` alone trains on a built-in task.",
            "",
            *lines,
            "",
            "timeloom COMMAND --help lists a command's options; --debug shows where an error came from.",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        return say(usage())
    command, *rest = words
    if command not in COMMANDS:
        from difflib import get_close_matches

        near = get_close_matches(command, COMMANDS, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        print(f"error: no command {command!r}; choose one of {', '.join(COMMANDS)}{meant}", file=sys.stderr)
        return 2
    try:
        from timeloom.app.cli import run  # torch, which takes seconds

        status = run(command, rest)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        status = STOPPED
    if status == STOPPED and arguments is None:
        leave(status)
    return status


def say(text: str) -> int:
    """Print; the exit status. A reader that left, as `head` does, is no error; a full disk is one."""
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python would write it once more as it ends
        if isinstance(error, BrokenPipeError):
            return 0
        print(f"error: cannot write to standard output: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def leave(status: int) -> None:
    """End at once: taking torch down takes seconds on a busy machine, and who pressed Ctrl-C waits for it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, AttributeError):  # full, closed or not there at all
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
