"""A model in the published layout whose family differs from tfkit's family for its type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

import tfkit
from tfkit.tools.import_.importing import import_config

SPEC = """\
tfkit: 1
extends: llama_7b
name: mine
graph: {decoder: {final_norm: null, attention: {scale: 0.3}}}
checkpoint:
  extends: llama
  prefix: model.
  fields: {my_scale: decoder.attention.scale}
"""
CONFIG = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "my_scale": 0.7,
}
transformers.utils.logging.disable_progress_bar()


def imported(folder: Path) -> Path:
    """The spec of a config.json by a family of my own, whose graph is not that of the shipped one."""
    (folder / "mine.yaml").write_text(SPEC)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    text = import_config(folder, family=folder / "mine.yaml").text
    (folder / "spec.yaml").write_text(text)
    return folder / "spec.yaml"


def test_it_is_proved_with_its_own_spec(tmp_path: Path) -> None:
    model = tfkit.build(imported(tmp_path))
    tfkit.save(model, tmp_path / "out", layout="huggingface")
    again = import_config(tmp_path / "out", family=tmp_path / "mine.yaml").graph
    assert again.spec.model.graph == tfkit.load(tmp_path / "spec.yaml").spec.model.graph


def test_what_its_fields_do_not_say_is_refused(tmp_path: Path) -> None:
    model = tfkit.build(tfkit.load(imported(tmp_path), sets=["decoder.attention.qk_norm=rmsnorm"]))
    with pytest.raises(tfkit.SpecError, match=r"(?s)config\.json of llama cannot.*decoder\.attention\.qk_norm"):
        tfkit.save(model, tmp_path / "out", layout="huggingface")
