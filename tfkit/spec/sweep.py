"""The document of a sweep: variants of a run, on equal terms, and the comparison between them."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from tfkit.component import Config, PositiveCount
from tfkit.errors import Invalid
from tfkit.spec.document import Document

Seed = Annotated[int, Field(ge=0, lt=2**63)]
LOWER = frozenset({"loss", "bits_per_byte"})
"""Metrics that everybody wants small."""
BUDGETS = ("params", "flops", "tokens")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)%")


class EqualConfig(Config):
    """The sizes that variants share with the one that they are compared to, and how far they may be from it."""

    params: str | None = None
    """Parameters: `0.5%`."""
    flops: str | None = None
    """FLOPs of the whole run, forward and backward."""
    tokens: str | None = None
    """Positions that are read in the whole run."""

    @field_validator(*BUDGETS)
    @classmethod
    def _percent(cls, text: str | None) -> str | None:
        if text is not None and not _PERCENT.fullmatch(text):
            raise Invalid("", f"`{text}` is not a share", help="write `0.5%`; or `0%` for the same number")
        return text

    def check(self) -> None:
        """Refuse a comparison of no size."""
        super().check()
        if not self.shares():
            raise Invalid("", "`equal` names no size", help="for instance `equal: {params: 0.5%}`")

    def shares(self) -> dict[str, float]:
        """The largest difference of each size, as a share."""
        given = {"params": self.params, "flops": self.flops, "tokens": self.tokens}
        return {name: float(text[:-1]) / 100 for name, text in given.items() if text is not None}


class TuneConfig(Config):
    """Values of settings that every variant tries on seeds of their own, to take the best."""

    over: dict[str, tuple[Any, ...]]
    """The values of each setting, by its path, as `--set` takes it."""
    seeds: tuple[Seed, ...]
    """Seeds to try them on; none of the sweep's own."""
    steps: PositiveCount | None = None
    """Updates of a trial; those of the run unless given."""

    def check(self) -> None:
        """Refuse trials of nothing."""
        super().check()
        _check_lists("over", self.over)
        _check_seeds(self.seeds)
        if not self.over:
            raise Invalid("over", "there is nothing to tune", help="for instance `over: {optimizer.lr: [1e-4, 1e-3]}`")


class CompareConfig(Config):
    """The comparison: each variant with one of them."""

    to: str
    """The variant that the others are compared to."""
    on: str
    """A number of the evaluations: `val.loss`."""
    better: Literal["lower", "higher"] | None = None
    """The better direction; a loss is better lower."""

    def check(self) -> None:
        """Refuse a number whose better direction nobody knows."""
        super().check()
        if self.better is None and self.on.rpartition(".")[2] not in LOWER:
            message = f"nothing says if `{self.on}` is better higher or lower"
            raise Invalid("on", message, help="add `better: higher` to `compare`")

    @property
    def lower(self) -> bool:
        """True if less is better."""
        return self.better != "higher"


class SweepSpec(Document):
    """A sweep as it is written; the changes of its variants are read as parts of a run."""

    description: str | None = None
    """The question that the sweep answers."""
    source: str | None = None
    """The paper or the page that it is from."""
    base: str
    """The run that variants change: a path, or the name of one."""
    variants: dict[str, dict[str, Any]]
    """Changes by the variant's name: paths as `--set` takes them, or mappings as of a run that extends another."""
    grid: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    """Values of further settings, by path: every variant is run with each combination of them."""
    seeds: tuple[Seed, ...]
    """The seeds of every variant: the same for all, so that differences are paired."""
    equal: EqualConfig | None = None
    """The sizes that variants share."""
    tune: TuneConfig | None = None
    """Settings that are tuned for each variant by itself."""
    compare: CompareConfig
    """The comparison."""

    def check(self) -> None:
        """Refuse a sweep of nothing, a comparison with nothing, and results on the seeds of trials."""
        super().check()
        _check_seeds(self.seeds)
        _check_lists("grid", self.grid)
        if self.compare.to not in self.variants:
            known = ", ".join(self.variants)
            raise Invalid("compare.to", f"there is no variant `{self.compare.to}`", notes=(f"variants: {known}",))
        if self.tune is None:
            return
        shared = sorted(set(self.seeds) & set(self.tune.seeds))
        if shared:
            message = f"seed {shared[0]} is also one of the sweep: its result would be chosen, not found"
            raise Invalid("tune.seeds", message, help="tune on seeds that the sweep does not have: [100, 101]")
        both = sorted(self.grid.keys() & self.tune.over.keys())
        if both:
            raise Invalid(f"tune.over.{both[0]}", f"`{both[0]}` is in `grid` too")


def _check_seeds(seeds: tuple[int, ...]) -> None:
    if not seeds:
        raise Invalid("seeds", "there is no seed", help="for instance `seeds: [0, 1, 2]`")
    twice = [seed for index, seed in enumerate(seeds) if seed in seeds[:index]]
    if twice:
        raise Invalid("seeds", f"seed {twice[0]} is in the list twice")


def _check_lists(name: str, lists: dict[str, tuple[Any, ...]]) -> None:
    empty = [path for path, values in lists.items() if not values]
    if empty:
        raise Invalid(name, f"`{empty[0]}` has no values")
