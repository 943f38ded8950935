"""Transposed Jacobians of a batch, sparse or dense, and their products with vectors and with each other."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

WORTH_SPARSE = 0.25
"""Share of entries up to which a matrix is stored sparse."""
MOST_PRODUCTS = 2**28
"""Most scalar products in one product of sparse matrices: cuSPARSE has no resources for many more."""


@dataclass(frozen=True)
class Dense:
    """Dense matrices `(B, rows, columns)`, or `(1, rows, columns)` if all samples of the batch share one."""

    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[1], self.values.shape[2]


@dataclass(frozen=True)
class Sparse:
    """One CSR matrix `(B·rows, B·columns)` with the batch's B matrices along its diagonal."""

    matrix: Tensor
    batch: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape[0] // self.batch, self.matrix.shape[1] // self.batch

    @property
    def stored(self) -> int:
        """Number of stored entries in all."""
        return self.matrix.values().numel()

    @staticmethod
    def of(rows: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int], batch: int) -> Sparse:
        """From entries of the whole block-diagonal matrix, in any order."""
        height, width = shape[0] * batch, shape[1] * batch
        order = (rows * width + columns).argsort()
        begins = torch.zeros(height + 1, dtype=torch.int64, device=rows.device)
        begins[1:] = torch.bincount(rows, minlength=height).cumsum(0)
        return Sparse(csr(begins, columns[order], values[order], (height, width)), batch)

    @staticmethod
    def shared(rows: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int], batch: int) -> Sparse:
        """From the entries of one matrix that is the same for the whole batch."""
        which = torch.arange(batch, device=rows.device).unsqueeze(1)
        everywhere = (rows + which * shape[0]).flatten(), (columns + which * shape[1]).flatten()
        return Sparse.of(*everywhere, values.repeat(batch), shape, batch)

    @staticmethod
    def diagonal(values: Tensor) -> Sparse:
        """From the diagonals `(B, n)`; zeros are left out."""
        at = values.flatten().nonzero().squeeze(-1)
        return Sparse.of(at, at, values.flatten()[at], (values.shape[1], values.shape[1]), len(values))

    def to_dense(self) -> Dense:
        height, width = self.shape
        begins, columns = self.matrix.crow_indices(), self.matrix.col_indices()
        rows = torch.repeat_interleave(begins[1:] - begins[:-1])
        values = self.matrix.values().new_zeros(self.batch, height, width)
        values[rows // height, rows % height, columns % width] = self.matrix.values()
        return Dense(values)


Matrix = Dense | Sparse


@dataclass(frozen=True)
class Cut:
    """A layer whose Jacobian couples the samples of a batch, such as a BatchNorm in training.

    The scan ends before it and starts anew behind it; the layer itself is passed as in back-propagation.
    """

    pull: Callable[[Tensor], Tensor]
    """From the gradient at its output to the one at its input, both in the shapes of the points."""
    flops: float
    """Floating-point operations per sample."""


def apply(matrix: Matrix, vector: Tensor) -> Tensor:
    """`matrix · vector` for each sample: `(B, columns)` to `(B, rows)`."""
    if isinstance(matrix, Sparse):
        return (matrix.matrix @ vector.flatten()).view(matrix.batch, -1)
    return (matrix.values @ vector.unsqueeze(-1)).squeeze(-1)


def compose(left: Matrix, right: Matrix) -> Matrix:
    """`left · right` for each sample."""
    if isinstance(left, Dense) and isinstance(right, Dense):
        return Dense(left.values @ right.values)
    if isinstance(left, Sparse) and isinstance(right, Sparse):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # see csr
            product = Sparse(_product(left.matrix, right.matrix), left.batch)
        rows, columns = product.shape
        return product if product.stored <= WORTH_SPARSE * product.batch * rows * columns else product.to_dense()
    if isinstance(left, Sparse):
        assert isinstance(right, Dense)
        stacked = right.values.expand(left.batch, -1, -1).flatten(0, 1)
        return Dense((left.matrix @ stacked).unflatten(0, (left.batch, -1)))
    assert isinstance(right, Sparse)
    # (rightᵀ leftᵀ)ᵀ: a sparse matrix multiplies from the left
    stacked = left.values.mT.expand(right.batch, -1, -1).flatten(0, 1)
    return Dense((right.matrix.t().to_sparse_csr() @ stacked).unflatten(0, (right.batch, -1)).mT)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """The product of two CSR matrices, in pieces of rows of at most `MOST_PRODUCTS` scalar products each."""
    begins = left.crow_indices()
    made = pad(_products(left, right).cumsum(0), (1, 0))[begins]  # products before each row
    pieces = 1 + int(made[-1]) // MOST_PRODUCTS
    cuts = torch.searchsorted(made, torch.arange(pieces, device=made.device) * MOST_PRODUCTS).unique().tolist()
    found, whole = [], right.to_sparse_coo()
    for first, last in itertools.pairwise([*(cut for cut in cuts if cut < len(left)), len(left)]):
        inside = slice(int(begins[first]), int(begins[last]))
        rows = csr(
            begins[first : last + 1] - begins[first],
            left.col_indices()[inside],
            left.values()[inside],
            (last - first, left.shape[1]),
        )
        # through COO: torch's product of two CSR matrices on a CPU leaks memory
        part = torch.sparse.mm(rows.to_sparse_coo(), whole).coalesce().to_sparse_csr()
        found.append((part.crow_indices(), part.col_indices(), part.values()))
    if len(found) == 1:
        return csr(*found[0], (left.shape[0], right.shape[1]))
    sizes = torch.cat([crow[1:] - crow[:-1] for crow, _, _ in found])
    columns, values = (torch.cat([part[k] for part in found]) for k in (1, 2))
    return csr(pad(sizes.cumsum(0), (1, 0)), columns, values, (left.shape[0], right.shape[1]))


def _products(left: Tensor, right: Tensor) -> Tensor:
    """Number of scalar products that each stored entry of `left` takes part in."""
    begins = right.crow_indices()
    return (begins[1:] - begins[:-1])[left.col_indices()]


def apply_flops(matrix: Matrix) -> float:
    """Floating-point operations of `apply`, per sample on average: two for each stored entry."""
    if isinstance(matrix, Sparse):
        return 2 * matrix.stored / matrix.batch
    return 2.0 * matrix.shape[0] * matrix.shape[1]


def compose_flops(left: Matrix, right: Matrix) -> float:
    """Floating-point operations of `compose`, per sample on average."""
    if isinstance(left, Sparse) and isinstance(right, Sparse):
        return 2 * float(_products(left.matrix, right.matrix).sum()) / left.batch
    if isinstance(left, Sparse):
        return apply_flops(left) * right.shape[1]
    return apply_flops(right) * left.shape[0]


def csr(begins: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """A CSR tensor from its parts, which are not checked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its CSR tensors a beta, once a process
        return torch.sparse_csr_tensor(begins, columns, values, shape, check_invariants=False)
