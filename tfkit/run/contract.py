"""The slots of a run: data, tokenizer, loss, optimizer, schedule, parametrization, metric, callback, tracker.

A kind for any of these slots is a config, registered like a component of a model. This module does not import torch: a
run is checked, and its data is read, before any tensor exists.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, Self, TypeAlias

import numpy as np
from pydantic import Field

from tfkit.component.config import Component, Config, PositiveFloat
from tfkit.errors import Invalid
from tfkit.learning.output_term import OutputConfig as OutputConfig

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor, fx, nn

    from tfkit.decoding.masked_diffusion import MaskedDiffusion
    from tfkit.graph.expand import Graph

Ids: TypeAlias = "NDArray[np.int64]"
"""Token ids, or indices of examples."""
Array: TypeAlias = "NDArray[Any]"
"""Inputs of examples: token ids, or real numbers."""
IGNORE_INDEX = -100
"""The target of a position that does not count."""
MAX_RATE = 1e18
"""The largest learning rate or weight decay. Products of both and of factors are then float32, as optimizers need."""
Order = Literal["sampled", "shuffled", "sequential"]
NonNegative = Annotated[float, Field(ge=0)]
"""A number of at least 0."""
PositiveCount = Annotated[int, Field(ge=1, le=2**40)]
"""A number of steps, sequences, tokens."""
Steps = Annotated[int, Field(ge=0, le=2**40)] | Annotated[float, Field(gt=0, lt=1)]
"""A number of steps; or, below 1, a fraction of the run's steps."""


Name = Annotated[str, Field(pattern=r"^[a-z0-9_]+$", max_length=40)]
"""A name that tells several metrics or callbacks of a kind apart."""


def label_of(config: Component) -> str:
    """Return the name of a metric or a callback: its kind, and the value of its field `name`, if it has one."""
    name = getattr(config, "name", None)
    return config.kind_name() if name is None else f"{config.kind_name()}_{name}"


# ---- data ----


@dataclass(frozen=True)
class Batch:
    """A batch of examples: the model's inputs by name, and the target of each position.

    A model with a single input takes the only input of the batch, whatever its name.
    """

    inputs: Mapping[str, Array]
    """Token ids [b, t]; or real numbers in float32: features [b, t, width], images or vectors. Inputs may differ in
    their number of positions."""
    targets: Array | None
    """Ids [b, t]; or [b] for a model that returns logits once for each example. `IGNORE_INDEX` where nothing counts.
    For losses that do not predict ids: real numbers in float32, [b, ...]; or None, if the loss needs the inputs alone.
    """
    documents: Ids | None = None
    """Document number of each position, [b, t], for rows that hold several documents. The model then treats each
    document as if it were alone in its row."""
    masks: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    """Padding masks by input, [b, t], True where there is a token. An input without padding has no mask here."""
    alternatives: tuple[Batch, ...] = ()
    """Batches for a `ChoiceMetric`: the same questions, each with a different continuation. The loss does not include
    them. A row with fewer alternatives than the others has no targets in the last batches."""
    further_targets: Mapping[str, Ids] = field(default_factory=dict)
    """Targets of outputs that do not use `targets`, by the name of the output: [b, t], or [b] for an output of a single
    vector."""
    counted: NDArray[np.bool_] | None = None
    """The real targets that count, [b] or [b, t]; by default, each row counts once. Targets that do not count are
    NaN, so that losses and metrics can leave them out."""

    @property
    def size(self) -> int:
        """The number of examples."""
        return len(next(iter(self.inputs.values())))

    @property
    def has_ids(self) -> bool:
        """True if the targets are ids; False if they are real numbers, or if there are none."""
        return self.targets is not None and self.targets.dtype.kind in "iu"

    @property
    def ids(self) -> Ids:
        """The targets, if they are ids. Raises `Invalid` otherwise."""
        if self.targets is None or not self.has_ids:
            raise Invalid("", "the targets of the data must be ids", help="evaluate the metric `objective` instead")
        return self.targets

    @property
    def count(self) -> int:
        """The number of positions that count; for targets that are not ids and have no `counted`, of examples."""
        if self.has_ids:
            return int((self.ids != IGNORE_INDEX).sum())
        return self.size if self.counted is None else int(np.count_nonzero(self.counted))

    def counts_of(self, terms: Mapping[str, OutputConfig]) -> list[int]:
        """Return the number of positions that count in each term of a loss; without terms, the `count`."""
        targets = self.targets_of(terms).values() if terms else ()
        return [int((ids != IGNORE_INDEX).sum()) for ids in targets] or [self.count]

    def targets_of(self, terms: Mapping[str, OutputConfig]) -> dict[str, Ids]:
        """Return the targets of each term of a loss; without terms, `targets` under an empty name, if there are any."""
        if self.targets is None:
            return {}
        targets = {name: self.further_targets.get(name, self.targets) for name in terms} or {"": self.targets}
        for name, term in terms.items():
            if distance := term.shift - 1:
                shifted = np.full_like(targets[name], IGNORE_INDEX)
                shifted[:, :-distance] = targets[name][:, distance:]
                if self.documents is not None:
                    shifted[:, :-distance][self.documents[:, distance:] != self.documents[:, :-distance]] = IGNORE_INDEX
                targets[name] = shifted
        return targets

    def rows(self, start: int, end: int) -> Batch:
        """Return the examples from `start` to `end`."""
        return self._at(slice(start, end))

    def cut(self, length: int) -> Batch:
        """Return the first `length` positions of each example, for examples that are windows."""
        return self._at((slice(None), slice(length)))

    def _at(self, index: slice | tuple[slice, ...]) -> Batch:
        inputs, masks = ({name: ids[index] for name, ids in part.items()} for part in (self.inputs, self.masks))
        documents = None if self.documents is None else self.documents[index]
        alternatives = tuple(batch._at(index) for batch in self.alternatives)
        further = {name: ids[index] for name, ids in self.further_targets.items()}
        targets, counted = (None if part is None else part[index] for part in (self.targets, self.counted))
        return Batch(inputs, targets, documents, masks, alternatives, further, counted)


class Tokenizer(Protocol):
    """Converts text to token ids and back, and writes the file that `tfkit generate` reads."""

    vocab_size: int
    file: str
    """Name of the tokenizer's file in a model folder."""

    def encode(self, text: str) -> Sequence[int]:
        """Return the ids of a text; raise ValueError for text that the tokenizer cannot express."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""

    def byte_counts(self) -> Sequence[int]:
        """Return the number of UTF-8 bytes that each id stands for."""

    def save(self, path: Path) -> None:
        """Write the tokenizer's file."""


def bare_ids(tokenizer: Tokenizer, text: str) -> Sequence[int]:
    """Return the ids of a text without the special tokens that `encode` may put around it."""
    encode: Callable[[str], Sequence[int]] = getattr(tokenizer, "encode_bare", tokenizer.encode)
    return encode(text)


class Examples(Protocol):
    """A finite list of examples, in an order that never changes.

    Examples whose batches have padding also have `positions`, the number of positions of all examples of an epoch,
    without padding; an example with several inputs has the positions of its longest input. The mean of a training
    example determines `tokens`, `flops` and the speed of a run. It is the same for every seed, order and number of
    processes, and known without a pass over the examples.
    """

    def __len__(self) -> int:
        """Return the number of examples in one epoch of the split."""

    def batch(self, indices: Ids) -> Batch:
        """Return the examples with these indices, [b]. The result must depend only on the indices."""


class Data(Protocol):
    """Data that has been read. Equal configs must give equal data on every machine.

    If targets are classes instead of tokens, the data also has `n_classes`, one more than the largest target. A run's
    model can use it as `data.n_classes`. If each output has its targets in `Batch.further_targets`, `n_classes` is a
    mapping from outputs, and a run's model can use `data.n_classes.OUTPUT`.

    Data may also have the ids `start` and `end` of the tokens that begin and end a generated text, or None, and
    `classes`, the names of the classes of the main output in order, or None. Generation stops at `end`, and exported
    models have these values.

    Data with images may have `pixel_scale`, means and standard deviations by channel, if integers from 0 to 255 become
    (pixel / 255 - mean) / std: exported models then have an image processor.

    Data whose targets are standardized has `mean` and `std`, a number for each number of a target: a target times `std`
    plus `mean` is the number in the units of the data.

    Data that is unusual, but not wrong, also has `warnings`: instances of `Invalid` that name the field and the cause.
    """

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; 0 if neither inputs nor targets are ids."""

    @property
    def length(self) -> int:
        """Number of positions of the longest example."""

    @property
    def splits(self) -> Sequence[str]:
        """Names of the splits: `train`, and the splits to evaluate on."""

    @property
    def fingerprint(self) -> str:
        """Digest of everything that the config does not determine, such as the content of files."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the data; None if its ids do not stand for text."""

    def examples(self, split: str, order: Order) -> Examples:
        """Return the examples of a split.

        With `sampled`, they may overlap; otherwise each token is in exactly one example.
        """


class DataConfig(Component):
    """Slot `data`: the examples that a run is trained and evaluated on.

    `build` reads the examples. The training loop chooses the indices of the examples of each step.
    """

    slot = "data"

    order: Order = "shuffled"
    """sampled: with replacement; shuffled: each example once per epoch, in a new order; sequential: in stored order."""
    split: dict[str, Annotated[float, Field(gt=0, le=1)]] = Field(default_factory=lambda: {"train": 0.9, "val": 0.1})
    """The fraction of the data in each split."""

    def check(self) -> None:
        """Raise `Invalid` unless there is a split `train` and the fractions add up to at most 1."""
        super().check()
        if "train" not in self.split:
            raise Invalid("split", "there is no split `train`", help="write `split: {train: 0.9, val: 0.1}`")
        if sum(self.split.values()) > 1 + 1e-9:
            raise Invalid(
                "split", f"the fractions of the splits must add up to at most 1; got {sum(self.split.values()):g}"
            )

    @property
    def takes_length(self) -> bool:
        """True if a run sets the `length` of the examples; False if the data determines the length."""
        return False

    @property
    def windows(self) -> bool:
        """True if the examples are windows of a longer sequence, so that the beginning of an example is an example.

        All arrays of a batch have the positions of the targets, [b, t]. Only such examples can have a length that
        changes by step.
        """
        return False

    @property
    def split_names(self) -> tuple[str, ...]:
        """The splits that can be evaluated."""
        return tuple(self.split)

    def idle(self, split: str) -> frozenset[str]:
        """Return the paths of fields without effect on the examples of an evaluated split; also `length` of a batch."""
        return frozenset({"order"})

    def ends(self, size: int) -> dict[str, tuple[int, int]]:
        """Return the range of each split in data of `size` items, in the order of the config."""
        ranges, start, total = {}, 0, 0.0
        for name, fraction in self.split.items():
            total += fraction
            end = min(int(total * size + 1e-6), size)
            ranges[name] = (start, end)
            start = end
        return ranges

    def drawn(self, size: int) -> dict[str, Ids]:
        """Return the indices of each split in data of `size` items: a random part, with its items in stored order.

        The parts are the same for every run. Files are often sorted, for instance by class, so consecutive ranges
        would give splits that have little in common.
        """
        order = np.random.default_rng(0).permutation(size)
        return {name: np.sort(order[start:end]) for name, (start, end) in self.ends(size).items()}

    def located(self, folder: Path) -> Self:
        """Return the config with paths that do not depend on the current folder; relative paths start at `folder`."""
        return self

    @abstractmethod
    def build(self, length: int | None) -> Data:
        """Read the data as examples of `length` positions; raise `Invalid` if the data cannot be used."""


class TokenizerConfig(Component):
    """Slot `tokenizer`: the conversion of text to token ids."""

    slot = "tokenizer"

    def located(self, folder: Path) -> Self:
        """Return the config with paths that do not depend on the current folder; relative paths start at `folder`."""
        return self

    @abstractmethod
    def build(self, text: str) -> Tokenizer:
        """Build the tokenizer for data with this text, which includes all splits."""


# ---- the step ----


class LossConfig(Component):
    """Slot `loss`: the function that training minimizes.

    A field of the type `Changeable` may change by step. The module that `build` returns then has the value as an
    attribute with the name of the field, and reads it in each call. The module of a loss in a field has the name of
    that field as well: `base.temperature`. The weights of `terms` change without an attribute.
    """

    slot = "loss"
    of_numbers: ClassVar[bool] = False
    """True if the loss needs targets that are real numbers."""

    @property
    def terms(self) -> Mapping[str, OutputConfig]:
        """The outputs in the loss, the main output first; empty if the loss uses the only output of the model."""
        return {}

    @property
    def inputs_ahead(self) -> Mapping[str, int]:
        """Inputs of the model that the run fills with the data's tokens, each with its number of positions ahead."""
        return {}

    @property
    def fills(self) -> Mapping[str, str]:
        """Inputs of the model that the data does not have, each with its type in a spec: `{"time": "vector"}`.

        The module computes them from the data and its noise, and passes them to the model. Metrics do not have them, so
        such a run is evaluated only by `objective`. The inputs of `inputs_ahead` are not among them.
        """
        return {}

    @property
    def further_positions(self) -> int:
        """The number of positions that the loss adds to each example, for which the model must have room."""
        return 0

    @property
    def undivided(self) -> bool:
        """True if the loss of a step is not the sum of the losses of its sequences.

        Such a loss cannot be computed in micro-batches or by several processes.
        """
        return False

    @property
    def draws_noise(self) -> bool:
        """True if the module takes a third argument, the `tfkit.Noise` of the examples, for its random numbers."""
        return False

    @property
    def predicts_targets(self) -> bool:
        """True if the logits of the outputs in the loss are trained to predict the targets of the data.

        Their cross-entropy then measures how well they do, even if the loss has further terms, as in distillation.
        Otherwise, the targets of the data do not belong to the logits: metrics of cross-entropy are an error.
        """
        return False

    def generation(self, graph: Graph) -> MaskedDiffusion | None:
        """Return the way in which a trained model generates tokens; None to generate one token after the other.

        Its mask token must not be an id of the data, so the model must have room for it in its vocabulary. Raises
        ValueError for a model that cannot generate in this way.
        """
        return None

    @abstractmethod
    def build(self, model: fx.GraphModule) -> nn.Module:
        """Build a module that takes inputs and targets, and returns the sum over the positions that count.

        The training loop divides the sum by the number of these positions in the full step. A loss with `terms` takes
        the targets of each term by name, and returns the sum of each term, [n]; the loop divides each sum by the count
        of its term, and multiplies the quotient by the term's weight. A loss that counts otherwise, or that has
        further numbers to log, returns a `LossSum`.

        Parameters and persistent buffers of the module that are not the model's are its state: checkpoints contain
        them, and a resumed run restores them. With several processes, they must be equal in all processes. A model
        that is read from a `ContentPath` is written only if its values change. Nothing but the parameters of the model
        is trained.

        The state may change only in a method `after_step(step, steps)` of the module, which the loop calls once after
        each update, without gradients. `forward` must not change it, because it runs for each micro-batch, and again
        if memory runs out.
        """


@dataclass(frozen=True)
class LossSum:
    """The result of a loss that counts for itself, or that has further numbers to log."""

    total: Tensor
    """The sum over all positions or examples that count, a scalar; or of each term, [n]."""
    count: Tensor | float | None = None
    """The number of positions or examples in the sum, for a loss without `terms`; by default, of the targets that
    count. The loop divides the gradients once, after all micro-batches and processes."""
    numbers: Mapping[str, Ratio] = field(default_factory=dict)
    """Further numbers of the step by name, each as two sums: the loop adds them up over the step, and logs their ratio.
    An evaluation of the metric `objective` reports the ratio of its split. All calls must return the same names."""


class GroupConfig(Config):
    """A group of parameters with separate settings."""

    match: str
    """A pattern of parameter names, such as `*.attention.*`."""
    lr: PositiveFloat | None = None
    """Learning rate of these parameters."""
    weight_decay: NonNegative | None = None
    """Weight decay of these parameters."""

    def check(self) -> None:
        """Raise `Invalid` for a rule without effect, and for a rate or decay above `MAX_RATE`."""
        super().check()
        _check_rates(self)
        if self.lr is None and self.weight_decay is None:
            raise Invalid("match", "the group has no effect: it sets no option", help="add an `lr` or a `weight_decay`")


class OptimizerConfig(Component):
    """Slot `optimizer`: the update of the weights."""

    slot = "optimizer"
    update: ClassVar[Literal["adam", "sgd", "matrix"] | None] = None
    """The form of its update, from which a parametrization derives rates. adam: each entry changes by about the rate;
    sgd: by the rate times the gradient; matrix: all singular values change by about the rate times `matrix_factor`.
    None: no parametrization has a rule for it."""
    decoupled: ClassVar[bool] = True
    """True if a step subtracts rate * weight_decay * weight, and False if weight_decay * weight is added to the
    gradient before it is normalized."""

    lr: PositiveFloat
    """The learning rate, which the schedule multiplies by its factor."""
    weight_decay: NonNegative = 0.0
    """Weight decay of matrices; norms, biases and embedding tables do not decay."""
    decay_all: bool = False
    """If true, every parameter decays."""
    groups: tuple[GroupConfig, ...] = ()
    """Groups of parameters with separate settings; if several groups match a parameter, the last group applies."""

    def check(self) -> None:
        """Raise `Invalid` for a rate or decay above `MAX_RATE`; overriding methods call `super().check()`."""
        super().check()
        _check_rates(self)

    @property
    def rest(self) -> OptimizerConfig | None:
        """The optimizer of all parameters except matrices inside the model; None if this optimizer takes them all."""
        return None

    def matrix_factor(self, rows: int, columns: int) -> float:
        """Return the factor of the rate in the update of a matrix, for the form `matrix`."""
        return 1.0

    @abstractmethod
    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Build the optimizer of these groups, each with `params`, `lr` and `weight_decay`.

        A parametrization adds `eps` to the groups of a config that has this field. If the config has a `rest`, the
        groups of matrices inside the model also have `matrices`: for each parameter, the number of rows of each matrix
        in it. Parameters of fused or stacked layers contain several matrices. The state of the optimizer must consist
        of tensors, and depend only on the gradients and settings of all steps.
        """


def _check_rates(config: GroupConfig | OptimizerConfig) -> None:
    for name, value in (("lr", config.lr), ("weight_decay", config.weight_decay)):
        if value is not None and value > MAX_RATE:
            raise Invalid(name, f"`{name}` must be at most {MAX_RATE:g}; got {value:g}")


class ScheduleConfig(Component):
    """Slot `schedule`: the factor of the learning rate at each step.

    Steps count from 1. The factor is 1 / warmup at step 1, rises to 1 at step `warmup`, and ends at step `steps`.
    """

    slot = "schedule"

    warmup: Steps = 0
    """Number of steps in which the rate rises linearly to its full value; below 1, a fraction of all steps."""

    def factor(self, step: int, steps: int) -> float:
        """Return the factor at a step, from 1 to `steps`; above 0 during warmup."""
        peak = max(count_of(self.warmup, steps), 1)
        return step / peak if step <= peak else self.after(step - peak, steps - peak)

    @abstractmethod
    def after(self, done: int, left: int) -> float:
        """Return the factor `done` steps after the peak. `left` is the total number of steps after the peak."""

    def check_steps(self, steps: int) -> None:
        """Raise `Invalid` if the run has too few steps; overriding methods call `super().check_steps(steps)`."""
        warmup = count_of(self.warmup, steps)
        if warmup > steps:
            message = f"`warmup` must be at most the length of the run, {steps:,} steps; got {warmup:,}"
            raise Invalid("warmup", message, help=f"set `warmup` to at most {steps:,} steps")


def count_of(number: int | float, steps: int) -> int:
    """Convert a number of steps, or a fraction of `steps`, to a number of steps."""
    return number if isinstance(number, int) else round(number * steps)


# ---- parametrization ----


Role = Literal["hidden", "input", "vector", "table", "output", "latent", "fixed"]
"""The role of a weight, from the axes that grow between the base sizes and the sizes of a model. hidden: rows and
columns of a matrix; input: only its rows, or the width of a table; vector: the axis of a bias, a gain or a different
weight that is no matrix; table: the width of a table that a head shares; output: only the columns of a matrix that
computes an output of the model; latent: only the columns of another matrix, such as a router; fixed: none."""


@dataclass(frozen=True)
class Growth:
    """The shape of a weight at the base sizes and at the sizes of a model.

    Rows are outputs and columns are inputs; a vector has a single column. Of a fused or stacked weight, this is one of
    its matrices.
    """

    role: Role
    base: tuple[int, int]
    """Rows and columns at the base sizes."""
    shape: tuple[int, int]
    """Rows and columns of the model."""
    width: float = 1.0
    """The ratio of the widths of the sequences or vectors that the block of the weight computes or takes."""
    depth: float = 1.0
    """The ratio of the numbers of layers, for a weight in a layer; 1 elsewhere."""

    @property
    def rows(self) -> float:
        """The ratio of the rows."""
        return self.shape[0] / self.base[0]

    @property
    def columns(self) -> float:
        """The ratio of the columns."""
        return self.shape[1] / self.base[1]


@dataclass(frozen=True)
class Factors:
    """Factors of the settings of a weight, relative to a model of the base sizes."""

    std: float = 1.0
    """Factor of the standard deviation of the initial values."""
    lr: float = 1.0
    weight_decay: float = 1.0
    eps: float = 1.0

    def under(self, forward: float, *, squared: bool) -> Factors:
        """Return the factors of a weight that the model multiplies by `forward`.

        The product of weight and factor then has the same initial values and the same updates as the weight had. With
        `squared`, an update is proportional to the gradient, which the factor also multiplies.
        """
        rate = forward**2 if squared else forward
        return Factors(self.std / forward, self.lr / rate, self.weight_decay * rate, self.eps * forward)


class ParametrizationConfig(Component):
    """Slot `parametrization`: rates, initial values and factors of a model, derived from smaller base sizes.

    What is tuned for the model at its base sizes then holds for the model of the run.
    """

    slot = "parametrization"
    rescales: ClassVar[bool] = True
    """False if the settings of the run and the values of the spec apply unchanged."""
    covers_depth: ClassVar[bool] = False
    """True if it has a rule for numbers of layers that differ."""

    base: dict[str, PositiveCount | PositiveFloat] | None = None
    """The base sizes: paths of the model, as `--set` takes them, with numbers, such as `model.d_model: 64`."""

    def check(self) -> None:
        """Raise `Invalid` for a base size that is not a size of the model."""
        super().check()
        for path in self.base or ():
            if not path.startswith("model."):
                help = f"write `model.{path}`"
                raise Invalid(f"base.{path}", f"a base size must be a path of the model; got `{path}`", help=help)

    @abstractmethod
    def factors(self, growth: Growth, optimizer: OptimizerConfig) -> Factors:
        """Return the factors of a weight that this optimizer updates. Raise `Invalid` if there is no rule."""

    def head_factor(self, width: float) -> float:
        """Return the factor of the logits of a head with the table of an embedding whose width grows by `width`."""
        return 1.0

    def score_factor(self, width: float) -> float:
        """Return the factor of attention scores whose sums have `width` times as many terms, relative to the base.

        The default is the factor of attention without a parametrization.
        """
        return width**-0.5

    def branch_factor(self, depth: float) -> float:
        """Return the factor of the outputs of sublayers in a stack with `depth` times as many layers."""
        return 1.0


# ---- metrics, callbacks, trackers ----


@dataclass(frozen=True)
class Ratio:
    """Two sums over examples, numbers or scalar tensors; their ratio is the metric."""

    total: float | Tensor
    count: float | Tensor

    def __add__(self, other: Ratio) -> Ratio:
        return Ratio(self.total + other.total, self.count + other.count)


class Metric:
    """A metric of a split, computed from sums over its examples.

    An evaluation never has all logits: it computes them for a few positions at a time. A metric therefore maps each
    position to a value, and adds up the values of complete examples. The evaluation adds these sums over all batches
    and processes, so an instance accumulates nothing. It is built for one evaluation of one split.

    In this base class, the values are the targets. Subclasses compute them: see `LogitMetric` and `DecodedMetric`.
    """

    def sums(self, values: Tensor, targets: Tensor) -> Any:
        """Return the sums over some examples, an object that `+` adds to the sums over different examples.

        By default, the sum of the values at positions that count, and the number of these positions.

        Args:
            values: [b, t], a value for each position.
            targets: [b, t]; `IGNORE_INDEX` where nothing counts.
        """
        counted = (targets != IGNORE_INDEX).cpu()
        return Ratio(float(values.cpu().double()[counted].sum()), int(counted.sum()))

    def compute(self, sums: Any) -> float:
        """Return the metric from the sums over all examples, of which at least one position counts."""
        return float(sums.total / sums.count)


class LogitMetric(Metric):
    """A metric whose values are computed from logits."""

    @abstractmethod
    def values(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return a value for each position, [n], from logits [n, v] and targets [n]."""


class ChoiceMetric(LogitMetric):
    """A metric that compares each example with its `alternatives`.

    Its `sums` take the sum of the values of each choice, [b, 1 + alternatives], the example first; and the number of
    positions of each choice that count, which is 0 for an alternative that does not exist.
    """


class DecodedMetric(Metric):
    """A metric whose values are computed from tokens that the model generates."""

    @abstractmethod
    def values(
        self, model: fx.GraphModule, inputs: Mapping[str, Tensor], targets: Tensor, *, seed: int, first: int
    ) -> Tensor:
        """Return a value for each position, [b, t]; raise `Invalid` if the metric does not apply to the examples.

        Args:
            model: the model, in eval mode.
            inputs: the inputs of the model, [b, t] each.
            targets: [b, t]; `IGNORE_INDEX` where nothing counts.
            seed: the number of the batch.
            first: the index of the first example within the batch. Random numbers must depend only on the seed and the
                index of an example, so that results do not depend on `micro_batch`.
        """


class MetricConfig(Component):
    """Slot `metric`: a number that evaluations compute."""

    slot = "metric"
    each_output: ClassVar[bool] = False
    """True if the metric is computed for each output in the loss; False if only for the main output."""
    cross_entropy: ClassVar[bool] = False
    """True if the metric is the cross-entropy of the data's targets, for losses that `predicts_targets`."""
    of_numbers: ClassVar[bool] = False
    """True if the targets of the metric are real numbers, [n, v], NaN where nothing counts; False if they are ids."""
    objective: ClassVar[bool] = False
    """True if the metric is computed from the results of the run's loss. Its `compute` takes an array [n, 2]: the
    total, times its weight, and the count of each term of the loss, or of the loss."""

    def names(self, split: str, terms: Iterable[str]) -> dict[str, str | None]:
        """Return the names that the metric has in reports, each with its output; None for the main output.

        A kind with a field `name` can be listed several times: the name follows the kind, as in `val.accuracy_NAME`.
        """
        label, further = label_of(self), [*terms][1:] if self.each_output else []
        return {f"{split}.{label}": None, **{f"{split}.{output}.{label}": output for output in further}}

    @abstractmethod
    def build(self, data: Data) -> Metric:
        """Build the metric; raise `Invalid` if it cannot be computed on the data."""


class Training(Protocol):
    """The part of a run that callbacks can use."""

    model: fx.GraphModule
    """The model, with its current weights."""
    data: Data
    """The data of the run."""
    seed: int
    """The seed of the run."""
    step: int
    """Number of steps so far."""
    steps: int
    """Total number of steps."""

    def log(self, name: str, value: float) -> None:
        """Add a number to the line that this step, or this evaluation, writes to the run's record and trackers.

        Call it only in `on_step` and `on_eval`. With several processes, the value of the first process is written. A
        value that is not finite is written, but is not part of any curve.

        Raises:
            Invalid: the name is taken, or the value is not a number; or there is no line, as in `on_start`.
        """

    def text(self, name: str, text: str) -> None:
        """Write a text to the run's record and trackers."""

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return the arguments of the model for a batch, including masks, by name and on the model's device.

        Raises:
            Invalid: the loss `fills` further arguments.
        """

    def stop(self, reason: str) -> None:
        """End the run after this step. The run then counts as finished."""

    def evaluate(self) -> dict[str, float]:
        """Evaluate the run's splits and metrics with the current weights; return an empty dict without `eval`."""

    def save_model(self, name: str) -> None:
        """Write the model with its current weights to the folder `name` in the run's folder, replacing that folder."""


class Callback:
    """An observer of a run, whose methods do nothing unless overridden.

    A callback may read the state of the run and draw random numbers. It can reject updates and end the run, but cannot
    affect the training in any different way.
    """

    def on_start(self, training: Training) -> None:
        """Run before the first step of this process."""

    def reject(self, training: Training, numbers: Mapping[str, float]) -> str | None:
        """Return a reason to skip an update, or None. `numbers` are the `loss`, `lr` and `grad_norm` of the step.

        The weights have gradients, but are not updated yet. A skipped step counts, so the next step trains on new
        examples. `training.step` is the number of the previous step.
        """
        return None

    def on_step(self, training: Training, numbers: Mapping[str, float]) -> None:
        """Run after an update with its `loss`, `lr` and `grad_norm`; `training.log` adds more numbers."""

    def on_eval(self, training: Training, numbers: Mapping[str, float]) -> None:
        """Run after an evaluation with its metrics, such as `val.loss`; `training.log` adds more numbers."""

    def on_end(self, training: Training) -> None:
        """Run after the last step of this process; run again if the process is killed before it records its end."""

    def state(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as JSON data."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the `state` of a checkpoint."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors that a resumed run needs, by name, such as averages of weights."""
        return {}

    def restore_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the `tensors` of a checkpoint, if it has any. They are full tensors on the CPU."""


class CallbackConfig(Component):
    """Slot `callback`: an observer of a run."""

    slot = "callback"
    named: ClassVar[bool] = False
    """True if the numbers or folders that it writes have its name. Several callbacks of the kind in a run then need
    a field `name`, and different values."""

    @abstractmethod
    def build(self) -> Callback:
        """Build the observer."""


class Tracker(Protocol):
    """A service that shows the metrics of a run, in addition to `metrics.jsonl`."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step."""

    def text(self, step: int, name: str, text: str) -> None:
        """Log a text."""

    def close(self) -> None:
        """Write pending entries, and release resources."""


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker shows."""

    name: str
    folder: Path
    """The run folder, in which a tracker may store files."""
    step: int
    """The step after which the run resumes; 0 for a new run. A tracker removes later steps that it has stored."""
    values: Mapping[str, Any]
    """Each value of the run and of its model, by its path: `optimizer.lr`, `model.graph.decoder.n_layers`."""
    graph: Graph
    """The model of the run."""


class TrackerConfig(Component):
    """Slot `tracker`: a service that shows the metrics of a run."""

    slot = "tracker"
    extra: ClassVar[str | None] = None
    """The extra of tfkit that installs the package of the service, for the error if it is missing."""

    @abstractmethod
    def build(self, run: TrackedRun) -> Tracker:
        """Build the tracker of a run. A `ModuleNotFoundError` is reported with the extra that installs the package."""
