"""What a format of `tfkit export` must be able to do, and what all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, fx

from tfkit.builder import graph_of, inputs_of
from tfkit.errors import Diagnostic
from tfkit.spec.render import render

Inputs = Mapping[str, Tensor]
"""By the names of the model's forward: tokens [b, t], features [b, t, width], and bool masks [b, t] as `NAME_mask`."""


class Call(NamedTuple):
    """What a module of the model was called with."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Reader(Protocol):
    """Reads sequences in pieces, as `tfkit.CachedModel` does: see its `start` and `__call__`."""

    def start(self, batch: int, /, **inputs: Tensor) -> None:
        """Forget all sequences, and read what is given once for new ones."""

    def __call__(self, tokens: Tensor, mask: Tensor | None = None, /, **inputs: Any) -> Any:
        """What the model returns for the next tokens [b, t]; the mask is False where there is padding."""


class Opened(ABC):
    """A file that was written, read again from the disk alone."""

    @abstractmethod
    def forward(self, inputs: Inputs) -> list[Tensor]:
        """All that the model returns.

        Masks and optional inputs may be missing: the file then does what the model does with None.
        """

    def cached(self, length: int) -> Reader | None:
        """What reads up to `length` tokens in pieces; None where the format has no cached decoding."""
        return None

    def weights(self) -> Mapping[str, Tensor]:
        """The weights in the file by their names in the model's state dict, those that it keeps as they are."""
        return {}

    def outputs(self, inputs: Inputs, calls: Mapping[str, Call]) -> Mapping[str, Tensor]:
        """What modules return by their paths in the model, of as many as the format can tell.

        Asked for only when the file differs from the model, to name the first component that does.

        Args:
            inputs: of the model.
            calls: what each module of the model was called with when it got these inputs, in the order in which they
                returned: for a format whose modules can be called one by one.
        """
        return {}


class Format(ABC):
    """A format: how a model is written to a file, and how that is read again.

    Attributes:
        name: as in `--format`.
        tolerance: what counts as equal in float32, in times of the largest value where that is above 1.
    """

    name: ClassVar[str]
    tolerance: ClassVar[float] = 1e-5

    def refusals(self, model: fx.GraphModule) -> Sequence[Diagnostic]:
        """Why this model cannot be written, found before its weights are read: it is on the meta device."""
        return []

    @abstractmethod
    def write(self, model: fx.GraphModule, inputs: Inputs, path: Path) -> None:
        """Write the model to `path`, whose name is that of the final file.

        Further files go to the folder `parts_of(path)`, whose name must stand in the file: so they belong to it.
        The folder of `path` is empty, and is taken away when anything fails. Errors of whatever kind may leave this
        function: `export` makes one message of them.

        Args:
            model: in eval mode.
            inputs: examples of all inputs and masks, for formats that watch the model run.
            path: where to.
        """

    @abstractmethod
    def open(self, path: Path, model: fx.GraphModule) -> Opened:
        """Read what `write` wrote. The model serves for its structure and names, not for its weights."""


def metadata(model: fx.GraphModule) -> dict[str, str]:
    """What every file says about itself, where its format has a place for it: texts by name."""
    from importlib.metadata import PackageNotFoundError, version

    graph = graph_of(model)
    try:
        made_by = version("tfkit")
    except PackageNotFoundError:
        made_by = ""
    return {
        "name": graph.name,
        "spec": render(graph.spec.model),
        "tfkit": made_by,
        "torch": str(torch.__version__),
        "inputs": " ".join(inputs_of(model)),
        "outputs": " ".join(graph.outputs),
    }
