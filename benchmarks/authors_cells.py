"""Public cells in their authors' form, written from papers and documentation, with the operations of their loops.

`ncps`: CfC and LTC. `torchrecurrent`: nine of its cells. `speechbrain`: LiGRU, whose inputs are projected and
normalised for all of time before the loop. None of these packages is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def matrix(*shape: int) -> nn.Parameter:
    bound = 1 / math.sqrt(shape[-1])
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))


class Authors(nn.Module):
    """One cell. `outside` computes what its authors compute for all of time, `(T, B, ...)`, before their loop."""

    parts = 1

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.input_size, self.hidden_size = inputs, units

    def outside(self, x: Tensor) -> Tensor:
        return x

    def initial(self, batch: int) -> Tensor | tuple[Tensor, ...]:
        zeros = next(self.parameters()).new_zeros(batch, self.hidden_size)
        return zeros if self.parts == 1 else (zeros,) * self.parts


class CfC(Authors):
    """ncps: one backbone over x and h side by side, and four heads of it."""

    def __init__(self, inputs: int, units: int, backbone: int = 128) -> None:
        super().__init__(inputs, units)
        self.backbone = nn.Linear(inputs + units, backbone)
        self.one, self.two, self.a, self.b = (nn.Linear(backbone, units) for _ in range(4))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        shared = 1.7159 * torch.tanh(0.666 * self.backbone(torch.cat([x, h], 1)))
        one, two = torch.tanh(self.one(shared)), torch.tanh(self.two(shared))
        share = torch.sigmoid(self.a(shared) + self.b(shared))
        return one * (1.0 - share) + share * two


class LTC(Authors):
    """ncps: liquid time constants, six steps of a semi-implicit solver; every synapse has a sigmoid of its own."""

    def __init__(self, inputs: int, units: int, unfolds: int = 6) -> None:
        super().__init__(inputs, units)
        self.unfolds = unfolds
        self.leak, self.rest, self.capacity = (nn.Parameter(torch.rand(units)) for _ in range(3))
        self.weight, self.mean, self.steep = (nn.Parameter(torch.rand(units, units)) for _ in range(3))
        self.weight_x, self.mean_x, self.steep_x = (nn.Parameter(torch.rand(inputs, units)) for _ in range(3))
        self.reversal = nn.Parameter(2 * torch.rand(units, units).round() - 1)
        self.reversal_x = nn.Parameter(2 * torch.rand(inputs, units).round() - 1)

    def forward(self, v: Tensor, x: Tensor) -> Tensor:
        open_x = F.softplus(self.weight_x) * torch.sigmoid(self.steep_x * (x.unsqueeze(-1) - self.mean_x))
        current_x, conductance_x = (open_x * self.reversal_x).sum(1), open_x.sum(1)
        capacity, leak, weight = (
            F.softplus(self.capacity) * self.unfolds,
            F.softplus(self.leak),
            F.softplus(self.weight),
        )
        for _ in range(self.unfolds):
            opened = weight * torch.sigmoid(self.steep * (v.unsqueeze(-1) - self.mean))
            above = capacity * v + leak * self.rest + (opened * self.reversal).sum(1) + current_x
            v = above / (capacity + leak + opened.sum(1) + conductance_x + 1e-8)
        return v


class LiGRU(Authors):
    """speechbrain: `w = BN(W x)` for all of time, then `a, z = w + U h` step after step."""

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__(inputs, units)
        self.w, self.u = nn.Linear(inputs, 2 * units, bias=False), nn.Linear(units, 2 * units, bias=False)
        self.norm = nn.BatchNorm1d(2 * units)

    def outside(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(self.w(x).flatten(0, 1))
        return found.view(*x.shape[:2], -1)

    def forward(self, h: Tensor, w: Tensor) -> Tensor:
        a, z = (w + self.u(h)).chunk(2, 1)
        z = torch.sigmoid(z)
        return z * h + (1 - z) * torch.relu(a)


class Gates(Authors):
    """torchrecurrent: `count` gates of x and of h, each with a bias."""

    count = 2

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__(inputs, units)
        self.weight_ih, self.weight_hh = matrix(self.count * units, inputs), matrix(self.count * units, units)
        self.bias_ih, self.bias_hh = (nn.Parameter(torch.zeros(self.count * units)) for _ in range(2))

    def of_x(self, x: Tensor) -> tuple[Tensor, ...]:
        return F.linear(x, self.weight_ih, self.bias_ih).chunk(self.count, 1)

    def of_h(self, h: Tensor) -> tuple[Tensor, ...]:
        return F.linear(h, self.weight_hh, self.bias_hh).chunk(self.count, 1)


class MGU(Gates):
    """Minimal gated unit (Zhou et al., 2016)."""

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        (x_f, x_h), (weight_f, weight_h) = self.of_x(x), self.weight_hh.chunk(2, 0)
        f = torch.sigmoid(x_f + h @ weight_f.t())
        return (1 - f) * h + f * torch.tanh(x_h + (f * h) @ weight_h.t())


class JANET(Gates):
    """Just another network (van der Westhuizen and Lasenby, 2018)."""

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        (x_f, x_c), (h_f, h_c) = self.of_x(x), self.of_h(h)
        s = x_f + h_f
        return torch.sigmoid(s) * h + (1 - torch.sigmoid(s - 1.0)) * torch.tanh(x_c + h_c)


class UGRNN(Gates):
    """Update-gate RNN (Collins et al., 2017)."""

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        (x_c, x_g), (h_c, h_g) = self.of_x(x), self.of_h(h)
        g = torch.sigmoid(x_g + h_g)
        return g * h + (1 - g) * torch.tanh(x_c + h_c)


class ATR(Gates):
    """Addition-subtraction twin-gated (Zhang et al., 2018)."""

    count = 1

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        (p,), (q,) = self.of_x(x), self.of_h(h)
        return torch.sigmoid(p + q) * p + torch.sigmoid(p - q) * h


class FastGRNN(Gates):
    """FastGRNN (Kusupati et al., 2018): one product for gate and candidate."""

    count = 1

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__(inputs, units)
        self.bias_z, self.bias_h = (nn.Parameter(torch.zeros(units)) for _ in range(2))
        self.zeta, self.nu = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(-4.0))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        (p,), (q,) = self.of_x(x), self.of_h(h)
        z = torch.sigmoid(p + q + self.bias_z)
        share = torch.sigmoid(self.zeta) * (1 - z) + torch.sigmoid(self.nu)
        return share * torch.tanh(p + q + self.bias_h) + z * h


class IndRNN(Authors):
    """Independently recurrent (Li et al., 2018)."""

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__(inputs, units)
        self.weight_ih, self.weight_hh = matrix(units, inputs), nn.Parameter(torch.empty(units).uniform_(-0.9, 0.9))
        self.bias = nn.Parameter(torch.zeros(units))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.relu(F.linear(x, self.weight_ih, self.bias) + self.weight_hh * h)


class CoRNN(Authors):
    """Coupled oscillators (Rusch and Mishra, 2021)."""

    parts = 2
    step, frequency, damping = 0.042, 2.7, 4.7

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__(inputs, units)
        self.of_y, self.of_z = nn.Linear(units, units), nn.Linear(units, units, bias=False)
        self.of_x = nn.Linear(inputs, units, bias=False)

    def forward(self, state: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        y, z = state
        pull = torch.tanh(self.of_y(y) + self.of_z(z) + self.of_x(x))
        z = z + self.step * (pull - self.frequency * y - self.damping * z)
        return y + self.step * z, z


class LEM(Gates):
    """Long expressive memory (Rusch et al., 2022)."""

    parts, count = 2, 4

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__(inputs, units)
        self.weight_hh, self.bias_hh = matrix(3 * units, units), nn.Parameter(torch.zeros(3 * units))
        self.weight_cy = matrix(units, units)

    def forward(self, state: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        y, z = state
        x_1, x_2, x_z, x_y = self.of_x(x)
        y_1, y_2, y_z = F.linear(y, self.weight_hh, self.bias_hh).chunk(3, 1)
        first, second = torch.sigmoid(x_1 + y_1), torch.sigmoid(x_2 + y_2)
        z = (1 - second) * z + second * torch.tanh(x_z + y_z)
        return (1 - first) * y + first * torch.tanh(x_y + z @ self.weight_cy.t()), z


class PeepholeLSTM(Gates):
    """LSTM with peepholes (Gers and Schmidhuber, 2000)."""

    parts, count = 2, 4

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__(inputs, units)
        self.peep_i, self.peep_f, self.peep_o = (matrix(units) for _ in range(3))

    def forward(self, state: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        h, c = state
        i, f, g, o = (a + b for a, b in zip(self.of_x(x), self.of_h(h), strict=True))
        i, f = torch.sigmoid(i + self.peep_i * c), torch.sigmoid(f + self.peep_f * c)
        c = f * c + i * torch.tanh(g)
        return torch.sigmoid(o + self.peep_o * c) * torch.tanh(c), c


CELLS: dict[str, Callable[[int, int], Authors]] = {
    "ncps CfC": CfC,
    "ncps LTC": LTC,
    "speechbrain LiGRU": LiGRU,
    "torchrecurrent MGU": MGU,
    "torchrecurrent JANET": JANET,
    "torchrecurrent UGRNN": UGRNN,
    "torchrecurrent ATR": ATR,
    "torchrecurrent FastGRNN": FastGRNN,
    "torchrecurrent IndRNN": IndRNN,
    "torchrecurrent coRNN": CoRNN,
    "torchrecurrent LEM": LEM,
    "torchrecurrent PeepholeLSTM": PeepholeLSTM,
}
