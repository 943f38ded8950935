"""The fuzzer itself: it finds what is put in, reproduces what it draws, and outlives its workers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import timeloom as tl
from benchmarks.fuzz import __main__ as fuzz
from benchmarks.fuzz import judge as judging
from benchmarks.fuzz import networks, record, segments
from benchmarks.fuzz.case import DTYPES, FEATURES, POISONS, Case
from benchmarks.fuzz.draw import (
    LEARNED,
    LIMITS,
    SHORTEST_TRAINING,
    draw,
    draw_feature,
    draw_learned,
    draw_poisoned,
    draw_training,
)
from benchmarks.fuzz.judge import judge
from benchmarks.fuzz.log import Log
from benchmarks.fuzz.worker import Worker

KNOWN = Path(fuzz.__file__).with_name("known.json")
RAGGED = Case(n=5, T=30, B=3, layers=2, bidirectional=True, ragged="lengths", resets=True, h0=True, batch_first=True)

DRAWN = [
    '{"cell": "RNN", "n": 65, "inputs": 33, "layers": 2, "batch_first": true, "T": 11, "B": 5, "dtype": "float64", '
    '"scale": 4.0, "solver": "DEER", "seed": 1338781979}',
    '{"cell": "RNN_RELU", "n": 5, "inputs": 5, "layers": 2, "T": 171, "B": 1, "ragged": "packed", "tf32": false, '
    '"scale": 3.0, "solver": "QuasiDEER", "seed": 546393247}',
    '{"cell": "ImplicitGRU", "n": 65, "inputs": 1, "layers": 2, "batch_first": true, "T": 8, "B": 26, "ragged": '
    '"packed", "scale": 2.0, "x_scale": 4.0, "calls": 3, "seed": 933119279}',
    '{"cell": "LSTM", "n": 3, "inputs": 2, "bidirectional": true, "bias": false, "T": 3, "B": 1, "dtype": "bfloat16", '
    '"solver": "ELK", "seed": 395118601}',
]

pytestmark = pytest.mark.usefixtures("one_thread", "settings_stay")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_drawn_cases_are_the_same_twice_and_within_their_limits(device: str) -> None:
    cases = [draw(7, index, device) for index in range(400)]
    assert cases == [draw(7, index, device) for index in range(400)]
    assert len(set(map(str, cases))) == 400
    assert all(Case.of(case.line()) == case for case in cases)
    assert all(case.steps <= LIMITS[device].steps and 1 <= case.n <= 1024 for case in cases)
    assert all(case.work <= max(10 ** LIMITS[device].work[1], 1e6) for case in cases)
    assert {case.cell for case in cases} >= {*judging.TWINS, "ImplicitGRU", *networks.USER_CELLS}
    assert {case.dtype for case in cases} == set(DTYPES)
    assert len({case.solver for case in cases}) == 10
    assert any(draw(7, index, device).T > 5000 for index in range(4000))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_drawn_features_are_numbers_of_their_own(device: str) -> None:
    cases = [draw_feature(7, index, device) for index in range(1200)]
    assert cases == [draw_feature(7, index, device) for index in range(1200)]
    assert {case.feature for case in cases} == set(FEATURES)
    assert all(Case.of(case.line()) == case for case in cases)
    assert all(case.cell in networks.USER_CELLS for case in cases if case.feature == "layer")
    refused = [case for case in cases if case.feature == "dropout" and case.options.get("coarse") == "implicit"]
    assert not refused, "masks have no implicit coarse step"
    assert not any(case.feature for case in (draw(7, index, device) for index in range(400)))


@pytest.mark.parametrize("drawn", [draw_poisoned, draw_learned])
def test_drawn_poisons_and_corrections_are_numbers_of_their_own(drawn: Callable[[int, int, str], Case]) -> None:
    cases = [drawn(7, index, "cpu") for index in range(100)]
    assert cases == [drawn(7, index, "cpu") for index in range(100)]
    assert all(Case.of(case.line()) == case for case in cases)
    assert {case.poison for case in cases} == (set(POISONS) if drawn is draw_poisoned else {""})
    assert ({case.options.get("correction") for case in cases} == set(LEARNED)) == (drawn is draw_learned)
    assert not any(draw(7, index, "cpu").poison for index in range(100))


def test_drawn_trainings_are_long_calls_of_auto() -> None:
    cases = [draw_training(7, index, "cpu") for index in range(200)]
    assert cases == [draw_training(7, index, "cpu") for index in range(200)]
    assert all(Case.of(case.line()) == case for case in cases)
    assert {case.solver for case in cases} == {"auto"}
    assert {case.calls for case in cases} == {1, 4, 12, 30}
    assert min(case.steps for case in cases) >= SHORTEST_TRAINING
    assert max(case.steps for case in cases) > 5000


def test_weights_that_move_end_at_the_case_s(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    _broken(monkeypatch, lambda y, final: (seen.append(y.detach().clone()), (y, final))[1])
    assert judge(Case(n=5, T=40, calls=3, drift=0.1, seed=4), "cpu")["findings"] == []
    still = list(seen)
    seen.clear()
    assert judge(Case(n=5, T=40, calls=3, seed=4), "cpu")["findings"] == []
    same = [torch.equal(moved, usual) for moved, usual in zip(still, seen, strict=True)]
    assert same == [False, False, True]


def test_earlier_seeds_draw_what_they_drew() -> None:
    """Records name seeds and numbers: what these stand for must not change."""
    drawn = [draw(seed, index, "cpu").line() for seed, index in ((7, 0), (192, 15507), (194, 7310), (197, 5000))]
    assert drawn == DRAWN


def test_a_case_with_an_unknown_word_is_refused() -> None:
    with pytest.raises(ValueError, match="a case has no hidden"):
        Case.of('{"hidden": 3}')


@pytest.mark.parametrize(
    "case",
    [
        RAGGED,
        replace(RAGGED, cell="LSTM", proj=3, ragged="packed", resets=False, solver="Shooting", options={"chunk": 7}),
        replace(RAGGED, cell="ImplicitGRU", T=20),
        Case(cell="RNN_RELU", B=0, T=60, dtype="float64", solver="DEER"),
        Case(cell="PeepholeLSTM", n=4, T=30, solver="Shooting", options={"chunk": 8}),
        Case(n=33, dtype="bfloat16", grad=False, calls=2),
        Case(n=8, trained=3, T=50),
        Case(n=5, T=30, B=3, ragged="lengths", solver="QuasiDEER", seed=6, poison="nan"),
        Case(cell="LSTM", n=5, T=40, B=3, layers=2, seed=1, poison="inf", solver="Shooting", options={"chunk": 8}),
        Case(cell="RNN", n=5, T=40, dtype="float16", calls=2, seed=2, poison="big"),
        Case(n=5, T=40, feature="second order", solver="Shooting", options={"chunk": 8}),
        Case(n=5, T=300, layers=2, feature="warm starts", calls=3, solver="Shooting", options={"chunk": 32}),
        *(
            Case(
                cell="LSTM",
                n=5,
                T=40,
                B=3,
                h0=True,
                feature="dropout",
                solver="Shooting",
                options={"chunk": 8},
                seed=seed,
            )
            for seed in range(4)
        ),
        Case(n=5, T=40, layers=2, bidirectional=True, feature="compiled", solver="Shooting", options={"chunk": 8}),
        Case(cell="LSTM", n=5, T=40, batch_first=True, feature="states", solver="Shooting", options={"chunk": 8}),
        Case(
            cell="PeepholeLSTM",
            n=4,
            T=40,
            B=3,
            h0=True,
            ragged="lengths",
            resets=True,
            feature="layer",
            solver="Shooting",
            options={"chunk": 8},
        ),
    ],
    ids=lambda case: case.cell,
)
def test_what_is_right_has_no_finding(case: Case) -> None:
    answer = judge(case, "cpu")
    assert answer["findings"] == []
    assert "skipped" not in answer
    assert ("grad x" in answer["errors"]) == case.grad
    assert len(json.dumps(answer)) > 0


def test_features_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Case(cell="LSTM", n=4, T=20, solver="Shooting", options={"chunk": 4})
    torch.manual_seed(0)
    first = judging._Problem(plain, "cpu").truth()
    torch.manual_seed(0)
    second = judging._Problem(replace(plain, feature="second order"), "cpu").truth()
    assert torch.equal(first["y"], second["y"])
    assert float((first["grad weight_hh_l0"] - second["grad weight_hh_l0"]).abs().max()) > 0.01
    states = judging._Problem(replace(plain, feature="states", batch_first=True), "cpu")
    assert {name: value.shape for name, value in states.ours()[0].items() if name in ("final 2", "final 3")} == {
        "final 2": (1, 20, 2, 4), "final 3": (1, 20, 2, 4),
    }  # fmt: skip
    torch.manual_seed(0)
    dropped = judging._Problem(replace(plain, feature="dropout"), "cpu").truth()
    assert float((first["y"] - dropped["y"]).abs().max()) > 0.01
    torch._dynamo.utils.counters.clear()
    judging._Problem(replace(plain, feature="compiled"), "cpu").ours()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    begun, batch = list[Any](), tl.WarmStarts.batch
    monkeypatch.setattr(tl.WarmStarts, "batch", lambda *given: begun.append(given) or batch(*given))
    problem = judging._Problem(replace(plain, feature="warm starts", calls=3, T=40), "cpu")
    reports = problem.ours()[1]
    assert len(begun) == 3
    assert "begun at known states" in str(reports[0])
    assert 0 < float((problem.inputs[0] - problem.inputs[-1]).abs().max()) < 0.1


def _broken(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    right = networks.ours

    def ours(*arguments: Any) -> Any:
        module, forward, reports = right(*arguments)
        return module, lambda x, h0: change(*forward(x, h0)), reports

    monkeypatch.setattr(judging, "ours", ours)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda y, final: (y * (1 + 1e-5), final), "error"),
        (lambda y, final: (y, tuple(part + 1e-5 for part in final)), "error"),
        (lambda y, final: (y * torch.where(torch.arange(len(y)) == 9, torch.nan, 1.0)[:, None, None], final), "nan"),
        (lambda y, final: (y.to(torch.bfloat16), final), "dtype"),
        (lambda y, final: (y[:-1], final), "shape"),
        (lambda y, final: y[0] / 0 @ 3, "crash"),
    ],
)
def test_what_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch, change: Any, kind: str) -> None:
    _broken(monkeypatch, change)
    answer = judge(Case(n=5, T=40), "cpu")
    assert answer["findings"][0]["kind"] == kind


def test_a_number_where_torch_has_none_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(n=5, T=40, seed=3, poison="nan")
    assert judge(case, "cpu")["findings"] == []
    _broken(monkeypatch, lambda y, final: (y.nan_to_num(), final))
    found = judge(case, "cpu")["findings"]
    assert [finding["tensor"] for finding in found] == ["y"]
    assert "are finite, the true ones are not" in found[0]["what"]


def test_numbers_that_torch_alone_has_lost_are_no_finding() -> None:
    """Torch's states overflow in half precision."""
    first = Case(
        cell="RNN_RELU", n=17, inputs=17, T=60, B=1, ragged="lengths", h0=True, dtype="float16", trained=30,
        grad=False, calls=3, seed=1587092174, poison="nan",
    )  # fmt: skip
    assert judge(first, "cpu")["findings"] == []
    second = Case(
        cell="RNN_RELU", n=64, inputs=64, layers=2, T=295, B=1, autocast="bfloat16", scale=3.0, seed=2108962088
    )
    answer = judge(second, "cpu")
    assert math.isnan(answer["errors"]["grad bias_ih_l1"][0]), "too large for float32, like torch's outputs"
    assert answer["findings"] == []


@pytest.mark.parametrize("poison", POISONS)
def test_what_poison_spoils_beyond_torch_is_found(monkeypatch: pytest.MonkeyPatch, poison: str) -> None:
    """The sequences beside it."""
    _broken(monkeypatch, lambda y, final: (y + 0 * torch.full_like(y[:1, :1], math.inf), final))
    assert {finding["kind"] for finding in judge(Case(n=5, T=40, poison=poison), "cpu")["findings"]} == {"nan"}


class _Off(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, by: float) -> Tensor:
        ctx.by = by
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * (1 + ctx.by), None


def test_numbers_that_the_dtype_cannot_hold_are_no_finding() -> None:
    """A gradient of 1.06e5, where float16 ends at 6.55e4; torch's is 3.8e3, of outputs that are off by 1.5."""
    assert judging.beyond(torch.tensor([1.0, -1.055e5]), torch.float16)
    assert not judging.beyond(torch.tensor([1.0, -6.5e4]), torch.float16)
    case = Case(
        cell="LSTM", n=65, inputs=7, T=600, B=1, resets=True, dtype="float16", tf32=False, gate_bias=4.0, scale=3.0,
        solver="QuasiELK", seed=370205991,
    )  # fmt: skip
    answer = judge(case, "cpu")
    assert math.isnan(answer["errors"]["grad bias_ih_l0"][0])
    assert answer["findings"] == []


def test_numbers_that_torch_loses_along_another_trajectory_are_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's runs have gradients of 1e19 to 1e36 there, where float32 ends at 3.4e38."""
    case = Case(
        cell="RNN", n=17, inputs=17, layers=3, T=898, B=1, ragged="lengths", scale=4.0, x_scale=4.0,
        solver="Sequential", seed=1186833000,
    )  # fmt: skip
    _broken(monkeypatch, lambda y, final: (_Off.apply(y, math.inf), final))
    answer = judge(case, "cpu")
    assert math.isnan(answer["errors"]["grad x"][0])
    assert answer["findings"] == []
    runs = [torch.tensor([-(10.0**power), 1.0], dtype=torch.float64) for power in (19, 25, 27, 36)]
    assert judging.may_overflow(runs, torch.float32)
    assert not judging.may_overflow(runs, torch.float64)
    assert not judging.may_overflow(runs[1:3], torch.float32)


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _broken(monkeypatch, lambda y, final: (_Off.apply(y, 1e-4), final))
    found = judge(Case(n=5, T=40), "cpu")["findings"]
    assert found
    assert all(finding["tensor"].startswith("grad ") for finding in found)


@pytest.mark.parametrize(("scale", "steps", "judged"), [(1.0, 20, True), (4.0, 200, False)])
def test_a_gradient_that_torch_loses_by_a_rounding_bounds_no_other(
    monkeypatch: pytest.MonkeyPatch, scale: float, steps: int, judged: bool
) -> None:
    """States of 1e21 under gates at 1, of which 1 − z has no digits left."""
    _broken(monkeypatch, lambda y, final: (_Off.apply(y, 0.1), final))
    case = Case(
        cell="LiGRU", n=33, inputs=16, T=steps, B=4, h0=True, gate_bias=4.0, scale=scale, x_scale=scale,
        solver="Sequential", seed=1348482030,
    )  # fmt: skip
    found = judge(case, "cpu")["findings"]
    assert any(finding["kind"] == "error" for finding in found) == judged


def test_a_certificate_that_lies_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(n=5, T=100, solver="Shooting", options={"chunk": 10})
    assert judge(case, "cpu")["findings"] == []
    _broken(monkeypatch, lambda y, final: (y + 1e-4, final))
    assert [finding["kind"] for finding in judge(case, "cpu")["findings"]] == ["error", "certificate"]
    asked = replace(case, options={"chunk": 10, "tol": 1e-3})
    assert judge(asked, "cpu")["findings"] == []


def test_a_gradient_of_terms_that_cancel_is_off_by_more_than_the_tolerance_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The terms of the gradient of its rate are 5,000 times what they add up to; no other gradient is excused."""
    case = Case(
        cell="Relaxing", n=1, inputs=64, T=150, dtype="float64", x_scale=4.0, solver="MGRIT", seed=1393361555,
        options={"coarsening": 4, "relaxation": "FCF", "cycle": "F", "coarse": "frozen", "tol": 1e-3},
    )  # fmt: skip
    answer = judge(case, "cpu")
    assert answer["errors"]["grad rate"][0] > 0.05
    assert answer["findings"] == []
    _broken(monkeypatch, lambda y, final: (_Off.apply(y, 0.1), final))
    found = {finding["tensor"] for finding in judge(case, "cpu")["findings"]}
    assert found >= {"grad x", "grad inp.weight", "grad inp.bias"}


@pytest.mark.parametrize(
    "case",
    [
        replace(RAGGED, cell="LSTM", ragged="packed", resets=False, dtype="float64"),
        Case(n=3, T=40, B=5, resets=True, batch_first=True, dtype="float64"),
        Case(cell="LiGRU", n=4, T=20, B=3, dtype="float64"),
        Case(n=3, T=20, B=0, h0=True, dtype="float64"),
    ],
    ids=["packed", "resets", "cell", "unbatched"],
)
def test_gradients_of_weights_are_sums_over_sequences(case: Case) -> None:
    problem = judging._Problem(case, "cpu")
    truth = problem.torchs()
    found = problem.summed_by_sequence()
    assert found.keys() == problem.weights <= truth.keys()
    for name, value in found.items():
        assert float(truth[name].abs().max()) > 0
        torch.testing.assert_close(value, truth[name], rtol=1e-12, atol=1e-14)


def test_a_long_sum_of_torchs_is_no_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a truth that a long sum has put off, right gradients of weights are no finding; wrong ones are."""
    case, honest = Case(n=4, T=50, B=4, dtype="float64"), judging._Problem.torchs

    def summed(problem: Any, *given: Any, **options: Any) -> dict[str, Tensor]:
        found = honest(problem, *given, **options)
        if problem.inputs[-1].shape[1] > 1:
            found["grad weight_ih_l0"] += 1e-13 * found["grad weight_ih_l0"].abs().max()
        return found

    monkeypatch.setattr(judging._Problem, "torchs", summed)
    assert judge(case, "cpu")["findings"] == []
    _broken(monkeypatch, lambda y, final: (_Off.apply(y, 1e-12), final))
    assert "grad weight_ih_l0" in {finding["tensor"] for finding in judge(case, "cpu")["findings"]}


def test_a_network_that_amplifies_roundings_is_not_a_finding() -> None:
    """Its outputs depend on every rounding: torch's own error is large, and one run's is luck."""
    for seed in range(3):
        assert judge(Case(cell="RNN", n=64, scale=4.0, T=300, seed=seed, grad=False), "cpu")["findings"] == []


def test_gradients_along_another_trajectory_than_the_exact_one_are_no_finding() -> None:
    bound = judging._Bound(Case(), [])
    assert bound.findings(["grad x"], {"grad x": 29.0}, {"grad x": 5.5})
    bound.chaotic = True
    assert not bound.findings(["grad x"], {"grad x": 29.0}, {"grad x": 5.5})
    assert bound.findings(["y"], {"y": 9.0}, {"y": 2.0}), "outputs stay bounded by torch's"
    assert bound.findings(["grad x"], {"grad x": float("nan")}, {"grad x": 5.5}), "a number that is none stays one"


def test_tolerances_are_relative_to_each_part_of_a_state() -> None:
    """An LSTM's outputs may be off by as many tolerances as its c is larger than they are; by no more."""
    assert judging._reach({"y": 0.5}) == {"y": 1}
    assert judging._reach({"y": 0.5, "final 1": 0.125}) == {"y": 1, "final 1": 1}
    assert judging._reach({"y": 0.5, "final 0": 0.25, "final 1": 20.0}) == {"y": 40, "final 0": 80, "final 1": 1}
    bound = judging._Bound(Case(cell="LSTM", solver="Shooting", options={"tol": 1e-3}), [])
    assert bound.findings(["y"], {"y": 1e-2}, {"y": 0.0})
    bound.reach = {"y": 4.0}
    assert not bound.findings(["y"], {"y": 1e-2}, {"y": 0.0})
    assert bound.findings(["y"], {"y": 2e-2}, {"y": 0.0})
    assert bound.findings(["final 1"], {"final 1": 1e-2}, {"final 1": 0.0}), "c itself may be off by one"


def test_stretches_between_resets_are_sequences() -> None:
    resets = torch.zeros(5, 2, dtype=torch.bool)
    resets[0, 0] = resets[2, 0] = resets[4, 1] = True
    cut = segments.stretches(5, 2, {"resets": resets, "lengths": torch.tensor([5, 3])})
    assert cut == [(0, 0, 2), (0, 2, 5), (1, 0, 3)]


def test_segments_agree_with_a_loop_over_steps() -> None:
    case, (steps, batch, n) = Case(n=3, T=7, B=2, inputs=2), (7, 2, 3)
    torch.manual_seed(0)
    layer = torch.nn.GRU(2, n, dtype=torch.float64)
    x, h0 = torch.randn(steps, batch, 2, dtype=torch.float64), torch.randn(1, batch, n, dtype=torch.float64)
    ragged = {"lengths": torch.tensor([7, 4]), "resets": torch.rand(steps, batch) < 0.4}
    y, (final,) = segments.run_segments(case, layer, None, x, (h0,), ragged)  # type: ignore[arg-type]
    cell = torch.nn.GRUCell(2, n, dtype=torch.float64)
    cell.load_state_dict({name.removesuffix("_l0"): value for name, value in layer.state_dict().items()})
    h = h0[0]
    for t in range(steps):
        live = (t < ragged["lengths"])[:, None]
        h = torch.where(live & ragged["resets"][t, :, None], h0[0], h)
        h = torch.where(live, cell(x[t], h), h)
        torch.testing.assert_close(y[t], torch.where(live, h, 0.0))
    torch.testing.assert_close(final[0], h)


def test_a_worker_that_dies_or_hangs_is_replaced() -> None:
    worker = Worker("cpu", 1)
    right = worker.process.command
    try:
        worker.process.command = [right[0], "-c", "import os; os.abort()"]
        assert worker.judge(Case(), 60)["findings"][0]["kind"] in ("crash", "hang")
        worker.process.command = [right[0], "-c", "import time; time.sleep(60)"]
        assert worker.judge(Case(), 1)["findings"][0]["kind"] == "hang"
        worker.process.command = right
        assert worker.judge(Case(T=5), 120)["findings"] == []
    finally:
        worker.close()


def test_known_findings_are_cases() -> None:
    cases = [Case.of(entry) for entry in json.loads(KNOWN.read_text())]
    assert len(cases) == len(set(map(str, cases))) >= 14


@pytest.mark.parametrize(
    ("why", "tensor", "most"),
    [
        ("jumps could add up", "final 0", 1e-3),
        ("each pass could have", "grad weight_hh_l0", 6e-15),
        ("cycles aimed just below", "grad rate", 5e-6),
    ],
)
def test_what_was_found_stays_mended(why: str, tensor: str, most: float) -> None:
    (found,) = (entry for entry in json.loads(KNOWN.read_text()) if why in entry["why"])
    answer = judge(Case.of(found), "cpu")
    assert answer["findings"] == []
    assert answer["errors"][tensor][0] <= most


def test_sums_of_terms_that_cancel_may_be_off_by_what_the_floor_of_states_makes_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only gradients of weights, and only where outputs and the gradients of inputs are right."""
    case = Case(
        cell="Relaxing", n=5, inputs=5, T=150, B=1, h0=True, gate_bias=3.0, x_scale=0.1, seed=1359933661,
        solver="MGRIT", options={"coarsening": 2, "relaxation": "FCF", "cycle": "V", "adjoint": "sequential"},
    )  # fmt: skip
    assert judge(case, "cpu")["findings"] == []
    for off in (lambda y, final: (_Off.apply(y, 1e-5), final), lambda y, final: (y * (1 + 1e-5), final)):
        with monkeypatch.context() as patch:
            _broken(patch, off)
            assert judge(case, "cpu")["findings"]


def _fake(case: Case, wrong: bool) -> dict[str, Any]:
    found = [{"kind": "crash", "what": "boom"}] if wrong else []
    return {
        "case": case.line(),
        "findings": found,
        "errors": {"y": (2e-7, 1e-7), "grad x": (3e-7, 1e-7)},
        "seconds": 0.5,
    }


def test_a_run_is_gone_on_with_and_written_with_its_seeds_and_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    judged, wrong = list[Case](), draw(5, 1, "cpu")

    def judge_one(self: Worker, case: Case, seconds: float) -> dict[str, Any]:
        judged.append(case)
        if case == draw(5, 2, "cpu"):
            return _fake(case, False) | {"errors": {}, "skipped": "torch: no"}
        return _fake(case, case == wrong)

    def fuzzed(*more: str) -> int:
        judged.clear()
        return fuzz.main(["--device", "cpu", "--seed", "5", "--out", str(tmp_path), *more])

    monkeypatch.setattr(Worker, "judge", judge_one)
    assert fuzzed("--count", "3") == 1
    assert judged == [draw(5, index, "cpu") for index in range(3)]
    assert "2 configurations, 1 skipped, 1 with findings" in capsys.readouterr().out
    assert record.reproduce("cpu", wrong.line()) in (tmp_path / "fuzz-cpu.md").read_text()
    with (tmp_path / "fuzz-cpu.jsonl").open("a") as log:
        log.write('{"seed": 5, "index": 3, "ca')  # cut off
        log.write("\n")
    assert fuzzed("--count", "5") == 1
    assert judged == [draw(5, 3, "cpu"), draw(5, 4, "cpu")]
    right, wrong = wrong, Case()
    assert fuzzed("--count", "5", "--again") == 0
    assert judged == [right]
    assert fuzzed("--minutes", "0") == 0
    assert judged == []
    page, result = (tmp_path / "fuzz-cpu.md").read_text(), json.loads((tmp_path / "fuzz-cpu.json").read_text())
    assert "4 configurations, 0 with findings** (1 mended)" in page
    assert record.reproduce("cpu", right.line()) in page
    assert result["seeds"] == {"5": "0–4"}
    assert sum(result["counts"]["cell"].values()) == sum(result["counts"]["precision"].values()) == 4
    assert [run["timeloom"] for run in result["runs"]] == [tl.__version__] * 3


def test_errors_are_told_by_regime_and_dtype(tmp_path: Path) -> None:
    log = Log(tmp_path / "fuzz-cpu.jsonl")
    log.begin(record.facts("cpu") | {"cases": "a file", "seed": 0})
    cases = [Case(seed=seed, dtype=dtype) for seed in range(3) for dtype in ("float32", "bfloat16")]
    cases += [Case(gate_bias=3.0), Case(options={"tol": 1e-3}, solver="Shooting")]
    for case in cases:
        answer = _fake(case, False)
        answer["errors"]["y"] = (1e-7 * (1 + case.seed), 1e-7)
        log.add(answer)
    rows = {(row["precision"], row["regime"]): row for row in record.summary(Log(log.path))["errors"]}
    assert {key: row["cases"] for key, row in rows.items()} == {
        ("float32", "near the default"): 3,
        ("bfloat16", "near the default"): 3,
        ("float32", "gate bias ≥ 3"): 1,
    }
    assert rows["float32", "near the default"]["outputs"] == {"median": [2e-7, 1e-7], "worst": [3e-7, 1e-7]}


def test_the_time_given_ends_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Worker, "judge", lambda self, case, seconds: judge(case, "cpu"))
    log = Log(tmp_path / "fuzz-cpu.jsonl")
    fuzz.run(iter([fuzz.Task(Case(n=2, T=2, seed=seed)) for seed in range(10_000)]), log, "cpu", 0.01, 1, 1)
    assert 0 < len(log.answers) < 10_000
