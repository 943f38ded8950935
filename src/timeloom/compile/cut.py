"""The minimum cut of a network: which edges to sever so that nothing flows from its source to its sink."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Hashable

Node = Hashable
SOURCE: Node = "source"
SINK: Node = "sink"


class Network:
    """Edges with capacities, from `SOURCE` to `SINK`."""

    def __init__(self) -> None:
        self._room: dict[Node, dict[Node, float]] = defaultdict(lambda: defaultdict(float))

    def connect(self, begin: Node, end: Node, capacity: float) -> None:
        self._room[begin][end] += capacity
        self._room[end][begin] += 0.0

    def source_side(self) -> set[Node]:
        """Nodes still reached from the source after a minimum cut, by maximum flow (Edmonds and Karp, 1972)."""
        while True:
            before = self._reached()
            if SINK not in before:
                return set(before)
            path, node = [], SINK
            while node != SOURCE:
                path.append((before[node], node))
                node = before[node]
            flow = min(self._room[a][b] for a, b in path)
            if math.isinf(flow):
                raise ValueError("no cut: a path of infinite capacity")
            for a, b in path:
                self._room[a][b] -= flow
                self._room[b][a] += flow

    def _reached(self) -> dict[Node, Node]:
        before: dict[Node, Node] = {SOURCE: SOURCE}
        pending: deque[Node] = deque([SOURCE])
        while pending:
            node = pending.popleft()
            for other, room in self._room[node].items():
                if room > 0 and other not in before:
                    before[other] = node
                    pending.append(other)
        return before
