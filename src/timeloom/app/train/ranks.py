"""A training over the processes of torchrun: how a batch is shared, and how results come together.

The processes form a mesh: those in its dimension "time" share every series, those in "data" have other series of a
batch. Each computes its part of the sum that the loss of the whole batch is; gradients are added up once a step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from timeloom.app.data import Examples
from timeloom.app.data.batches import collate
from timeloom.app.data.records import NUMERIC, PER_STEP, Task
from timeloom.app.errors import InputError
from timeloom.app.train.config import TrainConfig
from timeloom.app.train.model import SequenceModel
from timeloom.app.train.objective import Score, counted, loss_of
from timeloom.app.train.share import Part, Share
from timeloom.auto.layer_experience import LayerExperience
from timeloom.distributed import (
    RankError,
    slice_of,
    sum_over_time,
    time_mesh,
    time_parallel,
)
from timeloom.distributed.group import TIMEOUT, TimeGroup
from timeloom.distributed.mesh import group_of
from timeloom.nn.base import Recurrent

LONGEST_PATH = 4096
"""Bytes in which ranks tell each other the folder of a run."""
SEED_STRIDE = 7_368_787
"""Between the seeds of two ranks' dropout."""

Context = Callable[[], AbstractContextManager[Any]]


class Alone:
    """One process has everything."""

    first = True
    """Whether this process writes files and speaks to the user."""
    size = 1
    """Processes in all."""
    index = 0
    """Of this one among them."""
    seed = 0
    """Added to that of a step's dropout."""

    def device(self, asked: str) -> str:
        """The device of this process, by name."""
        return asked

    def folder(self, path: Path) -> Path:
        """The first process's, on all."""
        return path

    def in_turn(self) -> AbstractContextManager[None]:
        """The first process goes ahead; the others find what it fetched, computed and kept."""
        return nullcontext()

    def wait(self) -> None:
        """Until all processes are here."""

    def anywhere(self, flag: bool) -> bool:
        """Whether it is set on any process."""
        return flag

    def check(self, data: Sequence[Examples]) -> None:
        """Refuse what cannot be split."""

    def check_start(self, step: int) -> None:
        """Refuse to go on from different checkpoints."""

    def take(self, data: Examples, indices: list[int]) -> Share:
        """This process's share of a batch."""
        return Share(collate(data, indices), None, _labels(data, indices))

    def backward(self, model: SequenceModel, share: Share, context: Context, weights: Tensor | None) -> Tensor:
        """The loss of the whole batch; its gradients are in the parameters, those of all ranks added up."""
        assert share.batch is not None
        with context():
            loss = loss_of(share.answers(model, share.batch), share.batch.targets, model.task, weights=weights)
        loss.backward()
        return loss.detach()

    def sharing(self) -> AbstractContextManager[None]:
        """Inside, recurrent layers know that their series go on elsewhere."""
        return nullcontext()

    def counts(self, task: Task) -> bool:
        """Whether this process's answers are to be counted: those for whole series are the same on all time ranks."""
        return True

    def total(self, score: Score, data: Examples) -> Score:
        """The score of all processes, each of which has some of the answers to `data`."""
        return score

    def experiences(self, layer: Recurrent) -> dict[int, LayerExperience]:
        """What `auto` has learned of a layer."""
        return layer._experiences


class Ranks(Alone):
    """One of the processes that torchrun has started."""

    def __init__(self, time: int, device: str) -> None:
        world = int(os.environ["WORLD_SIZE"])
        if time and world % time:
            raise InputError(f"--time-ranks {time} does not divide the {world} processes: give a divisor of {world}")
        self._device = _own_device(device)
        self.mesh = time_mesh(time or None, device=torch.device(self._device).type)
        self._time = group_of(self.mesh)
        self._data, self._of = self.mesh.get_local_rank("data"), self.mesh["data"].size()
        everyone = dist.group.WORLD
        assert everyone is not None
        self._world = self._time if self._of == 1 else TimeGroup(everyone, TIMEOUT)
        self.size, self.index = self._world.size, self._world.rank
        self.first, self.seed = self.index == 0, SEED_STRIDE * self.index

    def device(self, asked: str) -> str:
        return self._device

    def folder(self, path: Path) -> Path:
        text = str(path).encode()
        if len(text) > LONGEST_PATH:
            raise InputError(f"the name of the folder has {len(text)} bytes; choose an --out of {LONGEST_PATH} at most")
        told = self._world.gather(torch.tensor(list(text.ljust(LONGEST_PATH, b"\0")), dtype=torch.uint8))[0]
        return Path(bytes(told.tolist()).rstrip(b"\0").decode())

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        if not self.first:
            self.wait()
        yield
        if self.first:
            self.wait()

    def wait(self) -> None:
        self.anywhere(False)

    def anywhere(self, flag: bool) -> bool:
        return bool(self._world.sum(torch.tensor(float(flag))) > 0)

    def check(self, data: Sequence[Examples]) -> None:
        for part in data:
            for name, series in zip(part.names, part.series, strict=True):
                if len(series) < self._time.size:
                    raise InputError(
                        f"{name} has {len(series)} steps, too few for {self._time.size} processes to share: give "
                        f"--time-ranks {len(series)} or fewer"
                    )

    def check_start(self, step: int) -> None:
        steps = self._world.gather(torch.tensor(step)).tolist()
        if len(set(steps)) > 1:
            raise InputError(
                f"the processes read different checkpoints, of steps {', '.join(map(str, steps))}: put the folder "
                f"of the run where all of them see it"
            )

    def take(self, data: Examples, indices: list[int]) -> Share:
        mine = indices[self._data :: self._of]
        labels = _labels(data, indices)
        if not mine:
            return Share(None, None, labels)
        steps = slice_of(max(len(data.series[i]) for i in mine), self.mesh)
        part = Part(steps.start, self.mesh) if self._time.size > 1 else None
        return Share(collate(data, mine, steps), part, labels)

    def backward(self, model: SequenceModel, share: Share, context: Context, weights: Tensor | None) -> Tensor:
        loss = model.offset.new_zeros(())
        if share.batch is not None:
            with self.sharing():
                with context():
                    loss = loss_of(share.answers(model, share.batch), share.batch.targets, model.task, "sum", weights)
                    if model.per_step:
                        loss = sum_over_time(loss, self.mesh)
                    loss = loss / share.labels
                loss.backward()
        # Every time rank had a loss of its own, the same as the others': their sum is time.size too large.
        held = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        parts = [*held, loss.detach().to(model.offset.dtype)]
        flat = self._world.sum(torch.cat([tensor.reshape(-1) for tensor in parts])) / self._time.size
        *grads, _ = flat.split([tensor.numel() for tensor in parts])
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad.view_as(parameter)
        return flat[-1]

    def sharing(self) -> AbstractContextManager[None]:
        return time_parallel(self.mesh)

    def counts(self, task: Task) -> bool:
        return task in PER_STEP or self._time.rank == 0

    def total(self, score: Score, data: Examples) -> Score:
        numbers = [score.count, score.loss_sum, score.absolute_sum, *score.confusion.flatten().tolist()]
        count, loss_sum, absolute, *confusion = self._world.sum(torch.tensor(numbers, dtype=torch.float64)).tolist()
        score.count, score.loss_sum, score.absolute_sum = int(count), loss_sum, absolute
        score.confusion = torch.tensor(confusion).round().long().reshape(score.confusion.shape)
        if score.task in NUMERIC:
            targets = torch.cat([target.flatten() for target in data.targets]).double()
            score.targets, score.answers = [targets[~targets.isnan()]], []
        return score

    def experiences(self, layer: Recurrent) -> dict[int, LayerExperience]:
        return layer._experiences if self._time.size == 1 else self._time.experiences(layer)

    def tell(self, error: BaseException) -> None:
        """Let the others know that this process stops."""
        if isinstance(error, RankError) and self._world is not self._time:
            self._world.faults.post(error)  # those that share no series with it have not heard of it
        self._world.stopped(error)


@contextmanager
def joined(config: TrainConfig) -> Iterator[Alone]:
    """This process among those of its launcher, which hear of its errors as it hears of theirs."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Alone()
        return
    started = not dist.is_initialized()
    ranks = Ranks(config.time_ranks, config.device)
    try:
        yield ranks
    except BaseException as error:
        ranks.tell(error)
        if isinstance(error, RankError | NotImplementedError):  # both say what to do
            raise InputError(str(error)) from error
        raise
    if started:
        dist.destroy_process_group()


def _labels(data: Examples, indices: list[int]) -> int:
    return max(sum(int(counted(data.targets[i]).sum()) for i in indices), 1)


def _own_device(asked: str) -> str:
    """Every process of a machine has a GPU of its own, or all of them compute on its cores."""
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if asked not in ("auto", "cuda"):
        raise InputError(f"--device {asked}: of many processes each takes a GPU of its own; give --device cuda or cpu")
    local, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= there:
        raise InputError(f"{there} GPUs for {local + 1} processes or more: start as many as GPUs, or give --device cpu")
    torch.cuda.set_device(local)
    return f"cuda:{local}"
