"""The DEER paper's own speedups over its sequential GRU (JAX's scan), B = 16, on a V100: what its code has published.

Means of the five seeds of `report-v100-16.txt` (evaluation) and `bwd-speedup-report-bs16.txt` (evaluation and gradient)
in the repository machine-discovery/deer. Where they have none, the method did not fit into memory. Of the second,
n = 1 and 16, and n = 4 from T = 3,000 on, are taken.
"""

from __future__ import annotations

BATCH = 16
LENGTHS = (1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
_FORWARD = {
    1: (15.7, 43.5, 113.8, 182.7, 308.8, 393.7, 516.5),
    2: (24.4, 47.6, 75.0, 78.4, 72.4, 77.1, 74.6),
    4: (22.1, 35.4, 46.5, 44.4, 52.1, 54.2, 51.3),
    8: (14.8, 20.1, 21.9, 24.0, 25.2, 25.1),
    16: (7.1, 8.4, 8.9, 9.2, 9.5),
    32: (3.7, 3.8, 4.2, 4.2),
    64: (1.3, 1.3, 1.3),
}
_BOTH = {
    1: (30.0, 82.8, 235.3, 450.2, 920.2, 1043.9, 1243.5),
    4: (None, 86.0, 116.9, 119.6, 144.5, 143.7, 106.4),
    16: (18.9, 25.9, 26.3, 27.4, 28.8),
}
SPEEDUPS: dict[str, dict[tuple[int, int], float]] = {
    key: {
        (n, steps): ratio
        for n, ratios in table.items()
        for steps, ratio in zip(LENGTHS, ratios, strict=False)
        if ratio is not None
    }
    for key, table in (("forward_ms", _FORWARD), ("both_ms", _BOTH))
}
"""By pass, and by `(n, T)`."""


def best(key: str) -> tuple[float, int, int]:
    """The largest, and its n and T."""
    (n, steps), ratio = max(SPEEDUPS[key].items(), key=lambda item: item[1])
    return ratio, n, steps
