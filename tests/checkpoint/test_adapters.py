"""Folders with LoRA adapters in the layout of PEFT: they stand for the merged model, and are written again."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tfkit
from tfkit.checkpoint.files import TensorFiles
from tfkit.cli import main
from tfkit.errors import SpecError
from tfkit.spec.weight_files import content_of
from tfkit.tools.check.reduced import reduced_model
from tfkit.tools.common.companions import Companions
from tfkit.tools.generate.prompts import tokenizer_of

PLUGINS = tfkit.load_plugins(entry_points=False)
LLAMA = ["q_proj", "v_proj", "down_proj"]
CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "llama3_8b": (LLAMA, {"alpha_pattern": {"v_proj": 5, r"^model\.layers\.1\.mlp\.down_proj$": 3}}),
    "gpt2": (["c_attn", "mlp.c_proj"], {"use_rslora": True}),  # stored [columns, rows]
    "pythia_14m": (["query_key_value", "dense"], {}),  # rows of q, k and v head by head
    "modernbert_base": (["Wqkv", "Wi", "decoder.dense"], {"use_rslora": True, "alpha_pattern": {r"mlp\.Wi": 11}}),
}
"""The ends of the names of the modules that an adapter changes, and its settings."""
RANKS, ALPHA = {"q_proj": 2, "c_attn": 5}, 7


@cache
def small_graph(name: str) -> Any:
    return reduced_model(tfkit.load(name, plugins=PLUGINS), PLUGINS).graph


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def is_stored_by_columns(module: str) -> bool:
    return "transformer.h." in module


def matrices_for(weights: Mapping[str, Tensor], ends: Sequence[str]) -> dict[str, tuple[Tensor, Tensor]]:
    """Draw two matrices for every module whose name has an end in `ends`."""
    drawn = {}
    for number, (name, weight) in enumerate(weights.items()):
        module = name.removesuffix(".weight")
        end = next((end for end in ends if name.endswith(f".{end}.weight")), None)
        if end is not None:
            rows, columns = weight.shape[::-1] if is_stored_by_columns(module) else weight.shape
            rank = RANKS.get(end, 3)
            drawn[module] = draw(rank, columns, seed=number) * 0.3, draw(rows, rank, seed=-number) * 0.3
    return drawn


def write_adapter(folder: Path, base: Path, matrices: Mapping[str, tuple[Tensor, Tensor]], **fields: Any) -> Path:
    """Write an adapter as PEFT does."""
    folder.mkdir(exist_ok=True)
    settings = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 3, "lora_alpha": ALPHA, **fields}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tensors = {
        f"base_model.model.{module}.lora_{letter}.weight": matrix.contiguous()
        for module, pair in matrices.items()
        for letter, matrix in zip("AB", pair, strict=True)
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged_folder(
    folder: Path, base: Path, matrices: Mapping[str, tuple[Tensor, Tensor]], settings: Mapping[str, Any]
) -> Path:
    """Write the published model with W + scale B A, in float64."""
    shutil.copytree(base, folder)
    weights = load_file(base / "model.safetensors")
    patterns = {end.strip("^$").replace("\\", ""): value for end, value in settings.get("alpha_pattern", {}).items()}
    for module, (a, b) in matrices.items():
        alpha = next((value for end, value in patterns.items() if f".{module}".endswith(f".{end}")), ALPHA)
        scale = alpha / (math.sqrt(len(a)) if settings.get("use_rslora") else len(a))
        product = scale * b.double() @ a.double()
        weight = weights[f"{module}.weight"].double()
        total = weight + (product.T if is_stored_by_columns(module) else product)
        weights[f"{module}.weight"] = total.float().contiguous()
    metadata = TensorFiles.open(base).metadata[base / "model.safetensors"]
    save_file(weights, folder / "model.safetensors", metadata=dict(metadata))
    return folder


def assert_same(model: Any, expected: Any, atol: float = 1e-6) -> None:
    state = expected.state_dict()
    assert model.state_dict().keys() == state.keys()
    for name, tensor in model.state_dict().items():
        assert (tensor - state[name]).abs().max() <= atol, name


@pytest.mark.parametrize("name", CASES)
def test_an_adapter_stands_for_the_merged_model_and_is_written_again(name: str, tmp_path: Path) -> None:
    base, (ends, settings) = tmp_path / "base", CASES[name]
    again = tfkit.build(small_graph(name), seed=2)
    tfkit.save(again, base, layout="huggingface")
    matrices = matrices_for(load_file(base / "model.safetensors"), ends)
    assert len(matrices) >= 2
    adapter = write_adapter(tmp_path / "adapter", base, matrices, **settings)
    merged = tfkit.build(tfkit.load(base / "spec.yaml"), weights=adapter)
    expected = tfkit.build(merged_folder(tmp_path / "merged", base, matrices, settings))
    assert_same(merged, expected)
    tfkit.load_weights(again, adapter)
    assert_same(again, expected)

    tfkit.save(merged, tmp_path / "out", layout="peft")
    written, original = (load_file(path / "adapter_model.safetensors") for path in (tmp_path / "out", adapter))
    assert written.keys() == original.keys()
    assert all(torch.equal(tensor, original[name]) for name, tensor in written.items())
    values = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert values["base_model_name_or_path"] == str(base)
    ranks = {module: len(a) for module, (a, _) in matrices.items() if len(a) != values["r"]}
    assert values["rank_pattern"] == {f"^{module}$".replace(".", r"\."): rank for module, rank in ranks.items()}
    assert_same(tfkit.build(tmp_path / "out"), expected)


# ---- matrices that the model and the published model cut in different ways ----


def own_adapter(name: str, modules: Sequence[str], folder: Path, ranks: Sequence[int]) -> tuple[Any, dict[str, Any]]:
    """Return the merged model of an adapter under the names of tfkit's model, and its matrices."""
    model = tfkit.build(small_graph(name), seed=2)
    tfkit.save(model, folder / "base", layout="huggingface")
    names = {**dict(model.named_parameters()), **views(model)}
    matrices = {}
    for number, (module, rank) in enumerate(zip(modules, ranks, strict=True)):
        rows, columns = names[f"{module}.weight"].shape
        matrices[module] = draw(rank, columns, seed=number), draw(rows, rank, seed=9 + number)
    adapter = write_adapter(folder / "adapter", folder / "base", matrices)
    shutil.copy(folder / "base" / "spec.yaml", adapter)
    return tfkit.build(adapter), matrices


def views(model: Any) -> dict[str, Tensor]:
    from tfkit.checkpoint.weight_map import tensor_locations_of

    return {name: location.view(model.state_dict()) for name, location in tensor_locations_of(model).items()}


def test_an_adapter_of_a_fused_matrix_is_split(tmp_path: Path) -> None:
    layer = "decoder.layers.1.attention.project.qkv"
    model, matrices = own_adapter("llama3_8b", [layer], tmp_path, [4])
    tfkit.save(model, tmp_path / "out", layout="peft")
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    stem = "base_model.model.model.layers.1.self_attn"
    a, b = matrices[layer]
    sizes = [len(written[f"{stem}.{name}_proj.lora_B.weight"]) for name in "qkv"]
    assert len(written) == 6
    assert sizes[0] > sizes[1]  # grouped heads
    for name, rows in zip("qkv", b.split(sizes), strict=True):
        assert torch.equal(written[f"{stem}.{name}_proj.lora_A.weight"], a)
        assert torch.equal(written[f"{stem}.{name}_proj.lora_B.weight"], rows)
    assert_same(tfkit.build(tmp_path / "out"), model)


def test_adapters_of_parts_are_joined_if_they_are_published_as_one(tmp_path: Path) -> None:
    layers = [f"encoder.layers.1.attention.project.{part}" for part in "qv"]
    model, matrices = own_adapter("modernbert_base", layers, tmp_path, [2, 3])  # of different scales: alpha / rank
    tfkit.save(model, tmp_path / "out", layout="peft")
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    stem = "base_model.model.model.layers.1.attn.Wqkv"
    assert list(written) == [f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"]
    assert written[f"{stem}.lora_A.weight"].shape[0] == 5
    settings = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    product = settings["lora_alpha"] / 5 * written[f"{stem}.lora_B.weight"] @ written[f"{stem}.lora_A.weight"]
    (a, b), (c, d) = matrices.values()
    expected = torch.cat([ALPHA / 2 * b @ a, torch.zeros(len(b), a.size(1)), ALPHA / 3 * d @ c])
    torch.testing.assert_close(product, expected, atol=1e-5, rtol=1e-5)
    assert_same(tfkit.build(tmp_path / "out"), model, atol=1e-5)


def test_an_adapter_of_a_model_without_its_head_has_no_prefix(tmp_path: Path) -> None:
    graph = small_graph("llama3_8b")
    tfkit.save(tfkit.build(graph, seed=2), tmp_path / "base", layout="huggingface")
    matrices = matrices_for(load_file(tmp_path / "base" / "model.safetensors"), LLAMA)
    full = write_adapter(tmp_path / "full", tmp_path / "base", matrices)
    body = {name.removeprefix("model."): pair for name, pair in matrices.items()}
    assert_same(
        tfkit.build(graph, weights=write_adapter(tmp_path / "body", tmp_path / "base", body)),
        tfkit.build(graph, weights=full),
        0,
    )


# ---- what an adapter changes ----


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small Llama, `base`."""
    folder = tmp_path_factory.mktemp("llama")
    tfkit.save(tfkit.build(small_graph("llama3_8b"), seed=2), folder / "base", layout="huggingface")
    return folder / "base"


@pytest.fixture(scope="module")
def llama_model(llama: Path) -> Any:
    """The model in the folder `llama`."""
    return tfkit.build(llama)


def llama_adapter(folder: Path, base: Path, **fields: Any) -> Path:
    """Write an adapter for a small Llama; `base` may be an adapter as well."""
    model = tfkit.build(small_graph("llama3_8b"), device="meta")
    shapes = {f"model.{name.removeprefix('decoder.')}": torch.empty(view.shape) for name, view in views(model).items()}
    for ours, theirs in (("attention.project.q.", "self_attn.q_proj."), ("attention.project.v.", "self_attn.v_proj.")):
        shapes = {name.replace(ours, theirs): shape for name, shape in shapes.items()}
    shapes = {name.replace("ffn.down.", "mlp.down_proj."): shape for name, shape in shapes.items()}
    return write_adapter(folder, base, matrices_for(shapes, LLAMA), **fields)


def test_an_adapter_can_change_the_merged_weights_of_an_adapter(llama: Path, tmp_path: Path) -> None:
    first = llama_adapter(tmp_path / "first", llama)
    second = llama_adapter(tmp_path / "second", first, lora_alpha=2)
    once, twice, base = (tfkit.build(tfkit.load(llama / "spec.yaml"), weights=path) for path in (first, second, llama))
    name = "decoder.layers.1.ffn.down.weight"
    steps = [a.state_dict()[name] - b.state_dict()[name] for a, b in ((once, base), (twice, once))]
    torch.testing.assert_close(steps[1] * ALPHA / 2, steps[0], atol=1e-5, rtol=1e-4)
    with pytest.raises(SpecError, match="changes weights that have an adapter as well"):
        tfkit.save(twice, tmp_path / "out", layout="peft")


def test_an_adapter_that_changes_itself_is_found(llama: Path, tmp_path: Path) -> None:
    first, second = llama_adapter(tmp_path / "first", llama), llama_adapter(tmp_path / "second", tmp_path / "first")
    llama_adapter(first, second)
    with pytest.raises(SpecError, match="must change the weights of a model; got itself"):
        TensorFiles.open(second)
    with pytest.raises(SpecError, match="must change the weights of a model; got itself"):
        tfkit.import_config(second)


def test_the_digest_of_an_adapter_has_its_base_and_its_scale(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "moved")
    weights = load_file(llama / "model.safetensors")
    weights["lm_head.weight"][3, 1] += 1
    shutil.copytree(llama, tmp_path / "changed")
    save_file(weights, tmp_path / "changed" / "model.safetensors")
    first = content_of(llama_adapter(tmp_path / "a", llama))
    assert content_of(llama_adapter(tmp_path / "b", tmp_path / "moved", target_modules=["q_proj"])) == first
    contents = [
        content_of(llama),
        content_of(llama_adapter(tmp_path / "c", tmp_path / "changed")),
        content_of(llama_adapter(tmp_path / "d", llama, lora_alpha=6)),
        content_of(llama_adapter(tmp_path / "e", llama, use_rslora=True)),
        content_of(llama_adapter(tmp_path / "f", llama, alpha_pattern={"q_proj": 3})),
        content_of(llama_adapter(tmp_path / "g", tmp_path / "a")),
    ]
    assert len({first, *contents}) == 1 + len(contents)


def test_an_adapter_in_float32_is_not_rounded_to_its_base(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "half")
    weights = {name: tensor.bfloat16() for name, tensor in load_file(llama / "model.safetensors").items()}
    save_file(weights, tmp_path / "half" / "model.safetensors")
    graph = tfkit.load(llama / "spec.yaml")
    model = tfkit.build(graph, weights=llama_adapter(tmp_path / "a", tmp_path / "half"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    half = tfkit.build(graph, weights=tmp_path / "a", dtype="bfloat16")
    name = "decoder.layers.0.ffn.down.weight"
    assert torch.equal(half.state_dict()[name], model.state_dict()[name].bfloat16())  # added before it is rounded


def test_a_relative_base_starts_at_the_adapter(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(llama, tmp_path / "models" / "base")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    adapter = llama_adapter(tmp_path / "models" / "adapter", llama)
    expected = content_of(adapter)
    llama_adapter(adapter, llama, base_model_name_or_path="../base")
    assert content_of(adapter) == expected
    # Elsewhere, and without the adapter, a path relative to either would lead nowhere.
    monkeypatch.chdir(tmp_path / "models")
    tfkit.save(tfkit.build(tfkit.load(llama / "spec.yaml"), weights="adapter"), tmp_path / "out", layout="peft")
    settings = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tmp_path / "models" / "base")


def test_a_weight_with_an_adapter_cannot_be_missing(llama: Path, tmp_path: Path) -> None:
    adapter, graph = llama_adapter(tmp_path / "a", llama), tfkit.load(llama / "spec.yaml")
    tfkit.build(graph, weights=adapter, missing=["logits.*"], unused=["lm_head.*"])
    with pytest.raises(SpecError, match=r"changes `decoder.layers.0.ffn.down.weight`, which must not be `missing`"):
        tfkit.build(graph, weights=adapter, missing=["*.ffn.down"], unused=["*.down_proj.*"])


# ---- errors ----

SETTINGS: dict[str, dict[str, Any]] = {
    "peft_type": {"peft_type": "LOHA"},
    "bias": {"bias": "lora_only"},
    "use_dora": {"use_dora": True},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "target_parameters": {"target_parameters": ["experts.down"]},
    "trainable_token_indices": {"trainable_token_indices": {"embed_tokens": [1]}},
    "a_field_of_tomorrow": {"a_field_of_tomorrow": 1},
    "init_lora_weights": {"init_lora_weights": "pissa"},
    "lora_alpha": {"lora_alpha": "16"},
    "use_rslora": {"use_rslora": "yes"},
    "alpha_pattern": {"alpha_pattern": {"(a+)+": 3}},
    "base_model_name_or_path": {"base_model_name_or_path": None},
}


@pytest.mark.parametrize("field", SETTINGS)
def test_settings_that_are_no_plain_lora_are_errors(field: str, llama: Path, tmp_path: Path) -> None:
    adapter = llama_adapter(tmp_path / "a", llama, **SETTINGS[field])
    with pytest.raises(SpecError, match=rf"`{field}` of .*adapter_config.json. must be .*; got"):
        TensorFiles.open(adapter)


def test_settings_without_effect_are_accepted(llama: Path, tmp_path: Path) -> None:
    fields = {"use_dora": False, "modules_to_save": None, "loftq_config": {}, "layer_replication": None, "qalora": []}
    adapter = llama_adapter(tmp_path / "a", llama, **fields, lora_dropout=0.1, target_modules="all-linear")
    assert content_of(adapter) == content_of(llama_adapter(tmp_path / "b", llama))


def test_alpha_has_the_default_of_peft_and_may_be_zero(llama: Path, tmp_path: Path) -> None:
    graph, name = tfkit.load(llama / "spec.yaml"), "decoder.layers.0.ffn.down.weight"
    base = tfkit.build(llama).state_dict()[name]
    changes = [
        tfkit.build(graph, weights=llama_adapter(tmp_path / "a", llama, lora_alpha=alpha)).state_dict()[name] - base
        for alpha in (None, 8, 0)
    ]
    assert torch.equal(changes[0], changes[1])
    assert not changes[2].any()


def broken(case: str, folder: Path, base: Path) -> Path:
    pairs = matrices_for(load_file(base / "model.safetensors"), LLAMA)
    module, (a, b) = next(iter(pairs.items()))
    if case == "unknown module":
        pairs["model.layers.7.mlp.down_proj"] = pairs.pop(module)
    elif case == "embedding":
        pairs = {"model.embed_tokens": (a, b)}
    elif case == "shapes":
        pairs[module] = (a, b[:-1])
    elif case == "ranks":
        pairs[module] = (a[:-1], b)
    elif case == "not finite":
        pairs[module] = (a, b.index_fill(0, torch.tensor([1]), math.inf))
    adapter = write_adapter(folder, base, pairs)
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    if case == "half":
        del tensors[f"base_model.model.{module}.lora_B.weight"]
    elif case == "full tensor":
        tensors["base_model.model.lm_head.weight"] = draw(97, 64, seed=1)
    elif case == "dora":
        tensors[f"base_model.model.{module}.lora_magnitude_vector"] = draw(64, seed=1)
    save_file(tensors, file)
    return adapter


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("unknown module", "changes `model.layers.7.mlp.down_proj`, which is no matrix of the model"),
        ("embedding", "changes `model.embed_tokens`, which is no matrix of the model"),
        ("shapes", r"must have the shapes \[rank, 224\] and \[64, rank\]; got \[3, 224\] and \[63, 3\]"),
        ("ranks", r"got \[2, 224\] and \[64, 3\]"),
        ("not finite", "infinite"),
        ("half", r"lacks .*lora_B.weight`, which belongs to"),
        ("full tensor", "must contain only the two matrices of each module; got `base_model.model.lm_head.weight`"),
        ("dora", "must contain only the two matrices of each module"),
    ],
)
def test_an_adapter_that_does_not_fit_is_an_error(
    case: str, message: str, llama: Path, llama_model: Any, tmp_path: Path
) -> None:
    adapter, model = broken(case, tmp_path / "a", llama), llama_model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(SpecError, match=message):
        tfkit.load_weights(model, adapter)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_base_that_is_not_there_is_named(llama: Path, tmp_path: Path) -> None:
    adapter = llama_adapter(tmp_path / "a", llama, base_model_name_or_path="meta-llama/Meta-Llama-3-8B")
    with pytest.raises(SpecError, match=r"changes the model `meta-llama/Meta-Llama-3-8B`, and there is no such folder"):
        tfkit.build(tfkit.load(llama / "spec.yaml"), weights=adapter)


def test_weights_that_changed_after_the_merge_are_not_saved_as_an_adapter(llama: Path, tmp_path: Path) -> None:
    model = tfkit.build(tfkit.load(llama / "spec.yaml"), weights=llama_adapter(tmp_path / "a", llama))
    with torch.no_grad():
        model.get_parameter("logits.output.weight")[2, 3] += 1
    with pytest.raises(SpecError, match=r"the weight `logits.output.weight` was changed after the adapter"):
        tfkit.save(model, tmp_path / "out", layout="peft")
    with pytest.raises(SpecError, match="have no adapter"):
        tfkit.save(tfkit.build(llama), tmp_path / "out", layout="peft")
    with pytest.raises(SpecError, match="was not built from weights"):
        tfkit.save(tfkit.build(small_graph("llama3_8b")), tmp_path / "out", layout="peft")
    assert not (tmp_path / "out").exists()


def test_an_adapter_has_the_tokenizer_and_the_fields_of_the_model_that_it_changes(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "base")
    texts = {"tokenizer_config.json": '{"model_max_length": 77}', "chars.json": json.dumps({"characters": "abcé"})}
    for name, text in texts.items():
        (tmp_path / "base" / name).write_text(text, encoding="utf-8")
    path = tmp_path / "base" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 5}), encoding="utf-8")
    adapter = llama_adapter(tmp_path / "a", tmp_path / "base")
    changed = '{"model_max_length": 99}'
    (adapter / "tokenizer_config.json").write_text(changed, encoding="utf-8")
    model = tfkit.build(tfkit.load(llama / "spec.yaml"), weights=adapter)
    for layout in ("huggingface", "peft"):
        tfkit.save(model, tmp_path / layout, layout=layout)
        companions = Companions.read(tmp_path / layout, model.meta["graph"].spec.family)
        expected = {**texts, "tokenizer_config.json": changed}
        assert {name: content.decode() for name, content in companions.files.items()} == expected
        assert companions.fields["eos_token_id"] == 5
    assert tokenizer_of(None, adapter, numbers=False).encode("é") == [3]
    (adapter / "chars.json").write_text(json.dumps({"characters": "aébc"}), encoding="utf-8")
    assert tokenizer_of(None, adapter, numbers=False).encode("é") == [1]


@pytest.mark.slow
def test_commands_open_the_folder_of_an_adapter(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = llama_adapter(tmp_path / "a", llama)
    assert main(["params", str(adapter)]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "derive a spec from its base, which adapter_config.json names: `tfkit import" in error
    assert main(["import", str(adapter), "-o", str(adapter / "spec.yaml")]) == 0
    assert main(["save", str(adapter), "--layout", "huggingface", "-o", str(tmp_path / "merged")]) == 0
    assert main(["compare", str(adapter), str(tmp_path / "merged"), "--tolerance", "1e-6"]) == 0
    assert_same(tfkit.build(tmp_path / "merged"), tfkit.build(adapter), 0)
    assert main(["tensors", str(adapter)]) == 0
    assert "base_model.model.model.layers.0-1.self_attn.q_proj.lora_A" in capsys.readouterr().out
