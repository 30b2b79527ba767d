"""The loss in unusual training loops: half precision, compiled, copied; and its errors."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import tfkit
from tfkit.learning.chunked_loss import ChunkedLoss
from tfkit.learning.loss import Loss, loss

from .models import build, gradients, inputs_of
from .test_loss import LEFT, assert_same, next_token_loss, plain, targets_of

# ---- precision ----


@pytest.mark.parametrize("name", ["gpt2", "llama_7b", "t5_small"])
def test_under_autocast_it_is_that_of_autocast(name: str) -> None:
    model, inputs = build(name), inputs_of(name)
    with torch.autocast("cpu", torch.bfloat16):
        actual, expected = loss(model, inputs, chunks=4), next_token_loss(model, inputs)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)
    ours, theirs = gradients(model, actual), gradients(model, expected)
    for path in theirs:
        assert ours[path].dtype == torch.float32
        torch.testing.assert_close(ours[path], theirs[path], atol=0.02 * float(theirs[path].abs().max()), rtol=0)


def distance(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_many_pieces_keep_their_digits(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(4, 512, bias=False).to(dtype)
    rows = torch.randn(4096, 4, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(512, (4096,), generator=generator)
    exact = copy.deepcopy(head).double()
    true = rows.detach().double().requires_grad_()
    expected = plain(exact(true), targets)
    (expected * 1024).backward()
    total = ChunkedLoss(head, {}, {})(rows, targets, 64)
    (total / 4096 * 1024).backward()  # 1024: what a gradient scaler does against underflow
    assert total.dtype == torch.float32
    assert distance(total.detach() / 4096, expected.detach()) < 1e-5
    assert head.weight.grad.dtype == rows.grad.dtype == dtype
    assert distance(head.weight.grad, exact.weight.grad) < 0.004
    assert distance(rows.grad, true.grad) < 0.01


def test_double_precision_stays_double() -> None:
    model, inputs = build("gpt2").double(), inputs_of("gpt2")
    actual = loss(model, inputs, chunks=4)
    assert actual.dtype == torch.float64
    assert_same(model, actual, next_token_loss(model, inputs), atol=1e-14)


# ---- as a module ----

# Dynamo makes an object of every autograd function that it traces, and torch deprecates that.
traced = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@traced
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2, scale and softcap", "llama_7b, bias"])
def test_it_is_compiled_whole(name: str) -> None:
    model, inputs = build(name, "decoder.n_layers=1"), inputs_of(name)
    torch.compiler.reset()
    built = torch.compile(Loss(model, chunks=3), backend="aot_eager", fullgraph=True)
    assert_same(model, built(inputs), next_token_loss(model, inputs))
    with torch.no_grad():
        torch.testing.assert_close(built(inputs), next_token_loss(model, inputs))


@traced
@pytest.mark.slow
def test_it_is_compiled_once_for_all_lengths() -> None:
    model, counter = build("gpt2", "decoder.n_layers=1"), CompileCounter()
    torch.compiler.reset()
    built = torch.compile(Loss(model, chunks=3), backend=counter, dynamic=True, fullgraph=True)
    for batch, length in ((2, 7), (3, 9), (5, 4)):
        inputs = inputs_of("gpt2", batch=batch, length=length)
        assert_same(model, built(inputs), next_token_loss(model, inputs))
    assert counter.frame_count == 1


@traced
@pytest.mark.slow
def test_a_function_around_it_can_be_compiled() -> None:
    model, inputs = build("gpt2", "decoder.n_layers=1"), inputs_of("gpt2")
    torch.compiler.reset()
    compiled = torch.compile(lambda tokens: loss(model, tokens, chunks=3), backend="eager")
    assert_same(model, compiled(inputs["tokens"]), next_token_loss(model, inputs))


class Both(nn.Module):
    """A model, and its loss."""

    def __init__(self, *, loss_first: bool) -> None:
        super().__init__()
        model = build("gpt2", "decoder.n_layers=1")
        for name in ("loss", "model", "other") if loss_first else ("model", "loss", "other"):
            self.add_module(name, model if name == "model" else Loss(model))


@pytest.mark.parametrize("loss_first", [True, False])
def test_beside_its_model_it_adds_nothing_to_the_state_dict(loss_first: bool) -> None:
    module, alone = Both(loss_first=loss_first), build("gpt2", "decoder.n_layers=1").state_dict()
    assert sorted(module.state_dict()) == sorted(f"model.{name}" for name in alone)
    assert sorted(copy.deepcopy(module).state_dict()) == sorted(module.state_dict())
    assert sorted(module.loss.state_dict()) == sorted(f"model.{name}" for name in alone)


@pytest.mark.parametrize("loss_first", [True, False])
@pytest.mark.parametrize("prefixes", [["model."], ["loss.model."], ["model.", "loss.model.", "other.model."]])
def test_any_place_of_a_model_is_enough_to_load_it(loss_first: bool, prefixes: list[str]) -> None:
    module, alone = Both(loss_first=loss_first), build("gpt2", "decoder.n_layers=1").state_dict()
    state = {prefix + name: torch.full_like(value, 0.5) for prefix in prefixes for name, value in alone.items()}
    module.load_state_dict(state)
    assert all((parameter == 0.5).all() for parameter in module.parameters())
    for left in (list(state)[1:], []):
        with pytest.raises(RuntimeError, match="Missing key"):
            module.load_state_dict({name: state[name] for name in left if len(prefixes) == 1})


# ---- what it reads ----


def test_an_encoder_decoder_is_told_the_call_that_was_meant() -> None:
    model, inputs = Loss(build("t5_small")), inputs_of("t5_small")
    call = "loss({'source': source, 'target': target}"
    with pytest.raises(TypeError, match=re.escape(f"takes source, target: pass them by name, `{call})`")):
        model(inputs["source"])
    for name in ("targets", "labels"):
        with pytest.raises(TypeError, match=re.escape(f"`{name}` is not an input: targets come after the inputs")):
            model({**inputs, name: inputs["target"]})
    assert model(inputs, inputs["target"]) > 0


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (
            "text",
            None,
            "the inputs of a loss must be tokens [b, t], or all inputs by name, `loss({'tokens': tokens})`; got 'text'",
        ),
        (
            {"token": torch.zeros(1, 2)},
            None,
            "the model has no argument `token`: an argument with a similar name is `tokens`",
        ),
        ({}, None, "`gpt2` needs `tokens`"),
        (torch.zeros(1, 2), None, "`tokens` must be token ids [b, t] of 64 or 32 bits; got torch.float32 [1, 2]"),
        (torch.tensor([[0, 99]]), None, "99 is not a token id of this model: `tokens` may be 0 to 22"),
        (
            torch.tensor([[0, 1]]),
            torch.rand(1, 2),
            "targets must be a tensor of ids, which are integers; got torch.float32",
        ),
        (
            torch.tensor([[0, 1]]),
            torch.tensor([[0, 23]]),
            "targets must be ids of the vocabulary, from 0 to 22",
        ),
        (torch.tensor([[0, 1]]), [[0, 1]], "targets must be a tensor of ids, which are integers; got a list"),
    ],
)
def test_what_it_cannot_read(inputs: Any, targets: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        Loss(build("gpt2"))(inputs, targets)


def test_a_copy_has_parameters_of_its_own() -> None:
    model, inputs = Loss(build("gpt2"), chunks=2), inputs_of("gpt2")
    other = copy.deepcopy(model)
    other(inputs).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        other.model.embedding.tokens.weight.mul_(2)
    assert not torch.equal(model(inputs), other(inputs))


def test_a_layer_that_was_put_in_afterwards_is_the_one_that_runs() -> None:
    model, inputs = build("gpt2"), inputs_of("gpt2")
    built = Loss(model, chunks=2)
    model.decoder = build("gpt2", "decoder.n_layers=1").decoder
    model.logits = build("gpt2, bias").logits
    nn.init.normal_(model.logits.output.bias)
    assert_same(model, built(inputs), next_token_loss(model, inputs))


def test_it_runs_an_edited_graph() -> None:
    model, inputs = build("gpt2"), inputs_of("gpt2")
    decoder = next(iter(model.graph.find_nodes(op="call_module", target="decoder")))
    with model.graph.inserting_after(decoder):
        doubled = model.graph.call_function(torch.mul, (decoder, 2))
    decoder.replace_all_uses_with(doubled, delete_user_cb=lambda user: user is not doubled)
    model.recompile()
    assert_same(model, loss(model, inputs, chunks=2), next_token_loss(model, inputs))


# ---- what it refuses ----

HEAD = "tfkit: 1\nname: test\nd_model: 16\nvocab_size: 23\n"
STACK = "n_layers: 1, attention: {kind: mha, n_heads: 2}, ffn: {kind: relu, d_ff: 24}"


def loaded(text: str) -> torch.fx.GraphModule:
    return tfkit.build(tfkit.loads(HEAD + text))


def test_the_next_token_of_a_model_that_has_read_it() -> None:
    prefix = f"""
inputs: {{tokens: tokens, n: lengths}}
graph: {{embedding: {{block: embedding, input: tokens}}, decoder: {{block: decoder, prefix: n, {STACK}}},
  logits: {{block: lm_head}}}}"""
    lengths = {"n": torch.tensor([1, 2, 3])}
    for model, inputs in ((build("bert_base"), inputs_of("gpt2")), (loaded(prefix), inputs_of("gpt2") | lengths)):
        with pytest.raises(ValueError, match="targets are missing: the model may attend to the next tokens"):
            loss(model, inputs)
        assert_same(model, loss(model, inputs, targets_of()), plain(model(**inputs), targets_of()))


def test_the_next_token_of_the_second_output_that_has_read_it() -> None:
    model = loaded(f"""
outputs: [logits, classes]
graph: {{embedding: {{block: embedding}}, decoder: {{block: decoder, {STACK}}}, logits: {{block: lm_head}},
  encoder: {{block: encoder, input: embedding, {STACK}}}, classes: {{block: lm_head}}}}""")
    with pytest.raises(ValueError, match="targets are missing: the model may attend to the next tokens"):
        loss(model, inputs_of("gpt2"), outputs={"logits": 1.0, "classes": 1.0})


def test_targets_of_another_shape() -> None:
    with pytest.raises(
        ValueError, match=re.escape("targets must have the shape (3, 7), one for each position of the head; got (3, 6)")
    ):
        loss(build("gpt2"), inputs_of("gpt2"), torch.zeros(3, 6, dtype=torch.long))


def test_models_without_one_head() -> None:
    graph = (
        f"graph: {{embedding: {{block: embedding}}, decoder: {{block: decoder, {STACK}}}, logits: {{block: lm_head}}}}"
    )
    with pytest.raises(ValueError, match="`test` returns logits, decoder: the loss must name its outputs"):
        Loss(loaded("outputs: [logits, decoder]\n" + graph))
    with pytest.raises(
        ValueError, match="`test` returns a sequence of width 16, but a loss must be computed from logits"
    ):
        Loss(loaded("outputs: [decoder]\n" + graph.replace(", logits: {block: lm_head}", "")))


def test_modules_that_are_not_the_model() -> None:
    model = build("gpt2")
    with pytest.raises(ValueError, match=r"was not built by `tfkit\.build`, .* it is Linear"):
        Loss(nn.Linear(2, 2))
    for other in (torch.compile(model), nn.DataParallel(model), Loss(model)):
        with pytest.raises(ValueError, match=f"; got {type(other).__name__}"):
            Loss(other)  # type: ignore[arg-type]


def test_a_graph_that_does_not_end_in_its_head() -> None:
    model = build("gpt2")
    output = next(iter(model.graph.find_nodes(op="output")))
    with model.graph.inserting_before(output):
        output.args = (model.graph.call_function(torch.mul, (output.args[0], 2)),)
    model.recompile()
    with pytest.raises(ValueError, match="the model's graph was edited: it no longer ends in `logits`"):
        Loss(model)


@pytest.mark.parametrize(("options", "text"), [({"chunks": 0}, "got 0"), ({"reduction": "none"}, "got 'none'")])
def test_arguments_out_of_their_range(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        loss(build("gpt2"), inputs_of("gpt2"), **options)  # type: ignore[arg-type]


def test_a_second_derivative() -> None:
    model, inputs = build("gpt2"), {**inputs_of("gpt2"), "tokens_mask": LEFT}
    with pytest.raises(RuntimeError, match="the loss in chunks has no second derivative"):
        torch.autograd.grad(loss(model, inputs), list(model.parameters()), create_graph=True)
