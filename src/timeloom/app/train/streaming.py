"""Answers to a series that arrives piece by piece, with the state carried from one piece to the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as deserialize
from safetensors.torch import save as serialize
from torch import Tensor

from timeloom.app.errors import InputError
from timeloom.app.files import write_whole
from timeloom.app.train.model import Block, SequenceModel


class Stream:
    """Feeds series into a model of one direction, any number of steps at a time.

    What it answers after the last piece is what the model answers to the whole series. For a class or number of the
    series, every answer is the one that the series would get if it ended there.
    """

    def __init__(self, model: SequenceModel, batch: int = 1) -> None:
        if any(block.bidirectional for block in _blocks(model)):
            raise InputError(
                "a model that reads series backwards, too, cannot answer before their end; train it without "
                "--bidirectional (--no-bidirectional)"
            )
        self.model, self.batch = model.eval(), batch
        self.steps = 0
        """Steps fed so far."""
        self._states: list[Any] = [None] * len(model.blocks)
        self._sum: Tensor | None = None

    @torch.no_grad()
    def feed(self, inputs: Tensor) -> Tensor:
        """Answers after each of the next steps: `(t, B, D)` to `(t, B, K)`."""
        model = self.model
        if inputs.dim() != 3 or inputs.shape[1:] != (self.batch, len(model.offset)):
            raise InputError(
                f"expected steps of shape (t, {self.batch}, {len(model.offset)}), got {tuple(inputs.shape)}"
            )
        x: Tensor = model.encoder((inputs.to(model.offset) - model.offset) * model.scale)
        for index, block in enumerate(_blocks(model)):
            x = block.before(x)
            states, self._states[index] = block.recurrent(x, self._states[index])
            x = block.finish(x, states)
        answers: Tensor = model.head(x)
        if not model.per_step and model.pooling == "mean":
            before = torch.zeros_like(answers[0]) if self._sum is None else self._sum
            sums = before + answers.cumsum(dim=0)
            self._sum = sums[-1]
            ends = torch.arange(self.steps + 1, self.steps + len(inputs) + 1, device=x.device)
            answers = sums / ends[:, None, None]
        self.steps += len(inputs)
        return model.scaled(answers)

    def save(self, path: Path) -> None:
        """Keep the state in a file, for another process to go on."""
        tensors = {"steps": torch.tensor(self.steps)}
        if self._sum is not None:
            tensors["sum"] = self._sum
        for index, state in enumerate(self._states):
            for name, part in zip("hc", state if isinstance(state, tuple) else (state,), strict=False):
                if part is not None:
                    tensors[f"{name}.{index}"] = part
        write_whole(path, serialize({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}))

    def restore(self, path: Path) -> None:
        """Go on from a file that `save` wrote."""
        try:
            held = deserialize(path.read_bytes())
            device, states = self.model.offset.device, list[Any]()
            for index in range(len(self._states)):
                parts = [held[f"{name}.{index}"].to(device) for name in "hc" if f"{name}.{index}" in held]
                states.append(None if not parts else tuple(parts) if len(parts) > 1 else parts[0])
            self.steps, self._states = int(held["steps"]), states
            self._sum = held["sum"].to(device) if "sum" in held else None
        except (OSError, SafetensorError, KeyError) as error:
            raise InputError(f"{path}: not the state of a stream ({error}); remove it to begin anew") from None


def _blocks(model: SequenceModel) -> list[Block]:
    return [block for block in model.blocks if isinstance(block, Block)]
