"""A module's life beside torch's: made, copied, saved, cast, run under torch's modes and settings."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from module_zoo import (
    B,
    D,
    H,
    T,
    as_double,
    assert_same,
    call,
    distance,
    each_layer,
    each_option,
    each_way,
    hidden,
    inputs,
    pair,
    parts_of,
    timeloom_layer,
    torch_layer,
)
from torch import Tensor, nn

import timeloom as tl
from timeloom.solvers import Shooting

pytestmark = pytest.mark.usefixtures("one_thread")
CHUNKS = Shooting(chunk=4)
HALVES = [torch.float16, torch.bfloat16]


# --- made, saved, copied ---------------------------------------------------------------------------------------------


@each_option
@each_layer
def test_initialisation_is_bit_equal(name: str, options: dict[str, Any]) -> None:
    theirs, ours = torch_layer(name, seed=3, **options), timeloom_layer(name, seed=3, **options)
    after = torch.rand(1)
    torch_layer(name, seed=3, **options)
    assert torch.rand(1) == after  # as many random numbers were drawn
    torch.manual_seed(4)
    theirs.reset_parameters()
    torch.manual_seed(4)
    ours.reset_parameters()
    for (key, value), (other_key, other) in zip(theirs.named_parameters(), ours.named_parameters(), strict=True):
        assert key == other_key
        assert torch.equal(value, other)


@each_option
@each_layer
def test_state_dict_goes_both_ways(name: str, options: dict[str, Any]) -> None:
    theirs, ours = torch_layer(name, seed=3, **options), timeloom_layer(name, seed=4, solver=CHUNKS, **options)
    x = inputs(theirs)
    call(ours, x)  # what a solver learned is not part of a state_dict
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict(), strict=True)
    assert_same(call(ours, x), call(theirs, x))
    another = torch_layer(name, seed=5, **options)
    another.load_state_dict(ours.state_dict(), strict=True)
    assert_same(call(another, x), call(theirs, x))


def test_repr_tells_a_solver_that_is_not_the_default() -> None:
    assert repr(tl.GRU(3, 5, num_layers=2)) == repr(nn.GRU(3, 5, num_layers=2))
    assert repr(tl.GRU(3, 5, solver="sequential")) == "GRU(3, 5, solver='sequential')"
    assert repr(tl.LSTM(3, 5, proj_size=2, solver=CHUNKS)) == f"LSTM(3, 5, proj_size=2, solver={CHUNKS!r})"


def learned(layer: Any) -> list[Any]:
    """What a layer's solves have taught it, by layer and direction."""
    return [copy.deepcopy(layer._experiences[key]) for key in sorted(layer._experiences)]


def saved(layer: Any) -> Any:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "torch.save": saved,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
@each_way
@each_layer
def test_copies_are_whole_and_their_own(name: str, solver: Any, copied: Callable[[Any], Any]) -> None:
    theirs, ours = pair(name, solver, num_layers=2, bidirectional=True)
    x, hx = inputs(theirs), hidden(theirs)
    expected = call(ours, x, hx)
    twin = copied(ours)
    assert type(twin) is type(ours)
    assert (twin.solver, twin.training, repr(twin)) == (ours.solver, ours.training, repr(ours))
    assert twin.reports == ours.reports
    assert_same(call(twin, x, hx), expected)
    with torch.no_grad():
        twin.weight_hh_l0.zero_()
    assert_same(call(ours, x, hx), expected)
    assert distance(call(twin, x, hx)["output"], expected["output"]) > 1e-3


@pytest.mark.usefixtures("auto_takes_sweeps")
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
def test_copies_know_what_was_learned(copied: Callable[[Any], Any]) -> None:
    ours = tl.GRU(D, H)
    untaught = learned(ours)
    call(ours, torch.randn(4000, 1, D))
    assert learned(ours) != untaught
    twin = copied(ours)
    assert learned(twin) == learned(ours)
    before = learned(ours)
    for _ in range(3):
        call(twin, 3 * torch.randn(5000, 1, D))
    assert learned(twin) != before
    assert learned(ours) == before


@pytest.mark.usefixtures("auto_takes_sweeps")
def test_another_solver_starts_afresh() -> None:
    ours = tl.GRU(D, H)
    ours(torch.randn(300, 1, D))
    ours.solver = "auto"
    assert (ours.reports, learned(ours)) == ([], [])


def test_solvers_of_a_long_training_leave_nothing_behind() -> None:
    ours, x = tl.GRU(D, H), torch.randn(30, 1, D)
    counts = []
    for _ in range(3):
        for chunk in range(60):
            ours.solver = tl.solvers.Shooting(chunk=1 + chunk % 5)
        ours(x)[0].sum().backward()
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert counts[-1] <= counts[0] + 20, counts


def test_copies_work_in_threads() -> None:
    torch.manual_seed(0)
    ours = tl.GRU(D, H, num_layers=2, solver=CHUNKS)
    x = [torch.randn(50, B, D) for _ in range(4)]
    expected = [call(ours, part) for part in x]
    results: list[Any] = [None] * len(x)

    def work(index: int, layer: Any) -> None:
        results[index] = [call(layer, x[index]) for _ in range(5)][-1]

    threads = [threading.Thread(target=work, args=(i, copy.deepcopy(ours))) for i in range(len(x))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result, wanted in zip(results, expected, strict=True):
        assert_same(result, wanted, 1e-6)


@pytest.mark.usefixtures("auto_takes_sweeps")
def test_one_module_serves_many_threads() -> None:
    torch.manual_seed(0)
    ours = tl.GRU(D, H, num_layers=2).eval()
    x = [torch.randn(100 + 30 * i, B, D) for i in range(4)]
    with torch.no_grad():
        expected = [ours(part)[0] for part in x]
    results: list[Any] = [None] * len(x)

    def work(index: int) -> None:
        with torch.inference_mode():
            results[index] = [ours(x[index])[0] for _ in range(5)][-1]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(x))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result, wanted in zip(results, expected, strict=True):
        assert distance(result, wanted) < 1e-5


# --- cast ------------------------------------------------------------------------------------------------------------


@each_way
@each_layer
def test_to_another_dtype_and_back(name: str, solver: Any) -> None:
    theirs, ours = pair(name, solver, dtype=torch.float32, num_layers=2)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        x = inputs(theirs, dtype=dtype)
        assert_same(call(ours.to(dtype), x), call(theirs.to(dtype), x), tolerance)


@each_way
@pytest.mark.parametrize("dtype", HALVES)
@each_layer
def test_half_precision(name: str, dtype: torch.dtype, solver: Any) -> None:
    theirs, ours = pair(name, solver, dtype=torch.float32, num_layers=2)
    cast: Any = {torch.float16: nn.Module.half, torch.bfloat16: nn.Module.bfloat16}[dtype]
    theirs, ours = cast(theirs), cast(ours)
    x, hx = inputs(theirs, dtype=dtype), hidden(theirs, dtype=dtype)
    actual, torchs = call(ours, x, hx), call(theirs, x, hx)
    truth = call(theirs.double(), x.double(), as_double(hx))
    for key, value in truth.items():
        assert actual[key].dtype == torchs[key].dtype == dtype
        allowed = 2 * distance(torchs[key], value) + 2 * torch.finfo(dtype).eps
        assert distance(actual[key], value) <= allowed, key


@each_way
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_state", [False, True])
@each_layer
def test_autocast_returns_torchs_dtypes(name: str, with_state: bool, given: torch.dtype, solver: Any) -> None:
    theirs, ours = pair(name, solver, dtype=torch.float32, num_layers=2, bidirectional=True)
    x, hx = inputs(theirs, dtype=given), hidden(theirs, dtype=given) if with_state else None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torchs, actual = call(theirs, x, hx), call(ours, x, hx)
    truth = call(theirs.double(), x.double(), as_double(hx))
    for key, value in truth.items():
        assert actual[key].dtype == torchs[key].dtype, key
        assert distance(actual[key], value) <= 2 * distance(torchs[key], value) + 2 * torch.finfo(torch.bfloat16).eps, (
            key
        )


def test_autocast_draws_no_random_numbers() -> None:
    ours = tl.GRU(D, H, solver=CHUNKS)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.float16):
        ours(torch.zeros(T, B, D))
    assert torch.rand(1) == expected


@each_layer
def test_autocast_around_the_backward_pass_too(name: str) -> None:
    _, ours = pair(name, CHUNKS, dtype=torch.float32, num_layers=2)
    x, results = inputs(ours, 40, B, D, dtype=torch.float32), []
    for enabled in (False, True):
        ours.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output, _ = ours(x)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            output.float().square().sum().backward()
        results.append({key: value.grad.clone() for key, value in ours.named_parameters()})
    assert_same(results[1], results[0], 1e-5)  # the solve and its gradients stay in float32


def test_autocast_leaves_float64_alone() -> None:
    theirs, ours = pair("gru", CHUNKS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(call(ours, inputs(theirs)), call(theirs, inputs(theirs)))


# --- modes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@each_way
@each_layer
def test_without_gradients(name: str, solver: Any, mode: Any) -> None:
    theirs, ours = pair(name, solver, num_layers=2, dropout=0.5)
    theirs.eval()
    ours.eval()
    with mode():
        (expected, _), (actual, final) = theirs(inputs(theirs)), ours(inputs(theirs))
    assert distance(actual, expected) < 1e-12
    for value in (actual, *parts_of(final)):
        assert (value.requires_grad, value.is_inference()) == (False, expected.is_inference())
    assert all(report.backward is None for report in ours.reports)


@each_way
@each_layer
def test_flatten_parameters_is_harmless(name: str, solver: Any) -> None:
    theirs, ours = pair(name, solver)
    expected = call(ours, inputs(theirs))
    ours.flatten_parameters()
    assert_same(call(ours, inputs(theirs)), expected, 0.0)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


@contextmanager
def determinism() -> Iterator[None]:
    """Refuses operations that may vary, and fills new memory with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


SETTINGS: dict[str, Callable[[], Any]] = {
    "another default device": lambda: torch.device("meta"),
    "a wider default dtype": lambda: default_dtype(torch.float64),
    "a narrower default dtype": lambda: default_dtype(torch.float16),
    "determinism": determinism,
    "anomaly detection": lambda: torch.autograd.detect_anomaly(check_nan=True),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize(("dtype", "correction"), [(torch.float64, "newton"), (torch.float32, "auto")])
@each_layer
def test_global_settings_do_no_harm(name: str, dtype: torch.dtype, correction: Any, setting: Callable[[], Any]) -> None:
    _, ours = pair(name, Shooting(chunk=4, correction=correction), dtype=dtype, num_layers=2, bidirectional=True)
    x, hx = inputs(ours, dtype=dtype), hidden(ours, dtype=dtype)
    lengths, resets = torch.tensor([T, 9, 2]), torch.arange(T * B).view(T, B) % 5 == 4
    cases: list[dict[str, Any]] = [{}, {"lengths": lengths}, {"resets": resets}, {"lengths": lengths, "resets": resets}]

    def run(more: dict[str, Any]) -> dict[str, Tensor]:
        leaves = [x.clone().requires_grad_(), *(part.clone().requires_grad_() for part in parts_of(hx))]
        output, final = ours(leaves[0], tuple(leaves[1:]) if isinstance(ours, nn.LSTM) else leaves[1], **more)
        grads = torch.autograd.grad(
            sum(part.sum() for part in (output, *parts_of(final))), [*leaves, *ours.parameters()]
        )
        return dict(enumerate([output.detach(), *(part.detach() for part in parts_of(final)), *grads]))

    for more in cases:
        expected = run(more)
        with setting():
            actual = run(more)
        assert_same(actual, expected, 0.0)


def test_an_obstacle_is_not_remembered() -> None:
    """Torch's layer runs for a tensor-like; a plain tensor of its shape is ours again, and a short one never is."""

    class Like(Tensor):
        pass

    layer, x = tl.GRU(D, H), torch.randn(4000, 1, D)
    layer(x.as_subclass(Like))
    assert "no sweeps for a Like" in layer.reports[0].reason
    layer(x)
    assert "torch's own layer" not in layer.reports[0].reason
    for _ in range(2):
        layer(torch.randn(3, 1, D))
        assert "torch's own layer" in layer.reports[0].reason
