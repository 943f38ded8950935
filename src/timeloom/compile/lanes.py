"""From operations on tensors to operations on lanes: which unit of which value every element of every tensor is.

Each element of a tensor that depends on the state belongs to a row and is a *lane*, one scalar of the step's
computation. Splitting, joining, reshaping and permuting only move lanes, so torch itself moves them: the operation runs
on a tensor that holds, instead of values, `row * ROW + lane`. What remains are pointwise functions, products with
constant matrices, and sums over units.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from timeloom.compile import rules_pointwise, rules_products, rules_sums
from timeloom.compile.refusal import ROWS_MIX, NotFused
from timeloom.compile.sources import ROW, Source
from timeloom.compile.trace import name_of
from timeloom.torch_state.precision import HALF

aten = torch.ops.aten

_MOVES = {
    "view", "_unsafe_view", "reshape", "_reshape_alias", "expand", "permute", "transpose", "t", "unsqueeze", "squeeze",
    "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "cat", "stack", "clone", "alias", "flip", "roll",
    "narrow", "index", "index_select", "select_scatter", "slice_scatter", "repeat", "unflatten", "flatten", "movedim",
    "constant_pad_nd", "diagonal", "copy", "contiguous", "_to_copy", "lift_fresh_copy", "unsafe_split",
    "unsafe_split_with_sizes",
}  # fmt: skip
_INDEXED = {"index", "index_select"}
_WHAT = {"state": "the state", "x": "x"}
_FREE_MOVES = {
    "view", "_unsafe_view", "expand", "permute", "transpose", "t", "unsqueeze", "squeeze", "slice", "select", "split",
    "split_with_sizes", "unbind", "unsafe_split", "unsafe_split_with_sizes",
}  # fmt: skip
"""Moves that are also followed where nothing depends on the state, so that torch need not copy."""
_UNARY = {
    "neg", "abs", "sign", "floor", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "reciprocal", "sigmoid", "tanh",
    "sin", "cos", "atan", "erf",
}  # fmt: skip
_BINARY = {
    "mul": "mul", "maximum": "max", "minimum": "min", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "eq": "eq",
    "ne": "ne",
}  # fmt: skip

_FOLDED = {"add", "sub", "native_layer_norm", "_fused_rms_norm", *_UNARY, *_BINARY, *_FREE_MOVES}
"""Operations that are followed behind a product with x that kernels compute."""

_RULES = {**rules_pointwise.RULES, **rules_sums.RULES, **rules_products.RULES}


_NARROW = {torch.uint8, torch.int8, torch.int16}
"""Whole numbers of so few bits that they wrap around."""
MOST_FOLDED = 256
"""Largest width of x whose products kernels compute."""


def is_small(width: int, outputs: int) -> bool:
    """Whether a product with x of this width is better computed by the kernels."""
    return width <= min(MOST_FOLDED, 2 * outputs)


def _forgotten(node: fx.Node) -> Tensor:
    raise RuntimeError(f"the value of {node} has been let go")


def _keeps_value(before: torch.dtype, after: torch.dtype, wide: bool) -> bool:
    if before in (after, torch.bool):
        return True
    return wide and {before, after} <= {torch.float32, *HALF}


def _refuse_whole(node: Any, name: str) -> None:
    """Say no to what whole numbers do and numbers of a kernel do not."""
    made = node.meta.get("val")
    if not isinstance(made, Tensor) or name in _MOVES:
        return
    if name.startswith("bitwise") and made.dtype != torch.bool:
        raise NotFused(f"{name_of(node)} of whole numbers")
    if made.dtype in _NARROW:
        raise NotFused(f"{name_of(node)} of {made.dtype}, which wraps around: convert it to a floating-point number")


def _name(node: Any) -> str:
    """An operation's name, without its overload."""
    return node.target._schema.name.split("::")[-1] if hasattr(node.target, "_schema") else str(node.target)


@dataclass
class Lanes:
    """All lanes of one step, and the lanes of every node of its trace."""

    module: fx.GraphModule
    parts: int
    rows: int
    constant: Callable[[fx.Node], Tensor]
    """The value of a node that depends on parameters alone, for one row."""
    wide: bool = False
    """Whether half precision is computed in float32, so that casts between the two keep values as they are."""
    folds: bool = False
    """Whether kernels also compute small products with what depends on x alone: neither these nor their gradients are
    then ever stored for all steps."""
    sources: list[Source] = field(default_factory=list)
    depends: dict[fx.Node, str] = field(default_factory=dict)
    held: dict[fx.Node, Any] = field(default_factory=dict)
    indices: list[fx.Node] = field(default_factory=list)
    """Constants whose values determine where lanes are moved."""

    def __post_init__(self) -> None:
        self._bases: list[int] = []
        self._numbers: dict[float, int] = {}
        self._leaves: dict[fx.Node, Tensor] = {}
        self._folded: dict[fx.Node, bool] = {}

    def walk(self) -> list[Tensor]:
        """Follow the trace; returns the lanes of the next state's parts, `(width,)` each."""
        placeholder = 0
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                self.depends[node] = "state" if placeholder < self.parts else "x"
                if placeholder < self.parts:
                    self.held[node] = self.fresh_rows(node.meta["val"].shape, 0, "state", placeholder)
                placeholder += 1
            elif node.op == "get_attr":
                self.depends[node] = "const"
            elif node.op == "output":
                return [self._part(part) for part in node.args[0]]
            else:
                given = {self.depends[arg] for arg in node.all_input_nodes}
                self.depends[node] = next((kind for kind in ("state", "x") if kind in given), "const")
                if self.depends[node] == "state":
                    self.held[node] = self._follow(node)
        raise AssertionError("a trace ends with its output")

    def forget(self) -> None:
        """Keep the sources of lanes, and release all values."""
        self.constant = _forgotten
        self.held.clear()
        self._leaves.clear()

    def source_of(self, lane: int) -> Source:
        return self.sources[bisect_right(self._bases, lane) - 1]

    def source_numbers(self, lanes: Tensor) -> Tensor:
        """The index of each lane's source."""
        return torch.searchsorted(torch.tensor(self._bases), lanes, right=True) - 1

    def number(self, value: float) -> int:
        """The lane of a constant in the step's code."""
        if value not in self._numbers:
            self._numbers[value] = self.make(1, "number", value)
        return self._numbers[value]

    # ---- leaves ------------------------------------------------------------------------------------------------------

    def make(self, width: int, kind: str, detail: Any = None, operands: tuple[Tensor, ...] = ()) -> int:
        base = self._bases[-1] + self.sources[-1].width if self.sources else 0
        self._bases.append(base)
        self.sources.append(Source(base, width, kind, detail, operands))
        return base

    def fresh_rows(self, shape: torch.Size, row_dim: int, kind: str, detail: Any, operands: Any = ()) -> Tensor:
        """New lanes for a tensor of rows, numbered over all dimensions but that of the rows."""
        others = [size for dim, size in enumerate(shape) if dim != row_dim]
        width = int(torch.Size(others).numel())
        lanes = (self.make(width, kind, detail, operands) + torch.arange(width)).view(others).unsqueeze(row_dim)
        rows = torch.arange(1, self.rows + 1).view([-1 if dim == row_dim else 1 for dim in range(len(shape))])
        return lanes + rows * ROW

    def of(self, arg: Any) -> Tensor:
        """Lanes of an argument: a node, or a Python number."""
        if isinstance(arg, (int, float)):
            return torch.tensor(self.number(float(arg)))
        if not isinstance(arg, fx.Node):
            raise NotFused(f"an argument {arg!r}, where a tensor or a number is expected")
        if arg in self.held:
            held: Tensor = self.held[arg]
            return held
        if arg not in self._leaves:
            self._leaves[arg] = self._leaf(arg)
        return self._leaves[arg]

    def is_constant(self, arg: Any) -> bool:
        """Whether an argument is computed from parameters alone."""
        return isinstance(arg, fx.Node) and arg.op == "call_function" and self.depends[arg] == "const"

    def _leaf(self, node: Any) -> Any:
        """Lanes of a node that does not depend on the state; if it only moves lanes, those that it moves."""
        if node.target is operator.getitem and _name(node.args[0]) in _FREE_MOVES:
            return self.of(node.args[0])[node.args[1]]
        name = _name(node)
        if name in _FREE_MOVES and (self.depends[node] == "const" or self._is_by_rows(node)):
            return self._move(node, name)
        if self.depends[node] == "const":
            return self._constant(node)
        return self._follow(node) if self._is_folded(node) else self._hoisted(node)

    def _is_folded(self, node: Any) -> bool:
        """Whether a node is a small product of x with constants, or computed from such by operations of kernels."""
        if not self.folds or self.depends[node] != "x" or node.op != "call_function":
            return False
        if node not in self._folded:
            self._folded[node] = self._can_fold(node, _name(node))
        return self._folded[node]

    def _can_fold(self, node: Any, name: str) -> bool:
        given = [arg for arg in node.all_input_nodes if self.depends[arg] == "x"]
        if name not in ("mm", "addmm"):
            followed = node.target is operator.getitem or name in _FOLDED
            return followed and all(self._is_folded(arg) for arg in given)
        *added, value, _ = node.args
        if given != [value] or self._is_folded(value) or node.kwargs or len(added) > 1:
            return False
        rows, width = value.meta["val"].shape
        return rows == self.rows and width != rows and is_small(width, node.meta["val"].shape[1])

    def _is_by_rows(self, node: Any) -> bool:
        """Whether the shape of a move's argument shows which dimension counts rows, so that it can get lanes."""
        given = node.args[0].meta.get("val")
        return isinstance(given, Tensor) and list(given.shape).count(self.rows) == 1

    def _constant(self, node: fx.Node) -> Tensor:
        value = self.constant(node)
        shape = node.meta["val"].shape if "val" in node.meta else value.shape
        lanes = (self.make(value.numel(), "const", node) + torch.arange(value.numel())).view(value.shape)
        try:
            return lanes.expand(shape)  # computed for one row, it serves all
        except RuntimeError:
            raise NotFused(f"a constant of shape {tuple(shape)} that depends on the number of rows") from None

    def _hoisted(self, node: fx.Node) -> Tensor:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            raise NotFused(f"{name_of(node)} gives no tensor")
        where = [dim for dim, size in enumerate(value.shape) if size == self.rows]
        if len(where) != 1:
            raise NotFused(
                f"{name_of(node)} of x, whose result of shape {tuple(value.shape)} has not one row for each row"
            )
        return self.fresh_rows(value.shape, where[0], "x", (node, where[0]))

    def _part(self, node: Any) -> Tensor:
        """Lanes of a part of the next state."""
        ids = self.of(node)
        shape = node.meta["val"].shape
        ids = ids.expand(shape).reshape(shape[0], -1)
        lanes = ids % ROW
        rows = ids // ROW
        expected = torch.arange(1, self.rows + 1)[:, None]
        if bool(((rows != expected) & (rows != 0)).any()) or bool((lanes != lanes[:1]).any()):
            raise NotFused(f"{ROWS_MIX}: a row of the next state is made of other rows")
        return lanes[0]

    # ---- operations --------------------------------------------------------------------------------------------------

    def _follow(self, node: Any) -> Any:
        if node.target is operator.getitem:
            return self.of(node.args[0])[node.args[1]]
        name = _name(node)
        if name == "_to_copy" and not _keeps_value(node.args[0].meta["val"].dtype, node.meta["val"].dtype, self.wide):
            raise NotFused(f"a change of dtype to {node.meta['val'].dtype}")
        if name == "detach":
            raise NotFused("torch.detach of the state: its gradient is not that of the step")
        _refuse_whole(node, name)
        if name in _MOVES:
            return self._move(node, name)
        if name in _UNARY:
            return self.pointwise(name, self.of(node.args[0]))
        if name in _BINARY:
            return self.pointwise(_BINARY[name], *map(self.of, node.args[:2]))
        rule = _RULES.get(name)
        if rule is None:
            raise NotFused(f"{name_of(node)} of the state has no place in a kernel")
        return rule(self, node, *node.args, **node.kwargs)

    def _move(self, node: Any, name: str) -> Any:
        if name in ("contiguous", "_to_copy", "lift_fresh_copy", "clone", "alias"):
            return self.of(node.args[0])
        if name in ("view", "_unsafe_view", "_reshape_alias"):  # lanes need not have the memory layout of values
            return self.of(node.args[0]).reshape(node.args[1])
        if name == "copy":
            return self.of(node.args[1]).expand(node.meta["val"].shape)
        if name == "constant_pad_nd":
            fill = self.number(float(node.args[2]) if len(node.args) > 2 else 0.0)
            return torch.constant_pad_nd(self.of(node.args[0]), node.args[1], fill)

        def of(arg: Any) -> Any:
            if isinstance(arg, (list, tuple)):
                return type(arg)(of(item) for item in arg)
            if not isinstance(arg, fx.Node):
                return arg
            if name not in _INDEXED or arg is node.args[0]:
                return self.of(arg)
            if self.depends[arg] != "const":
                raise NotFused(f"{name_of(node)} by indices that depend on {_WHAT[self.depends[arg]]}")
            self.indices.append(arg)
            return self.constant(arg).cpu()

        args, kwargs = of(tuple(node.args)), {key: of(value) for key, value in node.kwargs.items()}
        found = node.target(*args, **kwargs)
        if name in _INDEXED and found.shape != node.meta["val"].shape:  # constants are those of one row
            raise NotFused(f"{name_of(node)} by indices that depend on the number of rows")
        return found

    def pointwise(self, op: str, *operands: Tensor) -> Tensor:
        """New lanes: a pointwise function of these, broadcast."""
        together = torch.broadcast_tensors(*operands)
        rows = torch.stack([ids // ROW for ids in together]).amax(0)
        if any(bool(((ids // ROW != rows) & (ids // ROW != 0)).any()) for ids in together):
            raise NotFused(f"{ROWS_MIX}: a value of one row meets one of another")
        dim = self.row_dim(rows)
        lanes = [ids % ROW for ids in together]
        if any(bool((ids != ids.narrow(dim, 0, 1)).any()) for ids in lanes):
            raise NotFused("a constant that differs from row to row")
        return self.fresh_rows(rows.shape, dim, op, None, tuple(ids.select(dim, 0).flatten() for ids in lanes))

    def row_dim(self, rows: Tensor) -> int:
        for dim, size in enumerate(rows.shape):
            if size == self.rows:
                expected = torch.arange(1, size + 1).view([-1 if d == dim else 1 for d in range(rows.dim())])
                if bool((rows == expected).all()):
                    return dim
        raise NotFused(f"{ROWS_MIX}: a value is made of several rows, or of rows in another order")

    def scaled(self, ids: Tensor, factor: float) -> Tensor:
        """New lanes: these times a number."""
        return self.pointwise("mul", ids, torch.tensor(self.number(float(factor))))
