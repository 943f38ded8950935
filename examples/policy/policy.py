"""Train a recurrent policy with sb3-contrib's RecurrentPPO, its loop of single steps replaced by `resets=`.

Where an episode begins inside a batch of sequences, sb3-contrib calls its LSTM once for every step. One call with
`resets=` does the same. First the layer alone, beside torch's layer that knows no resets (what fusion alone would give)
and TorchRL's LSTMModule; then PPO on CartPole without velocities to a reward, both ways, from the same seed.

    OMP_NUM_THREADS=1 python examples/policy/policy.py --out policy
"""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor, nn

import timeloom as tl


def loop(features: Tensor, states: tuple[Tensor, Tensor], starts: Tensor, lstm: nn.LSTM) -> tuple[Tensor, Any]:
    """One step after the other, the state zeroed where an episode starts: features `(T, B, D)`, starts `(T, B)`."""
    outputs = []
    for x, start in zip(features, starts, strict=True):
        y, states = lstm(x.unsqueeze(0), tuple((~start).view(1, -1, 1) * part for part in states))
        outputs.append(y)
    return torch.cat(outputs), states


def one_call(features: Tensor, states: tuple[Tensor, Tensor], starts: Tensor, lstm: tl.LSTM) -> tuple[Tensor, Any]:
    """The same. `resets` puts back the given state, here zero: an episode carried over has a call of its own."""
    states = tuple((~starts[0]).view(1, -1, 1) * part for part in states)
    if not starts[1:].any():
        return lstm(features, states)
    y, last = lstm(features, tuple(torch.zeros_like(part) for part in states), resets=starts)
    carried = ~starts.cumsum(0).bool()
    if carried.any():
        first, end = lstm(features, states)
        y = torch.where(carried.unsqueeze(-1), first, y)
        last = tuple(torch.where(carried[-1].view(1, -1, 1), a, b) for a, b in zip(end, last, strict=True))
    return y, last


def torchrl(x: Tensor, starts: Tensor, lstm: nn.LSTM) -> tuple[nn.Module, Any]:
    from tensordict import TensorDict
    from torchrl.modules import LSTMModule, set_recurrent_mode

    module = LSTMModule(x.shape[-1], lstm.hidden_size, in_key="x", out_key="y", device=x.device)
    module.lstm.load_state_dict(lstm.state_dict())
    zeros = torch.zeros(*x.shape[1::-1], 1, lstm.hidden_size, device=x.device)
    seen = dict.fromkeys(("recurrent_state_h", "recurrent_state_c"), zeros)
    seen |= {"x": x.transpose(0, 1), "is_init": starts.t()[..., None]}
    return module, set_recurrent_mode(True)(lambda: module(TensorDict(seen, x.shape[1::-1]))["y"].transpose(0, 1))


def compare_layers(steps: int, batch: int, units: int, device: str) -> dict[str, float]:
    x, starts = torch.randn(steps, batch, 64, device=device), torch.rand(steps, batch, device=device) < 0.03
    starts[0] = True
    torch_lstm, ours = nn.LSTM(64, units).to(device), tl.LSTM(64, units).to(device)
    ours.load_state_dict(torch_lstm.state_dict())
    states = (torch.zeros(1, batch, units, device=device),) * 2
    ways = {
        "its loop": (torch_lstm, lambda: loop(x, states, starts, torch_lstm)[0]),
        "one call of torch's layer, no resets": (torch_lstm, lambda: torch_lstm(x, states)[0]),
        "timeloom, resets=": (ours, lambda: one_call(x, states, starts, ours)[0]),
    }
    if find_spec("torchrl") is not None:
        ways["TorchRL's LSTMModule"] = torchrl(x, starts, torch_lstm)
    found, times = {}, {}
    for name, (module, call) in ways.items():
        for _ in range(4):
            module.zero_grad()
            begin, y = perf_counter(), call()
            y.square().mean().backward()
            y.sum().item()  # waits for the device
            times[name] = min(perf_counter() - begin, times.get(name, 1e9))
        found[name] = torch.cat([y.detach().flatten(), *(p.grad.flatten() for p in module.parameters())])
        off, ratio = float((found[name] - found["its loop"]).abs().max()), times["its loop"] / times[name]
        print(f"  {name}: {1e3 * times[name]:.1f} ms ({ratio:.1f}×), off by {off:.1e}", flush=True)
    return times


def in_its_shapes(features: Tensor, states: Any, starts: Tensor, lstm: tl.LSTM) -> tuple[Tensor, Any]:
    """`one_call` for sb3-contrib, whose sequences lie behind each other: features `(B · T, D)`."""
    x = features.view(batch := states[0].shape[1], -1, lstm.input_size).transpose(0, 1)
    y, states = one_call(x, states, starts.view(batch, -1).t() > 0.5, lstm)
    return y.transpose(0, 1).flatten(0, 1), states


def train(parallel: bool, options: argparse.Namespace) -> list[list[float]]:
    """`[seconds, seconds of the processor, steps, mean reward of the last 100 episodes]` after every rollout."""
    from gymnasium import make, spaces
    from gymnasium.wrappers import TransformObservation
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.env_util import make_vec_env

    def watch(*_: Any) -> bool:
        rewards = [episode["r"] for episode in agent.ep_info_buffer]
        if rewards and agent.num_timesteps % (options.rollout * 8) == 0:
            curve.append([perf_counter() - begin, process_time() - used, agent.num_timesteps, fmean(rewards)])
        return not curve or curve[-1][-1] < options.goal

    seen = (lambda state: state[[0, 2]], spaces.Box(-10, 10, (2,)))
    environments = make_vec_env(lambda: TransformObservation(make("CartPole-v1"), *seen), 8, seed=options.seed)
    given = {"learning_rate": 1e-3, "n_steps": options.rollout, "batch_size": 4 * options.rollout, "gamma": 0.98}
    agent = RecurrentPPO("MlpLstmPolicy", environments, seed=options.seed, device=options.device, **given)
    if parallel:
        tl.parallelize(agent.policy)._process_sequence = in_its_shapes
    curve, begin, used = [], perf_counter(), process_time()
    agent.learn(options.steps, callback=watch)
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--goal", type=float, default=200, help="mean reward of 100 episodes at which to stop")
    parser.add_argument("--steps", type=int, default=100_000, help="steps of the environments, at most")
    parser.add_argument("--rollout", type=int, default=128, help="steps of each of the 8 environments between updates")
    parser.add_argument("--sizes", type=int, nargs=3, default=[512, 8, 256], help="T, B and units of the layer alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="folder for results.json and the picture")
    options = parser.parse_args()
    torch.manual_seed(0)
    print("the layer alone, T = {}, B = {}, n = {}, forward and backward:".format(*options.sizes))
    results: dict[str, Any] = {"layer": compare_layers(*options.sizes, options.device)}
    ways = ("its loop", "timeloom") if find_spec("sb3_contrib") is not None else ()
    print("training policies" if ways else "sb3-contrib is not installed: no policy is trained", flush=True)
    results["policy"] = {name: train(name == "timeloom", options) for name in ways}
    for name, (*_, (seconds, used, steps, reward)) in results["policy"].items():
        print(f"{name}: reward {reward:.0f} after {steps:.0f} steps, {seconds:.1f} s, {used:.1f} s of the processor")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "results.json").write_text(json.dumps(results))
        import matplotlib.pyplot as plt

        for name, curve in results["policy"].items():
            plt.plot([row[1] for row in curve], [row[3] for row in curve], label=name)
        plt.gca().set(xlabel="seconds of the processor", ylabel="mean reward of 100 episodes")
        plt.legend()
        plt.savefig(options.out / "policy.png", dpi=110)


if __name__ == "__main__":
    main()
