"""tfkit's own folder format: the resolved spec, and the weights by the names of the model."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import save_model
from torch import nn

from tfkit.checkpoint.fitting import safetensors_metadata
from tfkit.checkpoint.weight_map import sort_metadata
from tfkit.graph.expand import Graph
from tfkit.spec.folder import SPEC, WEIGHTS
from tfkit.spec.load import Spec
from tfkit.spec.render import render_spec


def write_model(model: nn.Module, graph: Graph, target: Path) -> None:
    """Write the spec and the weights of a model to a folder that exists."""
    (target / SPEC).write_text(spec_text(graph.spec), encoding="utf-8")
    save_model(model, str(target / WEIGHTS), metadata=safetensors_metadata(graph))
    sort_metadata(target / WEIGHTS)
    shutil.copymode(target / SPEC, target / WEIGHTS)  # safetensors creates files that only their owner can read


def spec_text(spec: Spec) -> str:
    """Render the spec, which requires the plugins with which it was built, or later versions."""
    return render_spec(spec.portable)
