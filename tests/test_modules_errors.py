"""Hostile input: refused where torch refuses it, in words that name what was given and what was expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from module_zoo import B, D, H, T, each_layer, each_way, pair, raised
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import timeloom as tl
from timeloom.solvers import Auto, Sequential, Shooting

pytestmark = pytest.mark.usefixtures("one_thread")
SWEEPS = Shooting(chunk=4)


def packed(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
    return pack_padded_sequence(torch.zeros(*shape, dtype=dtype), [T, 9, 2])


BAD_INPUTS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "0-D": (lambda: torch.zeros(()), ["2D or 3D", "0D"]),
    "1-D": (lambda: torch.zeros(D), ["2D or 3D", "1D"]),
    "4-D": (lambda: torch.zeros(2, T, B, D), ["2D or 3D", "4D"]),
    "too wide": (lambda: torch.zeros(T, B, D + 1), [f"Expected {D}, got {D + 1}"]),
    "too wide, unbatched": (lambda: torch.zeros(T, D + 1), [f"Expected {D}, got {D + 1}"]),
    "float64": (lambda: torch.zeros(T, B, D, dtype=torch.float64), ["torch.float64", "torch.float32"]),
    "half": (lambda: torch.zeros(T, B, D, dtype=torch.float16), ["torch.float16", "torch.float32"]),
    "integers": (lambda: torch.zeros(T, B, D, dtype=torch.int64), ["torch.int64", "torch.float32"]),
    "complex": (lambda: torch.zeros(T, B, D, dtype=torch.complex64), ["torch.complex64", "torch.float32"]),
    "no steps": (lambda: torch.zeros(0, B, D), ["Expected sequence length to be larger than 0"]),
    "no steps, unbatched": (lambda: torch.zeros(0, D), ["Expected sequence length to be larger than 0"]),
    "on meta": (lambda: torch.zeros(T, B, D, device="meta"), ["device", "meta", "cpu"]),
}


@each_way
@pytest.mark.parametrize("case", BAD_INPUTS)
@each_layer
def test_bad_inputs(name: str, case: str, solver: Any) -> None:
    make, words = BAD_INPUTS[case]
    theirs, ours = pair(name, solver, dtype=torch.float32)
    expected, error = raised(lambda: theirs(make())), raised(lambda: ours(make()))
    assert type(error) is type(expected)
    assert str(error) == str(expected)
    for word in words:
        assert word in str(error)


@each_way
@pytest.mark.parametrize("value", [None, [torch.zeros(T, B, D)], "abc", 3])
@each_layer
def test_inputs_that_are_no_tensors(name: str, value: Any, solver: Any) -> None:
    _, ours = pair(name, solver)
    with pytest.raises(TypeError, match=f"must be a Tensor or a PackedSequence, got {type(value).__name__}"):
        ours(value)


@each_layer
def test_weights_on_another_device(name: str) -> None:
    theirs, ours = pair(name, SWEEPS, dtype=torch.float32, device="meta")
    x = torch.zeros(T, B, D)
    expected, error = raised(lambda: theirs(x)), raised(lambda: ours(x))
    assert (type(error), str(error)) == (type(expected), str(expected))


@each_way
@each_layer
def test_all_on_meta(name: str, solver: Any) -> None:
    theirs, ours = pair(name, solver, device="meta", dtype=torch.float32)
    x = torch.zeros(T, B, D, device="meta")
    assert ours(x)[0].shape == theirs(x)[0].shape
    assert ours(x)[0].device.type == "meta"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: packed(T, B, D + 1), [f"Expected {D}, got {D + 1}"]),
        (lambda: packed(T, B, D, dtype=torch.float64), ["torch.float64", "torch.float32"]),
        (lambda: packed(T, B, D, D), ["2 dimensions, got 3"]),
    ],
)
@each_layer
def test_bad_packed_inputs(name: str, make: Callable[[], Any], words: list[str]) -> None:
    theirs, ours = pair(name, SWEEPS, dtype=torch.float32)
    raised(lambda: theirs(make()))
    error = raised(lambda: ours(make()))
    for word in words:
        assert word in str(error)


def in_place_of_h(layer: Any, value: Any) -> Any:
    """An initial state whose h is the value given."""
    return (value, torch.zeros(1, B, H)) if isinstance(layer, nn.LSTM) else value


BAD_STATES: dict[str, tuple[Callable[[int], Any], list[str]]] = {
    "width": (lambda width: torch.zeros(1, B, width + 1), ["Expected hidden", "(1, 3, {width})", "[1, 3, {wider}]"]),
    "batch": (lambda width: torch.zeros(1, B + 1, width), ["Expected hidden", "(1, 3, {width})", "[1, 4, {width}]"]),
    "layers": (lambda width: torch.zeros(2, B, width), ["Expected hidden", "(1, 3, {width})", "[2, 3, {width}]"]),
    "2-D": (lambda width: torch.zeros(1, width), ["batched 3-D", "2-D"]),
    "dtype": (lambda width: torch.zeros(1, B, width, dtype=torch.float64), ["torch.float64", "torch.float32"]),
    "integers": (lambda width: torch.zeros(1, B, width, dtype=torch.int64), ["torch.int64", "torch.float32"]),
    "device": (lambda width: torch.zeros(1, B, width, device="meta"), ["meta", "cpu"]),
}


@pytest.mark.parametrize("case", BAD_STATES)
@each_layer
def test_bad_initial_states(name: str, case: str) -> None:
    theirs, ours = pair(name, SWEEPS, dtype=torch.float32)
    make, words = BAD_STATES[case]
    width = theirs.proj_size or H
    hx = in_place_of_h(theirs, make(width))
    expected, error = raised(lambda: theirs(torch.zeros(T, B, D), hx)), raised(lambda: ours(torch.zeros(T, B, D), hx))
    assert type(error) is type(expected)
    for word in words:
        assert word.format(width=width, wider=width + 1) in str(error)


@pytest.mark.parametrize("case", BAD_STATES)
@each_layer
def test_bad_initial_states_of_packed_input(name: str, case: str) -> None:
    _, ours = pair(name, SWEEPS, dtype=torch.float32)
    make, words = BAD_STATES[case]
    width = ours.proj_size or H
    error = raised(lambda: ours(packed(T, B, D), in_place_of_h(ours, make(width))))
    assert isinstance(error, RuntimeError)
    for word in words:
        assert word.format(width=width, wider=width + 1) in str(error)


@pytest.mark.parametrize("solver", ["auto", "sequential"])
@pytest.mark.parametrize("case", BAD_STATES)
@each_layer
def test_bad_initial_states_on_the_way_to_torchs_layer(name: str, case: str, solver: Any) -> None:
    theirs, ours = pair(name, solver, dtype=torch.float32)
    x, hx = torch.zeros(5, B, D), in_place_of_h(theirs, BAD_STATES[case][0](theirs.proj_size or H))  # too short to cut
    expected, error = raised(lambda: theirs(x, hx)), raised(lambda: ours(x, hx))
    assert type(error) is type(expected)
    assert str(error) == str(expected)


@each_layer
def test_bad_initial_states_of_an_unbatched_sequence(name: str) -> None:
    theirs, ours = pair(name, SWEEPS, dtype=torch.float32)
    width = theirs.proj_size or H
    for h in (torch.zeros(1, 1, width), torch.zeros(2, width), torch.zeros(1, width + 1)):
        hx = (h, torch.zeros(1, H)) if isinstance(theirs, nn.LSTM) else h
        expected = raised(lambda hx=hx: theirs(torch.zeros(T, D), hx))
        error = raised(lambda hx=hx: ours(torch.zeros(T, D), hx))
        assert type(error) is type(expected)
        assert f"{h.dim()}-D" in str(error) or str(error) == str(expected)


@pytest.mark.parametrize("value", ["abc", 3, [1, 2], (torch.zeros(1, B, H),)])
@each_layer
def test_initial_states_that_are_no_tensors(name: str, value: Any) -> None:
    _, ours = pair(name, SWEEPS, dtype=torch.float32)
    with pytest.raises(TypeError, match=r"must be a Tensor, got|expected hx to be a pair \(h_0, c_0\), got"):
        ours(torch.zeros(T, B, D), value)


@each_way
def test_an_lstm_wants_both_states(solver: Any) -> None:
    _, ours = pair("lstm", solver, dtype=torch.float32)
    with pytest.raises(TypeError, match=r"expected hx to be a pair \(h_0, c_0\), got Tensor"):
        ours(torch.zeros(T, B, D), torch.zeros(1, B, H))


def test_an_lstm_wants_both_states_on_a_known_way_too() -> None:
    ours, short = tl.LSTM(D, H), torch.zeros(5, B, D)
    ours(short)  # torch's own layer, as will be remembered
    with pytest.raises(TypeError, match=r"expected hx to be a pair \(h_0, c_0\), got Tensor"):
        ours(short, torch.zeros(1, B, H))


def test_a_bad_cell_state_is_told_from_a_bad_hidden_state() -> None:
    ours = tl.LSTM(D, H, proj_size=2, solver=SWEEPS)
    with pytest.raises(RuntimeError, match=r"Expected hidden\[1\] size \(1, 3, 5\), got \[1, 3, 2\]"):
        ours(torch.zeros(T, B, D), (torch.zeros(1, B, 2), torch.zeros(1, B, 2)))


@each_way
@pytest.mark.parametrize("batch_first", [False, True])
@each_layer
def test_an_empty_batch(name: str, batch_first: bool, solver: Any) -> None:
    theirs, ours = pair(name, solver, dtype=torch.float32, batch_first=batch_first, num_layers=2)
    x = torch.zeros((0, T, D) if batch_first else (T, 0, D))
    expected, actual = theirs(x), ours(x)
    assert actual[0].shape == expected[0].shape
    if not batch_first:
        lengths, resets = torch.zeros(0, dtype=torch.int64), torch.zeros(T, 0, dtype=torch.bool)
        assert ours(x, lengths=lengths, resets=resets)[0].shape == expected[0].shape


# --- lengths= and resets= ----------------------------------------------------------------------------------------


def check_refusal(error: Exception, kind: type[Exception], words: list[str]) -> None:
    assert type(error) is kind
    for word in words:
        assert word in str(error)


BAD_LENGTHS: dict[str, tuple[Any, type[Exception], list[str]]] = {
    "too long": (torch.tensor([3, T + 1, 2]), ValueError, ["between 0 and T=13", "sequence 1", "14"]),
    "negative": (torch.tensor([3, 4, -1]), ValueError, ["between 0 and T=13", "sequence 2", "-1"]),
    "too few": (torch.tensor([3, 4]), ValueError, ["(3,)", "(2,)"]),
    "a column": (torch.tensor([[3], [4], [5]]), ValueError, ["(3,)", "(3, 1)"]),
    "a number": (5, TypeError, ["a list of 3 whole numbers", "got 5"]),
    "floating point": (torch.tensor([3.0, 4.0, 5.0]), TypeError, ["whole numbers", "torch.float32"]),
    "booleans": (torch.tensor([True, True, False]), TypeError, ["whole numbers", "torch.bool"]),
}


@each_way
@pytest.mark.parametrize("case", BAD_LENGTHS)
def test_bad_lengths(case: str, solver: Any) -> None:
    _, ours = pair("gru", solver, dtype=torch.float32)
    lengths, *expected = BAD_LENGTHS[case]
    check_refusal(raised(lambda: ours(torch.zeros(T, B, D), lengths=lengths)), *expected)


BAD_RESETS: dict[str, tuple[Any, type[Exception], list[str]]] = {
    "integers": (torch.zeros(T, B, dtype=torch.int64), TypeError, ["bool", "(T, B)", "torch.int64"]),
    "floating point": (torch.zeros(T, B), TypeError, ["bool", "torch.float32"]),
    "a list": ([True, False], TypeError, ["bool", "list"]),
    "batch first": (torch.zeros(B, T, dtype=torch.bool), ValueError, ["(T, B) = (13, 3)", "(3, 13)"]),
    "1-D": (torch.zeros(T, dtype=torch.bool), ValueError, ["(T, B) = (13, 3)", "(13,)"]),
    "on meta": (torch.zeros(T, B, dtype=torch.bool, device="meta"), ValueError, ["meta", "cpu"]),
}


@each_way
@pytest.mark.parametrize("case", BAD_RESETS)
def test_bad_resets(case: str, solver: Any) -> None:
    _, ours = pair("gru", solver, dtype=torch.float32)
    resets, *expected = BAD_RESETS[case]
    check_refusal(raised(lambda: ours(torch.zeros(T, B, D), resets=resets)), *expected)


def test_bad_resets_of_a_batch_first_layer() -> None:
    ours = tl.GRU(D, H, batch_first=True)
    with pytest.raises(ValueError, match=r"\(B, T\) = \(3, 13\), got \(13, 3\)"):
        ours(torch.zeros(B, T, D), resets=torch.zeros(T, B, dtype=torch.bool))


@each_way
@pytest.mark.parametrize("more", [{"lengths": torch.tensor([1])}, {"resets": torch.zeros(T, dtype=torch.bool)}])
def test_bad_inputs_with_lengths_or_resets(more: dict[str, Tensor], solver: Any) -> None:
    ours = tl.GRU(D, H, solver=solver)
    assert "larger than 0" in str(raised(lambda: ours(torch.zeros(0, D), **more)))
    assert "2D or 3D, got 1D" in str(raised(lambda: ours(torch.zeros(D), **more)))
    assert f"Expected {D}, got 9" in str(raised(lambda: ours(torch.zeros(T, 9), **more)))
    assert "torch.float64" in str(raised(lambda: ours(torch.zeros(T, D, dtype=torch.float64), **more)))
    error = raised(lambda: ours(torch.zeros(T, D, device="meta"), **more))
    assert isinstance(error, RuntimeError)
    assert "found input tensor at meta and parameter tensor at cpu" in str(error)


# --- solvers and constructors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["newton", "", None, 3, Shooting, "Auto"])
def test_unknown_solvers(solver: Any) -> None:
    layer = tl.GRU(D, H)
    for action in (
        lambda: tl.GRU(D, H, solver=solver),
        lambda: setattr(layer, "solver", solver),
        lambda: tl.parallelize(nn.GRU(D, H), solver=solver),
    ):
        error = raised(action)
        assert isinstance(error, ValueError)
        for word in ("'auto'", "'sequential'", "'shooting'", "timeloom.solvers", repr(solver)):
            assert word in str(error)
    assert layer.solver == "auto"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Shooting(chunk=0), ["chunk", "0"]),
        (lambda: Shooting(chunk=2.5), ["chunk", "2.5"]),
        (lambda: Shooting(correction="full"), ["correction", "'newton'", "'full'"]),
        (lambda: Shooting(warmup=-1), ["warmup", "-1"]),
        (lambda: Auto(tol=0.0), ["tol", "0.0"]),
        (lambda: Auto(max_iters=0), ["max_iters", "0"]),
        (lambda: Sequential(adjoint="none"), ["adjoint", "'same'", "'none'"]),
        (lambda: Auto(on_divergence="stop"), ["on_divergence", "'raise'", "'stop'"]),
    ],
)
def test_bad_options_of_solvers(make: Callable[[], Any], words: list[str]) -> None:
    error = raised(make)
    assert isinstance(error, ValueError)
    for word in words:
        assert word in str(error)


@pytest.mark.parametrize(
    ("kind", "args", "keywords"),
    [
        ("GRU", (0, H), {}),
        ("GRU", (D, 0), {}),
        ("GRU", (D, 2.5), {}),
        ("GRU", (D, H), {"num_layers": 0}),
        ("GRU", (D, H), {"dropout": 1.5}),
        ("GRU", (D, H), {"dropout": True}),
        ("GRU", (D, H), {"bias": 1}),
        ("GRU", (D, H), {"batch_first": "yes"}),
        ("LSTM", (D, H), {"proj_size": H}),
        ("LSTM", (D, H), {"proj_size": -1}),
        ("RNN", (D, H), {"nonlinearity": "gelu"}),
    ],
)
def test_bad_constructors_say_what_torchs_say(kind: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    expected = raised(lambda: getattr(nn, kind)(*args, **keywords))
    error = raised(lambda: getattr(tl, kind)(*args, **keywords))
    assert (type(error), str(error)) == (type(expected), str(expected))


def test_dropout_of_a_single_layer_warns_as_torch_does() -> None:
    with pytest.warns(UserWarning, match="dropout option adds dropout after all but last recurrent layer"):
        tl.GRU(D, H, dropout=0.5)


def test_a_solve_that_must_not_fall_back_raises_with_its_report() -> None:
    torch.manual_seed(0)
    ours = tl.GRU(D, H, solver=Shooting(chunk=4, correction="none", warmup=0, max_iters=1, on_divergence="raise"))
    with pytest.raises(tl.ConvergenceError, match="did not converge") as caught:
        ours(torch.randn(T, B, D))
    assert not caught.value.report.converged
    assert ours.reports == []


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_scripting_names_the_way_out() -> None:
    with pytest.raises(RuntimeError, match="sequentialize"):
        torch.jit.script(nn.Sequential(tl.GRU(3, 4)))


@pytest.mark.parametrize("lengths", ["abc", [1.5, 2], 7])
def test_lengths_of_the_wrong_kind_are_named(lengths: Any) -> None:
    with pytest.raises(TypeError, match="lengths must be a tensor or a list of 2 whole numbers"):
        tl.GRU(3, 4)(torch.randn(5, 2, 3), lengths=lengths)
