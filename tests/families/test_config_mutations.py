"""Any contents of a config.json give a spec with the same meaning, which can be written back, or clear errors."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from random import Random
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import tfkit
from tfkit.checkpoint.config_json import INERT_VALUES, LABELS, OF_MEDIA, ROTARY, SILENT, TEXT, TIED
from tfkit.component import ABSENT, Reading
from tfkit.components.fields.value import ValueConfig
from tfkit.errors import SpecError
from tfkit.tools.import_.importing import _tree_and_family as tree_and_family
from tfkit.tools.import_.importing import import_config

from ..sampling import some, spread
from .cases import CASES
from .config_mutations import Mutation, config_of, findings, imported, mutations

PLUGINS = tfkit.load_plugins()
PUBLISHED = Path(__file__).parents[1] / "published"
NAMES = sorted(CASES)
EXCEPT = {
    "granite*swa* rope_parameters.rope_theta=*": "their class reads `layer_rope_theta` instead, where it is not null",
    "umt5* tie_word_embeddings=*": "`scale_decoder_outputs` is beside it",
    "longt5* tie_word_embeddings=*": "the same",
    "bailing_hybrid* not written: *`first_k_dense_replace`*": "no number says the pattern that `mlp_layer_types` says",
    "*original_max_position_embeddings=* is passed over": "their classes read it with a scaling alone",
    "phi3_longrope original_max_position_embeddings=* is written as 4096": "what their class believes",
    "* use_sliding_window=* is passed over": "`layer_types` is beside it, and no layer there has a window",
    "hunyuan* rope_parameters.[bfm]*": "`alpha` is beside it, and their class reads that alone",
    "hunyuan* rope_parameters={'rope_type': 'dynamic', 'rope_theta': 1000.0, 'alpha': 50.0*": "as `factor` alone",
    "mistral4_bare rope_parameters.mscale=* is passed over": "their class reads it with `mscale_all_dim` alone",
    "flint mlp_only_layers=[[]1, 0] is passed over": "the same layers in another order",
    "granitemoehybrid* time_step_limit=[Nn]o* is passed over": "null stands for the limits of the file, 0 and infinity",
    "xlstm* embedding_dim=[Nn]o* is passed over": "null stands for `hidden_size`, which is equal",
    "xlstm* num_blocks=[Nn]o* is passed over": "null stands for `num_hidden_layers`, which is equal",
    "* rope_parameters.mrope_section=[[]*] is passed over": "positions of text are equal in all planes",
    "* rope_parameters.*type='mrope' is passed over": "the same",
    "gemma4_text* layer_types=[[]*...* is passed over": "the last layer is one of full attention in its class",
    "gemma3n* rope_parameters.*_attention=[Nn]o* is passed over": "its class has the same base by default",
    "modernbert* rope_parameters.*_attention=[{Nn]* is passed over": "its class has the same base by default",
    "phimoe rope_parameters.type='su' is passed over": "the older name of `longrope`",
    "sarvam_moe topk_group=* is written as 1": "with `n_group` as 1: every group is read in both",
    "* mlp_layer_types=[Nn]o* is passed over": "null stands for `first_k_dense_replace`, which agrees",
    "* rope_parameters.*factor=* is passed over": "the ratio of two lengths, as without it",
}
"""Findings, with `*`, that are right; each with the reason."""


def report_of(names: list[str], seeds: int, folder: Path) -> str:
    """The findings of mutations of cases, a line for each, with its seed; a new case changes no mutation of others."""
    lines: list[str] = []
    for name in names:
        for seed in range(seeds):
            changes = mutations(name, Random(f"{name} {seed}"))
            unexpected = [finding for finding in findings(name, changes, folder) if not excepted(f"{name} {finding}")]
            lines += [f"{seed} {name} {', '.join(map(str, changes))}: {finding}" for finding in unexpected]
    return "\n".join(lines)


def excepted(finding: str) -> bool:
    return any(fnmatchcase(finding, pattern) for pattern in EXCEPT)


@pytest.mark.parametrize("name", some(NAMES, 5))
def test_what_the_mutants_are_made_from_is_right(name: str, tmp_path: Path) -> None:
    imported(name, config_of(name), tmp_path)


def test_mutations(tmp_path: Path) -> None:
    assert report_of(spread(NAMES, 3), 14, tmp_path) == ""


@pytest.mark.slow
def test_many_mutations(tmp_path: Path) -> None:
    assert report_of(NAMES, 8, tmp_path) == ""


@pytest.mark.slow
def test_what_a_family_lacks_its_class_ignores() -> None:
    """A field that no family names is a warning, so families name all fields that the config of their class has."""
    further = SILENT | {*INERT_VALUES, *LABELS, TIED, TEXT}
    count = 0
    for model_type, spec in PLUGINS.specs.by_model_type.items():
        if model_type not in CONFIG_MAPPING:
            continue  # its code is in its folder
        family = tree_and_family(spec, PLUGINS)[1]
        names = {name.partition(".")[0] for name in (*family.fields, *family.aliases)}
        declared = CONFIG_MAPPING[model_type]().to_dict()
        unnamed = {name for name in declared if not (ROTARY.search(name) or OF_MEDIA.match(name))} - names - further
        assert unnamed == set(), model_type
        count += len(declared)
    assert count > 5000


@pytest.mark.parametrize("factor", [0, 2])
def test_the_oracle_sees_a_field_that_is_read_wrong(
    factor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, right = Mutation(("layer_norm_epsilon",), 0.5), ValueConfig.read

    def read(self: ValueConfig, name: str, file: Reading) -> None:
        if name != change.location[0]:
            right(self, name, file)
        elif factor:
            file.solve(self.expressions[0], file.value(name) * factor)

    assert list(findings("gpt2", [change], tmp_path)) == []
    monkeypatch.setattr(ValueConfig, "read", read)
    assert len(list(findings("gpt2", [change], tmp_path))) == 1


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mpt", Mutation(("attn_config",), {**config_of("mpt")["attn_config"], "return_dict": False})),
        ("exaone_moe", Mutation(("rope_parameters",), {"rope_theta": 10000.0, "partial_rotary_factor": 1.0})),
        ("modernbert_decoder", Mutation(("layer_types",), ABSENT)),
        ("laguna", Mutation(("rope_parameters",), {"rope_type": "default", "rope_theta": 1000.0})),
        ("llama", Mutation(("rope_parameters", "type"), "default")),
    ],
    ids=str,
)
def test_another_text_of_the_same_is_no_finding(name: str, change: Mutation, tmp_path: Path) -> None:
    assert list(findings(name, [change], tmp_path)) == []


def published(name: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((PUBLISHED / f"{name}.json").read_text(encoding="utf-8"))
    return report


def test_null_in_a_mapping_says_nothing(tmp_path: Path) -> None:
    config, path = published("deepseek_v3"), tmp_path / "config.json"
    graphs = []
    for scaling in (config["rope_scaling"], {**config["rope_scaling"], "rope_theta": None}):
        path.write_text(json.dumps({**config, "rope_scaling": scaling}), encoding="utf-8")
        graphs.append(import_config(path).graph.spec.model.graph)
    assert graphs[0] == graphs[1]


@pytest.mark.parametrize("empty", [[], [[[], 3]]])
@pytest.mark.parametrize("name", ["laguna", "gemma3_1b"])
def test_an_empty_list_of_layers_says_nothing(name: str, empty: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(published(name) | {"layer_types": empty}), encoding="utf-8")
    with pytest.raises(SpecError, match="the list of layer types is empty"):
        import_config(path)


@pytest.mark.parametrize(
    ("name", "field", "value", "why"),
    [
        ("llama31_8b", "rope_scaling", False, "`rope_scaling` must be a mapping; got `False`"),
        ("flex_olmo_7x7b", "rope_parameters", {"rope_theta": "2 * 3"}, "must be a number; got the text `2 [*] 3`"),
        ("flex_olmo_7x7b", "rope_parameters", {"rope_theta": True}, "must be a number; got `true`"),
        ("gpt_oss_20b", "rope_theta", 5, "`rope_theta` is `5`, but `rope_scaling` gives `150000`"),
        ("dbrx", "rope_parameters", {"rope_theta": 7.0}, "`attn_config.rope_theta` is `500000`, but `rope_parameters`"),
        ("mellum", "rope_parameters", {"full_attention": {}, "rope_theta": 5.0}, "`rope_theta` is not a type of layer"),
        ("modernbert_decoder", "rope_parameters", {"rope_theta": 5.0}, "`rope_theta` is not a type of layer"),
        ("deepseek_v3", "intermediate_size", "18432", r"got `18432`(.|\n)*write the number without quotes"),
        ("deepseek_v3", "num_key_value_heads", 64, "`num_key_value_heads` gives `64`, but `num_attention_heads` gives"),
        ("falcon_h1_0_5b", "mamba_rms_norm", "no", "`mamba_rms_norm` must be true or false; got `no`"),
        ("falcon_h1_0_5b", "key_multiplier", [0.5], "`key_multiplier` must be a number; got"),
        ("llama31_8b", "attention_bias", {}, "`attention_bias` cannot be a mapping"),
        ("modernbert_base", "local_attention", 6.5, "the value must be an integer; got 6.5"),
        ("bert_base", "architectures", "BertForTokenClassification", "`architectures` must be a list"),
    ],
)
def test_what_would_be_passed_over_is_refused(name: str, field: str, value: Any, why: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(published(name) | {field: value}), encoding="utf-8")
    with pytest.raises(SpecError, match=why):
        import_config(path)
