"""Blocks of tokens that attend to each other in both directions, such as images, in a causal model."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tfkit
from tfkit.component import MaskConfig
from tfkit.components.context import AttentionContext, ContextKey
from tfkit.learning.without_head import find_ends
from tfkit.testing import check_model

ROPE = {"n_heads": 2, "position": "rope"}
WINDOW = {**ROPE, "mask": {"left": 2, "right": 0}}
KINDS: dict[str, dict[str, Any]] = {
    "rope": ROPE,
    "window": WINDOW,
    "chunk": {**ROPE, "mask": {"right": 0, "rule": {"kind": "chunk", "size": 4}}},
    "alibi": {"n_heads": 2, "position": "alibi"},
    "t5": {"n_heads": 2, "position": "t5"},
    "disentangled": {"n_heads": 2, "position": {"kind": "disentangled", "max_distance": 8}},
}
TOKENS = torch.randint(17, (3, 9), generator=torch.Generator().manual_seed(0))
BLOCKS = torch.tensor([[0, 1, 1, 1, 0, 2, 2, 3, 3], [5, 5, 0, 0, 5, 5, 5, 0, 1], [0] * 9])
PADDINGS = {
    "none": None,
    "right": [[1] * 9, [1] * 6 + [0] * 3, [1] + [0] * 8],
    "left": [[1] * 9, [0] * 2 + [1] * 7, [0] * 9],
    "between": [[1, 1, 0, 1, 1, 1, 0, 1, 1], [1, 1, 0, 0, 1, 0, 1, 1, 0], [0, 1] * 4 + [1]],
}


def spec(attention: dict[str, Any] | None, images: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A model of two layers whose blocks are the input `images`."""
    stack = {"block": "decoder", "input": "embedding", "n_layers": 2, "blocks": "images", "attention": attention}
    stack |= {"ffn": {"kind": "relu", "d_ff": 24}, **changes}
    return {
        "tfkit": 1,
        "name": "m",
        "d_model": 32,
        "vocab_size": 17,
        "inputs": {"tokens": "tokens", "images": {"type": "positions", **(images or {})}},
        "graph": {
            "embedding": {"block": "embedding", "input": "tokens"},
            "decoder": stack,
            "logits": {"block": "lm_head"},
        },
    }


def built(*args: Any, **changes: Any) -> Any:
    return tfkit.build(spec(*args, **changes), seed=1).eval()


def loop(left: int | None, blocks: Tensor, pairs: Tensor) -> Tensor:
    """[b, q, k]: where a query may attend to a key, by a loop over all pairs."""
    visible = torch.zeros_like(pairs)
    for b, q, k in product(*map(range, pairs.shape)):
        tokens = [j for j in range(min(q, k), max(q, k) + 1) if pairs[b, j, j]]
        together = blocks[b, q] > 0 and all(blocks[b, j] == blocks[b, q] for j in tokens)
        near = left is None or sum(bool(pairs[b, q, j]) for j in range(k + 1, q + 1)) <= left
        visible[b, q, k] = pairs[b, q, k] and near and (k <= q or together)
    return visible


@pytest.mark.parametrize(("padded", "left"), [*product([*PADDINGS, "documents"], [None]), ("none", 1), ("left", 1)])
def test_the_mask_is_that_of_a_loop(padded: str, left: int | None) -> None:
    key = ContextKey(MaskConfig(left=left, right=0), prefix=False, blocks=True, flag=False)
    options, padding = PADDINGS.get(padded), None
    tokens = torch.ones(3, 9, dtype=torch.bool) if options is None else torch.tensor(options, dtype=torch.bool)
    pairs = tokens[:, :, None] & tokens[:, None]
    if padded == "documents":  # the second begins within a run of equal numbers
        document = torch.arange(9) >= torch.tensor([2, 5, 1])[:, None]
        padding = pairs = document[:, :, None] == document[:, None]
    elif options is not None:
        padding = tokens
    expected = loop(left, BLOCKS, pairs)[tokens]
    for gaps in (False, True):
        context = AttentionContext(key, rotary=None, position=None, slopes=None, gaps=gaps)
        mask = context(torch.zeros(3, 9, 4), padding, BLOCKS).mask
        assert mask is not None
        assert torch.equal((mask[:, 0] == 0)[tokens], expected)


@pytest.mark.parametrize(("name", "only"), [("window", ("extents",)), ("disentangled", ("meaning",))])
def test_the_reference_and_the_check_have_them(name: str, only: tuple[str, ...]) -> None:
    check_model(spec(KINDS[name]), only=only)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_every_property_holds(name: str) -> None:
    check_model(spec(KINDS[name]))


@torch.no_grad()
@pytest.mark.parametrize("name", ["rope", "window"])
def test_caches_take_them_piece_by_piece(name: str) -> None:
    model = built(KINDS[name], n_layers=1)
    mask = torch.tensor(
        [[True] * 9, [False, True, True, True, True, True, False, True, True], [False] * 4 + [True] * 5]
    )
    cached, outputs = tfkit.CachedModel(model, length=9), []
    for start, end in ((0, 4), (4, 7), (7, 9)):
        outputs.append(cached(TOKENS[:, start:end], mask[:, start:end], images=BLOCKS[:, start:end]))
    for row in range(3):
        alone = model(TOKENS[row : row + 1, mask[row]], images=BLOCKS[row : row + 1, mask[row]])
        torch.testing.assert_close(torch.cat(outputs, dim=1)[row, mask[row]], alone[0], atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_block_in_two_pieces_is_refused() -> None:
    cached = tfkit.CachedModel(built(ROPE), length=9)
    cached(TOKENS[:, :2], images=BLOCKS[:, :2])
    message = "`images` must have all tokens of a block in one piece; got more tokens of block 1"
    with pytest.raises(ValueError, match=message):
        cached(TOKENS[:, 2:4], images=BLOCKS[:, 2:4])
    cached.start(3)
    cached(TOKENS[:, :2], images=BLOCKS[:, :2])
    cached.repeat(2)
    with pytest.raises(ValueError, match=message):
        cached(TOKENS[:, 2:4].repeat_interleave(2, 0), images=BLOCKS[:, 2:4].repeat_interleave(2, 0))
    cached(TOKENS[:, 2:3].repeat_interleave(2, 0), images=torch.tensor([5, 5, 1, 1, 5, 5])[:, None])
    cached.rewind(3)
    cached(TOKENS[:, :4].repeat_interleave(2, 0), images=BLOCKS[:, :4].repeat_interleave(2, 0))


@torch.no_grad()
@pytest.mark.usefixtures("flex")
def test_flex_attention_leaves_blocks_to_the_dense_core() -> None:
    expected = built(WINDOW)(TOKENS, images=BLOCKS)
    actual = tfkit.build(spec(WINDOW), seed=1, attention_backend="flex").eval()(TOKENS, images=BLOCKS)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def test_a_loss_may_not_predict_tokens_of_a_block() -> None:
    assert find_ends(built(ROPE))["logits"].tokens is None


@torch.no_grad()
def test_without_blocks_the_model_is_causal() -> None:
    plain = spec(ROPE)
    del plain["inputs"]["images"], plain["graph"]["decoder"]["blocks"]
    model, causal = built(ROPE, {"optional": True}), tfkit.build(plain, seed=1).eval()
    torch.testing.assert_close(model(TOKENS), causal(TOKENS), atol=1e-6, rtol=0)
    torch.testing.assert_close(model(TOKENS, images=torch.zeros_like(BLOCKS)), causal(TOKENS), atol=1e-6, rtol=0)
    changes = (model(TOKENS, images=BLOCKS) - causal(TOKENS)).abs().amax(dim=(1, 2))
    assert changes.gt(1e-4).tolist() == [True, True, False]
    cached = tfkit.CachedModel(model, length=9)  # tokens without an input of blocks are in no block
    chunks = [cached(TOKENS[:, start:end]) for start, end in ((0, 4), (4, 7), (7, 9))]
    torch.testing.assert_close(torch.cat(chunks, dim=1), causal(TOKENS), atol=1e-5, rtol=0)


def test_a_decoder_describes_its_blocks_and_its_prefix() -> None:
    graph, words = tfkit.load(spec(ROPE)), "Layers with causal attention; "
    assert graph.node("decoder").config.in_words() == f"{words}the tokens of a block attend to each other, by `images`."
    prefixed = spec(ROPE, {"type": "lengths"}, blocks=None, prefix="images")
    check_model(prefixed, only=("extents",))
    assert tfkit.load(prefixed).node("decoder").config.in_words() == (
        f"{words}every query also attends to the prefix, whose length is `images`."
    )


CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "tokens": (
        spec(ROPE) | {"inputs": {"tokens": "tokens", "images": "tokens"}},
        "graph.decoder.blocks",
        "`blocks` must be positions; got tokens",
    ),
    "axes": (spec(ROPE, {"width": 2}), "graph.decoder.blocks", "must have a single axis; got positions of 2 axes"),
    "no attention": (
        spec(None),
        "graph.decoder.blocks",
        "`blocks` has no effect: no layer has an attention",
    ),
    "a prefix": (
        spec(ROPE, prefix="known") | {"inputs": {"tokens": "tokens", "images": "positions", "known": "lengths"}},
        "graph.decoder.blocks",
        "a decoder cannot have both a prefix and blocks",
    ),
    "a length of its own": (
        spec(ROPE, {"length": 5}) | {},
        "graph.decoder.blocks",
        "all inputs must have the same length, 9 positions; got 5",
    ),
}
CASES["a length of its own"][0]["inputs"]["tokens"] = {"type": "tokens", "length": 9}


@pytest.mark.parametrize("case", CASES)
def test_a_spec_that_cannot_be_is_one_error(case: str) -> None:
    text, path, message = CASES[case]
    with pytest.raises(tfkit.SpecError) as error:
        tfkit.load(text)
    assert [diagnostic.path for diagnostic in error.value.diagnostics] == [path]
    assert message in str(error.value)


def test_a_tensor_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match=r"`images` must be integers \[b, t\]; got torch.float32"):
        built(ROPE)(TOKENS, images=BLOCKS.float())


@pytest.mark.slow
@torch.no_grad()
def test_images_of_gemma_3_attend_as_in_transformers(tmp_path: Path) -> None:
    from transformers import Gemma3Config, Gemma3ForCausalLM, Gemma3ForConditionalGeneration

    sizes: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 6}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8}
    sizes |= {"sliding_window": 3, "max_position_embeddings": 64, "pad_token_id": 0}
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    vision |= {"image_size": 28, "patch_size": 14}
    theirs: Any = Gemma3ForConditionalGeneration(Gemma3Config(text_config=sizes, vision_config=vision)).eval()
    generator = torch.Generator().manual_seed(3)
    for parameter in theirs.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    text: Any = Gemma3ForCausalLM(theirs.config.text_config)
    text.model.load_state_dict(theirs.model.language_model.state_dict())
    text.save_pretrained(tmp_path)
    attention = {"n_heads": 4, "n_kv_heads": 2, "d_head": 8, "scale": 8**-0.5}
    layers = {"variants": {"local": {"attention": {"mask": {"left": 2}}}}}
    decoder = {"blocks": "images", "n_layers": 6, "attention": attention, "ffn": {"d_ff": 40}, "layers": layers}
    changes = {"extends": "gemma3_1b", "name": "gemma", "d_model": 32, "vocab_size": 61, "max_len": 64}
    changes |= {"parameters": None, "inputs": {"tokens": "tokens", "images": "positions"}}
    graph = {"embedding": {"input": "tokens"}, "decoder": decoder}
    model = tfkit.build(tfkit.load({**changes, "graph": graph}), weights=tmp_path).eval()
    tokens, images = torch.randint(1, 61, (2, 12), generator=generator), torch.zeros(2, 12, dtype=torch.long)
    images[0, 1:6] = images[0, 8:10] = images[1, 5:11] = 1
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, :3] = False
    logits = theirs(tokens, attention_mask=mask.long(), token_type_ids=images).logits
    torch.testing.assert_close(model(tokens, images=images, tokens_mask=mask)[mask], logits[mask], atol=1e-5, rtol=0)
    assert (model(tokens, images=images * 0, tokens_mask=mask) - logits)[mask].abs().max() > 1e-3
