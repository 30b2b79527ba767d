"""The formats of all plugins, by name and by suffix, and safetensors. Dependencies are imported on first use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file
from torch import Tensor, fx

from tfkit.builder import graph_of, inputs_of
from tfkit.checkpoint.fitting import safetensors_metadata
from tfkit.decoding.cached import CachedModel
from tfkit.errors import Diagnostic, SpecError, listing, quoted, similar
from tfkit.plugin.discover import DISABLE
from tfkit.plugin.hookspecs import hookimpl
from tfkit.plugin.manager import Plugins
from tfkit.tools.common.comparison_inputs import as_tensors
from tfkit.tools.common.weights import build_with_weights
from tfkit.tools.export.format import Call, Format, Inputs, Opened, Reader, metadata

if TYPE_CHECKING:
    from tfkit.tools.export.format import Format


@hookimpl
def tfkit_export_formats() -> list[type[Format]]:
    """Return the built-in formats."""
    from tfkit.tools.export.formats import Safetensors
    from tfkit.tools.export.onnx import Onnx
    from tfkit.tools.export.pt2 import Aoti, Pt2
    from tfkit.tools.export.torchscript import TorchScript

    return [TorchScript, Pt2, Aoti, Onnx, Safetensors]


@dataclass(frozen=True)
class Formats:
    """The formats by name, the label of each one's plugin, and a warning for each plugin whose hook failed."""

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
        help = similar("a format", name, self.named)
        return Diagnostic(f"unknown format {quoted(name)}", notes=self._known(listing(self.named)), help=help)

    def _unknown_suffix(self, path: Path) -> Diagnostic:
        suffixes = listing((f"{suffix} ({format.name})" for suffix, format in self._suffixes().items()), 20)
        message = f"the suffix of {quoted(path.name)} does not name a format"
        return Diagnostic(message, notes=self._known(suffixes), help=f"--format {listing(self.named, 20)}")

    def _known(self, text: str) -> tuple[str, ...]:
        return (f"known: {text}", *(f"left out: {fault.message}" for fault in self.faults))


def formats_of(plugins: Plugins) -> Formats:
    """Collect the formats of plugins; raise SpecError if two share a name or suffix."""
    answers = plugins.hooks.call("tfkit_export_formats", _classes)
    named: dict[str, type[Format]] = {}
    owners: dict[str, str] = {}
    suffixes: dict[str, str] = {}
    clashes = []
    for plugin, formats in answers.values:
        for format in formats:
            if format.name in named:
                clashes.append(_clash(f"two formats have the name `{format.name}`", owners[format.name], plugin))
                continue
            for suffix in [suffix for suffix in format.suffixes if suffix in suffixes]:
                clashes.append(_clash(f"two formats have the suffix `{suffix}`", suffixes[suffix], plugin))
            named[format.name], owners[format.name] = format, plugin
            suffixes |= dict.fromkeys(format.suffixes, plugin)
    if clashes:
        raise SpecError(*clashes)
    return Formats(named, owners, answers.faults)


def _classes(returned: object) -> list[type[Format]]:
    """Check the result of the hook."""
    if not isinstance(returned, Iterable) or isinstance(returned, str):
        raise TypeError(f"returned {type(returned).__name__}, not a list of subclasses of tfkit.Format")
    return [_class(item) for item in returned]


def _class(item: object) -> type[Format]:
    from tfkit.tools.export.format import Format

    if not (isinstance(item, type) and issubclass(item, Format)):
        hint = ": return the class, not an object" if isinstance(item, Format) else ""
        raise TypeError(f"returned `{item!r}`, not a subclass of tfkit.Format{hint}")
    if missing := sorted(item.__abstractmethods__):
        raise TypeError(f"returned `{item.__name__}`, which does not define {listing(f'`{name}`' for name in missing)}")
    texts = [vars(item).get(name) for name in ("name", "description")]
    if not all(isinstance(text, str) and text for text in texts):
        raise TypeError(f"returned `{item.__name__}`, which needs a `name` and a `description`")
    suffixes: object = item.suffixes
    if not isinstance(suffixes, tuple) or not all(str(suffix).startswith(".") for suffix in suffixes):
        raise TypeError(f"returned `{item.__name__}`, whose `suffixes` are not like ('.onnx',)")
    return item


def _clash(message: str, *both: str) -> Diagnostic:
    return Diagnostic(message, notes=both, help=f"switch one plugin off by its name: {DISABLE}=<name>")


class Safetensors(Format):
    """One file of tensors by the model's own names, its spec in the metadata: `tfkit build SPEC --weights FILE`."""

    name = "safetensors"
    suffixes = (".safetensors",)
    description = "the weights by the model's own names, and the spec"

    def write(self, model: fx.GraphModule, inputs: Inputs, path: Path) -> None:
        tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        save_file(tensors, path, metadata={**safetensors_metadata(graph_of(model)), **metadata(model)})

    def open(self, path: Path, model: fx.GraphModule) -> Opened:
        return _Built(build_with_weights(graph_of(model), path).eval())


class _Built(Opened):
    """A model that was built anew and filled from the file."""

    def __init__(self, model: fx.GraphModule) -> None:
        self._model = model

    def forward(self, inputs: Inputs) -> list[Tensor]:
        taken = inputs_of(self._model)
        return as_tensors(self._model(**{name: value for name, value in inputs.items() if name in taken}))

    def cached(self, length: int) -> Reader | None:
        return CachedModel(self._model, length=length)

    def weights(self) -> Mapping[str, Tensor]:
        return self._model.state_dict()

    def outputs(self, inputs: Inputs, calls: Mapping[str, Call]) -> Mapping[str, Tensor]:
        results = {path: self._model.get_submodule(path)(*call.args, **call.kwargs) for path, call in calls.items()}
        return {path: value for path, value in results.items() if isinstance(value, Tensor)}
