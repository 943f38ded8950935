"""What a step computes from parameters or from x alone: evaluated by torch for all steps at once, with autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from timeloom.cells.projection import project
from timeloom.compile.lanes import Lanes
from timeloom.compile.refusal import NotFused
from timeloom.compile.sources import ROW, ZERO
from timeloom.compile.trace import name_of
from timeloom.torch_state.precision import HALF

_SIZED = {
    **dict.fromkeys(("full", "zeros", "ones", "empty"), (0,)),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "expand", "repeat"), (1,)),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty"), (1,)),
    "_reshape_alias": (1, 2),
    "native_group_norm": (3,),
}
"""The arguments that are sizes, by operation: sizes that count rows are adapted to the current number of rows. Of
`arange` it is the end."""


def _sizes(node: Any) -> tuple[int, ...]:
    """Which arguments of an operation are sizes."""
    if not hasattr(node.target, "_schema"):
        return ()
    name = node.target._schema.name.split("::")[-1]
    return (min(len(node.args), 2) - 1,) if name == "arange" else _SIZED.get(name, ())


_LAYER_NORM = torch.ops.aten.native_layer_norm.default
_PROJECTIONS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def widened(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Half precision tensors as float32, so that values computed beforehand are as precise as the kernels'."""
    return {name: tensor.float() if tensor.dtype in HALF else tensor for name, tensor in tensors.items()}


def in_single(arg: Any) -> Any:
    """Arguments of an operation, with float32 in place of half precision dtypes."""
    if isinstance(arg, (list, tuple)):
        return type(arg)(in_single(item) for item in arg)
    if isinstance(arg, dict):
        return {key: in_single(value) for key, value in arg.items()}
    return torch.float32 if isinstance(arg, torch.dtype) and arg in HALF else arg


def _layer_norm(x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    """Torch's layer norm, with scale and bias applied separately.

    Torch's own gradients of these, on a CPU one long sum over all steps, are off by 1e-5 after some 10,000 steps.
    """
    found, mean, scale = torch.native_layer_norm(x, shape, None, None, eps)
    found = found if weight is None else found * weight
    return found if bias is None else found + bias, mean, scale


class Evaluation:
    """Values of the nodes that do not depend on the state, for given tensors and rows of x."""

    def __init__(self, module: fx.GraphModule, rows: int, tensors: dict[str, Tensor], x: Tensor | None = None) -> None:
        """`rows`: the number of rows the step was traced with. `tensors`: the module's attributes now."""
        self.module, self.traced_rows, self.x = module, rows, x
        self.wide = any(tensor.dtype in HALF for tensor in tensors.values())
        self.tensors = widened(tensors) if self.wide else tensors
        self._held: dict[fx.Node, Any] = {}

    def __call__(self, node: fx.Node) -> Any:
        """A node's value; without x, for one row."""
        pending = [node]
        while pending:
            latest = pending[-1]
            missing = [arg for arg in latest.all_input_nodes if arg not in self._held]
            if latest in self._held or not missing:
                if latest not in self._held:
                    self._held[latest] = self._run(latest)
                pending.pop()
            pending.extend(missing)
        return self._held[node]

    def _run(self, node: Any) -> Any:
        if node.op == "get_attr":
            return self.tensors[str(node.target)]
        if node.op == "placeholder":
            if self.x is None:
                raise NotFused(f"{node.name} where a constant is expected")
            return self.x
        rows = 1 if self.x is None else len(self.x)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: self._held[arg])
        if self.wide:
            args, kwargs = in_single(args), in_single(kwargs)
        sizes = _sizes(node)
        args = tuple(self._resized(arg, rows) if at in sizes else arg for at, arg in enumerate(args))
        try:
            if self.x is not None and node.target in _PROJECTIONS and not kwargs:
                *bias, value, weight = args
                if not bias or bias[0].dim() == 1:  # with gradients that are fast for many rows
                    return project(value, weight.t(), bias[0] if bias else None)
            if node.target is _LAYER_NORM and args[0].device.type == "cpu":
                return _layer_norm(*args)
            return node.target(*args, **kwargs)
        except RuntimeError as error:
            raise NotFused(f"{name_of(node)} of what does not depend on the state, for {rows} rows: {error}") from error

    def _resized(self, arg: Any, rows: int) -> Any:
        if isinstance(arg, (list, tuple)):
            return type(arg)(self._resized(item, rows) for item in arg)
        whole = isinstance(arg, int) and not isinstance(arg, bool) and arg > 0 and arg % self.traced_rows == 0
        return arg // self.traced_rows * rows if whole else arg


class Constants:
    """How a tensor is assembled from constants by their lanes (0 for ZERO): found once, gathered in every call.

    A view, if it is a regular pattern of one tensor's elements, such as a transposition.
    """

    def __init__(self, lanes: Tensor, of: Lanes) -> None:
        flat = lanes.flatten()
        known = flat[flat != ZERO]
        self._shape = lanes.shape
        self._sources = [of.sources[i] for i in torch.unique(of.source_numbers(known)).tolist()]
        alone = len(self._sources) == 1 and len(known) == len(flat) and self._sources[0].kind == "const"
        self._pattern = _pattern(lanes - self._sources[0].base) if alone else None
        self._at = torch.zeros_like(flat)  # into all sources side by side, behind one zero
        size = 1
        for source in self._sources:
            inside = (flat >= source.base) & (flat < source.base + source.width)
            self._at = torch.where(inside, flat - source.base + size, self._at)
            size += source.width
        self._copies: dict[torch.device, Tensor] = {}

    def gather(self, evaluate: Evaluation, like: Tensor) -> Tensor:
        if self._pattern is not None:
            strides, first = self._pattern
            flat: Tensor = evaluate(self._sources[0].detail).to(like).flatten()
            return flat.as_strided(self._shape, strides, first + flat.storage_offset())
        table = [like.new_zeros(1)]
        for source in self._sources:
            if source.kind == "number":  # not by a copy from the host, which no CUDA graph can contain
                table.append(like.new_full((1,), source.detail))
            else:
                table.append(evaluate(source.detail).to(like).flatten())
        return torch.cat(table)[on_device(self._at, like.device, self._copies)].view(self._shape)


def on_device(index: Tensor, device: torch.device, copies: dict[torch.device, Tensor]) -> Tensor:
    """An index tensor of the host on a device, cached there."""
    if device.type == "cpu":
        return index
    if device not in copies:
        with torch.inference_mode(False):  # what is kept must serve calls in any mode
            copies[device] = index.to(device)
    return copies[device]


def _pattern(at: Tensor) -> tuple[list[int], int] | None:
    """Strides and first element of a view on a flat tensor that has these elements, or None."""
    first = int(at.flatten()[0])
    strides = [int(at.select(dim, 1).flatten()[0]) - first if size > 1 else 0 for dim, size in enumerate(at.shape)]
    pattern = torch.tensor(first)
    for dim, (size, stride) in enumerate(zip(at.shape, strides, strict=True)):
        pattern = pattern + (torch.arange(size) * stride).view([-1 if d == dim else 1 for d in range(at.dim())])
    regular = all(stride >= 0 for stride in strides) and torch.equal(pattern.expand(at.shape), at)
    return (strides, first) if regular else None


class ByRows:
    """How a vector of every row is read from a value that depends on x alone, by its lanes, all of one source."""

    def __init__(self, lanes: Tensor, of: Lanes) -> None:
        source = of.source_of(int(lanes[0]) % ROW)
        self._node, self._row_dim = source.detail
        self._at = lanes - source.base
        first, last = int(self._at[0]), int(self._at[-1])
        whole = last - first + 1 == len(lanes) and torch.equal(self._at, torch.arange(first, last + 1))
        self._stretch = slice(first, last + 1) if whole else None
        self._copies: dict[torch.device, Tensor] = {}

    def gather(self, evaluate: Evaluation) -> Tensor:
        """The vectors, `(rows, width)`."""
        value: Tensor = evaluate(self._node).movedim(self._row_dim, 0)
        flat = value.reshape(value.shape[0], -1)
        return flat[:, on_device(self._at, flat.device, self._copies) if self._stretch is None else self._stretch]
