"""Random step functions built from the operations that kernels cover, to test the compiler."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.sigmoid, torch.tanh, torch.relu, F.silu, F.softplus, F.gelu, lambda a: F.gelu(a, approximate="tanh"),
    torch.sin, torch.cos, torch.abs, torch.neg, F.elu, F.leaky_relu, F.hardtanh, F.logsigmoid, torch.atan,
    torch.square, F.mish,
    lambda a: torch.exp(-a.abs()), lambda a: torch.log1p(a.square()), lambda a: torch.sqrt(a.square() + 0.1),
    lambda a: torch.rsqrt(a.square() + 0.5), lambda a: torch.reciprocal(1.5 + torch.tanh(a)),
    lambda a: a.clamp(-0.7, 0.9),
    lambda a: (a.abs() + 0.2).pow(1.7), lambda a: (a.abs() + 0.2).log(), torch.erf, lambda a: 1 - a,
    lambda a: 2.5 / (a.abs() + 1),
    lambda a: torch.expm1(0.3 * a), lambda a: torch.where(a > 0.1, a, 0.2 * a.square()),
    lambda a: F.celu(a, 2.0), lambda a: torch.exp2(-a.abs()), lambda a: torch.log2(a.abs() + 0.3),
    lambda a: torch.log10(a.square() + 0.3), lambda a: torch.logit(0.1 + 0.8 * torch.sigmoid(a)),
    lambda a: a.masked_fill(a > 0.4, 0.3), lambda a: F.glu(torch.cat([a, 0.5 - a], -1)),
    lambda a: F.relu6(a + 3) / 6,  # F.hardsigmoid, whose gradient in torch (as F.celu's by 1 / 1.3) is good to float32
]  # fmt: skip
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, lambda a, b: a / (b.abs() + 0.5),
    lambda a, b: torch.lerp(a, b, 0.3), lambda a, b: torch.where(a < b, a, torch.tanh(b)),
    lambda a, b: torch.addcmul(a, a, b, value=0.5), torch.logaddexp, lambda a, b: torch.lerp(a, b, torch.sigmoid(a)),
]  # fmt: skip


class RandomCell(nn.Module):
    """A step over parts of random widths; `seed` decides everything about it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.dice = random.Random(seed)
        torch.manual_seed(seed)
        self.widths = [self.dice.choice([1, 2, 3, 6, 8, 17, 20]) for _ in range(self.dice.choice([1, 1, 2, 3]))]
        self.inputs = self.dice.choice([1, 4, 5, *self.widths])  # as wide as the state, too
        self.weights = nn.ParameterList()
        self.recipe: list[Callable[[list[Tensor]], Tensor]] = []
        self._known = [*self.widths, self.inputs]
        for _ in range(self.dice.randint(3, 9)):
            self._grow()
        self.ends = [self._end(width) for width in self.widths]

    def _weight(self, *shape: int) -> int:
        self.weights.append(nn.Parameter(torch.randn(*shape) / max(1, shape[-1]) ** 0.5))
        return len(self.weights) - 1

    def _pick(self, width: int | None = None) -> int:
        """An earlier value of this width; recent ones are more likely."""
        fit = [i for i, known in enumerate(self._known) if width is None or known == width]
        return max(self.dice.choice(fit), self.dice.choice(fit))

    def _add(self, width: int, make: Callable[[list[Tensor]], Tensor]) -> int:
        self.recipe.append(make)
        self._known.append(width)
        return len(self._known) - 1

    def _grow(self) -> None:
        a = self._pick()
        width = self._known[a]
        kind = self.dice.choice("uuubbbllnrshcmg")
        if kind == "u":
            f = self.dice.choice(UNARY)
            self._add(width, lambda v: f(v[a]))
        elif kind == "b":
            g, b = self.dice.choice(BINARY), self._pick(width)
            self._add(width, lambda v: g(v[a], v[b]))
        elif kind == "l":
            out = self.dice.choice([1, 3, 8, 16, width])
            w, bias = self._weight(out, width), self._weight(out)
            self._add(out, lambda v: F.linear(v[a], self.weights[w], self.weights[bias]))
        elif kind == "n":
            w, bias = self._weight(width), self._weight(width)
            self._add(width, lambda v: F.layer_norm(v[a], (width,), self.weights[w], self.weights[bias], 0.1))
        elif kind == "r" and width % 2 == 0:
            w = self._weight(width)
            self._add(width, lambda v: F.group_norm(v[a], 2, self.weights[w], None, 0.1))
        elif kind == "r":
            self._add(width, lambda v: v[a] * torch.rsqrt(v[a].square().mean(-1, keepdim=True) + 0.1))
        elif kind == "s" and width > 1:
            half = width // 2
            self._add(half, lambda v: v[a][:, -half:])
        elif kind == "h" and width % 2 == 0:
            w = self._weight(2, width // 2, width // 2)
            self._add(
                width, lambda v: torch.einsum("nhi,hij->nhj", v[a].unflatten(-1, (2, -1)), self.weights[w]).flatten(1)
            )
        elif kind == "c":
            b = self._pick()
            self._add(width + self._known[b], lambda v: torch.cat([v[a], v[b]], -1))
        elif kind == "m":
            w = self._weight(width)
            self._add(width, lambda v: v[a] * self.weights[w])
        elif kind == "g":
            shift = self.dice.randint(0, width)
            self._add(width, lambda v: v[a].roll(shift, -1) if shift % 2 else v[a].flip(-1))

    def _end(self, width: int) -> int:
        """A bounded value of a part's width, computed from recent ones."""
        a = len(self._known) - 1 - self.dice.randint(0, 2)
        w = self._weight(width, self._known[a])
        b = self._pick(width)
        return self._add(width, lambda v: torch.tanh(F.linear(v[a], self.weights[w])) + 0.2 * torch.tanh(v[b]))

    def forward(self, state: Tensor | tuple[Tensor, ...], x: Tensor) -> Tensor | tuple[Tensor, ...]:
        values = [*(state if isinstance(state, tuple) else (state,)), x]
        for make in self.recipe:
            values.append(make(values))
        out = tuple(values[end] for end in self.ends)
        return out if isinstance(state, tuple) else out[0]
