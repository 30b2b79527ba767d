"""Folders of models that contain a text model: which of their fields and tensors belong to the text model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import tfkit
from tfkit.cli import main
from tfkit.tools.common.companions import Companions
from tfkit.tools.import_.importing import Imported, draft_family, import_config

from ...known import KNOWN

PUBLISHED = Path(__file__).parents[2] / "published" / "around"
TEXT = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
GRANITE = {"model_type": "granite", "architectures": None, "logits_scaling": 4.0}
OUTER = {
    "model_type": "unpublished_vision",
    "architectures": ["UnpublishedVisionForConditionalGeneration"],
    "image_token_index": 60,
    "vision_config": {"hidden_size": 4},
}
TOWER = {f"tower.norm_{name}.weight": torch.ones(4) for name in "abcdefgh"}
TOWER |= {"tower.rotary_emb.inv_freq": torch.ones(4), "projector.bias": torch.ones(8)}
"""Two models around the text model; the family of the text model computes frequencies of that name."""
SPELLINGS = {
    "language_model.model": ("language_model.model.", "language_model.lm_head."),
    "model.language_model": ("model.language_model.", "lm_head."),
    "model.text_model": ("model.text_model.", "lm_head."),
    "model.language_model.model": ("model.language_model.model.", "model.language_model.lm_head."),
    "model.language_model beside its head": ("model.language_model.", "model.lm_head."),
    "language_model": ("language_model.", "lm_head."),
}


def folder(path: Path, spelling: str = "model.language_model", *, head: bool = True, **outer: Any) -> Path:
    """A folder with random weights, of which the text model has the names of a spelling; `text` changes its config."""
    path.mkdir(exist_ok=True)
    text = {**TEXT, **outer.pop("text", {})}
    (path / "config.json").write_text(json.dumps({**OUTER, "text_config": text, **outer}))
    save_file(stored(spelling, head=head), path / "model.safetensors")
    return path


def test_pickles_are_named_only_without_safetensors(tmp_path: Path) -> None:
    (folder(tmp_path) / "pytorch_model.bin").touch()
    assert not any("are pickles" in note.message for note in import_config(tmp_path).notes)
    (tmp_path / "model.safetensors").unlink()
    assert any("are pickles, which tfkit does not read" in note.message for note in import_config(tmp_path).notes)


def stored(spelling: str, *, head: bool) -> dict[str, Tensor]:
    body, lm_head = SPELLINGS[spelling]
    names = {name: tensor for name, tensor in text_tensors().items() if head or name != "lm_head.weight"}
    renamed = {
        body + name.removeprefix("model.") if name.startswith("model.") else lm_head + "weight": tensor
        for name, tensor in names.items()
    }
    start = "model." if spelling.startswith("model.") else ""
    return renamed | {start + name: tensor for name, tensor in TOWER.items()}


def text_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = {"q_proj": (8, 8), "k_proj": (4, 8), "v_proj": (4, 8), "o_proj": (8, 8)}
    matrices = {"embed_tokens": (61, 8), "norm": (8,)}
    for i in range(3):
        matrices |= {f"layers.{i}.self_attn.{name}": size for name, size in sizes.items()}
        matrices |= {f"layers.{i}.mlp.{name}": (12, 8) for name in ("gate_proj", "up_proj")}
        matrices |= {f"layers.{i}.mlp.down_proj": (8, 12)}
        matrices |= {f"layers.{i}.{name}": (8,) for name in ("input_layernorm", "post_attention_layernorm")}
    names = {f"model.{name}.weight": size for name, size in matrices.items()} | {"lm_head.weight": (61, 8)}
    return {name: torch.randn(size, generator=generator) for name, size in names.items()}


def filled(imported: Imported, path: Path) -> Any:
    with pytest.warns(tfkit.LeftOutWarning, match="the model omits 10 tensors") as records:
        model = tfkit.build(tfkit.loads(imported.text), weights=path)
    (record,) = records
    assert "tower (9 tensors)" in str(record.message)
    return model


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_names_of_the_text_model_are_found(spelling: str, tmp_path: Path) -> None:
    imported = import_config(folder(tmp_path, spelling))
    model = filled(imported, tmp_path)
    tensors = text_tensors()
    assert torch.equal(model.embedding.tokens.weight, tensors["model.embed_tokens.weight"])
    assert torch.equal(model.logits.output.weight, tensors["lm_head.weight"])
    assert torch.equal(model.decoder.layers[2].ffn.down.weight, tensors["model.layers.2.mlp.down_proj.weight"])
    start = "model." if spelling.startswith("model.") else ""
    assert imported.tensors_left_out == {f"{start}projector": 1, f"{start}tower": 9}
    assert imported.fields_left_out == ("image_token_index", "vision_config")


def test_two_models_of_the_same_names_are_not_chosen_between(tmp_path: Path) -> None:
    path = folder(tmp_path)
    twice = {**stored("model.language_model", head=False), **stored("model.text_model", head=True)}
    save_file(twice, path / "model.safetensors")
    with pytest.raises(tfkit.SpecError, match=r"lacks tensors of the model(.|\n)*model\.embed_tokens\.weight"):
        tfkit.build(import_config(path / "config.json").graph, weights=path)


def test_a_surplus_tensor_of_the_text_model_is_an_error(tmp_path: Path) -> None:
    path = folder(tmp_path)
    adapter = {"model.language_model.layers.1.self_attn.q_proj.lora_A.weight": torch.ones(2, 8)}
    save_file({**stored("model.language_model", head=True), **adapter}, path / "model.safetensors")
    with pytest.raises(
        tfkit.SpecError, match=r"has tensors that the model lacks(.|\n)*layers\.1\.self_attn\.q_proj\.lora_A"
    ):
        tfkit.build(import_config(path).graph)


@pytest.mark.parametrize(
    ("outer", "text", "head", "tied"),
    [
        (True, False, None, True),
        (False, True, None, False),
        (None, True, None, True),
        (None, None, None, False),
        (None, True, True, False),
        (None, False, False, True),
        (None, None, False, True),
        (False, True, True, False),
        (True, False, False, True),
    ],
)
def test_the_field_around_the_text_model_ties_then_the_weights(
    outer: bool | None, text: bool | None, head: bool | None, tied: bool, tmp_path: Path
) -> None:
    """`head` is None without weights; a class that contains a text model uses only the field around it."""
    fields = {} if outer is None else {"tie_word_embeddings": outer}
    path = folder(tmp_path, head=bool(head), text={"tie_word_embeddings": text} if text is not None else {}, **fields)
    if head is None:
        (path / "model.safetensors").unlink()
    imported = import_config(path)
    assert (imported.graph.spec.model.graph["logits"].tie is not None) == tied


def test_fields_around_the_text_model_travel_with_it(tmp_path: Path) -> None:
    """The ids around it count more than the ids in it, as in the generation config that transformers derives."""
    path = folder(tmp_path, head=True, eos_token_id=[7, 9], text={"eos_token_id": 8, "bos_token_id": 6})
    (path / "tokenizer_config.json").write_text('{"clean": true}')
    (path / "preprocessor_config.json").write_text('{"size": 8}')
    family = import_config(path).graph.spec.family
    companions = Companions.read(path, family)
    assert companions.fields == {"eos_token_id": [7, 9], "bos_token_id": 6}
    assert companions.model_type == "llama"
    assert companions.files.keys() == {"tokenizer_config.json"}
    assert companions.omitted == ("preprocessor_config.json, of images or sound",)


def test_a_value_of_the_class_replaces_the_value_of_the_text_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**OUTER, "model_type": "granite_speech", "text_config": {**TEXT, **GRANITE}})
    )
    imported = import_config(tmp_path)
    assert imported.graph.spec.model.graph["logits"].scale == 1
    (note,) = [note for note in imported.notes if note.path]
    assert note.message == "the class of `granite_speech` computes with `logits_scaling: 1.0`"
    assert note.notes == ("the spec has this value; text_config states `4.0`",)
    assert note.span is not None
    assert '"logits_scaling"' in note.span.source.line(note.span.line)


def test_a_family_by_name_defines_the_fields_of_the_text_model(tmp_path: Path) -> None:
    path = folder(tmp_path, text={"model_type": "unpublished_text"})
    imported = import_config(path, family="llama3_8b")
    assert imported.graph.spec.model.graph["decoder"].n_layers == 3
    assert imported.fields_left_out == ("image_token_index", "vision_config")


@pytest.mark.parametrize(
    ("text", "message", "help"),
    [
        (
            "llama9_vision_text_model",
            "unknown model type `llama9_vision_text_model`",
            "use `llama`, a similar type; or ",
        ),
        (None, "the text_config has no `model_type`", "--family"),
    ],
)
def test_an_unknown_text_model_is_an_error_at_its_type(
    text: str | None, message: str, help: str, tmp_path: Path
) -> None:
    path = folder(tmp_path, text={"model_type": text})
    with pytest.raises(tfkit.SpecError) as caught:
        import_config(path)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.message.startswith(message)
    assert diagnostic.path == "text_config.model_type"
    assert help in str(diagnostic.help)
    assert diagnostic.span is not None
    assert diagnostic.span.column > len('{"model_type": "unpublished_vision", ')


@pytest.mark.slow
def test_a_draft_describes_the_text_model(tmp_path: Path) -> None:
    path = folder(tmp_path, text={"model_type": "unpublished_text", "architectures": ["UnpublishedForCausalLM"]})
    text, _, _ = draft_family(path, KNOWN)
    assert 'model_type: "unpublished_text"' in text
    assert "vision_config" not in text


def test_a_foreign_file_is_described_by_the_names_of_the_family(tmp_path: Path) -> None:
    path = folder(tmp_path)
    few = {"lm_head.weight": (61, 8), "model.norm.weight": (8,)}
    foreign = {"encoder.stem.embed_tokens.weight": (61, 8), "encoder.stem.norm.weight": (8,)}
    tensors = {name: torch.ones(size) for name, size in {**few, **foreign}.items()}
    save_file(tensors, path / "foreign.safetensors")
    with pytest.raises(tfkit.SpecError) as caught:
        tfkit.build(import_config(path).graph, weights=path / "foreign.safetensors")
    lacks, has = caught.value.diagnostics
    assert any(note.startswith("model.embed_tokens.weight [61, 8]") for note in lacks.notes)
    assert has.notes == ("encoder.stem.embed_tokens.weight [61, 8]", "encoder.stem.norm.weight [8]")


def test_older_files_have_the_fields_of_both_models_at_the_top(tmp_path: Path) -> None:
    """As Qwen2-VL was published, with positions in planes, which are equal for text."""
    rotary = {"rope_theta": 500.0, "rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 1]}}
    outer = {
        "model_type": "qwen2_vl",
        "vision_config": {"depth": 3},
        "image_token_id": 60,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps({**TEXT, **rotary, **outer, "architectures": ["Qwen2VLModel"]}))
    biases = {
        f"layers.{i}.self_attn.{name}_proj.bias": size
        for i in range(3)
        for name, size in zip("qkv", (8, 4, 4), strict=True)
    }
    tensors = {
        name.removeprefix("model."): tensor for name, tensor in text_tensors().items() if name != "lm_head.weight"
    }
    tensors |= {name: torch.ones(size) for name, size in biases.items()}
    save_file({**tensors, "visual.stem": torch.ones(3)}, tmp_path / "model.safetensors")
    imported = import_config(tmp_path)
    position = imported.graph.spec.model.graph["decoder"].attention.position
    assert (position.theta, position.scaling) == (500.0, None)
    assert imported.fields_left_out == ("vision_config", "image_token_id")
    assert imported.tensors_left_out == {"visual.stem": 1}
    with pytest.warns(tfkit.LeftOutWarning, match="the model omits 1 tensor"):
        tfkit.build(imported.graph)
    assert Companions.read(tmp_path, imported.graph.spec.family).fields == {}
    (tmp_path / "config.json").write_text(json.dumps({**TEXT, **rotary, **outer, "n_odd": 3}))
    assert "qwen2 does not have the field `n_odd`" in [note.message for note in import_config(tmp_path).notes]


def test_the_head_of_the_class_around_the_text_model(tmp_path: Path) -> None:
    classes = {"architectures": ["UnpublishedForSequenceClassification"], "num_labels": 5}
    path = folder(tmp_path, **classes, id2label={str(n): f"class {n}" for n in range(5)})
    (path / "model.safetensors").unlink()
    assert import_config(path).graph.outputs == ("classes",)


def test_commands_count_what_they_leave_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, spec = folder(tmp_path / "theirs"), str(tmp_path / "spec.yaml")
    assert main(["import", str(path), "-o", spec, "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["left_out"] == {
        "fields": ["image_token_index", "vision_config"],
        "tensors": {"model.projector": 1, "model.tower": 9},
    }
    assert "the spec is only the text model of `unpublished_vision`, of type `llama`" in output.err
    assert "fields that it omits: image_token_index, vision_config" in output.err
    assert "outside of `model.language_model`: model.projector, model.tower (9 tensors)" in output.err
    assert main(["build", spec, "--weights", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == {"model.projector": 1, "model.tower": 9}


@pytest.mark.parametrize(
    ("name", "parameters", "family", "spec"),
    [
        ("gemma3_4b", 3_880_263_168, "gemma3_text", "gemma3_1b"),
        ("llava_1_5_7b", 6_738_939_904, "llama", "llama_7b"),
        ("mistral_small_3_1", 23_572_403_200, "mistral", "mistral_7b"),
        ("qwen25_vl_3b", 3_085_938_688, "qwen2", "qwen2_0_5b"),
    ],
)
def test_published_files_omit_sizes_of_the_text_model(name: str, parameters: int, family: str, spec: str) -> None:
    """The files state what the published files state, and omit what these omit; the counts are of the classes of
    transformers, without the parts for images."""
    imported = import_config(PUBLISHED / f"{name}.json", family=spec)
    assert tfkit.count_params(imported.graph).total == parameters
    assert imported.graph.spec.family is not None
    assert imported.graph.spec.family.model_type == family
    assert "vision_config" in imported.fields_left_out
    (note,) = imported.notes
    assert note.message.startswith("the spec is only the text model")


def test_a_text_config_has_the_defaults_of_its_class(tmp_path: Path) -> None:
    """The class of Qwen2.5-VL has 8 key-value heads by default, the class of Qwen2 has 32."""
    config = {**OUTER, "text_config": {"model_type": "qwen2_5_vl_text"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    imported = import_config(tmp_path)
    decoder = imported.graph.spec.model.graph["decoder"]
    assert (decoder.attention.n_kv_heads, decoder.attention.position.theta) == (8, 1e6)
    assert decoder.norm.eps == 1e-5


def test_a_plain_model_is_no_text_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TEXT, "architectures": ["LlamaForCausalLM"]}))
    imported = import_config(tmp_path)
    assert imported.notes == ()
    assert imported.fields_left_out == ()


@pytest.mark.parametrize("field", ["architectures", "model_type", "tie_word_embeddings"])
def test_a_malformed_field_around_a_text_model_is_no_crash(field: str, tmp_path: Path) -> None:
    for value in (7, [["x"]], {"x": 1}):
        path = folder(tmp_path, **{field: value})
        try:
            family = import_config(path).graph.spec.family
        except tfkit.SpecError:
            family = tfkit.load("llama_7b").spec.family
        Companions.read(path, family)
