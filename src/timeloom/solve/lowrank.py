"""Transfers of links as a diagonal plus a low-rank matrix: `M = diag(d) + U Vᵀ`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from timeloom.buffers import room
from timeloom.scan import linear_scan

COPIES = 4
"""Tensors of the matrices' size that are alive at once while they are scanned."""
PARALLEL = 1e-3
"""Share of a direction that must be orthogonal to those before it; if less is new, that is mostly rounding."""


@dataclass(frozen=True)
class LowRank:
    """The transfer of each link, `M[p] = diag(decay[p]) + left[p] right[p]ᵀ`.

    decay: `(C, B, S)`; left, right: `(C, B, S, K)`, with zeros in unused columns.
    """

    decay: Tensor
    left: Tensor
    right: Tensor

    def apply(self, changes: Tensor) -> Tensor:
        """The changes of the links' ends for changes of their starts, `(C, B, S)`."""
        along = torch.matmul(self.right.transpose(-1, -2), changes.unsqueeze(-1))
        return self.decay * changes + torch.matmul(self.left, along).squeeze(-1)

    def carry(self, jumps: Tensor) -> Tensor:
        """`δ[p] = M[p−1] δ[p−1] + jumps[p]`, `(C, B, S)`.

        On a GPU, where launching a link's three small operations dominates, by a scan of dense matrices if these fit
        into memory.
        """
        needed = COPIES * jumps.nbytes * jumps.shape[-1]
        return self.scan(jumps) if jumps.is_cuda and needed <= room(jumps) else self.in_order(jumps)

    def scan(self, jumps: Tensor) -> Tensor:
        """`carry` by a scan of dense matrices, in logarithmic depth."""
        matrices = self.dense()
        return linear_scan(torch.cat([torch.zeros_like(matrices[:1]), matrices[:-1]]), jumps)

    def in_order(self, jumps: Tensor) -> Tensor:
        """`carry` by a loop over the links."""
        move = jumps[0].unsqueeze(-1)
        moves = [move]
        decay, sources = self.decay.unsqueeze(-1), jumps.unsqueeze(-1)
        across = self.right.transpose(-1, -2)
        for p in range(len(jumps) - 1):
            kept = torch.addcmul(sources[p + 1], decay[p], move)
            move = torch.baddbmm(kept, self.left[p], torch.bmm(across[p], move))
            moves.append(move)
        return torch.stack(moves).squeeze(-1)

    def dense(self) -> Tensor:
        """The transfers as dense matrices, `(C, B, S, S)`."""
        return torch.diag_embed(self.decay) + self.left @ self.right.transpose(-1, -2)


class Basis:
    """Orthonormal directions of every link and their images, added column by column.

    Columns must come in order of trust: of a later one, only the component orthogonal to the earlier ones is used.
    """

    def __init__(self, like: Tensor, columns: int) -> None:
        self.directions = like.new_zeros(*like.shape, columns)
        """`(C, B, S, K)`, orthonormal, or zero."""
        self.images = torch.zeros_like(self.directions)
        """`(C, B, S, K)`, the image of each direction."""
        self._filled = 0

    def add(self, changes: Tensor, images: Tensor, least: Tensor) -> None:
        """Add a column: changes `(C, B, S)` and their images; it stays zero for changes with too little that is new.

        least: smallest size of the new component, `(C, B)`.
        """
        fresh, mapped = changes.unsqueeze(-1), images.unsqueeze(-1)
        known, known_images = self.directions[..., : self._filled], self.images[..., : self._filled]
        if self._filled:
            for _ in range(2):  # once is not orthogonal enough in float32
                along = known.transpose(-1, -2) @ fresh
                fresh, mapped = fresh - known @ along, mapped - known_images @ along
        size, left = torch.linalg.vector_norm(changes, dim=-1), torch.linalg.vector_norm(fresh, dim=(-2, -1))
        new = (left > PARALLEL * size) & (left > least) & mapped.isfinite().all(-2).squeeze(-1)
        scale = torch.where(new, 1 / left.clamp(min=torch.finfo(left.dtype).tiny), 0)[..., None]
        kept = new[..., None]
        self.directions[..., self._filled] = torch.where(kept, fresh.squeeze(-1) * scale, 0)
        self.images[..., self._filled] = torch.where(kept, mapped.squeeze(-1) * scale, 0)
        self._filled += 1

    def over(self, decay: Tensor) -> LowRank:
        """`M = D (I − Q Qᵀ) + G Qᵀ`: the images on the span of these directions, the decay `(C, B, S)` across it."""
        return LowRank(decay, self.images - decay.unsqueeze(-1) * self.directions, self.directions)
