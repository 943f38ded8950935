"""A case's network three times: by timeloom, by torch in the same dtype, and by torch in float64, the truth."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import timeloom as tl
from benchmarks.fuzz.case import DTYPES, TWINS, Case
from benchmarks.fuzz.dropping import options_of, run_dropping, same_masks
from benchmarks.fuzz.segments import run_segments
from benchmarks.trained import excursions

Result = tuple[Tensor, tuple[Tensor, ...]]
"""Outputs `(T, B, ·)` and the parts of the final state, as a module returns them."""
Forward = Callable[[Tensor, tuple[Tensor, ...] | None], Result]
"""`forward(x, h0)` with x `(T, B, D)` and h0 a tuple of parts, or None."""

KEEPING = {"GRU": 1, "LSTM": 1, "ImplicitGRU": 1}
"""Index of the block of a bias that belongs to the gate that keeps the state."""


class LayerNormGRU(nn.Module):
    """A GRU with a layer norm on its recurrent products."""

    def __init__(self, inputs: int, n: int) -> None:
        super().__init__()
        self.inp, self.rec = nn.Linear(inputs, 3 * n), nn.Linear(n, 3 * n, bias=False)
        self.norm = nn.LayerNorm(3 * n)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        i_r, i_z, i_n = self.inp(x).chunk(3, -1)
        h_r, h_z, h_n = self.norm(self.rec(h)).chunk(3, -1)
        z = torch.sigmoid(i_z + h_z)
        return z * h + (1 - z) * torch.tanh(i_n + torch.sigmoid(i_r + h_r) * h_n)


class LiGRU(nn.Module):
    """A GRU without a reset gate and with a ReLU candidate."""

    def __init__(self, inputs: int, n: int) -> None:
        super().__init__()
        self.inp, self.rec = nn.Linear(inputs, 2 * n), nn.Linear(n, 2 * n, bias=False)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        z, candidate = (self.inp(x) + self.rec(h)).chunk(2, -1)
        z = torch.sigmoid(z)
        return z * h + (1 - z) * torch.relu(candidate)


class PeepholeLSTM(nn.Module):
    """An LSTM whose gates see c."""

    def __init__(self, inputs: int, n: int) -> None:
        super().__init__()
        self.inp, self.rec = nn.Linear(inputs, 4 * n), nn.Linear(n, 4 * n, bias=False)
        self.peep = nn.Parameter(torch.randn(3, n) / 3)

    def forward(self, state: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        h, c = state
        i, f, g, o = (self.inp(x) + self.rec(h)).chunk(4, -1)
        c_new = torch.sigmoid(f + self.peep[0] * c) * c + torch.sigmoid(i + self.peep[1] * c) * torch.tanh(g)
        return torch.sigmoid(o + self.peep[2] * c_new) * torch.tanh(c_new), c_new


class Relaxing(nn.Module):
    """A continuous-time RNN's Euler step."""

    def __init__(self, inputs: int, n: int) -> None:
        super().__init__()
        self.inp, self.rec = nn.Linear(inputs, n), nn.Linear(n, n, bias=False)
        self.rate = nn.Parameter(torch.randn(n))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return h + torch.sigmoid(self.rate) * (torch.tanh(self.inp(x) + self.rec(h)) - h)


USER_CELLS: dict[str, type[nn.Module]] = {
    "LayerNormGRU": LayerNormGRU,
    "LiGRU": LiGRU,
    "PeepholeLSTM": PeepholeLSTM,
    "Relaxing": Relaxing,
}


def weights(case: Case, device: str) -> dict[str, Tensor]:
    """A case's parameters in its regime, rounded to its dtype, as float64."""
    if case.cell in USER_CELLS:
        module = USER_CELLS[case.cell](case.inputs, case.n).to(device)
        state = {name: value.double() for name, value in module.state_dict().items()}
        state["rec.weight"] *= case.scale
    else:
        layer = twin(case).to(device)
        if case.trained:
            _train(layer, case.trained)
        state = {name: value.double() for name, value in layer.state_dict().items()}
        for name, value in state.items():
            if name.startswith("weight_hh"):
                value *= case.scale
            if name.startswith("bias_ih") and case.cell in KEEPING:
                value.view(case.gates, -1)[KEEPING[case.cell]] += case.gate_bias
    return {name: value.to(DTYPES[case.dtype]).double() for name, value in state.items()}


def twin(case: Case) -> Any:
    """Torch's layer with the case's parameters (for an implicit GRU, those of a GRU), in float32."""
    kind, options = {"LSTM": (nn.LSTM, {}), "RNN": (nn.RNN, {}), "RNN_RELU": (nn.RNN, {"nonlinearity": "relu"})}.get(
        case.cell, (nn.GRU, {})
    )
    return kind(**_arguments(case), **options)


def _arguments(case: Case) -> dict[str, Any]:
    given: dict[str, Any] = {"input_size": case.inputs, "hidden_size": case.n, "num_layers": case.layers}
    given |= {"bias": case.bias, "batch_first": case.batch_first, "bidirectional": case.bidirectional}
    return given | ({"proj_size": case.proj} if case.proj else {})


def ours(case: Case, state: dict[str, Tensor], ragged: dict[str, Tensor]) -> tuple[nn.Module, Forward, list[Any]]:
    """Timeloom's module or cell, how to call it, and where its last reports will be."""
    dtype, device = DTYPES[case.dtype], next(iter(state.values())).device
    kind = getattr(tl.solvers, "Auto" if case.solver == "auto" else case.solver)
    solver, reports, warm = kind(**case.options), list[Any](), tl.WarmStarts(always=True)
    if case.feature == "layer":
        return _own_layer(case, state, ragged, solver)
    if case.cell in USER_CELLS:
        cell = loaded(USER_CELLS[case.cell](case.inputs, case.n), state, dtype)

        def unroll(x: Tensor, h0: tuple[Tensor, ...] | None) -> Result:
            initial = h0 or _zeros(case, x)
            given: Any = initial if len(initial) > 1 else initial[0]
            with warm.batch(range(x.shape[1])) if case.feature == "warm starts" else nullcontext():
                states, report = tl.unroll(cell, given, x, solver)
            reports[:] = [report]
            parts = states if isinstance(states, tuple) else (states,)
            return torch.cat(parts, -1), tuple(part[-1] for part in parts)

        return cell, unroll, reports
    options = {"nonlinearity": "relu"} if case.cell == "RNN_RELU" else {}
    kinds = {"GRU": tl.GRU, "LSTM": tl.LSTM, "ImplicitGRU": tl.ImplicitGRU}
    dropped = options_of(case) if case.feature == "dropout" else {}
    layer = kinds.get(case.cell, tl.RNN)(**_arguments(case), **options, **dropped, solver=solver)
    module = loaded(layer.to(device), state, dtype)
    called = _compiled(module) if case.feature == "compiled" else module
    beside: Callable[[Tensor], Any] = {
        "warm starts": lambda x: warm.batch(range(x.shape[1])), "dropout": lambda _: same_masks(case)
    }.get(case.feature, lambda _: nullcontext())  # fmt: skip

    def call(x: Tensor, h0: tuple[Tensor, ...] | None) -> Result:
        with beside(x):
            result = _call(case, called, x, h0, ragged)
        reports[:] = module.reports
        return result

    return module, call, reports


def _compiled(module: nn.Module) -> Any:
    """The module in graphs with its own operators, without generating machine code, which would take long."""
    torch.compiler.reset()
    compiled = torch.compile(module, backend="aot_eager")

    def call(*given: Any, **options: Any) -> Any:
        with torch._dynamo.config.patch(allow_rnn=True):
            return compiled(*given, **options)

    return call


def _own_layer(
    case: Case, state: dict[str, Tensor], ragged: dict[str, Tensor], solver: Any
) -> tuple[nn.Module, Forward, list[Any]]:
    """A user's cell in a `Layer`."""
    cell, reports = loaded(USER_CELLS[case.cell](case.inputs, case.n), state, DTYPES[case.dtype]), list[Any]()
    widths = state_widths(case)

    def initial(batch: int) -> Any:
        parts = tuple(next(cell.parameters()).new_zeros(batch, width) for width in widths)
        return parts if len(parts) > 1 else parts[0]

    cell.initial = initial
    layer = tl.Layer(cell, solver=solver)

    def call(x: Tensor, h0: tuple[Tensor, ...] | None) -> Result:
        stacked = None if h0 is None else tuple(part.unsqueeze(0) for part in h0)
        y, final = layer(x, stacked if stacked is None or len(stacked) > 1 else stacked[0], **ragged)
        reports[:] = layer.reports
        return y, tuple(part.squeeze(0) for part in (final if isinstance(final, tuple) else (final,)))

    return cell, call, reports


def torchs(
    case: Case, state: dict[str, Tensor], ragged: dict[str, Tensor], dtype: torch.dtype
) -> tuple[nn.Module, Forward]:
    """The same in torch, in a dtype: its layer, or a loop over steps if it has none."""
    if case.feature == "layer":
        cell = loaded(USER_CELLS[case.cell](case.inputs, case.n), state, dtype)
        return cell, lambda x, h0: _loop_marked(cell, x, h0 or _zeros(case, x), ragged)
    if case.cell in USER_CELLS:
        cell = loaded(USER_CELLS[case.cell](case.inputs, case.n), state, dtype)
        return cell, lambda x, h0: _loop_user(cell, x, h0 or _zeros(case, x))
    layer = loaded(twin(case), state, dtype)
    if ragged:
        return layer, lambda x, h0: run_segments(case, layer, _run_implicit, x, h0 or _zeros(case, x), ragged)
    if case.feature == "dropout":
        return layer, lambda x, h0: run_dropping(case, layer, x, h0 or _zeros(case, x))
    if case.feature == "states":
        return layer, lambda x, h0: _stepped(case, layer, x, h0 or _zeros(case, x))
    if case.cell in TWINS:
        return layer, lambda x, h0: _call(case, layer, x, h0, {})
    return layer, lambda x, h0: _run_implicit(case, layer, x, h0 or _zeros(case, x))


def loaded(module: nn.Module, state: dict[str, Tensor], dtype: torch.dtype) -> Any:
    device = next(iter(state.values())).device
    module = module.to(device=device, dtype=dtype)
    module.load_state_dict({name: value.to(dtype) for name, value in state.items()})
    return module


def _zeros(case: Case, x: Tensor) -> tuple[Tensor, ...]:
    batch = x.shape[1]
    if case.cell in USER_CELLS:
        return tuple(x.new_zeros(batch, case.n) for _ in range(2 if case.cell == "PeepholeLSTM" else 1))
    return tuple(x.new_zeros(case.layers * case.directions, batch, width) for width in state_widths(case))


def state_widths(case: Case) -> tuple[int, ...]:
    if case.cell == "LSTM":
        return (case.proj or case.n, case.n)
    return (case.n, case.n) if case.cell == "PeepholeLSTM" else (case.n,)


def _call(case: Case, module: Any, x: Tensor, h0: tuple[Tensor, ...] | None, ragged: dict[str, Tensor]) -> Result:
    """A module as its user calls it, with time first on the way in and out."""
    given: Any = x.squeeze(1) if case.B == 0 else x.transpose(0, 1) if case.batch_first else x
    parts = h0 if h0 is None or case.B else tuple(part.squeeze(1) for part in h0)
    hx: Any = parts if parts is None or case.cell == "LSTM" else parts[0]
    if case.ragged == "packed":
        given = pack_padded_sequence(given, ragged["lengths"].cpu(), case.batch_first, enforce_sorted=False)
        y, final = module(given, hx)
        y, _ = pad_packed_sequence(y, batch_first=case.batch_first, total_length=case.T)
    else:
        keywords = dict(ragged)
        if case.batch_first and "resets" in keywords:
            keywords["resets"] = keywords["resets"].T
        if case.feature == "states":
            y, final, states = module(given, hx, **keywords, return_states=True)
            y = y.transpose(0, 1) if case.batch_first else y
            return y, (*_parts(final), *(_time_first(part, case) for part in _parts(states)))
        y, final = module(given, hx, **keywords)
    y = y.unsqueeze(1) if case.B == 0 else y.transpose(0, 1) if case.batch_first else y
    parts = final if isinstance(final, tuple) else (final,)
    return y, tuple(part.unsqueeze(1) for part in parts) if case.B == 0 else parts


def _parts(state: Any) -> tuple[Tensor, ...]:
    return state if isinstance(state, tuple) else (state,)


def _time_first(states: Tensor, case: Case) -> Tensor:
    """States `(1, T, B, part)`, or `(1, B, T, part)` if batch_first, as the former."""
    return states.transpose(1, 2) if case.batch_first else states


def _stepped(case: Case, layer: Any, x: Tensor, h0: tuple[Tensor, ...]) -> Result:
    """Torch's layer step by step, and behind its final state the states of all steps, `(1, T, B, part)` each."""
    state: Any = h0 if case.cell == "LSTM" else h0[0]
    outputs, found = [], []
    for step in x.unsqueeze(1):
        y, state = layer(step.transpose(0, 1) if case.batch_first else step, state)
        outputs.append(y.transpose(0, 1) if case.batch_first else y)
        found.append(_parts(state))
    return torch.cat(outputs), (*_parts(state), *(torch.stack(part, 1) for part in zip(*found, strict=True)))


def _loop_marked(cell: nn.Module, x: Tensor, h0: tuple[Tensor, ...], ragged: dict[str, Tensor]) -> Result:
    """A user's cell step by step: reset to h0 before marked steps, and unchanged in the padding."""
    state, outputs = h0, []
    always = torch.ones(x.shape[1], dtype=torch.bool, device=x.device)
    for t, step in enumerate(x):
        alive = (t < ragged["lengths"] if "lengths" in ragged else always).unsqueeze(-1)
        mark = (ragged["resets"][t] if "resets" in ragged else ~always).unsqueeze(-1)
        before = tuple(torch.where(mark, first, part) for first, part in zip(h0, state, strict=True))
        new = _parts(cell(before if len(before) > 1 else before[0], step))
        outputs.append(torch.where(alive, new[0], 0))
        state = tuple(torch.where(alive, part, old) for part, old in zip(new, state, strict=True))
    return torch.stack(outputs), state


def _loop_user(cell: nn.Module, x: Tensor, h0: tuple[Tensor, ...]) -> Result:
    state: Any = h0 if len(h0) > 1 else h0[0]
    states = []
    for step in x:
        state = cell(state, step)
        states.append(torch.cat(state, -1) if isinstance(state, tuple) else state)
    return torch.stack(states), state if isinstance(state, tuple) else (state,)


def _run_implicit(case: Case, layer: nn.RNNBase, x: Tensor, h0: tuple[Tensor, ...]) -> Result:
    """The implicit GRU in torch's operations, all layers and directions."""
    finals: list[Tensor] = []
    for index in range(case.layers):
        outputs = []
        for direction in range(case.directions):
            suffix = f"_l{index}" + ("_reverse" if direction else "")
            w_ih, w_hh = getattr(layer, "weight_ih" + suffix), getattr(layer, "weight_hh" + suffix)
            b_ih, b_hh = ((getattr(layer, name + suffix) if case.bias else None) for name in ("bias_ih", "bias_hh"))
            h, states = h0[0][len(finals)], []
            for projected in F.linear(x.flip(0) if direction else x, w_ih, b_ih):
                (i_r, i_z, i_n), (h_r, h_z, h_n) = projected.chunk(3, -1), F.linear(h, w_hh, b_hh).chunk(3, -1)
                rate = 1 - torch.sigmoid(i_z + h_z)
                h = (h + rate * torch.tanh(i_n + torch.sigmoid(i_r + h_r) * h_n)) / (1 + rate)
                states.append(h)
            finals.append(h)
            y = torch.stack(states)
            outputs.append(y.flip(0) if direction else y)
        x = torch.cat(outputs, -1)
    return x, (torch.stack(finals),)


def _train(layer: nn.RNNBase, steps: int) -> None:
    """Train a layer to remember the side of the last excursion of a few channels."""
    width = min(4, layer.input_size, layer.hidden_size)
    device = next(layer.parameters()).device
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05 / layer.hidden_size**0.5)
    for _ in range(steps):
        x = torch.randn(64, 8, layer.input_size, device=device)
        y = layer(x.transpose(0, 1) if layer.batch_first else x)[0]
        y = y.transpose(0, 1) if layer.batch_first else y
        width = min(width, y.shape[-1])
        loss = F.mse_loss(y[..., :width], 2 * excursions(x[..., :width]) - 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
