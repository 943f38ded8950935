"""Other processes beside a GPU in use: forked and spawned children, DataLoader's workers."""

from __future__ import annotations

from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import timeloom as tl
from tests.gpu.around import results, trio
from tests.gpu.checks import Check, as_good_as_torch

WAIT = 40


def processes() -> list[Check]:
    return [
        Check("a forked child runs a layer on the CPU", _forked),
        Check("a spawned child runs a layer of this device", _spawned),
        Check("workers feed a layer of this device", _fed),
    ]


def _small() -> Tensor:
    """Outputs of a layer on the CPU, the same in every process.

    Without gradients: torch itself refuses a backward pass in a forked child once autograd has run on a GPU.
    """
    torch.manual_seed(1)
    layer, x = tl.LSTM(2, 8, solver=tl.solvers.Shooting(chunk=16)), torch.randn(64, 2, 2)
    with torch.no_grad():
        found: Tensor = layer(x)[0]
    return found


def _run_small_there(answers: Any) -> None:
    torch.set_num_threads(1)  # after a fork more would wait for ever, in torch's own layers too
    answers.put(_small().numpy())


def _forked(device: str) -> str:
    own, theirs, exact = trio("gru", 32, device, tl.solvers.Shooting(chunk=32))
    x = torch.randn(300, 2, 8, device=device)
    results(own, x)  # the device is in use before the fork
    found = _answer("fork", _run_small_there)
    torch.testing.assert_close(torch.from_numpy(found), _small(), rtol=1e-5, atol=1e-6)
    return as_good_as_torch(results(own, x), results(theirs, x), results(exact, x.double()))  # and after it


def _run_there(answers: Any, layer: Any, x: Tensor) -> None:
    with torch.no_grad():
        answers.put(layer(x)[0].cpu().numpy())


def _spawned(device: str) -> str:
    """The layer and its input are shared by torch.multiprocessing, including memory of the device."""
    torch.manual_seed(0)
    layer = tl.GRU(8, 32, device=device, solver=tl.solvers.Shooting(chunk=32))
    x = torch.randn(300, 2, 8, device=device)
    with torch.no_grad():
        right = layer(x)[0].cpu()
    found = torch.from_numpy(_answer("spawn", _run_there, layer, x))
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)
    return f"{float((found - right).abs().max()):.1e} apart"


def _answer(method: str, work: Any, *given: Any) -> Any:
    context = mp.get_context(method)
    answers = context.Queue()
    child = context.Process(target=work, args=(answers, *given))
    child.start()
    found = answers.get(timeout=WAIT)
    child.join(WAIT)
    if child.exitcode != 0:
        raise AssertionError(f"a {method} child ended with status {child.exitcode}")
    return found


class _Waves(Dataset[Tensor]):
    """A dataset whose items a layer computes in the worker."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layer = tl.GRU(8, 8, solver=tl.solvers.Shooting(chunk=16))

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        torch.set_num_threads(1)
        with torch.no_grad():
            found: Tensor = self.layer(torch.linspace(-index, index, 800).view(100, 8))[0]
        return found


def _fed(device: str) -> str:
    own, theirs, exact = trio("lstm", 32, device, tl.solvers.Shooting(chunk=32))
    data, said, seen = _Waves(), "", 0
    right = torch.stack([data[index] for index in range(len(data))])
    for batch in DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork"):
        torch.testing.assert_close(batch, right[seen : seen + len(batch)])
        x, seen = batch.transpose(0, 1).contiguous().to(device), seen + len(batch)
        said = as_good_as_torch(results(own, x), results(theirs, x), results(exact, x.double()))
    if seen != len(data):
        raise AssertionError(f"{seen} of {len(data)} came")
    return said
