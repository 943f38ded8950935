"""Sequences of unequal length and sequences cut by resets: packed, by lengths=, by resets=; beside torch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from module_zoo import (
    LAYERS,
    B,
    D,
    H,
    Layer,
    T,
    as_double,
    assert_as_good,
    assert_same,
    call,
    each_layer,
    each_option,
    each_way,
    hidden,
    inputs,
    pair,
    parts_of,
    used_sweeps,
)
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

import timeloom as tl
from timeloom.nn import own_sweeps
from timeloom.solvers import Shooting

pytestmark = pytest.mark.usefixtures("one_thread")
WAYS = {
    "steps": Shooting(chunk=1, correction="newton"),
    "threes": Shooting(chunk=3, correction="none", warmup=0),
    "fives": Shooting(chunk=5, correction="diag"),
    "whole": Shooting(chunk=T),
    "auto": "auto",
    "sequential": "sequential",
}
each_cut = pytest.mark.parametrize("solver", WAYS.values(), ids=WAYS.keys())

SORTED, UNSORTED, EQUAL = [13, 7, 1], [4, 13, 9], [13, 13, 13]
EMPTY = [0, 13, 6]


class InPieces:
    """The truth about lengths= and resets=: each sequence, each stretch between two resets, by torch's layer alone."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.zero_grad, self.named_parameters = layer.zero_grad, layer.named_parameters

    def __call__(
        self, x: Tensor, hx: Any = None, lengths: Tensor | None = None, resets: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        if x.dim() == 2:
            resets = None if resets is None else resets.unsqueeze(-1)
            alone = (part.unsqueeze(1) for part in parts_of(hx)) if hx is not None else None
            output, final = self._batch(x.unsqueeze(1), None if alone is None else tuple(alone), lengths, resets)
            return output.squeeze(1), self._state(part.squeeze(1) for part in final)
        batch_first = self.layer.batch_first
        x = x.transpose(0, 1) if batch_first else x
        resets = resets.t() if batch_first and resets is not None else resets
        output, final = self._batch(x, None if hx is None else parts_of(hx), lengths, resets)
        return output.transpose(0, 1) if batch_first else output, self._state(final)

    def _batch(
        self, x: Tensor, hx: tuple[Tensor, ...] | None, lengths: Tensor | None, resets: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        steps, batch, _ = x.shape
        if hx is None:
            hx = tuple(torch.zeros_like(part) for part in parts_of(hidden(self.layer, batch, dtype=x.dtype)))
        outputs, finals = [], []
        for b in range(batch):
            length = steps if lengths is None else int(lengths[b])
            begins = [t for t in range(1, length) if resets is not None and resets[t, b]]
            state = tuple(part[:, b] for part in hx)
            output, final = self._sequence(x[:length, b], state, begins)
            outputs.append(torch.cat([output, output.new_zeros(steps - length, output.shape[1])]))
            finals.append(final)
        return torch.stack(outputs, 1), [torch.stack(part, 1) for part in zip(*finals, strict=True)]

    def _sequence(self, x: Tensor, state: tuple[Tensor, ...], begins: list[int]) -> tuple[Tensor, tuple[Tensor, ...]]:
        if len(x) == 0:
            width = state[0].shape[-1] * (2 if self.layer.bidirectional else 1)
            return x.new_zeros(0, width), state
        outputs, finals = [], []
        for begin, end in zip([0, *begins], [*begins, len(x)], strict=True):
            piece = x[begin:end].unsqueeze(0 if self.layer.batch_first else 1)
            output, final = self.layer(piece, self._state(part.unsqueeze(1) for part in state))
            outputs.append(output.squeeze(0 if self.layer.batch_first else 1))
            finals.append(tuple(part.squeeze(1) for part in parts_of(final)))
        if not self.layer.bidirectional:
            return torch.cat(outputs), finals[-1]
        # Going backwards, the last piece to be run is the first one in time.
        both = (
            torch.stack([last[::2], first[1::2]], 1).flatten(0, 1)
            for last, first in zip(finals[-1], finals[0], strict=True)
        )
        return torch.cat(outputs), tuple(both)

    def _state(self, parts: Any) -> Any:
        return tuple(parts) if isinstance(self.layer, nn.LSTM) else next(iter(parts))


def as_batch_first(layer: Layer, mask: Tensor) -> Tensor:
    """A `(T, B)` mask as the layer takes it."""
    return mask.t() if layer.batch_first else mask


def some_resets(seed: int = 3, share: float = 0.25) -> Tensor:
    return torch.rand(T, B, generator=torch.Generator().manual_seed(seed)) < share


# --- PackedSequence ----------------------------------------------------------------------------------------------


@each_cut
@each_option
@each_layer
def test_packed(name: str, options: dict[str, Any], solver: Any) -> None:
    theirs, ours = pair(name, solver, **options)
    pack = partial(pack_padded_sequence, lengths=SORTED, batch_first=theirs.batch_first)
    x, hx = inputs(theirs), hidden(theirs)
    assert_same(call(ours, x, hx, pack), call(theirs, x, hx, pack))
    assert used_sweeps(ours) == isinstance(solver, Shooting)


@each_cut
@pytest.mark.parametrize("lengths", [UNSORTED, EQUAL])
@each_layer
def test_packed_in_any_order(name: str, lengths: list[int], solver: Any) -> None:
    theirs, ours = pair(name, solver, num_layers=2, bidirectional=True)
    pack = partial(pack_padded_sequence, lengths=lengths, enforce_sorted=False)
    x, hx = inputs(theirs), hidden(theirs)
    assert_same(call(ours, x, hx, pack), call(theirs, x, hx, pack))
    assert_same(call(ours, x, None, pack), call(theirs, x, None, pack))
    (expected, _), (actual, _) = theirs(pack(x)), ours(pack(x))
    for key in ("batch_sizes", "sorted_indices", "unsorted_indices"):
        assert torch.equal(getattr(actual, key), getattr(expected, key))
    padded, unpacked = pad_packed_sequence(actual)
    assert padded.shape == (T, B, 2 * (theirs.proj_size or theirs.hidden_size))
    assert unpacked.tolist() == lengths


@each_way
@pytest.mark.parametrize("enforce_sorted", [False, True])
@each_layer
def test_packed_from_a_list_in_float32(name: str, enforce_sorted: bool, solver: Any) -> None:
    theirs, ours = pair(name, solver, dtype=torch.float32, bidirectional=True)

    def pack(x: Tensor) -> Any:
        return pack_sequence([x[:length, b] for b, length in enumerate(SORTED)], enforce_sorted=enforce_sorted)

    x = inputs(theirs, dtype=torch.float32)
    actual, torchs = call(ours, x, None, pack), call(theirs, x, None, pack)
    assert_as_good(actual, torchs, call(theirs.double(), x.double(), None, pack))


@each_way
@each_layer
def test_packed_dropout_draws_the_same_numbers(name: str, solver: Any) -> None:
    theirs, ours = pair(name, solver, num_layers=3, dropout=0.4)
    pack, results = partial(pack_padded_sequence, lengths=UNSORTED, enforce_sorted=False), []
    for layer in (theirs, ours):
        torch.manual_seed(5)
        results.append(call(layer, inputs(theirs), None, pack))
    assert_same(results[1], results[0])


def test_packed_carries_its_own_lengths() -> None:
    _, ours = pair("gru")
    packed = pack_padded_sequence(inputs(ours), SORTED)
    with pytest.raises(ValueError, match="PackedSequence carries its own lengths"):
        ours(packed, lengths=torch.tensor(SORTED))


# --- lengths= ----------------------------------------------------------------------------------------------------


@each_cut
@pytest.mark.parametrize("lengths", [SORTED, UNSORTED, EQUAL, EMPTY])
@each_layer
def test_lengths(name: str, lengths: list[int], solver: Any) -> None:
    theirs, ours = pair(name, solver, num_layers=2, bidirectional=True, batch_first=True)
    x, hx, ends = inputs(theirs), hidden(theirs), torch.tensor(lengths)
    assert_same(call(ours, x, hx, lengths=ends), call(InPieces(theirs), x, hx, lengths=ends))


@each_cut
@each_layer
def test_sequences_that_are_all_empty(name: str, solver: Any) -> None:
    _, ours = pair(name, solver, num_layers=2, bidirectional=True)
    x, hx = inputs(ours).requires_grad_(), hidden(ours)
    leaves = [part.requires_grad_() for part in parts_of(hx)]
    output, final = ours(x, hx, lengths=torch.zeros(B, dtype=torch.int64))
    assert output.eq(0).all()
    assert all(torch.equal(reached, part) for reached, part in zip(parts_of(final), leaves, strict=True))
    sum(part.sum() for part in (output, *parts_of(final))).backward()
    assert all(part.grad.eq(1).all() for part in leaves)
    assert all(value.grad.eq(0).all() for value in (x, *ours.parameters()))


@each_cut
@each_layer
def test_lengths_are_what_packing_does(name: str, solver: Any) -> None:
    theirs, ours = pair(name, solver, num_layers=2, bidirectional=True)
    x, hx = inputs(theirs), hidden(theirs)
    expected, final = theirs(pack_padded_sequence(x, UNSORTED, enforce_sorted=False), hx)
    actual, reached = ours(x, hx, lengths=torch.tensor(UNSORTED))
    pairs = zip([actual, *parts_of(reached)], [pad_packed_sequence(expected)[0], *parts_of(final)], strict=True)
    for mine, wanted in pairs:
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)


@each_cut
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@each_layer
def test_padding_is_never_looked_at(name: str, dtype: torch.dtype, solver: Any) -> None:
    theirs, ours = pair(name, solver, dtype=dtype, num_layers=2, bidirectional=True)
    x, hx, lengths = inputs(theirs, dtype=dtype), hidden(theirs, dtype=dtype), torch.tensor(EMPTY)
    padding = torch.arange(T)[:, None] >= lengths
    expected = call(ours, x.masked_fill(padding.unsqueeze(-1), 0), hx, lengths=lengths)
    for poison in (float("nan"), float("inf"), 1e30):
        actual = call(ours, x.masked_fill(padding.unsqueeze(-1), poison), hx, lengths=lengths)
        assert_same(actual, expected, 0.0)
        assert actual["output"][padding].eq(0).all()
        assert actual["grad x"][padding].eq(0).all()


@pytest.mark.parametrize("solver", ["deer", "quasi-deer", "elk", "quasi-elk", "picard", "shooting"])
@each_layer
def test_a_last_step_that_is_no_number(name: str, solver: str) -> None:
    theirs, ours = pair(name, solver)
    x, lengths = inputs(theirs), torch.tensor(UNSORTED)
    x[UNSORTED[0] - 1, 0, 0] = float("nan")
    (expected, last), (actual, reached) = InPieces(theirs)(x, lengths=lengths), ours(x, lengths=lengths)
    for mine, wanted in zip([actual, *parts_of(reached)], [expected, *parts_of(last)], strict=True):
        torch.testing.assert_close(mine, wanted, equal_nan=True, rtol=1e-12, atol=1e-12)


@each_cut
def test_a_last_state_that_is_no_number_has_gradients_as_torchs(solver: Any) -> None:
    """Of relu at NaN the derivative is zero."""
    theirs, ours = pair("rnn-relu", solver)
    x, lengths = inputs(theirs), torch.tensor(UNSORTED)
    x[UNSORTED[0] - 1, 0, 0] = float("nan")
    for layer in (InPieces(theirs), ours):
        layer(x, lengths=lengths)[0].nan_to_num().sum().backward()
    assert bool(theirs.weight_hh_l0.grad.isfinite().all())
    torch.testing.assert_close(ours.weight_hh_l0.grad, theirs.weight_hh_l0.grad, rtol=1e-12, atol=1e-12)


class Scaled(nn.Module):
    """A cell of one's own with no derivative at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.rec = nn.Linear(D, H), nn.Linear(H, H)

    def initial(self, batch: int) -> Tensor:
        return self.rec.weight.new_full((batch, H), 0.5)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.inp(x) + self.rec(h / h.norm(dim=-1, keepdim=True)))


def test_padding_is_no_state_of_an_own_cell() -> None:
    torch.manual_seed(0)
    cell, x = Scaled().double(), torch.randn(T, B, D, dtype=torch.float64)
    found = []
    for solver in (Shooting(chunk=4), "sequential"):
        cell.zero_grad()
        tl.Layer(cell, solver=solver)(x, lengths=torch.tensor(UNSORTED))[0].sum().backward()
        found.append(cell.rec.weight.grad.clone())
    alone = Scaled().double()
    alone.load_state_dict(cell.state_dict())
    for row, length in enumerate(UNSORTED):
        tl.Layer(alone, solver="sequential")(x[:length, row : row + 1])[0].sum().backward()
    for each in found:
        torch.testing.assert_close(each, alone.rec.weight.grad, rtol=1e-12, atol=1e-12)


@each_cut
def test_gradients_on_padded_outputs_go_nowhere(solver: Any) -> None:
    _, ours = pair("gru", solver)
    lengths, results = torch.tensor(UNSORTED), []
    padding = torch.arange(T)[:, None] >= lengths
    for factor in (0.0, 1e6):
        ours.zero_grad()
        output, _ = ours(inputs(ours), lengths=lengths)
        (output.sum() + factor * output[padding].sum()).backward()
        results.append({key: value.grad.clone() for key, value in ours.named_parameters()})
    assert_same(results[1], results[0], 0.0)


@each_cut
def test_lengths_of_any_integer_kind(solver: Any) -> None:
    _, ours = pair("gru", solver)
    x = inputs(ours)
    expected, _ = ours(x, lengths=torch.tensor(UNSORTED))
    for lengths in (torch.tensor(UNSORTED, dtype=torch.int32), torch.tensor(UNSORTED, dtype=torch.uint8)):
        assert torch.equal(ours(x, lengths=lengths)[0], expected)


def test_length_of_an_unbatched_sequence() -> None:
    theirs, ours = pair("lstm", Shooting(chunk=4))
    x, hx = inputs(theirs, T, D), hidden(theirs, batch=None)
    expected, final = theirs(x[:8], hx)
    actual, reached = ours(x, hx, lengths=torch.tensor([8]))
    torch.testing.assert_close(actual[:8], expected)
    torch.testing.assert_close(reached, final)
    assert actual[8:].eq(0).all()


def test_the_caller_may_reuse_the_tensors() -> None:
    _, ours = pair("gru", Shooting(chunk=4))
    lengths, resets = torch.tensor(UNSORTED), some_resets()
    output, _ = ours(inputs(ours), lengths=lengths, resets=resets)
    expected = torch.autograd.grad(output.sum(), list(ours.parameters()), retain_graph=True)
    lengths.fill_(1)
    resets.fill_(True)
    again = torch.autograd.grad(output.sum(), list(ours.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


# --- resets= -----------------------------------------------------------------------------------------------------


@each_cut
@each_option
@each_layer
def test_resets(name: str, options: dict[str, Any], solver: Any) -> None:
    theirs, ours = pair(name, solver, **options)
    x, hx, resets = inputs(theirs), hidden(theirs), as_batch_first(theirs, some_resets())
    assert_same(call(ours, x, hx, resets=resets), call(InPieces(theirs), x, hx, resets=resets))


@each_cut
@pytest.mark.parametrize("bidirectional", [False, True])
@each_layer
def test_resets_without_an_initial_state(name: str, bidirectional: bool, solver: Any) -> None:
    theirs, ours = pair(name, solver, bidirectional=bidirectional)
    x, resets = inputs(theirs), some_resets()
    assert_same(call(ours, x, resets=resets), call(InPieces(theirs), x, resets=resets))


@each_cut
@pytest.mark.parametrize("bidirectional", [False, True])
@each_layer
def test_resets_of_an_unbatched_sequence(name: str, bidirectional: bool, solver: Any) -> None:
    theirs, ours = pair(name, solver, num_layers=2, bidirectional=bidirectional, batch_first=True)
    x, hx, resets = inputs(theirs, T, D), hidden(theirs, batch=None), some_resets()[:, 0]
    assert resets.any()
    assert_same(call(ours, x, hx, resets=resets), call(InPieces(theirs), x, hx, resets=resets))


@each_cut
@pytest.mark.parametrize("lengths", [UNSORTED, EMPTY])
@each_layer
def test_resets_and_lengths_together(name: str, lengths: list[int], solver: Any) -> None:
    theirs, ours = pair(name, solver, num_layers=2, bidirectional=True, batch_first=True)
    more = {"lengths": torch.tensor(lengths), "resets": some_resets(share=0.4).t()}
    x, hx = inputs(theirs), hidden(theirs)
    assert_same(call(ours, x, hx, **more), call(InPieces(theirs), x, hx, **more))


@each_cut
@pytest.mark.parametrize("where", ["nowhere", "first step", "last step", "everywhere"])
@each_layer
def test_resets_at_the_edges(name: str, where: str, solver: Any) -> None:
    theirs, ours = pair(name, solver, bidirectional=True)
    resets = torch.zeros(T, B, dtype=torch.bool)
    at: dict[str, Any] = {"nowhere": [], "first step": 0, "last step": T - 1, "everywhere": slice(None)}
    resets[at[where]] = True
    x, hx = inputs(theirs), hidden(theirs)
    assert_same(call(ours, x, hx, resets=resets), call(InPieces(theirs), x, hx, resets=resets))


@each_cut
@pytest.mark.parametrize("name", LAYERS)
def test_resets_in_float32(name: str, solver: Any) -> None:
    theirs, ours = pair(name, solver, dtype=torch.float32, bidirectional=True)
    x, hx = inputs(theirs, dtype=torch.float32), hidden(theirs, dtype=torch.float32)
    more = {"lengths": torch.tensor(UNSORTED), "resets": some_resets()}
    actual, torchs = call(ours, x, hx, **more), call(InPieces(theirs), x, hx, **more)
    assert_as_good(actual, torchs, call(InPieces(theirs.double()), x.double(), as_double(hx), **more))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_shape_chunk_lengths_and_resets(data: st.DataObject) -> None:
    steps, batch = data.draw(st.integers(1, 20), "steps"), data.draw(st.integers(1, 4), "batch")
    solver = Shooting(
        chunk=data.draw(st.none() | st.integers(1, 21), "chunk"),
        correction=data.draw(st.sampled_from(["auto", "none", "diag", "newton"]), "correction"),
        warmup=data.draw(st.none() | st.integers(0, 5), "warmup"),
        adjoint=data.draw(st.sampled_from(["same", "sequential"]), "adjoint"),
    )
    options = {
        key: data.draw(values, key)
        for key, values in {
            "num_layers": st.integers(1, 2),
            "bidirectional": st.booleans(),
            "bias": st.booleans(),
        }.items()
    }
    theirs, ours = pair(data.draw(st.sampled_from(list(LAYERS)), "layer"), solver, **options)
    lengths = data.draw(st.lists(st.integers(1, steps), min_size=batch, max_size=batch), "lengths")
    resets = data.draw(st.lists(st.booleans(), min_size=steps * batch, max_size=steps * batch), "resets")
    more = {"lengths": torch.tensor(lengths), "resets": torch.tensor(resets).view(steps, batch)}
    x, hx = inputs(theirs, steps, batch, D), hidden(theirs, batch)
    assert_same(call(ours, x, hx, **more), call(InPieces(theirs), x, hx, **more))


@pytest.mark.parametrize("way", ["packed", "lengths"])
def test_sequences_of_one_length_are_not_ragged(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are solved as a batch without lengths is."""
    seen = []
    whole = own_sweeps._solve

    def noted(*arguments: Any) -> Any:
        seen.append(arguments[4])
        return whole(*arguments)

    monkeypatch.setattr(own_sweeps, "_solve", noted)
    torch.manual_seed(0)
    layer = tl.GRU(3, 5, bidirectional=True, solver="shooting")
    x, lengths = torch.randn(40, 2, 3), torch.tensor([40, 40])
    y, h = layer(x)
    if way == "packed":
        packed, final = layer(pack_padded_sequence(x, lengths, enforce_sorted=False))
        found = pad_packed_sequence(packed)[0]
    else:
        found, final = layer(x, lengths=lengths)
    assert seen == [None, None]
    torch.testing.assert_close(found, y)
    torch.testing.assert_close(final, h)
