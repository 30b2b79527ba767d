"""The document of a run: the model that is trained, its data, each step, and the evaluations."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field

from tfkit.component import AttentionBackend, Config, Count, Extent, Immaterial, PositiveFloat, slot
from tfkit.errors import Invalid
from tfkit.run.contract import (
    CallbackConfig,
    DataConfig,
    LossConfig,
    MetricConfig,
    OptimizerConfig,
    PositiveCount,
    ScheduleConfig,
    TrackerConfig,
)
from tfkit.spec.document import NAME, Document
from tfkit.spec.folder import RUN, latest_checkpoint, step_of
from tfkit.spec.merge import ANY, MergeKeys
from tfkit.spec.model_spec import ModelSpec
from tfkit.spec.render import Data, data_of, document, lines_of

MODEL = "model"
"""The key of a run's model, a nested spec."""
ENDS = frozenset({"steps", "tokens", "passes", "flops"})
"""Keys that say how long a run is; it has one of them."""
LISTS = ("track", "callbacks")
"""Keys whose value may be one kind instead of a list."""


WeightMapping: TypeAlias = Annotated[Mapping[str, Any], "a mapping of weights to weights, or to a weight and a pattern"]


class BatchConfig(Config):
    """The examples of one update, over all processes."""

    sequences: PositiveCount
    """Their number."""
    length: PositiveCount | None = None
    """Positions of each example, for data without a fixed length."""


class SplitConfig(Config):
    """The part of a split that an evaluation reads."""

    word_key = "batches"

    batches: PositiveCount | Literal["all"]
    """A number of batches, drawn once and always the same; or `all`, every token once."""


class EvalConfig(Config):
    """The evaluations during a run: before its first step, at each multiple of `every`, and after its last."""

    every: PositiveCount
    """Steps between two evaluations."""
    splits: dict[str, SplitConfig]
    """The splits to read."""
    metrics: tuple[MetricConfig, ...] = slot("loss")
    """The numbers to compute."""

    def names(self, terms: Iterable[str]) -> list[str]:
        """Return the names of its numbers, such as `val.loss`, for a loss with these terms."""
        return [name for split in self.splits for metric in self.metrics for name in metric.names(split, terms)]

    def check(self) -> None:
        """Refuse an evaluation of nothing, and two numbers of one name."""
        super().check()
        if not self.splits or not self.metrics:
            raise Invalid("splits" if not self.splits else "metrics", "there is nothing to evaluate")
        kinds = [metric.kind_name() for metric in self.metrics]
        twice = next((number for number, kind in enumerate(kinds) if kind in kinds[:number]), None)
        if twice is not None:
            raise Invalid(
                f"metrics.{twice}", f"`{kinds[twice]}` must be listed once: both metrics would have the same name"
            )


class SavingConfig(Config):
    """The checkpoints of a run. One is always written at its end."""

    every: PositiveCount | None = None
    """Steps between two checkpoints; only at the end unless given."""
    last: Count = 2
    """The number of checkpoints to keep, the newest ones."""


class WeightsConfig(Config):
    """The initial weights of a run. Missing and additional tensors must be allowed by name."""

    word_key = "path"

    path: Immaterial[str]
    """Safetensors, their folder, or the folder of a run: its latest checkpoint."""
    map: WeightMapping | None = None
    """Weights of the model, and the weights that fill them: `decoder.layers.{i}: decoder.layers.{i // 2}`. With a map,
    `path` is a folder with a spec, and `unused` has names of its model."""
    tokens: tuple[str, ...] = ()
    """Patterns of weights with a row for each token, such as `embedding.tokens.*`. Tokens that the tokenizer of the
    weights has keep their rows; the rows of new tokens begin at random."""
    missing: tuple[str, ...] = ()
    """Patterns of weights that are not read and begin at random, by their names in the model, such as `logits.*`."""
    unused: tuple[str, ...] = ()
    """Patterns of tensors that the model does not read, by their names in the file, such as `lm_head.weight`."""
    allow_change: bool | tuple[str, ...] = False
    """If true, accept weights of a model with other values; or patterns of the values that may differ."""

    def located(self, folder: Path) -> Self:
        """Return the config with an absolute path. A relative path starts at `folder`."""
        return self.model_copy(update={"path": str((folder / self.path).absolute())})


class BranchConfig(Config):
    """The checkpoint of another run that a run continues, with different steps, rates, schedule or data."""

    word_key = "run"

    run: Immaterial[str]
    """The folder of the run."""
    step: Immaterial[Count | None] = None
    """The step of the checkpoint; the latest unless given."""

    def located(self, folder: Path) -> Self:
        """Return the config with an absolute path and the number of the latest step, which may be another one later.

        A relative path starts at `folder`.
        """
        parent, step = (folder / self.run).absolute(), self.step
        if step is None and os.path.isfile(parent / RUN) and (latest := latest_checkpoint(parent)):
            step = step_of(latest)
        return self.model_copy(update={"run": str(parent), "step": step})


class NonFiniteConfig(Config):
    """A step whose loss or gradient is not finite never changes a weight."""

    skip: Extent = 0
    """The number of such steps to leave out; the next one ends the run with an error."""


class MachineConfig(Config):
    """The machine: except for `float8`, it changes no number beyond rounding."""

    device: str = "cpu"
    """cpu, cuda, mps."""
    micro_batch: PositiveCount | Literal["auto"] | None = None
    """Sequences of one forward and backward; all at once unless given. `auto`: half as many when memory runs out."""
    compile: bool | Literal["layers"] = False
    """If true, `torch.compile` the loss; or `layers`, which compiles every different layer once."""
    recompute: Literal["none", "full", "selective"] | PositiveCount = "none"
    """Layers that keep only their inputs for the backward and run again in it: all with `full`, every n-th with a
    number n. With `selective`, all layers do, but also keep the results of matrix products and of attention."""
    attention: AttentionBackend = "sdpa"
    """The implementation of attention: sdpa, eager, flex."""
    shard: PositiveCount | None = None
    """Processes that share one copy of the weights, a part in each; all of them unless given."""
    gather: Literal["float32", "bfloat16"] = "float32"
    """The type in which processes send each other the weights of layers, except norms; `bfloat16` is for runs of that
    precision."""
    float8: Literal["tensorwise", "rowwise"] | None = None
    """The scales with which training steps multiply the matrices of layers in float8: one for each tensor, or one for
    each row. For `precision: bfloat16`; a run with it is another run."""
    threads: Count = 1
    """Threads of the processor for one operation."""

    def material(self) -> Mapping[str, Any]:
        """Return the setting that changes numbers beyond rounding, if it is used."""
        return {} if self.float8 is None else {"float8": self.float8}

    def recomputes(self, layer: int) -> bool:
        """Return True if the layer of this number runs again in the backward."""
        return self.recompute != "none" and (isinstance(self.recompute, str) or layer % self.recompute == 0)


class RunSpec(Document):
    """A run with every value resolved. Its model is a separate spec."""

    sort, command, typical = "run", "train", ("model", "data")
    further_keys = (MODEL,)
    merge_keys = MergeKeys(
        {("weights",): "path", ("branch",): "run", ("eval", "splits", ANY): "batches"},
        values=frozenset({"path", "run", "batches"}),
    )

    name: Immaterial[str] = Field(pattern=NAME, max_length=100)
    """The name of the run."""
    description: Immaterial[str | None] = None
    """The purpose of the run."""
    source: Immaterial[str | None] = None
    """The paper or the page that describes the experiment."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """The seed of the first weights, of the order of the data, and of dropout, apart from each other."""
    weights: WeightsConfig | None = None
    """The weights to begin with; random ones unless given."""
    branch: BranchConfig | None = None
    """The checkpoint to continue, with its weights, optimizer state and step; a new run unless given."""
    freeze: tuple[str, ...] = ()
    """Patterns of weights that stay as they are, such as `embedding.*`."""
    data: DataConfig
    """The examples."""
    batch: BatchConfig
    """The examples of one update."""
    steps: PositiveCount | None = None
    """Updates in all; or `tokens`, or `passes`, or `flops`."""
    tokens: PositiveCount | None = None
    """Positions that are read in all, rounded up to whole steps."""
    passes: PositiveFloat | None = None
    """Passes over the training split, rounded up to whole steps."""
    flops: PositiveFloat | None = None
    """FLOPs of all forwards and backwards, as `tfkit cost` counts them with every pair of query and key, rounded up to
    whole steps."""
    loss: LossConfig = slot("cross_entropy")
    """The function that training makes small."""
    optimizer: OptimizerConfig
    """The update of the weights."""
    schedule: ScheduleConfig = slot("constant")
    """The learning rate over the steps."""
    clip: PositiveFloat | None = None
    """The largest norm of the gradient of all weights; a larger one is scaled down to it."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """The type to compute in; weights and their updates are float32."""
    nonfinite: NonFiniteConfig = NonFiniteConfig()
    """Steps whose loss or gradient is not finite."""
    eval: EvalConfig | None = None
    """The evaluations during the run."""
    checkpoint: SavingConfig = SavingConfig()
    """The checkpoints."""
    callbacks: tuple[CallbackConfig, ...] = ()
    """Observers."""
    track: Immaterial[tuple[TrackerConfig, ...]] = ()
    """Trackers that show the metrics, in addition to `metrics.jsonl`."""
    machine: MachineConfig = MachineConfig()
    """The machine."""

    @property
    def fastest(self) -> str:
        """The type of the fastest matrix products of a step, which bound its time."""
        return self.precision if self.machine.float8 is None else "float8"

    def check(self) -> None:
        """Refuse a run of no length, or of several; and a micro-batch that is more than the batch."""
        super().check()
        ends = [name for name in type(self).model_fields if name in ENDS and getattr(self, name) is not None]
        if not ends:
            raise Invalid("", "the run has no end: it must have one of `steps`, `tokens`, `passes` and `flops`")
        if len(ends) > 1:
            words = " and ".join(f"`{name}`" for name in ends)
            raise Invalid(ends[1], f"the run must have a single end; got {words}", help="remove all ends but one")
        if self.branch is not None and self.weights is not None:
            raise Invalid("weights", "`weights` has no effect: a branch has the weights of its run", help="remove it")
        if self.data.takes_length and self.batch.length is None:
            help = "add it, for instance `batch: {sequences: 16, length: 128}`"
            raise Invalid("batch", f"data `{self.data.kind_name()}` needs a `length`", help=help)
        if not self.data.takes_length and self.batch.length is not None:
            message = f"`length` has no effect: data `{self.data.kind_name()}` sets its length"
            raise Invalid("batch.length", message, help="remove it")
        if self.micro_batch > self.batch.sequences:
            message = (
                f"`micro_batch` must be at most the batch, {self.batch.sequences} sequences; got {self.micro_batch}"
            )
            raise Invalid("machine.micro_batch", message)
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

    @property
    def micro_batch(self) -> int:
        """Sequences of the first forward."""
        size = self.machine.micro_batch
        return size if isinstance(size, int) else self.batch.sequences

    def count_steps(self, *, tokens_of_step: int, examples: int) -> int:
        """Return the number of updates for this number of examples. The length of the run must not be in FLOPs."""
        if self.steps is not None:
            return self.steps
        if self.tokens is not None:
            return -(-self.tokens // tokens_of_step)
        assert self.passes is not None
        return max(1, -int(-self.passes * examples // self.batch.sequences))


def render_run(config: RunSpec, model: ModelSpec) -> str:
    """Return the YAML text of a resolved run, its model inside."""
    values = data_of(config)
    inside = {name: value for name, value in document(model).items() if name != "tfkit"}
    first = [name for name in ("tfkit", "name", "description", "source") if name in values]
    data: dict[str, Data] = {**{name: values[name] for name in first}, "model": inside}
    data |= {name: values[name] for name in RunSpec.model_fields if name in values}
    return "".join(f"{line}\n" for line in lines_of(data, 0))
