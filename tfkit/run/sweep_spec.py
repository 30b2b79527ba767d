"""The document of a sweep: variants of a run, the sizes that they share, and their comparison."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, field_validator

from tfkit.component import Config, PositiveFloat
from tfkit.errors import Invalid, listing
from tfkit.run.contract import PositiveCount
from tfkit.spec.document import Document

Seed = Annotated[int, Field(ge=0, lt=2**63)]
LOWER_IS_BETTER = frozenset({"loss", "objective", "bits_per_byte", "perplexity"})
"""Metrics that are better if they are lower."""
BUDGETS = ("params", "flops", "tokens", "time")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)%")
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kMB]?)")
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9}
MAX_PARAMETERS = 2**50
"""Maximum number of parameters of a model."""
ONLY_VARIANT = "base"
"""Name of the only variant in a sweep without `variants`."""
PARAMS = "params"
"""The key of `sizes` for numbers of parameters."""
PREVIOUS = "previous"
"""The value of `compare.to` that compares each variant to the variant before it."""


class EqualConfig(Config):
    """Sizes in which a variant must match its baseline, each with the largest allowed relative difference."""

    params: str | None = None
    """Number of parameters: `0.5%`."""
    by: str | None = None
    """The path of an integer of the model, such as `decoder.ffn.d_ff`. A variant with a different number of parameters
    gets the integer with which it has as many parameters as its baseline."""
    flops: str | None = None
    """FLOPs of the full run, forward and backward."""
    tokens: str | None = None
    """Positions that the full run trains on."""
    time: str | None = None
    """Minimum time of the full run on a device, predicted from FLOPs and bytes. Other processes do not affect it."""
    device: str | None = None
    """The device for `time`: its name, or a file with its limits; by default the run's device."""

    @field_validator(*BUDGETS, mode="before")
    @classmethod
    def _percent(cls, value: object) -> object:
        if value is not None and not _PERCENT.fullmatch(str(value)):
            raise Invalid(
                "", f"the value must be a percentage; got `{value}`", help="write `0.5%`, or `0%` for exact equality"
            )
        return value

    def check(self) -> None:
        """Raise `Invalid` if no size is set, or if `device` has no effect."""
        super().check()
        if not self.shares():
            raise Invalid("", "`equal` names no size", help="name a size, for instance `equal: {params: 0.5%}`")
        if self.by is not None and self.params is None:
            raise Invalid("by", "`by` has no effect without `params`", help="add `params: 1%`, or remove it")
        if self.device is not None and self.time is None:
            raise Invalid("device", "`device` has no effect without `time`", help="add `time: 5%`, or remove it")

    def shares(self) -> dict[str, float]:
        """Return the largest relative difference of each size, as a fraction."""
        texts = {"params": self.params, "flops": self.flops, "tokens": self.tokens, "time": self.time}
        return {name: float(text[:-1]) / 100 for name, text in texts.items() if text is not None}


class SearchConfig(Config):
    """A search that chooses the next values from the results so far; each variant has a separate search."""

    kind: Literal["optuna"] = "optuna"
    """The library that runs the search."""
    sampler: Literal["tpe", "gp", "random"] = "tpe"
    """tpe: tree of Parzen estimators; gp: a Gaussian process; random: independent draws."""
    trials: Annotated[int, Field(ge=1, le=1000)]
    """The number of trials of each variant."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """The seed of the search: searches with equal seeds and results try equal values."""


Scale = Literal["log", "linear", "whole"]
SCALES: tuple[Scale, ...] = ("log", "linear", "whole")


class Range(NamedTuple):
    """All numbers between two ends: `log` draws uniformly on a log scale, `whole` draws integers."""

    scale: Scale
    low: float
    high: float


class TuneConfig(Config):
    """Settings to tune: every variant tries the values on separate seeds, and is then trained with the best."""

    over: dict[str, Any]
    """The values of each setting, by the path that `--set` takes. A search also takes ranges, `{log: [1e-4, 1e-2]}`.
    """
    search: SearchConfig | None = None
    """The search; by default, every combination of values is tried."""
    seeds: tuple[Seed, ...]
    """The seeds of the trials, which must not be seeds of the sweep."""
    steps: PositiveCount | None = None
    """Steps of a trial; by default as many as in a run."""
    at: Literal["each", "smallest"] = "each"
    """The sizes that are tuned. With `smallest`, all sizes of a variant have the values of its first size."""

    def check(self) -> None:
        """Raise `Invalid` if there is nothing to tune, and for ranges without a search."""
        super().check()
        _check_seeds(self.seeds)
        if not self.over:
            raise Invalid(
                "over", "there is nothing to tune", help="add values, for instance `over: {optimizer.lr: [1e-4, 1e-3]}`"
            )
        _check_lists("over", {path: values for path, values in self.over.items() if path not in self.ranges})
        if self.search is None and self.ranges:
            path = next(iter(self.ranges))
            help = "list its values, or add `search: {trials: 20}`"
            raise Invalid(f"over.{path}", f"`{path}` cannot be a range without a search", help=help)

    @property
    def ranges(self) -> dict[str, Range]:
        """The settings that have a range instead of a list."""
        return {path: _parse_range(path, values) for path, values in self.over.items() if isinstance(values, dict)}


class CompareConfig(Config):
    """The comparison of each variant with its baseline."""

    to: str | None = None
    """The baseline variant, by default the first.

    With `previous`, each variant is compared to the variant before it, as in a series of cumulative changes.
    """
    on: str
    """The metric to compare: `val.loss`."""
    better: Literal["lower", "higher"] | None = None
    """The direction that is better; for a loss `lower`, by default."""
    margin: PositiveFloat | None = None
    """The smallest difference that matters. A variant counts as the same if its difference is shown to be smaller."""

    def check(self) -> None:
        """Reject a metric without a known direction."""
        super().check()
        if self.better is None and self.on.rpartition(".")[2] not in LOWER_IS_BETTER:
            message = f"`{self.on}` has no known direction"
            raise Invalid("on", message, help="add `better: lower` or `better: higher` to `compare`")

    @property
    def lower(self) -> bool:
        """True if lower values are better."""
        return self.better != "higher"


class FitConfig(Config):
    """A scaling law of each variant over its sizes: L = E + A / N^a."""

    loss: str | None = None
    """The loss, a metric of the evaluations: `val.loss`; by default the metric of `compare`."""
    on: Literal["params", "flops", "tokens"]
    """N: the number of parameters, the FLOPs of the full run, or the positions that it trains on."""
    to: Any = None
    """A larger N, whose loss the law predicts: `1M`, `1e18`."""

    @field_validator("to")
    @classmethod
    def _target(cls, value: object) -> float | None:
        return None if value is None else _parse_size(value)


class SweepSpec(Document):
    """A sweep as in its file. The changes of its variants are not resolved yet."""

    sort, command, typical = "sweep", "sweep", ("base", "compare")

    description: str | None = None
    """The question that the sweep answers."""
    source: str | None = None
    """The paper or page that the sweep is from."""
    base: str
    """The run that variants change: its path, or the name of a shipped run."""
    variants: dict[str, dict[str, Any]] = Field(default={ONLY_VARIANT: {}})
    """The changes of each variant, by its name: paths as `--set` takes them, or mappings as in a run that extends
    another run. By default, the base is the only variant."""
    sizes: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    """Sizes at which every variant is trained, from the smallest to the largest. `params` lists numbers of parameters,
    `[0.25M, 0.5M, 1M, 2M]`: layers and widths vary as in `tfkit solve`. Any other key is a path, with a value for each
    size: `{model.d_model: [64, 128, 256, 512]}`."""
    grid: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    """Values of additional settings, by path: every variant is trained with each combination of the values."""
    seeds: tuple[Seed, ...]
    """The seeds of every variant. All variants have the same seeds, so differences can be paired by seed."""
    tokens: Any = None
    """Positions that each run trains on, which replaces the length of the base: a number, or arithmetic over the run's
    `params` and its `flops` for one token: `20 * params`, `1e15 / flops`."""
    equal: EqualConfig | None = None
    """The sizes in which variants must match their baseline."""
    tune: TuneConfig | None = None
    """Settings that are tuned separately for each variant."""
    compare: CompareConfig
    """The comparison."""
    fit: FitConfig | None = None
    """The scaling law of each variant."""

    @field_validator("sizes")
    @classmethod
    def _sizes(cls, sizes: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        counts = {len(values) for values in sizes.values()}
        if len(counts) > 1:
            lengths = listing(map(str, sorted(counts)))
            raise Invalid("sizes", f"the lists of all paths must have equal lengths; got {lengths}")
        if counts == {0}:
            help = "list sizes, for instance `params: [0.25M, 0.5M, 1M, 2M]`"
            raise Invalid(f"sizes.{next(iter(sizes))}", "there is no size", help=help)
        if PARAMS not in sizes:
            return sizes
        if len(sizes) > 1:
            raise Invalid("sizes", f"`{PARAMS}` cannot be combined with paths", help="remove one of them")
        params = tuple(map(_parse_count, sizes[PARAMS]))
        if len(set(params)) < len(params):
            raise Invalid(f"sizes.{PARAMS}", "a size is in the list twice")
        return {PARAMS: params}

    @field_validator("tokens")
    @classmethod
    def _length(cls, value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int | float | str | None) or value == "":
            raise Invalid(
                "tokens", "`tokens` must be a number or arithmetic", help="write for instance `tokens: 20 * params`"
            )
        return value

    def base_of(self, variant: str) -> str:
        """Return the variant that a variant is compared to; the variant itself if it is the baseline."""
        names = list(self.variants)
        if self.compare.to == PREVIOUS:
            return names[max(names.index(variant) - 1, 0)]
        return self.compare.to or names[0]

    @property
    def fitted(self) -> str:
        """The metric that the scaling law is fitted to."""
        return (self.fit.loss if self.fit else None) or self.compare.on

    def check(self) -> None:
        """Raise `Invalid` without variants or seeds, for an unknown baseline, and for tuning on the sweep's seeds."""
        super().check()
        _check_seeds(self.seeds)
        _check_lists("grid", self.grid)
        if not self.variants:
            raise Invalid("variants", "there is no variant", help="add a variant, for instance `variants: {relu: {}}`")
        if self.compare.to not in (None, PREVIOUS, *self.variants):
            notes = (f"variants: {', '.join(self.variants)}; or `{PREVIOUS}`, the variant before each variant",)
            raise Invalid("compare.to", f"there is no variant `{self.compare.to}`", notes=notes)
        if self.compare.to == PREVIOUS and PREVIOUS in self.variants:
            message = (
                f"`{PREVIOUS}` cannot be the name of a variant: in `compare`, it is the variant before each variant"
            )
            raise Invalid("compare.to", message, help="rename that variant")
        if self.compare.margin is not None and len(self.variants) == 1:
            raise Invalid("compare.margin", "`margin` has no effect: there is one variant", help="remove it")
        if self.fit is not None and self.fitted.rpartition(".")[2] not in LOWER_IS_BETTER:
            message = f"a scaling law must be fitted to a loss; got `{self.fitted}`"
            raise Invalid("fit", message, help="add `loss: val.loss`")
        self._check_sizes()
        if self.tune is not None:
            self._check_tuning(self.tune)

    def _check_sizes(self) -> None:
        """Raise `Invalid` for a path of `sizes` that is also set elsewhere, which would have no effect."""
        over = {"grid": self.grid, "tune.over": self.tune.over if self.tune else {}}
        for location, paths in {**over, **{f"variants.{name}": keys for name, keys in self.variants.items()}}.items():
            if repeated := sorted(self.sizes.keys() & paths.keys()):
                message = f"`{repeated[0]}` cannot be both in `sizes` and in `{location}`"
                raise Invalid(f"{location}.{repeated[0]}", message, help="remove one of them")

    def _check_tuning(self, tune: TuneConfig) -> None:
        if tune.at != "each" and not self.sizes:
            raise Invalid("tune.at", "`at` has no effect without `sizes`", help="add `sizes`, or remove it")
        shared = sorted(set(self.seeds) & set(tune.seeds))
        if shared:
            message = f"`tune.seeds` must not contain seed {shared[0]} of the sweep: tuning would bias its result"
            raise Invalid("tune.seeds", message, help="tune on different seeds, for instance [100, 101]")
        repeated = sorted(self.grid.keys() & tune.over.keys())
        if repeated:
            raise Invalid(f"tune.over.{repeated[0]}", f"`{repeated[0]}` cannot be both in `grid` and in `tune.over`")


def _check_seeds(seeds: tuple[int, ...]) -> None:
    if not seeds:
        raise Invalid("seeds", "there is no seed", help="add seeds, for instance `seeds: [0, 1, 2]`")
    twice = [seed for index, seed in enumerate(seeds) if seed in seeds[:index]]
    if twice:
        raise Invalid("seeds", f"seed {twice[0]} must be in the list once")


def _check_lists(name: str, lists: dict[str, Any]) -> None:
    for path, values in lists.items():
        if not isinstance(values, tuple):
            raise Invalid(name, f"`{path}` must be a list of values", help=f"write for instance `{path}: [1, 2]`")
        if not values:
            raise Invalid(name, f"`{path}` has no values")


def _parse_count(value: object) -> int:
    """Parse a number of parameters, such as `0.25M`."""
    match = _COUNT.fullmatch(str(value))
    count = 0.0 if match is None or isinstance(value, bool) else float(match[1]) * _UNITS[match[2]]
    if not 1 <= count <= MAX_PARAMETERS:
        help = "write `250000`, `250k` or `0.25M`"
        raise Invalid(f"sizes.{PARAMS}", f"`{value}` is not a number of parameters", help=help)
    return round(count)


def _parse_size(value: object) -> float:
    """Parse a number of parameters, FLOPs or tokens, such as `1M` or `1e18`."""
    match = _COUNT.fullmatch(str(value))
    try:
        size = float(match[1]) * _UNITS[match[2]] if match else float(str(value))
    except ValueError:
        size = math.nan
    if isinstance(value, bool) or not 0 < size < math.inf:
        raise Invalid("to", f"`to` must be a number above 0; got `{value}`", help="write for instance `1M` or `1e18`")
    return size


def _parse_range(path: str, range: dict[str, Any]) -> Range:
    """Parse the range of a setting."""
    help = "write for instance `{log: [1e-4, 1e-2]}`, above 0; or use `linear`, or `whole` with integers"
    (scale, ends), *more = [*range.items()] or [("", None)]
    ends = ends if isinstance(ends, tuple) and all(type(end) in (int, float) for end in ends) else ()
    if scale not in SCALES or more or len(ends) != 2:
        raise Invalid("over", f"`{path}` must be a list of values, or a range with two ends", help=help)
    low, high = ends
    minimum = 0 if scale == "log" else -math.inf
    if not minimum < low < high < math.inf or (scale == "whole" and float in map(type, ends)):
        raise Invalid("over", f"the ends of a `{scale}` range cannot be {low} and {high}", help=help)
    return Range(scale, low, high)
