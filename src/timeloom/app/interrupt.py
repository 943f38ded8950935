"""Ctrl-C is obeyed within two seconds, whatever the process is at.

Python hears a signal between two of its own instructions, and one call of torch's may take minutes. So a thread of
its own hears it too, waits a moment for the program to end by itself, and then ends it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE = 1.0
"""Seconds that the program has to end by itself."""
STATUS = 130
SHOW_CURSOR = "\x1b[?25h\n"
"""A progress bar hides it."""


@contextmanager
def obeyed(last_words: Callable[[], str] = lambda: "stopped") -> Iterator[None]:
    """Inside, a Ctrl-C that the program has not followed after PATIENCE seconds ends the process.

    last_words: called by the other thread before that; it may save what is finished, and returns what to tell the user.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    ended = threading.Event()
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    listener = threading.Thread(target=_listen, args=(ours, ended, last_words), daemon=True)
    listener.start()
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)
        theirs.close()
        listener.join(PATIENCE)
        ours.close()


def _listen(ours: socket.socket, ended: threading.Event, last_words: Callable[[], str]) -> None:
    with contextlib.suppress(OSError):
        while heard := ours.recv(1):
            if heard[0] == signal.SIGINT and not ended.wait(PATIENCE):
                _end(last_words)


def _end(last_words: Callable[[], str]) -> None:
    """Tell, and leave without waiting for the call under way."""
    try:
        text = last_words()
    except Exception as error:  # nothing must keep the process alive
        text = f"stopped ({error})"
    with contextlib.suppress(Exception):
        print(f"{SHOW_CURSOR if sys.stderr.isatty() else ''}{text}", file=sys.stderr, flush=True)
        sys.stdout.flush()
    os._exit(STATUS)
