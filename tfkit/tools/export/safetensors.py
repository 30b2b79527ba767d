"""Only the weights and the spec, as safetensors: for programs that have their own code for the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, fx

from tfkit.builder import graph_of, inputs_of
from tfkit.checkpoint.meaning import safetensors_metadata
from tfkit.decoding.cached import CachedModel
from tfkit.tools.common.comparison_inputs import as_tensors
from tfkit.tools.common.weights import build_with_weights
from tfkit.tools.export.format import Call, Format, Inputs, Opened, Reader, metadata


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
