"""The training loop.

Order, dropout and learning rate of a step are functions of the configuration and the step's number, and a checkpoint
holds everything else: a resumed run is the same run, to the solver's tolerance where series begin at their states of
the epoch before, which no checkpoint holds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from timeloom.app.data import Examples, Splits, batches
from timeloom.app.data.batches import order
from timeloom.app.data.prefetch import Prefetch
from timeloom.app.device import device_of
from timeloom.app.errors import InputError
from timeloom.app.machine import LoadMeter
from timeloom.app.train import checkpoint
from timeloom.app.train.board import Board
from timeloom.app.train.checkpoint import BEST, LAST, Checkpoint, Progress
from timeloom.app.train.comparison import TorchBeside, chosen_steps, synchronize, time_left
from timeloom.app.train.config import TrainConfig
from timeloom.app.train.ending import resume_command
from timeloom.app.train.metrics_file import Metrics
from timeloom.app.train.model import SequenceModel, solver_of
from timeloom.app.train.objective import Score, balancing, check_objective
from timeloom.app.train.ranks import Alone
from timeloom.app.train.run_files import FOLD
from timeloom.app.train.setup import autocast, build_model, learning_rate, make_optimizer
from timeloom.app.train.share import Share
from timeloom.app.train.solved import Solved
from timeloom.inspection.trials import reports_of
from timeloom.report import of_reports
from timeloom.solve.warm_starts import WarmStarts
from timeloom.solvers import Sequential

Show = Callable[[dict[str, Any]], None]
"""Told every row of metrics as it is made."""

WARM_ON = ("cuda",)
"""Where series begin at their states of the epoch before: on a CPU that saves too little to give up that a run that is
resumed is the same bit by bit."""


class Trainer:
    """Trains a model on its data, in a folder of its own."""

    def __init__(
        self, config: TrainConfig, splits: Splits, folder: Path, resume: Checkpoint | None, show: Show,
        ranks: Alone | None = None,
    ) -> None:  # fmt: skip
        self.config, self.splits, self.folder, self.show = config, splits, folder, show
        self.ranks = ranks or Alone()
        self.device = device_of(self.ranks.device(config.device))
        self.model = build_model(config, splits.task, len(splits.classes), splits.channels, self.device)
        self.optimizer = make_optimizer(self.model, config.optim)
        check_objective(config.optim.metric, config.optim.class_weights, splits.task)
        self._weights = self._class_weights()
        self.progress = Progress()
        self.load = LoadMeter()
        self.warm = WarmStarts(limit=config.warm_starts * 2**20)
        self.interrupted = self._asked_to_stop = self._updating = False
        self._experience: dict[str, dict[str, Any]] = {}
        self.beside = TorchBeside(
            lambda model, optimizer, share: self._update(model, optimizer, share, Alone()), self._copy_optimizer
        )
        self._steps_in_batch = 0
        self._batches = Prefetch(self._share_of)
        if resume is None:
            if config.normalize:
                self.model.fit_scale(splits.train)
        else:
            self._restore(resume)
        self._kept = self.resumed_after = self.progress.step
        self.per_epoch = math.ceil(len(splits.train) / config.optim.batch)
        self.total = self.per_epoch * config.optim.epochs  # steps of all epochs
        self.board = Board(folder, self.progress.step) if config.tensorboard and self.ranks.first else None
        self.metrics = Metrics(folder, self.progress.step, writes=self.ranks.first)
        self.compared = chosen_steps(
            0 if isinstance(solver_of(config.solver), Sequential) else config.compare, self.total
        )

    def _restore(self, resume: Checkpoint) -> None:
        mine = (self.splits.classes, self.splits.channels, self.splits.columns)
        if (resume.classes, resume.channels, resume.columns) != mine:
            raise InputError(f"{self.splits.source}: the data have changed since the run began; start a new one")
        self.model.load_state_dict(resume.weights)
        checkpoint.restore_optimizer(self.optimizer, resume.optimizer)
        checkpoint.restore_experience(self.model, resume.experience, self.ranks.experiences)
        self.progress = resume.progress

    def run(self) -> None:
        """Train to the end, or until the validation has stopped improving, or until `interrupt` was called."""
        try:
            if self.progress.step == 0:
                self._write(LAST)  # a disk without room is told before the work; there is always a run to go on with
            while not self.ended and not self.interrupted:
                self._one_step()
                step = self.progress.step
                if step % self.per_epoch == 0:
                    self._validate()
                if step % self.per_epoch == 0 or step % self.config.save_every == 0 or self.interrupted:
                    self._write(LAST)
            self.ranks.wait()  # for the first process to have written all: torchrun ends it with the first that leaves
        finally:
            self.close()

    def close(self) -> None:
        """Let go of files and threads."""
        self._batches.close()
        self.metrics.close()
        if self.board is not None:
            self.board.close()

    def interrupt(self) -> None:
        """Stop after the step under way, with a checkpoint."""
        self._asked_to_stop = True

    @property
    def again(self) -> str:
        """The command that goes on with this run, and with the other folds where it is of one."""
        of_folds = self.config.folds > 0 and self.folder.name.startswith(FOLD)
        return resume_command(self.folder.parent if of_folds else self.folder)

    def last_words(self) -> str:
        """Called by another thread, to end now: keep the steps that are finished, and say how to go on."""
        step, again = self.progress.step, self.again
        if self._updating or not self.ranks.first:  # the weights are between two steps
            return f"stopped; the last checkpoint is in {self.folder}, go on with: {again}"
        checkpoint.save(self.folder / LAST, self._checkpoint(False, self._experience))
        return f"stopped after step {step}; go on with: {again}"

    @property
    def epoch(self) -> int:
        """Epochs that are finished."""
        return self.progress.step // self.per_epoch

    @property
    def out_of_patience(self) -> bool:
        patience = self.config.optim.patience
        return patience > 0 and self.progress.epochs_without >= patience and self.progress.step < self.total

    @property
    def ended(self) -> bool:
        return self.progress.step >= self.total or self.out_of_patience

    def _one_step(self) -> None:
        step, begin = self.progress.step, time.perf_counter()
        share = self._batches.take(step)
        self._steps_in_batch = 0 if share.batch is None else len(share.batch.inputs)
        fetched = time.perf_counter()
        if step in self.compared and self.ranks.first:
            self._compare(step)
        if step + 1 < self.total:
            self._batches.begin(step + 1)
        self._seed(step)
        self._experience = checkpoint.experience_of(self.model, self.ranks.experiences)
        started = time.perf_counter()
        rate = self._set_rate(self.optimizer, step)
        with self._begun(step):
            loss = self._update(self.model, self.optimizer, share, self.ranks).item()
        synchronize(self.device)
        seconds = time.perf_counter() - started
        if not math.isfinite(loss):
            raise self._diverged(f"the loss of step {step + 1} is {loss}")
        self.progress.step += 1
        self.progress.elapsed += seconds
        self._updating = False
        self._add(
            kind="step", epoch=step // self.per_epoch + 1, loss=loss, seconds=seconds, data_seconds=fetched - begin,
            lr=rate, elapsed=self.progress.elapsed, **asdict(Solved.of(self.model, self._steps_in_batch)),
        )  # fmt: skip
        self.interrupted = self.ranks.anywhere(self._asked_to_stop)

    def _diverged(self, sign: str) -> InputError:
        if self.progress.step == 0:
            return InputError(f"{sign}, before anything was learned: look for values or targets far from all others")
        kept = f"; the weights of step {self._kept} are in {self.folder / LAST}"
        return InputError(
            f"{sign}: the training diverged. Lower --lr (now {self.config.optim.lr:g}) or --clip"
            f"{kept if self._kept else ', and start it again'}"
        )

    def _share_of(self, step: int) -> Share:
        """What this process has of the batch of a step, where the model is."""
        return self._taken(step, self.ranks)

    def _taken(self, step: int, ranks: Alone) -> Share:
        return ranks.take(self.splits.train, self._chosen(step)).to(self.device, self.model.offset.dtype)

    def _chosen(self, step: int) -> list[int]:
        """The series of a step's batch."""
        epoch, position = divmod(step, self.per_epoch)
        size = self.config.optim.batch
        return order(len(self.splits.train), self.config.seed, epoch)[position * size : (position + 1) * size]

    def _begun(self, step: int) -> AbstractContextManager[None]:
        """Inside, series begin at their states of the epoch before, in one process and unless told otherwise."""
        wanted = self.config.warm_starts > 0 and self.ranks.size == 1 and self.device.type in WARM_ON
        return self.warm.batch(self._chosen(step)) if wanted else nullcontext()

    def _update(self, model: SequenceModel, optimizer: torch.optim.Optimizer, share: Share, ranks: Alone) -> Tensor:
        """Forward, backward, clip, update; the loss."""
        model.train()
        optimizer.zero_grad()
        # On a GPU, autograd's own thread costs the host 0.1 ms and more of a step; there is one device to work for.
        with torch.autograd.set_multithreading_enabled(self.device.type != "cuda"):
            loss = ranks.backward(model, share, self._autocast, self._weights)
        if self.config.optim.clip:
            nn.utils.clip_grad_norm_(model.parameters(), self.config.optim.clip)
        self._updating = model is self.model
        optimizer.step()
        return loss

    def _class_weights(self) -> Tensor | None:
        optim, splits = self.config.optim, self.splits
        if optim.class_weights == "none":
            return None
        return balancing(splits.train.targets, len(splits.classes)).to(self.device, self.model.offset.dtype)

    def _compare(self, step: int) -> None:
        """The same step by torch's layers, on a copy, in one process."""
        times = [row["seconds"] for row in self.metrics.of("torch")]
        left, load = time_left(times), LoadMeter()
        if self.beside.expected is not None or left < (times[-1] if times else 0.0):
            return
        theirs = self.beside(self.model, self._taken(step, Alone()), lambda: self._seed(step), left)
        if theirs is not None:
            self._add(
                kind="torch", step=step + 1, seconds=theirs.seconds, loss=theirs.loss, threads=theirs.threads,
                others=load.read().others,
            )  # fmt: skip

    def _copy_optimizer(self, model: SequenceModel) -> torch.optim.Optimizer:
        optimizer = make_optimizer(model, self.config.optim)
        self._set_rate(optimizer, self.progress.step)
        return optimizer

    def _validate(self) -> None:
        """Measure on the validation series, and keep the weights if they are the best so far."""
        solved = of_reports(reports_of(self.model), self._steps_in_batch)  # of the last training step
        score = self.measure(self.splits.valid)
        epoch = self.epoch
        if not math.isfinite(score.loss):
            raise self._diverged(f"the validation loss of epoch {epoch} is {score.loss}")
        progress, metric = self.progress, score.by(self.config.optim.metric)
        better, best = metric > progress.best_metric, metric >= progress.best_metric
        progress.epochs_without = 0 if better else progress.epochs_without + 1
        if best:  # of equally good epochs the latest: its weights were trained for longer
            progress.best_loss, progress.best_metric, progress.best_epoch = score.loss, metric, epoch
            self._write(BEST, weights_only=True)
        self._add(
            kind="validation", epoch=epoch, loss=score.loss, quality=score.quality, elapsed=self.progress.elapsed,
            best=best, better=better, solved=solved,
        )  # fmt: skip

    def measure(self, data: Examples) -> Score:
        """Loss and quality of the present weights on labelled series."""
        model, ranks = self.model, self.ranks
        model.eval()
        score = Score(model.task, len(self.splits.classes))
        with torch.no_grad():
            for indices in batches(len(data), self.config.optim.batch):
                share = ranks.take(data, indices).to(self.device, model.offset.dtype)
                if share.batch is None:
                    continue
                with self._autocast(), ranks.sharing():
                    answers = share.answers(model, share.batch)
                if ranks.counts(model.task):
                    score.add(answers.to(model.offset.dtype), share.batch.targets)
        return ranks.total(score, data)

    def use_best(self) -> None:
        """Put back the weights that did best on the validation series."""
        self.model.load_state_dict(checkpoint.load(self.folder / BEST).weights)

    def _checkpoint(self, weights_only: bool, experience: dict[str, dict[str, Any]] | None = None) -> Checkpoint:
        splits = self.splits
        about = (self.config, splits.task, splits.classes, splits.channels, self.progress, self.model.state_dict())
        if weights_only:
            return Checkpoint(*about, columns=splits.columns)
        if experience is None:
            experience = checkpoint.experience_of(self.model, self.ranks.experiences)
        return Checkpoint(*about, checkpoint.optimizer_tensors(self.optimizer), experience, splits.columns)

    def _write(self, name: str, weights_only: bool = False) -> None:
        """A checkpoint, unless the last step has spoilt the weights: then the one before it stays."""
        if not all(weights.isfinite().all() for weights in self.model.parameters()):
            raise self._diverged(f"the weights after step {self.progress.step} are not finite")
        if self.ranks.first:
            with self.resumable():
                checkpoint.save(self.folder / name, self._checkpoint(weights_only))
            self._kept = self.progress.step if name == LAST else self._kept

    @contextmanager
    def resumable(self) -> Iterator[None]:
        """An error inside is told with how to go on, where there is something to go on from."""
        try:
            yield
        except InputError as error:
            kept = (self.folder / LAST).is_file()
            raise InputError(f"{error} ({self.again})" if kept else str(error)) from error

    def _add(self, **row: Any) -> None:
        row = {"step": self.progress.step, **row}
        with self.resumable():
            self.metrics.add(**row)
            if self.board is not None:
                self.board.add(row)
        self.show(row)

    def _seed(self, step: int) -> None:
        """Dropout of a step is the same whether or not the run was interrupted before it."""
        torch.manual_seed((self.config.seed + 1) * 1_000_003 + step + self.ranks.seed)

    def _set_rate(self, optimizer: torch.optim.Optimizer, step: int) -> float:
        rate = learning_rate(self.config.optim, step, self.total)
        for group in optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _autocast(self) -> AbstractContextManager[Any]:
        return autocast(self.config, self.device)
