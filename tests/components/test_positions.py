"""Positions as an input: rotary positions, tables, biases and temperatures take them, and masks still count tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tfkit
from tfkit.testing import check_model
from tfkit.tools.eject.remote_code.parts import parts_of

from ..sampling import chosen, some

ROPE = {"position": "rope"}
AXES = {"position": {"kind": "rope", "sections": [3, 2, 3]}}
TURNS = {"position": {"kind": "rope", "sections": [3, 3, 2], "interleaved": True}}
WINDOW = {"left": 2, "right": 0}
KINDS: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "rope": ("decoder", {**ROPE, "mask": WINDOW}, None),
    "sections": ("decoder", {**AXES, "mask": WINDOW}, 3),
    "interleaved": ("encoder", TURNS, 3),
    "part": ("decoder", {"position": {"kind": "rope", "width": 12, "sections": [4, 2], "style": "interleaved"}}, 2),
    "chunk": ("decoder", {**ROPE, "mask": {"right": 0, "rule": {"kind": "chunk", "size": 4}}}, None),
    "temperature": ("decoder", {"temperature": {"beta": 0.7, "original_max_len": 2}}, None),
    "alibi": ("decoder", {"position": "alibi", "mask": WINDOW}, None),
    "t5": ("encoder", {"position": "t5"}, None),
    "disentangled": ("encoder", {"position": {"kind": "disentangled", "max_distance": 8}}, None),
}
"""The block, the attention, and the number of axes of the positions."""
TOKENS = torch.randint(17, (3, 9), generator=torch.Generator().manual_seed(0))


def spec(block: str, attention: dict[str, Any], axes: int | None = None, **changes: Any) -> dict[str, Any]:
    """A model of two layers whose positions are the input `at`."""
    at: dict[str, Any] = {"type": "positions"} | ({} if axes is None else {"width": axes})
    stack = {
        "block": block,
        "input": "embedding",
        "n_layers": 2,
        "positions": "at",
        "ffn": {"kind": "relu", "d_ff": 24},
    }
    stack["attention"] = {"kind": "mha", "n_heads": 2, **attention}
    return {
        "tfkit": 1,
        "name": "m",
        "d_model": 32,
        "vocab_size": 17,
        "inputs": {"tokens": "tokens", "at": {**at, **changes.pop("at", {})}},
        "graph": {
            "embedding": {"block": "embedding", "input": "tokens"} | changes.pop("embedding", {}),
            "stack": {name: value for name, value in {**stack, **changes}.items() if value is not None},
            "logits": {"block": "lm_head"},
        },
    }


def built(*args: Any, **changes: Any) -> Any:
    return tfkit.build(spec(*args, **changes), seed=1).eval()


def positions(axes: int | None, rows: int = 3, length: int = 9) -> Tensor:
    shape = (rows, length) if axes is None else (rows, length, axes)
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", chosen(KINDS, ["sections", "interleaved"]))
def test_they_are_those_of_the_reference(name: str) -> None:
    check_model(spec(*KINDS[name]), only=("meaning", "padding"))


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_every_property_holds(name: str) -> None:
    check_model(spec(*KINDS[name]))


@torch.no_grad()
def test_caches_take_them_step_by_step() -> None:
    model, at = built(*KINDS["sections"]), positions(3)
    mask = torch.tensor([[True] * 9, [False] * 2 + [True] * 7, [True] * 4 + [False] * 2 + [True] * 3])
    cached, outputs = tfkit.CachedModel(model, length=9), []
    for start, end in ((0, 6), (6, 7), (7, 9)):
        outputs.append(cached(TOKENS[:, start:end], mask[:, start:end], at=at[:, start:end]))
    for row in range(3):
        alone = model(TOKENS[row : row + 1, mask[row]], at=at[row : row + 1, mask[row]])
        torch.testing.assert_close(torch.cat(outputs, dim=1)[row, mask[row]], alone[0], atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("name", some(KINDS, 5))
def test_given_positions_that_count_change_no_bit(name: str) -> None:
    block, attention, axes = KINDS[name]
    model, count = built(block, attention, axes, at={"optional": True}), torch.arange(9).expand(3, 9)
    counted = model(TOKENS)
    at = count if axes is None else count[:, :, None].expand(3, 9, axes)
    assert torch.equal(model(TOKENS, at=at), counted)
    assert (model(TOKENS, at=positions(axes)) - counted).abs().max() > 1e-3
    if axes is None:
        plain = spec(block, attention, positions=None)
        del plain["inputs"]["at"]
        assert torch.equal(tfkit.build(plain, seed=1).eval()(TOKENS), counted)


@torch.no_grad()
@pytest.mark.usefixtures("flex")
@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")
def test_flex_attention_takes_the_distances_of_positions() -> None:
    text, at = spec(*KINDS["alibi"]), positions(None)
    expected = tfkit.build(text, seed=1).eval()(TOKENS, at=at)
    actual = tfkit.build(text, seed=1, attention_backend="flex").eval()(TOKENS, at=at)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("position", ["learned", "sinusoidal"])
def test_a_table_takes_them(position: str) -> None:
    embedding = {"position": position, "positions": "at", **({"max_len": 50} if position == "learned" else {})}
    text = spec("decoder", {}, positions=None, embedding=embedding)
    model = tfkit.build(text, seed=1).eval()
    rows = model.embedding(TOKENS[:, :1], positions=torch.full((3, 1), 7))
    count = model.embedding(TOKENS[:, [0] * 8])[:, 7:]
    torch.testing.assert_close(rows, count, rtol=0, atol=0)
    if position == "learned":
        with pytest.raises(ValueError, match="50 is not a position of this model: `at` may be 0 to 49"):
            model(TOKENS, at=positions(None).clamp(max=49).fill_diagonal_(50))


@pytest.mark.slow
@pytest.mark.parametrize("position", ["learned", "sinusoidal"])
def test_every_property_of_an_embedding_holds(position: str) -> None:
    embedding = {"position": position, "positions": "at", **({"max_len": 50} if position == "learned" else {})}
    check_model(spec("decoder", {}, positions=None, embedding=embedding))


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["layer", "attention"])
def test_single_layers_and_sublayers_take_them(nodes: str) -> None:
    text = spec(*KINDS["sections"])
    node: dict[str, Any] = {"block": nodes, "input": "embedding", "positions": "at", "causal": True}
    node["attention"] = text["graph"]["stack"]["attention"]
    text["graph"]["stack"] = node | ({"ffn": {"kind": "relu", "d_ff": 24}} if nodes == "layer" else {})
    check_model(text, only=("meaning", "cached", "padding"))


@torch.no_grad()
def test_generation_counts_optional_positions_and_steps_take_them() -> None:
    model = built("decoder", ROPE, at={"optional": True})
    text = tfkit.generate(model, TOKENS[:1], max_new_tokens=3)
    required = built("decoder", ROPE)
    cached = tfkit.CachedModel(required, length=12)
    tokens, next_tokens = TOKENS[:1], []
    for start in (0, 9, 10):
        logits = cached(tokens, at=torch.arange(start, start + tokens.size(1))[None])
        tokens = logits[:, -1:].argmax(-1)
        next_tokens.append(tokens.item())
    assert text.tokens[0].tolist() == next_tokens
    with pytest.raises(ValueError, match="takes at at every step, which `generate` does not have"):
        tfkit.generate(required, TOKENS[:1], max_new_tokens=1)


NOT_POSITIONS = {"inputs": {"tokens": "tokens", "at": "tokens"}}
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "tokens": (spec("decoder", ROPE) | NOT_POSITIONS, "graph.stack.positions", "must be positions; got tokens"),
    "no taker": (spec("decoder", {}), "graph.stack.positions", "has no effect: no attention has positions"),
    "axes that no kind takes": (
        spec("decoder", ROPE, 3),
        "graph.stack.attention",
        "takes positions of a single axis; got positions of 3 axes",
    ),
    "too few axes": (
        spec("decoder", AXES, 2),
        "graph.stack.attention",
        "takes positions of 3 axes; got positions of 2 axes",
    ),
    "a temperature of three axes": (
        spec("decoder", {**AXES, "temperature": {"beta": 0.7, "original_max_len": 2}}, 3),
        "graph.stack.attention",
        "takes positions of a single axis",
    ),
    "sections that nobody positions": (
        spec("decoder", AXES, None, positions=None) | {"inputs": {"tokens": "tokens"}},
        "graph.stack.attention.position",
        "positions of 3 axes cannot be counted",
    ),
    "sections of other heads": (
        spec("decoder", {"position": {"kind": "rope", "sections": [3, 2, 2]}}, 3),
        "graph.stack.attention.position.sections",
        "sections must add up to 8, the pairs of a head; got 7",
    ),
    "turns of nothing": (
        spec("decoder", {"position": {"kind": "rope", "interleaved": True}}),
        "graph.stack.attention.position.interleaved",
        "`interleaved` has no effect without `sections`",
    ),
    "an embedding without a position": (
        spec("decoder", ROPE, embedding={"positions": "at"}),
        "graph.embedding.positions",
        "`positions` has no effect without `position`",
    ),
    "an embedding of two axes": (
        spec("decoder", AXES, 3, embedding={"positions": "at", "position": "sinusoidal"}),
        "graph.embedding.positions",
        "`positions` must have a single axis; got positions of 3 axes",
    ),
    "a length of its own": (
        spec("decoder", ROPE, at={"length": 5}) | {},
        "graph.stack.positions",
        "all inputs must have the same length, 9 positions; got 5",
    ),
    "an embedding whose positions have a length of their own": (
        spec("decoder", {}, at={"length": 5}, embedding={"positions": "at", "position": "sinusoidal"}, positions=None),
        "graph.embedding.positions",
        "all inputs must have the same length, 9 positions; got 5",
    ),
}
for case in ("a length of its own", "an embedding whose positions have a length of their own"):
    CASES[case][0]["inputs"]["tokens"] = {"type": "tokens", "length": 9}


@pytest.mark.parametrize("case", CASES)
def test_a_spec_that_cannot_be_is_one_error(case: str) -> None:
    text, path, message = CASES[case]
    with pytest.raises(tfkit.SpecError) as error:
        tfkit.load(text)
    assert [diagnostic.path for diagnostic in error.value.diagnostics] == [path]
    assert message in str(error.value)


def test_a_folder_for_transformers_is_refused() -> None:
    with pytest.raises(tfkit.SpecError, match="it must take a single input of tokens; it takes tokens, at"):
        parts_of(tfkit.load(spec(*KINDS["sections"])))


@pytest.mark.parametrize("name", ["alibi"])
def test_caches_refuse_biases_whose_keys_have_positions(name: str) -> None:
    with pytest.raises(tfkit.SpecError, match="positions in scores need the full sequence if they are an input"):
        tfkit.CachedModel(built(*KINDS[name]), length=9)


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (positions(4), r"`at` must be of width 3; got \[3, 9, 4\]"),
        (positions(3)[:, :8], r"positions must be integers \[3, 9, 3\]; got torch.int64 \[3, 8, 3\]"),
        (positions(3)[:1], r"the inputs must have the same batch size"),
        (positions(None), r"`at` must be integers \[b, t, 3\]; got torch.int64 \[3, 9\]"),
        (positions(3).float(), r"`at` must be integers \[b, t, 3\]; got torch.float32"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(at: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        built(*KINDS["sections"])(TOKENS, at=at)


MROPE = {"rope_type": "default", "rope_theta": 500.0}
VL: dict[str, tuple[str, int, dict[str, Any]]] = {
    "Qwen2VL": ("qwen2_0_5b", 12, {"mrope_section": [2, 3, 1]}),
    "Qwen3VL": ("qwen3_0_6b", 16, {"mrope_section": [4, 2, 2], "mrope_interleaved": True}),
}
"""The spec of the model of text, the width of a head, and the rotary parameters."""


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", VL)
def test_rotary_positions_of_three_axes_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    import transformers

    base, d_head, parameters = VL[name]
    sizes: dict[str, Any] = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2}
    sizes |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    }
    sizes |= {"head_dim": d_head} if name == "Qwen3VL" else {}
    config = getattr(transformers, f"{name}TextConfig")(**sizes, rope_parameters={**MROPE, **parameters})
    theirs: Any = getattr(transformers, f"{name}TextModel")(config).eval()
    generator = torch.Generator().manual_seed(3)
    for parameter in theirs.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    text = getattr(transformers, f"{name[:5]}Config")(**sizes, rope_parameters=MROPE)
    of_text: Any = getattr(transformers, f"{name[:5]}ForCausalLM")(text)
    of_text.model.load_state_dict(theirs.state_dict())
    of_text.save_pretrained(tmp_path)
    rope = {"theta": 500, "sections": parameters["mrope_section"], "interleaved": "mrope_interleaved" in parameters}
    attention = {"n_heads": 4, "n_kv_heads": 2, "d_head": d_head, "position": rope}
    decoder = {"positions": "at", "n_layers": 2, "attention": attention, "ffn": {"d_ff": 40}}
    changes = {"extends": base, "name": "vl", "d_model": 48, "vocab_size": 61, "max_len": 64, "parameters": None}
    inputs = {"tokens": "tokens", "at": {"type": "positions", "width": 3}}
    graph = tfkit.load({**changes, "inputs": inputs, "graph": {"embedding": {"input": "tokens"}, "decoder": decoder}})
    model = tfkit.build(graph, weights=tmp_path).eval()
    tokens, at = torch.randint(61, (2, 7), generator=generator), torch.randint(40, (2, 7, 3), generator=generator)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, :3] = False
    hidden = theirs(tokens, position_ids=at.permute(2, 0, 1), attention_mask=mask.long()).last_hidden_state
    logits = hidden @ theirs.embed_tokens.weight.T
    torch.testing.assert_close(model(tokens, at=at, tokens_mask=mask)[mask], logits[mask], atol=1e-5, rtol=0)
    assert (model(tokens, at=at[:, :, [1, 0, 2]], tokens_mask=mask) - logits)[mask].abs().max() > 1e-3
