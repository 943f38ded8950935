"""Event files for TensorBoard, beside metrics.jsonl and of the same rows."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from timeloom.app.errors import InputError

_NAMES = {
    "step": ("loss", "seconds", "lr", "sweeps", "backward_sweeps", "residual", "fallbacks"),
    "validation": ("loss", "quality"),
    "torch": ("loss", "seconds"),
}
"""Numbers of a row that become curves, by the kind of the row; the curve of `loss` in `step` is `step/loss`."""


class Board:
    """Writes rows as they come."""

    def __init__(self, folder: Path, up_to: int) -> None:
        """Go on after the first `up_to` steps: TensorBoard leaves out what an earlier file holds of later ones."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError:
            raise InputError(
                "--tensorboard needs tensorboard: pip install 'timeloom[tensorboard]'; metrics.jsonl is written anyway"
            ) from None
        self._writer = SummaryWriter(str(folder), purge_step=up_to + 1 if up_to else None)

    def add(self, row: dict[str, Any]) -> None:
        """A row of metrics."""
        try:
            for name in _NAMES[row["kind"]]:
                self._writer.add_scalar(f"{row['kind']}/{name}", row[name], row["step"])
        except OSError as error:
            raise InputError(
                f"cannot write TensorBoard's events: {error.strerror or error}. Make room, and run it again"
            ) from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # no room: told when the row was added, or TensorBoard lacks the last rows
            self._writer.close()
