"""What a step computes from parameters or from x alone: evaluated by torch for all of time at once, with autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from timeloom.cells.projection import project
from timeloom.compile.lanes import Lanes
from timeloom.compile.refusal import NotFused
from timeloom.compile.sources import ROW, ZERO
from timeloom.compile.trace import name_of

_SIZED = {
    "view", "_unsafe_view", "reshape", "_reshape_alias", "expand", "repeat", "full", "zeros", "ones", "empty",
    "new_zeros", "new_ones", "new_full", "new_empty", "arange", "constant_pad_nd",
}  # fmt: skip
"""Operations that are told sizes: where these count rows, they count as many as there are now."""


_PROJECTIONS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class Evaluation:
    """Values of the nodes that do not depend on the state, for given tensors and rows of x."""

    def __init__(self, module: fx.GraphModule, rows: int, tensors: dict[str, Tensor], x: Tensor | None = None) -> None:
        """`rows`: how many the step was traced with. `tensors`: what the module's attributes are now."""
        self.module, self.traced_rows, self.tensors, self.x = module, rows, tensors, x
        self._held: dict[fx.Node, Any] = {}

    def __call__(self, node: fx.Node) -> Any:
        """A node's value. Without x: for one row."""
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
        if hasattr(node.target, "_schema") and node.target._schema.name.split("::")[-1] in _SIZED:
            args, kwargs = self._resized((args, kwargs), rows)
        try:
            if self.x is not None and node.target in _PROJECTIONS and not kwargs:
                *bias, value, weight = args
                if not bias or bias[0].dim() == 1:  # with gradients that are quick for many rows
                    return project(value, weight.t(), bias[0] if bias else None)
            return node.target(*args, **kwargs)
        except RuntimeError as error:
            raise NotFused(f"{name_of(node)} of what does not depend on the state, for {rows} rows: {error}") from error

    def _resized(self, arg: Any, rows: int) -> Any:
        if isinstance(arg, dict):
            return {key: self._resized(value, rows) for key, value in arg.items()}
        if isinstance(arg, (list, tuple)):
            return type(arg)(self._resized(item, rows) for item in arg)
        whole = isinstance(arg, int) and not isinstance(arg, bool) and arg > 0 and arg % self.traced_rows == 0
        return arg // self.traced_rows * rows if whole else arg


def gather_constants(lanes: Tensor, of: Lanes, evaluate: Evaluation, like: Tensor) -> Tensor:
    """The values of constants' lanes, in the lanes' shape; 0 for a lane that is not there."""
    flat = lanes.flatten()
    known = flat[flat != ZERO]
    sources = [of.sources[i] for i in torch.unique(of.source_numbers(known)).tolist()]
    if len(sources) == 1 and len(known) == len(flat) and sources[0].kind == "const":
        return _strided(evaluate(sources[0].detail).to(like), lanes - sources[0].base)
    table, at = [like.new_zeros(1)], torch.zeros_like(flat)
    size = 1
    for source in sources:
        inside = (flat >= source.base) & (flat < source.base + source.width)
        at = torch.where(inside, flat - source.base + size, at)
        number = source.kind == "number"
        value = like.new_tensor([source.detail]) if number else evaluate(source.detail).to(like).flatten()
        table.append(value)
        size += source.width
    return torch.cat(table)[at.to(like.device)].view(lanes.shape)


def _strided(value: Tensor, at: Tensor) -> Tensor:
    """Elements `at` of a flat tensor; a view where they lie in a regular pattern, as they do after a transposition."""
    first = int(at.flatten()[0])
    strides = [int(at.select(dim, 1).flatten()[0]) - first if size > 1 else 0 for dim, size in enumerate(at.shape)]
    pattern = torch.tensor(first)
    for dim, (size, stride) in enumerate(zip(at.shape, strides, strict=True)):
        pattern = pattern + (torch.arange(size) * stride).view([-1 if d == dim else 1 for d in range(at.dim())])
    flat = value.flatten()
    if all(stride >= 0 for stride in strides) and torch.equal(pattern.expand(at.shape), at):
        return flat.as_strided(at.shape, strides, first + flat.storage_offset())
    return flat[at.to(flat.device)]


def gather_inputs(lanes: Tensor, of: Lanes, evaluate: Evaluation) -> Tensor:
    """The values of lanes that depend on x alone, all of one source: `(rows, width)`."""
    source = of.source_of(int(lanes[0]) % ROW)
    node, row_dim = source.detail
    value: Tensor = evaluate(node).movedim(row_dim, 0)
    flat = value.reshape(value.shape[0], -1)
    at = lanes - source.base
    first, last = int(at[0]), int(at[-1])
    if last - first + 1 == len(at) and torch.equal(at, torch.arange(first, last + 1)):
        return flat[:, first : last + 1]
    return flat[:, at.to(flat.device)]
