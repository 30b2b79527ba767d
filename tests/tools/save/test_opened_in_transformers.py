"""Small folders that transformers opens in this process: outputs and caches equal those of the model."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F
from transformers import AttentionInterface, DynamicCache

import tfkit
from tfkit.checkpoint.remote_code import folder_names
from tfkit.spec.render import render_spec
from tfkit.tools.common.companions import Companions
from tfkit.tools.eject.remote_code import folder as folder_of_code
from tfkit.tools.eject.remote_code.folder import write_folder
from tfkit.tools.eject.remote_code.proof import Folders, initial_moments
from tfkit.tools.eject.remote_code.proof_runner import distribution_error

BEGIN = "tfkit: 1\nname: small\nd_model: 16\n"
LAYERS = "attention: {n_heads: 2}, ffn: {kind: gelu, d_ff: 32}"
TRANSLATION = f"""{BEGIN}vocab_size: 50
max_len: 16
inputs: [source, target]
graph:
  embedding: {{block: embedding, input: source, position: learned}}
  encoder: {{block: encoder, n_layers: 1, {LAYERS}}}
  target_embedding: {{block: embedding, input: target, position: learned, tie: embedding}}
  decoder:
    block: decoder
    memory: encoder
    n_layers: 2
    attention: {{n_heads: 2}}
    cross_attention: {{n_heads: 2}}
    ffn: {{kind: gelu, d_ff: 32}}
    layers: {{pattern: [base, local], variants: {{local: {{attention: {{mask: {{left: 2, right: 0}}}}}}}}}}
  logits: {{block: lm_head}}
"""
CLASSES = f"""{BEGIN}vocab_size: 50
graph:
  embedding: {{block: embedding}}
  encoder: {{block: encoder, n_layers: 1, attention: {{n_heads: 2, position: rope}}, ffn: {{kind: gelu, d_ff: 32}}}}
  pooled: {{block: pooler, select: mean}}
  classes: {{block: classifier, n_classes: 3, labels: [a, b, c]}}
"""
CAUSAL = f"""{BEGIN}vocab_size: 50
max_len: 16
graph:
  embedding: {{block: embedding, position: learned}}
  decoder: {{block: decoder, n_layers: 2, {LAYERS}}}
  logits: {{block: lm_head}}
"""
FEATURES = f"""{BEGIN}inputs: {{x: {{type: features, width: 10}}}}
graph:
  patches: {{block: linear, input: x}}
  encoder: {{block: encoder, n_layers: 1, {LAYERS}}}
  pooled: {{block: pooler, select: mean}}
"""
IMAGES = f"""{BEGIN}inputs: {{image: {{type: image, channels: 3, height: 4, width: 8}}}}
graph:
  patches: {{block: patches, size: 4}}
  encoder: {{block: encoder, n_layers: 1, {LAYERS}}}
  pooled: pooler
  classes: {{block: classifier, n_classes: 3}}
"""
Pair = tuple[fx.GraphModule, Any]


def opened(spec: str, folder: Path, **fields: Any) -> Pair:
    """Build a model, and open its folder with transformers; `fields` travel with its weights."""
    graph, process = tfkit.loads(spec), cast(Folders, None)
    model = tfkit.build(graph, seed=5).eval()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.normal_(0.3, 0.5, generator=torch.Generator().manual_seed(number))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder_of_code, "compare_folder", lambda *_: True)  # which starts a process
        companions = Companions(fields=fields)
        write_folder(model, folder, render_spec(graph.spec.model), process, companions=companions)
        patch.syspath_prepend(folder.parent)
        code = importlib.import_module(f"{folder.name}.modeling_small")
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    return model, getattr(code, architecture).from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def translation(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return opened(TRANSLATION, tmp_path_factory.mktemp("translation"), decoder_start_token_id=7, eos_token_id=[49, 48])


def ids(columns: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 50, (2, columns), generator=torch.Generator().manual_seed(seed))


def close(value: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_rows_of_a_cache_change_places_and_tokens_are_taken_back(translation: Pair) -> None:
    model, written = translation
    source, target, order = ids(4), ids(6, seed=1), torch.tensor([1, 0])
    cache = sys.modules[type(written).__module__].SmallCache(written.config)
    cache.activate_past_recording()  # its windows forget no token
    assert len(cache) == 2  # layers
    written(source, decoder_input_ids=target[:, :5], past_key_values=cache)
    cache.crop(-1)
    cache.reorder_cache(order)
    logits = written(source[order], decoder_input_ids=target[order, 4:], past_key_values=cache).logits
    close(logits, model(source[order], target[order])[:, 4:])


def registered(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scaling: float, is_causal: bool, **_: Any
) -> tuple[Tensor, None]:
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scaling).transpose(1, 2), None


@torch.no_grad()
@pytest.mark.parametrize("name", ["registered", "eager"])
def test_functions_of_attention_get_the_mask_and_the_scale(
    name: str, translation: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    AttentionInterface.register("registered", registered)
    model, written = translation
    for body in (written.model.encoder, written.model.decoder):
        monkeypatch.setattr(body.config, "_attn_implementation", name)
    close(written(ids(4), decoder_input_ids=ids(6)).logits, model(ids(4), ids(6)))


@torch.no_grad()
def test_labels_and_the_memory_of_each_layer(translation: Pair) -> None:
    model, written = translation
    source, labels = ids(4), ids(5, seed=1)
    target = torch.cat((torch.full((2, 1), 7), labels[:, :-1]), dim=1)
    expected = model(source, target)
    output = written(source, labels=labels)
    close(output.logits, expected)
    close(output.loss, F.cross_entropy(expected.flatten(0, 1), labels.flatten()))
    cache = written(source, decoder_input_ids=target[:, :3], use_cache=True).past_key_values
    for column in range(3, 5):
        token = target[:, column : column + 1]
        logits = written(source, decoder_input_ids=token, past_key_values=cache).logits
        close(logits, expected[:, column : column + 1])


@torch.no_grad()
def test_generation_begins_and_ends_with_the_tokens_of_the_weights(translation: Pair) -> None:
    model, written = translation
    assert (written.config.bos_token_id, written.config.pad_token_id) == (None, None)
    assert written.generation_config.pad_token_id == 49
    source = ids(4)[:1]
    expected = tfkit.generate(model, torch.tensor([[7]]), max_new_tokens=8, stop=[49, 48], source=source).tokens[0]
    tokens = written.generate(source, max_new_tokens=8, do_sample=False)[0].tolist()
    assert tokens == [7, *expected.tolist()]


@torch.no_grad()
def test_the_weights_of_each_attention(translation: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    _, written = translation
    for body in (written.model.encoder, written.model.decoder):
        monkeypatch.setattr(body.config, "_attn_implementation", "eager")
    output = written(ids(4), decoder_input_ids=ids(6), output_attentions=True)
    sizes = {"encoder_attentions": [(4, 4)], "decoder_attentions": [(6, 6)] * 2, "cross_attentions": [(6, 4)] * 2}
    for name, expected in sizes.items():
        assert [tuple(weights.shape) for weights in output[name]] == [(2, 2, *size) for size in expected]
        close(torch.stack(output[name]).sum(dim=-1), torch.ones(len(expected), 2, 2, expected[0][0]))


@torch.no_grad()
def test_the_cache_of_transformers_has_all_columns(tmp_path: Path) -> None:
    model, written = opened(CAUSAL, tmp_path)
    tokens, mask = ids(6), torch.tensor([[1, 1, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    expected = [model(row[real == 1][None])[0] for row, real in zip(tokens, mask, strict=True)]
    cache = DynamicCache(config=written.config)
    chunks = [
        written(tokens[:, a:b], attention_mask=mask[:, :b], past_key_values=cache).logits for a, b in ((0, 4), (4, 6))
    ]
    logits = torch.cat(chunks, dim=1)
    for row, real in enumerate(mask):
        close(logits[row, real == 1], expected[row])
    with pytest.raises(ValueError, match=r"attention_mask must be .*; got \[2, 1\]"):
        written(tokens[:, :1], attention_mask=mask[:, :1], past_key_values=cache)
    with pytest.raises(ValueError, match="past_key_values must be a Cache; got a tuple"):
        written(tokens, past_key_values=((tokens, tokens),))


@torch.no_grad()
def test_rules_of_masks(tmp_path: Path) -> None:
    mask = "mask: {right: 0, rule: {kind: expression, where: (q - k) % 3 != 1}}"
    model, written = opened(CAUSAL.replace("n_heads: 2", f"n_heads: 2, {mask}"), tmp_path)
    tokens, expected = ids(7), model(ids(7))
    close(written(tokens).logits, expected)
    cache = written(tokens[:, :5], use_cache=True).past_key_values
    close(written(tokens[:, 5:], past_key_values=cache).logits, expected[:, 5:])
    cache = sys.modules[type(written).__module__].SmallCache(written.config)
    begun = written.generate(tokens, cache=cache, max_new_tokens=2, do_sample=False)
    continued = written.generate(begun, cache=cache, max_new_tokens=3, do_sample=False)
    assert torch.equal(continued, written.generate(tokens, max_new_tokens=5, do_sample=False))


@torch.no_grad()
def test_chunks(tmp_path: Path) -> None:
    mask = "mask: {right: 0, rule: {kind: chunk, size: 3}}"
    model, written = opened(CAUSAL.replace("n_heads: 2", f"n_heads: 2, {mask}"), tmp_path)
    tokens, expected = ids(8), model(ids(8))
    cache = DynamicCache(config=written.config)
    parts = [written(part, past_key_values=cache).logits for part in tokens.split((5, 2, 1), dim=1)]
    close(torch.cat(parts, dim=1), expected)
    assert cache.layers[0].keys.size(2) == 2  # and the next token


@torch.no_grad()
@pytest.mark.parametrize(
    ("labels", "fields"),
    [
        (", labels: [a, b, c]", {}),
        pytest.param("", {"id2label": {"0": "a", "1": "b", "2": "c"}}, marks=pytest.mark.slow),  # of a run
    ],
)
def test_classes_of_padded_rows(labels: str, fields: dict[str, Any], tmp_path: Path) -> None:
    model, written = opened(CLASSES.replace(", labels: [a, b, c]", labels), tmp_path, **fields)
    tokens, mask = ids(6), torch.tensor([[1, 1, 0, 1, 1, 0]] * 2)  # padding between tokens is no position
    close(written(tokens, attention_mask=mask).logits, model(tokens[:, mask[0] == 1]))
    assert written.config.id2label == {0: "a", 1: "b", 2: "c"}


@torch.no_grad()
def test_images_have_the_size_of_the_model(tmp_path: Path) -> None:
    model, written = opened(IMAGES, tmp_path)
    images = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(3))
    close(written(images).logits, model(images))
    with pytest.raises(ValueError, match=r"pixel_values must be \[batch, 3, 4, 8\]; got \[2, 3, 8, 4\]"):
        written(images.transpose(2, 3))
    assert json.loads((tmp_path / "preprocessor_config.json").read_text())["size"] == {"height": 4, "width": 8}
    assert "The weights came without an image processor" in (tmp_path / "README.md").read_text()


@torch.no_grad()
def test_the_vector_of_features(tmp_path: Path) -> None:
    model, written = opened(FEATURES, tmp_path)
    features = torch.randn(2, 6, 10, generator=torch.Generator().manual_seed(3))
    close(written(features.transpose(1, 2)).pooler_output, model(features))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::tfkit.FirstLossWarning")
@pytest.mark.parametrize(
    ("init", "head"),
    [
        ("xavier", "tie: embedding"),
        pytest.param("torch", "tie: embedding, bias: true", marks=pytest.mark.slow),
        ("xavier", "bias: true"),
    ],
)
def test_a_new_model_has_the_distributions_of_the_init(init: str, head: str, tmp_path: Path) -> None:
    """The linear layers have biases. Transformers adds rows to the head, and fills the new head."""
    spec = CAUSAL.replace("lm_head", f"lm_head, {head}").replace("n_layers: 2", "n_layers: 1")
    model, written = opened(f"{spec}init: {init}\n", tmp_path)
    torch.manual_seed(1)
    new = type(written)(written.config)
    names, initial = folder_names(model.meta["graph"]), initial_moments(model.meta["graph"], torch.float32)
    assert distribution_error(new.state_dict(), {names(name): numbers for name, numbers in initial.items()}) is None
    new.resize_token_embeddings(53, mean_resizing=False)
    assert new.lm_head.weight.shape == (53, 16)
    assert new.lm_head.weight.isfinite().all()


SCALES = f"""{BEGIN}vocab_size: 50
graph: {{embedding: {{block: embedding}}, norm: {{block: norm}}, logits: {{block: lm_head}}}}
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: state["norm.weight"].fill_(0.999),
            "`norm.weight` has mean 0.999 and root mean square 0.999; tfkit",
        ),
        (lambda state: state["norm.weight"][3].fill_(1.01), "`norm.weight` has mean"),
        (lambda state: state["embedding.tokens.weight"].mul_(1.3), "`embedding.tokens.weight` has mean"),
        (lambda state: state["embedding.tokens.weight"].add_(0.01), "`embedding.tokens.weight` has mean"),
        (lambda state: state["logits.output.weight"][3].fill_(torch.nan), "`logits.output.weight` has mean nan"),
    ],
)
@torch.no_grad()
def test_a_different_distribution_is_described(change: Callable[[dict[str, Tensor]], object], message: str) -> None:
    graph = tfkit.loads(SCALES)
    initial, state = initial_moments(graph, torch.float32), tfkit.build(graph, seed=7).state_dict()
    assert distribution_error(state, initial) is None
    change(state)
    error = distribution_error(state, initial)
    assert error is not None
    assert message in error


def test_a_random_number_has_no_distribution() -> None:
    assert distribution_error({"x": torch.tensor([0.3])}, {"x": [0.7, torch.inf, 0.49, torch.inf]}) is None
