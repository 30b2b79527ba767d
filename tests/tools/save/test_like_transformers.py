"""Folders with the sizes and weights of models of transformers: arguments, masks, caches and outputs are equal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Cache,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    QuantizedCache,
    StaticCache,
)
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache
from transformers.utils import generic

import tfkit
from tfkit.tools.common.companions import START_ROLES
from tfkit.tools.save.save import save

from .test_opened_in_transformers import opened

SIZES = "name: small\nparameters: null\nvocab_size: 50\nd_model: 32\nmax_len: 24\n"
LLAMA = f"""tfkit: 1
extends: llama3_8b
{SIZES}graph: {{decoder: {{n_layers: 2, attention: {{n_heads: 4, n_kv_heads: 2}}, ffn: {{d_ff: 48}}}}}}
"""
GPT2 = f"""tfkit: 1
extends: gpt2
{SIZES}graph: {{decoder: {{n_layers: 2, attention: {{n_heads: 4}}, ffn: {{d_ff: 48}}}}}}
"""


class Pair(NamedTuple):
    """A folder's model, and the model of transformers with equal weights."""

    ours: Any
    theirs: Any


def pair(spec: str, folder: Path) -> Pair:
    """Open the folder of a model, and the folder of its family."""
    code = folder / f"code_{folder.name}"  # the name of a package
    code.mkdir()
    model, ours = opened(spec, code)
    save(model, folder / "family", layout="huggingface")
    return Pair(ours, AutoModelForCausalLM.from_pretrained(folder / "family").eval())


MISTRAL = LLAMA.replace("llama3_8b", "mistral_7b").replace("n_kv_heads: 2", "n_kv_heads: 2, mask: {left: 3, right: 0}")
GEMMA = f"""tfkit: 1
extends: gemma2_2b
{SIZES}graph:
  decoder:
    n_layers: 4
    attention: {{n_heads: 4, n_kv_heads: 2, d_head: 8}}
    ffn: {{d_ff: 48}}
    layers: {{variants: {{local: {{attention: {{mask: {{left: 3}}}}}}}}}}
"""
LLAMA4 = f"""tfkit: 1
extends: llama4_scout
{SIZES}graph:
  decoder:
    n_layers: 2
    attention: {{n_heads: 4, n_kv_heads: 2, d_head: 8, mask: {{rule: {{size: 4}}}}}}
    ffn: {{n_experts: 4, d_ff: 48, shared: {{d_ff: 48}}}}
    layers: {{pattern: [base, full], variants: {{full: {{attention: {{mask: null}}}}}}}}
"""
MAMBA2 = """tfkit: 1
extends: mamba2_130m
name: small
parameters: null
vocab_size: 50
d_model: 32
graph: {decoder: {n_layers: 2, mixer: {n_heads: 4, d_head: 16, d_state: 8}}}
"""
QWEN3_NEXT = f"""tfkit: 1
extends: qwen3_next_80b_a3b
{SIZES}graph:
  decoder:
    n_layers: 2
    attention: {{n_heads: 4, n_kv_heads: 2, d_head: 16, position: {{width: 4}}}}
    ffn: {{n_experts: 4, n_experts_per_token: 2, d_ff: 16, shared: {{d_ff: 16}}}}
    layers:
      pattern: [linear, base]
      variants: {{linear: {{mixer: {{n_heads: 4, n_key_heads: 2, d_key: 8, d_value: 8}}}}}}
"""


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return pair({"llama": LLAMA, "gpt2": GPT2}[request.param], tmp_path_factory.mktemp(request.param))


def ids(rows: int = 2, columns: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(1, 50, (rows, columns), generator=torch.Generator().manual_seed(seed))


def close(value: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@torch.no_grad()
def test_hidden_states_and_attentions(models: Pair) -> None:
    outputs = []
    for model in models:
        model.set_attn_implementation("eager")
        outputs.append(model(ids(), output_hidden_states=True, output_attentions=True))
        model.set_attn_implementation("sdpa")
    for name in ("hidden_states", "attentions"):
        values, expected = (output[name] for output in outputs)
        assert len(values) == len(expected) == 2 + (name == "hidden_states")
        for pair_ in zip(values, expected, strict=True):
            close(*pair_)


@torch.no_grad()
@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"output_attentions": True}, ValueError, r'call set_attn_implementation\("eager"\)'),
        ({"output_router_logits": True}, ValueError, "output_router_logits cannot be used: no layer returns router"),
        ({"atention_mask": ids(), "past": 3}, TypeError, "no keyword arguments named atention_mask, past"),
    ],
)
def test_keywords_without_effect_are_errors(
    models: Pair, arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        models.ours(ids(), **arguments)
    close(models.ours(ids(), cache_params=None, output_attentions=False).logits, models.theirs(ids()).logits)


def test_engines_find_the_body(models: Pair) -> None:
    """By the rules of transformers, a module with the name `decoder` would take token ids."""
    assert models.ours.get_decoder() is models.ours.model
    assert type(models.ours.model).is_backend_compatible()


@torch.no_grad()
def test_positions_are_taken_as_given(models: Pair) -> None:
    positions = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10, 11], [0, 1, 2, 3, 7, 8, 9, 13, 14]])
    mask = torch.ones_like(positions)  # with a mask, a row is one sequence
    arguments = {"position_ids": positions, "attention_mask": mask}
    close(models.ours(ids(), **arguments).logits, models.theirs(ids(), **arguments).logits)
    for caches in ({}, {"past_key_values": DynamicCache()}):
        with pytest.raises(ValueError, match=r"position_ids must be \[batch, new tokens\]; got \[1, 8\]"):
            models.ours(ids(), position_ids=positions[:1, 1:], **caches)
    with pytest.raises(ValueError, match="several sequences in a row cannot be combined with past_key_values"):
        models.ours(ids(), position_ids=positions, past_key_values=DynamicCache())


@torch.no_grad()
def test_a_row_of_several_sequences(models: Pair) -> None:
    """The row is split also if the model would use a cache."""
    tokens, lengths = ids(1), (4, 2, 3)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    logits = models.ours(tokens, position_ids=positions, use_cache=True).logits
    close(logits, models.theirs(tokens, position_ids=positions, use_cache=False).logits)
    close(logits, torch.cat([models.theirs(part).logits for part in tokens.split(lengths, dim=1)], dim=1))


@torch.no_grad()
def test_the_cache_by_its_later_name(models: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """From transformers 5.24 on, `generate` calls `past_key_values` `cache`, and outputs warn of the older name."""
    monkeypatch.setattr(generic.logger, "warning_once", pytest.fail)
    cache = DynamicCache()
    logits = [models.ours(part, cache=cache).logits for part in ids().split((5, 3, 1), dim=1)]
    close(torch.cat(logits, dim=1), models.theirs(ids()).logits)
    assert models.ours.model(ids()[:, :1], cache=cache).cache is cache


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_masks_of_pairs_of_tokens(models: Pair, implementation: str) -> None:
    pairs = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(3)) < 0.6
    pairs = (pairs | torch.eye(9, dtype=torch.bool)).tril()
    added = torch.zeros(pairs.shape).masked_fill(~pairs, torch.finfo(torch.float32).min)
    expected = models.theirs(ids(), attention_mask=pairs).logits
    models.ours.set_attn_implementation(implementation)
    for mask in (pairs, added):
        close(models.ours(ids(), attention_mask=mask).logits, expected)
    models.ours.set_attn_implementation("sdpa")


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.filterwarnings("ignore")  # of continuous batching, about flash attention
def test_continuous_batching(models: Pair) -> None:
    prompts = [[3, 4, 5, 6], [7, 8]]
    small = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=16)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
    for implementation in ("sdpa", "eager"):
        models.ours.set_attn_implementation(implementation)
        results = models.ours.generate_batch(prompts, GenerationConfig(**options), small).values()
        models.ours.set_attn_implementation("sdpa")
        tokens = {tuple(result.prompt_ids): result.generated_tokens for result in results}
        for prompt in prompts:
            expected = models.theirs.generate(torch.tensor([prompt]), **options)[0, len(prompt) :]
            assert tokens[tuple(prompt)] == expected.tolist()


@torch.no_grad()
def test_options_reach_the_function_of_attention(models: Pair) -> None:
    calls: list[tuple[int, dict[str, Any]]] = []

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Any:
        calls.append((module.layer_idx, options))
        return AttentionInterface()["sdpa"](module, q, k, v, mask, **options)

    AttentionInterface.register("observed", attend)
    models.ours.set_attn_implementation("observed")
    packed = {"cu_seq_lens_q": torch.tensor([0, 4, 9]), "max_length_q": 5}
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    models.ours(ids(1), position_ids=positions, **packed)
    models.ours.set_attn_implementation("sdpa")
    assert [layer for layer, _ in calls] == [0, 1]
    assert all(options.items() >= packed.items() for _, options in calls)
    for arguments in (packed, {"seq_idx": torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]])}):
        with pytest.raises(ValueError, match="cu_seq_lens_q and seq_idx need position_ids"):
            models.ours(ids(1), **arguments)
    ahead = models.ours(ids(), is_causal=False).logits
    close(ahead, models.theirs(ids(), is_causal=False).logits)
    assert float((ahead - models.ours(ids()).logits).abs().max()) > 0.1


@torch.no_grad()
def test_generation_with_a_static_cache(models: Pair) -> None:
    """The first row is padded."""
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9])
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = models.theirs.generate(ids(), **options)
    assert torch.equal(models.ours.generate(ids(), **options), expected)
    assert torch.equal(models.ours.generate(ids(), cache_implementation="static", **options), expected)


CACHES: dict[str, Callable[[Any], Cache]] = {
    "dynamic": lambda config: DynamicCache(config=config),
    "without a config": lambda config: DynamicCache(),
    "static": lambda config: StaticCache(config, max_cache_len=14),
    "quantized": lambda config: QuantizedCache("fp8", config),
}


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", CACHES)
def test_any_cache_is_read_incrementally(models: Pair, kind: str, implementation: str) -> None:
    logits = []
    for model in models:
        model.set_attn_implementation(implementation)
        cache = CACHES[kind](model.config)
        parts = [model(part, cache=cache).logits for part in ids().split((4, 3, 1, 1), dim=1)]
        logits.append(torch.cat(parts, dim=1))
        model.set_attn_implementation("sdpa")
    close(*logits)


@torch.no_grad()
@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(MISTRAL, id="mistral", marks=pytest.mark.slow),
        pytest.param(GEMMA, id="gemma2"),
        pytest.param(LLAMA4, id="llama4", marks=pytest.mark.slow),
    ],
)
def test_windows_and_chunks(spec: str, tmp_path: Path) -> None:
    """All layers have a window, or some of them, or chunks. Gemma's scores have a cap."""
    ours, theirs = pair(spec, tmp_path)
    tokens, lengths = ids(1, 14), (6, 8)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    expected = torch.cat([theirs(part).logits for part in tokens.split(lengths, dim=1)], dim=1)
    bounds = torch.tensor([0, 6, 14], dtype=torch.int32)  # what a collator of TRL adds to the positions
    packed = {f"{name}_{of}": value for name, value in (("cu_seq_lens", bounds), ("max_length", 8)) for of in "qk"}
    packed["seq_idx"] = torch.tensor([0, 1]).repeat_interleave(bounds.diff())[None]
    close(ours(tokens, position_ids=positions, **packed).logits, expected)
    expected = theirs(tokens).logits
    for kind in ("dynamic", "without a config", "static"):  # transformers rejects quantized windows
        cache = CACHES[kind](ours.config)
        parts = [ours(part, past_key_values=cache).logits for part in tokens.split((7, 5, 1, 1), dim=1)]
        close(torch.cat(parts, dim=1), expected)
        slots = {layer.keys.size(2) for layer in cache.layers}
        assert slots >= {{"dynamic": 3, "static": 4, "without a config": 14}[kind]}
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9])
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    generated = theirs.generate(ids(), **options)
    for implementation in (None, "static"):
        assert torch.equal(ours.generate(ids(), cache_implementation=implementation, **options), generated)
    with pytest.raises(NotImplementedError, match="continuous batching needs attention"):
        ours.generate_batch([[3, 4]])


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(GEMMA, id="gemma2"),
        pytest.param(LLAMA4, id="llama4"),
        pytest.param(MAMBA2, id="mamba2"),
        pytest.param(QWEN3_NEXT, id="qwen3_next"),
    ],
)
def test_a_compiled_step_with_a_static_cache(spec: str, tmp_path: Path) -> None:
    torch.compiler.reset()  # all classes share a wrapper of transformers, and torch compiles a function at most 8 times
    ours, theirs = pair(spec, tmp_path)
    step = torch.compile(ours, backend="eager", fullgraph=True)
    cache = StaticCache(ours.config, max_cache_len=12)
    logits = [step(token, past_key_values=cache).logits for token in ids().split(1, dim=1)]
    close(torch.cat(logits, dim=1), theirs(ids()).logits)
    if spec == QWEN3_NEXT:
        with pytest.raises(RuntimeError, match="the states would mix them"):
            step(ids(1), position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]), use_cache=False)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(("name", "spec"), [("gpt2", GPT2), ("gemma2", GEMMA), ("llama4", LLAMA4)])
def test_an_exported_step_with_a_static_cache(name: str, spec: str, tmp_path: Path) -> None:
    folder = tmp_path / f"exported_{name}"  # a package, which Python imports once
    folder.mkdir()
    model, ours = opened(spec, folder)
    ours.generation_config = GenerationConfig(use_cache=True, cache_implementation="static")
    step = TorchExportableModuleWithStaticCache(ours, batch_size=1, max_cache_len=16)
    tokens = [{"input_ids": ids(1)[:, i : i + 1], "cache_position": torch.tensor([i])} for i in range(9)]
    exported: Any = torch.export.export(step, (), tokens[0], strict=False).module()
    close(torch.cat([exported(**token) for token in tokens], dim=1), model(ids(1)))


@pytest.fixture(
    scope="module",
    params=[pytest.param(MAMBA2, id="mamba2", marks=pytest.mark.slow), pytest.param(QWEN3_NEXT, id="qwen3")],
)
def recurrent(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Models of states alone, and of states, attention and experts."""
    return pair(request.param, tmp_path_factory.mktemp("recurrent"))


PADDED = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9])


@torch.no_grad()
def test_states_are_in_the_caches_of_transformers(recurrent: Pair) -> None:
    ours, theirs = recurrent
    expected = theirs(ids(), attention_mask=PADDED).logits
    caches: list[Cache] = [DynamicCache(config=ours.config), StaticCache(ours.config, max_cache_len=14)]
    for cache in caches:
        parts, end = [], 0
        for part in ids().split((5, 2, 1, 1), dim=1):
            end += part.size(1)
            parts.append(ours(part, attention_mask=PADDED[:, :end], past_key_values=cache).logits)
        close(torch.cat(parts, dim=1)[PADDED == 1], expected[PADDED == 1])
    with pytest.raises(ValueError, match="past_key_values has no states: create it with the config"):
        ours(ids(), past_key_values=DynamicCache())
    with pytest.raises((ValueError, TypeError), match="position_ids"):
        ours(ids(1), position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]))


@pytest.mark.slow
@torch.no_grad()
def test_generation_with_states(recurrent: Pair) -> None:
    """The cache of Mamba counts its columns, which `generate` needs."""
    ours, theirs = recurrent
    options = {"attention_mask": PADDED, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = theirs.generate(ids(), **options)
    for implementation in (None, "static"):
        assert torch.equal(ours.generate(ids(), cache_implementation=implementation, **options), expected)
    beams = options | {"num_beams": 3}
    assert torch.equal(ours.generate(ids(), **beams), ours.generate(ids(), use_cache=False, **beams))
    code = sys.modules[type(ours).__module__]
    cache = getattr(code, "SmallCache", DynamicCache)(config=ours.config)
    begun = ours.generate(ids(), cache=cache, **options | {"max_new_tokens": 2})
    longer = options | {"attention_mask": F.pad(PADDED, (0, 2), value=1), "max_new_tokens": 4}
    assert torch.equal(ours.generate(begun, cache=cache, **longer), expected)


@torch.no_grad()
def test_router_logits(recurrent: Pair) -> None:
    if recurrent.theirs.config.model_type == "mamba2":
        pytest.skip("no experts")
    values, expected = (model(ids(), labels=ids(), output_router_logits=True) for model in recurrent)
    assert len(values.router_logits) == len(expected.router_logits) == 2
    for logits in zip(values.router_logits, expected.router_logits, strict=True):
        close(*logits)
    assert values.aux_loss is None
    assert recurrent.ours(ids()).router_logits is None
    recurrent.ours.config.output_router_logits = True
    assert len(recurrent.ours(ids()).router_logits) == 2
    recurrent.ours.config.output_router_logits = False
    close(values.loss, expected.loss - recurrent.theirs.config.router_aux_loss_coef * expected.aux_loss)


LOCAL = """tfkit: 1
name: small
vocab_size: 50
d_model: 32
graph:
  embedding: embedding
  decoder: {block: decoder, n_layers: 2, attention: {n_heads: 4, position: POSITION}, ffn: {kind: gelu, d_ff: 48}}
  logits: lm_head
"""


@torch.no_grad()
@pytest.mark.parametrize("position", ["alibi", "t5"])
def test_scores_that_depend_on_distances(position: str, tmp_path: Path) -> None:
    model, written = opened(LOCAL.replace("POSITION", position), tmp_path)
    tokens, mask = ids(), torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 9])
    row, positions = ids(1), torch.tensor([[5, 6, 7, 8, 0, 1, 3, 4, 5]])
    expected = torch.cat([model(part) for part in row.split((4, 2, 3), dim=1)], dim=1)
    close(written(row, position_ids=positions).logits, expected)
    caches: list[Cache] = [DynamicCache(), StaticCache(written.config, max_cache_len=12)]
    for cache in caches:
        written(tokens[:, :4], attention_mask=mask[:, :4], past_key_values=cache)
        logits = written(tokens[:, 4:], attention_mask=mask, past_key_values=cache).logits
        close(logits[0], model(tokens[:1, 2:])[0, 2:])
        close(logits[1], model(tokens[1:])[0, 4:])
        with pytest.raises(ValueError, match="position_ids must count the tokens from 0 if there are past_key_values"):
            written(tokens[:, :1], position_ids=torch.tensor([[4]]), past_key_values=cache)
    with pytest.raises(NotImplementedError, match="continuous batching needs attention whose scores depend only on"):
        written.generate_batch([[3, 4]])
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = written.generate(tokens, use_cache=False, **options)
    for implementation in (None, "static"):
        assert torch.equal(written.generate(tokens, cache_implementation=implementation, **options), expected)


T5 = f"""tfkit: 1
extends: t5_small
{SIZES}dropout: 0.0
graph:
  encoder: {{n_layers: 2, attention: {{n_heads: 4}}, ffn: {{d_ff: 48, dropout: 0.0}}}}
"""


@pytest.mark.slow
def test_an_encoder_decoder_generates_and_trains(tmp_path: Path) -> None:
    (tmp_path / "code_t5").mkdir()
    ids_of_tokens = {"pad_token_id": 3, "eos_token_id": 49}  # T5 begins a text with the padding token
    model, ours = opened(T5, tmp_path / "code_t5", **ids_of_tokens)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(json.dumps(ids_of_tokens))
    save(model, tmp_path / "family", layout="huggingface", files_from=tmp_path / "source")
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "family").eval()
    source, labels = ids(1), ids(1, 6, seed=1)
    expected = tfkit.generate(model, torch.tensor([[3]]), max_new_tokens=8, stop=[49], source=source).tokens[0]
    for opened_model in (ours, theirs):
        tokens = opened_model.generate(source, max_new_tokens=8, do_sample=False)[0].tolist()
        assert tokens == [3, *expected.tolist()]
    losses: list[list[float]] = []
    target = torch.cat((torch.full((1, 1), 3), labels[:, :-1]), dim=1)
    for trained in (model, ours, theirs):
        optimizer, values = torch.optim.SGD(trained.parameters(), lr=0.05), []
        for _ in range(2):
            logits = trained(source, target) if trained is model else None
            output = None if trained is model else trained(source, labels=labels)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) if output is None else output.loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            values.append(loss.item())
        losses.append(values)
    assert losses[0][1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("family", sorted({*START_ROLES} - {"t5", "t5gemma", "whisper"}))  # without this default
def test_families_begin_a_text_with_the_token_of_their_class(family: str) -> None:
    config = AutoConfig.for_model(family)
    assert config.decoder_start_token_id == getattr(config, f"{START_ROLES[family]}_id")
