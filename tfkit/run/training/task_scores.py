"""Scores of the continuations of tasks: their log-likelihoods, in batches of continuations of similar length.

A forward pass takes no more positions than a step of training, unless a single continuation is longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from tfkit.building.builder import evaluation_mode, graph_of
from tfkit.building.model import call_in_forward
from tfkit.errors import Diagnostic, SpecError
from tfkit.learning.loss import Loss
from tfkit.run.checked_run import Run
from tfkit.run.contract import IGNORE_INDEX, LossConfig
from tfkit.run.tasks import ContinuationScores, Task
from tfkit.run.training.evaluate import batch_tensors
from tfkit.run.training.memory import MicroBatch
from tfkit.run.training.processes import Processes

Rows: TypeAlias = tuple[int, list[int], Tensor]
"""The start of the next batch; and the numbers of rows, with the log-likelihood of each and whether it is greedy."""
Fit: TypeAlias = Callable[[Callable[[int], Rows]], Rows]
"""Calls its argument with a number of positions for one forward pass of each process, and returns the result. It may
repeat the call with fewer positions."""


@dataclass(frozen=True)
class TaskScorer:
    """Scores tasks with a model.

    Attributes:
        model: the model, whose modes do not change.
        loss: the loss of the run, for the output and the inputs that it fills.
        bfloat16: compute in bfloat16, as a run with that precision does.
        processes: the processes that share the rows of a batch.
    """

    model: fx.GraphModule
    loss: LossConfig
    bfloat16: bool = False
    processes: Processes = field(default_factory=Processes)

    def scores(self, task: Task, fit: Fit, between: Callable[[], None] = lambda: None) -> ContinuationScores:
        """Return the scores of a task. `between` is called before each batch, and may raise to end the evaluation."""
        head = self._head()
        # The longest first: a lack of memory shows in the first batch.
        order = sorted(range(len(task.continuations)), key=lambda number: -len(task.continuations[number].ids))
        sums, start = torch.zeros(len(order), 2, dtype=torch.float64, device="cpu"), 0
        with evaluation_mode(self.model), torch.no_grad():
            while start < len(order):
                between()
                start, numbers, values = fit(partial(self._next_rows, task, head, order, start))
                sums[numbers] = values
        likelihoods, greedy = self.processes.sum(sums).numpy().T
        return ContinuationScores(likelihoods, greedy)

    def _next_rows(self, task: Task, head: Loss, order: Sequence[int], start: int, positions: int) -> Rows:
        """Compute the rows of this process in the batch that begins at `start`, from `positions` at once.

        Processes have equal numbers of batches, because each call of a sharded model is a collective operation.
        """
        share = max(1, positions // (len(task.continuations[order[start]].ids) - 1))
        end = min(start + share * self.processes.count, len(order))
        first = start + share * self.processes.rank
        numbers = list(order[first : min(first + share, end)])
        return end, numbers, self._row_scores(task, head, numbers or [order[start]])[: len(numbers)]

    def _row_scores(self, task: Task, head: Loss, numbers: Sequence[int]) -> Tensor:
        batch = task.batch(numbers)
        device = next(self.model.parameters()).device
        inputs, _ = batch_tensors(batch, self.model, device, self.loss)
        targets = torch.from_numpy(batch.ids).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.bfloat16):
            nats, matches = call_in_forward(self.model, lambda: _position_scores(head, inputs, targets.flatten()))
        counted = targets != IGNORE_INDEX
        likelihoods = -torch.where(counted, nats.view(targets.shape).double(), 0).sum(1)
        greedy = (matches.view(targets.shape) | ~counted).all(1)
        return torch.stack([likelihoods, greedy.double()], dim=1).cpu()

    def _head(self) -> Loss:
        """Return the model with its logits in chunks of positions."""
        output = next(iter(self.loss.terms), graph_of(self.model).outputs[0])
        try:
            return Loss(self.model, outputs={output: 1.0})
        except ValueError as error:
            raise SpecError(Diagnostic(f"a task cannot be evaluated: {error}")) from error


def _position_scores(head: Loss, inputs: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of each target, and whether the target is the most likely token, [n] each."""
    nats, matches, start = [], [], 0
    for logits in next(iter(head.logits(head.read(inputs)).values())):
        part = targets[start : start + len(logits)]
        nats.append(F.cross_entropy(logits.float(), part, ignore_index=IGNORE_INDEX, reduction="none"))
        matches.append(logits.argmax(-1) == part)
        start += len(logits)
    return torch.cat(nats), torch.cat(matches)


def evaluate_tasks(
    model: fx.GraphModule,
    run: Run,
    tasks: Iterable[Task],
    *,
    micro_batch: MicroBatch,
    between: Callable[[], None] = lambda: None,
    processes: Processes | None = None,
) -> dict[str, ContinuationScores]:
    """Return the scores of tasks by their names; see `evaluate_splits` for the arguments."""
    bfloat16 = run.config.precision == "bfloat16"
    scorer = TaskScorer(model, run.config.loss, bfloat16, processes or Processes())

    def fit(compute: Callable[[int], Rows]) -> Rows:
        return micro_batch.fit(lambda size: compute(size * run.longest), "an evaluation")

    return {task.name: scorer.scores(task, fit, between) for task in tasks}


def task_numbers(tasks: Iterable[Task], scores: Mapping[str, ContinuationScores]) -> dict[str, float]:
    """Return the metrics of tasks by their names in reports."""
    return {name: number for task in tasks for name, number in task.numbers(scores[task.name]).items()}
