"""One configuration, as a line of JSON with only the fields that are not at their defaults."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

MODULES = ("GRU", "LSTM", "RNN", "RNN_RELU", "ImplicitGRU")
"""Cells that are modules; those in `networks.USER_CELLS` are run by `unroll`."""
TWINS = MODULES[:4]
"""Modules that torch also has."""
FEATURES = ("second order", "warm starts", "states", "layer", "dropout", "compiled")
POISONS = ("nan", "inf", "big")
DTYPES = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """A network with its weights, an input and a solver; all random numbers follow from `seed`."""

    cell: str = "GRU"
    n: int = 16
    inputs: int = 3
    layers: int = 1
    bidirectional: bool = False
    batch_first: bool = False
    bias: bool = True
    proj: int = 0
    """`proj_size` of an LSTM."""
    T: int = 100
    B: int = 2
    """Sequences; 0 is an input without a batch dimension."""
    ragged: str = ""
    """"lengths", or a "packed" sequence."""
    resets: bool = False
    h0: bool = False
    dtype: str = "float32"
    autocast: str = ""
    """The dtype of autocast, if any."""
    tf32: bool = True
    """Whether torch lets cuDNN round products to tf32, as by default."""
    gate_bias: float = 0.0
    """Added to the bias of the gate that keeps the state: z of a GRU, f of an LSTM."""
    scale: float = 1.0
    """The recurrent weights' factor."""
    trained: int = 0
    """Training steps before the case is run."""
    x_scale: float = 1.0
    solver: str = "auto"
    """The name of a class of `timeloom.solvers`, or "auto"."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the solver."""
    grad: bool = True
    calls: int = 1
    """Calls of the same module; the last one is judged, on its own input."""
    drift: float = 0.0
    """Relative change of all weights from call to call, as an optimizer makes; the last call has the case's weights."""
    seed: int = 0
    feature: str = ""
    """A feature that is used in addition, one of `FEATURES`: second-order gradients; `WarmStarts`, with inputs that
    change a little between calls; `return_states`; `Layer` over a user's cell, which then takes lengths and resets;
    dropout inside the recurrence; the module inside a graph of `torch.compile`."""
    poison: str = ""
    """What one number of the first call's input is, one of `POISONS`: that call is judged, or a clean one after it."""

    def __post_init__(self) -> None:
        if self.feature not in ("", *FEATURES):
            raise ValueError(f"feature must be one of {', '.join(FEATURES)} or '', got {self.feature!r}")
        if self.poison not in ("", *POISONS):
            raise ValueError(f"poison must be one of {', '.join(POISONS)} or '', got {self.poison!r}")
        if self.dtype not in DTYPES or self.autocast not in ("", "float16", "bfloat16"):
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, autocast '', float16 or bfloat16")

    @staticmethod
    def of(given: str | dict[str, Any]) -> Case:
        """A case from JSON, or from its fields."""
        said = json.loads(given) if isinstance(given, str) else given
        unknown = set(said) - {entry.name for entry in fields(Case)} - {"why"}
        if unknown:
            raise ValueError(f"a case has no {', '.join(sorted(unknown))}; it has {', '.join(asdict(Case()))}")
        return Case(**{name: value for name, value in said.items() if name != "why"})

    def line(self) -> str:
        """The case as JSON for `of`."""
        usual = asdict(Case())
        return json.dumps({name: value for name, value in asdict(self).items() if value != usual[name]})

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def gates(self) -> int:
        return {"LSTM": 4, "RNN": 1, "RNN_RELU": 1}.get(self.cell, 3)

    @property
    def work(self) -> float:
        """Multiplications of a forward pass."""
        width = self.n * (self.n + max(self.inputs, self.n if self.layers > 1 else 0))
        return float(self.T * max(self.B, 1) * self.layers * self.directions * self.gates * width)

    @property
    def steps(self) -> int:
        """Steps that must be run one after the other."""
        return self.T * self.layers * self.directions
