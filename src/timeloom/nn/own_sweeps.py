"""A module's call by timeloom's sweeps: shapes and dtypes around the solves of its layers and directions.

`nn.graphs.call` is its twin inside the graphs of torch.compile.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from timeloom.distributed.group import TimeGroup
from timeloom.distributed.span import Span, agree
from timeloom.kernels.layer_kinds import multiplies_as_given
from timeloom.nn import padded, torch_layer
from timeloom.nn.asked import Asked, guess_of
from timeloom.nn.dropping import Weights
from timeloom.nn.sequence import (
    check_input,
    check_lengths,
    check_resets,
    mask_padding,
    pack_like,
    permute,
    reverse,
    unpack,
)
from timeloom.nn.stacked import Hidden
from timeloom.nn.states import AllStates
from timeloom.report import SolveReport
from timeloom.solve import functional
from timeloom.solve.warm_starts import Guess
from timeloom.torch_state.autocast import without_autocast
from timeloom.torch_state.precision import cast, products_in, returned_in, solved_in

if TYPE_CHECKING:
    from timeloom.nn.base import Recurrent

ANY_LENGTH = 2**62
"""Upper bound of lengths as long as the total length over all ranks is unknown."""


def call(module: Recurrent, asked: Asked, weights: list[Weights], obstacle: str | None) -> tuple[Any, ...]:
    """The module's forward pass by sweeps; step by step if there is an obstacle to them and torch has no such layer."""
    data, packed, lengths, resets, batched = asked.data, asked.packed, asked.lengths, asked.resets, asked.batched
    if packed is None and data.dim() not in (2, 3):
        raise ValueError(f"{module._get_name()}: Expected input to be 2D or 3D, got {data.dim()}D instead")
    check_input(data, packed, module.input_size, weights[0][0])
    if packed is not None:
        x, lengths = unpack(packed)
    else:
        x = data if batched else data.unsqueeze(1)
        x = x.transpose(0, 1) if module.batch_first and batched else x
    steps, batch = x.shape[:2]
    if steps == 0 and asked.group is None:
        raise RuntimeError(f"Expected sequence length to be larger than 0 in RNN, got input {tuple(data.shape)}")
    hidden = module._hidden_in(asked.hx, batched, batch, x, asked.permutation)
    span = None
    if asked.group is not None:
        span = _agree(module, asked.group, x, hidden, weights, lengths, resets)
        lengths = span.lengths_on(span.group.rank)
    if lengths is not None and packed is None:
        lengths = check_lengths(lengths, steps, batch)
        x = mask_padding(x, lengths)
    if lengths is not None and span is None and bool((lengths == steps).all()):
        lengths = None  # nothing is ragged
    if resets is not None:
        resets = resets if batched or not isinstance(resets, Tensor) else resets.unsqueeze(1)
        resets = check_resets(resets, steps, batch, module.batch_first and batched, x.device)
    begin = None if asked.guess is None else guess_of(module, asked, asked.guess, steps, batch)
    every = AllStates(lengths, resets) if asked.return_states else None
    y, final = _solve(module, x, hidden, weights, lengths, resets, begin, span, every, obstacle, asked.inside)
    if packed is not None:
        final = tuple(permute(part, packed.unsorted_indices) for part in final)
        return pack_like(y, lengths, packed), module._hidden_out(final)
    if not batched:
        y, final = y.squeeze(1), tuple(part.squeeze(1) for part in final)
    elif module.batch_first:
        y = y.transpose(0, 1)
    # Without a gradient, not a view: users may write into it later, with gradients on.
    result = y if y.requires_grad or asked.inside else y.detach(), module._hidden_out(final)
    return result if every is None else (*result, module._hidden_out(every.stacked(module.batch_first, batched)))


def _solve(
    module: Recurrent, x: Tensor, hidden: Hidden, weights: list[Weights], lengths: Tensor | None,
    resets: Tensor | None, guess: Guess | None, span: Span | None, every: AllStates | None, obstacle: str | None,
    inside: bool,
) -> tuple[Tensor, Hidden]:  # fmt: skip
    """All layers: x `(T, B, D)` to outputs `(T, B, directions · part)` and final states."""
    compute = solved_in(x)
    whole = lengths is None and resets is None and guess is None and span is None
    in_one_call = whole and module._solver.in_given_precision and module._has_kernels and not module._masks
    if in_one_call and multiplies_as_given(x):
        compute = products_in(x)
    returned = returned_in(torch_layer.layer(module), module.proj_size > 0, weights[0][0], x, hidden)
    reports: list[SolveReport] = [None] * module._stacked  # type: ignore[list-item]
    known = module._experiences if span is None else span.group.experiences(module)
    widths = [part.shape[-1] for part in hidden]

    def solve_one(index: int, y: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
        backwards = module.bidirectional and index % 2 == 1
        shown, own = module._with_masks(y, weights[index], widths)
        given = module._inputs(shown, initial, own, lengths, resets, backwards, span)
        whole_states = every is not None and given.masked  # with masks, c does not follow from h
        solve, record = module._solve_of(index, known, span), partial(reports.__setitem__, index)
        solve = replace(solve, whole_states=True) if whole_states else solve
        if obstacle:
            out, final = solve.on_tape(given, record, obstacle)
        elif inside:
            out, final = functional.run(solve, given, record)
        elif guess is None and padded.gains(solve, given):
            out, final = padded.run(solve, given, record)
        else:
            out, final = solve.run(given, record, guess)
        out = reverse(out, lengths) if backwards else out
        if every is not None and whole_states:
            every.parts.append(out.split(widths, -1))
        elif every is not None:
            every.add(y, out, tuple(part[index] for part in hidden), own, backwards)
        return out[..., : widths[0]] if whole_states else out, final

    with without_autocast(x.device):
        y, final = module._run_layers(cast(x, compute), hidden, solve_one, lengths)
    module._take_reports(reports)
    if every is not None:
        every.to(returned)
    return cast(y, returned[0]), tuple(cast(part, dtype) for part, dtype in zip(final, returned, strict=True))


def _agree(
    module: Recurrent, group: TimeGroup, x: Tensor, hidden: Hidden, weights: list[Weights], lengths: Any, resets: Any
) -> Span:
    """Exchange what all ranks must know about each other before they solve together."""
    batch = x.shape[1]
    if lengths is not None:
        lengths = check_lengths(lengths, ANY_LENGTH, batch)
    live = (x, *hidden, *(weight for layer in weights for weight in layer))
    taped = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in live)
    network = f"{module._get_name()}({nn.RNNBase.extra_repr(module)})"
    span = agree(group, x, lengths, resets, network, taped, module._solver, group.experiences(module))
    if lengths is not None:
        check_lengths(lengths, span.steps, batch)
    return span
