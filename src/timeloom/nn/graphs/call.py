"""A module's call as torch.compile sees it: checks and shapes are traced, and each layer and direction is an operator.

Torch traces this file instead of `Recurrent.forward`, and imports it for that: eager calls never come here.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from timeloom.distributed.context import entered, shared
from timeloom.kernels.cuda import nvrtc
from timeloom.nn import torch_layer
from timeloom.nn.base import Recurrent
from timeloom.nn.graphs import operators
from timeloom.nn.graphs.handles import module_of
from timeloom.nn.sequence import check_input, check_resets, mask_padding, reverse
from timeloom.nn.stacked import Hidden
from timeloom.torch_state.precision import SOLVED, products_in, returned_in, solved_in
from timeloom.torch_state.transforms import WHERE, transformed

KERNELS = nvrtc.unavailable() is None


def _kept_out(function: Any, reason: str) -> Any:
    """The function, called outside the graph; with fullgraph=True, torch raises an error with this reason."""
    told = {"reason": f"timeloom: {reason}"} if "reason" in inspect.signature(torch.compiler.disable).parameters else {}
    return torch.compiler.disable(function, **told)


def _outside(reason: str) -> Any:
    """A module's usual call, outside the graph."""
    return _kept_out(Recurrent.forward.__wrapped__, reason)  # type: ignore[attr-defined]


NOT_PADDED = _outside("a graph holds padded tensors and lengths= as a tensor, not a PackedSequence or a list")
NOT_GUESSED = _outside("a graph cannot hold guess=")
NOT_ALL_STATES = _outside("a graph cannot hold return_states=True")
NOT_DROPPED = _outside("a graph cannot hold dropout between layers over lengths=")
NOT_SOLVED = _outside("there are no sweeps for an empty input, or one of this dtype, layout or device")
NOT_ALONE = _outside("a graph cannot hold sequences that are shared with other ranks (time_parallel)")
NOT_TRANSFORMED = _outside(f"there are no sweeps {WHERE}")
NOT_ON_TAPE = _outside("a graph cannot hold sequential steps that torch has no layer for")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def allowed() -> bool:
    """Whether torch lets recurrent layers into its graphs at all."""
    from torch._dynamo import config

    return bool(getattr(config, "allow_rnn", True))


NOT_ALLOWED = "set torch._dynamo.config.allow_rnn = True to let recurrent layers into graphs"
_call_outside = _outside(NOT_ALLOWED)
call_outside = _kept_out(lambda: _call_outside, NOT_ALLOWED)
"""`call_outside()(module, ...)`: the call if torch lets no recurrent layers into graphs."""


def call(
    module: Recurrent,
    input: Any,
    hx: Any = None,
    *,
    lengths: Any = None,
    resets: Any = None,
    guess: Any = None,
    return_states: bool = False,
) -> tuple[Any, ...]:
    """`module(input, hx, ...)`, inside the graph if it can hold the call, else outside."""
    outside = NOT_ALL_STATES if return_states else _why_not(module, input, lengths, guess)
    if outside is None:
        return _run(module, input, hx, lengths, resets)
    result: tuple[Any, ...] = outside(
        module, input, hx, lengths=lengths, resets=resets, guess=guess, return_states=return_states
    )
    return result


def _why_not(module: Recurrent, input: Any, lengths: Any, guess: Any) -> Any:
    """The function to call outside the graph if no graph can hold this call, else None."""
    if type(input) not in (Tensor, Parameter) or not (lengths is None or isinstance(lengths, Tensor)):
        return NOT_PADDED
    if guess is not None:
        return NOT_GUESSED
    if lengths is not None and module.num_layers > 1 and module.dropout > 0 and module.training:
        return NOT_DROPPED
    if input.device.type not in torch_layer.SWEPT or input.dtype not in SOLVED or input.layout != torch.strided:
        return NOT_SOLVED
    if input.dim() not in (2, 3) or input.numel() == 0:
        return NOT_SOLVED
    if entered or shared:
        return NOT_ALONE
    if transformed():
        return NOT_TRANSFORMED
    if not module.has_torch_twin and module._solver.on_tape:
        return NOT_ON_TAPE
    return None


def _run(module: Recurrent, input: Tensor, hx: Any, lengths: Tensor | None, resets: Any) -> tuple[Any, Any]:
    """All layers and directions, as in `nn.own_sweeps.call`, for a padded tensor."""
    operators.make_room(module._handle)
    batched = input.dim() == 3
    weights = module._present_weights()
    check_input(input, None, module.input_size, weights[0][0])
    x = input if batched else input.unsqueeze(1)
    x = x.transpose(0, 1) if module.batch_first and batched else x
    steps, batch = x.shape[:2]
    hidden = module._hidden_in(hx, batched, batch, x, None)
    whole = lengths is None and resets is None
    compute, returned = _dtypes(module, x, hidden, whole)
    if lengths is not None:
        lengths = torch.ops.timeloom.check_lengths(lengths, steps, batch)
        x = mask_padding(x, lengths)
    if resets is not None:
        resets = resets if batched or not isinstance(resets, Tensor) else resets.unsqueeze(1)
        resets = check_resets(resets, steps, batch, module.batch_first and batched, x.device)

    def solve_one(index: int, y: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
        backwards = module.bidirectional and index % 2 == 1
        shown, own = module._with_masks(y, weights[index], [part.shape[-1] for part in hidden])
        given = module._inputs(shown, initial, own, lengths, resets, backwards)
        out, final = operators.run(module._handle, index, given)
        return reverse(out, lengths) if backwards else out, final

    with torch.autocast(x.device.type, enabled=False):
        y, final = module._run_layers(x.to(compute), hidden, solve_one)
        y, final = y.to(returned[0]), tuple(part.to(dtype) for part, dtype in zip(final, returned, strict=True))
    if not batched:
        y, final = y.squeeze(1), tuple(part.squeeze(1) for part in final)
    elif module.batch_first:
        y = y.transpose(0, 1)
    return y, module._hidden_out(final)


def _dtypes(module: Recurrent, x: Tensor, hidden: Hidden, whole: bool) -> tuple[torch.dtype, tuple[torch.dtype, ...]]:
    """The dtype to solve in, and the dtypes in which to return the parts of the state."""
    in_one_call = whole and module._solver.in_given_precision and module._has_kernels and not module._masks
    on_gpu = x.device.type == "cuda" and x.dtype != torch.float64 and KERNELS
    compute = products_in(x) if in_one_call and on_gpu else solved_in(x)
    if not torch.is_autocast_enabled(x.device.type):
        return compute, (x.dtype,) * len(hidden)
    lower = torch.get_autocast_dtype(x.device.type)
    parts = tuple(part.dtype for part in hidden)
    return compute, _under_autocast(module._handle, x.device.type, lower, x.dtype, parts)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _under_autocast(
    handle: int, device: str, lower: torch.dtype, x: torch.dtype, parts: tuple[torch.dtype, ...]
) -> tuple[torch.dtype, ...]:
    """`returned_in`, which runs torch's layer to find the dtypes."""
    module = module_of(handle)
    hidden = tuple(torch.empty(0, dtype=part, device=device) for part in parts)
    with torch.autocast(device, lower):
        like = torch.empty(0, dtype=x, device=device)
        return returned_in(torch_layer.layer(module), module.proj_size > 0, module._weights_of(0)[0], like, hidden)
