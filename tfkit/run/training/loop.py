"""The training loop: one file, from the first step to the last.

A step is a pure function of the run, the weights, and its number: its examples, dropout and learning rate are computed
from the seed and the number, and no random generator is carried from step to step. A run that resumes from a checkpoint
therefore trains the same steps as an uninterrupted run, and an evaluation cannot affect training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tfkit.building.edits import MAX_DIFFERENCES, model_edits
from tfkit.building.initialize import seed_device
from tfkit.building.instrument import instrument_model
from tfkit.building.placement import GLOBAL_GENERATORS, thread_count
from tfkit.decoding.generate import GENERATION
from tfkit.errors import Diagnostic, Invalid, SpecError, quoted
from tfkit.nn import full_tensor
from tfkit.run.checked_run import Run
from tfkit.run.contract import Batch, Callback, Data, LossSum, Ratio
from tfkit.run.training.changing import ChangingValues
from tfkit.run.training.checkpoint import (
    LOSS,
    Checkpoint,
    LossState,
    Restored,
    RunStore,
    named_for,
    optimizer_tensors,
    restore_model,
    tensors_of_owner,
)
from tfkit.run.training.evaluate import batch_tensors, evaluate_splits, loss_sums, precision_context
from tfkit.run.training.finite import broken_weight, first_not_finite, is_finite
from tfkit.run.training.guarded import guarded_component_call, guarded_loss_call
from tfkit.run.training.layers import prepare_layers, use_float8
from tfkit.run.training.memory import MicroBatch
from tfkit.run.training.noise import Noise
from tfkit.run.training.optimizer import groups_of
from tfkit.run.training.order import indices_of, stream_seed
from tfkit.run.training.parametrize import parameter_rules
from tfkit.run.training.prefetch import Prefetch
from tfkit.run.training.processes import Processes, check_count
from tfkit.run.training.start import set_initial_weights, start_optimizer
from tfkit.run.training.task_scores import evaluate_tasks, task_numbers
from tfkit.torch_private.hooks import observing_hooks

FINISHED, INTERRUPTED, DIVERGED = "finished", "interrupted", "diverged"
HELP = "a lower learning rate, a longer warmup or `clip` may help"


def _is_built_in(kind: object) -> bool:
    """Return True for callbacks and losses of tfkit, which do not change modules."""
    return type(kind).__module__.partition(".")[0] == "tfkit"


class DivergedError(SpecError):
    """A loss, a gradient or a weight of a run that is not finite."""


class _StopRequestedError(Exception):
    """The process must end before the run is finished."""


class Trainer:
    """A run in this process.

    Args:
        run: the run.
        record: the store that the run is written to, and resumed from.
        watchers: additional observers, which are not callbacks of the run.
        until: the step after which this process ends; the run can be resumed later.
        should_stop: returns True as soon as the process must end, for instance after a signal.
        processes: the processes that train together; by default, this process alone.

    Raises:
        SpecError: the model cannot be built, or does not fit the run.
    """

    def __init__(
        self,
        run: Run,
        record: RunStore,
        *,
        watchers: Sequence[Callback] = (),
        until: int | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        processes: Processes | None = None,
    ) -> None:
        self.run, self.record, self.config = run, record, run.config
        self.seed, self.steps, self.step = run.config.seed, run.steps, 0
        self.data: Data = run.data
        self._terms = run.config.loss.terms
        self.skipped = 0
        """Number of steps without an update, because their loss or gradient was not finite."""
        self.micro_batch = MicroBatch(run, lambda text: self.text("micro_batch", text))
        self.ended: str | None = None
        self._begins = True
        """False if the run continues from one of its checkpoints."""
        self._saved: tuple[int, str | None] | None = None
        """The step and `ended` of the latest checkpoint, which need not be written again."""
        self._until = run.steps if until is None else until
        self._should_stop = should_stop
        self._processes = processes or Processes()
        self._examples = run.data.examples("train", run.config.data.order)
        self._batches = Prefetch(self.batch, min(self._until, run.steps))
        self._callbacks = [self._callback(number) for number in range(len(run.config.callbacks))]
        self._rejecting = [n for n, call in enumerate(self._callbacks) if type(call).reject is not Callback.reject]
        """Indices of callbacks that can reject an update. Without any, processes need not agree before an update."""
        self._watchers = watchers
        self._loss_numbers: frozenset[str] | None = None
        """Names of the further numbers of the loss, once it has returned any."""
        self._line: dict[str, float] | None = None
        """The numbers of the current line, to which observers may add; None outside of `on_step` and `on_eval`."""
        self._set_up()

    def _set_up(self) -> None:
        """Build the model, its loss, and its optimizer."""
        config = self.config
        check_count(self.run, self._processes.count)
        try:
            self.device = self._processes.device(config.machine.device)
        except ValueError as error:
            raise self.run.error(str(error), "machine", "device") from None
        self.model = self._processes.build(self.run, self.device)
        rules = parameter_rules(self.run)
        self.notes = set_initial_weights(self.model, self.run, rules)
        """Descriptions of the initial weights and of float8, and remarks about tasks, by name."""
        self.notes |= {task.name: task.remark for task in self.run.tasks if task.remark is not None}
        instrument_model(self.model, in_run=True)
        self.model.meta[GENERATION] = self.run.generation
        self._values = ChangingValues(self.run, self.model)
        self._edits = self._changes()
        with self.run.guarded(config.loss, "`build`", "loss"), self._observed(config.loss, "the loss"):
            try:
                loss = config.loss.build(self.model)
            except ValueError as error:
                raise self.run.error(str(error), "loss") from error
            self._loss_state = LossState(loss, self.model, config.loss)
        self._check_unedited()
        if name := self._loss_state.trained:
            message = f"the loss `{config.loss.kind_name()}` must not have trained parameters; got `{name}`"
            help = "make it a node of the model, which the optimizer trains, or call `requires_grad_(False)`"
            raise self.run.error(message, "loss", help=help)
        if config.machine.float8 is not None:
            self.notes["float8"] = use_float8(self.model, self.run, self.device)
        prepare_layers(self.model, config.machine)
        self._edits = self._changes()
        self._values.follow(loss)
        self.loss = torch.compile(loss) if config.machine.compile is True else loss
        self._loss_module = loss
        self._after_step: Callable[[int, int], object] | None = getattr(loss, "after_step", None)
        with self.run.guarded(config.optimizer, "`build`", "optimizer"):
            self.optimizer = config.optimizer.build(groups_of(self.model, config.optimizer, rules))
        self.notes |= start_optimizer(self.model, self.optimizer, self.run)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]

    def _changes(self) -> list[str]:
        """Return the edits of the model, if code outside of tfkit could cause any. Hooks may only read values."""
        if all(map(_is_built_in, (*self._callbacks, self.config.loss))):
            return []
        with self._values.as_built():
            return [text for text, _ in model_edits(self.model, hooks=False)]

    def _check_unedited(self) -> None:
        """Raise SpecError if the loss or a callback changed modules of the model: checkpoints contain its spec."""
        if texts := [text for text in self._changes() if text not in self._edits]:
            message = "the model must compute what its spec describes; the loss or a callback changed its modules"
            raise SpecError(
                Diagnostic(message, notes=tuple(texts[:MAX_DIFFERENCES]), help="change `model` of the run instead")
            )

    def _callback(self, number: int) -> Callback:
        config = self.config.callbacks[number]
        with self.run.guarded(config, "`build`", "callbacks", str(number)):
            return config.build()

    # ---- from the first step to the last ----

    def train(self) -> str:
        """Train all remaining steps; return `finished`, `interrupted`, or a callback's reason to stop.

        Raises:
            DivergedError: a loss, a gradient or a weight is not finite; the weights of the last checkpoint stay.
        """
        with thread_count(self.config.machine.threads):
            try:
                self._restore()
                return self._train()
            finally:
                self._batches.close()
                self._processes.close()
                self.record.close()

    def _train(self) -> str:
        for name, text in self.notes.items() if self._begins else ():
            self.text(name, text)
        self._notify("on_start")
        self._check_unedited()
        try:
            while not self.ended:
                self._check_end()
                self._evaluate()
                self._advance()
        except _StopRequestedError:
            pass
        if self._saved != (self.step, self.ended):
            self._save()
        self._processes.finish_saving()
        self._notify("on_end")
        return self.ended or INTERRUPTED

    def _advance(self) -> None:
        """Train the next step, or end the run after the last step."""
        if self.ended:
            return
        if self.step == self.steps:
            self.ended = FINISHED
            return
        self._update()
        interval = self.config.checkpoint.every
        if interval and self.step % interval == 0 and self.step < self.steps:
            self._save()

    # ---- one step ----

    def _update(self) -> None:
        """Train one step."""
        step = self.step + 1
        factor = self.run.factor(step)
        self._values.apply(step)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        losses, further = self._gradients(self._batches.take(step), step)
        self._batches.wait()
        loss = self._weighted(losses)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip or math.inf)
        norm = full_tensor(norm)
        if not is_finite(loss, norm):
            self._skip_step(step)
            return
        of_outputs = dict(zip((f"{name}.loss" for name in self._terms), losses.tolist(), strict=False))
        numbers = {"loss": loss.item(), **of_outputs, "lr": self._rates[0] * factor, "grad_norm": norm.item()}
        rejected = self._rejected(numbers := numbers | further)
        if not rejected:
            self.optimizer.step()
            if self._after_step is not None:
                with guarded_loss_call(self.run, self.model, "`after_step`"), torch.no_grad():
                    self._after_step(step, self.steps)
        self.step = step
        if rejected:
            self.text("rejected", rejected)
        self._report("on_step", numbers)

    def _rejected(self, numbers: Mapping[str, float]) -> str | None:
        """Return the first reason of a callback to skip an update. Every callback receives the numbers of the step."""
        reasons = []
        for number in self._rejecting:
            with self._guarded(number, "reject"):
                reasons.append(self._callbacks[number].reject(self, MappingProxyType(numbers)))
        return self._processes.agreed(next(filter(None, reasons), None)) if reasons else None

    def batch(self, step: int) -> Batch:
        """Return the examples of a step that this process trains on."""
        order, examples = self.config.data.order, len(self._examples)
        indices = indices_of(order, self.seed, step, self.run.sizes, examples=examples)
        return self.run.cut(self._examples.batch(self._processes.rows(indices)), step)

    def _gradients(self, batch: Batch, step: int) -> tuple[Tensor, dict[str, float]]:
        """Compute the loss of a step and its gradients, in smaller micro-batches if memory runs out."""
        return self.micro_batch.fit(partial(self._summed, batch, step))

    def _summed(self, batch: Batch, step: int, size: int) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of each output and further numbers, and add up gradients, from `size` sequences at a time.

        The sums of all micro-batches and processes are divided by the number of positions that count in all of them. If
        the loss counts for itself, this number is known only afterwards, and the gradients are divided at the end.
        """
        self.optimizer.zero_grad()
        counts = batch.counts_of(self._terms)
        totals = self._processes.sum(torch.tensor(counts, device="cpu")).clamp(min=1).tolist()
        total, count = torch.zeros(len(counts), device=self.device), None
        ratios: list[dict[str, Ratio]] = []
        rows = self._processes.rows(np.arange(self.run.sizes.value(step)))
        before = None if _is_built_in(self.config.loss) else self._loss_state.versions()
        with GLOBAL_GENERATORS:
            seed_device(self.device, stream_seed(self.seed, "noise", step, self._processes.rank))
            for start in range(0, batch.size, size):
                part = batch.rows(start, start + size)
                noise = partial(Noise.of, self.device, self.seed, "loss", step, rows[start : start + size])
                with precision_context(self.run, self.device):
                    sums = self._sums(part, noise)
                    losses = sums.total
                    if sums.count is None:
                        losses = torch.stack([of_term / n for of_term, n in zip(losses, totals, strict=True)])
                self._weighted(losses).backward()
                total += losses.detach()
                if sums.count is not None:
                    count = (0.0 if count is None else count) + torch.as_tensor(sums.count, dtype=torch.float64).cpu()
                ratios.append(dict(sums.numbers))
        if before is not None and (changed := self._loss_state.changed(before)):
            message = f"the loss `{self.config.loss.kind_name()}` must change its state only in `after_step`"
            help = "move the change into `after_step(step, steps)` of the module"
            raise self.run.error(f"{message}; its `forward` changed `{changed}`", "loss", help=help)
        total = self._processes.sum(total)
        if count is not None:
            divisor = float(self._processes.sum(count)) or 1.0
            total = total / divisor
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= divisor
        return total, self._means(ratios)

    def _means(self, ratios: Sequence[Mapping[str, Ratio]]) -> dict[str, float]:
        """Return the further numbers of a step, from the numbers of its micro-batches, over all processes."""
        names = list(ratios[0])
        if self._loss_numbers is None:
            self._loss_numbers = frozenset(names)
            if taken := sorted(self._loss_numbers & self._reserved):
                raise self.run.error(f"the loss must not log `{taken[0]}`, which the run logs", "loss")
        if any(set(part) != self._loss_numbers for part in ratios):
            raise self.run.error("the loss must return the same `numbers` for all micro-batches", "loss")
        if not names:
            return {}
        sums = [[sum(float(getattr(part[name], of)) for part in ratios) for of in ("total", "count")] for name in names]
        summed = self._processes.sum(torch.tensor(sums, dtype=torch.float64, device="cpu")).tolist()
        return {name: total / (count or 1.0) for name, (total, count) in zip(names, summed, strict=True)}

    def _sums(self, batch: Batch, noise: Callable[[], Noise]) -> LossSum:
        """Return the result of the loss. Raise SpecError if the loss fails, or has no gradient."""
        with guarded_loss_call(self.run, self.model, "`forward`"):
            result = loss_sums(self.loss, self.run, self.model, self.device, batch, noise)
        if not result.total.requires_grad:
            message = f"the loss `{self.config.loss.kind_name()}` must have a gradient; got a value that depends on no"
            help = "compute the loss from outputs of the model, without `detach` and `torch.no_grad`"
            raise self.run.error(f"{message} trained weight", "loss", help=help)
        return result

    def _weighted(self, losses: Tensor) -> Tensor:
        """Return the loss from the losses of all outputs."""
        terms = self._values.terms.values()
        return (losses * losses.new_tensor([term.weight for term in terms])).sum() if terms else losses[0]

    def _skip_step(self, step: int) -> None:
        """Skip a step whose update is not finite, or raise DivergedError if no more steps may be skipped."""
        cause = first_not_finite(self.model, lambda: self._gradients(self.batch(step), step))
        cause = self._processes.agreed(cause) or "every output is finite, but their loss is not"
        if self.skipped < self.config.nonfinite.skip:
            self.step, self.skipped = step, self.skipped + 1
            self.text("skipped", cause)
            return
        message = f"step {step:,} has a loss or a gradient that is not finite: {cause}"
        raise self._diverged(message, "the step did not change the weights")

    def _diverged(self, message: str, note: str) -> DivergedError:
        """End the run as diverged, write the cause to the record, and return the error to raise."""
        self.ended = DIVERGED
        self.text(DIVERGED, message)
        return DivergedError(Diagnostic(message, notes=(note,), help=HELP))

    # ---- between steps ----

    def _evaluate(self) -> None:
        """Evaluate before the first step, at each multiple of `every`, and after the last."""
        config = self.config.eval
        if config is not None and (self.step % config.every == 0 or self.step == self.steps):
            self._report("on_eval", self.evaluate(self._check_end))

    def evaluate(self, between: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Evaluate the current weights; see `tfkit.run.contract.Training`. `between` may raise to end it early."""
        config = self.config.eval
        if config is None:
            return {}
        numbers = evaluate_splits(
            self.model,
            self._values.run,
            config.splits,
            config.metrics,
            micro_batch=self.micro_batch,
            between=between,
            processes=self._processes,
            loss=self._loss_module,
        )
        if tasks := self.run.tasks:
            scores = evaluate_tasks(
                self.model,
                self._values.run,
                tasks,
                micro_batch=self.micro_batch,
                between=between,
                processes=self._processes,
            )
            numbers |= task_numbers(tasks, scores)
        self._processes.reshard(self.model)
        return numbers

    def _check_end(self) -> None:
        """Raise if the process must end. Before an evaluation, so that a resumed run does not repeat it."""
        stop = self._processes.agreed(INTERRUPTED if self._should_stop() else None)
        if stop or self._until <= self.step < self.steps:
            raise _StopRequestedError

    def _save(self) -> None:
        """Write a checkpoint. If a weight is not finite, raise an error, and keep the previous checkpoint."""
        self._check_unedited()
        if cause := self._processes.agreed(broken_weight(self.model)):
            message = f"after step {self.step:,} {cause}: no checkpoint is written"
            raise self._diverged(message, "the last checkpoint stays")
        states = tuple(map(self._state, range(len(self._callbacks))))
        self._values.describe()
        tensors = named_for(LOSS, self._loss_state.tensors())
        if tensors and self._processes.count > 1:
            what = "has a different state of the loss, which may only depend on values that all processes have"
            self._processes.check_equal(self._loss_state.digest(), what)
        for number, (_, named) in enumerate(states):
            tensors |= named_for(number, named)
        data, state = tuple(data for data, _ in states), optimizer_tensors(self.model, self.optimizer)
        checkpoint = Checkpoint(self.step, self.model, state, data, self.ended, self.skipped, tensors)
        self._processes.save(checkpoint, self.record)
        self._saved = self.step, self.ended

    def _state(self, number: int) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
        callback = self._callbacks[number]
        with self._guarded(number, "state"):
            data = callback.state()
        with self._guarded(number, "tensors"):
            return data, callback.tensors()

    def _restore(self) -> None:
        """Resume from the latest checkpoint. The record is truncated only after everything is restored."""
        restored = self.record.restored(self.model)
        step = str(restored and restored.step)
        self._processes.check_equal(step, "found another checkpoint: they need a common folder")
        if restored is not None:
            restore_model(self.model, self.optimizer, restored)
            self.step, self.ended, self.skipped = restored.step, restored.ended, restored.skipped
            self._begins = restored.branch
            self._saved = None if restored.branch else (restored.step, restored.ended)
            self._restore_loss(restored)
            for number, state in enumerate(restored.callbacks):
                if state is not None:
                    self._restore_callback(number, state, tensors_of_owner(restored.tensors, number))
        self._values.apply(self.step)
        self.record.resume()

    def _restore_loss(self, restored: Restored) -> None:
        """Raise SpecError if the loss cannot continue from its state: its code may have changed."""
        tensors = tensors_of_owner(restored.tensors, LOSS)
        if restored.branch and not tensors:  # of a run with a different loss
            return
        try:
            self._loss_state.restore(tensors, branch=restored.branch)
        except Exception as error:
            message = f"the loss cannot continue from the checkpoint: {type(error).__name__}: {error}"
            raise self.run.error(message, "loss") from error

    def _restore_callback(self, number: int, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Raise SpecError if a callback cannot continue from its state: its code may have changed."""
        try:
            self._callbacks[number].restore(state)
            if tensors:
                self._callbacks[number].restore_tensors(tensors)
        except Exception as error:
            message = f"the callback cannot continue from the checkpoint: {type(error).__name__}: {error}"
            raise self.run.error(message, "callbacks", str(number)) from error

    # ---- for callbacks ----

    def log(self, name: str, value: float) -> None:
        """Add a number to the line of this step; see `tfkit.run.contract.Training`."""
        if self._line is None:
            raise Invalid("", f"`{name}` cannot be logged here", help="call `log` in `on_step` or `on_eval`")
        if name in self._line or name in self._reserved:
            raise Invalid("", f"`{name}` is already logged", help="choose a different name")
        try:
            self._line[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise Invalid("", f"the value of `{name}` must be a number; got {quoted(str(value))}") from error

    @cached_property
    def _reserved(self) -> set[str]:
        """Names of numbers that only the loop may log."""
        of_terms = (f"{name}.loss" for name in self._terms)
        return {"step", "loss", *of_terms, "lr", "grad_norm", *self.run.metric_names}

    def text(self, name: str, text: str) -> None:
        """Write a text to the record; see `tfkit.run.contract.Training`."""
        self.record.text(self.step, name, text)

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return the arguments of the model; see `tfkit.run.contract.Training`."""
        if fills := self.config.loss.fills:
            loss = self.config.loss.kind_name()
            message = f"only the loss `{loss}` computes the input `{next(iter(fills))}` of the model"
            raise Invalid("", message, help="remove the callback")
        return batch_tensors(batch, self.model, self.device, self.config.loss)[0]

    def stop(self, reason: str) -> None:
        """End the run after this step."""
        self.ended = reason

    def save_model(self, name: str) -> None:
        """Write the model with its current weights; see `tfkit.run.contract.Training`."""
        self._check_unedited()
        self._values.describe()
        model = self._processes.full_model(self.model)
        if model is not None:
            self.record.save_model(name, model)

    def _report(self, event: str, numbers: dict[str, float]) -> None:
        """Pass numbers to all observers, and log them with the numbers that the observers add."""
        self._line = numbers
        try:
            self._notify(event, MappingProxyType(numbers))
        finally:
            self._line = None
            self.record.log(self.step, numbers)

    def _notify(self, event: str, *numbers: Mapping[str, float]) -> None:
        """Call a method of all observers. If an observer stops the run in one process, end it in all processes."""
        for number, callback in enumerate(self._callbacks):
            with self._guarded(number, event):
                getattr(callback, event)(self, *numbers)
        for watcher in self._watchers:  # after the callbacks, to show the numbers that they log
            getattr(watcher, event)(self, *numbers)
        self.ended = self._processes.agreed(self.ended)

    def _observed(self, kind: object, owner: str) -> AbstractContextManager[None]:
        """Return a context in which a kind of a plugin can register hooks that read values, and do not change them."""
        return nullcontext() if _is_built_in(kind) else observing_hooks(self.model, owner)

    @contextmanager
    def _guarded(self, number: int, method: str) -> Iterator[None]:
        """Turn an exception of a callback into an error of its kind. The callback may call the model."""
        config = self.config.callbacks[number]
        observed = self._observed(self._callbacks[number], f"callback `{config.kind_name()}`")
        with guarded_component_call(self.run, self.model, config, f"`{method}`", "callbacks", str(number)), observed:
            yield
        self._processes.reshard(self.model)
