"""The zoo of trained networks: which layer, on which task, for how many steps; and their training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.layers import OWN_CELLS, outputs, own_layer
from benchmarks.zoo.tasks import TASKS, Batch

UNSEEN = 99
"""Seed of the batch for which losses are reported."""
POOL = 8
"""Batches that are drawn once and trained on in turns."""


@dataclass(frozen=True)
class Network:
    """A layer and its training."""

    task: str
    layer: str
    units: int
    updates: int
    steps: int = 1024
    batch: int = 16
    rate: float = 3e-3
    sizes: tuple[tuple[int, int], ...] = ((16384, 1), (16384, 16))
    """T and B to measure at."""

    @property
    def name(self) -> str:
        return f"{self.task} {self.layer} {self.units}"

    @property
    def own(self) -> bool:
        """Whether torch has no layer for its cell."""
        return self.layer in OWN_CELLS


ZOO = (
    Network("flip-flop", "GRU", 64, 250),
    Network("flip-flop", "LSTM", 64, 250),
    Network("flip-flop", "GRU", 32, 250, sizes=((16384, 1),)),
    Network("adding", "GRU", 64, 200),
    Network("adding", "LSTM", 32, 200, sizes=((16384, 1),)),
    Network("copy", "GRU", 128, 400, sizes=((16384, 1), (16384, 16))),
    Network("copy", "LSTM", 64, 400, sizes=((16384, 1),)),
    Network("amplifier", "LSTM", 32, 200, sizes=((16384, 1), (65535, 1))),
    Network("amplifier", "GRU", 32, 200, sizes=((16384, 1),)),
    Network("amplifier", "GRU", 16, 200, sizes=((16384, 1),)),
    Network("amplifier", "RNN", 32, 200, rate=1e-3, sizes=((16384, 1),)),
    Network("sensor", "GRU", 64, 250, sizes=((16384, 1), (8192, 32))),
    Network("sensor", "LSTM", 64, 250, sizes=((16384, 1),)),
    Network("motions", "GRU", 64, 150, sizes=((16384, 1),)),
    Network("policy", "GRU", 64, 250, sizes=((16384, 1), (8192, 32))),
    Network("policy", "LSTM", 64, 250, sizes=((16384, 16),)),
    Network("text", "GRU", 128, 200, 512, sizes=((16384, 1), (16384, 4))),
    Network("text", "LSTM", 128, 200, 512, sizes=((8192, 1), (8192, 4))),
    Network("text", "GRU", 256, 100, 512, sizes=((8192, 1),)),
    Network("text", "GRU", 512, 60, 256, sizes=((8192, 1),)),
    Network("flip-flop", "LayerNormGRU", 64, 150, 256, sizes=((8192, 1),)),
    Network("amplifier", "LiGRU", 32, 150, 256, rate=1e-3, sizes=((8192, 1),)),
)

TORCHS = tuple(network for network in ZOO if not network.own and not TASKS[network.task].needs())
"""Networks of torch's layers whose task can be drawn here."""


class Model(nn.Module):
    """The layer with an embedding before it, for text, and a linear read-out; trained by timeloom's layer."""

    def __init__(self, network: Network, layer: nn.Module | None = None) -> None:
        super().__init__()
        task = TASKS[network.task]
        self.answers = task.answers
        self.embedding = nn.Embedding(256, task.inputs) if task.answers == "bytes" else None
        self.layer = layer if layer is not None else own_layer(network.layer, task.inputs, network.units)
        self.head = nn.Linear(network.units, task.outputs)

    def features(self, x: Tensor) -> Tensor:
        return x if self.embedding is None else self.embedding(x)

    def loss(self, batch: Batch) -> Tensor:
        return self.loss_of(outputs(self.layer, self.features(batch.x), batch.resets), batch.answers)

    def loss_of(self, states: Tensor, answers: Tensor) -> Tensor:
        """The loss from the layer's outputs `(T, B, n)`."""
        out = self.head(states)
        if self.answers == "numbers":
            return F.mse_loss(out, answers)
        return F.cross_entropy(out.flatten(0, 1), answers.flatten())


WEIGHTS = Path(__file__).with_name("weights.pt")
"""State_dicts by network name, in half precision, of networks whose training takes more than a few seconds."""


def stored_weights(file: Path = WEIGHTS) -> dict[str, dict[str, Tensor]]:
    """State_dicts by network name, in float32."""
    found = torch.load(file, map_location="cpu", weights_only=True)
    return {name: {key: value.float() for key, value in weights.items()} for name, weights in found.items()}


def store_weights(models: dict[str, Model], file: Path) -> None:
    """Add the state_dicts of these models to a file."""
    held = stored_weights(file) if file.exists() else {}
    held |= {name: model.state_dict() for name, model in models.items()}
    torch.save({name: {k: v.cpu().half() for k, v in weights.items()} for name, weights in held.items()}, file)


def unseen_loss(network: Network, model: Model, device: torch.device) -> float:
    """The loss on a batch that the model was not trained on, of the same length as its training batches."""
    drawn = TASKS[network.task].draw(network.steps, network.batch, torch.Generator().manual_seed(UNSEEN))
    with torch.no_grad():
        return float(model.loss(drawn.to(device)))


def model_of(network: Network, stored: dict[str, dict[str, Tensor]], device: torch.device, updates: int = 0) -> Model:
    """The network's model with its stored weights, or trained if there are none."""
    if network.name not in stored:
        return trained(network, device, updates=updates)[0]
    model = Model(network).to(device)
    model.load_state_dict(stored[network.name])
    return model


def trained(network: Network, device: torch.device, seed: int = 0, updates: int = 0) -> tuple[Model, float]:
    """The model after its training, of `updates` updates or its own number, and the final loss."""
    torch.manual_seed(seed)
    task, generator = TASKS[network.task], torch.Generator().manual_seed(seed)
    model = Model(network).to(device)
    pool = [task.draw(network.steps, network.batch, generator).to(device) for _ in range(POOL)]
    optimizer = torch.optim.Adam(model.parameters(), network.rate)
    loss = torch.zeros(())
    for update in range(updates or network.updates):
        loss = model.loss(pool[update % POOL])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model, float(loss.detach())
