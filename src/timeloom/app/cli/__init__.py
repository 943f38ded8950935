"""The command line: one file a command, and one clear line for each thing that can go wrong."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Sequence

from timeloom.app.cli.output import READER_LEFT, OutputLostError, spoken, tell
from timeloom.app.errors import InputError
from timeloom.app.interrupt import obeyed

LIBRARIES = ("numpy", "rich", "safetensors", "tyro")
WAIT = 15.0
"""Seconds that a process of torchrun's leaves it to the first one to tell an error; torchrun then ends all of them."""


def run(command: str, arguments: Sequence[str]) -> int:
    """Runs a command; the exit status. `--debug` lets errors through with their traceback."""
    try:
        with spoken() as output:
            status = _run(command, arguments)
        return 1 if status == 0 and output.lost is not None and not output.lost.reader_left else status
    except OutputLostError as lost:
        if lost.reader_left:
            return READER_LEFT
        tell(f"error: {lost}; make room, or write it elsewhere")
        return 1


def _run(command: str, arguments: Sequence[str]) -> int:
    words = [word for word in arguments if word != "--debug"]
    try:
        with obeyed():
            module = importlib.import_module(f"timeloom.app.cli.{command}")
            status: int = module.main(words)
            return status
    except OutputLostError:
        raise
    except BrokenPipeError as error:  # of --out /dev/stdout
        raise OutputLostError(error) from None
    except Exception as error:
        if len(words) < len(arguments):
            raise
        if isinstance(error, InputError):
            leave_to_first_rank()
        tell(f"error: {explain(error)}")
        return 1
    except SystemExit:  # options that cannot be read
        leave_to_first_rank()
        raise
    except KeyboardInterrupt:
        tell("stopped")
        return 130


def first_rank() -> bool:
    """Whether this process speaks to the user: the only one, or the first of torchrun's."""
    return os.environ.get("RANK", "0") == "0"


def leave_to_first_rank() -> None:
    """On the other ranks, wait: what is told once the first one has spoken is told twice."""
    if not first_rank():
        time.sleep(WAIT)


def explain(error: Exception) -> str:
    """An error in one line."""
    if isinstance(error, InputError):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and error.name in LIBRARIES:
        return f"this command needs {error.name}: pip install 'timeloom[app]'"
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'} (run again with --debug to see where)"
