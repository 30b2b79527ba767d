"""Errors of an invalid config.json: each names the field, and its help names a solution."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

import tfkit
from tfkit.tools.import_.importing import export_config, import_config

from .cases import CASES

PUBLISHED = Path(__file__).parents[1] / "published"


def error_of(name: str, folder: Path, **changes: Any) -> str:
    """The errors of a published config.json with other fields; the file has a field on each line."""
    fields = json.loads((PUBLISHED / f"{name}.json").read_text(encoding="utf-8")) | changes
    (folder / "config.json").write_text(json.dumps(fields, indent=1))
    with pytest.raises(tfkit.SpecError) as refused:
        import_config(folder)
    return str(refused.value)


def test_two_forms_of_rotary_positions_that_differ(tmp_path: Path) -> None:
    text = error_of("llama31_8b", tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 5.0})
    assert text.startswith(
        "error: `rope_parameters` and `rope_scaling` both describe the rotary positions, and must be equal"
    )
    assert "does not have the field" not in text
    assert '"rope_parameters": {' in text


def test_a_fault_of_the_older_form_is_shown_there(tmp_path: Path) -> None:
    text = error_of("llama_7b", tmp_path, rope_scaling={"type": "linear", "factor": "x"})
    assert text.startswith("error: `factor` must be a number; got the text `x`")
    assert '"rope_scaling": {' in text


def test_a_fault_of_the_whole_is_one_of_the_file(tmp_path: Path) -> None:
    """And of no line in the spec that the file is read into."""
    text = error_of("smollm3_3b", tmp_path, hidden_size=2049)
    assert "config.json:" in text
    assert ".yaml" not in text


def test_a_field_without_effect_has_a_way_out(tmp_path: Path) -> None:
    text = error_of("llama_7b", tmp_path, rope_foo=1)
    assert "--family FILE, a spec with `extends: llama_7b` and" in text
    assert "{extends: llama, fields: {rope_foo: unused}}" in text.replace("\n     ", "")
    spec = "tfkit: 1\nextends: llama_7b\nname: mine\ncheckpoint: {extends: llama, fields: {rope_foo: unused}}\n"
    (tmp_path / "mine.yaml").write_text(spec)
    theirs = import_config(PUBLISHED / "llama_7b.json").graph
    assert import_config(tmp_path, family=tmp_path / "mine.yaml").graph.spec.model.graph == theirs.spec.model.graph


def test_a_width_that_contradicts_the_share_of_a_head(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("minimax_m2", **CASES["minimax_m2"].config).to_dict()
    config |= {"rotary_dim": 8, "head_dim": 16}
    for share, agrees in ((0.5, True), (0.25, False)):
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": share}
        (tmp_path / "config.json").write_text(json.dumps(config))
        if agrees:
            import_config(tmp_path)
            continue
        with pytest.raises(tfkit.SpecError, match=r"`0\.25` of a head, but `rotary_dim` is `8`"):
            import_config(tmp_path)


def test_windows_in_a_list_that_are_switched_off_elsewhere(tmp_path: Path) -> None:
    types = ["sliding_attention", *["full_attention"] * 35]
    text = error_of("smollm3_3b", tmp_path, layer_types=types, sliding_window=8, use_sliding_window=False)
    assert text.startswith("error: `layer_types` has `sliding_attention`, but other fields make all layers identical")


def test_what_a_config_cannot_say_is_said_in_few_words() -> None:
    sets = ["decoder.layers.variants.other={attention: null}", "decoder.layers.pattern=[base, other]"]
    with pytest.raises(tfkit.SpecError) as refused:
        export_config(tfkit.load("llama_7b", sets=sets))
    assert "Config(" not in str(refused.value)
    assert len(str(refused.value).splitlines()) < 8


def test_two_layers_may_have_a_pattern_that_repeats() -> None:
    """A config.json lists the type of each layer; a short list may not contain a repetition."""
    graph = tfkit.load("gemma2_2b", sets=["decoder.n_layers=2"])
    assert export_config(graph)["num_hidden_layers"] == 2
    changed = tfkit.load("gemma2_2b", sets=["decoder.n_layers=2", "decoder.layers.pattern=[base, local]"])
    assert export_config(changed)["layer_types"] == ["full_attention", "sliding_attention"]
