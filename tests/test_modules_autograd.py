"""Modules on autograd's tape, beside torch's own: twice, in place, checkpointed, hooked, reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from module_zoo import (
    B,
    D,
    H,
    T,
    assert_same,
    call,
    each_layer,
    each_way,
    hidden,
    inputs,
    loss_of,
    pair,
    raised,
    used_sweeps,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import timeloom as tl
from timeloom.solvers import Shooting

pytestmark = pytest.mark.usefixtures("one_thread")
CHUNKS = Shooting(chunk=4)


@each_way
@each_layer
def test_backward_twice_with_a_retained_graph(name: str, solver: Any) -> None:
    theirs, ours = pair(name, solver)
    results = []
    for layer in (theirs, ours):
        x = inputs(theirs).requires_grad_()
        loss = loss_of([layer(x)[0]])
        loss.backward(retain_graph=True)
        loss.backward()
        results.append({"x": x.grad, **{key: value.grad for key, value in layer.named_parameters()}})
    assert_same(results[1], results[0])


@each_way
@each_layer
def test_backward_twice_without_it_raises(name: str, solver: Any) -> None:
    messages = []
    for layer in pair(name, solver):
        loss = layer(inputs(layer))[0].sum()
        loss.backward()
        error = raised(loss.backward)
        assert isinstance(error, RuntimeError)
        messages.append(str(error))
    assert messages[0] == messages[1]
    assert "second time" in messages[1]


@each_way
@pytest.mark.parametrize("batch_first", [False, True])
@each_layer
def test_output_changed_in_place_is_right_or_refused(name: str, batch_first: bool, solver: Any) -> None:
    theirs, ours = pair(name, solver, batch_first=batch_first)

    def gradients(layer: Any, in_place: bool) -> dict[Any, Tensor]:
        layer.zero_grad()
        output, _ = layer(inputs(theirs))
        output = output.mul_(3) if in_place else output * 3
        loss_of([output]).backward()
        return {key: value.grad.clone() for key, value in layer.named_parameters()}

    try:
        changed = gradients(ours, True)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017 - either outcome is right
    else:
        assert_same(changed, gradients(theirs, False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@each_layer
def test_states_are_for_users_to_write_into(name: str, dtype: torch.dtype) -> None:
    """Before the backward pass, too, as a loop does that carries a state along."""
    _, ours = pair(name, CHUNKS, dtype)
    results = []
    for writes in (False, True):
        x, carried = inputs(ours, dtype=dtype).requires_grad_(), hidden(ours, dtype=dtype)
        output, final = ours(x, carried)
        before = output.detach().clone()
        if writes:
            states = [part if isinstance(part, tuple) else (part,) for part in (carried, final)]
            for mine, found in zip(*states, strict=True):
                mine.copy_(found.detach())
                found.mul_(2).detach_()
        assert torch.equal(output.detach(), before)
        ours.zero_grad()
        loss_of([output]).backward()
        results.append({"x": x.grad, **{key: value.grad for key, value in ours.named_parameters()}})
    assert_same(*results, tolerance=0.0)


@each_layer
def test_weights_changed_before_the_backward_pass_are_refused(name: str) -> None:
    _, ours = pair(name, CHUNKS)
    output, _ = ours(inputs(ours))
    with torch.no_grad():
        ours.weight_hh_l0.mul_(2)
    assert "modified by an inplace operation" in str(raised(output.sum().backward))


@each_layer
def test_second_derivatives(name: str) -> None:
    theirs, ours = pair(name, CHUNKS)
    x = inputs(theirs).requires_grad_()
    results = []
    for layer in (theirs, ours):
        (slope,) = torch.autograd.grad(layer(x)[0].square().sum(), x, create_graph=True)
        grads = torch.autograd.grad(slope.square().sum(), [x, *layer.parameters()], allow_unused=True)
        results.append(dict(enumerate(grads)))
    assert_same(results[1], results[0])


@each_way
@pytest.mark.parametrize("reentrant", [False, True])
@each_layer
def test_checkpointed(name: str, reentrant: bool, solver: Any) -> None:
    theirs, ours = pair(name, solver, num_layers=2, dropout=0.3)
    results = []
    for layer in (theirs, ours):
        torch.manual_seed(0)
        x = inputs(theirs).requires_grad_()
        output = checkpoint(lambda x, layer=layer: layer(x)[0], x, use_reentrant=reentrant)
        loss_of([output]).backward()
        results.append({"x": x.grad, **{key: value.grad for key, value in layer.named_parameters()}})
    assert_same(results[1], results[0])


@pytest.mark.usefixtures("auto_takes_sweeps")
def test_checkpoint_survives_what_auto_learns_meanwhile() -> None:
    torch.manual_seed(0)
    theirs, ours = nn.GRU(D, H), tl.GRU(D, H)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(4000, 1, D)
    for _ in range(3):
        grads = []
        for layer in (theirs, ours):
            layer.zero_grad()
            checkpoint(lambda x, layer=layer: layer(x)[0], x, use_reentrant=False).square().mean().backward()
            grads.append({key: value.grad.clone() for key, value in layer.named_parameters()})
        assert used_sweeps(ours)
        assert_same(grads[1], grads[0], 1e-4)


@each_way
@each_layer
def test_hooks_of_modules_and_tensors(name: str, solver: Any) -> None:
    theirs, ours = pair(name, solver)
    seen: list[list[Any]] = []
    for layer in (theirs, ours):
        log: list[Any] = []
        layer.register_forward_pre_hook(lambda module, args, log=log: log.append(("before", args[0].shape)))
        layer.register_forward_hook(lambda module, args, result, log=log: log.append(("after", result[0].shape)))
        layer.register_full_backward_hook(lambda module, into, out, log=log: log.append(("backward", out[0].shape)))
        layer.weight_hh_l0.register_hook(lambda grad, log=log: log.append(("weight", grad.shape)))
        loss_of([layer(inputs(theirs).requires_grad_())[0]]).backward()
        seen.append(sorted(log, key=str))
    assert seen[0] == seen[1]
    assert len(seen[0]) == 4


def test_saved_tensors_are_autograds_own() -> None:
    _, ours = pair("gru", CHUNKS)
    counts = {"packed": 0, "unpacked": 0}

    def pack(tensor: Tensor) -> Tensor:
        counts["packed"] += 1
        return tensor.clone()

    def unpack(tensor: Tensor) -> Tensor:
        counts["unpacked"] += 1
        return tensor

    expected = call(ours, inputs(ours))
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert_same(call(ours, inputs(ours)), expected)
    assert counts["packed"] == counts["unpacked"] > 0


@each_layer
def test_reports_tell_of_both_passes(name: str) -> None:
    _, ours = pair(name, CHUNKS, num_layers=2, bidirectional=True)
    output, _ = ours(inputs(ours))
    assert [report.backward for report in ours.reports] == [None] * 4
    output.sum().backward()
    for report in ours.reports:
        assert report.converged
        assert report.chunk == 4
        assert report.backward.converged
    ours(inputs(ours, T + 1, B, D))
    assert [report.backward for report in ours.reports] == [None] * 4
