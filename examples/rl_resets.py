"""A recurrent policy whose rollouts hold many episodes: `resets` starts the state over where one ends.

The game: at the start of an episode a light on the left or on the right shows for one step; at its end the agent must
go to that side. In between it sees nothing, so it has to remember. Rollouts are cut from a stream of such episodes, as
vectorised environments give them, and trained on by policy gradients (REINFORCE), with no padding and no loop.

    python examples/rl_resets.py
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import timeloom as tl


class Policy(nn.Module):
    """Logits of the two actions at every step."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.gru = tl.GRU(2, units)
        self.head = nn.Linear(units, 2)

    def forward(self, seen: Tensor, begins: Tensor) -> Tensor:
        states, _ = self.gru(seen, resets=begins)
        return self.head(states)


def rollout(steps: int, batch: int, shortest: int, longest: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What is seen `(T, B, 2)`, where episodes begin and end `(T, B)`, and the side to go to `(T, B)`."""
    begins, side = torch.zeros(steps, batch, dtype=torch.bool), torch.zeros(steps, batch, dtype=torch.long)
    for row in range(batch):
        at = 0
        while at < steps:
            length = int(torch.randint(shortest, longest + 1, ()))
            begins[at, row] = True
            side[at : at + length, row] = torch.randint(2, ())
            at += length
    ends = torch.cat([begins[1:], torch.zeros_like(begins[:1])])  # a last episode that is cut off is not judged
    seen = nn.functional.one_hot(side, 2).float() * begins.unsqueeze(-1)
    return seen, begins, ends, side


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=1024, help="steps in a rollout")
    parser.add_argument("--updates", type=int, default=120)
    parser.add_argument("--batch", type=int, default=8, help="environments side by side")
    parser.add_argument("--episode", type=int, default=24, help="steps in the longest episode")
    options = parser.parse_args()
    torch.manual_seed(0)
    policy = Policy(16)
    optimiser = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for number in range(options.updates):
        seen, begins, ends, side = rollout(options.length, options.batch, options.episode // 2, options.episode)
        choice = torch.distributions.Categorical(logits=policy(seen, begins))
        action = choice.sample()
        reward = (action == side).float()[ends]
        advantage = reward - reward.mean()
        loss = -(advantage * choice.log_prob(action)[ends]).mean() - 0.01 * choice.entropy()[ends].mean()
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimiser.step()
        if (number + 1) % 20 == 0 or number + 1 == options.updates:
            print(f"update {number + 1}: {reward.mean():.0%} of {int(ends.sum())} episodes won", flush=True)
    print(policy.gru.reports[0])


if __name__ == "__main__":
    main()
