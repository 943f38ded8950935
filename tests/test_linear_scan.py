"""`linear_scan`: diagonal and dense, forward and reverse, against the plain loop, with derivatives of both orders."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import timeloom as tl
from timeloom.scan import chunked, reference

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (1, 2, 31, 32, 33, 100, 1024, 1025, 1337)
"""Around the lengths at which the scan changes its ways, and odd."""


def elements(
    steps: int, dense: bool, batch: tuple[int, ...] = (2,), n: int = 3, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Transfers that neither vanish nor explode, sources, and a state to start from."""
    generator = torch.Generator().manual_seed(0)
    if dense:
        a = torch.linalg.qr(torch.randn(steps, *batch, n, n, generator=generator, dtype=torch.float64)).Q * 0.99
    else:
        a = 2 * torch.rand(steps, *batch, n, generator=generator, dtype=torch.float64) - 1
    b = torch.randn(steps, *batch, n, generator=generator, dtype=torch.float64)
    h0 = torch.randn(*batch, n, generator=generator, dtype=torch.float64)
    return a.to(dtype), b.to(dtype), h0.to(dtype)


def loop(a: Tensor, b: Tensor, h0: Tensor, reverse: bool = False) -> Tensor:
    """The recurrence as the documentation writes it."""
    h, states = h0, {}
    for t in reversed(range(len(b))) if reverse else range(len(b)):
        h = (torch.einsum("...ij,...j->...i", a[t], h) if a.dim() > b.dim() else a[t] * h) + b[t]
        states[t] = h
    return torch.stack([states[t] for t in range(len(b))])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("steps", LENGTHS)
def test_it_is_the_loop(steps: int, dense: bool, reverse: bool) -> None:
    a, b, h0 = elements(steps, dense)
    torch.testing.assert_close(tl.linear_scan(a, b, h0, reverse), loop(a, b, h0, reverse), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(
        tl.linear_scan(a, b, reverse=reverse), loop(a, b, torch.zeros_like(h0), reverse), rtol=1e-11, atol=1e-11
    )


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("batch", [(), (1,), (4,), (2, 3)])
def test_any_batch_shape(batch: tuple[int, ...], dense: bool) -> None:
    """In particular one in which the chunks could be taken for the batch."""
    for steps in (49, 50):
        a, b, h0 = elements(steps, dense, batch, n=7)
        torch.testing.assert_close(tl.linear_scan(a, b, h0), loop(a, b, h0), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dense", [False, True])
def test_the_chunked_scan_is_its_twin(dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks inside chunks: with no shortest length to stop at, the boundaries are scanned by the same method."""
    monkeypatch.setattr(chunked, "SHORTEST", {"diagonal": 4, "dense": 4})
    structure = "dense" if dense else "diagonal"
    for steps in range(1, 60):
        a, b, h0 = elements(steps, dense)
        torch.testing.assert_close(
            chunked.scan(a, b, h0, structure), reference.scan(a, b, h0, structure), rtol=1e-11, atol=1e-11
        )


def test_float32() -> None:
    for dense in (False, True):
        a, b, h0 = elements(1337, dense, dtype=torch.float32)
        given = tl.linear_scan(a, b, h0)
        assert given.dtype == torch.float32
        expected = loop(a.double(), b.double(), h0.double())
        assert float((given - expected).abs().max() / expected.abs().max()) < 1e-5


def test_vectors_over_time_alone() -> None:
    a, b, _ = elements(40, False, ())
    assert tl.linear_scan(a[:, 0], b[:, 0]).shape == (40,)
    torch.testing.assert_close(tl.linear_scan(a[:, 0], b[:, 0]), loop(a, b, torch.zeros(3).double())[:, 0])


def test_no_steps_at_all() -> None:
    for dense in (False, True):
        a, b, h0 = elements(1, dense)
        a, b, h0 = a[:0].requires_grad_(), b[:0].requires_grad_(), h0.requires_grad_()
        h = tl.linear_scan(a, b, h0)
        assert h.shape == (0, 2, 3)
        h.sum().backward()
        assert bool((h0.grad == 0).all())


def test_inputs_are_left_alone() -> None:
    a, b, h0 = elements(100, False)
    copies = [tensor.clone() for tensor in (a, b, h0)]
    tl.linear_scan(a, b, h0).mul_(3)
    for tensor, copy in zip((a, b, h0), copies, strict=True):
        assert torch.equal(tensor, copy)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("steps", [1, 5, 40])
def test_gradcheck(steps: int, dense: bool, reverse: bool) -> None:
    inputs = tuple(tensor.requires_grad_() for tensor in elements(steps, dense, (1,)))

    def run(a: Tensor, b: Tensor, h0: Tensor) -> Tensor:
        return tl.linear_scan(a, b, h0, reverse)

    assert gradcheck(run, inputs, fast_mode=steps > 5)
    assert gradgradcheck(run, inputs, fast_mode=steps > 5)


@pytest.mark.parametrize("dense", [False, True])
def test_gradients_over_a_long_time(dense: bool) -> None:
    results = []
    for run in (tl.linear_scan, loop):
        a, b, h0 = (tensor.requires_grad_() for tensor in elements(1337, dense))
        run(a, b, h0).square().mean().backward()
        results.append((a.grad, b.grad, h0.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_only_what_asks_gets_a_gradient() -> None:
    for asking in range(3):
        inputs = [tensor.requires_grad_(i == asking) for i, tensor in enumerate(elements(40, True))]
        tl.linear_scan(*inputs).sum().backward()
        assert [tensor.grad is not None for tensor in inputs] == [i == asking for i in range(3)]


@pytest.mark.parametrize("dense", [False, True])
def test_values_that_are_not_finite_go_forward_only(dense: bool) -> None:
    a, b, h0 = elements(1337, dense)
    b[700, 0, 1] = torch.nan
    h = tl.linear_scan(a, b, h0)
    assert bool(h[:700].isfinite().all())
    assert bool(h[:, 1].isfinite().all())
    assert bool(h[701:, 0, 1].isnan().all())


def test_arguments_of_other_kinds_are_named() -> None:
    b = torch.zeros(4, 2, 3)
    for h0 in (0.0, [0.0]):
        with pytest.raises(TypeError, match="h0 must be a Tensor, got"):
            tl.linear_scan(b, b, h0)
    for dtype in (torch.int64, torch.bool):
        with pytest.raises(TypeError, match="b must be floating point or complex, got torch"):
            tl.linear_scan(b.to(dtype), b.to(dtype))
    for levels in ("a", 1.5, -1, True):
        with pytest.raises(ValueError, match="levels must be a whole number ≥ 0 or None"):
            tl.linear_scan(b, b, method="blelloch", levels=levels)
    with pytest.raises(ValueError, match="structure must be one of"):
        tl.linear_scan(b, b, structure=["dense"])


def test_errors_say_what_was_given_and_what_was_expected() -> None:
    a, b, h0 = elements(5, False)
    dense = elements(5, True)[0]
    with pytest.raises(
        ValueError, match=r"a has shape \(4, 2, 3\); with b of shape \(5, 2, 3\) it must be \(5, 2, 3\)"
    ):
        tl.linear_scan(a[:4], b)
    with pytest.raises(ValueError, match=r"or \(5, 2, 3, 3\) \(dense\)"):
        tl.linear_scan(dense[..., :2], b)
    with pytest.raises(ValueError, match=r"h0 has shape \(2, 2\), expected \(2, 3\)"):
        tl.linear_scan(a, b, h0[:, :2])
    with pytest.raises(ValueError, match=r"a is torch.float32 on cpu, b is torch.float64 on cpu"):
        tl.linear_scan(a.float(), b)
    with pytest.raises(ValueError, match=r"h0 is torch.float32"):
        tl.linear_scan(a, b, h0.float())
    with pytest.raises(ValueError, match="time dimension"):
        tl.linear_scan(torch.ones(()), torch.ones(()))


@pytest.mark.parametrize("method", ["auto", "reference", "blelloch"])
@pytest.mark.parametrize("structure", ["diagonal", "dense", "block"])
def test_complex_numbers(structure: str, method: str) -> None:
    shapes = {"diagonal": ((5, 2), (5, 2)), "dense": ((5, 2, 2), (5, 2)), "block": ((5, 2, 2, 1), (5, 2, 1))}[structure]
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(s, generator=generator, dtype=torch.complex128, requires_grad=True) for s in shapes)
    h0 = torch.randn(shapes[1][1:], generator=generator, dtype=torch.complex128, requires_grad=True)
    for reverse in (False, True):
        for transpose in (False, True):
            assert gradcheck(
                lambda a, b, h0, r=reverse, t=transpose: tl.linear_scan(
                    a, b, h0, r, transpose=t, structure=structure, method=method
                ),
                (a, b, h0),
            )


def test_autocast_rounds_nothing() -> None:
    a, b = torch.randn(200, 2, 3, 3) / 3, torch.randn(200, 2, 3)
    for method in ("reference", "chunked", "blelloch"):
        plain = tl.linear_scan(a, b, method=method)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(tl.linear_scan(a, b, method=method), plain)


def test_autocast_around_the_backward_passes_rounds_nothing() -> None:
    live = [torch.randn(20, 2, 3, 3) / 3, torch.randn(20, 2, 3), torch.randn(2, 3)]
    live = [part.requires_grad_() for part in live]

    def gradients(lowered: bool) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
            first = torch.autograd.grad(tl.linear_scan(*live).square().sum(), live, create_graph=True)
            second = torch.autograd.grad(torch.stack([one.square().sum() for one in first]).sum(), live)
        return [*(one.detach() for one in first), *second]

    for one, other in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(one, other)
