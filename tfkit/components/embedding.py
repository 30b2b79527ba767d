"""The embedding: a sum of tables, then the stages in the order that the spec gives. And latents: a learned sequence.

d_embed: https://arxiv.org/abs/1909.11942. Tables: https://arxiv.org/abs/1810.04805.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from tfkit.component import (
    BlockConfig,
    Call,
    Changeable,
    Decoding,
    Dim,
    Dropout,
    Immaterial,
    InputPositionConfig,
    Lookup,
    Make,
    MaskedWire,
    NormConfig,
    PositiveFloat,
    Probability,
    Projection,
    Scale,
    Shared,
    Signal,
    Signals,
    TableWire,
    Wire,
    WireMarker,
    expect,
    same_length,
)
from tfkit.component import Stage as BlockStage
from tfkit.errors import Invalid, listing
from tfkit.nn import Linear, Past, Program, Table, Value, check_max_len, check_positions, count_positions

Stage = Literal["scale", "position", "tables", "norm", "dropout", "project"]


class EmbeddingConfig(BlockConfig):
    """Token ids to vectors: the token table, scaled, plus positions and further tables, normalized and projected."""

    pairs = True
    block: Literal["embedding"] = "embedding"
    input: MaskedWire | None = None
    """Input of token ids to look up."""
    d_model: Shared[Dim]
    """Width of the output."""
    vocab_size: Shared[Dim]
    """Rows of the token table."""
    max_len: Shared[Immaterial[Dim]] | None = None
    """Maximum length of a sequence, padding included. Only learned positions depend on it: without them, a model
    accepts longer sequences with unchanged weights, as with `--set max_len=8192`."""
    d_embed: Dim | None = None
    """Width of the token table if it differs from d_model; a projection follows the table."""
    project_bias: bool = True
    """If true, the projection from `d_embed` has a bias."""
    tie: TableWire | None = None
    """The embedding whose token table this node uses."""
    scale: PositiveFloat | Literal["sqrt_d_model"] | None = None
    """Factor of the token vectors."""
    position: InputPositionConfig | None = None
    """Positions that are added to the token vectors."""
    positions: Wire | None = None
    """Input with the positions of the tokens; by default, they are counted."""
    tables: dict[Wire, Dim] | None = None
    """Additional inputs and the number of rows of their tables, such as BERT's `{token_types: 2}`; all are added."""
    norm: NormConfig | None = None
    """Norm of the sum."""
    dropout: Shared[Immaterial[Changeable[Probability]]] = 0.0
    """Dropout on the sum."""
    stages: tuple[Stage, ...] | None = None
    """Order of the stages; by default scale, position, tables, norm, dropout, project."""

    def check(self) -> None:
        """Raise `Invalid` for positions that do not support the width, and for stages that do not match the fields."""
        super().check()
        if self.tables == {}:
            raise Invalid("tables", "`tables` has no effect: it names no input", help="write `{token_types: 2}`")
        for name in self.tables or ():
            if hasattr(nn.ModuleDict, name) or name == "training":
                raise Invalid(f"tables.{name}", f"a table cannot be named `{name}`: every module has such an attribute")
        if self.d_embed is None and not self.project_bias:
            raise Invalid("project_bias", "`project_bias` has no effect: without `d_embed` nothing is projected")
        self._check_stages()
        if self.position is not None:
            self.position.check_width(self._width("position"))
        elif self.positions is not None:
            raise Invalid("positions", "`positions` has no effect without `position`", help="remove it")

    def _check_stages(self) -> None:
        if self.stages is None:
            return
        allowed = {*self._default_stages(), "dropout"}  # may be listed even if its rate is 0
        for index, stage in enumerate(self.stages):
            if stage in self.stages[:index]:
                raise Invalid(f"stages.{index}", f"stage `{stage}` is listed twice")
            if stage not in allowed:
                need = "d_embed" if stage == "project" else stage
                raise Invalid(f"stages.{index}", f"stage `{stage}` has no effect: `{need}` is not set")
        if missing := [stage for stage in self._default_stages() if stage not in self.stages]:
            help = f"write all stages in the order that you need: `stages: [{', '.join(self._default_stages())}]`"
            raise Invalid("stages", f"`stages` is missing {listing(missing)}, which the embedding has", help=help)

    def in_words(self) -> str:
        """Describe the stages of this embedding, in order."""
        words = {
            "scale": "scaled",
            "position": "plus positions",
            "tables": "plus additional tables",
            "norm": "normalized",
            "project": "projected",
        }
        has = [words[stage] for stage in self.stages or self._default_stages() if stage in words]
        return f"Token ids to vectors: {', '.join(['the token table', *has])}."

    def material(self) -> Mapping[str, Any]:
        """Return the fields, with the order of the stages even if it is the default, and without dropout."""
        stages = [stage for stage in self.stages or self._default_stages() if stage != "dropout"]
        return {**super().material(), "stages": tuple(stages)}

    def _default_stages(self) -> tuple[Stage, ...]:
        present: dict[Stage, bool] = {
            "scale": self.scale is not None,
            "position": self.position is not None,
            "tables": bool(self.tables),
            "norm": self.norm is not None,
            "dropout": self.dropout > 0,
            "project": self.d_embed is not None,
        }
        return tuple(stage for stage, is_present in present.items() if is_present)

    def table(self) -> Signal:
        return Signal("table", width=self.d_embed or self.d_model, rows=self.vocab_size)

    def after_table(self) -> tuple[BlockStage, ...]:
        return tuple(
            described for stage in self.stages or self._default_stages() for described in self._described(stage)
        )

    def _described(self, stage: Stage) -> Iterator[BlockStage]:
        if stage == "scale":
            yield Scale(self._factor(), root_of=self.d_model if self.scale == "sqrt_d_model" else None)
        elif stage == "position" and self.position is not None:
            yield Call("position", self.position)
        elif stage == "tables":
            yield from (Lookup(f"tables.{name}", rows) for name, rows in (self.tables or {}).items())
        elif stage == "norm" and self.norm is not None:
            yield Call("norm", self.norm)
        elif stage == "dropout":
            yield Dropout(self.dropout)
        elif stage == "project":
            yield Projection("project", self._width(stage), self.d_model)

    def _factor(self) -> float:
        """Return the factor of the token vectors."""
        return self.d_model**0.5 if self.scale == "sqrt_d_model" else self.scale or 1.0

    def output(self, inputs: Signals) -> Signal:
        tokens = expect(inputs, "input", "tokens")
        table = inputs.get("tie")
        if table is not None and table != self.table():
            raise Invalid(
                "tie", f"tied tables must have the same size, {self.table().in_words()}; got {table.in_words()}"
            )
        tables = {
            f"tables.{name}": signal for name, signal in zip(self.tables or (), inputs.get("tables", ()), strict=True)
        }
        for location, signal in tables.items():
            if signal.type != "tokens":
                raise Invalid(location, f"the input of a table must be tokens; got {signal.in_words()}")
        if "positions" in inputs:
            tables["positions"] = positions = expect(inputs, "positions", "positions")
            if positions.width is not None:
                raise Invalid("positions", f"`positions` must have a single axis; got {positions.in_words()}")
        return Signal("sequence", self.d_model, same_length({"input": tokens, **tables}), mask=tokens.mask)

    def build(self, make: Make, inputs: Signals) -> nn.Module:
        program = Program()
        tokens = program.input("tokens")
        if (limit := self._limit()) is not None:
            tokens = program.apply("tokens", check_max_len, tokens, limit)
        table = program.input("tie") if self.tie is not None else None
        optional = any(signal.optional for signal in inputs.get("tables", ()))
        ids = program.input("tables", list[Tensor | None] if optional else list[Tensor]) if self.tables else None
        mask = program.input("mask", optional=True)
        past = program.input("past", Past, optional=True) if self.position is not None else None
        positions = [program.input("positions", optional=True)] if self.positions is not None else []
        if table is None:
            x = program.call("tokens", Table(self.vocab_size, self.d_embed or self.d_model), tokens)
        else:
            x = program.apply("embedded", F.embedding, tokens, table)
        for stage in self.stages or self._default_stages():
            if stage == "tables" and self.tables:
                tables = OptionalTables if optional else ExtraTables
                x = program.call("tables", tables(self.tables, self._width(stage)), x, ids)
            else:
                x = self._stage(stage, make, program, x, mask, past, *positions)
        return program.build(x, "Embedding")

    def _limit(self) -> int | None:
        """Return the longest sequence that tokens and positions allow."""
        limits = (self.max_len, self.position.longest if self.position is not None else None)
        return min((limit for limit in limits if limit is not None), default=None)

    def decoding(self, inputs: Signals) -> Decoding:
        return Decoding(past=self.position is not None)

    def _stage(
        self, stage: Stage, make: Make, program: Program, x: Value, mask: Value, past: Value | None, *positions: Value
    ) -> Value:
        width = self._width(stage)
        if stage == "scale":
            return program.apply("scaled", operator.mul, x, self._factor())
        if stage == "position" and self.position is not None:
            of_tokens = program.call("positions", Positions(), x, mask, past, *positions)
            added = program.call("position", make(self.position, width), of_tokens)
            return program.call("add_position", AddLike(), x, added)
        if stage == "norm" and self.norm is not None:
            return program.call("norm", make(self.norm, width), x)
        if stage == "dropout":
            return program.call("dropout", nn.Dropout(self.dropout), x)
        return program.call("project", Linear(width, self.d_model, bias=self.project_bias), x)

    def _width(self, stage: Stage) -> int:
        """Return the width of the stage's input."""
        stages = self.stages or self._default_stages()
        projected = "project" in stages and stages.index("project") < stages.index(stage)
        return self.d_model if projected or self.d_embed is None else self.d_embed


class Positions(nn.Module):
    """Positions of the tokens, passed or counted without padding, [b or 1, t]."""

    def forward(
        self, x: Tensor, mask: Tensor | None, past: Past | None, token_positions: Tensor | None = None
    ) -> Tensor:
        if token_positions is not None:
            return check_positions(token_positions, x, 0)
        positions = count_positions(x, mask, past)
        return positions if mask is None else positions.clamp(min=0)


class AddLike(nn.Module):
    """x plus another tensor, in the type of x."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return x + other.to(x.dtype)


class ExtraTables(nn.ModuleDict):
    """Addition of a row of each table to every position."""

    def __init__(self, rows: dict[str, int], width: int) -> None:
        order = sorted(rows)  # TorchScript shares code between ModuleDicts of equal keys, whatever their order
        super().__init__({name: ExtraTable(rows[name], width) for name in order})
        self._order = [list(rows).index(name) for name in order]

    def forward(self, x: Tensor, ids: list[Tensor]) -> Tensor:
        for i, table in enumerate(self.values()):
            x = x + table(ids[self._order[i]])
        return x


class OptionalTables(ExtraTables):
    """`ExtraTables` with ids that may be missing, and are then 0 everywhere: another type of list for TorchScript."""

    def forward(self, x: Tensor, ids: list[Tensor | None]) -> Tensor:  # type: ignore[override]
        for i, table in enumerate(self.values()):
            x = x + table(ids[self._order[i]])
        return x


class ExtraTable(Table):
    """The rows of `ids` [b, t], or row 0 for every position."""

    def forward(self, ids: Tensor | None) -> Tensor:
        return self.weight[0] if ids is None else F.embedding(ids, self.weight)


class LatentsConfig(BlockConfig):
    """A learned sequence for every row of a batch, such as latents, query tokens or object queries."""

    block: Literal["latents"] = "latents"
    input: Annotated[str, WireMarker(static=True)] | None = None
    """Node or input with the batch; only its number of rows matters."""
    n_latents: Dim
    """Number of positions."""
    d_model: Shared[Dim]
    """Width of the output."""

    def output(self, inputs: Signals) -> Signal:
        expect(inputs, "input", "tokens", "lengths", "sequence", "image", "vector", "logits")
        return Signal("sequence", self.d_model, self.n_latents)

    def build(self, make: Make, inputs: Signals) -> nn.Module:
        return Latents(self.n_latents, self.d_model)


class Latents(Table):
    """The table for every row of a batch: a tensor [b, ...] -> [b, n, d_model]."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.expand(x.size(0), -1, -1)
