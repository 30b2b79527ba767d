"""The layout `peft`: an adapter without the weights that it changes, for PEFT."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import fx

from tfkit.building.builder import build, graph_of
from tfkit.checkpoint.adapters import Adapter, Matrices, additions_of, published_factors, write_adapter
from tfkit.checkpoint.files import TensorFiles
from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.spec.adapter_files import read_adapter
from tfkit.spec.folder import ADAPTER, ADAPTER_WEIGHTS, SPEC
from tfkit.tools.save.layouts import Layout, ModelOrigin

HELP = "use the folder of a run with `adapters`, or of an adapter, and build the model without changes"


class PeftLayout(Layout):
    """The matrices of an adapter under the names of the published model, and the resolved spec."""

    name = "peft"
    description = "the adapter alone, for PEFT"
    files = (ADAPTER, ADAPTER_WEIGHTS)

    def write(self, model: fx.GraphModule, folder: Path, origin: ModelOrigin) -> None:
        if origin.weights is None:
            raise SpecError(Diagnostic("the model has no adapter: it was not built from weights", help=HELP))
        with TensorFiles.open(origin.weights) as files:
            if not files.adapters:
                message = f"the weights in {quoted(str(origin.weights))} have no adapter"
                raise SpecError(Diagnostic(message, help=HELP))
            if len(files.adapters) > 1:
                message = f"the adapter in {quoted(str(origin.weights))} changes weights that have an adapter as well"
                help = "save the merged base first: `tfkit save BASE --layout huggingface -o DIR`"
                raise SpecError(Diagnostic(message, help=help))
            additions = additions_of(model, files)
            settings = read_adapter(next(iter(files.adapters[0].metadata)).parent)
            factors = {added.matrix.name: (added.matrix, added.factors()) for added in additions}
        _check_weights(model, origin.weights)
        modules = published_factors(Matrices.of(model), factors)
        origin.companions.write(folder)
        (folder / SPEC).write_text(origin.spec, encoding="utf-8")
        write_adapter(Adapter(modules, str(settings.base.resolve())), folder)


def _check_weights(model: fx.GraphModule, weights: Path) -> None:
    """Raise SpecError if the weights of a model are not the weights that the adapter and its base have together."""
    merged = build(graph_of(model), weights=weights, dtype=next(model.parameters()).dtype, allow_change=True)
    state = model.state_dict()
    changed = [name for name, tensor in merged.state_dict().items() if not torch.equal(tensor, state[name].cpu())]
    if changed:
        message = f"the weight {quoted(changed[0])} was changed after the adapter in {quoted(str(weights))} was merged"
        raise SpecError(Diagnostic(message, help="save the merged model in a different layout"))
