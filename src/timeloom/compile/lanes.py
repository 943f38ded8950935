"""From operations on tensors to operations on lanes: which unit of which value every element of every tensor is.

Each element of a tensor that depends on the state is a row and a *lane*, one number of the step's working. Splitting,
joining, reshaping and permuting only move lanes about, so torch itself moves them: the operation runs on a tensor that
holds, instead of values, `row * ROW + lane`. Whatever remains are pointwise functions, products with constant matrices,
and sums over units.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from timeloom.compile.refusal import NotFused
from timeloom.compile.trace import name_of
from timeloom.torch_state.precision import HALF

aten = torch.ops.aten
ROW = 1 << 40
"""Lanes of row r are marked r + 1 times this; those of constants, which belong to no row, are not."""
ZERO = -1
"""The lane of a weight that is not there."""

_MOVES = {
    "view", "_unsafe_view", "reshape", "_reshape_alias", "expand", "permute", "transpose", "t", "unsqueeze", "squeeze",
    "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "cat", "stack", "clone", "alias", "flip", "roll",
    "narrow", "index_select", "select_scatter", "slice_scatter", "repeat", "unflatten", "flatten", "movedim",
    "constant_pad_nd", "diagonal", "copy", "contiguous", "_to_copy", "lift_fresh_copy",
}  # fmt: skip
_FREE_MOVES = {
    "view", "_unsafe_view", "expand", "permute", "transpose", "t", "unsqueeze", "squeeze", "slice", "select", "split",
    "split_with_sizes", "unbind",
}  # fmt: skip
"""Those that are followed where nothing depends on the state, too: torch need not copy, then."""
_UNARY = {
    "neg", "abs", "sign", "floor", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "reciprocal", "sigmoid", "tanh",
    "sin", "cos", "atan", "erf",
}  # fmt: skip
_BINARY = {
    "mul": "mul", "maximum": "max", "minimum": "min", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "eq": "eq",
    "ne": "ne",
}  # fmt: skip


def _forgotten(node: fx.Node) -> Tensor:
    raise RuntimeError(f"the value of {node} has been let go")


def _schema_name(node: Any) -> str:
    """What torch calls an operation; nothing of what is none of its."""
    return str(node.target._schema.name).split("::")[-1] if hasattr(node.target, "_schema") else ""


def _keeps_value(before: torch.dtype, after: torch.dtype, wide: bool) -> bool:
    if before in (after, torch.bool):
        return True
    return wide and {before, after} <= {torch.float32, *HALF}


@dataclass(frozen=True)
class Source:
    """`width` lanes from `base` on, made together."""

    base: int
    width: int
    kind: str
    """state, const, x, number, a pointwise function, product or total."""
    detail: Any = None
    """The part, the node, the number; of a product its weights' lanes, `(blocks, out, in)`."""
    operands: tuple[Tensor, ...] = ()
    """Lanes that each lane is a function of, `(width,)` each; of a product `(blocks, in)`; of a total `(width, in)`."""


@dataclass
class Lanes:
    """All lanes of one step, and what every node of its trace is made of."""

    module: fx.GraphModule
    parts: int
    rows: int
    constant: Callable[[fx.Node], Tensor]
    """The value of a node that depends on parameters alone, for one row."""
    wide: bool = False
    """Whether half precision is computed in float32, so that what goes from one to the other stays what it is."""
    sources: list[Source] = field(default_factory=list)
    depends: dict[fx.Node, str] = field(default_factory=dict)
    held: dict[fx.Node, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._bases: list[int] = []
        self._numbers: dict[float, int] = {}
        self._leaves: dict[fx.Node, Tensor] = {}

    def walk(self) -> list[Tensor]:
        """Follow the trace; returns the lanes of the next state's parts, `(width,)` each."""
        placeholder = 0
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                self.depends[node] = "state" if placeholder < self.parts else "x"
                if placeholder < self.parts:
                    self.held[node] = self._fresh_rows(node.meta["val"].shape, 0, "state", placeholder)
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
        """Keep what tells where lanes come from, and let go of all values."""
        self.constant = _forgotten
        self.held.clear()
        self._leaves.clear()

    def source_of(self, lane: int) -> Source:
        return self.sources[bisect_right(self._bases, lane) - 1]

    def source_numbers(self, lanes: Tensor) -> Tensor:
        """Which source each lane is of."""
        return torch.searchsorted(torch.tensor(self._bases), lanes, right=True) - 1

    def number(self, value: float) -> int:
        """The lane of a constant of the step's code."""
        if value not in self._numbers:
            self._numbers[value] = self._make(1, "number", value)
        return self._numbers[value]

    # ---- leaves ------------------------------------------------------------------------------------------------------

    def _make(self, width: int, kind: str, detail: Any = None, operands: tuple[Tensor, ...] = ()) -> int:
        base = self._bases[-1] + self.sources[-1].width if self.sources else 0
        self._bases.append(base)
        self.sources.append(Source(base, width, kind, detail, operands))
        return base

    def _fresh_rows(self, shape: torch.Size, row_dim: int, kind: str, detail: Any, operands: Any = ()) -> Tensor:
        """New lanes for a tensor of rows: counted over all dimensions but that of the rows."""
        others = [size for dim, size in enumerate(shape) if dim != row_dim]
        width = int(torch.Size(others).numel())
        lanes = (self._make(width, kind, detail, operands) + torch.arange(width)).view(others).unsqueeze(row_dim)
        rows = torch.arange(1, self.rows + 1).view([-1 if dim == row_dim else 1 for dim in range(len(shape))])
        return lanes + rows * ROW

    def _lanes(self, arg: Any) -> Tensor:
        """Lanes of an argument: a node, or a number of Python's."""
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

    def _leaf(self, node: Any) -> Any:
        """Lanes of what does not depend on the state; of what only moves lanes about, those that it moves."""
        name = _schema_name(node.args[0] if node.target is operator.getitem else node)
        if node.target is operator.getitem and name in _FREE_MOVES:
            return self._lanes(node.args[0])[node.args[1]]
        if (
            node.target is not operator.getitem
            and name in _FREE_MOVES
            and (self.depends[node] == "const" or self._is_by_rows(node))
        ):
            return self._move(node, name)
        return self._constant(node) if self.depends[node] == "const" else self._hoisted(node)

    def _is_by_rows(self, node: Any) -> bool:
        """Whether the rows of what a move is given can be told from its shape, and lanes be given to it."""
        given = node.args[0].meta.get("val")
        return isinstance(given, Tensor) and list(given.shape).count(self.rows) == 1

    def _constant(self, node: fx.Node) -> Tensor:
        value = self.constant(node)
        shape = node.meta["val"].shape if "val" in node.meta else value.shape
        lanes = (self._make(value.numel(), "const", node) + torch.arange(value.numel())).view(value.shape)
        try:
            return lanes.expand(shape)  # a constant made for all rows is one for each
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
        return self._fresh_rows(value.shape, where[0], "x", (node, where[0]))

    def _part(self, node: Any) -> Tensor:
        """Lanes of a part of the next state."""
        ids = self._lanes(node)
        shape = node.meta["val"].shape
        ids = ids.expand(shape).reshape(shape[0], -1)
        lanes = ids % ROW
        rows = ids // ROW
        expected = torch.arange(1, self.rows + 1)[:, None]
        if bool(((rows != expected) & (rows != 0)).any()) or bool((lanes != lanes[:1]).any()):
            raise NotFused("rows that mix: a row of the next state is made of other rows")
        return lanes[0]

    # ---- operations --------------------------------------------------------------------------------------------------

    def _follow(self, node: Any) -> Any:
        if node.target is operator.getitem:
            return self.held[node.args[0]][node.args[1]]
        name = node.target._schema.name.split("::")[-1] if hasattr(node.target, "_schema") else str(node.target)
        if name == "_to_copy" and not _keeps_value(node.args[0].meta["val"].dtype, node.meta["val"].dtype, self.wide):
            raise NotFused(f"a change of dtype to {node.meta['val'].dtype}")
        if name == "detach":
            raise NotFused("torch.detach of the state: its gradient is not that of the step")
        if name in _MOVES:
            return self._move(node, name)
        if name in _UNARY:
            return self.pointwise(name, self._lanes(node.args[0]))
        if name in _BINARY:
            return self.pointwise(_BINARY[name], *map(self._lanes, node.args[:2]))
        rule = getattr(self, f"_op_{name}", None)
        if rule is None:
            raise NotFused(f"{name_of(node)} of the state has no place in a kernel")
        return rule(node, *node.args, **node.kwargs)

    def _move(self, node: Any, name: str) -> Any:
        if name in ("contiguous", "_to_copy", "lift_fresh_copy", "clone", "alias"):
            return self._lanes(node.args[0])
        if name in ("view", "_unsafe_view", "_reshape_alias"):  # lanes need not lie in memory as values do
            return self._lanes(node.args[0]).reshape(node.args[1])
        if name == "copy":
            return self._lanes(node.args[1]).expand(node.meta["val"].shape)
        if name == "constant_pad_nd":
            fill = self.number(float(node.args[2]) if len(node.args) > 2 else 0.0)
            return torch.constant_pad_nd(self._lanes(node.args[0]), node.args[1], fill)

        def of(arg: Any) -> Any:
            if isinstance(arg, (list, tuple)):
                return type(arg)(of(item) for item in arg)
            if not isinstance(arg, fx.Node):
                return arg
            if not isinstance(arg.meta["val"], Tensor) or arg.meta["val"].is_floating_point() or arg in self.held:
                return self._lanes(arg)
            if self.depends[arg] != "const":
                raise NotFused(f"{name_of(node)} by indices that depend on x")
            return self.constant(arg).cpu()

        args, kwargs = of(tuple(node.args)), {key: of(value) for key, value in node.kwargs.items()}
        return node.target(*args, **kwargs)

    def pointwise(self, op: str, *operands: Tensor) -> Tensor:
        """New lanes that are a function of these, broadcast."""
        together = torch.broadcast_tensors(*operands)
        rows = torch.stack([ids // ROW for ids in together]).amax(0)
        if any(bool(((ids // ROW != rows) & (ids // ROW != 0)).any()) for ids in together):
            raise NotFused("rows that mix: a value of one row meets one of another")
        dim = self._row_dim(rows)
        lanes = [ids % ROW for ids in together]
        if any(bool((ids != ids.narrow(dim, 0, 1)).any()) for ids in lanes):
            raise NotFused("a constant that differs from row to row")
        return self._fresh_rows(rows.shape, dim, op, None, tuple(ids.select(dim, 0).flatten() for ids in lanes))

    def _row_dim(self, rows: Tensor) -> int:
        for dim, size in enumerate(rows.shape):
            if size == self.rows:
                expected = torch.arange(1, size + 1).view([-1 if d == dim else 1 for d in range(rows.dim())])
                if bool((rows == expected).all()):
                    return dim
        raise NotFused("rows that mix: a value is made of several rows, or of rows in another order")

    def _op_add(self, node: fx.Node, a: Any, b: Any, alpha: float = 1) -> Tensor:
        right = self._lanes(b)
        return self.pointwise("add", self._lanes(a), right if alpha == 1 else self._scaled(right, alpha))

    def _op_sub(self, node: fx.Node, a: Any, b: Any, alpha: float = 1) -> Tensor:
        right = self._lanes(b)
        return self.pointwise("sub", self._lanes(a), right if alpha == 1 else self._scaled(right, alpha))

    def _scaled(self, lanes: Tensor, factor: float) -> Tensor:
        return self.pointwise("mul", lanes, torch.tensor(self.number(float(factor))))

    def _op_rsub(self, node: fx.Node, a: Any, b: Any, alpha: float = 1) -> Tensor:
        return self._op_sub(node, b, a, alpha)

    def _op_div(self, node: fx.Node, a: Any, b: Any, rounding_mode: str | None = None) -> Tensor:
        found = self.pointwise("div", self._lanes(a), self._lanes(b))
        if rounding_mode == "trunc":
            raise NotFused("a division that truncates")
        return found if rounding_mode is None else self.pointwise("floor", found)

    def _op_square(self, node: fx.Node, a: Any) -> Tensor:
        return self.pointwise("mul", self._lanes(a), self._lanes(a))

    def _op_relu(self, node: fx.Node, a: Any) -> Tensor:
        return self._clamped(self._lanes(a), 0.0, None, "le")

    def _op_clamp(self, node: fx.Node, a: Any, min: Any = None, max: Any = None) -> Tensor:
        if isinstance(min, fx.Node) or isinstance(max, fx.Node):
            raise NotFused("torch.clamp by tensors: write torch.maximum and torch.minimum")
        return self._clamped(self._lanes(a), min, max, "lt")

    def _op_clamp_min(self, node: fx.Node, a: Any, min: Any) -> Tensor:
        return self._op_clamp(node, a, min)

    def _op_clamp_max(self, node: fx.Node, a: Any, max: Any) -> Tensor:
        return self._op_clamp(node, a, None, max)

    def _op_hardtanh(self, node: fx.Node, a: Any, min: float = -1, max: float = 1) -> Tensor:
        return self._clamped(self._lanes(a), min, max, "le")

    def _clamped(self, value: Tensor, low: float | None, high: float | None, below: str) -> Tensor:
        """With torch's slopes at the edges: those of clamp are 1, those of relu and hardtanh are 0."""
        if high is not None:
            edge = torch.tensor(self.number(float(high)))
            value = self.pointwise("select", self.pointwise("gt" if below == "lt" else "ge", value, edge), edge, value)
        if low is not None:
            edge = torch.tensor(self.number(float(low)))
            value = self.pointwise("select", self.pointwise(below, value, edge), edge, value)
        return value

    def _op_where(self, node: fx.Node, condition: Any, a: Any, b: Any) -> Tensor:
        return self.pointwise("select", *map(self._lanes, (condition, a, b)))

    def _op_logical_not(self, node: fx.Node, a: Any) -> Tensor:
        return self.pointwise("eq", self._lanes(a), torch.tensor(self.number(0.0)))

    def _op_bitwise_not(self, node: fx.Node, a: Any) -> Tensor:
        return self._op_logical_not(node, a)

    def _truth(self, a: Any) -> Tensor:
        return self.pointwise("ne", self._lanes(a), torch.tensor(self.number(0.0)))

    def _op_logical_and(self, node: fx.Node, a: Any, b: Any) -> Tensor:
        return self.pointwise("mul", self._truth(a), self._truth(b))

    def _op_logical_or(self, node: fx.Node, a: Any, b: Any) -> Tensor:
        return self.pointwise("max", self._truth(a), self._truth(b))

    _op_bitwise_and, _op_bitwise_or = _op_logical_and, _op_logical_or

    def _op_lerp(self, node: fx.Node, a: Any, b: Any, weight: Any) -> Tensor:
        start = self._lanes(a)
        step = self.pointwise("mul", self._lanes(weight), self.pointwise("sub", self._lanes(b), start))
        return self.pointwise("add", start, step)

    def _op_pow(self, node: fx.Node, a: Any, b: Any) -> Tensor:
        if not isinstance(b, (int, float)):
            raise NotFused("torch.pow by an exponent that is not a number of Python's: write exp(b * log(a))")
        value = self._lanes(a)
        if b in (2, 3):
            square = self.pointwise("mul", value, value)
            return square if b == 2 else self.pointwise("mul", square, value)
        named = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}.get(b)
        return self.pointwise(named, value) if named else self.pointwise("pow", value, self._lanes(float(b)))

    def _op_softplus(self, node: fx.Node, a: Any, beta: float = 1, threshold: float = 20) -> Tensor:
        value = self._lanes(a)
        if beta == 1:
            return self.pointwise("softplus", value)
        return self._scaled(self.pointwise("softplus", self._scaled(value, beta)), 1 / beta)

    def _op_log_sigmoid_forward(self, node: fx.Node, a: Any) -> tuple[Tensor, Tensor]:
        found = self.pointwise("neg", self.pointwise("softplus", self.pointwise("neg", self._lanes(a))))
        return found, found

    def _op_mish(self, node: fx.Node, a: Any) -> Tensor:
        value = self._lanes(a)
        return self.pointwise("mul", value, self.pointwise("tanh", self.pointwise("softplus", value)))

    def _op_logaddexp(self, node: fx.Node, a: Any, b: Any) -> Tensor:
        left, right = self._lanes(a), self._lanes(b)
        apart = self.pointwise("neg", self.pointwise("abs", self.pointwise("sub", left, right)))
        small = self.pointwise("log1p", self.pointwise("exp", apart))
        return self.pointwise("add", self.pointwise("max", left, right), small)

    def _op_elu(self, node: fx.Node, a: Any, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
        value, zero = self._lanes(a), torch.tensor(self.number(0.0))
        above = self.pointwise("gt", value, zero)
        below = self.pointwise("select", above, zero, value)  # what the exponential never sees cannot overflow
        curved = self._scaled(self.pointwise("expm1", self._scaled(below, input_scale)), alpha * scale)
        return self.pointwise("select", above, self._scaled(value, scale), curved)

    def _op__prelu_kernel(self, node: fx.Node, a: Any, weight: Any) -> Tensor:
        value = self._lanes(a)
        below = self.pointwise("mul", value, self._lanes(weight))
        return self.pointwise("select", self.pointwise("gt", value, torch.tensor(self.number(0.0))), value, below)

    def _op_full_like(self, node: fx.Node, a: Any, fill: float, **_: Any) -> Tensor:
        return torch.tensor(self.number(float(fill))).expand(node.meta["val"].shape)

    def _op_zeros_like(self, node: fx.Node, a: Any, **_: Any) -> Tensor:
        return torch.tensor(self.number(0.0)).expand(node.meta["val"].shape)

    def _op_ones_like(self, node: fx.Node, a: Any, **_: Any) -> Tensor:
        return torch.tensor(self.number(1.0)).expand(node.meta["val"].shape)

    def _op_new_zeros(self, node: fx.Node, a: Any, size: Any, **_: Any) -> Tensor:
        return torch.tensor(self.number(0.0)).expand(node.meta["val"].shape)

    def _op_new_ones(self, node: fx.Node, a: Any, size: Any, **_: Any) -> Tensor:
        return torch.tensor(self.number(1.0)).expand(node.meta["val"].shape)

    def _op_new_full(self, node: fx.Node, a: Any, size: Any, fill: float, **_: Any) -> Tensor:
        return torch.tensor(self.number(float(fill))).expand(node.meta["val"].shape)

    # ---- sums over units ---------------------------------------------------------------------------------------------

    def total(self, value: Tensor, dims: Any, keepdim: bool) -> tuple[Tensor, int]:
        """Sums over these dimensions, and of how many terms each is."""
        dims = range(value.dim()) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
        summed = sorted(dim % value.dim() for dim in dims)
        row = self._row_dim(value // ROW)
        if row in summed:
            raise NotFused("rows that mix: a reduction over dimension 0, that of the rows")
        kept = [dim for dim in range(value.dim()) if dim not in summed]
        moved = value.permute(*kept, *summed)
        terms = moved.flatten(len(kept))
        at = kept.index(row)
        operand = terms.select(at, 0).reshape(-1, terms.shape[-1]) % ROW
        ids = self._fresh_rows(terms.shape[:-1], at, "total", None, (operand,))
        if keepdim:
            for dim in summed:
                ids = ids.unsqueeze(dim)
        return ids, terms.shape[-1]

    def _op_sum(self, node: fx.Node, a: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
        return self.total(self._lanes(a), dim, keepdim)[0]

    def _op_mean(self, node: fx.Node, a: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
        total, terms = self.total(self._lanes(a), dim, keepdim)
        return self._scaled(total, 1 / terms)

    def _variance(self, a: Any, dim: Any, correction: Any, keepdim: bool) -> tuple[Tensor, Tensor]:
        value = self._lanes(a)
        total, terms = self.total(value, dim, True)
        mean = self._scaled(total, 1 / terms)
        apart = self.pointwise("sub", value, mean)
        squares, _ = self.total(self.pointwise("mul", apart, apart), dim, keepdim)
        correction = 1 if correction is None else correction
        return self._scaled(squares, 1 / max(terms - correction, 0) if terms > correction else float("nan")), (
            mean if keepdim else self._scaled(self.total(value, dim, False)[0], 1 / terms)
        )

    def _op_var_mean(
        self, node: fx.Node, a: Any, dim: Any = None, correction: Any = None, keepdim: bool = False
    ) -> Any:
        return self._variance(a, dim, correction, keepdim)

    def _op_var(self, node: fx.Node, a: Any, dim: Any = None, correction: Any = None, keepdim: bool = False) -> Tensor:
        return self._variance(a, dim, correction, keepdim)[0]

    def _op_std(self, node: fx.Node, a: Any, dim: Any = None, correction: Any = None, keepdim: bool = False) -> Tensor:
        return self.pointwise("sqrt", self._variance(a, dim, correction, keepdim)[0])

    def _op_native_layer_norm(self, node: fx.Node, a: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
        value = self._lanes(a)
        dims = list(range(value.dim() - len(shape), value.dim()))
        total, terms = self.total(value, dims, True)
        mean = self._scaled(total, 1 / terms)
        apart = self.pointwise("sub", value, mean)
        squares, _ = self.total(self.pointwise("mul", apart, apart), dims, True)
        shifted = self.pointwise("add", self._scaled(squares, 1 / terms), torch.tensor(self.number(float(eps))))
        scale = self.pointwise("rsqrt", shifted)
        found = self.pointwise("mul", apart, scale)
        if weight is not None:
            found = self.pointwise("mul", found, self._lanes(weight))
        return (found if bias is None else self.pointwise("add", found, self._lanes(bias))), mean, scale

    # ---- products with constant matrices -----------------------------------------------------------------------------

    def _op_mm(self, node: fx.Node, a: Any, b: Any) -> Tensor:
        return self.product(self._lanes(a).unsqueeze(0), self._lanes(b).unsqueeze(0)).squeeze(0)

    def _op_bmm(self, node: fx.Node, a: Any, b: Any) -> Tensor:
        return self.product(self._lanes(a), self._lanes(b))

    def _op_mv(self, node: fx.Node, a: Any, b: Any) -> Tensor:
        return self.product(self._lanes(a).unsqueeze(0), self._lanes(b).view(1, -1, 1)).view(-1)

    def _op_addmm(self, node: fx.Node, c: Any, a: Any, b: Any, beta: float = 1, alpha: float = 1) -> Tensor:
        return self._added(c, self._op_mm(node, a, b), beta, alpha)

    def _op_baddbmm(self, node: fx.Node, c: Any, a: Any, b: Any, beta: float = 1, alpha: float = 1) -> Tensor:
        return self._added(c, self._op_bmm(node, a, b), beta, alpha)

    def _added(self, c: Any, product: Tensor, beta: float, alpha: float) -> Tensor:
        product = product if alpha == 1 else self._scaled(product, alpha)
        added = self._lanes(c)
        return self.pointwise("add", added if beta == 1 else self._scaled(added, beta), product)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """`a @ b` of `(G, M, K)` and `(G, K, P)`: one of them is constant, and rows meet their own weights alone."""
        if bool((b < ROW).all()):
            return self._by_constant(a, b.transpose(1, 2))
        if bool((a < ROW).all()):
            return self._by_constant(b.transpose(1, 2), a).transpose(1, 2)
        raise NotFused(
            "a product of two values that both depend on the state or on x: only matrices that are the same "
            "for all rows and steps have a kernel"
        )

    def _by_constant(self, value: Tensor, weights: Tensor) -> Tensor:
        """`out[g, q, j] = Σ_k value[g, q, k] weights[g, j, k]`, each vector `value[g, q]` being of one row."""
        groups, vectors, _ = value.shape
        rows = value.amax(-1) // ROW
        if bool(((value // ROW != rows.unsqueeze(-1)) & (value >= ROW)).any()):
            raise NotFused("rows that mix: a product sums over rows")
        rows, value = rows.flatten(), value.flatten(0, 1) % ROW
        weights = weights.unsqueeze(1).expand(-1, vectors, -1, -1).flatten(0, 1)
        if len(rows) % self.rows or bool(
            (torch.bincount(rows, minlength=self.rows + 1)[1:] != len(rows) // self.rows).any()
        ):
            raise NotFused("rows that mix: a product whose rows are not those of the state")
        order = torch.argsort(rows, stable=True).view(self.rows, -1)  # (rows, blocks)
        blocks, outputs = order.shape[1], weights.shape[1]
        operand, matrix = value[order[0]], weights[order[0]]
        if bool((value[order] != operand).any()) or bool((weights[order] != matrix).any()):
            raise NotFused("a product whose matrices differ from row to row")
        if blocks > 1 and bool((operand == operand[:1]).all()):  # heads that look at all units are one product
            operand, matrix = operand[:1], matrix.flatten(0, 1).unsqueeze(0)
        base = self._make(blocks * outputs, "product", matrix, (operand,))
        ids = torch.empty(len(rows), outputs, dtype=torch.int64)
        lanes = base + torch.arange(blocks * outputs).view(blocks, outputs)
        ids[order] = lanes + (torch.arange(1, self.rows + 1) * ROW).view(-1, 1, 1)
        return ids.view(groups, vectors, outputs)
