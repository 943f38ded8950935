"""From a user's step in Python to its operations: one trace of the step on a few rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from timeloom.compile.refusal import BRANCHES, NotFused

aten = torch.ops.aten
PRIMES = (13, 11, 7, 17, 19, 23, 29, 31, 37, 41, 43, 47)
"""Candidate numbers of rows to trace with: one that divides no width can be recognized in the trace."""
MOST_TRACES = 4
"""Most numbers of rows that are tried."""

_DECOMPOSED = [
    aten.addcmul, aten.addcdiv, aten.gelu, aten.silu, aten.leaky_relu, aten.threshold, aten.softshrink, aten.hardshrink,
    aten.glu, aten.masked_fill, aten.logit, aten.sgn,
]  # fmt: skip
"""Operations that torch decomposes itself. Not those whose parts overflow where the whole does not (softplus, elu), nor
norms: on x alone torch's own are far faster than their parts."""


def trace(
    function: Callable[[Any, Tensor], Any], state: tuple[Tensor, ...], is_tuple: bool, x: Tensor
) -> fx.GraphModule:
    """The step's operations on these rows; placeholders are the parts of the state and x, outputs the next parts.

    Tensors that the function refers to are attributes of the module, by identity.
    """

    def step(*args: Tensor) -> tuple[Tensor, ...]:
        *parts, inputs = args
        out = function(tuple(parts) if is_tuple else parts[0], inputs)
        if isinstance(out, tuple) != is_tuple:
            raise NotFused("the cell returns a tuple for a tensor, or a tensor for a tuple")
        out = out if isinstance(out, tuple) else (out,)
        if not all(isinstance(part, Tensor) for part in out):
            raise NotFused("the cell returns what is no tensor")
        return out

    table: Any = get_decompositions(_DECOMPOSED)
    try:
        with torch.no_grad():
            module = make_fx(functionalize(step, remove="mutations"), table, tracing_mode="real")(*state, x)
        with torch.enable_grad(), _Unshown():
            step(*(_tracked(tensor) for tensor in (*state, x)))
    except NotFused:
        raise
    except Exception as error:  # a user's step that cannot be traced runs as it is
        raise NotFused(_why(error)) from error
    _refuse(module)
    return module


def _tracked(tensor: Tensor) -> Tensor:
    """A copy that requires a gradient but is no leaf, so that it may be changed in place."""
    return tensor.detach().requires_grad_(tensor.is_floating_point()).clone()


class _Unshown(TorchFunctionMode):
    """Refuses what changes a step's gradient without a mark in its trace."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if func is torch._C._set_grad_enabled and not args[0]:
            raise NotFused("torch.no_grad inside of the step: write .detach() where the gradient ends")
        if func == _DATA:
            raise NotFused("the .data of a tensor: write .detach() where the gradient ends")
        if name == "register_hook":
            raise NotFused("a hook on a gradient inside of the step (register_hook)")
        return func(*args, **(kwargs or {}))


_DATA: Any = vars(torch.Tensor.__base__)["data"].__get__


def _why(error: Exception) -> str:
    text = str(error)
    if "trying to get value out of a tracing tensor" in text or "data-dependent" in text or ".item()" in text:
        return f"{BRANCHES}: the step makes a tensor a number of Python's (if, while, .item(), float())"
    if "autograd.Function" in text:
        return "a torch.autograd.Function of the user's own, whose gradient need not be that of its operations"
    if "mutating a non-functional tensor" in text or "mutate" in text:
        return "an in-place change of a tensor that the step does not own"
    return f"the step cannot be traced: {type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300]


def _refuse(module: fx.GraphModule) -> None:
    """Refuse what no kernel may do: random numbers, in-place changes of arguments or of the user's tensors."""
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise NotFused(f"randomness: {name_of(node)} (dropout? call .eval())")
        if node.target is aten.copy_.default and node.args[0].op == "placeholder":
            raise NotFused("an in-place change of the step's own arguments")
        if getattr(node.target, "_schema", None) is not None and node.target._schema.is_mutable:
            _out_of_place(node)


def _out_of_place(node: Any) -> None:
    """Replace an in-place operation on a temporary, which nothing else reads, by its out-of-place form."""
    changed, name = node.args[0], node.target._schema.name.split("::")[-1]
    own = isinstance(changed, fx.Node) and changed.op == "call_function" and len(changed.users) == 1
    if not own or not name.endswith("_") or not hasattr(aten, name[:-1]):
        raise NotFused(f"an in-place operation, {name_of(node)}")
    node.target = getattr(getattr(aten, name[:-1]), node.target._overloadname)


def name_of(node: fx.Node) -> str:
    """The name of an operation as users know it."""
    return f"torch.{node.target._schema.name.split('::')[-1]}" if hasattr(node.target, "_schema") else str(node.target)


def traced_by_rows(
    function: Callable[[Any, Tensor], Any], state: tuple[Tensor, ...], is_tuple: bool, x: Tensor
) -> tuple[fx.GraphModule, int]:
    """The step's operations, and the number of rows they were traced with.

    If possible, a number at which sizes that count rows can be distinguished from all others.
    """
    found: list[tuple[int, int, fx.GraphModule]] = []
    for rows in _numbers_of_rows(*state, x)[:MOST_TRACES]:
        module = trace(function, tuple(some_rows(part, rows) for part in state), is_tuple, some_rows(x, rows))
        found.append((_mistakable(module, rows), rows, module))
        if found[-1][0] == 0:
            break
    _, rows, module = min(found, key=lambda one: one[0])
    return module, rows


def some_rows(tensor: Tensor, rows: int) -> Tensor:
    """This number of rows of an example, spread over it."""
    at = torch.linspace(0, len(tensor) - 1, rows).round().long()
    return tensor.detach()[at.to(tensor.device)].clone()


def _numbers_of_rows(*tensors: Tensor) -> list[int]:
    """Numbers of rows to trace with: no width is a multiple of one."""
    widths = {size for tensor in tensors for size in tensor.shape[1:]}
    widths |= {tensor[:1].numel() for tensor in tensors}
    return [prime for prime in PRIMES if all(width % prime for width in widths)] or [53]


def _mistakable(module: fx.GraphModule, rows: int) -> int:
    """The number of sizes that may or may not count rows: those of constants, and second ones of a tensor."""
    count, depending = 0, set[fx.Node]()
    for node in module.graph.nodes:
        if node.op == "placeholder" or any(arg in depending for arg in node.all_input_nodes):
            depending.add(node)
        value = getattr(module, str(node.target)) if node.op == "get_attr" else node.meta.get("val")
        if isinstance(value, Tensor):
            count += max(sum(size % rows == 0 for size in value.shape) - (node in depending), 0)
    return count
