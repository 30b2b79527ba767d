"""Ablation, patching and steering: equal to hooks of torch, in a forward, a backward and each step of `generate`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import tfkit

from .test_trace import TOKENS, built, n_hooks

OTHER_TOKENS = (TOKENS + 3) % 11
STREAM, HEADS, WEIGHTS = (f"decoder.layers.0.{name}" for name in ("stream.out", "attention.heads", "attention.weights"))


Change = Callable[[Tensor], Tensor]


@contextmanager
def hooked(model: fx.GraphModule, path: str, change: Change, *, before: bool = False) -> Iterator[None]:
    """Change the output of a module, or its first argument, by a hook of torch."""
    module = model.get_submodule(path)
    handle = (
        module.register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:]))
        if before
        else module.register_forward_hook(lambda _m, _args, output: change(output))
    )
    with handle:
        yield


def zero(index: Any, new: Any = 0.0) -> Change:
    def change(value: Tensor) -> Tensor:
        value = value.clone()
        value[index] = new
        return value

    return change


def keeping(values: list[Tensor]) -> Change:
    def keep(value: Tensor) -> Tensor:
        values.append(value)
        return value

    return keep


@pytest.mark.parametrize(
    ("name", "path", "before", "index"),
    [
        ("ffn.out", "ffn", False, ...),
        ("attention.heads.1", "attention.core", False, (slice(None), 1)),
        ("ffn.hidden.17", "ffn.down", True, (..., 17)),
    ],
)  # fmt: skip
def test_ablation_equals_plain_hooks(name: str, path: str, before: bool, index: Any) -> None:
    model, name = built(), f"decoder.layers.1.{name}"
    with hooked(model, f"decoder.layers.1.{path}", zero(index), before=before):
        expected = model(TOKENS)
    with tfkit.ablate(model, name):
        assert torch.equal(model(TOKENS), expected)
    with tfkit.trace(model, read=name) as values:
        for tokens in (TOKENS, OTHER_TOKENS):
            model(tokens)
    full = name.rpartition(".")[0] if name[-1].isdigit() else name
    with tfkit.trace(model, read=full) as references:
        for tokens in (TOKENS, OTHER_TOKENS):
            model(tokens)
    reference = torch.cat(references[full])
    mean = reference.mean((0, 2) if reference.dim() == 4 else (0, 1), keepdim=True)
    change = zero(index, mean.expand_as(reference[:2])[index])
    with hooked(model, f"decoder.layers.1.{path}", change, before=before):
        expected = model(TOKENS)
    with tfkit.ablate(model, name, mean=values):
        torch.testing.assert_close(model(TOKENS), expected)
    assert n_hooks(model) == 0


def test_heads_and_neurons_are_read_and_get_gradients() -> None:
    model, heads, hidden = built(), "decoder.layers.0.attention.heads", "decoder.layers.*.ffn.hidden"
    with tfkit.trace(model, read=[heads, f"{heads}.*", f"{hidden}.3", hidden]) as values:
        loss = model(TOKENS)[..., 1].sum()
    assert torch.equal(torch.stack([values[f"{heads}.{head}"] for head in (0, 1)], dim=1), values[heads])
    name = "decoder.layers.1.ffn.hidden"
    assert torch.equal(values[f"{name}.3"], values[name][..., 3])
    neuron, neurons = torch.autograd.grad(loss, [values[f"{name}.3"], values[name]])
    assert torch.equal(neuron, neurons[..., 3])
    assert neuron.any()


@pytest.mark.parametrize("positions", [None, 2, [1, -1]])
def test_a_patch_equals_plain_hooks(positions: Any) -> None:
    model = built()
    index = (slice(None), slice(None) if positions is None else positions)
    streams: list[Tensor] = []
    with hooked(model, "decoder.layers.0", keeping(streams)):
        of_other = model(OTHER_TOKENS)
    with hooked(model, "decoder.layers.0", zero(index, streams[0][index])):
        expected = model(TOKENS)
    with tfkit.patch(model, STREAM, OTHER_TOKENS, positions=positions):
        output = model(TOKENS)
    assert torch.equal(output, expected)
    assert torch.equal(output, of_other) == (positions is None)
    with (
        tfkit.patch(model, STREAM, {"tokens": OTHER_TOKENS}, positions=positions),
        tfkit.trace(model, read=STREAM) as values,
    ):
        model(TOKENS)
    assert torch.equal(values[STREAM], zero(index, streams[0][index])(values_of(model, TOKENS)))


def test_a_pattern_patches_each_value_that_it_matches() -> None:
    model, names = built(), [f"decoder.layers.{layer}.attention.out" for layer in (0, 1)]
    outputs = []
    for name in ("decoder.layers.*.attention.out", names, names[0], names[1]):
        with tfkit.patch(model, name, OTHER_TOKENS):
            outputs.append(model(TOKENS))
    assert torch.equal(outputs[0], outputs[1])
    assert not any(torch.equal(outputs[0], output) for output in outputs[2:])


def values_of(model: fx.GraphModule, tokens: Tensor) -> Tensor:
    with tfkit.trace(model, read=STREAM) as values:
        model(tokens)
    return values[STREAM]


def test_steering_equals_plain_hooks_and_trains_its_vector() -> None:
    model, vector = built(), torch.randn(16, requires_grad=True)
    gradients = []
    with hooked(model, "decoder.layers.0", zero((slice(None), [0, 4]))):  # shows that hooks outside still run
        for context in (
            hooked(model, "decoder.layers.0", lambda x: x + vector * torch.eye(6)[2, :, None]),
            tfkit.steer(model, STREAM, vector, positions=2),
        ):
            with context:
                gradients.append(torch.autograd.grad(model(TOKENS)[..., 1].sum(), vector)[0])
    torch.testing.assert_close(*gradients)
    with tfkit.steer(model, "decoder.layers.0.ffn.hidden.3", torch.tensor(2.0)):
        steered = model(TOKENS)
    with hooked(model, "decoder.layers.0.ffn.down", lambda x: x + 2 * torch.eye(24)[3], before=True):
        torch.testing.assert_close(model(TOKENS), steered)


@pytest.mark.parametrize("masked", [False, True])
def test_each_step_of_generate_is_changed(masked: bool) -> None:
    """Decoding with caches gives the logits of a forward of the entire sequence in the same context."""
    model, vector, prompt = built(), torch.randn(16), OTHER_TOKENS[:, :4]
    mask = torch.ones_like(prompt, dtype=torch.bool)
    mask[0, :2] = not masked
    contexts: dict[str, Callable[[], Any]] = {
        "ablate": lambda: tfkit.ablate(model, "decoder.layers.1.attention.heads.0"),
        "ablate at": lambda: tfkit.ablate(model, "decoder.layers.0.ffn.out", positions=[1, 5]),
        "patch": lambda: tfkit.patch(model, "decoder.layers.*.ffn.out", TOKENS[:, :6]),
        "patch at": lambda: tfkit.patch(model, "decoder.layers.0.attention.out", TOKENS[:, :6], positions=[3, 4]),
        "steer": lambda: tfkit.steer(model, STREAM, vector, positions=[2, 5]),
    }
    for name, context in contexts.items():
        with context():
            cached = tfkit.CachedModel(model, length=8)
            steps = [cached(prompt, mask), *(cached(TOKENS[:, [n]]) for n in (4, 5))]
            full = torch.cat([prompt, TOKENS[:, 4:6]], dim=1)
            full_mask = torch.cat([mask, torch.ones(2, 2, dtype=torch.bool)], dim=1)
            with torch.no_grad():
                expected = model(full, tokens_mask=full_mask)
        torch.testing.assert_close(torch.cat(steps, dim=1)[full_mask], expected[full_mask], msg=name)
    with tfkit.steer(model, STREAM, vector, positions=-1), tfkit.trace(model, read=STREAM) as values:
        generated = tfkit.generate(model, prompt[:1], max_new_tokens=3)
    tokens = torch.cat([prompt[:1], generated.tokens[:, :2]], dim=1)
    with hooked(model, "decoder.layers.0", lambda x: x + vector * (torch.arange(6) > 2)[:, None]):
        expected = values_of(model, tokens)
    torch.testing.assert_close(torch.cat(values[STREAM], dim=1), expected)
    assert n_hooks(model) == 0


def test_a_patch_of_keys_is_an_error_where_slots_are_not_positions() -> None:
    model = built()
    patch = tfkit.patch(model, "decoder.layers.0.attention.k", TOKENS[:1, :4])
    with pytest.raises(ValueError, match=r"k` must be written by a function when a model reads step by step"), patch:
        tfkit.generate(model, OTHER_TOKENS[:1, :4], max_new_tokens=2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: tfkit.ablate(m, "decoder.layers.0.atention.heads.1"), "exists: `decoder.layers.*.attention.heads`"),
        (lambda m: tfkit.ablate(m, f"{HEADS}.2"), f"the number after `{HEADS}` must be less than 2; got 2"),
        (lambda m: tfkit.ablate(m, STREAM, mean={}), f"`mean` must contain `{STREAM}`"),
        (lambda m: tfkit.ablate(m, STREAM, mean={STREAM: []}), "with the sizes [b, t, 16]; got an empty list"),
        (lambda m: tfkit.ablate(m, STREAM, mean={STREAM: torch.ones(1, 6, 3)}), "sizes [b, t, 16]; got [1, 6, 3]"),
        (lambda m: tfkit.ablate(m, WEIGHTS, mean={WEIGHTS: torch.ones(1, 2, 6, 6)}), f"`{WEIGHTS}` has no mean"),
        (lambda m: tfkit.patch(m, "decoder.layers.0.stream.on", OTHER_TOKENS), "exists: `decoder.layers.*.stream.in`"),
        (lambda m: tfkit.patch(m, STREAM, OTHER_TOKENS[:, :5]), "float32 [2, 6, 16]; got torch.float32 [2, 5, 16]"),
        (lambda m: tfkit.steer(m, STREAM, torch.ones(2, 16)), f"the vector for `{STREAM}` must be [16]; got [2, 16]"),
        (lambda m: tfkit.steer(m, "decoder.layers.0.ffn.hidden.3", torch.ones(24)), "must be []; got [24]"),
        (lambda m: tfkit.steer(m, STREAM, torch.ones(16), positions=[3, 6]), f"`{STREAM}` has no positions [6] in the"),
        (lambda m: tfkit.steer(m, "decoder", torch.ones(16), positions=1), "`decoder` cannot be written at positions"),
        (lambda m: tfkit.ablate(m, []), "`names` must contain the name of a value"),
        (lambda m: tfkit.ablate(m, STREAM, positions=[]), "`positions` must contain a position"),
        (lambda m: tfkit.trace(m, read=STREAM, positions=1), "`positions` has no effect without `write`"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_an_error(call: Callable[[fx.GraphModule], Any], message: str) -> None:
    model = built()
    with pytest.raises(ValueError, match=re.escape(message)), call(model):
        model(TOKENS)
    assert n_hooks(model) == 0


def test_a_layer_that_runs_several_times_cannot_be_patched() -> None:
    model = built("decoder.layers={groups: 1, order: looped}")
    with pytest.raises(ValueError, match=f"`{STREAM}` cannot be patched: its layer runs 2 times"):
        tfkit.patch(model, STREAM, OTHER_TOKENS)
