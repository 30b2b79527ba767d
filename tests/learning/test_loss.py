"""The loss in chunks, compared with `F.cross_entropy` of all logits: equal values and equal gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import tfkit
from tests.sampling import slow
from tfkit.learning.chunked_loss import MAX_ROWS, MIN_LOGITS, TARGET_CHUNKS, chunk_count
from tfkit.learning.loss import Loss, loss

from ..sampling import some
from .models import NEXT_TOKEN, SPECS, VOCABULARY, build, gradients, inputs_of

RIGHT = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0]]).bool()
LEFT = RIGHT.flip(1)


def targets_of(seed: int = 9, shape: tuple[int, ...] = (3, 7)) -> Tensor:
    """Targets at two positions of three, as in masked language models."""
    generator = torch.Generator().manual_seed(seed)
    actual = torch.randint(VOCABULARY, shape, generator=generator)
    return actual.masked_fill(torch.rand(shape, generator=generator) < 1 / 3, -100)


def plain(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), **options)


def next_token_loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The usual form: the last input predicts itself, one token ahead."""
    *_, tokens = inputs.values()
    return plain(model(**inputs)[:, :-1], tokens[:, 1:])


def assert_same(model: nn.Module, actual: Tensor, expected: Tensor, atol: float = 1e-6) -> None:
    """Both losses, and their gradients with respect to every parameter."""
    torch.testing.assert_close(actual, expected, atol=atol, rtol=1e-6)
    ours, theirs = gradients(model, actual), gradients(model, expected)
    assert list(ours) == list(theirs)
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


# ---- every head ----


@pytest.mark.parametrize("chunks", [slow(1), 4, slow(100), None])
@pytest.mark.parametrize("name", NEXT_TOKEN)
def test_the_next_token(name: str, chunks: int | None) -> None:
    model, inputs = build(name), inputs_of(name)
    assert_same(model, loss(model, inputs, chunks=chunks), next_token_loss(model, inputs))


@pytest.mark.parametrize("name", SPECS)
def test_given_targets(name: str) -> None:
    model, inputs, targets = build(name), inputs_of(name), targets_of()
    assert_same(model, loss(model, inputs, targets, chunks=4), plain(model(**inputs), targets))


@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}, {"ignore_index": 3}, {"reduction": "sum"}])
def test_the_options_are_those_of_torch(options: dict[str, Any]) -> None:
    model, inputs = build("gpt2"), inputs_of("gpt2")
    targets = targets_of().clamp(min=3)
    assert int(targets.max()) > 3
    expected = plain(model(**inputs), targets, **options)
    assert_same(model, loss(model, inputs, targets, chunks=4, **options), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "bert_base"])
def test_z_loss_is_the_square_of_the_log_of_the_sum(name: str) -> None:
    model, inputs, targets = build(name), inputs_of(name), targets_of()
    logits = model(**inputs)
    squares = logits.exp().sum(-1).log()[targets != -100] ** 2
    expected = plain(logits, targets, label_smoothing=0.1) + 0.3 * squares.mean()
    assert_same(model, loss(model, inputs, targets, chunks=4, label_smoothing=0.1, z_loss=0.3), expected)


def test_a_head_that_reads_one_vector_for_a_sequence() -> None:
    text = """
    {tfkit: 1, name: sorting, d_model: 16, vocab_size: 23, graph: {
      embedding: {block: embedding},
      encoder: {block: encoder, n_layers: 1, attention: {kind: mha, n_heads: 2}, ffn: {kind: relu, d_ff: 24}},
      pooler: {block: pooler, select: mean}, classes: {block: classifier, n_classes: 5}}}"""
    model, targets = tfkit.build(tfkit.loads(text)), torch.tensor([4, 0, -100])
    inputs = {**inputs_of("gpt2"), "tokens_mask": RIGHT}
    assert_same(model, loss(model, inputs, targets, chunks=2), plain(model(**inputs), targets))


def test_one_tensor_is_the_first_input() -> None:
    model, inputs = build("gpt2"), inputs_of("gpt2")
    assert torch.equal(loss(model, inputs["tokens"]), loss(model, inputs))
    assert torch.equal(loss(model, inputs["tokens"].int()), loss(model, inputs))


def test_where_no_position_counts_a_step_changes_nothing() -> None:
    """Torch says NaN, with gradients that spoil every weight; of batches in turn, or beside others, it counts for 0."""
    model, inputs = build("gpt2"), inputs_of("gpt2")
    nothing = torch.full((3, 7), -100)
    assert plain(model(**inputs), nothing).isnan()
    actual = loss(model, inputs, nothing)
    assert actual == 0
    assert all(not gradient.any() for gradient in gradients(model, actual).values())


def test_a_token_alone_has_no_next_one() -> None:
    model = build("gpt2")
    with pytest.raises(ValueError, match="there is nothing to predict: a sequence must have at least two tokens"):
        loss(model, torch.zeros(2, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="there is nothing to predict"):
        loss(model, torch.zeros(2, 0, dtype=torch.long))
    assert loss(model, torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1, dtype=torch.long)) > 0


# ---- padding ----


@pytest.mark.parametrize("mask", [LEFT, RIGHT])
@pytest.mark.parametrize("name", ["gpt2", "t5_small"])
def test_what_the_mask_hides_does_not_count(name: str, mask: Tensor) -> None:
    model, inputs = build(name), inputs_of(name)
    *_, last = inputs
    expected = [
        next_token_loss(model, {key: value[row : row + 1, mask[row]] for key, value in inputs.items()}) * (real - 1)
        for row, real in enumerate(mask.sum(dim=1).tolist())
        if real > 1
    ]
    masks = {f"{key}_mask": mask for key in inputs}
    actual = loss(model, {**inputs, **masks}, chunks=4)
    assert_same(model, actual, sum(expected) / (mask.sum() - 3))
    targets = inputs[last].roll(-1, dims=1)
    hidden = targets.masked_fill(~mask, -100)
    assert_same(model, loss(model, {**inputs, **masks}, targets, chunks=4), plain(model(**inputs, **masks), hidden))


def test_the_first_token_of_a_document_is_no_target() -> None:
    """The mask of pairs is lower triangular: a token does not attend to the next token."""
    model, inputs = build("gpt2"), inputs_of("gpt2")
    documents = torch.tensor([[0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 2, 2]])
    pairs = (documents[:, :, None] == documents[:, None, :]).tril()
    targets = F.pad(inputs["tokens"][:, 1:], (0, 1), value=-100)
    targets[:, :-1][documents[:, 1:] != documents[:, :-1]] = -100
    masked = {**inputs, "tokens_mask": pairs}
    assert_same(model, loss(model, masked, chunks=4), plain(model(**masked), targets))


def test_a_mask_that_the_model_makes_itself() -> None:
    text = """
    {tfkit: 1, name: two, d_model: 16, vocab_size: 23, inputs: [a, b], graph: {
      one: {block: embedding, input: a}, two: {block: embedding, input: b}, both: {block: concat, inputs: [one, two]},
      encoder: {block: encoder, n_layers: 1, attention: {kind: mha, n_heads: 2}, ffn: {kind: relu, d_ff: 24}},
      logits: {block: lm_head}}}"""
    model, tokens = tfkit.build(tfkit.loads(text)), inputs_of("gpt2")["tokens"]
    inputs, targets = {"a": tokens, "b": tokens, "b_mask": RIGHT}, targets_of(shape=(3, 14))
    hidden = targets.masked_fill(~torch.cat((torch.ones_like(RIGHT), RIGHT), dim=1), -100)
    assert_same(model, loss(model, inputs, targets, chunks=3), plain(model(**inputs), hidden))


# ---- what it costs ----


class Largest(TorchDispatchMode):
    """The size of the largest tensor that an operator gave."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for output in result if isinstance(result, tuple | list) else [result]:
            self.largest = max(self.largest, output.numel() if isinstance(output, Tensor) else 0)
        return result


def test_the_logits_are_never_there_as_a_whole() -> None:
    model, inputs = build("llama_7b"), inputs_of("llama_7b", batch=8, length=16)
    with Largest() as of_all:
        next_token_loss(model, inputs).backward()
    with Largest() as of_pieces:
        loss(model, inputs, chunks=16).backward()
    rest = 2 * 8 * 2 * 16 * 24  # activations of the layers, which are wider than this small vocabulary
    assert of_all.largest >= 8 * 16 * VOCABULARY
    assert of_pieces.largest <= rest
    model.zero_grad()
    wide = build("llama_7b", "vocab_size=5000")
    with Largest() as of_pieces:
        loss(wide, inputs, chunks=16).backward()
    assert of_pieces.largest == 5000 * 16  # the gradient of the head, or 8 rows of logits: 5000 * 8


@pytest.mark.parametrize("name", some(["gpt2", "llama_7b", "t5_small"], 1))
def test_nothing_is_computed_twice(name: str) -> None:
    model, inputs = build(name), inputs_of(name)
    counts = []
    for compute_loss in (next_token_loss, lambda model, inputs: loss(model, inputs, chunks=4)):
        with FlopCounterMode(display=False) as counter:
            compute_loss(model, inputs).backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]


def test_the_number_of_pieces() -> None:
    assert chunk_count(2048, 65) == 1
    assert chunk_count(8192, 50257) == TARGET_CHUNKS
    assert chunk_count(2048, 128_256) == TARGET_CHUNKS
    assert chunk_count(16 * MAX_ROWS, 128_256) == 16
    assert chunk_count(3, 2 * MIN_LOGITS) == 3
    assert chunk_count(0, 65) == 1


# ---- what is learned ----


@pytest.mark.parametrize("name", ["gpt2", "llama_7b", "bert_base"])
@pytest.mark.parametrize("frozen", ["logits", "embedding", "coder"])
def test_frozen_parameters_have_no_gradient_and_the_others_theirs(name: str, frozen: str) -> None:
    model, inputs, targets = build(name), inputs_of(name), targets_of()
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in path)
    assert_same(model, loss(model, inputs, targets, chunks=4), plain(model(**inputs), targets))


def test_without_gradients_there_is_only_the_value() -> None:
    model, inputs = build("gpt2"), inputs_of("gpt2")
    expected = loss(model, inputs, chunks=4)
    with torch.no_grad():
        assert torch.equal(loss(model, inputs, chunks=4), expected)
    with torch.inference_mode():
        assert torch.equal(loss(model, inputs, chunks=4), expected)
    model.requires_grad_(False)
    actual = loss(model, inputs, chunks=4)
    assert torch.equal(actual, expected)
    assert not actual.requires_grad


def test_dropout_draws_the_same_numbers() -> None:
    model, inputs = build("gpt2", "dropout=0.2").train(), inputs_of("gpt2")
    torch.manual_seed(0)
    actual = loss(model, inputs, chunks=4)
    torch.manual_seed(0)
    assert_same(model, actual, next_token_loss(model, inputs))
    torch.manual_seed(0)
    assert not torch.equal(actual, loss(model.eval(), inputs, chunks=4))


def test_gradients_of_several_batches_add_up() -> None:
    model, inputs = build("gpt2"), inputs_of("gpt2")
    expected = gradients(model, loss(model, inputs, targets_of()))
    built, count = Loss(model, reduction="sum", chunks=2), (targets_of() != -100).sum()
    for row in range(3):
        part = built(inputs["tokens"][row : row + 1], targets_of()[row : row + 1])
        (part / count).backward()
    torch.testing.assert_close({n: p.grad for n, p in model.named_parameters()}, expected, atol=1e-6, rtol=0)


def test_the_loss_may_be_scaled_added_to_and_run_back_twice() -> None:
    model, inputs = build("gpt2"), inputs_of("gpt2")

    def total(loss: Tensor) -> Tensor:
        return 5 * loss + model.decoder.layers[0].attention.project.qkv.weight.square().sum()

    actual = total(loss(model, inputs, chunks=4))
    actual.backward(retain_graph=True)
    first = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    assert_same(model, actual, total(next_token_loss(model, inputs)), atol=3e-6)
    expected = gradients(model, total(next_token_loss(model, inputs)))
    torch.testing.assert_close(first, expected, atol=3e-6, rtol=0)


def test_a_hook_of_a_parameter_sees_its_gradient_once() -> None:
    for name in ("gpt2", "llama_7b"):
        model, inputs = build(name), inputs_of(name)
        expected, records = gradients(model, next_token_loss(model, inputs)), []
        path = "embedding.tokens.weight" if name == "gpt2" else "logits.output.weight"
        model.get_parameter(path).register_hook(
            lambda gradient, records=records: records.append(gradient) or 2 * gradient
        )
        actual = gradients(model, loss(model, inputs, chunks=4))
        assert len(records) == 1
        torch.testing.assert_close(actual[path], 2 * expected[path], atol=2e-6, rtol=0)


def test_layers_that_are_computed_twice_to_save_memory() -> None:
    spec, sets = SPECS["gpt2"]
    model, inputs = tfkit.build(spec, sets=[*sets, "dropout=0.2"], recompute=True), inputs_of("gpt2")
    torch.manual_seed(0)
    actual = loss(model, inputs, chunks=4)
    torch.manual_seed(0)
    assert_same(model, actual, next_token_loss(model, inputs))


# ---- loops: nodes that call one module, with a loss at each ----

LOOPS: dict[str, Any] = {
    "tfkit": 1,
    "name": "loops",
    "d_model": 16,
    "vocab_size": VOCABULARY,
    "outputs": ["logits_1", "logits_2", "logits_3"],
    "graph": {
        "embedding": "embedding",
        "loop_1": {
            "block": "decoder",
            "n_layers": 2,
            "attention": {"kind": "mha", "n_heads": 4, "position": "rope"},
            "ffn": {"kind": "gelu", "d_ff": 24},
            "final_norm": False,
        },
        "logits_1": {"block": "lm_head", "bias": True},
        "loop_2": {"same": "loop_1", "input": "loop_1"},
        "logits_2": {"same": "logits_1"},
        "loop_3": {"same": "loop_1", "input": "loop_2"},
        "logits_3": {"same": "logits_1"},
    },
}


def test_a_loss_at_each_loop_is_that_of_a_loop() -> None:
    model, tokens = tfkit.build(LOOPS, seed=1), torch.randint(VOCABULARY, (3, 7))
    weights = {"logits_1": 0.2, "logits_2": 0.3, "logits_3": 0.5}
    x, expected = model.embedding(tokens), torch.zeros(())
    for weight in weights.values():
        x = model.loop_1(x)
        expected = expected + weight * plain(model.logits_1(x)[:, :-1], tokens[:, 1:])
    assert_same(model, Loss(model, outputs=weights)(tokens), expected)
    last = Loss(model, outputs={"logits_3": 1.0})(tokens)
    looped = {**LOOPS["graph"]["loop_1"], "n_layers": 6, "layers": {"groups": 2, "order": "looped"}}
    graph = {"embedding": "embedding", "loop_1": looped, "logits_1": LOOPS["graph"]["logits_1"]}
    other = tfkit.build({**LOOPS, "outputs": ["logits_1"], "graph": graph})
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(Loss(other)(tokens), last)
