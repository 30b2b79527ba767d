"""The gallery at full size: each spec has the values of the published config.json, and its parameter count.

`tests/published` holds the config.json files: the fields that say something about the architecture.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import tfkit
from tfkit.checkpoint.links import published_map
from tfkit.checkpoint.tensor_names import name_matcher
from tfkit.spec import source
from tfkit.spec.load import read_tree
from tfkit.spec.source import plain_data
from tfkit.tools.import_.importing import import_config

from .. import known
from ..sampling import chosen
from .cases import QUICK_CASES

_NAMED = re.compile(r"^checkpoint: *([\w.-]+)", re.MULTILINE)
PUBLISHED = Path(__file__).parents[1] / "published"
NAMES = [name for name in known.NAMES if (PUBLISHED / f"{name}.json").exists()]
AUTO = {
    "ForAudioClassification": transformers.AutoModelForAudioClassification,
    "CLIPModel": transformers.AutoModel,
    "DINOv3ViTModel": transformers.AutoModel,
    "IJepaModel": transformers.AutoModel,
    "ViTMSNModel": transformers.AutoModel,
    "ForCTC": transformers.AutoModelForCTC,
    "HubertModel": transformers.AutoModel,
    "SiglipModel": transformers.AutoModel,
    "SiglipVisionModel": transformers.AutoModel,
    "ForImageClassification": transformers.AutoModelForImageClassification,
    "VoxtralForConditionalGeneration": transformers.AutoModelForSpeechSeq2Seq,
    "MoonshineForConditionalGeneration": transformers.AutoModelForSpeechSeq2Seq,
    "WhisperForConditionalGeneration": transformers.AutoModelForSpeechSeq2Seq,
    "ForMaskedLM": transformers.AutoModelForMaskedLM,
    "Gemma3ForConditionalGeneration": transformers.AutoModelForImageTextToText,
    "LlavaForConditionalGeneration": transformers.AutoModelForImageTextToText,
    "Idefics3ForConditionalGeneration": transformers.AutoModelForImageTextToText,
    "Mistral3ForConditionalGeneration": transformers.AutoModelForImageTextToText,
    "PaliGemmaForConditionalGeneration": transformers.AutoModelForImageTextToText,
    "Qwen2_5_VLForConditionalGeneration": transformers.AutoModelForImageTextToText,
    "SmolVLMForConditionalGeneration": transformers.AutoModelForImageTextToText,
    "ForConditionalGeneration": transformers.AutoModelForSeq2SeqLM,
    "MTModel": transformers.AutoModelForSeq2SeqLM,
    "WithLMHeadModel": transformers.AutoModelForMaskedLM,
}


def test_the_gallery_is_large() -> None:
    kinds = {str(plain_data(read_tree(name, known.KNOWN))["checkpoint"]) for name in NAMES}
    assert len(NAMES) >= 100
    assert len(kinds) >= 45


FIRST_OF_QUICK = {first for model_type, first in known.KNOWN.by_model_type.items() if model_type in QUICK_CASES}
QUICK_SPECS = {"gpt2", "gemma3_1b", "granite4_h_tiny", *sorted(FIRST_OF_QUICK)[::4]}


@pytest.mark.parametrize("name", chosen(NAMES, QUICK_SPECS))
def test_the_spec_is_what_the_config_says(name: str) -> None:
    model = tfkit.load(name).spec.model
    assert import_config(PUBLISHED / f"{name}.json").graph.spec.model.graph == model.graph
    assert model.source, "a spec names its source"
    assert model.parameters, "a spec says how many parameters it has"


WELL_KNOWN = ("bart_base", "gpt2")
"""Most are slow: their small models have as many parameters in `test_families.py`, and their sizes are the config's."""


@pytest.mark.parametrize("name", chosen(NAMES, WELL_KNOWN))
def test_parameters_are_as_many_as_in_transformers(name: str) -> None:
    model = tfkit.build(name, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == stored(model, reference(name))


def reference(name: str) -> nn.Module:
    """Their model on the meta device."""
    fields = json.loads((PUBLISHED / f"{name}.json").read_text(encoding="utf-8"))
    architecture = (fields.pop("architectures", None) or ["ForCausalLM"])[0]
    auto = next((cls for end, cls in AUTO.items() if architecture.endswith(end)), transformers.AutoModelForCausalLM)
    config = transformers.AutoConfig.for_model(**fields)
    config.architectures = [architecture]
    with torch.device("meta"):
        return auto.from_config(config)


def stored(model: torch.fx.GraphModule, theirs: nn.Module) -> int:
    """How many values of theirs a file holds that our model reads: parameters, those of an untied head, and buffers
    that were learned. What is computed (sinusoids) is a parameter of theirs at times, and never read.
    """
    family = model.meta["graph"].spec.family
    entries = dict(theirs.named_parameters(remove_duplicate=False))
    read = {name for link in published_map(model, family).for_names(entries).links for name in link.file}
    patterns = [*family.ignored, *family.zeros, *family.constants, *family.computed]
    further_layer = re.compile(r".*\.layers\.\d+\.\*")  # in files; another model of the type has a layer of this number
    ignored = name_matcher([pattern for pattern in patterns if not further_layer.fullmatch(pattern)])
    counted = {id(p): p for name, p in entries.items() if name in read or not ignored.fullmatch(name)}
    saved = {name: value for name, value in theirs.state_dict().items() if name not in entries}
    buffers = [value.numel() for name, value in saved.items() if name in read or not ignored.fullmatch(name)]
    times = Counter(id(parameter) for name, parameter in entries.items() if name in read)
    untied = [(times[id(p)] - 1) * p.numel() for p in counted.values() if times[id(p)] > 1]
    return sum(p.numel() for p in counted.values()) + sum(buffers) + sum(untied)


def test_each_family_has_one_spec_that_names_it() -> None:
    """That spec is what a config.json of the family changes; the others extend it."""
    named = [match[1] for spec in known.KNOWN.files.values() if (match := _NAMED.search(spec.path.read_text("utf-8")))]
    assert sorted(named) == sorted(known.KNOWN.families)


@pytest.mark.slow  # loads a spec of every family
def test_a_model_type_is_the_type_of_its_spec() -> None:
    assert all(tfkit.load(name).spec.family.model_type == type for type, name in known.KNOWN.by_model_type.items())


def test_a_spec_reads_whole_or_beside_one_other() -> None:
    """The graph of a family's first spec is written out in it; a size extends the one file that has its graph."""
    for name in known.NAMES:
        keys = own_keys(name)
        base = keys.get("extends")
        named = isinstance(keys.get("checkpoint"), str)  # a size may change its family in place
        assert not named or base is None, f"{name}, the first spec of a family, extends {base}"
        assert base is None or "extends" not in own_keys(base), f"{name} extends {base}, which extends another"


def own_keys(name: str) -> dict[str, Any]:
    """What the file of a spec says itself."""
    return plain_data(source.read(known.KNOWN.files[name].path))
