"""The gallery at full size: each spec is what the published config.json says, and has as many parameters.

`tests/published` holds the config.json files: the fields that say something about the architecture.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

import tfkit
from tfkit.spec.load import shipped_specs
from tfkit.tools.diff import differences
from tfkit.tools.importing import import_config

PUBLISHED = Path(__file__).parents[1] / "published"
NAMES = [name for name in shipped_specs() if (PUBLISHED / f"{name}.json").exists()]
AUTO = {
    "ForMaskedLM": transformers.AutoModelForMaskedLM,
    "ForConditionalGeneration": transformers.AutoModelForSeq2SeqLM,
    "MTModel": transformers.AutoModelForSeq2SeqLM,
}
MODEL_TYPES = 45
SPECS = 100


def test_the_gallery_is_large() -> None:
    sections = [tfkit.load(name).spec.model.checkpoint for name in NAMES]
    assert len(NAMES) >= SPECS
    assert len({section.model_type for section in sections if section}) >= MODEL_TYPES


@pytest.mark.parametrize("name", NAMES)
def test_the_spec_is_what_the_config_says(name: str) -> None:
    graph = tfkit.load(name)
    imported = import_config(PUBLISHED / f"{name}.json", name=name)
    nodes = graph.spec.model.graph.keys()
    found = differences(graph, imported.graph)
    assert [one for one in found if one.places[0].removeprefix("graph.").split(".")[0] in nodes] == []
    assert graph.spec.model.source, "a spec names its source"
    assert graph.spec.model.parameters, "a spec says how many parameters it has"


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_as_many_as_in_transformers(name: str) -> None:
    """Ours are counted when the model is built, and held against what the spec says."""
    graph = tfkit.load(name)
    tfkit.build(graph, device="meta")
    theirs = reference(name)
    section = graph.spec.model.checkpoint
    assert section is not None
    counted = {id(p): p.numel() for p in theirs.parameters()}
    assert graph.spec.model.parameters == sum(counted.values())


def reference(name: str) -> torch.nn.Module:
    fields = json.loads((PUBLISHED / f"{name}.json").read_text())
    config = transformers.AutoConfig.for_model(**fields)
    architecture = fields.get("architectures", ["ForCausalLM"])[0]
    auto = next((cls for end, cls in AUTO.items() if architecture.endswith(end)), transformers.AutoModelForCausalLM)
    with torch.device("meta"):
        return auto.from_config(config)
