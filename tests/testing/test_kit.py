"""Each of these components violates a guarantee, and the checks report it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import tfkit
from tfkit.components.attention import MultiHeadConfig
from tfkit.nn import Context
from tfkit.plugin.registry import class_location
from tfkit.testing import (
    check_alone,
    check_cached_step,
    check_capture,
    check_component,
    check_dtype,
    check_filled,
    check_model,
    check_state_dict,
    example_inputs,
    small_spec,
)
from tfkit.tools.check.components import with_component

from ..sampling import chosen
from .wrong import (
    BreaksTheGraph,
    Broadcasts,
    ChangesItsInput,
    CountsTheLength,
    DoesNotScript,
    DoesNotScriptInTheMiddle,
    Fails,
    FFNConfig,
    HiddenState,
    IsRandom,
    KeepsATensor,
    LeaksItsGradient,
    LooksAhead,
    LooksBack,
    LosesItsBuffer,
    MixesTheBatch,
    NaNGradient,
    Unfilled,
    Unused,
    Upcasts,
    Wrong,
    kinds_of,
)

PLUGINS = tfkit.load_plugins(entry_points=False)
TINY_GPT2 = ["d_model=16", "vocab_size=13", "max_len=32"]
TINY_GPT2 += [f"graph.decoder.{field}" for field in ("n_layers=1", "attention.n_heads=2", "ffn.d_ff=24")]
FIELDS: dict[str, dict[str, object]] = {
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0},
    "proportional": {"width": 4},
}
BUILT_IN = [(slot, k) for slot in ("activation", "init", "rope_scaling") for k in PLUGINS.registry.kinds(slot)]


@pytest.mark.slow
@pytest.mark.parametrize(("slot", "kind"), BUILT_IN)
def test_built_in_components_pass(slot: str, kind: str) -> None:
    check_component(kind, slot=slot, fields=FIELDS.get(kind), within=["decoder"], plugins=PLUGINS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLUGINS.registry.kinds("attention"))
def test_built_in_attention_passes_everywhere(kind: str) -> None:
    """Each kind is captured in `components/test_matrix.py`, and exported in `tools/export`; here, one is."""
    level = "full" if kind == "gqa" else "quick"
    check_component(kind, slot="attention", fields={"dropout": 0.2}, plugins=PLUGINS, level=level)


def test_an_unknown_kind_or_slot() -> None:
    with pytest.raises(ValueError, match="no kind `nothing` in slot `ffn`"):
        check_component("nothing", slot="ffn", plugins=PLUGINS)
    with pytest.raises(ValueError, match="pass the slot of the kind, one of activation, attention"):
        check_component("gelu", plugins=PLUGINS)
    with pytest.raises(ValueError, match="slot `block` cannot be checked alone"):
        check_component("encoder", slot="block", plugins=PLUGINS)


# ---- components that are wrong, each in one way ----


NAME = f"ffn kind `wrong`, {class_location(FFNConfig)},"
HEADLINE = f"{NAME} breaks a guarantee"
FFN = "ffn kind `wrong`, `stack.layers.0.ffn`, "
WEIGHT = "`stack.layers.0.ffn.weight` "
STEPS = "`stack.layers.0.ffn.steps` "
BROKEN: dict[type[nn.Module], list[str]] = {
    Broadcasts: [
        "building",
        "ffn kind `wrong` returns [2, 3, 1] instead of [2, 3, 16]: the shape of its input",
    ],
    ChangesItsInput: ["building", "ffn kind `wrong` changes its input in place"],
    LooksAhead: ["position-wise", f"{FFN}looks ahead: positions change by"],
    LooksBack: ["position-wise", f"{FFN}looks back: positions change by"],
    CountsTheLength: ["position-wise", f"{FFN}depends on the number of positions: among fewer, they change"],
    MixesTheBatch: ["position-wise", f"{FFN}mixes the rows of a batch: alone, one changes by"],
    IsRandom: ["eval-mode", "stack.layers.0.ffn: something is random in eval mode: two forwards differ by"],
    LosesItsBuffer: ["weights", f"{STEPS}is not filled when the model is built"],
    Unfilled: ["weights", f"{WEIGHT}is not filled when the model is built"],
    HiddenState: ["state-dict", "stack.layers.0.ffn: the state dict is incomplete: the model that loads it differs"],
    Upcasts: [
        "types",
        "a model of torch.bfloat16 fails: ffn kind `wrong` returns float32 for bfloat16: it must keep the type",
    ],
    Fails: ["forward", "the forward of ffn kind `wrong` fails, in `stack.layers.0.ffn`: RuntimeError: "],
    Unused: ["gradients", f"{WEIGHT}gets no gradient: nothing uses it"],
    DoesNotScript: ["script", "stack.layers.0.ffn: ffn kind `wrong` cannot be scripted by TorchScript: "],
    DoesNotScriptInTheMiddle: [
        "script",
        "stack.layers.0.ffn: ffn kind `wrong` cannot be scripted by TorchScript: ",  # and torch's reason
    ],
    BreaksTheGraph: ["capture", "torch.compile does not capture the entire model: "],
}


@pytest.mark.parametrize(
    ("check", "invalid", "words"),
    [
        (check_filled, Unfilled, "is not filled"),
        (check_state_dict, HiddenState, "the state dict is incomplete"),
        (lambda graph: check_dtype(graph, torch.bfloat16), Upcasts, "returns float32 for bfloat16"),
        (lambda graph: check_alone(tfkit.build(graph), example_inputs(graph)), LooksBack, "looks back"),
    ],
)
def test_one_property_of_any_model(check: Callable[[tfkit.Graph], None], invalid: type[nn.Module], words: str) -> None:
    plugins = with_component(PLUGINS, FFNConfig)
    right, broken = (
        tfkit.load(small_spec("encoder", FFNConfig, {"kind": "wrong", "wrong": name}), plugins=plugins)
        for name in ("Wrong", invalid.__name__)
    )
    check(right)
    with pytest.raises(AssertionError, match=words):
        check(broken)


def findings(invalid: type[nn.Module], within: Literal["encoder", "decoder"] = "encoder", only: str = "") -> list[str]:
    """The lines of the error, the first one first."""
    with pytest.raises(AssertionError) as caught:
        check_component(FFNConfig, fields={"wrong": invalid.__name__}, within=[within], only=only.split())
    return str(caught.value).splitlines()


def test_a_failure_shows_only_the_test() -> None:
    plugins = with_component(PLUGINS, FFNConfig)
    graph = tfkit.load(small_spec("encoder", FFNConfig, {"kind": "wrong", "wrong": "Unfilled"}), plugins=plugins)
    checks: list[Callable[[], None]] = [
        partial(check_component, FFNConfig, fields={"wrong": "Unfilled"}, within=["encoder"], only=["weights"]),
        partial(check_model, graph, plugins=plugins, only=["weights"]),
        partial(check_filled, graph),
    ]
    for check in checks:
        with pytest.raises(AssertionError, match="is not filled") as caught:
            check()
        assert [entry.name for entry in caught.traceback.filter(caught)] == ["test_a_failure_shows_only_the_test"]


def test_the_right_one_passes() -> None:
    check_component(FFNConfig, fields={"wrong": "Wrong"}, within=["decoder"])


@pytest.mark.parametrize(
    "invalid", chosen(BROKEN, BROKEN.keys() - {DoesNotScript, BreaksTheGraph}), ids=lambda value: value.__name__
)
def test_a_broken_promise_is_named(invalid: type[nn.Module]) -> None:
    promise, text = BROKEN[invalid]
    first, line = findings(invalid, only=promise)
    assert first == HEADLINE
    assert line.startswith(f"- {promise}, in an encoder: {text}")


def test_a_gradient_to_later_tokens_is_named() -> None:
    first, line = findings(LeaksItsGradient, "decoder", only="look-ahead-gradient")
    assert first == HEADLINE
    text = r"- look-ahead-gradient, in a decoder: the model looks ahead: output \d has a gradient of \S+ to later"
    assert re.match(text, line)


def test_a_gradient_that_is_not_finite_is_named() -> None:
    _, *lines = findings(NaNGradient, only="gradients")
    assert any(line.startswith("- gradients, in an encoder: the gradient of ") for line in lines)


def test_a_tensor_that_is_no_buffer_is_named() -> None:
    _, *lines = findings(KeepsATensor, only="weights")
    assert lines[0] == (
        f"- weights, in an encoder: {STEPS}is neither parameter nor buffer: it has no values once the model has memory"
    )


def test_all_broken_promises_are_named_with_the_models_that_break_them() -> None:
    with pytest.raises(AssertionError) as caught:
        check_component(
            FFNConfig, fields={"wrong": "TwoFaults"}, within=["encoder", "decoder"], only=["types", "gradients"]
        )
    first, types, gradients = str(caught.value).splitlines()
    assert first == f"{NAME} breaks 2 guarantees"
    assert types.startswith("- types, in an encoder and a decoder: a model of torch.bfloat16 fails: ffn kind `wrong` ")
    unused = "each of `stack.layers.0.ffn.spare`, `stack.layers.0.ffn.other` gets no gradient: nothing uses it"
    assert gradients == f"- gradients, in an encoder and a decoder: {unused}"


class IdleConfig(tfkit.FFNConfig):
    """A field that nothing reads, beside one that `build` reads."""

    kind: Literal["idle"] = "idle"
    scale: float = 1.0
    wrong: str = "Wrong"

    def build(self, make: tfkit.Make) -> nn.Module:
        return kinds_of(Wrong)[self.wrong]()


def test_a_field_without_effect_is_named() -> None:
    with pytest.raises(AssertionError, match=r"- fields, in an encoder: ffn kind `idle` never reads its field `sc"):
        check_component(IdleConfig, within=["encoder"], only=["fields"])


class NoLiteral(FFNConfig):
    kind: str = "plain"  # type: ignore[assignment]


def test_a_kind_that_is_no_literal_is_named() -> None:
    with pytest.raises(TypeError, match=r"`NoLiteral.kind` must be a Literal of one name: write `kind: Literal"):
        check_component(NoLiteral)


# ---- attention that is wrong when sequences come in pieces ----


class Forgets(nn.Module):
    """Attention that keeps nothing."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.attention(x, Context(context.mask, context.rotary, context.memory, None))


class ForgetfulConfig(MultiHeadConfig):
    """Says what it keeps, and keeps nothing."""

    kind: Literal["forgetful"] = "forgetful"  # type: ignore[assignment]

    def build(self, make: tfkit.Make, *, d_memory: int | None, causal: bool) -> nn.Module:
        return Forgets(super().build(make, d_memory=d_memory, causal=causal))


class FullSequenceConfig(MultiHeadConfig):
    """Says that it needs full sequences."""

    kind: Literal["full_sequence"] = "full_sequence"  # type: ignore[assignment]

    @property
    def cached(self) -> None:
        return None


def test_what_is_kept_is_checked() -> None:
    with pytest.raises(AssertionError, match=r"- cached, in a decoder: read in uneven steps, column 3 "):
        check_component(ForgetfulConfig, within=["decoder"], only=["cached"])


def test_attention_may_need_full_sequences() -> None:
    check_component(FullSequenceConfig, within=["decoder"], only=["cached", "types"])


def test_properties_that_are_chosen_must_apply() -> None:
    with pytest.raises(AssertionError) as raised:
        check_component(FullSequenceConfig, within=["decoder"], only=["cached", "cached-step"])
    first, *reasons = str(raised.value).splitlines()
    assert first.startswith("no property in `only` applies to attention kind `full_sequence`, ")
    assert [reason.partition(": ")[0] for reason in reasons] == ["- cached", "- cached-step"]


@pytest.mark.slow
def test_a_capture_for_each_token_is_told() -> None:
    class Counts(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls * 0

    graph = tfkit.load("gpt2", sets=TINY_GPT2)
    model = tfkit.build(graph).eval()
    model.get_submodule("decoder.layers.0").ffn = Counts()
    with pytest.raises(AssertionError, match=r"the step of one token was captured \d+ times"):
        check_cached_step(model, example_inputs(graph, length=8))


def test_a_capture_for_each_length_is_told() -> None:
    class ByLength(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return tokens + 1 if tokens.size(1) < 6 else tokens + 1.0

    model = torch.fx.GraphModule(nn.Module(), torch.fx.symbolic_trace(nn.Identity()).graph)
    model.graph.find_nodes(op="placeholder")[0].target = "tokens"
    model.forward = ByLength().forward
    calls = [{"tokens": torch.zeros(2, n)} for n in (5, 8)]
    with pytest.raises(AssertionError, match="captured 2 times for 2 lengths"):
        check_capture(model, *calls)


# ---- the small things ----


@pytest.mark.parametrize("padding", ["left", "right", "rows"])
def test_example_inputs_hide_what_they_say(padding: Literal["left", "right", "rows"]) -> None:
    graph = tfkit.load("vaswani_base", sets=["d_model=16"])
    inputs = example_inputs(graph, batch=3, length=4, padding=padding)
    expected = {
        "left": [[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1]],
        "right": [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]],
        "rows": [[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]],
    }
    assert inputs.keys() == {"source", "target", "source_mask", "target_mask"}
    assert inputs["source_mask"].int().tolist() == expected[padding]


@pytest.mark.slow
def test_check_model_takes_any_graph() -> None:
    check_model(tfkit.load("gpt2", sets=TINY_GPT2))


def test_mistaken_calls_are_told() -> None:
    calls: dict[str, Callable[[], None]] = {
        "`component` of `check_component` must be a kind or a config class; got 5": lambda: check_component(5),  # type: ignore[arg-type]
        "`slot` is missing: pass the slot of the kind, one of activation, attention, ": lambda: check_component(
            "swiglu"
        ),
        "there is no kind `nope` in slot `ffn`; slots: ": lambda: check_component("nope", slot="ffn"),
        "`level` of `check_model` must be one of 'quick', 'full'; got 'ful': a similar one is 'full'": lambda: (
            check_model(
                "gpt2",
                level="ful",  # type: ignore[arg-type]
            )
        ),
    }
    for message, call in calls.items():
        with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
            call()


def test_check_model_reads_a_spec(tmp_path: Path) -> None:
    decoder = "{n_layers: 1, attention: {n_heads: 2}}"
    (tmp_path / "x.yaml").write_text(f"extends: gpt2\nd_model: 16\nvocab_size: 11\ngraph: {{decoder: {decoder}}}\n")
    check_model(tmp_path / "x.yaml", only=["forward"])
