"""Series of UCI-HAR's shape, made here where its files are not given (`timeloom.app.data.uci_har` reads those)."""

from __future__ import annotations

import torch

from timeloom.app.data import Record, Table
from timeloom.app.data.uci_har import ACTIVITIES

STEPS, NAME, STAND_IN = 128, "UCI-HAR", "generated stand-in for UCI-HAR"


def generated(each: int, steps: int = STEPS) -> Table:
    """`each` series of every activity: movement of its own pace and posture of its own direction, with noise."""
    generator = torch.Generator().manual_seed(0)
    records = []
    for number, activity in enumerate(ACTIVITIES):
        pace = (0.30, 0.24, 0.36, 0.02, 0.03, 0.015)[number]
        posture = torch.zeros(9)
        posture[6 + number % 3] = 1.0
        for i in range(each):
            time = torch.arange(steps).unsqueeze(1) * pace * (1 + 0.1 * torch.randn(1, generator=generator))
            phase = 6.28 * torch.rand(9, generator=generator)
            wave = (0.6 if number < 3 else 0.1) * torch.sin(time + phase)
            values = posture + wave + 0.6 * torch.randn(steps, 9, generator=generator)
            records.append(Record(f"{activity} {i}", values, activity, "test" if i % 10 >= 7 else "train"))
    return Table(STAND_IN, "classification", records).checked()
