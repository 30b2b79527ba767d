"""The files and fields of a published folder that are copied with its weights."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import tfkit
from tfkit.errors import LeftOutWarning, SpecError
from tfkit.spec.folder import EXPORT_CONFIG
from tfkit.tools.common.companions import Companions
from tfkit.tools.import_.importing import import_config
from tfkit.tools.save.save import save

CONFIG = {
    "model_type": "llama",
    "hidden_size": 48,
    "eos_token_id": [251, 253],
    "pad_token_id": 252,
    "max_sequence_length": 77,
    "torch_dtype": "bfloat16",
    "auto_map": {"AutoModel": "code.Model"},
}


def write(folder: Path, **files: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_json", ".json").replace("_jinja", ".jinja").replace(
            "_md", ".md"
        )
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


def llama() -> tfkit.Graph:
    return tfkit.load(
        "llama_7b", sets=["d_model=48", "decoder.n_layers=1", "vocab_size=260", "decoder.attention.n_heads=3"]
    )


def test_fields_that_no_spec_contains_travel(tmp_path: Path) -> None:
    folder = write(tmp_path, config_json=CONFIG)
    family = llama().spec.family
    assert Companions.read(folder, family).fields == {
        "eos_token_id": [251, 253],
        "pad_token_id": 252,
        "max_sequence_length": 77,  # without effect in this family, but maybe not in another
    }
    assert Companions.read(folder, None).fields == {"eos_token_id": [251, 253], "pad_token_id": 252}


def test_fields_of_a_nested_config_travel(tmp_path: Path) -> None:
    nested = {
        "model_type": "t5gemma",
        "decoder": {"eos_token_id": 7, "hidden_size": 48},
        "encoder": {"hidden_size": 48},
    }
    folder = write(tmp_path, config_json=nested)
    assert Companions.read(folder, tfkit.load("t5gemma_2b_2b").spec.family).fields == {"decoder": {"eos_token_id": 7}}


def test_files_travel_unchanged_through_every_folder(tmp_path: Path) -> None:
    source = write(
        tmp_path / "source",
        config_json=CONFIG,
        generation_config_json='{ "eos_token_id":[251,253],\n"temperature": 0.70 }',
        chat_template_jinja="{{ 'ü' }}",
        additional_chat_templates__tool_jinja="{{ tool }}",
        preprocessor_config_json={"size": 30},
    )
    first, second = tmp_path / "first", tmp_path / "second"
    save(tfkit.build(llama(), seed=3), first, files_from=source)
    save(tfkit.build(tfkit.load(first), weights=first), second)
    for name in ("generation_config.json", "additional_chat_templates/tool.jinja", "preprocessor_config.json"):
        assert (second / name).read_bytes() == (source / name).read_bytes()
    assert json.loads((second / EXPORT_CONFIG).read_text())["eos_token_id"] == [251, 253]
    save(tfkit.build(tfkit.load(second), weights=second), tmp_path / "third", layout="huggingface")
    config = json.loads((tmp_path / "third" / "config.json").read_text())
    assert (config["eos_token_id"], config["max_sequence_length"], config["hidden_size"]) == ([251, 253], 77, 48)
    assert "auto_map" not in config
    assert not (tmp_path / "third" / EXPORT_CONFIG).exists()


def test_files_that_do_not_travel_are_named(tmp_path: Path) -> None:
    settings = {"model_max_length": 77, "auto_map": {"AutoTokenizer": "tokenization.T"}}
    source = write(tmp_path / "source", config_json=CONFIG, tokenizer_config_json=settings, README_md="x", words="x")
    (source / "tokenization.py").touch()
    with pytest.warns(LeftOutWarning) as warnings:
        save(tfkit.build(llama()), tmp_path / "out", files_from=source)
    (warning,) = warnings
    assert str(warning.message).endswith("`auto_map` of tokenizer_config.json, tokenization.py, words")
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text()) == {"model_max_length": 77}


def test_a_source_that_was_removed_is_named(tmp_path: Path) -> None:
    save(tfkit.build(llama(), seed=3), tmp_path / "first")
    model = tfkit.build(tmp_path / "first", weights=tmp_path / "first")
    (tmp_path / "first").rename(tmp_path / "moved")
    with pytest.warns(LeftOutWarning, match="no longer exists"):
        save(model, tmp_path / "out")


@pytest.mark.parametrize(
    ("spec", "config", "tokens", "expected"),
    [
        ("t5_small", {"pad_token_id": 5, "eos_token_id": 1}, {}, 5),
        ("t5_small", {}, {"pad_token": "<pad>", "bos_token": "<s>"}, 0),
        ("bart_base", {}, {"pad_token": "<pad>", "eos_token": {"content": "</s>"}}, 2),
        ("whisper_tiny", {}, {}, 3),
        ("mbart_large_cc25", {}, {"eos_token": "</s>"}, None),
        ("bart_base", {"eos_token_id": 2, "decoder_start_token_id": 0}, {}, 0),
    ],
)
def test_the_family_names_the_token_that_begins_a_text(
    spec: str, config: Any, tokens: Any, expected: int | None, tmp_path: Path
) -> None:
    tokenizer = Tokenizer(WordLevel({}, unk_token="<pad>"))
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>", "<|startoftranscript|>"])
    folder = write(tmp_path, config_json=config, tokenizer_json=tokenizer.to_str(), tokenizer_config_json=tokens)
    family = tfkit.load(spec).spec.family
    assert Companions.read(folder, family).with_start(family).fields.get("decoder_start_token_id") == expected


def test_a_token_that_begins_a_text_is_in_both_files(tmp_path: Path) -> None:
    folder = write(tmp_path, config_json={}, generation_config_json={"decoder_start_token_id": 7})
    family = tfkit.load("bart_base").spec.family
    companions = Companions.read(folder, family)
    assert companions.with_start(family) == replace(companions, fields={"decoder_start_token_id": 7})
    folder = write(tmp_path, config_json={"decoder_start_token_id": 6}, generation_config_json={"num_beams": 2})
    companions = Companions.read(folder, family).with_start(family)
    assert companions.generation == {"num_beams": 2, "decoder_start_token_id": 6}


def test_a_link_out_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of someone")
    folder = write(tmp_path / "source", vocab_json={})
    (folder / "chat_template.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(SpecError, match="must be a file in its folder"):
        Companions.read(folder, None)


def test_the_cache_of_the_hub_has_links_to_its_blobs(tmp_path: Path) -> None:
    blob = write(tmp_path / "models--a--b" / "blobs", f3a7="{{ 'ü' }}") / "f3a7"
    folder = write(tmp_path / "models--a--b" / "snapshots" / "rev", vocab_json={})
    (folder / "chat_template.jinja").symlink_to(os.path.relpath(blob, folder))
    assert Companions.read(folder, None).files["chat_template.jinja"] == "{{ 'ü' }}".encode()


def test_a_pipe_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(SpecError, match="it is a folder, a pipe or a device"):
        Companions.read(tmp_path, None)


@pytest.mark.parametrize("content", ["{", "[]", "null", '{"a": 1, "a": 2}'])
def test_an_invalid_config_is_an_error(tmp_path: Path, content: str) -> None:
    with pytest.raises(SpecError, match=r"config\.json"):
        Companions.read(write(tmp_path, config_json=content), None)


def test_names_of_classes_must_fit_the_model(tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 61,
        "hidden_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "intermediate_size": 8,
    }
    bert = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], **sizes}
    source = write(tmp_path / "source", config_json={**bert, "id2label": {"0": "so", "1": "nö"}})
    for count, expected in ((2, "nö"), (3, "LABEL_1")):
        graph = import_config(write(tmp_path / f"{count}", config_json={**bert, "num_labels": count})).graph
        save(tfkit.build(graph), tmp_path / "out", layout="huggingface", files_from=source, force=True)
        config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
        assert config["id2label"]["1"] == expected
