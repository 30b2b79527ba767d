"""Whatever a config.json holds: a spec or clear errors, never a traceback; and what was read can be written again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tfkit.errors import SpecError
from tfkit.tools.import_.importing import export_config, import_config

PUBLISHED = Path(__file__).parents[1] / "published"
NAMES = """
    gpt2 llama31_8b gemma3_1b phi3_mini_128k falcon_40b opt_350m gpt_neo_125m modernbert_base albert_base t5_v1_1_base
    bart_base opus_mt_en_de deepseek_v3 gpt_oss_20b mpt_7b smollm3_3b laguna granite_swa k_exaone_236b_a23b
""".split()  # noqa: SIM905
CONFIGS = {name: json.loads((PUBLISHED / f"{name}.json").read_text(encoding="utf-8")) for name in NAMES}
ODD: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    3,
    1.5,
    1e300,
    -1e-9,
    10**30,
    "",
    "gelu",
    "x" * 300,
    [],
    {},
    [1, "a"],
    {"a": 1},
]
ODD += [
    [0] * 40,
    [[1]] * 40,
    ["full_attention"],
    [["global", "local"], 2],
    {"rope_type": "yarn"},
    {"type": "dynamic", "factor": "two"},
    "é\n",
]


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    config = dict(CONFIGS[draw(st.sampled_from(NAMES))])
    for _ in range(draw(st.integers(1, 3))):
        key = draw(st.sampled_from([*sorted(config), "n_experts", "rope_theta", "layer_types", "rope_scaling"]))
        if draw(st.booleans()):
            config.pop(key, None)
        elif isinstance(config.get(key), dict) and config[key] and draw(st.booleans()):
            config[key] = {**config[key], draw(st.sampled_from(sorted(config[key]))): draw(st.sampled_from(ODD))}
        else:
            config[key] = draw(st.sampled_from(ODD))
    return config


def check(config: dict[str, Any], folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    try:
        graph = import_config(path).graph
    except SpecError:
        return
    try:  # what could be read can be written, or it is said why not
        again = export_config(graph)
    except SpecError:
        return
    path.write_text(json.dumps(again), encoding="utf-8")
    assert import_config(path).graph.spec.model.graph == graph.spec.model.graph


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=configs())
def test_a_changed_config(config: dict[str, Any], tmp_path: Path) -> None:
    check(config, tmp_path)


def test_null_in_a_mapping_says_nothing(tmp_path: Path) -> None:
    config, path = CONFIGS["deepseek_v3"], tmp_path / "config.json"
    graphs = []
    for scaling in (config["rope_scaling"], {**config["rope_scaling"], "rope_theta": None}):
        path.write_text(json.dumps({**config, "rope_scaling": scaling}), encoding="utf-8")
        graphs.append(import_config(path).graph.spec.model.graph)
    assert graphs[0] == graphs[1]


@pytest.mark.parametrize("empty", [[], [[[], 3]]])
@pytest.mark.parametrize("name", ["laguna", "gemma3_1b"])
def test_an_empty_list_of_layers_says_nothing(name: str, empty: list[Any], tmp_path: Path) -> None:
    path, config = tmp_path / "config.json", json.loads((PUBLISHED / f"{name}.json").read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "layer_types": empty}), encoding="utf-8")
    with pytest.raises(SpecError, match="the list of layer types is empty"):
        import_config(path)


@pytest.mark.slow
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=configs())
def test_many_changed_configs(config: dict[str, Any], tmp_path: Path) -> None:
    check(config, tmp_path)
