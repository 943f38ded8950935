"""A trained model for other programs: as an exported program of torch's, or as ONNX, checked against the checkpoint.

The recurrences become scans, so that series may have any number of steps and batches any size.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from timeloom.app.errors import InputError
from timeloom.app.files import write_whole
from timeloom.app.train.model import Block, SequenceModel

ONNX_LIBRARIES = ("onnx", "onnxscript")
LARGEST_DIFFERENCE = 1e-4
"""Of an exported model's answers from the checkpoint's, relative to the largest, in float32."""
SHAPES = ((40, 2), (1, 1), (129, 3))
"""Steps and batches that the exported model is tried on; the first is the one it is traced with."""
Step = Callable[[Any, Tensor], tuple[Any, Tensor]]


class Plain(nn.Module):
    """The model with recurrences that exporters understand: `(T, B, D)` to the model's answers."""

    def __init__(self, model: SequenceModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        model = self.model
        x: Tensor = model.encoder((inputs - model.offset) * model.scale)
        for block in model.blocks:
            assert isinstance(block, Block)
            x = block.before(x)
            x = block.finish(x, _states(block.recurrent, x))
        if model.per_step:
            answers: Tensor = model.head(x)
        elif model.pooling == "last":
            answers = model.head(x[-1])
        else:
            answers = model.head(x).mean(dim=0)
        return model.scaled(answers)


def _states(layer: nn.RNNBase, x: Tensor) -> Tensor:
    """All states of a layer, both directions side by side."""
    ways = [_one_way(layer, x, "")]
    if layer.bidirectional:
        ways.append(_one_way(layer, x.flip(0), "_reverse").flip(0))
    return torch.cat(ways, dim=-1)


def _one_way(layer: nn.RNNBase, x: Tensor, suffix: str) -> Tensor:
    from torch._higher_order_ops.scan import scan

    w_ih, w_hh, b_ih, b_hh = (
        getattr(layer, f"{name}_l0{suffix}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    gates = functional.linear(x, w_ih, b_ih)
    zeros = x.new_zeros(x.shape[1], layer.hidden_size)

    def gru(h: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        recurrent = functional.linear(h, w_hh, b_hh)
        r, z, n = gate.chunk(3, dim=-1)
        hr, hz, hn = recurrent.chunk(3, dim=-1)
        new = torch.tanh(n + torch.sigmoid(r + hr) * hn)
        new = new + torch.sigmoid(z + hz) * (h - new)
        return new, new.clone()

    def lstm(state: tuple[Tensor, Tensor], gate: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        h, c = state
        i, f, g, o = (gate + functional.linear(h, w_hh, b_hh)).chunk(4, dim=-1)
        cell = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        new = torch.sigmoid(o) * torch.tanh(cell)
        return (new, cell), new.clone()

    def rnn(h: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        new = torch.tanh(gate + functional.linear(h, w_hh, b_hh))
        return new, new.clone()

    steps: dict[str, tuple[Any, Any]] = {
        "GRU": (gru, zeros),
        "RNN_TANH": (rnn, zeros),
        "LSTM": (lstm, (zeros, zeros.clone())),
    }
    if layer.mode not in steps:
        raise InputError(f"a model with {type(layer).__name__} layers cannot be exported; gru, lstm and rnn can")
    step, start = steps[layer.mode]
    states: Tensor = scan(step, start, gates, dim=0)[1]
    return states


def export_torch(model: SequenceModel, path: Path) -> float:
    """Write a program of torch.export's; how far its answers are from the model's, relatively."""
    buffer = io.BytesIO()
    with _quiet():
        torch.export.save(_exported(model), buffer)
        write_whole(path, buffer.getvalue())
        loaded = torch.export.load(io.BytesIO(buffer.getvalue())).module()
    return _difference(model, lambda x: loaded(x))


def export_onnx(model: SequenceModel, path: Path) -> float | None:
    """Write an ONNX model; how far its answers are from the model's, None where onnxruntime is missing to say so."""
    missing = [name for name in ONNX_LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"ONNX needs {' and '.join(missing)}: pip install 'timeloom[export]', or --format torch")
    with _quiet():
        made = torch.onnx.export(
            _plain(model), (_example(model, *SHAPES[0]),), input_names=["inputs"], output_names=["answers"],
            dynamo=True, dynamic_shapes=(_DYNAMIC,), external_data=False, verbose=False,
        )  # fmt: skip
        assert made is not None
        data = made.model_proto.SerializeToString()
    write_whole(path, data)
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return _difference(model, lambda x: torch.from_numpy(session.run(None, {"inputs": x.numpy()})[0]))


_DYNAMIC = {0: torch.export.Dim("steps", min=1, max=2**31 - 1), 1: torch.export.Dim("batch", min=1, max=2**20)}


def _exported(model: SequenceModel) -> torch.export.ExportedProgram:
    return torch.export.export(_plain(model), (_example(model, *SHAPES[0]),), dynamic_shapes=(_DYNAMIC,))


def _plain(model: SequenceModel) -> Plain:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return Plain(model).eval()


def _example(model: SequenceModel, steps: int, batch: int) -> Tensor:
    """Inputs like the training data."""
    drawn = torch.randn(steps, batch, len(model.offset), generator=torch.Generator().manual_seed(0))
    return drawn.to(model.offset) / model.scale + model.offset


@torch.no_grad()
def _difference(model: SequenceModel, run: Callable[[Tensor], Tensor]) -> float:
    """The largest over several shapes; an export that is further off than rounding explains is refused."""
    worst = 0.0
    for shape in SHAPES:
        x = _example(model, *shape)
        expected, found = model(x), run(x)
        worst = max(worst, ((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item())
    if not worst <= LARGEST_DIFFERENCE:
        raise InputError(
            f"the exported model's answers are off by {worst:.1e} of the largest; please report this, and do not use it"
        )
    return worst


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' talk of their own affairs."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
