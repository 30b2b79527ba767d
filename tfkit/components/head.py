"""The blocks at the end of a model: language-model head, pooler, classifier."""

from __future__ import annotations

import operator
from typing import Literal

import torch
from torch import Tensor, nn

from tfkit.component import (
    ActivationConfig,
    BlockConfig,
    Changeable,
    Config,
    Decoding,
    Dim,
    Head,
    Immaterial,
    Make,
    MaskedWire,
    NormConfig,
    PositiveFloat,
    Probability,
    Shared,
    Signal,
    Signals,
    TableWire,
    Wire,
    expect,
    slot,
)
from tfkit.errors import Invalid
from tfkit.nn import Linear, Program, Value, linear, named


class TransformConfig(Config):
    """Operations before an output matrix, as in masked language models: dense layer, activation, norm."""

    activation: ActivationConfig = slot("gelu")
    norm: NormConfig | None = None
    bias: bool = True

    def apply(self, program: Program, x: Value, make: Make, d_in: int, d_out: int) -> Value:
        """Add the operations to a program."""
        x = program.call("dense", Linear(d_in, d_out, bias=self.bias), x)
        x = program.call("activation", make(self.activation), x)
        return x if self.norm is None else program.call("norm", make(self.norm, d_out), x)


class LMHeadConfig(BlockConfig):
    """Vectors to logits over the vocabulary: transform, project, multiply by the table, scale, soft-cap."""

    block: Literal["lm_head"] = "lm_head"
    input: Wire | None = None
    """The sequence to read."""
    d_model: Shared[Dim]
    """Width of the sequence."""
    vocab_size: Shared[Dim]
    """Number of logits."""
    tie: TableWire | None = None
    """The embedding that provides its token table as the output matrix."""
    bias: bool = False
    """If true, the logits have a bias, which `scale` also multiplies."""
    transform: TransformConfig | None = None
    """Dense layer, activation and norm before the output matrix, as in masked language models."""
    d_embed: Dim | None = None
    """Width of the output matrix if it differs from d_model. The dense layer of `transform` projects to it; without
    `transform`, a separate projection."""
    project_bias: bool = True
    """If true, the separate projection to `d_embed` has a bias."""
    scale: PositiveFloat | None = None
    """Factor of the logits."""
    softcap: PositiveFloat | None = None
    """Bound of the logits, which are bent to stay within it: softcap * tanh(logits / softcap)."""

    def check(self) -> None:
        """Raise `Invalid` for settings of a projection that does not exist."""
        super().check()
        if not self.project_bias and (self.d_embed is None or self.transform is not None):
            why = (
                "without `d_embed` nothing is projected" if self.d_embed is None else "the transform leads to `d_embed`"
            )
            raise Invalid("project_bias", f"`project_bias` has no effect: {why}")

    def in_words(self) -> str:
        """Describe the operations of the head, in order."""
        steps = {
            "transform": self.transform is not None,
            "project": self.d_embed is not None and self.transform is None,
            "multiply by the output matrix": True,
            "scale": self.scale is not None,
            "soft-cap": self.softcap is not None,
        }
        return f"Vectors to logits over the vocabulary: {', '.join(name for name, exists in steps.items() if exists)}."

    def head(self) -> Head:
        return Head(self.scale or 1.0, self.softcap, direct=self.transform is None and self.d_embed is None)

    def output(self, inputs: Signals) -> Signal:
        signal = expect(inputs, "input", "sequence", "vector", width=self.d_model)
        table, width = inputs.get("tie"), self.d_embed or self.d_model
        if table is not None and (table.rows, table.width) != (self.vocab_size, width):
            raise Invalid(
                "tie",
                f"the table must have {self.vocab_size} rows of width {width}; got {table.in_words()}",
                help="set `d_embed`, which projects to the width of the table first" if table.width != width else None,
            )
        return Signal("logits", self.vocab_size, signal.length)

    def decoding(self, inputs: Signals) -> Decoding:
        return Decoding()

    def build(self, make: Make, inputs: Signals) -> nn.Module:
        program, width = Program(), self.d_embed or self.d_model
        x = program.input("x")
        if self.transform is not None:
            x = self.transform.apply(program, x, make, self.d_model, width)
        elif self.d_embed is not None:
            x = program.call("project", Linear(self.d_model, width, bias=self.project_bias), x)
        if self.tie is None:
            x = program.call("output", Linear(width, self.vocab_size, bias=self.bias), x)
        else:
            x = program.call("output", TiedOutput(self.vocab_size, bias=self.bias), x, program.input("tie"))
        if self.scale is not None:
            x = program.apply("scaled", operator.mul, x, self.scale)
        if self.softcap is not None:
            x = program.apply("bounded", torch.tanh, program.apply("shrunk", operator.truediv, x, self.softcap))
            x = program.apply("capped", operator.mul, x, self.softcap)
        return program.build(x, "LMHead")


class TiedOutput(nn.Module):
    """A linear layer with the weight of an embedding."""

    def __init__(self, d_out: int, *, bias: bool) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(d_out)) if bias else None

    def reset_parameters(self) -> None:
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight, self.bias)

    def extra_repr(self) -> str:
        return named(bias=self.bias is not None)


class PoolerConfig(BlockConfig):
    """A single vector for an entire sequence: of a token, or the mean; then optionally dense and activation."""

    block: Literal["pooler"] = "pooler"
    input: MaskedWire | None = None
    """The sequence to read."""
    d_model: Shared[Dim]
    """Width of the sequence."""
    select: Literal["first", "last", "mean"] = "first"
    """The first token, the last token, or the mean of all tokens; padding is ignored."""
    activation: ActivationConfig | None = None
    """Activation after a dense layer, as in BERT (tanh); by default, the block has neither."""
    pad_id: Immaterial[int | None] = None
    """The id of the padding token, for the config.json; the model itself uses the padding mask."""

    def in_words(self) -> str:
        """Describe the selected vector, and the steps after it."""
        vector = {"first": "of the first token", "last": "of the last token", "mean": "that is the mean of all tokens"}
        after = ", then dense and activation" if self.activation else ""
        return f"The vector {vector[self.select]}{after}."

    def output(self, inputs: Signals) -> Signal:
        expect(inputs, "input", "sequence", width=self.d_model)
        return Signal("vector", width=self.d_model)

    def build(self, make: Make, inputs: Signals) -> nn.Module:
        program = Program()
        x, mask = program.input("x"), program.input("mask", optional=True)
        select = {"first": SelectFirst, "last": SelectLast, "mean": SelectMean}[self.select]
        x = program.call("select", select(), x, mask)
        if self.activation is not None:
            x = program.call("dense", Linear(self.d_model, self.d_model, bias=True), x)
            x = program.call("activation", make(self.activation), x)
        return program.build(x, "Pooler")


class SelectFirst(nn.Module):
    """The first token that is not padding, [b, t, d] -> [b, d]."""

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            return x[:, 0]
        first = mask.long().argmax(dim=1)
        return x[torch.arange(x.size(0), device=x.device), first]


class SelectLast(nn.Module):
    """The last token that is not padding, [b, t, d] -> [b, d]."""

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            return x[:, -1]
        last = x.size(1) - 1 - mask.long().flip(1).argmax(dim=1)
        return x[torch.arange(x.size(0), device=x.device), last]


class SelectMean(nn.Module):
    """The mean of the tokens that are not padding, [b, t, d] -> [b, d]."""

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            return x.mean(dim=1)
        weights = mask.to(x.dtype)[..., None]
        return (x * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)


class ClassifierConfig(BlockConfig):
    """Logits over classes, for each token of a sequence or for a vector."""

    block: Literal["classifier"] = "classifier"
    input: Wire | None = None
    """The sequence or vector to read."""
    d_model: Shared[Dim]
    """Width of the input."""
    n_classes: Dim
    """Number of logits."""
    squeeze: bool = False
    """If true, the logits of a single class have no axis for it: [b, t] for a sequence, [b] for a vector."""
    bias: bool = True
    """If true, the logits have a bias."""
    transform: TransformConfig | None = None
    """Dense layer, activation and norm before the output matrix."""
    dropout: Shared[Immaterial[Changeable[Probability]]] = 0.0
    """Dropout on the input, and after the transform."""
    labels: Immaterial[tuple[str, ...] | None] = None
    """Names of the classes."""
    problem_type: Immaterial[
        Literal["regression", "single_label_classification", "multi_label_classification"] | None
    ] = None
    """The type of problem: the logits are numbers, a distribution over the classes, or a probability for each class."""

    def check(self) -> None:
        """Raise `Invalid` unless there is a label for each class, and for `squeeze` with several classes."""
        super().check()
        if self.squeeze and self.n_classes != 1:
            message = f"`squeeze` cannot remove an axis with several classes; got {self.n_classes}"
            raise Invalid("squeeze", message, help="write `n_classes: 1`, or remove `squeeze`")
        if self.labels is not None and len(self.labels) != self.n_classes:
            raise Invalid(
                "labels", f"the number of labels must equal n_classes, {self.n_classes}; got {len(self.labels)}"
            )

    def output(self, inputs: Signals) -> Signal:
        signal = expect(inputs, "input", "sequence", "vector", width=self.d_model)
        return Signal("logits", None if self.squeeze else self.n_classes, signal.length)

    def decoding(self, inputs: Signals) -> Decoding:
        return Decoding()

    def build(self, make: Make, inputs: Signals) -> nn.Module:
        program = Program()
        x = program.input("x")
        if self.dropout:
            x = program.call("dropout", nn.Dropout(self.dropout), x)
        if self.transform is not None:
            x = self.transform.apply(program, x, make, self.d_model, self.d_model)
            if self.dropout:
                x = program.call("dropout_after", nn.Dropout(self.dropout), x)
        x = program.call("output", Linear(self.d_model, self.n_classes, bias=self.bias), x)
        if self.squeeze:
            x = program.apply("squeezed", torch.squeeze, x, -1)
        return program.build(x, "Classifier")
