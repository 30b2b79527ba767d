"""Metrics of a model on a split, without any effect on its training.

An evaluation needs no more memory than a training step of the same micro-batch: it computes logits in the same chunks,
and keeps one value for each position and metric.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn
from torch.nn import functional as F

from tfkit.building.builder import evaluation_mode
from tfkit.building.model import call_in_forward
from tfkit.decoding.generate import GENERATION
from tfkit.errors import Diagnostic, SpecError
from tfkit.graph.expand import Graph
from tfkit.graph.wiring import masks_in_use
from tfkit.learning.loss import Loss
from tfkit.run.checked_run import OBJECTIVE, Run, inputs_for, mask_of, padding_mask_of
from tfkit.run.contract import (
    IGNORE_INDEX,
    Array,
    Batch,
    ChoiceMetric,
    DecodedMetric,
    Ids,
    LogitMetric,
    LossConfig,
    LossSum,
    Metric,
    MetricConfig,
    Ratio,
)
from tfkit.run.run_spec import SplitConfig
from tfkit.run.training.guarded import guarded_component_call, guarded_loss_call
from tfkit.run.training.memory import MicroBatch
from tfkit.run.training.noise import Noise
from tfkit.run.training.order import indices_to_evaluate
from tfkit.run.training.processes import Processes


def evaluate_splits(
    model: fx.GraphModule,
    run: Run,
    splits: Mapping[str, SplitConfig],
    metrics: Sequence[MetricConfig],
    *,
    micro_batch: MicroBatch | None = None,
    between: Callable[[], None] = lambda: None,
    processes: Processes | None = None,
    loss: nn.Module | None = None,
) -> dict[str, float]:
    """Return the metrics of each split, as `val.loss`.

    Args:
        model: the model, whose modes and random numbers do not change.
        run: the run, for its data, batch size and precision.
        splits: the part of each split to evaluate.
        metrics: the metrics to compute.
        micro_batch: the number of sequences to compute at once; by default the run's `micro_batch`.
        between: called before each batch; may raise to end the evaluation.
        processes: the processes that share the rows of a batch; by default, this process computes all rows.
        loss: the module of the run's loss; by default, it is built if a metric needs it.

    Raises:
        SpecError: a metric cannot be computed from this data, no position of a split counts, or memory runs out.
    """
    processes, micro_batch = processes or Processes(), micro_batch or MicroBatch(run)
    model.meta[GENERATION] = run.generation  # of metrics that decode
    numbers: dict[str, float] = {}
    if loss is None and any(metric.objective for metric in metrics):
        with guarded_component_call(run, model, run.config.loss, "`build`", "loss"):
            loss = run.config.loss.build(model)
    modes = [evaluation_mode(module) for module in (model, loss) if module is not None]
    with ExitStack() as stack, torch.no_grad():
        for mode in modes:
            stack.enter_context(mode)
        for split, part in splits.items():
            built = [
                _BuiltMetric.of(model, run, metrics, index, named)
                for index, config in enumerate(metrics)
                for named in config.names(split, run.config.loss.terms).items()
            ]
            if any(isinstance(measure.metric, ChoiceMetric) for measure in built):
                built = [measure for measure in built if measure.applies(split, splits)]
            totals = _Evaluation(model, run, built, processes, loss).totals(split, part, micro_batch, between)
            for measure, total in zip(built, processes.total(totals), strict=True):
                further = total.numbers_of(split, run, built) if isinstance(total, _ObjectiveSums) else {}
                with measure.guarded("compute"):
                    sums = total.terms if isinstance(total, _ObjectiveSums) else total
                    numbers |= {measure.name: float(measure.metric.compute(sums)), **further}
    return numbers


def precision_context(run: Run, device: torch.device) -> torch.autocast:
    """Return the context of a run's forward pass, which sets its precision."""
    return torch.autocast(device.type, torch.bfloat16, enabled=run.config.precision == "bfloat16")


@dataclass(frozen=True)
class _BuiltMetric:
    """A metric, with the names and paths that its errors contain."""

    model: fx.GraphModule
    run: Run
    config: MetricConfig
    path: tuple[str, ...]
    metric: Metric
    name: str
    output: str | None
    """The output that the metric is computed from; None for the main output."""

    @classmethod
    def of(
        cls, model: fx.GraphModule, run: Run, metrics: Sequence[MetricConfig], index: int, named: tuple[str, str | None]
    ) -> _BuiltMetric:
        """Build a metric with its name and its output; metrics that the run does not list have no path."""
        listed = run.config.eval is not None and metrics is run.config.eval.metrics
        config, path = metrics[index], ("eval", "metrics", str(index)) if listed else ()
        with guarded_component_call(run, model, config, "`build`", *path):
            return cls(model, run, config, path, config.build(run.data), *named)

    def applies(self, split: str, splits: Iterable[str]) -> bool:
        """Return False for a `ChoiceMetric` on a split without choices, if a different split has choices."""
        first = np.zeros(1, np.int64)
        compared = {name for name in splits if self.run.data.examples(name, "sequential").batch(first).alternatives}
        return not isinstance(self.metric, ChoiceMetric) or split in compared or not compared

    def guarded(self, method: str) -> AbstractContextManager[None]:
        """Turn an exception of a method of the metric into an error of its kind."""
        return guarded_component_call(self.run, self.model, self.config, f"`{method}`", *self.path)

    def add(self, sums: Any, further: Any) -> Any:
        """Add the sums of two batches."""
        with self.guarded("+"):
            return sums + further

    def sums(self, values: Tensor, targets: Tensor) -> Any:
        """Return the sums over some examples. A target for each example, [b], becomes [b, 1]."""
        with self.guarded("sums"):
            values = values.cpu()
            if self.config.of_numbers:
                return self.metric.sums(values, targets.reshape(values.shape))
            return self.metric.sums(*((values, targets) if targets.dim() > 1 else (values[:, None], targets[:, None])))


@dataclass(frozen=True)
class _ObjectiveSums:
    """Sums of the run's loss over some examples.

    Attributes:
        terms: the weighted total and the count of each term, [n, 2].
        ratios: the further numbers of the loss by name; empty if no row counts.
    """

    terms: NDArray[np.float64]
    ratios: Mapping[str, Ratio]

    def __add__(self, further: _ObjectiveSums) -> _ObjectiveSums:
        ratios = dict(self.ratios)
        for name, ratio in further.ratios.items():
            ratios[name] = ratios[name] + ratio if name in ratios else ratio
        return _ObjectiveSums(self.terms + further.terms, ratios)

    def numbers_of(self, split: str, run: Run, metrics: Sequence[_BuiltMetric]) -> dict[str, float]:
        """Return the further numbers of the loss. Raise SpecError if a metric has the same name."""
        taken = {f"{split}.{name}" for name in self.ratios} & {measure.name for measure in metrics}
        if taken:
            message = f"the loss must not log `{min(taken).removeprefix(f'{split}.')}`, which is a metric of the run"
            raise run.error(message, "loss")
        return {f"{split}.{name}": float(ratio.total) / float(ratio.count or 1) for name, ratio in self.ratios.items()}


class _Evaluation:
    """Sums of metrics over the rows of this process."""

    def __init__(
        self,
        model: fx.GraphModule,
        run: Run,
        metrics: Sequence[_BuiltMetric],
        processes: Processes,
        objective: nn.Module | None,
    ) -> None:
        self._model, self._run, self._metrics, self._processes = model, run, metrics, processes
        self._objective = objective
        self._device = next(model.parameters()).device
        self._of_logits = [(built, built.metric) for built in metrics if isinstance(built.metric, LogitMetric)]
        self._check_logits()
        try:
            self._loss = Loss(model, outputs=run.config.loss.terms or None) if self._of_logits else None
        except ValueError:  # the head takes all positions together
            self._loss = None

    def _check_logits(self) -> None:
        """Raise SpecError for a metric of ids if the output that it is computed from has no logits of ids."""
        graph: Graph = self._model.meta["graph"]
        for built, _ in self._of_logits:
            node = graph.node(built.output or next(iter(self._run.config.loss.terms), graph.outputs[0]))
            several = len(graph.outputs) > 1 and node.output.type == "sequence"
            without_ids = several or (node.output.type == "vector" or node.config.compares_rows)
            if not built.config.of_numbers and without_ids:
                message = (
                    f"the metric `{built.config.kind_name()}` needs logits of ids, which `{node.name}` does not return"
                )
                raise self._run.error(message, *built.path, help=OBJECTIVE)

    def totals(self, split: str, part: SplitConfig, micro_batch: MicroBatch, between: Callable[[], None]) -> list[Any]:
        """Return the sums of each metric over a part of a split. Raise SpecError if no position counts."""
        count, totals = 0, None
        for number, batch in enumerate(evaluation_batches(self._run, split, part)):
            between()
            count += batch.count
            sums = micro_batch.fit(partial(self.sums, split, batch, number), "an evaluation")
            totals = sums if totals is None else list(map(_BuiltMetric.add, self._metrics, totals, sums))
        if totals is None or not count:
            message = f"the part of the split `{split}` that is evaluated must have a position that counts"
            raise SpecError(Diagnostic(message, help="evaluate more of the split, or use different data"))
        return totals

    def sums(self, split: str, batch: Batch, number: int, size: int) -> list[Any]:
        """Return the sums of each metric over a batch, from micro-batches of `size` rows."""
        # Processes have equal numbers of micro-batches, because each call of a sharded model is a collective operation.
        share = -(-batch.size // self._processes.count)
        first = share * self._processes.rank
        rows = batch.rows(first, first + share)
        with precision_context(self._run, self._device):
            choices = [(rows, batch)]
            if any(isinstance(built.metric, ChoiceMetric) for built in self._metrics):
                choices += zip(rows.alternatives, batch.alternatives, strict=True)
            of_logits = [iter(self._all_from_logits(*choice, size, share)) for choice in choices]
            sums = []
            for built in self._metrics:
                if built.config.objective:
                    noise = partial(self._noise, split, number)
                    sums.append(self._of_objective(batch, range(first, first + share), noise, size))
                    continue
                values = targets = torch.from_numpy(self._targets(rows, built.output))
                if isinstance(built.metric, LogitMetric):
                    values, *further = map(next, of_logits)
                    if isinstance(built.metric, ChoiceMetric):
                        sums.append(built.sums(*_by_choice([rows, *rows.alternatives], [values, *further])))
                        continue
                elif isinstance(built.metric, DecodedMetric):
                    with built.guarded("values"):
                        values = self._decoded(built.metric, batch, number, size)[first : first + share]
                sums.append(built.sums(values, targets))
            return sums

    def _noise(self, split: str, number: int, rows: Iterable[int]) -> Noise:
        return Noise.of(self._device, 0, f"evaluation/{split}/loss", number, rows)

    def _of_objective(
        self, batch: Batch, share: range, noise: Callable[[Iterable[int]], Noise], size: int
    ) -> _ObjectiveSums:
        """Return the sums of the loss over the rows in `share`; see `_from_logits`."""
        assert self._objective is not None
        terms = self._run.config.loss.terms
        sums = _ObjectiveSums(np.zeros((max(len(terms), 1), 2)), {})
        if self._run.config.loss.undivided:
            size = self._run.config.batch.largest
            if batch.size < size:
                return sums
        for start in range(share.start, share.stop, size):
            end = min(start + size, share.stop, batch.size)
            rows = batch.rows(start, end) if start < end else batch.rows(0, 1)
            numbers = range(start, end) if start < end else range(1)
            with guarded_loss_call(self._run, self._model, "`forward`"):
                result = loss_sums(self._objective, self._run, self._model, self._device, rows, partial(noise, numbers))
            if start < end:
                counts = rows.counts_of(terms) if result.count is None else [float(result.count)]
                weights = np.array([term.weight for term in terms.values()] or [1.0])
                totals = np.stack([weights * result.total.double().cpu().numpy(), np.asarray(counts, float)], axis=1)
                ratios = {name: Ratio(float(part.total), float(part.count)) for name, part in result.numbers.items()}
                sums += _ObjectiveSums(totals, ratios)
        return sums

    def _targets(self, batch: Batch, output: str | None) -> Ids:
        """Return the targets of an output, by default of the main output."""
        targets = batch.targets_of(self._run.config.loss.terms)
        return next(iter(targets.values())) if output is None else targets[output]

    def _all_from_logits(self, rows: Batch, batch: Batch, size: int, share: int) -> list[Tensor]:
        """Return the values of each metric of logits, from micro-batches; see `_from_logits`."""
        parts = [self._from_logits(rows.rows(i, i + size), batch) for i in range(0, share, size)]
        return [torch.cat(values) for values in zip(*parts, strict=True)]

    def _from_logits(self, rows: Batch, batch: Batch) -> list[Tensor]:
        """Return the values of each metric of logits, [b, t]. Without rows, run the model on one row of the batch."""
        if not self._of_logits:
            return []
        present = rows if rows.size else batch.rows(0, 1)
        inputs, loss = batch_tensors(present, self._model, self._device, self._run.config.loss)[0], self._loss
        if loss is None:
            values = self._of_outputs({"": [self._model(**inputs).flatten(0, -2)]}, present)
        else:
            values = call_in_forward(self._model, lambda: self._of_outputs(loss.logits(loss.read(inputs)), present))
        return [values[built.name][: rows.size] for built, _ in self._of_logits]

    def _of_outputs(self, logits: Mapping[str, Iterable[Tensor]], batch: Batch) -> dict[str, Tensor]:
        """Return the values of each metric of logits, [b, t], from the chunks of logits of each output, [n, v]."""
        values: dict[str, list[Tensor]] = {built.name: [] for built, _ in self._of_logits}
        for output, chunks in zip([None, *[*logits][1:]], logits.values(), strict=True):
            measures = [(built, metric) for built, metric in self._of_logits if built.output == output]
            targets, start = torch.from_numpy(self._targets(batch, output)).to(self._device).flatten(), 0
            parts: Iterable[Tensor] = chunks
            if not batch.has_ids:  # an output has few numbers
                parts = [torch.cat([*chunks])]
                targets = self._numbers_of(targets, parts[0])
            for chunk in parts if measures else ():
                end = start + len(chunk)
                for built, metric in measures:
                    with built.guarded("values"):
                        values[built.name].append(metric.values(chunk, targets[start:end]))
                start = end
        joined = {name: torch.cat(of_metric) for name, of_metric in values.items()}
        if not batch.has_ids:  # [b, t, v], or [b, 1, v] for a target of each example
            return {name: part.view(batch.size, -1, part.size(-1)) for name, part in joined.items()}
        shapes = {built.name: self._targets(batch, built.output).shape for built, _ in self._of_logits}
        return {name: part.view(shapes[name]) for name, part in joined.items()}

    def _numbers_of(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """Return real targets in the shape of the outputs of a model, [n, v]; raise SpecError if they do not fit."""
        if targets.numel() != outputs.numel():
            message = f"the data has {targets.numel():,} target numbers in a batch, but the model returns"
            help = "use a head with one output for each number of a target: `{block: classifier, n_classes: 3}`"
            raise self._run.error(f"{message} {outputs.numel():,}", "data", help=help)
        return targets.view(outputs.shape)

    def _decoded(self, metric: DecodedMetric, batch: Batch, number: int, size: int) -> Tensor:
        """Return the values of a metric for all rows of a batch: processes must generate equally many tokens."""
        values = []
        for start in range(0, batch.size, size):
            rows = batch.rows(start, start + size)
            inputs, _ = batch_tensors(rows, self._model, self._device, self._run.config.loss)
            inputs = {name: tensor for name, tensor in inputs.items() if name not in self._run.config.loss.inputs_ahead}
            targets = torch.from_numpy(self._targets(rows, None)).to(self._device)
            values.append(metric.values(self._model, inputs, targets, seed=number, first=start))
        return torch.cat(values)


def _by_choice(choices: Sequence[Batch], values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sum of the values of each choice, and the number of its positions that count, [b, choices] each."""
    counted = [torch.from_numpy(choice.ids != IGNORE_INDEX) for choice in choices]
    sums = [torch.where(mask, value.cpu().double(), 0).sum(-1) for mask, value in zip(counted, values, strict=True)]
    return torch.stack(sums, dim=-1), torch.stack([mask.sum(-1) for mask in counted], dim=-1)


def batch_tensors(
    batch: Batch, model: fx.GraphModule, device: torch.device, loss: LossConfig
) -> tuple[dict[str, Tensor], Any]:
    """Return the batch as arguments of the model, and its targets: a tensor, or one by the name of each term."""
    return tensors_for(model.meta["graph"], batch, device, loss)


def tensors_for(
    graph: Graph, batch: Batch, device: torch.device, loss: LossConfig
) -> tuple[dict[str, Tensor], Tensor | dict[str, Tensor] | None]:
    """Return the batch as arguments of the models of a graph; see `batch_tensors`."""
    names = inputs_for(graph, batch.inputs, loss)
    inputs = {names[name]: _copy_to_device(ids, device) for name, ids in batch.inputs.items()}
    first, numbers = next(iter(inputs)), None
    of_pairs = None if batch.documents is None else mask_of(graph, inputs)
    for name, mask in batch.masks.items():
        inputs[padding_mask_of(graph, names[name])] = _copy_to_device(mask, device)
    if batch.documents is not None and of_pairs is not None:
        numbers = _copy_to_device(batch.documents, device)
        if of_pairs in inputs:  # padding counts as a separate document
            numbers = numbers.masked_fill(~inputs[of_pairs], -1)
        inputs[of_pairs] = numbers[:, :, None] == numbers[:, None, :]
    inputs |= _inputs_ahead(graph, inputs, first, numbers, loss)
    targets = {name: _copy_to_device(ids, device) for name, ids in batch.targets_of(loss.terms).items()}
    return inputs, targets if loss.terms else targets.get("")


def _inputs_ahead(
    graph: Graph, inputs: Mapping[str, Tensor], first: str, documents: Tensor | None, loss: LossConfig
) -> dict[str, Tensor]:
    """Return the tokens ahead in the input `first` [b, t], 0 after the end of a document, with the mask of that input.

    `documents` numbers the document of each position, [b, t]; None for rows of a single document.
    """
    ahead: dict[str, Tensor] = {}
    masks = masks_in_use(graph.nodes) if loss.inputs_ahead else ()
    for name, distance in loss.inputs_ahead.items():
        ahead[name] = F.pad(inputs[first], (0, distance))[:, distance:]
        if documents is not None:
            later = F.pad(documents, (0, distance), value=-2)[:, distance:]
            ahead[name] = ahead[name].masked_fill(later != documents, 0)
        mask, source = graph.inputs[name].mask, graph.inputs[first].mask
        if mask in masks and mask is not None and source is not None and source in inputs:
            ahead[mask] = inputs[source]
    return ahead


def loss_sums(
    loss: Callable[..., Any],
    run: Run,
    model: fx.GraphModule,
    device: torch.device,
    batch: Batch,
    noise: Callable[[], Noise],
) -> LossSum:
    """Return the result of the run's loss for a batch, its total as [n]. Raise SpecError if it has another form."""
    config = run.config.loss
    arguments = (*batch_tensors(batch, model, device, config), *([noise()] if config.draws_noise else []))
    result, n = loss(*arguments), max(len(config.terms), 1)
    sums = result if isinstance(result, LossSum) else LossSum(result)
    total: Any = sums.total
    if not isinstance(total, Tensor) or total.numel() != n:
        shape = list(total.shape) if isinstance(total, Tensor) else type(total).__name__
        message = f"the loss `{config.kind_name()}` must return {'a sum' if n == 1 else f'{n} sums'}; got {shape}"
        raise run.error(message, "loss", help="add up the losses of all positions that count")
    if sums.count is not None and config.terms:
        message = f"the loss `{config.kind_name()}` cannot return a `count`, because it has several outputs"
        raise run.error(message, "loss", help="return the sums alone: the loop counts the targets of each output")
    return replace(sums, total=total.reshape(-1))


def _copy_to_device(values: Array, device: torch.device) -> Tensor:
    """Copy values to a device; a copy to a GPU is asynchronous."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def evaluation_batches(run: Run, split: str, config: SplitConfig) -> Iterator[Batch]:
    """Yield the batches that an evaluation of a split uses, in order."""
    sequences = run.config.batch.largest
    if config.batches == "all":
        examples = run.data.examples(split, "sequential")
        for start in range(0, len(examples), sequences):
            yield examples.batch(np.arange(start, min(start + sequences, len(examples))))
        return
    examples = run.data.examples(split, "sampled")
    for number in range(config.batches):
        yield examples.batch(indices_to_evaluate(split, number, sequences=sequences, examples=len(examples)))
