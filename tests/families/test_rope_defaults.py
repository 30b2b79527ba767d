"""Rotary positions in all forms of config.json, and their defaults in the config classes of transformers."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

import tfkit
from tfkit.errors import SpecError
from tfkit.graph.input_shapes import max_len as limit_of
from tfkit.tools.import_.importing import export_config, import_config

from ..known import KNOWN
from ..sampling import chosen, slow, some
from .case import Case, Trial, check_cached, check_logits, check_saved
from .cases import CASES
from .config_mutations import config_of, imported
from .llama_kin import LLAMA, LLAMA_KIN, ROPE

FIXED = {"type", "beta_fast", "beta_slow", "truncate", "max_position_embeddings", "llama_4_scaling_beta"}
"""Fields that only one of the two writes, where they have their usual values."""
NEEDED = {"ministral3", "granitemoehybrid", "cohere_compass_text"}
"""Types that need more than sizes: a part of the rotary position, its values for each type of layer, or these types."""


def plain(parameters: dict[str, Any]) -> dict[str, Any]:
    """The fields that matter; a factor of 1 is that of whole heads."""
    text = {key: plain(value) if isinstance(value, dict) else value for key, value in parameters.items()}
    return {
        key: value for key, value in text.items() if key not in FIXED and (key, value) != ("partial_rotary_factor", 1)
    }


@pytest.mark.parametrize("name", some(sorted({case.model_type for case in LLAMA_KIN.values()} - NEEDED), 5))
def test_sizes_alone(name: str, tmp_path: Path) -> None:
    family = tfkit.load(KNOWN.by_model_type[name]).spec.family
    assert family is not None
    width = {"head_dim": 16} if "head_dim" in family.fields else {}
    fields = {**LLAMA, "model_type": name, "hidden_size": 64, "num_hidden_layers": 8, **width}
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    actual = export_config(import_config(tmp_path).graph)
    assert plain(actual["rope_parameters"]) == plain(theirs.rope_parameters)
    if "layer_types" in actual:
        assert actual["layer_types"] == theirs.layer_types


LINEAR = {"rope_type": "linear", "factor": 3.0}
YARN = {"rope_type": "yarn", "factor": 3.0}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
DEFAULT_ROPE = {"rope_type": "default"}
ORIGINAL = {"original_max_position_embeddings": 6}
THETA = {"rope_theta": 77.0}
FORMS: dict[str, dict[str, Any]] = {
    "flat": {"rope_parameters": {**LINEAR, **THETA}},
    "flat without a base": {"rope_parameters": LINEAR},
    "flat without a type": {"rope_parameters": THETA},
    "a base beside": THETA,
    "a base beside a scaling": {**THETA, "rope_scaling": LINEAR},
    "an older scaling": {"rope_scaling": LINEAR},
    "an older scaling with a base": {"rope_scaling": {**LINEAR, **THETA}},
    "an older scaling and a length": {"rope_scaling": {**YARN, **ORIGINAL}},
    "a length beside": {"rope_scaling": YARN, **ORIGINAL},
    "no factor": {"rope_scaling": {**LLAMA3, **ORIGINAL}},
    "nothing": {"rope_scaling": None, "rope_parameters": None},
    "two bases": {**THETA, "rope_local_base_freq": 55.0},
    "two bases with a scaling": {"global_rope_theta": 77.0, "local_rope_theta": 55.0, "rope_scaling": LINEAR},
    "older names": {"rotary_emb_base": 55.0, "rotary_pct": 0.5},
    "another older name": {"rope_pct": 0.5},
    "a share": {**THETA, "partial_rotary_factor": 0.5},
    "one type": {"rope_parameters": {"full_attention": {**LINEAR, **THETA}}},
    "types without a base": {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": DEFAULT_ROPE}},
    "types beside a base": {**THETA, "rope_parameters": {"full_attention": LINEAR, "sliding_attention": DEFAULT_ROPE}},
    "types": {"rope_parameters": {"full_attention": {**YARN, **THETA, **ORIGINAL}, "sliding_attention": THETA}},
}
ROTARY = ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor", "layer_rope_theta", *ORIGINAL)
QUICK_CASES = {"gemma3_text"}
EXCEPT = {
    "dbrx": "`attn_config.rope_theta`, which its class ignores, is the base of a file that has no other",
    **dict.fromkeys(("laguna_channels", "lfm3_bare"), "it has one type of layers, so nothing reads the other's entry"),
}
"""Cases whose rotary positions may differ; each with the reason."""
EVEN = {name: {"head_dim": 16} for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")}
"""By default, these types rotate a quarter of a head; an odd number of channels would be written with another base."""


@pytest.mark.parametrize("name", chosen(sorted(CASES.keys() - EXCEPT.keys()), QUICK_CASES))
def test_each_form_is_read_as_they_read_it_or_refused(name: str, tmp_path: Path) -> None:
    config = config_of(name)
    if "rope_parameters" not in config or "rope_parameters" not in export_config(imported(name, config, tmp_path)):
        pytest.skip("its positions are not rotary")
    rest = {key: value for key, value in config.items() if key not in ROTARY} | EVEN.get(name, {})
    failures = {form: unlike(name, rest | fields, tmp_path) for form, fields in FORMS.items()}
    assert {form: both for form, both in failures.items() if both} == {}


def unlike(name: str, config: dict[str, Any], folder: Path) -> tuple[Any, Any] | None:
    """Our rotary positions and theirs, if both can be had, and differ."""
    try:
        written = export_config(imported(name, config, folder))
    except SpecError:
        return None
    try:
        read = transformers.AutoConfig.for_model(**deepcopy(config))
        read.standardize_rope_params()  # as their model does, which then finds a length beside
        theirs = plain(read.rope_parameters)
    except Exception:  # transformers says in many ways that it cannot
        return None
    ours = plain(written["rope_parameters"])
    return (ours, theirs) if ours != theirs else None


@pytest.mark.parametrize(
    ("name", "fields", "why"),
    [
        ("gemma3_text", {"rope_parameters": {**DEFAULT_ROPE, **THETA}}, "`rope_type` is not a type of layer"),
        ("gemma3_text", {"local_rope_theta": 55.0}, "gemma3_text does not have the field `local_rope_theta`"),
        ("cohere_compass_text", {"rope_parameters": THETA}, "`rope_theta` is not a type of layer"),
        ("cohere_compass_text", {}, "`rope_theta` of `sliding_attention` is missing"),
        ("modernbert", THETA, "modernbert does not have the field `rope_theta`"),
        ("gpt_neox", THETA, "gpt_neox does not have the field `rope_theta`"),
        ("llama", {"rotary_emb_base": 55.0}, "llama does not have the field `rotary_emb_base`"),
        ("laguna", {"rope_parameters": {"full_attention": THETA}}, "`rope_theta` of `sliding_attention` is missing"),
        *(
            (name, {"partial_rotary_factor": 0.5}, f"{name} rotates entire heads, but this file rotates 0.5 of them")
            for name in ("afmoe", "dots1", "exaone_moe", "hy_v3", "solar_open")
        ),
        ("minimax_m2", {"partial_rotary_factor": 0.25}, "`0.25` of a head, but `rotary_dim` is"),
        ("cohere2_moe", {"rope_scaling": LINEAR}, "`rope_scaling` must be `null`: its class does not read it"),
        ("apertus", THETA, "`rope_theta` is `77.0`, but `rope_parameters`, which is left out, gives `12000000.0`"),
        ("llama", {"rope_scaling": {**LLAMA3, **ORIGINAL}}, "missing key `factor`"),
        ("llama", {"rope_scaling": {**YARN, **ORIGINAL}, "original_max_position_embeddings": 9},
         "is `6` among the rotary parameters, but `9` outside of them"),
    ],
)  # fmt: skip
def test_what_their_class_would_pass_over_is_refused(
    name: str, fields: dict[str, Any], why: str, tmp_path: Path
) -> None:
    config = {key: value for key, value in config_of(name).items() if key not in ROTARY} | fields
    with pytest.raises(SpecError, match=why):
        imported(name, config, tmp_path)


def test_phi3_believes_the_length_beside_the_rotary_parameters_or_its_default(tmp_path: Path) -> None:
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    for extra, meant in ({}, 4096), (ORIGINAL, 6):
        config = {**config_of("phi3_longrope"), "rope_parameters": {**longrope, **THETA, **ORIGINAL}}
        config = {key: value for key, value in config.items() if key not in ORIGINAL} | extra
        theirs = transformers.AutoConfig.for_model(**deepcopy(config)).rope_parameters
        actual = export_config(imported("phi3_longrope", config, tmp_path))["rope_parameters"]
        assert actual["original_max_position_embeddings"] == theirs["original_max_position_embeddings"] == meant


LONGROPE = {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, **ORIGINAL}


@pytest.mark.parametrize(
    ("scaling", "max_len"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, 12),
        ({"rope_type": "yarn", "factor": 2.5}, 15),
        slow(({**YARN, **ORIGINAL}, 18)),
        slow(({**LLAMA3, **ORIGINAL, "factor": 4.0}, 24)),
        slow((LONGROPE, 12)),
    ],
)
def test_input_beyond_the_trained_length(scaling: dict[str, Any], max_len: int, tmp_path: Path) -> None:
    """Longer input is what a scaling is for, even if config.json only has the length before it."""
    rope = {"rope_parameters": {**THETA, **scaling}}
    trial = Trial.of(Case("llama", {**LLAMA, "max_position_embeddings": 6, **rope}), tmp_path)
    assert limit_of(trial.imported.graph) == max_len
    check_logits(trial, "none")
    check_cached(trial)
    check_saved(trial)


@pytest.mark.parametrize(("kind", "written"), [("dynamic", 6), slow(("linear", 100))])
def test_a_max_len_beyond_the_scaling(kind: str, written: int, tmp_path: Path) -> None:
    """The class of a dynamic scaling takes the trained length from `max_position_embeddings`."""
    config = {**LLAMA, "max_position_embeddings": 6, "rope_parameters": {**THETA, "rope_type": kind, "factor": 2.0}}
    trial = Trial.of(Case("llama", config), tmp_path)
    longer = tfkit.build(tfkit.loads(trial.imported.text, sets="max_len=100")).eval()
    longer.load_state_dict(trial.ours.state_dict())
    check_logits(replace(trial, ours=longer), "none")
    check_saved(replace(trial, ours=longer))
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["max_position_embeddings"] == written


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"long_mscale": 1.3}, "must be equal numbers; got 1.24, 1.3"),
        ({"long_mscale": None}, "must be equal numbers; got 1.24, None"),
        ({"long_mscale": [1.24]}, r"must be equal numbers; got 1.24, \[1.24\]"),
        ({"attention_factor": 1.3}, "unknown field of a rotary position: `attention_factor`"),
        ({"rope_type": "yarn", "factor": 2.0}, "`rope_type` must be `longrope`; got `yarn`"),
    ],
)
def test_a_class_with_two_temperatures_has_one_number_for_both(
    changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    config = config_of("phimoe")
    with pytest.raises(SpecError, match=why):
        imported("phimoe", {**config, "rope_parameters": {**config["rope_parameters"], **changes}}, tmp_path)


def test_the_temperature_of_longrope_replaces_its_factor(tmp_path: Path) -> None:
    config = config_of("phi3_longrope")
    parameters = {**config["rope_parameters"], "factor": 4.0, "attention_factor": 1.3}
    graph = imported("phi3_longrope", {**config, "rope_parameters": parameters}, tmp_path)
    scaling = graph.spec.model.graph["decoder"].attention.position.scaling
    assert (scaling.temperature, scaling.factor) == (1.3, None)


def test_null_for_a_type_of_layer_is_no_rotation(tmp_path: Path) -> None:
    for name, rotated in (("cohere_compass_text", False), ("cohere_compass_text_rotated", True)):
        config = config_of(name)
        parameters = {**config["rope_parameters"], "rope_theta": 10000.0, "rope_type": "default"}  # as it is published
        graph = imported(name, {**config, "rope_parameters": parameters}, tmp_path)
        stack: Any = graph.spec.model.graph["decoder"]
        assert stack.attention.position is not None
        assert (stack.layers.variants["full"].attention.position is not None) == rotated
        assert export_config(graph)["rope_parameters"] == config["rope_parameters"]


def test_fields_that_a_class_ignores_next_to_its_mapping(tmp_path: Path) -> None:
    config = {**config_of("bailing_hybrid"), "rope_theta": 7.0, "rope_parameters": {**ROPE, "rope_theta": 55.0}}
    written = export_config(imported("bailing_hybrid", config, tmp_path))
    assert (written["rope_parameters"]["rope_theta"], written["kda_lower_bound"]) == (55.0, -3.0)
    assert type(written["kda_lower_bound"]) is float
