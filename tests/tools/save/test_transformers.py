"""`tfkit save --layout transformers`: the code, its results in a process without tfkit, and reading the folder back."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import tokenizers
import torch
from safetensors.torch import load_file
from torch import fx
from torch.nn import functional as F

import tfkit
from tfkit.console.hub import local_path
from tfkit.graph.input_shapes import max_len
from tfkit.spec.folder import holds_code
from tfkit.spec.render import render_spec
from tfkit.tools.check.reduced import reduced_model
from tfkit.tools.common.companions import Companions
from tfkit.tools.common.model_inputs import random_inputs
from tfkit.tools.eject.remote_code import folder as folder_of_code
from tfkit.tools.eject.remote_code.card import model_card, verification
from tfkit.tools.eject.remote_code.folder import write_folder
from tfkit.tools.eject.remote_code.modeling import code_of
from tfkit.tools.eject.remote_code.parts import parts_of
from tfkit.tools.eject.remote_code.proof import Folders
from tfkit.tools.eject.remote_code.tokenizer import complete_tokenizer
from tfkit.tools.save.save import save

from ..conftest import DECODER

PLUGINS = tfkit.load_plugins()
GENERATION = Path(__file__).with_name("remote_generation.py")
SPECS = tuple(
    """
    a_x_k1 albert_base apertus_8b bert_base bitnet_2b bloom_560m command_r_plus_104b dbrx deepseek_v2_lite depth_small
    diffllama_1b dots1 exaone4_1_2b falcon_7b falcon_h1_0_5b falcon_mamba_7b falcon_rw_1b flint gated_streams_small
    gemma2_2b gemma3_1b glm4_32b_0414 glm4_5 glm_4_9b gpt2 gpt_neo_125m gpt_neox_japanese_2_7b gpt_oss_20b granite3_2b
    granite_3_1b_a400m helium_1_preview_2b hunyuan_7b hyperclovax jamba_v0_1 kimi_k2 kimi_linear_48b_a3b laguna
    lfm2_1_2b lfm2_8b_a1b llama3_8b llama4_scout mamba2_130m mhc_small minicpm3_4b minimax_text_01 mistral4
    mixtral_8x7b modernbert_base modernbert_decoder mpt_7b nanochat nemotron_h_8b olmo3_7b olmo_hybrid_7b opt_350m
    persimmon_8b phi3_5_moe phi4_mini phi_2 qwen2_57b_a14b qwen3_next_80b_a3b recurrentgemma_2b roformer_chinese_base
    rwkv4_169m stablelm_3b starcoder2_3b trinity_mini bart_base opus_mt_en_de t5_small t5gemma_2b_2b vaswani_base
    whisper_tiny xlstm_7b dinov2_base siglip_vision_base_16 vit_base_16
    """.split()  # noqa: SIM905
)
"""Every attention, position, window, FFN, mixer and stream of decoders, plugins among them, encoders of texts, images
and sound, and encoder-decoders.
"""
HEADS = {
    "sequence_classes": (
        "bert_base",
        "pooled: {block: pooler, activation: tanh}, classes: {block: classifier, n_classes: 3, labels: [a, b, c]}",
    ),
    "token_classes": ("modernbert_base", "classes: {block: classifier, n_classes: 5}"),
    "transformed": (
        "roberta_base",
        "pooled: pooler, classes: {block: classifier, n_classes: 4, transform: {activation: gelu, norm: layernorm}}",
    ),
    "score": (
        "gpt2",
        "pooled: {block: pooler, select: last}, classes: {block: classifier, n_classes: 1, bias: false}",
    ),
    "vectors": ("llama3_8b", ""),
    "squeezed": ("gpt2", "pooled: pooler, classes: {block: classifier, n_classes: 1, squeeze: true}"),
    "embeddings": ("bert_base", "pooled: {block: pooler, select: mean}"),
}
"""Models with other outputs than logits of tokens: the spec that they extend, and the nodes instead of its head."""
ADDITIVE = DECODER.replace("max_len: 8", "max_len: 32").replace("{n_heads: 2}", "{kind: additive, n_heads: 2}")
MODELS = (*SPECS, *(name for name in HEADS if name != "squeezed"), "additive")


@pytest.fixture(scope="module")
def folders() -> Iterator[Folders]:
    """One process with transformers for all folders."""
    with Folders() as process:
        yield process


def loaded(name: str) -> tfkit.Graph:
    """Load a spec by its name, or a spec of `HEADS`."""
    if name == "additive":
        return tfkit.loads(ADDITIVE)
    if name not in HEADS:
        return tfkit.load(name)
    base, nodes = HEADS[name]
    further = f", {nodes}" if nodes else ""
    head = f"graph: {{logits: null{further}}}"
    return tfkit.loads(f"tfkit: 1\nextends: {base}\nname: {name}\nparameters: null\ncheckpoint: null\n{head}\n")


def small_model(name: str) -> fx.GraphModule:
    return tfkit.build(reduced_model(loaded(name), PLUGINS).graph)


def write_inputs(model: fx.GraphModule, file: Path) -> None:
    """Write inputs by their names in transformers, the tokens that tfkit generates for the first row, and the number of
    calls of torch's attention.
    """
    graph = model.meta["graph"]
    parts, inputs, tokens = parts_of(graph), random_inputs(graph, batch=2, length=8, seed=4), None
    if parts.decodes:
        target = parts.last.input
        further: dict[str, Any] = {name: value[:1] for name, value in inputs.items() if name != target}
        prompt = torch.ones(1, 1, dtype=torch.long) if further else inputs[target][:1]
        room = min(20, (max_len(graph) or 99) - 9)
        tokens = tfkit.generate(model, prompt, max_new_tokens=room, **further).tokens[0]
    arguments = {parts.arguments[name]: value for name, value in inputs.items()}
    if "input_features" in arguments:
        arguments["input_features"] = arguments["input_features"].transpose(1, 2)
    kernel = F.scaled_dot_product_attention
    with torch.no_grad(), patch.object(F, kernel.__name__, side_effect=kernel) as attention:
        model.eval()(**inputs)
    torch.save((arguments, tokens, attention.call_count), file)


def test_a_card_has_the_last_numbers_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").touch()
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "loss": 1.5}\n{"step": 4, "lo')  # a killed run
    card = model_card(parts_of(tfkit.load("gpt2")), tmp_path)
    assert "| step | 2 |\n| loss | 1.5 |" in card


def test_a_card_states_how_the_folder_was_verified() -> None:
    parts = parts_of(tfkit.load("gpt2"))
    assert "only names and shapes" in verification(parts, computed=False)
    assert f"transformers {version('transformers')} and torch" in verification(parts, computed=True)


def test_damaged_files_next_to_the_weights_are_named(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").touch()
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "loss": 1.5}\n{"step": 4, "loss": ' + "9" * 400 + "}\n")
    with pytest.raises(tfkit.SpecError) as metrics:
        model_card(parts_of(tfkit.load("gpt2")), tmp_path)
    assert "metrics.jsonl`, line 2: `loss` must be an integer of at most 64 bits" in str(metrics.value)
    settings, tokenizer = tmp_path / "tokenizer_config.json", tmp_path / "tokenizer.json"
    settings.write_text('{"bos_token": "a",\n "eos_token": }')
    with pytest.raises(tfkit.SpecError) as token_settings:
        Companions.read(tmp_path, None)
    assert f"cannot read `{settings}`: its JSON is broken at line 2, column 15" in str(token_settings.value)
    tokenizer.write_text('{"model": }')
    with pytest.raises(tfkit.SpecError, match=r"cannot read the tokenizer `tokenizer\.json`: not JSON"):
        complete_tokenizer(tmp_path, ["tokenizer.json"], 9)


def test_a_card_shows_names_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").touch()
    metrics = {"step": 9, "val.x|<img src=a>": 2.5, "[a](b) `c` _d_ e_f": 3.5, "g\nh": 4.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    graph = tfkit.loads(DECODER.replace("name: small", 'name: small\ndescription: "a <script> in\\n# words"'))
    card = model_card(parts_of(graph), tmp_path)
    assert "`decoder_start_token_id`" in model_card(parts_of(tfkit.load("t5_small")), None, has_start=False)
    assert "_start_token_id`" not in model_card(parts_of(graph), None, has_start=False)  # a decoder needs none
    for text in (
        "| val.x\\|&lt;img src=a&gt; | 2.5 |",
        "| \\[a\\](b) \\`c\\` \\_d\\_ e_f | 3.5 |",
        "| g h | 4.5 |",
        "a &lt;script&gt; in \\# words",
    ):
        assert f"{text}\n" in card


def test_a_tokenizer_has_no_padding_that_ends_a_text(tmp_path: Path) -> None:
    words = {"sheep": 0, "goats": 1, "<|endoftext|>": 2}
    file = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab=words, unk_token="sheep"))
    file.add_special_tokens(["<|endoftext|>"])
    file.save(str(tmp_path / "tokenizer.json"))
    assert complete_tokenizer(tmp_path, ["tokenizer.json"], 8) == {"eos_token_id": 2}
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<|endoftext|>"
    assert "pad_token" not in settings
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": "goats"}))
    files = ["tokenizer.json", "tokenizer_config.json"]
    assert complete_tokenizer(tmp_path, files, 8) == {"eos_token_id": 2}


@pytest.mark.slow
def test_the_code_of_gpt2_is_short() -> None:
    code = code_of(tfkit.load("gpt2"))
    assert len(code.modeling.splitlines()) <= 350
    assert code.fields["n_layers"] == 12


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "whisper_tiny"])
def test_the_code_passes_ruff_and_mypy(name: str, tmp_path: Path) -> None:
    code = code_of(tfkit.load(name))
    (tmp_path / "__init__.py").touch()
    (tmp_path / f"modeling_{name}.py").write_text(code.modeling)
    (tmp_path / f"configuration_{name}.py").write_text(code.configuration)
    settings = ("--config-file=", "--follow-imports=skip", f"--cache-dir={tmp_path / 'cache'}")
    for command in (("ruff", "check", "--isolated"), ("mypy", *settings)):
        done = subprocess.run([sys.executable, "-m", *command, tmp_path], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_transformers_caches_causal_attention(small: tfkit.Graph) -> None:
    dynamic, rings = code_of(small).modeling, code_of(tfkit.load("t5_small")).modeling
    assert "DynamicCache" in dynamic
    assert "DynamicCache" not in rings
    assert "place(" not in dynamic
    assert "def place(" in rings


def test_the_spec_and_the_weights_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_of_code, "compare_folder", lambda *_: True)  # transformers takes seconds
    small = tfkit.loads(DECODER.replace("tie: embedding", "tie: embedding, bias: true"))
    model = tfkit.build(small, seed=3)
    process: Any = None
    write_folder(model, tmp_path, render_spec(small.spec.model), process)
    assert {"lm_head.bias", "model.embedding.tokens.weight"} < load_file(tmp_path / "model.safetensors").keys()
    reopened = tfkit.build(tmp_path).state_dict()
    assert all(torch.equal(tensor, reopened[name]) for name, tensor in model.state_dict().items())
    assert holds_code(tmp_path)
    assert "this code computes the outputs of the model bit for bit" in (tmp_path / "README.md").read_text()
    imported = tfkit.import_config(tmp_path, name="other")
    assert imported.graph.spec.model.graph == small.spec.model.graph
    assert imported.graph.name == "other"
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_small.SmallForCausalLM"
    assert config["tie_word_embeddings"] is True
    code = (tmp_path / "modeling_small.py").read_text()
    assert "tfkit" not in code
    classes = {node.name: node for node in ast.parse(code).body if isinstance(node, ast.ClassDef)}
    assert [ast.unparse(base) for base in classes["Layer"].bases] == ["GradientCheckpointingLayer"]
    assert '"num_hidden_layers": "n_layers"' in (tmp_path / "configuration_small.py").read_text()


def test_the_ids_of_the_published_folder_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_of_code, "compare_folder", lambda *_: True)
    ids = {"decoder_start_token_id": 7, "eos_token_id": [51, 53], "pad_token_id": 52}
    (tmp_path / "config.json").write_text(json.dumps({**ids, "output_attentions": True, "num_beams": 3}))
    (tmp_path / "out").mkdir()
    config, generation = _written(tmp_path)
    assert config.items() >= ids.items()
    assert "output_attentions" not in config
    assert generation == {**ids, "num_beams": 3}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 54, "cache_implementation": "static"}')
    assert _written(tmp_path) == (config, {"eos_token_id": 54, "decoder_start_token_id": 7})


def _written(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config.json and generation_config.json of a folder with code whose weights come from `folder`."""
    model = small_model("t5_small")
    process: Any = None
    companions = Companions.read(folder, None)
    write_folder(model, folder / "out", render_spec(model.meta["graph"].spec.model), process, companions=companions)
    config, generation = (folder / "out" / name for name in ("config.json", "generation_config.json"))
    return json.loads(config.read_text()), json.loads(generation.read_text())


def test_code_of_another_tool(tmp_path: Path) -> None:
    (tmp_path / "modeling_other.py").touch()
    (tmp_path / "config.json").write_text("{}")
    assert not holds_code(tmp_path)


def test_a_description_is_no_code(small: tfkit.Graph) -> None:
    words = {"description": '"""\nimport os\n\\', "source": '"""; x = 1 #'}
    spec = replace(small.spec, model=small.spec.model.model_copy(update=words))
    tree = ast.parse(code_of(replace(small, spec=spec)).modeling)
    assert isinstance(tree.body[0], ast.Expr)
    assert "import os" in ast.unparse(tree.body[0])


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("ernie_3_0_base_zh", "a single input of tokens"),
        ("clip_base_32", "it takes tokens, image"),
        ("dit_small", "it takes patches, time"),
        ("squeezed", "must be a head that transformers supports"),
    ],
)
def test_a_model_that_cannot_be_saved_is_an_error(name: str, why: str) -> None:
    with pytest.raises(tfkit.SpecError, match=why):
        code_of(loaded(name))


def test_a_model_by_its_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub: Any = ModuleType("huggingface_hub")
    hub.snapshot_download = lambda name, allow_patterns: str(tmp_path / name.replace("/", "--"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.chdir(tmp_path)
    assert local_path(Path("org/model")) == tmp_path / "org--model"
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "model").touch()
    assert local_path(Path("org/model")) == Path("org/model")
    assert local_path(Path("org/model.safetensors")) == Path("org/model.safetensors")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    hub.snapshot_download = fail
    with pytest.raises(tfkit.SpecError, match="no network"):
        local_path(Path("org/other"))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_folder_is_the_model(name: str, folders: Folders, tmp_path: Path) -> None:
    model = small_model(name)
    write_folder(model, tmp_path, render_spec(model.meta["graph"].spec.model), folders)
    reopened = tfkit.build(tmp_path).state_dict()
    assert all(torch.equal(tensor, reopened[name]) for name, tensor in model.state_dict().items())
    if name == "sequence_classes":
        config = json.loads((tmp_path / "config.json").read_text())
        assert config["id2label"] == {"0": "a", "1": "b", "2": "c"}


@pytest.mark.slow
@pytest.mark.parametrize("names", [MODELS[start : start + 8] for start in range(0, len(MODELS), 8)], ids=" ".join)
def test_use_in_transformers(names: tuple[str, ...], folders: Folders, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).mkdir()
        model = small_model(name)
        write_folder(model, tmp_path / name, render_spec(model.meta["graph"].spec.model), folders)
        write_inputs(model, tmp_path / f"{name}.pt")
    command: list[str | Path] = [
        sys.executable,
        "-I",
        GENERATION,
        tmp_path / "code",
        *map(tmp_path.joinpath, names),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[name] for name in names], done.stderr


@pytest.mark.slow
def test_a_trainer(small: tfkit.Graph, folders: Folders, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write_folder(tfkit.build(small), tmp_path / "model", render_spec(small.spec.model), folders)
    pytest.importorskip("accelerate")
    code = f"""
import sys
sys.modules["tfkit"] = None
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "model")!r}, trust_remote_code=True)
rows = [{{"input_ids": row, "labels": row}} for row in torch.randint(0, 50, (16, 8))]
arguments = TrainingArguments({str(tmp_path / "out")!r}, max_steps=4, report_to=[], use_cpu=True, save_steps=4)
Trainer(model, arguments, train_dataset=rows).train()
AutoModelForCausalLM.from_pretrained({str(tmp_path / "out" / "checkpoint-4")!r}, trust_remote_code=True)
"""
    environment = {"HF_MODULES_CACHE": str(tmp_path / "code"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("self.lm_head(x)", "self.lm_head(-x)", "its results differ for inputs"),
        ("cache.update(k, v, context.layer)", "cache.update(v, k, context.layer)", "in several cached steps"),
        ("(mask.long().cumsum(1) - 1)", "torch.arange(mask.size(1)).expand(mask.shape)", "padded inputs"),
        ("past_key_values, positions)", "past_key_values)", "a row of two sequences"),
        ("self.decoder = ", "self.stack = self.decoder = ", "tensors differ|missing keys"),
    ],
)
def test_a_bug_in_the_code_leaves_no_folder(
    old: str, new: str, why: str, small: tfkit.Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = code_of(small)
    assert old in code.modeling
    broken = code._replace(modeling=code.modeling.replace(old, new))
    monkeypatch.setattr(folder_of_code, "code_of", lambda *_: broken)
    with pytest.raises(tfkit.SpecError, match=why):
        save(tfkit.build(small), tmp_path / "out", layout="transformers")
    assert not list(tmp_path.iterdir())
