"""The document of a run: the model that is trained, its data, each step, and the evaluations."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field

from tfkit.component import (
    AttentionBackend,
    Component,
    Config,
    ContentPath,
    Count,
    Extent,
    Immaterial,
    PositiveFloat,
    Probability,
    slot,
)
from tfkit.errors import Invalid
from tfkit.run.contract import (
    CallbackConfig,
    DataConfig,
    LossConfig,
    MetricConfig,
    Name,
    OptimizerConfig,
    ParametrizationConfig,
    PositiveCount,
    ScheduleConfig,
    TrackerConfig,
    label_of,
)
from tfkit.run.step_values import (
    Changes,
    StepValues,
    check_changes,
    check_count,
    has_fraction,
    listed_values,
    step_values,
)
from tfkit.run.task_files import shipped_tasks
from tfkit.spec.document import MODEL, NAME, Document
from tfkit.spec.folder import RUN, latest_checkpoint, step_of
from tfkit.spec.load import Spec
from tfkit.spec.merge import WILDCARD, MergeKeys
from tfkit.spec.render import Data, data_of, lines_of, spec_data

ENDS = frozenset({"steps", "tokens", "epochs", "flops"})
"""Keys that set the length of a run. A run has exactly one of them."""
WITHOUT_STEPS = "a number that changes at a fraction of the run must be combined with `steps`"
SET_STEPS = "set `steps`, or write the changes as numbers of steps"
LISTS = ("track", "callbacks")
"""Keys whose value may be one kind instead of a list."""


WeightMapping: TypeAlias = Annotated[Mapping[str, Any], "a mapping of weights to weights, or to a weight and a pattern"]


class BatchConfig(Config):
    """The examples of one update, over all processes."""

    sequences: PositiveCount | Changes
    """The number of examples. It may change by step: `{at: {0: 8, 1000: 32}}`, or linearly, `{from: 8, to: 32, over:
    0.2}`. Steps count completed updates; below 1, they are fractions of the run. Evaluations use the largest number."""
    length: PositiveCount | Changes | None = None
    """Positions of each example, for data without a fixed length. For data in windows, the length may change by step in
    the same forms: a step then trains on the beginnings of its windows, which have the largest length. Evaluations use
    the largest length."""

    def check(self) -> None:
        """Raise `Invalid` for a change that is not well-formed."""
        super().check()
        for field in ("sequences", "length"):
            if isinstance(value := getattr(self, field), Mapping):
                try:
                    check_changes(value, check_count)
                except Invalid as error:
                    path = f"{field}.{error.field}".rstrip(".")
                    raise Invalid(path, error.message, notes=error.notes, help=error.help) from None

    @property
    def largest(self) -> int:
        """The largest number of examples in a step, which evaluations use as well."""
        return max(listed_values(self.sequences))

    @property
    def longest(self) -> int | None:
        """The largest length of examples, which evaluations use as well; None for data with a fixed length."""
        return None if self.length is None else max(listed_values(self.length))

    def sizes(self, steps: int = 0) -> StepValues[int]:
        """Return the number of examples in each step of a run."""
        return step_values(self.sequences, steps)

    def lengths(self, steps: int = 0) -> StepValues[int] | None:
        """Return the length of the examples in each step of a run; None if the length does not change."""
        return step_values(self.length, steps) if isinstance(self.length, Mapping) else None


class SplitConfig(Config):
    """The batches of a split that an evaluation uses."""

    word_key = "batches"

    batches: PositiveCount | Literal["all"]
    """A number of batches, the same in every evaluation; or `all`, every token once."""


class TaskConfig(Config):
    """Questions with answers, which the model ranks by their likelihood."""

    word_key = "file"

    file: Immaterial[str]
    """A task that comes with tfkit, such as `agreement`; or a file with the columns of data `choices` or `pairs`, or a
    task of lm-evaluation-harness in YAML."""
    name: Name | None = None
    """The name of the task in reports; by default the name in the file, or of the file."""

    def located(self, folder: Path) -> Self:
        """Return the config with an absolute path. A relative path starts at `folder`."""
        if self.file in shipped_tasks():
            return self
        return self.model_copy(update={"file": str((folder / self.file).absolute())})


class EvalConfig(Config):
    """The evaluations during a run: before its first step, at each multiple of `every`, and after its last."""

    every: PositiveCount
    """Steps between two evaluations."""
    splits: dict[str, SplitConfig] = Field(default_factory=dict)
    """The splits to evaluate on; may be empty if there are tasks."""
    metrics: tuple[MetricConfig, ...] = slot("loss")
    """The metrics to compute on the splits."""
    tasks: tuple[TaskConfig, ...] = ()
    """The tasks to evaluate on, such as `[agreement, tasks/arithmetic.jsonl]`."""

    def names(self, terms: Iterable[str]) -> list[str]:
        """Return the names of the metrics of splits, such as `val.loss`, for a loss with these terms."""
        return [name for split in self.splits for metric in self.metrics for name in metric.names(split, terms)]

    def check(self) -> None:
        """Raise `Invalid` if there is nothing to evaluate, and if two metrics have the same name."""
        super().check()
        if not self.metrics or not (self.splits or self.tasks):
            raise Invalid("metrics" if not self.metrics else "splits", "there is nothing to evaluate")
        if not self.splits and [metric.kind_name() for metric in self.metrics] != ["loss"]:
            raise Invalid("metrics", "`metrics` has no effect without `splits`", help="add splits: `{val: all}`")
        check_labels("metrics", dict(enumerate(self.metrics)))


def check_labels(field: str, configs: Mapping[int, Component]) -> None:
    """Raise `Invalid` if two metrics or callbacks, by their index in `field`, have the same name."""
    labels: dict[str, int] = {}
    for number, config in configs.items():
        label = label_of(config)
        if label in labels:
            named = "name" in type(config).model_fields
            help = "add a `name` to one of them, or a different name" if named else None
            message = f"`{label}` must be listed once: both {field} would have the same name"
            raise Invalid(f"{field}.{number}", message, help=help)
        labels[label] = number


class SavingConfig(Config):
    """The checkpoints of a run. One is always written at its end."""

    every: PositiveCount | None = None
    """Steps between two checkpoints; by default only the checkpoint at the end is written."""
    last: Count = 2
    """The number of checkpoints to keep. Older checkpoints are removed."""


class WeightsConfig(Config):
    """The initial weights of a run. Missing and additional tensors must be allowed by name."""

    word_key = "path"

    path: Immaterial[str]
    """A safetensors file, its folder, or a run folder, which stands for its latest checkpoint."""
    map: WeightMapping | None = None
    """Weights of the model, each with the weights that fill it: `decoder.layers.{i}: decoder.layers.{i // 2}`. With a
    map, `path` must be a folder with a spec, and `unused` contains names of the model of that spec."""
    tokens: tuple[str, ...] = ()
    """Patterns of weights with a row for each token, such as `embedding.tokens.*`. Tokens that the tokenizer of the
    weights contains keep their rows; the rows of new tokens are initialized randomly."""
    missing: tuple[str, ...] = ()
    """Patterns of weights to initialize randomly instead, by their names in the model, such as `logits.*`."""
    unused: tuple[str, ...] = ()
    """Patterns of tensors to ignore, by their names in the file, such as `lm_head.weight`."""
    allow_change: bool | tuple[str, ...] = False
    """If true, accept weights of a model with different values; or patterns of the values that may differ."""
    states: tuple[str, ...] = ()
    """Patterns of weights, such as `decoder.layers.*`, whose state of the optimizer also comes from the run in `path`.
    It moves with the weights by `map`. The state of all other weights starts at zero."""

    def located(self, folder: Path) -> Self:
        """Return the config with an absolute path. A relative path starts at `folder`."""
        return self.model_copy(update={"path": str((folder / self.path).absolute())})


class AdaptersConfig(Config):
    """LoRA: for each target W, the run trains matrices A and B of low rank, and W + scale B A replaces W.

    Nothing else is trained. The run must have `weights`, and its checkpoints contain only the matrices.
    """

    targets: tuple[str, ...]
    """Patterns of linear layers, by their paths in the model, such as `decoder.layers.*.ffn`; of parts of fused layers,
    such as `q`; or of modules of the published model, such as `q_proj`. The end of a name is sufficient."""
    rank: PositiveCount = 8
    """The number of rows of A, and of columns of B."""
    alpha: PositiveFloat | None = None
    """The scale of the product is alpha / rank; by default 1."""
    rslora: bool = False
    """If true, the scale is alpha / sqrt(rank) (https://arxiv.org/abs/2312.03732)."""
    dropout: Probability = 0.0
    """Dropout of the input of A."""
    start: ContentPath | None = None
    """A folder with an adapter of the same targets and rank, which training continues; by default, B is zero."""

    @property
    def scale(self) -> float:
        """The factor of the product of the two matrices."""
        alpha = self.rank if self.alpha is None else self.alpha
        return alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def check(self) -> None:
        """Raise `Invalid` without targets, and for `rslora` without alpha."""
        super().check()
        if not self.targets:
            help = "name linear layers: `targets: [q_proj, v_proj]`"
            raise Invalid("targets", "`targets` must name a linear layer; got none", help=help)
        if self.rslora and self.alpha is None:
            raise Invalid("rslora", "`rslora` must be combined with `alpha`", help="set `alpha`, for instance to 16")


class BranchConfig(Config):
    """The checkpoint of a different run that this run continues, with different steps, rates, schedule or data."""

    word_key = "run"

    run: Immaterial[str]
    """The folder of that run."""
    step: Immaterial[PositiveCount | None] = None
    """The step of the checkpoint; by default the latest."""

    def located(self, folder: Path) -> Self:
        """Return the config with an absolute path, and with the step of the latest checkpoint if no step is set.

        A relative path starts at `folder`.
        """
        parent, step = (folder / self.run).absolute(), self.step
        if step is None and os.path.isfile(parent / RUN) and (latest := latest_checkpoint(parent)):
            step = step_of(latest)
        return self.model_copy(update={"run": str(parent), "step": step})


class NonFiniteConfig(Config):
    """A step whose loss or gradient is not finite never changes a weight."""

    skip: Extent = 0
    """The number of such steps to skip; the next such step ends the run with an error."""


class MachineConfig(Config):
    """Settings of the machine. Except for `float8`, they change results only by rounding."""

    device: str = "cpu"
    """The device: cpu, cuda, mps."""
    micro_batch: PositiveCount | Literal["auto"] | None = None
    """Sequences in one forward and backward pass, by default the full batch. With `auto`, the number is halved when
    memory runs out."""
    compile: bool | Literal["layers"] = False
    """If true, `torch.compile` the loss; with `layers`, compile each distinct layer once."""
    recompute: Literal["none", "full", "selective"] | PositiveCount = "none"
    """Layers that save only their inputs for the backward pass, which recomputes the rest: all layers with `full`,
    every n-th layer with a number n. With `selective`, all layers also save the results of matrix products and of
    attention."""
    attention: AttentionBackend = "sdpa"
    """The implementation of attention: sdpa, eager, flex."""
    shard: PositiveCount | None = None
    """Number of processes over which one copy of the weights is sharded; by default all processes."""
    gather: Literal["float32", "bfloat16"] = "float32"
    """The dtype in which processes exchange the weights of layers, except norms; `bfloat16` requires that precision."""
    float8: Literal["tensorwise", "rowwise"] | None = None
    """Scaling of float8 matrix products in the layers during training: one scale per tensor, or one per row. Requires
    `precision: bfloat16`. Unlike the settings above, it changes the digest of the run."""
    threads: Count = 1
    """Number of CPU threads for one operation."""

    def material(self) -> Mapping[str, Any]:
        """Return the setting that changes results by more than rounding, if it is set."""
        return {} if self.float8 is None else {"float8": self.float8}

    def recomputes(self, layer: int) -> bool:
        """Return True if the backward pass recomputes the layer with this number."""
        return self.recompute != "none" and (isinstance(self.recompute, str) or layer % self.recompute == 0)


class RunSpec(Document):
    """A run with every value resolved. Its model is a separate spec."""

    sort, command, typical = "run", "train", ("model", "data")
    further_keys, exclusive_keys, listed_keys = (MODEL,), ENDS, LISTS
    arithmetic_names = ("data",)  # of `data.vocab_size`
    merge_keys = MergeKeys(
        {("weights",): "path", ("branch",): "run", ("eval", "splits", WILDCARD): "batches"},
        values=frozenset({"path", "run", "batches"}),
    )

    name: Immaterial[str] = Field(pattern=NAME, max_length=100)
    """The name of the run."""
    description: Immaterial[str | None] = None
    """The purpose of the run."""
    source: Immaterial[str | None] = None
    """The paper or page that describes the experiment."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """The seed of the initial weights, the order of the data, and dropout, which have independent random streams."""
    weights: WeightsConfig | None = None
    """The initial weights; by default random."""
    branch: BranchConfig | None = None
    """The checkpoint to continue from, with its weights, optimizer state and step; by default the run starts anew."""
    freeze: tuple[str, ...] = ()
    """Patterns of weights that training does not change, such as `embedding.*`."""
    adapters: AdaptersConfig | None = None
    """Matrices of low rank to train instead of the weights; by default, the weights are trained."""
    data: DataConfig
    """The examples."""
    batch: BatchConfig
    """The examples of one update."""
    by_step: dict[str, Changes] = Field(default_factory=dict)
    """Numbers of the model and of the loss that change by step, each by the path that `--set` takes:
    `{model.decoder.attention.mask.left: {at: {0: 127, 2000: 511}}, loss.weight: {from: 0.9, to: 0.1, over: 0.5}}`. They
    replace the values in `model` and `loss`. Evaluations and checkpoints use the values of the step before them."""
    steps: PositiveCount | None = None
    """The length of the run in steps. Set this, `tokens`, `epochs` or `flops`."""
    tokens: PositiveCount | None = None
    """The length of the run in positions without padding, rounded up to full steps. A step counts as the mean number of
    positions of its number of training examples."""
    epochs: PositiveFloat | None = None
    """The length of the run in epochs of the training split, rounded up to full steps."""
    flops: PositiveFloat | None = None
    """The length of the run in FLOPs of all forward and backward passes, rounded up to full steps. `tfkit cost` counts
    them, with every pair of query and key."""
    loss: LossConfig = slot("cross_entropy")
    """The function that training minimizes."""
    optimizer: OptimizerConfig
    """The update of the weights."""
    schedule: ScheduleConfig = slot("constant")
    """The learning rate as a function of the step."""
    parametrization: ParametrizationConfig = slot("standard")
    """Rates, initial values and factors that follow from smaller base sizes."""
    clip: PositiveFloat | None = None
    """Maximum norm of the gradient of all weights; a larger gradient is scaled down to it."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """The dtype of the computation; weights and optimizer states are float32."""
    nonfinite: NonFiniteConfig = NonFiniteConfig()
    """The treatment of steps whose loss or gradient is not finite."""
    eval: EvalConfig | None = None
    """The evaluations during the run."""
    checkpoint: SavingConfig = SavingConfig()
    """The checkpoints."""
    callbacks: tuple[CallbackConfig, ...] = ()
    """Observers of the run."""
    track: Immaterial[tuple[TrackerConfig, ...]] = ()
    """Trackers that show the metrics, in addition to `metrics.jsonl`."""
    machine: MachineConfig = MachineConfig()
    """The machine."""

    @property
    def fastest(self) -> str:
        """The dtype of the fastest matrix products of a step, for the lower bound of its time."""
        return self.precision if self.machine.float8 is None else "float8"

    def check(self) -> None:
        """Raise `Invalid` unless the run has exactly one length, and for settings that contradict each other."""
        super().check()
        ends = [name for name in type(self).model_fields if name in ENDS and getattr(self, name) is not None]
        if not ends:
            raise Invalid("", "the length is missing: a run must have one of `steps`, `tokens`, `epochs` and `flops`")
        if len(ends) > 1:
            words = " and ".join(f"`{name}`" for name in ends)
            raise Invalid(ends[1], f"the run must have a single end; got {words}", help="remove all ends but one")
        check_labels("callbacks", {number: config for number, config in enumerate(self.callbacks) if config.named})
        if self.branch is not None and self.weights is not None:
            raise Invalid("weights", "`weights` has no effect: a branch has the weights of its run", help="remove it")
        self._check_adapters()
        self._check_batch()
        if self.machine.gather == "bfloat16" and self.precision != "bfloat16":
            message = "`gather: bfloat16` must not change the numbers of a run in float32"
            raise Invalid("machine.gather", message, help="remove it, or set `precision: bfloat16`")
        if self.machine.float8 and self.precision != "bfloat16":
            message = f"`float8` must be combined with `precision: bfloat16`; got {self.precision}"
            raise Invalid("machine.float8", message, help="set `precision: bfloat16`, or remove `float8`")
        unknown = [name for name in (self.eval.splits if self.eval else ()) if name not in self.data.split_names]
        if unknown:
            names = ", ".join(self.data.split_names)
            raise Invalid(f"eval.splits.{unknown[0]}", f"there is no split `{unknown[0]}`", notes=(f"splits: {names}",))

    def _check_adapters(self) -> None:
        """Raise `Invalid` for settings that have no effect on adapters, and for weights that are not complete."""
        if self.adapters is None:
            return
        if self.branch is not None:
            help = "train the adapters of that run further: `weights`, and `adapters: {start: DIR}`"
            raise Invalid("branch", "`branch` cannot be combined with `adapters`", help=help)
        keys = ("map", "tokens", "missing", "unused", "allow_change")
        if partial := [key for key in keys if getattr(self.weights, key, None)]:
            message = f"`{partial[0]}` cannot be combined with `adapters`, which belong to complete weights"
            help = "write a folder with the weights first, with `tfkit.build(..., weights=...)` and `tfkit.save`"
            raise Invalid(f"weights.{partial[0]}", message, help=help)
        if self.freeze:
            message = "`freeze` has no effect: with `adapters`, no weight is trained"
            raise Invalid("freeze", message, help="remove it")
        if self.flops is not None:
            help = "set `steps`, `tokens` or `epochs`"
            raise Invalid("flops", "`flops` cannot be combined with `adapters`: it counts full training", help=help)
        if self.machine.float8:
            raise Invalid("machine.float8", "`float8` cannot be combined with `adapters`", help="remove it")

    def _check_batch(self) -> None:
        """Raise `Invalid` if the batch does not fit the data, the length of the run, or the micro-batch."""
        if self.data.takes_length and self.batch.length is None:
            help = "add it, for instance `batch: {sequences: 16, length: 128}`"
            raise Invalid("batch", f"data `{self.data.kind_name()}` needs a `length`", help=help)
        if not self.data.takes_length and self.batch.length is not None:
            message = f"`length` has no effect: data `{self.data.kind_name()}` sets its length"
            raise Invalid("batch.length", message, help="remove it")
        if isinstance(self.batch.length, Mapping) and not self.data.windows:
            message = (
                f"the length of data `{self.data.kind_name()}` cannot change by step: its examples are not windows"
            )
            raise Invalid("batch.length", message, help="write a number; the data `text` and `tokens` has windows")
        for field in ("sequences", "length"):
            if self.steps is None and has_fraction(getattr(self.batch, field)):
                raise Invalid(f"batch.{field}", WITHOUT_STEPS, help=SET_STEPS)
        if self.micro_batch > self.batch.largest:
            message = f"`micro_batch` must be at most the batch, {self.batch.largest} sequences; got {self.micro_batch}"
            raise Invalid("machine.micro_batch", message)

    @property
    def micro_batch(self) -> int:
        """Number of sequences in the first forward pass."""
        size = self.machine.micro_batch
        return size if isinstance(size, int) else self.batch.largest


def render_run(config: RunSpec, spec: Spec) -> str:
    """Return the YAML text of a resolved run, including its model with the plugins that it requires."""
    values = data_of(config)
    inside = {name: value for name, value in spec_data(spec.portable).items() if name != "tfkit"}
    first = [name for name in ("tfkit", "name", "description", "source") if name in values]
    data: dict[str, Data] = {**{name: values[name] for name in first}, "model": inside}
    data |= {name: values[name] for name in RunSpec.model_fields if name in values}
    return "".join(f"{line}\n" for line in lines_of(data, 0))
