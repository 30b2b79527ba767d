"""The draft of a config.json from the names and shapes of a folder of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers
from safetensors.torch import save_file

import tfkit
from tfkit.tools.import_ import importing
from tfkit.tools.import_.importing import _tree_and_family, draft_of_weights
from tfkit.tools.import_.shapes import draft_config

PLUGINS = tfkit.load_plugins()
SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
WIDE = {**SIZES, "intermediate_size": 48, "max_position_embeddings": 24}
GROUPED = {**WIDE, "num_key_value_heads": 2}
GPT = {"vocab_size": 61, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 24}
CAUSAL, MASKED = transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM
MODELS: dict[str, tuple[Any, dict[str, Any], set[str]]] = {
    "llama": (CAUSAL, GROUPED, {"vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size"}),
    "qwen2": (CAUSAL, GROUPED, {"vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size"}),
    "qwen3": (
        CAUSAL,
        {**GROUPED, "head_dim": 12},
        {"hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads", "intermediate_size"},
    ),
    "gemma2": (CAUSAL, {**GROUPED, "head_dim": 8}, {"hidden_size", "num_hidden_layers", "intermediate_size"}),
    "olmo2": (CAUSAL, GROUPED, {"hidden_size", "num_hidden_layers", "intermediate_size"}),
    "phi3": (CAUSAL, GROUPED, {"hidden_size", "num_hidden_layers", "intermediate_size"}),
    "starcoder2": (CAUSAL, GROUPED, {"hidden_size", "num_hidden_layers", "intermediate_size"}),
    "gpt2": (CAUSAL, GPT, {"vocab_size", "n_embd", "n_layer", "n_positions"}),
    "gptj": (CAUSAL, {**GPT, "rotary_dim": 4}, {"vocab_size", "n_embd", "n_layer"}),
    "gpt_neox": (CAUSAL, WIDE, {"vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size"}),
    "bloom": (CAUSAL, {"vocab_size": 61, "hidden_size": 32, "n_layer": 3, "n_head": 4}, {"hidden_size", "n_layer"}),
    "bert": (MASKED, {**WIDE, "type_vocab_size": 3}, {"hidden_size", "max_position_embeddings", "type_vocab_size"}),
    "distilbert": (
        MASKED,
        {"vocab_size": 61, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 24},
        {"dim", "n_layers", "hidden_dim", "max_position_embeddings"},
    ),
    "t5": (
        transformers.AutoModelForSeq2SeqLM,
        {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4},
        {"vocab_size", "d_model", "num_layers", "d_ff"},
    ),
}
"""For each type, its class, its sizes, and fields that the shapes decide."""


def folder_of(name: str, folder: Path) -> dict[str, Any]:
    """Write the weights of a small model without its config.json, which is returned."""
    cls, fields, _ = MODELS[name]
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[name](**fields, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    cls.from_config(config).save_pretrained(folder)
    stated: dict[str, Any] = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    return stated


def test_a_type_among_a_few(tmp_path: Path) -> None:
    stated = folder_of("gpt2", tmp_path)
    names = ["llama", "openai-gpt", "gpt2"]
    types = {name: partial(_tree_and_family, PLUGINS.specs.by_model_type[name], PLUGINS) for name in names}
    drafted = draft_config(tmp_path, types, PLUGINS)
    assert (drafted.types[0], drafted.n_equal, drafted.open) == ("gpt2", 1, ("n_head",))
    fields = {key: value for key, value in json.loads(drafted.text).items() if key not in ("n_head", "n_inner")}
    assert fields == {key: stated[key] for key in fields}
    assert fields.keys() >= {"vocab_size", "n_embd", "n_layer", "n_positions", "tie_word_embeddings"}
    drafted = draft_config(
        tmp_path, {"first": types["gpt2"], "llama": types["llama"], "second": types["gpt2"]}, PLUGINS
    )
    assert (drafted.types[:2], drafted.n_equal) == (("first", "second"), 2)
    assert "types with the same names and shapes: second" in drafted.note.notes
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(tfkit.SpecError, match="no family has the tensors of"):
        draft_config(tmp_path, types, PLUGINS)


def test_the_family_that_most_families_extend_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bases = {"a": "llama", "b": "gpt2", "c": "llama", "d": "llama", "e": "gpt2", "f": None}
    families = {name: SimpleNamespace(path=tmp_path / f"{name}.yaml") for name in bases}
    for name, base in bases.items():
        families[name].path.write_text("title: of a test\n" + (f"extends: {base}\n" if base else ""), encoding="utf-8")
    specs = SimpleNamespace(families=families, by_model_type=dict.fromkeys(("mamba", "gpt2", "llama"), "spec"))
    monkeypatch.setattr(importing, "draft_config", lambda path, types, plugins: [*types])
    assert cast(Any, draft_of_weights(tmp_path, cast(Any, SimpleNamespace(specs=specs)))) == ["llama", "gpt2", "mamba"]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_family_is_first_and_the_decided_fields_are_right(name: str, tmp_path: Path) -> None:
    stated = folder_of(name, tmp_path)
    drafted = draft_of_weights(tmp_path, PLUGINS)
    fields = json.loads(drafted.text)
    assert drafted.types[0] == fields["model_type"] == name
    differing = {
        field: (value, stated[field])
        for field, value in fields.items()
        if value != "?" and stated.get(field) is not None and value != stated[field]
    }
    assert differing == {}
    assert MODELS[name][2] <= {field for field, value in fields.items() if value != "?"}
    assert {field for field, value in fields.items() if value == "?"} == set(drafted.open)


@pytest.mark.slow
def test_a_completed_draft_is_the_config_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., str]
) -> None:
    monkeypatch.chdir(tmp_path)
    stated = folder_of("gpt2", Path("theirs"))
    error = run("import", "theirs", status=1, stderr=True)
    assert "`theirs` has no config.json" in error
    assert "`tfkit import theirs --draft config.json" in error
    warning = run("import", "theirs", "--draft", "theirs/config.json", stderr=True)
    assert "warning: the tensors do not decide all fields of `gpt2`\n   = to complete: `n_head`\n" in warning
    assert "got `?`\n   --> theirs/config.json:" in run("import", "theirs", status=1, stderr=True)
    text = Path("theirs/config.json").read_text()
    Path("theirs/config.json").write_text(text.replace('"n_head": "?"', f'"n_head": {stated["n_head"]}'))
    drafted = tfkit.import_config("theirs")
    Path("theirs/config.json").write_text(json.dumps(stated))
    assert drafted.text == tfkit.import_config("theirs").text
