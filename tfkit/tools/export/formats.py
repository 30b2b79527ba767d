"""Formats of `tfkit export`: their base class, the formats of all plugins by name and suffix, and safetensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, fx

from tfkit.building.builder import graph_of, inputs_of
from tfkit.building.edits import check_unedited, model_edits
from tfkit.checkpoint.fitting import safetensors_metadata
from tfkit.checkpoint.weight_map import sort_metadata
from tfkit.decoding.cached import CachedModel
from tfkit.errors import Diagnostic, SpecError, listing, quoted, similar_name_help
from tfkit.plugin.discover import DISABLE, tfkit_version
from tfkit.plugin.manager import Plugins
from tfkit.spec.render import render_spec
from tfkit.tools.common.loading_weights import build_with_weights
from tfkit.tools.common.model_inputs import as_tensors

Inputs = Mapping[str, Tensor]
"""Tensors by the names of the model's forward: tokens [b, t], features [b, t, width], and bool masks [b, t] as
`NAME_mask`."""


class ComponentCall(NamedTuple):
    """The arguments of a call of a module."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class CachedReader(Protocol):
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

        Masks and optional inputs may be missing: the file then behaves as the model does for None.
        """

    def cached(self, length: int) -> CachedReader | None:
        """Return a reader for decoding up to `length` tokens; None if the format has no cached decoding."""
        return None

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights in the file by their names in the model's state dict, if it keeps them unchanged."""
        return {}

    def outputs(self, inputs: Inputs, calls: Mapping[str, ComponentCall]) -> Mapping[str, Tensor]:
        """Return the outputs of modules by their paths in the model, as far as the format can provide them.

        Used only if the file differs from the model, to name the first component that does.

        Args:
            inputs: inputs of the model.
            calls: the arguments of each module of the model for these inputs, in the order in which the modules
                returned: for formats whose modules can be called separately.
        """
        return {}


class Format(ABC):
    """A format of `tfkit export`: its way to write a model to a file, and to read that file again.

    A plugin returns its formats from the hook `tfkit_export_formats`.

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

        Write additional files to the folder `extras_of(path)`. The main file must contain the name of that folder,
        which marks the folder as part of the export. The folder of `path` is empty, and is removed if anything fails.
        This method may raise any error: `export` converts it to a SpecError.

        Args:
            model: the model, in eval mode.
            inputs: examples of all inputs and masks, for formats that trace the model.
            path: the file to write.
        """

    @abstractmethod
    def open(self, path: Path, model: fx.GraphModule) -> Opened:
        """Read a file of `write`. The model provides its structure and names, not its weights."""


def model_metadata(model: fx.GraphModule) -> dict[str, str]:
    """Return the metadata, texts by name, for every format that can store it. An edited model has no spec."""
    graph, changes = graph_of(model), [text for text, _ in model_edits(model)]
    return {
        "name": graph.name,
        **({"changed": "\n".join(changes)} if changes else {"spec": render_spec(graph.spec.model)}),
        "tfkit": tfkit_version(),
        "torch": str(torch.__version__),
        "inputs": " ".join(inputs_of(model)),
        "outputs": " ".join(graph.outputs),
    }


# ---- the formats of all plugins ----


@dataclass(frozen=True)
class Formats:
    """The formats by name, the labels of their plugins, and a warning for each plugin whose hook failed."""

    named: Mapping[str, type[Format]]
    plugins: Mapping[str, str]
    faults: tuple[Diagnostic, ...]

    def choose(self, path: Path, name: str | None = None) -> Format:
        """Return the format with a name, or the format of the file's suffix; raise SpecError if there is none."""
        format = self.named.get(name) if name is not None else self._suffixes().get(path.suffix)
        if format is None:
            raise SpecError(self._unknown_suffix(path) if name is None else self._unknown(name))
        return format()

    def _suffixes(self) -> dict[str, type[Format]]:
        return {suffix: format for format in self.named.values() for suffix in format.suffixes}

    def _unknown(self, name: str) -> Diagnostic:
        help = similar_name_help("a format", name, self.named)
        return Diagnostic(f"unknown format {quoted(name)}", notes=self._known(listing(self.named)), help=help)

    def _unknown_suffix(self, path: Path) -> Diagnostic:
        suffixes = listing((f"{suffix} ({format.name})" for suffix, format in self._suffixes().items()), 20)
        message = f"the suffix of {quoted(path.name)} does not name a format"
        return Diagnostic(message, notes=self._known(suffixes), help=f"--format {listing(self.named, 20)}")

    def _known(self, text: str) -> tuple[str, ...]:
        return (f"known: {text}", *(f"skipped: {fault.message}" for fault in self.faults))


def formats_of(plugins: Plugins) -> Formats:
    """Collect the formats of plugins; raise SpecError if two share a name or suffix."""
    answers = plugins.hooks.call("tfkit_export_formats", _format_classes)
    named: dict[str, type[Format]] = {}
    owners: dict[str, str] = {}
    suffixes: dict[str, str] = {}
    clashes = []
    for plugin, formats in reversed(answers.values):  # the built-in formats first
        for format in formats:
            if format.name in named:
                clashes.append(_clash_error(f"two formats have the name `{format.name}`", owners[format.name], plugin))
                continue
            clashes += [
                _clash_error(f"two formats have the suffix `{suffix}`", suffixes[suffix], plugin)
                for suffix in format.suffixes
                if suffix in suffixes
            ]
            named[format.name], owners[format.name] = format, plugin
            suffixes |= dict.fromkeys(format.suffixes, plugin)
    if clashes:
        raise SpecError(*clashes)
    return Formats(named, owners, answers.faults)


def _format_classes(returned: object) -> list[type[Format]]:
    """Check the result of the hook."""
    if not isinstance(returned, Iterable) or isinstance(returned, str):
        raise TypeError(f"must return a list of subclasses of tfkit.Format; got {type(returned).__name__}")
    return [_format_class(item) for item in returned]


def _format_class(item: object) -> type[Format]:
    if not (isinstance(item, type) and issubclass(item, Format)):
        hint = ": return the class instead of an object" if isinstance(item, Format) else ""
        raise TypeError(f"must return subclasses of tfkit.Format; got `{item!r}`{hint}")
    if missing := sorted(item.__abstractmethods__):
        raise TypeError(f"returned `{item.__name__}`, which does not define {listing(f'`{name}`' for name in missing)}")
    texts = [vars(item).get(name) for name in ("name", "description")]
    if not all(isinstance(text, str) and text for text in texts):
        raise TypeError(f"returned `{item.__name__}`, which needs a `name` and a `description`")
    suffixes: object = item.suffixes
    if not isinstance(suffixes, tuple) or not all(str(suffix).startswith(".") for suffix in suffixes):
        raise TypeError(f"returned `{item.__name__}`, whose `suffixes` are not like ('.onnx',)")
    return item


def _clash_error(message: str, *both: str) -> Diagnostic:
    return Diagnostic(message, notes=both, help=f"switch one plugin off by its name: {DISABLE}=<name>")


class Safetensors(Format):
    """A file of tensors under the names of the model, with the spec as metadata: `tfkit build SPEC --weights FILE`."""

    name = "safetensors"
    suffixes = (".safetensors",)
    description = "the weights by the model's own names, and the spec"

    def write(self, model: fx.GraphModule, inputs: Inputs, path: Path) -> None:
        check_unedited(model)
        tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        save_file(tensors, path, metadata={**safetensors_metadata(graph_of(model)), **model_metadata(model)})
        sort_metadata(path)

    def open(self, path: Path, model: fx.GraphModule) -> Opened:
        return _Built(build_with_weights(graph_of(model), path).eval())


class _Built(Opened):
    """A second model, with the weights of the file."""

    def __init__(self, model: fx.GraphModule) -> None:
        self._model = model

    def forward(self, inputs: Inputs) -> list[Tensor]:
        taken = inputs_of(self._model)
        return as_tensors(self._model(**{name: value for name, value in inputs.items() if name in taken}))

    def cached(self, length: int) -> CachedReader | None:
        return CachedModel(self._model, length=length)

    def weights(self) -> Mapping[str, Tensor]:
        return self._model.state_dict()

    def outputs(self, inputs: Inputs, calls: Mapping[str, ComponentCall]) -> Mapping[str, Tensor]:
        results = {path: self._model.get_submodule(path)(*call.args, **call.kwargs) for path, call in calls.items()}
        return {path: value for path, value in results.items() if isinstance(value, Tensor)}
