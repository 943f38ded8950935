"""Runs a case three times and reports what is wrong with timeloom's run, if anything is.

Findings: a crash; a NaN or infinity where torch has a number; an error beyond twice torch's own in the same dtype (plus
a floor of the dtype's rounding); a wrong certificate: a report that calls states or gradients converged whose error
exceeds torch's by more than three times its tolerance. If the user gave the tolerance, errors may be as large as that
makes them; gradients may be off by more than a factor of it only as far as torch's own are at such states.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fuzz.case import DTYPES, TWINS, Case
from benchmarks.fuzz.networks import USER_CELLS, Forward, ours, state_widths, torchs, weights

FLOOR = {torch.float64: 16, torch.float32: 16, torch.float16: 2, torch.bfloat16: 2}
"""Roundings of a dtype, relative to a tensor's largest number, that are never a finding."""
FAINT = 1e-4
"""Errors of a tensor smaller than this share of the largest one of its kind (outputs, gradients) are relative to that
share."""
PERTURBED = 24
"""Runs of torch on numbers changed by a rounding, if timeloom's error exceeds that of torch's single run: where a
network amplifies roundings, the error of one run is luck, and among thousands of networks some are unluckier than ten
runs of torch. Tensors that autograd saves are changed, too: for a state near 1, the derivative 1 − h² has few digits
left, which no change of the inputs moves. And the sequences are reversed: a sum over many steps and sequences, such as
a weight's gradient, has other roundings in another order."""
PROMISED = 3.0
"""Tolerances by which a certified result may be off."""
PROMISED_GRADIENT = 30.0
"""The same for gradients if the user gave the tolerance: errors of the states change them too."""
LOOSENED = 8
"""Runs of torch with saved states that are off by the tolerance that the user gave, if gradients are off by more than
that: a sum whose terms cancel, as a weight's gradient may, then has a large relative error, however small the tolerance
is relative to each term. Such a gradient may be off by twice the error of those runs, all others by the tolerance. If
no tolerance was given, the same holds of gradients of weights where all else is right, outputs and gradients of inputs:
of states that may be off by the floor, such a sum may be off by what that makes of it."""
ANOTHER = 0.5
"""Relative error above which a torch run's outputs belong to another trajectory: that of a chaotic network, or of one
whose states exceed the dtype's range. Gradients are as large as their trajectory makes them, so that no factor of
torch's error bounds ours."""
SPREAD = 4.0
"""Standard deviations beyond the mean, in the logarithms of torch's runs, that gradients along another trajectory may
reach: if that is more than the dtype holds, ours may overflow."""
CHANGED = 1e-3
"""Share of other inputs by which the inputs of warm starts change from call to call."""
BIG = {torch.float16: 1e4}
"""A number far too large for an input; 1e28 in other dtypes."""
NEAR_OVERFLOW = 1024
"""Number of times that a number must fit into its dtype's range: sums of larger ones overflow in some orders alone, and
take their neighbours along."""
KINKED = ("RNN_RELU", "LiGRU")
"""Cells whose derivative jumps where a unit crosses zero."""

Tensors = dict[str, Tensor]
Errors = dict[str, float]


def judge(case: Case, device: str) -> dict[str, Any]:
    """The result: `findings` (empty if all is well), `errors`, `report`, `seconds`, or why it was `skipped`."""
    # cuDNN's layers cannot be differentiated twice: whoever needs that turns them off
    with torch.backends.cudnn.flags(enabled=case.feature != "second order", allow_tf32=case.tf32):
        return _judged(case, device)


def _judged(case: Case, device: str) -> dict[str, Any]:
    began = time.perf_counter()
    torch.manual_seed(case.seed)
    problem = _Problem(case, device)
    answer: dict[str, Any] = {"case": case.line(), "findings": [], "errors": {}}
    try:
        dtypes: dict[str, torch.dtype] = {}
        if case.dtype == "float64":  # torch is its own truth there, of limited precision
            truth = problem.torchs(dtypes)
            torch_runs = [problem.shrunk(truth)]
        else:
            truth = problem.truth()
            torch_runs = [problem.torchs(dtypes)]
    except (RuntimeError, NotImplementedError) as error:
        lost = context_lost(error)
        return answer | {"skipped": f"torch: {first_line(error)}", "broken": lost, "seconds": _since(began)}
    try:
        answer |= _compare(case, problem, truth, torch_runs, dtypes)
    except Exception as error:  # whatever it is, it is a finding
        kind = "memory" if isinstance(error, torch.OutOfMemoryError) else "crash"
        answer["findings"] = [{"kind": kind, "what": f"{type(error).__name__}: {first_line(error)}"}]
        answer["broken"] = context_lost(error)
    return answer | {"seconds": _since(began)}


def _compare(case: Case, problem: _Problem, truth: Tensors, torch_runs: list[Tensors], dtypes: Any) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    own, reports, own_dtypes = problem.ours()
    for name, dtype in dtypes.items():
        if own_dtypes[name] != dtype and case.cell in TWINS and not problem.ragged:  # torch's runs are packed then
            found.append({"kind": "dtype", "what": f"{name} is {own_dtypes[name]}, torch's {dtype}"})
    for name, value in truth.items():
        if name in own and own[name].shape != value.shape:
            found.append({"kind": "shape", "what": f"{name} is {tuple(own[name].shape)}, not {tuple(value.shape)}"})
    if found:
        return {"findings": found}
    lost = _lost(truth, torch_runs[0], DTYPES[case.dtype]) if case.poison else {}
    if case.poison == "nan" and (found := _more_than_poisoned(own, truth)):
        return {"findings": found}
    own, truth, torch_runs = _without(own, lost), _without(truth, lost), [_without(run, lost) for run in torch_runs]
    sizes = scales(truth)
    errors = {name: error_of(own[name], truth[name], sizes[name]) for name in truth}
    bound = _Bound(case, reports)
    bound.reach = _reach(sizes)
    for more in range(PERTURBED + 1):
        theirs = {name: worst(error_of(run[name], truth[name], sizes[name]) for run in torch_runs) for name in truth}
        bound.chaotic = any(not theirs[name] <= ANOTHER for name in truth if not name.startswith("grad "))
        held = [name for name in truth if not (math.isnan(errors[name]) and beyond(truth[name], DTYPES[case.dtype]))]
        found = bound.findings(held, errors, theirs)
        hopeless = not bound.chaotic and all(finding["kind"] == "nan" for finding in found)
        if not found or more == PERTURBED or hopeless:
            break
        torch_runs.append(_without(problem.torchs(perturbed=True), lost))
    if case.dtype == "float64" and not case.feature and any(finding["tensor"] in problem.weights for finding in found):
        truth |= _without(problem.summed_by_sequence(), lost)
        errors |= {name: error_of(own[name], truth[name], sizes[name]) for name in problem.weights}
        found = bound.findings(held, errors, theirs)
    sums_alone = all(finding["tensor"] in problem.weights for finding in found)
    loosened = bound.asked or (bound.floor if sums_alone else 0.0)
    if loosened and any(finding["tensor"].startswith("grad ") for finding in found):
        loose = [_without(problem.loosened(loosened), lost) for _ in range(LOOSENED)]
        bound.loosened = {name: worst(error_of(run[name], truth[name], sizes[name]) for run in loose) for name in truth}
        found = bound.findings(held, errors, theirs)
    if bound.chaotic:
        found = [finding for finding in found if not _lost_on_the_way(finding, torch_runs, DTYPES[case.dtype])]
    return {
        "findings": found,
        "errors": {name: (errors[name], theirs[name]) for name in truth},
        "report": " | ".join(dict.fromkeys(str(report) for report in reports))[:2000],
    }


def _lost(truth: Tensors, run: Tensors, dtype: torch.dtype) -> dict[str, Tensor]:
    """Which numbers of torch's are none, or may be none in another order, by what an input is poisoned with."""
    largest = torch.finfo(dtype).max / NEAR_OVERFLOW
    return {name: ~(run[name].isfinite() & (value.abs() <= largest)) for name, value in truth.items()}


def _without(run: Tensors, lost: dict[str, Tensor]) -> Tensors:
    """A run with zeros for the numbers that torch has lost."""
    return {name: value.masked_fill(lost[name], 0) if name in lost else value for name, value in run.items()}


def _more_than_poisoned(own: Tensors, truth: Tensors) -> list[dict[str, Any]]:
    """Outputs where the truth has none; gradients may be none for torch alone, which multiplies zeros by them."""
    outputs = [name for name in truth if not name.startswith("grad ")]
    counts = {name: int((~truth[name].isfinite() & own[name].isfinite()).sum()) for name in outputs}
    return [
        {"kind": "nan", "what": f"{count} numbers of {name} are finite, the true ones are not", "tensor": name}
        for name, count in counts.items() if count
    ]  # fmt: skip


def _lost_on_the_way(finding: dict[str, Any], torch_runs: list[Tensors], dtype: torch.dtype) -> bool:
    """Whether a chaotic network's gradient is no number where torch's may be none either."""
    name = finding["tensor"]
    lost = finding["kind"] == "nan" and name.startswith("grad ")
    return lost and may_overflow([run[name] for run in torch_runs], dtype)


class _Bound:
    """The bounds on a case's errors."""

    def __init__(self, case: Case, reports: list[Any]) -> None:
        self.floor = floor(DTYPES[case.autocast or case.dtype])
        self.asked = float(case.options.get("tol", 0.0)) * max(1, len(reports))
        self.steps = case.cell in KINKED and self.asked > 0
        """Whether gradients are discontinuous in states that may be off by the tolerance: no tolerance bounds those."""
        self.reach: Errors = {}
        """How many tolerances each tensor may be off by, where not one: they are relative to each part of the state."""
        self.chaotic = False
        """Whether torch's own outputs belong to another trajectory."""
        self.loosened: Errors = {}
        """Errors of torch's own gradients at states that are off by the tolerance asked for, or by the floor."""
        self.forward, self.backward = _promise(reports), _promise([report.backward for report in reports])

    def findings(self, names: list[str], errors: Errors, theirs: Errors) -> list[dict[str, Any]]:
        return [finding for name in names for finding in self._of(name, errors[name], theirs[name])]

    def _of(self, name: str, error: float, theirs: float) -> list[dict[str, Any]]:
        numbers = {"tensor": name, "error": error, "torch": theirs}
        if math.isnan(theirs):
            return []
        if math.isnan(error):
            return [{"kind": "nan", "what": f"{name} is not finite, torch's is", **numbers}]
        gradient = name.startswith("grad ")
        if gradient and (self.steps or self.chaotic):
            return []
        usual = 2 * theirs + self.floor
        asked = self.asked * PROMISED * self.reach.get(name, 1.0)
        if gradient:
            asked = max(self.asked * PROMISED_GRADIENT, 2 * self.loosened.get(name, 0.0))
        promise = self.backward if gradient else self.forward
        text = f"{name} is off by {error:.1e}, torch's by {theirs:.1e}"
        found = []
        if error > usual + asked:
            found.append({"kind": "error", "what": text, **numbers})
        if promise is not None and error > usual + max(asked, PROMISED * promise):
            found.append({"kind": "certificate", "what": f"{text}, and certified to {promise:.1e}", **numbers})
        return found


def _reach(sizes: Errors) -> Errors:
    """How many times as large as a tensor the second part of the state is: an LSTM's c may grow far beyond its h."""
    second = sizes.get("final 1", 0.0)
    return {name: max(1.0, second / size) for name, size in sizes.items()}


def _promise(reports: list[Any]) -> float | None:
    """The sum of the tolerances of layers solved by sweeps; None if a layer was not certified, or none was swept."""
    if any(report is None or not report.certified for report in reports):
        return None
    swept = [report.tolerance for report in reports if report.residuals]
    return sum(swept) if swept else None


class _Problem:
    """A case's numbers, and its three runs."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device = case, device
        self.state = weights(case, device)
        batch = max(case.B, 1)
        self.ragged: Tensors = {}
        if case.ragged:
            lengths = torch.randint(1, case.T + 1, (batch,))
            lengths[int(torch.randint(batch, ()))] = case.T
            self.ragged["lengths"] = lengths.to(device)
        if case.resets:
            self.ragged["resets"] = (torch.rand(case.T, batch) < 3 / case.T).to(device)
        self.inputs = [self._rounded(case.T, batch, case.inputs, scale=case.x_scale) for _ in range(case.calls)]
        if case.feature == "warm starts":  # of samples that come back
            self.inputs[:-1] = [self.inputs[-1] + CHANGED * x for x in self.inputs[:-1]]
        stacked = () if case.cell in USER_CELLS else (case.layers * case.directions,)
        shapes = [(*stacked, batch, width) for width in state_widths(case)]
        self.h0 = tuple(self._rounded(*shape, scale=0.5) for shape in shapes) if case.h0 else None
        if case.poison:
            self._poison(self.inputs[0])
        self.upstream: list[Tensor] = []
        self.direction = torch.randn_like(self.inputs[-1]) if case.feature == "second order" else None
        """The direction in which the gradient of x is differentiated once more."""

    def _rounded(self, *shape: int, scale: float) -> Tensor:
        numbers = torch.randn(*shape, dtype=torch.float64) * scale
        return numbers.to(DTYPES[self.case.dtype]).double().to(self.device)

    def _poison(self, x: Tensor) -> None:
        """One number at the first step of a sequence, at its last one, or anywhere, padding included."""
        row = int(torch.randint(x.shape[1], ()))
        length = int(self.ragged["lengths"][row]) if "lengths" in self.ragged else len(x)
        step = (0, length - 1, int(torch.randint(len(x), ())))[int(torch.randint(3, ()))]
        values = {"nan": math.nan, "inf": math.inf, "big": BIG.get(DTYPES[self.case.dtype], 1e28)}
        x[step, row, int(torch.randint(x.shape[2], ()))] = values[self.case.poison]

    def truth(self) -> Tensors:
        module, forward = torchs(self.case, self.state, self.ragged, torch.float64)
        return self._run(module, forward, self.inputs[-1], self.h0, torch.float64)

    def torchs(self, dtypes: dict[str, torch.dtype] | None = None, perturbed: bool = False) -> Tensors:
        dtype = DTYPES[self.case.dtype]
        if not perturbed:
            module, forward = torchs(self.case, self.state, self.ragged, dtype)
            return self._run(module, forward, self.inputs[-1], self.h0, dtype, dtypes)
        state = {name: self._perturbed(value) for name, value in self.state.items()}
        x, h0 = self._perturbed(self.inputs[-1]), None if self.h0 is None else tuple(map(self._perturbed, self.h0))
        ragged = {name: value.flip(-1) for name, value in self.ragged.items()}
        module, forward = torchs(self.case, state, ragged, dtype)
        with torch.autograd.graph.saved_tensors_hooks(self._perturbed, lambda value: value):
            # masks of a dropout belong to their sequences, which stay where they are
            return self._run(module, forward, x, h0, dtype, flipped=self.case.feature != "dropout")

    @property
    def weights(self) -> set[str]:
        """The names of the gradients of weights."""
        return {f"grad {name}" for name in self.state}

    def summed_by_sequence(self) -> Tensors:
        """The gradients of weights as sums of those of single sequences: one long sum over all steps of all sequences,
        as torch makes of some, may have ten times the error of its terms.
        """
        total: Tensors = {}
        for row in range(self.inputs[-1].shape[1]):
            alone = copy(self)
            alone.inputs = [x.narrow(-2, row, 1) for x in self.inputs]
            alone.upstream = [grad.narrow(-2, row, 1) for grad in self.upstream]
            alone.h0 = None if self.h0 is None else tuple(part.narrow(-2, row, 1) for part in self.h0)
            alone.ragged = {name: value.narrow(-1, row, 1) for name, value in self.ragged.items()}
            found = alone.torchs()
            total = {name: found[name] + total.get(name, 0.0) for name in self.weights}
        return total

    def loosened(self, tolerance: float) -> Tensors:
        """A run of torch in which everything that autograd saves is off by a tolerance."""
        dtype = DTYPES[self.case.dtype]
        module, forward = torchs(self.case, self.state, self.ragged, dtype)
        with torch.autograd.graph.saved_tensors_hooks(partial(self._perturbed, by=tolerance), lambda value: value):
            return self._run(module, forward, self.inputs[-1], self.h0, dtype)

    def shrunk(self, truth: Tensors) -> Tensors:
        """A result with float64's possible error, derived from float32's."""
        module, forward = torchs(self.case, self.state, self.ragged, torch.float32)
        return shrunk(self._run(module, forward, self.inputs[-1], self.h0, torch.float32), truth)

    def _perturbed(self, value: Tensor, by: float | None = None) -> Tensor:
        """Numbers changed at random by up to this share of each, or by a rounding."""
        if not value.is_floating_point():
            return value
        if by is None:
            by = torch.finfo(DTYPES[self.case.autocast or self.case.dtype]).eps
        return (value.double() * (1 + by * (2 * torch.rand_like(value, dtype=torch.float64) - 1))).to(value.dtype)

    def ours(self) -> tuple[Tensors, list[Any], dict[str, torch.dtype]]:
        module, forward, reports = ours(self.case, self.state, self.ragged)
        dtypes: dict[str, torch.dtype] = {}
        moves = [(weight, weight.detach().clone(), torch.randn_like(weight)) for weight in module.parameters()]
        for call, x in enumerate(self.inputs):
            module.zero_grad()
            if self.case.drift:
                for weight, last, direction in moves:
                    weight.data.copy_(last * (1 + self.case.drift * (self.case.calls - 1 - call) * direction))
            results = self._run(module, forward, x, self.h0, DTYPES[self.case.dtype], dtypes)
        return results, reports, dtypes

    def _run(
        self, module: nn.Module, forward: Forward, x: Tensor, h0: tuple[Tensor, ...] | None, dtype: torch.dtype,
        dtypes: dict[str, torch.dtype] | None = None, flipped: bool = False,
    ) -> Tensors:  # fmt: skip
        """Outputs, and the gradients of everything, as float64; `flipped`: computed with the last sequence first."""
        case = self.case
        turned: Callable[[Tensor], Tensor] = (lambda value: value.flip(-2)) if flipped else (lambda value: value)
        x = turned(x).to(dtype, copy=True).requires_grad_(case.grad)
        given = None if h0 is None else tuple(turned(part).to(dtype, copy=True) for part in h0)
        for part in given or ():
            part.requires_grad_(case.grad)
        lower = DTYPES[case.autocast] if case.autocast and dtype != torch.float64 else None
        with torch.set_grad_enabled(case.grad), torch.autocast(self.device, lower, enabled=lower is not None):
            y, final = forward(x, given)
        results = {"y": y, **{f"final {index}": part for index, part in enumerate(final)}}
        if dtypes is not None:
            dtypes |= {name: value.dtype for name, value in results.items()}
        if not self.upstream:
            size = (y.shape[0] * y.shape[1]) ** -0.5
            self.upstream = [torch.randn_like(value) * size for value in results.values()]
        values = list(results.values())
        if case.grad and [value.shape for value in values] == [grad.shape for grad in self.upstream]:
            upstream = [turned(grad).to(value.dtype) for grad, value in zip(self.upstream, values, strict=True)]
            if self.direction is None:
                torch.autograd.backward(values, upstream)
            else:
                (first,) = torch.autograd.grad(values, [x], upstream, create_graph=True)
                torch.autograd.backward([first], [turned(self.direction).to(first.dtype)])
            leaves = {"x": x, **{f"h0 {index}": part for index, part in enumerate(given or ())}}
            leaves |= dict(module.named_parameters())
            results |= {
                f"grad {name}": torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                for name, leaf in leaves.items()
            }
        weights = {f"grad {name}" for name, _ in module.named_parameters()}  # all else has a row for each sequence
        return {
            name: (value if name in weights else turned(value)).detach().double() for name, value in results.items()
        }


def shrunk(single: Tensors, truth: Tensors) -> Tensors:
    """The truth plus float64's possible error: that of a run in float32, scaled by the ratio of their roundings."""
    ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    return {name: truth[name] + ratio * (value.double() - truth[name]).nan_to_num() for name, value in single.items()}


def worst(errors: Iterable[float]) -> float:
    """The largest error of several runs; NaN if one has NaN, as torch's own numbers are then a rounding from lost."""
    found = list(errors)
    return math.nan if any(map(math.isnan, found)) else max(found)


def floor(dtype: torch.dtype) -> float:
    """The error below which there is never a finding."""
    return FLOOR[dtype] * torch.finfo(dtype).eps


def scales(truth: Tensors) -> dict[str, float]:
    """The scale to which each tensor's errors are relative."""
    sizes = {name: float(value.abs().max()) for name, value in truth.items()}
    found = {}
    for name, size in sizes.items():
        gradient = name.startswith("grad ")
        kind = max(other for each, other in sizes.items() if each.startswith("grad ") == gradient)
        found[name] = max(size, FAINT * kind, 1e-30)
    return found


def error_of(value: Tensor, truth: Tensor, scale: float) -> float:
    """The largest difference, relative to `scale`; NaN if a number is not finite."""
    return float((value - truth).abs().max()) / scale if bool(value.isfinite().all()) else math.nan


def beyond(truth: Tensor, dtype: torch.dtype) -> bool:
    """Whether the exact numbers exceed a dtype's range: torch's are finite then only by another trajectory."""
    return float(truth.abs().max()) > torch.finfo(dtype).max


def may_overflow(runs: list[Tensor], dtype: torch.dtype) -> bool:
    """Whether the numbers of one more such run may be more than a dtype can hold."""
    sizes = [math.log(max(float(run.abs().max()), 1e-300)) for run in runs]
    spread = statistics.stdev(sizes) if len(sizes) > 1 else 0.0
    return statistics.fmean(sizes) + SPREAD * spread > math.log(torch.finfo(dtype).max)


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


def context_lost(error: BaseException) -> bool:
    """Whether the device fails at everything from now on."""
    text = f"{type(error).__name__}: {error}"
    return any(words in text for words in ("CUDA error", "illegal", "AcceleratorError", "device-side assert"))


def _since(began: float) -> float:
    return round(time.perf_counter() - began, 4)
