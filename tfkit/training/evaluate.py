"""The numbers of a model on a split, without any effect on its training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, fx

from tfkit.builder import evaluating
from tfkit.component import Batch, Data, MetricConfig
from tfkit.errors import Diagnostic, Invalid, SpecError
from tfkit.graph.run import inputs_for, mask_of
from tfkit.spec.run import SplitConfig
from tfkit.training.order import indices_to_evaluate
from tfkit.training.processes import Processes


def evaluate(
    model: fx.GraphModule,
    data: Data,
    splits: Mapping[str, SplitConfig],
    metrics: Sequence[MetricConfig],
    *,
    sequences: int,
    computing: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    between: Callable[[], None] = lambda: None,
    processes: Processes | None = None,
) -> dict[str, float]:
    """The metrics of each split, as `val.loss`.

    Args:
        model: the model, whose modes and random numbers stay as they are.
        data: the data.
        splits: the part of each split to read.
        metrics: the numbers to compute.
        sequences: examples of a batch.
        computing: the context of a forward, such as its precision.
        between: called before each batch; may raise to give up.
        processes: those that share the rows of a batch; this one computes all unless given.

    Raises:
        SpecError: a metric cannot be had from this data, or no position of a split counts.
    """
    found: dict[str, float] = {}
    run = (processes or Processes()).run
    device = next(model.parameters()).device
    with evaluating(model), torch.no_grad():
        for split, config in splits.items():
            with _refusing():
                seen = [metric.build(data) for metric in metrics]
            count = 0
            for number, batch in enumerate(_batches(data, split, config, sequences)):
                between()
                count += batch.count
                inputs, targets = tensors(batch, model, device)
                with computing(), _refusing():
                    logits = run(model, inputs)
                    written = [one.written(model, data, inputs, targets, seed=number) for one in metrics]
                for one, other in zip(seen, written, strict=True):
                    one.update(logits if other is None else other, targets)
            if not count:
                message = f"no position counts in what is read of the split `{split}`"
                raise SpecError(Diagnostic(message, help="read more of it, or other data"))
            names = [metric.kind_name() for metric in metrics]
            found |= {f"{split}.{name}": float(one.compute()) for name, one in zip(names, seen, strict=True)}
    return found


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Errors of metrics as those of a run."""
    try:
        yield
    except Invalid as wrong:
        raise SpecError(Diagnostic(wrong.message, notes=wrong.notes, help=wrong.help)) from wrong


def tensors(batch: Batch, model: fx.GraphModule, device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
    """A batch as arguments of the model, and its targets."""
    names = inputs_for(model.meta["graph"], batch.inputs)
    inputs = {names[name]: torch.from_numpy(ids).to(device) for name, ids in batch.inputs.items()}
    if batch.documents is not None:
        numbers = torch.from_numpy(batch.documents).to(device)
        inputs[mask_of(model.meta["graph"], inputs)] = numbers[:, :, None] == numbers[:, None, :]
    return inputs, torch.from_numpy(batch.targets).to(device)


def _batches(data: Data, split: str, config: SplitConfig, sequences: int) -> Iterator[Batch]:
    if config.batches == "all":
        every = data.examples(split, "sequential")
        for start in range(0, len(every), sequences):
            yield every.batch(np.arange(start, min(start + sequences, len(every))))
        return
    drawn = data.examples(split, "sampled")
    for number in range(config.batches):
        yield drawn.batch(indices_to_evaluate(split, number, sequences=sequences, examples=len(drawn)))
