"""Speculative decoding by further outputs: the tokens of plain decoding, with fewer forwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, fx

import tfkit
from tfkit.decoding.drafts import Drafts

from .small import build

ATTENTION = {"kind": "mha", "n_heads": 2, "position": "rope"}
STACK = {"block": "decoder", "n_layers": 1, "attention": ATTENTION, "ffn": {"kind": "gelu", "d_ff": 24}}
HEADS = {
    "embedding": {"block": "embedding", "input": "tokens"},
    "decoder": {**STACK, "n_layers": 2},
    "logits": {"block": "lm_head", "input": "decoder"},
    "second": {"block": "lm_head", "input": "decoder"},
    "third": {"block": "lm_head", "input": "decoder"},
}
CHAIN = {
    "embedding": {"block": "embedding", "input": "tokens"},
    "decoder": {**STACK, "n_layers": 2},
    "logits": {"block": "lm_head", "tie": "embedding"},
    "next": {"block": "embedding", "input": "after", "tie": "embedding"},
    "joined": {"block": "concat", "inputs": ["decoder", "next"], "along": "width"},
    "merged": {"block": "linear", "bias": False},
    "module": {**STACK},
    "second": {"block": "lm_head", "tie": "embedding"},
    "later": {"block": "embedding", "input": "after_next", "tie": "embedding"},
    "joined_2": {"block": "concat", "inputs": ["module", "later"], "along": "width"},
    "merged_2": {"block": "linear", "bias": False},
    "module_2": {**STACK},
    "third": {"block": "lm_head", "tie": "embedding"},
}
PLUGINS = tfkit.load_plugins(plugin_dirs=[Path(__file__).parents[1] / "mixers"], entry_points=False)
PROMPTS = [[5, 9, 2, 2], [7], [3, 3, 8, 6, 1, 4]]


def model_of(graph: dict[str, Any], *inputs: str) -> fx.GraphModule:
    """A model that is often right about the next tokens: its vocabulary is small, and its weights repeat."""
    head = {"tfkit": 1, "name": "drafted", "d_model": 16, "vocab_size": 11, "max_len": 64}
    spec = {**head, "inputs": ["tokens", *inputs], "graph": graph, "outputs": ["logits", "second", "third"]}
    return build(tfkit.loads(yaml.safe_dump(spec, sort_keys=False), plugins=PLUGINS))


@pytest.fixture(scope="module", params=["heads", "chain"])
def model(request: pytest.FixtureRequest) -> fx.GraphModule:
    return model_of(HEADS) if request.param == "heads" else model_of(CHAIN, "after", "after_next")


@pytest.mark.parametrize(
    "prompts", [pytest.param(PROMPTS[:1], id="one", marks=pytest.mark.slow), pytest.param(PROMPTS, id="padded")]
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.3},
        {"stop": [4, [2, 2]]},
        {"temperature": 0.7, "n_samples": 3, "seed": 5, "top_k": 6},
    ],
    ids=["greedy", "penalty", "stop", "samples"],
)
@pytest.mark.parametrize(
    "drafts", [pytest.param(["second"], id="1", marks=pytest.mark.slow), pytest.param(["second", "third"], id="2")]
)
def test_drafts_change_no_token(
    model: fx.GraphModule,
    prompts: list[list[int]],
    options: dict[str, Any],
    drafts: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two thirds of the drafts are replaced by the tokens that plain decoding chooses, so both outcomes occur."""
    plain = tfkit.generate(model, prompts, max_new_tokens=24, output="logits", **options)
    width = max(map(len, prompts))
    random, original = torch.Generator().manual_seed(3), Drafts._draft

    def draft(self: Drafts, count: int) -> list[Tensor]:
        begin = self._tokens.size(1) - width
        columns = [plain.tokens[:, begin + i] if begin + i < plain.tokens.size(1) else None for i in range(count)]
        drafted_tokens = original(self, count)
        return [
            column if column is not None and torch.rand((), generator=random) < 2 / 3 else value
            for column, value in zip(columns, drafted_tokens, strict=True)
        ]

    monkeypatch.setattr(Drafts, "_draft", draft)
    drafted = tfkit.generate(model, prompts, max_new_tokens=24, drafts=drafts, **options)
    assert drafted.rows() == plain.rows()
    assert drafted.ended == plain.ended
    assert plain.forwards / (1 + len(drafts)) < drafted.forwards < plain.forwards


def test_a_chain_drafts_what_a_full_forward_predicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every output reads the tokens ahead that belong to its position, except rejected drafts."""
    model, original, forward = model_of(CHAIN, "after", "after_next"), Drafts._draft, tfkit.CachedModel.__call__
    results: list[Any] = []
    compared = 0

    def call(self: tfkit.CachedModel, *args: Any, **options: Any) -> Any:
        results.append(forward(self, *args, **options))
        return results[-1]

    def draft(self: Drafts, count: int) -> list[Tensor]:
        nonlocal compared
        result, n, tokens = original(self, count), self.cached.used, self._tokens
        logits = results[len(results) - count :]
        for i in range(count):
            read_ahead = torch.cat((tokens, result[0][:, None]), dim=1)[:, 2:] if i else torch.zeros_like(tokens[:, 1:])
            outputs = model(tokens[:, :n], after=tokens[:, 1:], after_next=read_ahead)
            torch.testing.assert_close(logits[i][:, -1], outputs[1 + i][:, -1])
            compared += 1
        return result

    monkeypatch.setattr(tfkit.CachedModel, "__call__", call)
    monkeypatch.setattr(Drafts, "_draft", draft)
    tfkit.generate(model, [PROMPTS[2]], max_new_tokens=15, drafts=["second", "third"], temperature=2.0)
    assert compared > 20


def counting(right: bool) -> fx.GraphModule:
    """A model that counts. If not `right`, the further outputs predict the next token again."""
    model = model_of(HEADS)
    with torch.no_grad():
        for parameter in model.get_submodule("decoder").layers.parameters():
            parameter.zero_()
        for name, value in (("weight", 1.0), ("bias", 0.0)):
            model.get_parameter(f"decoder.final_norm.{name}").fill_(value)
        model.get_parameter("embedding.tokens.weight").copy_(torch.eye(11, 16))
        for shift, name in enumerate(("logits", "second", "third"), start=1):
            model.get_parameter(f"{name}.output.weight").copy_(torch.eye(11, 16).roll(shift if right else 1, dims=0))
    return model


@pytest.mark.parametrize(("drafts", "new", "forwards"), [(1, 9, 5), (1, 10, 6), (2, 10, 4), (2, 11, 5), (2, 12, 5)])
def test_accepted_drafts_save_forwards(drafts: int, new: int, forwards: int) -> None:
    result = tfkit.generate(counting(True), [[3]], max_new_tokens=new, drafts=["second", "third"][:drafts])
    assert result.rows() == [[(4 + i) % 11 for i in range(new)]]
    assert result.forwards == forwards


def test_rejected_drafts_cost_no_token() -> None:
    result = tfkit.generate(counting(False), [[3]], max_new_tokens=10, drafts=["second", "third"])
    assert result.rows() == [[(4 + i) % 11 for i in range(10)]]
    assert result.forwards == 10


def test_rejected_drafts_leave_no_keys() -> None:
    """After `rewind`, a cache continues as if the tokens had never been read."""
    model = model_of(HEADS)
    tokens = torch.tensor([[5, 9, 2, 4, 1, 7, 3], [1, 1, 8, 4, 6, 2, 3]])
    plain = tfkit.CachedModel(model, output="logits")
    plain(tokens[:, :4])
    cached = tfkit.CachedModel(model, output="logits")
    cached(tokens[:, :4])
    cached(torch.tensor([[10, 10, 9], [8, 7, 7]]))
    cached.rewind(3)
    assert cached.used == 4
    torch.testing.assert_close(cached(tokens[:, 4:]), plain(tokens[:, 4:]))


@pytest.mark.parametrize(
    ("attention", "options", "message"),
    [
        ({}, {"drafts": ["logits"]}, "`drafts` must be further outputs of `drafted`, second, third; got `logits`"),
        ({}, {"drafts": ["fourth"]}, "`drafts` must be further outputs"),
        ({}, {"drafts": ["second"], "compile": True}, "`drafts` cannot be combined with `compile`"),
        (
            {"mask": {"left": 2, "right": 0}},
            {"drafts": ["second"]},
            "`decoder` has a sliding window of 3 tokens, whose",
        ),
    ],
)
def test_refusals(attention: dict[str, Any], options: dict[str, Any], message: str) -> None:
    model = model_of({**HEADS, "decoder": {**STACK, "attention": {**ATTENTION, **attention}}})
    with pytest.raises(ValueError, match=message):
        tfkit.generate(model, [[3, 5]], max_new_tokens=8, **options)


def test_an_output_of_its_tokens_alone_is_refused() -> None:
    stack = {"block": "decoder", "n_layers": 1, "attention": {"n_heads": 2}, "ffn": {"kind": "relu", "d_ff": 8}}
    graph = {
        "embedding": {"block": "embedding", "input": "tokens"},
        "decoder": {**stack, "input": "embedding"},
        "logits": {"block": "lm_head", "input": "decoder"},
        "table": {"block": "embedding", "input": "tokens"},
        "later": {"block": "lm_head", "input": "table"},
    }
    fields = {"tfkit": 1, "name": "apart", "d_model": 8, "vocab_size": 13, "inputs": ["tokens"], "graph": graph}
    model = tfkit.build({**fields, "outputs": ["logits", "later"]})
    with pytest.raises(ValueError, match="`later` cannot draft: it depends on no hidden state of `logits`"):
        tfkit.generate(model, [[3, 7]], max_new_tokens=4, drafts=["later"])


def test_an_output_that_needs_later_tokens_first_is_refused() -> None:
    model = model_of(CHAIN, "after", "after_next")
    with pytest.raises(ValueError, match="`third` takes `after_next`, tokens that are not drafted before it"):
        tfkit.generate(model, [[3, 5]], max_new_tokens=8, drafts=["third"])


def test_a_state_cannot_go_back() -> None:
    layers = {"block": "decoder", "n_layers": 1, "mixer": "gated_conv", "ffn": {"kind": "gelu", "d_ff": 24}}
    with pytest.raises(ValueError, match="`decoder` has a state, which cannot go back to an earlier token"):
        tfkit.generate(model_of({**HEADS, "decoder": layers}), [[3, 5]], max_new_tokens=8, drafts=["second"])


def test_an_ended_row_rejects_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row ends with its first token. The drafts of the second row are right, so it takes 5 forwards."""
    original = Drafts._draft

    def draft(self: Drafts, count: int) -> list[Tensor]:
        return [torch.stack((tokens[0] * 0, tokens[1])) for tokens in original(self, count)]

    monkeypatch.setattr(Drafts, "_draft", draft)
    result = tfkit.generate(counting(True), [[3], [5]], max_new_tokens=9, stop=[4], drafts=["second"])
    assert result.rows() == [[4], [6, 7, 8, 9, 10, 0, 1, 2, 3]]
    assert result.forwards == 5
