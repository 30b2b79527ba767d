"""Folders of models that contain a text model: imported, filled, compared, and saved as the text model alone."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import tfkit
from tfkit.checkpoint.config_json import FILE_FIELDS
from tfkit.errors import LeftOutWarning
from tfkit.plugin.manager import load_plugins
from tfkit.tools.common.loading_weights import build_with_weights
from tfkit.tools.compare.comparison import compare
from tfkit.tools.import_.importing import import_config
from tfkit.tools.save.save import save

from ..sampling import chosen
from .case import AUTO, logits_of
from .cases import CASES
from .wrappers import (
    MISNAMED,
    REJECTED,
    SAME_AS,
    TEXT_ALONE,
    TEXT_TYPES,
    TIMM,
    TOO_LARGE,
    UNREAD,
    WITH_IMAGES,
    Tower,
    text_case,
    text_types,
    wrapper,
)

transformers.utils.logging.disable_progress_bar()
TYPES = sorted(TEXT_TYPES.keys() - MISNAMED.keys() - REJECTED.keys())
QUICK_CASES = {"aya_vision", "mistral3"}
NO_TOWER = {"fuyu", "granite_speech", "granite_speech_plus"}
"""Types whose images have no encoder, or whose encoder has a different field."""


LISTED = {"cohere_compass_text", "lfm2", "lfm3", "llama4_text", "qwen3_5_text", "qwen3_5_moe_text"}
"""Types whose text_config must list the types of the layers."""
WITH_BUFFERS = {"deepseek_v3", "gemma4_text", "gemma4_unified_text"}
"""Types with buffers that are parameters in tfkit."""


@pytest.fixture(autouse=True)
def without_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    from_config = transformers.AutoModel.from_config

    def with_tower(config: Any, **options: Any) -> nn.Module:
        return Tower(config) if config.model_type in TIMM else from_config(config, **options)

    monkeypatch.setattr(transformers.AutoModel, "from_config", with_tower)


@pytest.mark.parametrize("name", chosen(TYPES, QUICK_CASES))
def test_the_text_model_alone_computes_the_same(name: str, tmp_path: Path) -> None:
    theirs = wrapper(name)
    theirs.save_pretrained(tmp_path / "theirs")
    imported = import_config(tmp_path / "theirs", family=WITH_IMAGES.get(name))
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always", LeftOutWarning)
        ours = build_with_weights(tfkit.loads(imported.text), tmp_path / "theirs").eval()
    assert [record.category for record in records] == [LeftOutWarning]
    _check_logits(ours, theirs, name)

    save(ours, tmp_path / "text", layout="huggingface", allow_drop=True)
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "text"))
    assert sum(imported.tensors_left_out.values()) == len(ours.meta["left_out"]) == len(before) - len(after)
    assert name in NO_TOWER or {"vision_config", "audio_config"} & {*imported.fields_left_out}
    alone = AUTO[text_case(name).kind].from_pretrained(tmp_path / "text", attn_implementation="eager").eval()
    assert alone.config.model_type == text_case(name).model_type
    _check_logits(ours, alone, name)

    if name not in TEXT_ALONE | UNREAD.keys():
        with pytest.warns(LeftOutWarning):
            comparison = compare(imported.graph, tmp_path / "theirs")
        assert comparison.equal
        assert any(".layers.1." in part.other for part in comparison.parts)
        assert comparison.left_out == imported.tensors_left_out


@torch.no_grad()
def _check_logits(ours: nn.Module, theirs: Any, name: str) -> None:
    inputs = _inputs(name)
    expected = _logits(theirs, name)
    output = ours(*inputs.values())
    assert expected.std() > 0.05
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5 * max(1.0, float(expected.abs().max())))


def _runs_alone(theirs: Any, name: str) -> bool:
    return name in TEXT_ALONE and hasattr(theirs, "language_model")


def _inputs(name: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    names = ["input_ids", "decoder_input_ids"] if text_case(name).kind == "seq2seq" else ["input_ids"]
    return {name: torch.randint(11, 60, (3, 11)) for name in names}


@pytest.mark.slow
def test_every_type_with_a_known_text_model_has_a_case() -> None:
    specs = load_plugins().specs
    families = {**specs.by_model_type, **specs.by_text_type}
    types = {name: part for name, part in text_types().items() if part in families}
    assert types == TEXT_TYPES | {name: types[name] for name in TOO_LARGE}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MISNAMED))
def test_tensors_that_are_not_where_they_are_expected_are_listed(name: str, tmp_path: Path) -> None:
    wrapper(name).save_pretrained(tmp_path)
    with pytest.raises(tfkit.SpecError, match="lacks tensors of the model"):
        tfkit.build(import_config(tmp_path).graph)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(REJECTED))
def test_a_text_model_that_no_spec_describes_is_rejected(name: str, tmp_path: Path) -> None:
    wrapper(name).save_pretrained(tmp_path)
    with pytest.raises(tfkit.SpecError, match=REJECTED[name]):
        import_config(tmp_path, family=WITH_IMAGES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TYPES if name != "ovis2"])
def test_no_field_around_a_text_model_changes_it_except_its_tie(name: str) -> None:
    """Such a field would have to be read: `ovis2`, with 25 million parameters, is left out."""
    theirs = wrapper(name)
    expected, state, changed = _logits(theirs, name), theirs.state_dict(), set()
    for field, value in theirs.config.to_dict().items():
        if type(value) not in CHANGES or field in FILE_FIELDS:
            continue
        with suppress(Exception):  # the class rejects the value
            config = type(theirs.config)(**{**theirs.config.to_dict(), field: CHANGES[type(value)](value)})
            config._attn_implementation = "eager"
            model = type(theirs)(config).eval()
            model.load_state_dict(state, strict=False)
            if not torch.allclose(_logits(model, name), expected, atol=1e-5):
                changed.add(field)
    assert changed <= {"tie_word_embeddings"}


CHANGES: dict[type, Callable[[Any], Any]] = {
    bool: lambda value: not value,
    int: lambda value: value + 1,
    float: lambda value: value * 1.5 + 0.1,
    type(None): lambda value: 30,
}


@torch.no_grad()
def _logits(theirs: Any, name: str) -> Tensor:
    torch.manual_seed(2)
    return logits_of((theirs.language_model if _runs_alone(theirs, name) else theirs)(**_inputs(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*TEXT_TYPES.values()}))
def test_defaults_of_a_text_config_are_those_of_its_class(name: str) -> None:
    specs = load_plugins().specs
    family = tfkit.load({**specs.by_text_type, **specs.by_model_type}[name]).spec.family
    assert family is not None
    values = {**family.defaults, **family.text_types[name]} if name in SAME_AS else family.text_types[name]
    theirs = transformers.CONFIG_MAPPING[name]().to_dict()
    theirs["rope_parameters"] = {**theirs["rope_parameters"]} if "rope_parameters" in theirs else {}
    theirs["rope_parameters"].pop("rope_type", None)
    theirs["layer_types"] = None
    assert values == {field: theirs.get(field, values[field]) for field in values}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*TEXT_TYPES.values()} - LISTED - WITH_BUFFERS))
def test_a_text_config_may_omit_all_fields(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "new", "text_config": {"model_type": name}}))
    graph = import_config(tmp_path).graph
    case = next(case for case in CASES.values() if case.model_type == SAME_AS.get(name, name))
    with torch.device("meta"):
        theirs = AUTO[case.kind].from_config(transformers.CONFIG_MAPPING[SAME_AS.get(name, name)](**_defaults(name)))
    assert tfkit.count_params(graph).total == sum(tensor.numel() for tensor in theirs.parameters())


def _defaults(name: str) -> dict[str, Any]:
    return transformers.CONFIG_MAPPING[name]().to_dict() if name in SAME_AS else {}
