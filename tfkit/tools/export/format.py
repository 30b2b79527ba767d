"""The interface of a format of `tfkit export`, and code that all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, fx

from tfkit.building.builder import graph_of, inputs_of
from tfkit.errors import Diagnostic
from tfkit.plugin.discover import own_version
from tfkit.spec.render import render

Inputs = Mapping[str, Tensor]
"""Tensors by the names of the model's forward: tokens [b, t], features [b, t, width], and bool masks [b, t] as
`NAME_mask`."""


class Call(NamedTuple):
    """The arguments of a call of a module."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Reader(Protocol):
    """Reads sequences in steps, as `tfkit.CachedModel` does: see its `start` and `__call__`."""

    def start(self, batch: int, /, **inputs: Tensor) -> None:
        """Begin new sequences, and read the inputs that are given once."""

    def __call__(self, tokens: Tensor, mask: Tensor | None = None, /, **inputs: Any) -> Any:
        """Return the outputs for the next tokens [b, t]; the mask is False at padding."""


class Opened(ABC):
    """A written file, read again from the disk."""

    @abstractmethod
    def forward(self, inputs: Inputs) -> list[Tensor]:
        """Return all outputs of the model.

        Masks and optional inputs may be missing: the file then acts as the model does for None.
        """

    def cached(self, length: int) -> Reader | None:
        """Return a reader for decoding up to `length` tokens; None if the format has no cached decoding."""
        return None

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights in the file by their names in the model's state dict, if it keeps them unchanged."""
        return {}

    def outputs(self, inputs: Inputs, calls: Mapping[str, Call]) -> Mapping[str, Tensor]:
        """Return the outputs of modules by their paths in the model, as far as the format can provide them.

        Used only if the file differs from the model, to name the first component that does.

        Args:
            inputs: inputs of the model.
            calls: the arguments of each module of the model for these inputs, in the order in which they returned: for
                a format whose modules can be called one by one.
        """
        return {}


class Format(ABC):
    """A format of `tfkit export`: its way to write a model to a file, and to read that file again.

    A plugin brings formats by its hook `tfkit_export_formats`.

    Attributes:
        name: as in `--format`.
        suffixes: suffixes of files that have this format by default, such as `.onnx`.
        description: its purpose in a few words, for `tfkit export --formats`.
        tolerance: the largest difference that counts as equal in float32, relative to the largest value if that is
            above 1.
    """

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]] = ()
    description: ClassVar[str]
    tolerance: ClassVar[float] = 1e-5

    def refusals(self, model: fx.GraphModule) -> Sequence[Diagnostic]:
        """Return the reasons why a model on the meta device cannot be written, before its weights are read."""
        return []

    @abstractmethod
    def write(self, model: fx.GraphModule, inputs: Inputs, path: Path) -> None:
        """Write the model to `path`, which has the name of the final file.

        Further files go to the folder `extras_of(path)`, whose name the file must contain: so they belong to it. The
        folder of `path` is empty, and is removed if anything fails. This function may raise any error: `export` turns
        it into a message.

        Args:
            model: the model, in eval mode.
            inputs: examples of all inputs and masks, for formats that trace the model.
            path: the file to write.
        """

    @abstractmethod
    def open(self, path: Path, model: fx.GraphModule) -> Opened:
        """Read a file of `write`. The model provides its structure and names, not its weights."""


def metadata(model: fx.GraphModule) -> dict[str, str]:
    """Return the metadata, texts by name, for every format that can store it."""
    graph = graph_of(model)
    return {
        "name": graph.name,
        "spec": render(graph.spec.model),
        "tfkit": own_version(),
        "torch": str(torch.__version__),
        "inputs": " ".join(inputs_of(model)),
        "outputs": " ".join(graph.outputs),
    }
