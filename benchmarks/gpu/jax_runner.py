"""JAX's GRUs with a case's weights and inputs, timed by the host's clock until their results are ready."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.gpu import clock
from benchmarks.gpu.compare import Call, Row
from benchmarks.gpu.jax_deer import Weights, deer, project, scan
from benchmarks.layers import Problem, build
from benchmarks.measure import Clock, wall_seconds


class JaxRunner:
    """DEER or lax.scan, jitted, in float32."""

    clock: Clock = staticmethod(wall_seconds)

    def __init__(self, case: Case, method: str, tolerance: float) -> None:
        problem = Problem.draw(case, clock.DEVICE)
        state = build(case, "torch").state_dict()
        self._names = {"w_ih": "weight_ih_l0", "w_hh": "weight_hh_l0", "b_ih": "bias_ih_l0", "b_hh": "bias_hh_l0"}
        self._weights = {short: _array(state[long]) for short, long in self._names.items()}
        self._x, self._loss_weights = _array(problem.x), (_array(problem.weight_states), _array(problem.weight_last[0]))

        def states(weights: Weights, x: Any) -> tuple[Any, Any]:
            u = project(weights, x)
            return deer(tolerance, weights, u) if method == "deer" else (scan(weights, u), None)

        def loss(weights: Weights, x: Any) -> tuple[Any, Any]:
            h, count = states(weights, x)
            whole, last = self._loss_weights
            return jnp.sum(h * whole) + jnp.sum(h[-1] * last[0]), (h, count)

        self._forward = jax.jit(states)
        self._step = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
        self._iterations: int | None = None

    def forward(self) -> object:
        return jax.block_until_ready(self._forward(self._weights, self._x))

    def step(self) -> Any:
        return jax.block_until_ready(self._step(self._weights, self._x))

    def graph(self) -> Call:
        raise RuntimeError("JAX has no CUDA graphs to replay")

    def peak(self) -> int | None:
        return None

    def results(self) -> dict[str, Tensor]:
        (_, (h, count)), (of_weights, of_x) = self.step()
        self._iterations = None if count is None else int(count)
        found = {"output": h, "h_n": h[-1:], "x.grad": of_x}
        found |= {f"{long}.grad": of_weights[short] for short, long in self._names.items()}
        return {name: torch.tensor(jax.device_get(value)) for name, value in found.items()}

    def facts(self) -> Row:
        where = f"JAX {jax.__version__} on {jax.default_backend()}, by the host's clock"
        return {"note": where} | ({} if self._iterations is None else {"sweeps": [self._iterations, 1]})


def _array(value: Tensor) -> Any:
    return jnp.asarray(value.detach().cpu().numpy())
