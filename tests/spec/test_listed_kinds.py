"""Errors list every kind that would fit. Golden files omit these lists: a new kind would change many of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tfkit
from tfkit.errors import Source
from tfkit.plugin.registry import slot_base
from tfkit.spec.messages import unknown_kind

PLUGINS = tfkit.load_plugins(entry_points=False)
SLOTS = PLUGINS.registry.slots()


def test_the_slots_have_kinds() -> None:
    assert {"ffn", "attention", "block", "norm", "optimizer", "metric", "data", "field"} <= set(SLOTS)


@pytest.mark.parametrize("slot", SLOTS)
def test_an_unknown_kind_lists_all_kinds_of_its_slot(
    slot: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # without plugins that an error would name
    kinds = PLUGINS.registry.kinds(slot)
    bases = {slot_base(registered.config) for registered in kinds.values()}
    for base in bases:
        error = unknown_kind("nothing", base, PLUGINS, Source("a", "b").span(0, 1), ("c",))
        (words,) = re.findall(r"^known \w+: (.*)$", error.notes[0])
        assert words.split(", ") == [kind for kind, entry in kinds.items() if issubclass(entry.config, base)]


@pytest.mark.parametrize("key", ["n_heads", "n_kv_heads"])
def test_a_key_of_other_kinds_names_all_of_them(key: str) -> None:
    spec = f"""
tfkit: 1
name: a
d_model: 8
graph:
  decoder: {{block: decoder, n_layers: 1, attention: mha, n_heads: 2, norm: {{kind: rmsnorm, {key}: 2}}, ffn: relu}}
"""
    with pytest.raises(tfkit.SpecError) as caught:
        tfkit.loads(spec, plugins=PLUGINS)
    (text,) = [error.help for error in caught.value.diagnostics if error.help and "is a key of" in error.help]
    entries = PLUGINS.registry.kinds("attention").items()
    kinds = [f"`{kind}`" for kind, component in entries if key in component.config.model_fields]
    assert text == f"`{key}` is a key of the attention kind{'s' if len(kinds) > 1 else ''} {', '.join(kinds)}"


def test_a_field_of_a_family_without_a_kind_lists_all_kinds() -> None:
    path = Path(__file__).parents[1] / "broken" / "family_field_without_a_kind.yaml"
    with pytest.raises(tfkit.SpecError) as caught:
        tfkit.load(path, plugins=PLUGINS)
    (note,) = caught.value.diagnostics[0].notes
    assert note == f"kinds: {', '.join(PLUGINS.registry.kinds('field'))}"
