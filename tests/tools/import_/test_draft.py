"""The most similar family for a model of an unknown type, and the draft that extends it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tfkit
from tfkit.spec.source import read
from tfkit.tools.import_.draft import other_layers
from tfkit.tools.import_.importing import draft_family, import_config

from ...known import KNOWN
from ...sampling import some

PUBLISHED = Path(__file__).parents[2] / "published"


def changed(name: str, folder: Path, **fields: object) -> Path:
    config = json.loads((PUBLISHED / f"{name}.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "new", **fields}), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("name", "family"), some({"gpt2": "gpt2", "gemma2_9b": "gemma2", "bart_base": "bart"}.items(), 1)
)
def test_the_nearest_family_is_its_own(name: str, family: str, tmp_path: Path) -> None:
    text, near, _ = draft_family(changed(name, tmp_path), KNOWN)
    assert near.startswith(f"{family}, with ")
    assert f"extends: {family}\n" in text


def test_fields_and_tensors_that_it_lacks_are_open(tmp_path: Path) -> None:
    folder = changed("gpt2", tmp_path, n_odd=3)
    save_file(
        {"transformer.h.0.ln_1.weight": torch.ones(2), "h.0.odd.weight": torch.ones(2)}, folder / "model.safetensors"
    )
    text, near, _ = draft_family(folder, KNOWN)
    assert near.endswith("and 1 of 2 tensors")
    assert '  "n_odd": "?"  # 3 here\n' in text
    assert '  "?": "h.{i}.odd"\n' in text


def test_an_open_line_is_refused_where_it_stands(tmp_path: Path) -> None:
    folder = changed("gpt2", tmp_path, n_odd=3)
    (tmp_path / "new.yaml").write_text(draft_family(folder, KNOWN)[0], encoding="utf-8")
    spec = tmp_path / "spec.yaml"
    spec.write_text("extends: gpt2\nname: new\ncheckpoint: ./new.yaml\n", encoding="utf-8")
    with pytest.raises(tfkit.SpecError) as caught:
        import_config(folder, family=spec)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.span is not None
    assert "n_odd" in diagnostic.span.source.line(diagnostic.span.line)


OTHER_CONFIGS: dict[str, dict[str, Any]] = {
    "unpublished_state": {"mamba_d_state": 64, "conv_kernel": 4},
    "unpublished_rwkv": {"rescale_every": 6},
    "unpublished_layers": {"layer_types": ["linear_attention", "full_attention"]},
}
"""Fields of such layers, by model types that no family will have."""


@pytest.mark.parametrize("name", some(OTHER_CONFIGS, 1))
def test_layers_that_are_neither_attention_nor_ffn_are_said(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, "hidden_size": 8, **OTHER_CONFIGS[name]}))
    message = f"the model type `{name}` is unknown, and has layers that are neither attention nor FFN"
    with pytest.raises(tfkit.SpecError, match=message):
        import_config(tmp_path)
    warning = draft_family(tmp_path, KNOWN)[2]
    assert warning is not None
    assert warning.message == message


def test_only_types_of_plugins_for_such_layers_have_such_a_word() -> None:
    matches = {file.stem for file in PUBLISHED.glob("*.json") if other_layers(read(file))}
    assert matches
    plugins = {name: KNOWN.files[name].plugin for name in matches}
    assert set(plugins.values()) == {"tfkit-recurrent 0.1.0", "tfkit-media 0.1.0", "tfkit-encoders 0.1.0"}
    media = {name for name, plugin in plugins.items() if plugin == "tfkit-media 0.1.0"}
    wav2vec2 = {"wav2vec2_base", "wav2vec2_large_lv60", "data2vec_audio_base", "unispeech_large", "unispeech_sat_base"}
    assert media == {"hubert_base", "hubert_large", *wav2vec2}
    encoders = {name for name, plugin in plugins.items() if plugin == "tfkit-encoders 0.1.0"}
    assert encoders == {"convbert_base", "convbert_medium_small"}
