"""The checks find what they are for: each of these components breaks one promise, and is told so."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import tfkit
from tfkit.components.attention import MultiHeadConfig
from tfkit.nn import Context
from tfkit.testing import check_cached_step, check_capture, check_component, check_model, example_inputs

PLUGINS = tfkit.load_plugins(entry_points=False)
TINY_GPT2 = ["d_model=16", "vocab_size=13", "max_len=32"]
TINY_GPT2 += [f"graph.decoder.{one}" for one in ("n_layers=1", "attention.n_heads=2", "ffn.d_ff=24")]
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
    check_component(kind, slot="attention", fields={"dropout": 0.2}, plugins=PLUGINS)


def test_an_unknown_kind_or_slot() -> None:
    with pytest.raises(ValueError, match="no kind `nothing` in slot `ffn`"):
        check_component("nothing", slot="ffn", plugins=PLUGINS)
    with pytest.raises(ValueError, match="slots: activation, attention"):
        check_component("gelu", plugins=PLUGINS)
    with pytest.raises(ValueError, match="slot `block` has no small model"):
        check_component("encoder", slot="block", plugins=PLUGINS)


# ---- components that are wrong, each in one way ----


class Wrong(nn.Module):
    """Every promise kept, so that a subclass can break one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(16))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.weight


class LooksAhead(Wrong):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x.roll(-1, dims=1)) * self.weight


class LeaksItsGradient(Wrong):
    """The values of later tokens cancel, and their gradients do not."""

    def forward(self, x: Tensor) -> Tensor:
        later = x.roll(-1, dims=1)
        return (torch.tanh(x) + later - later.detach()) * self.weight


class CountsTheLength(Wrong):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.weight * x.size(1)


class Unfilled(Wrong):
    def reset_parameters(self) -> None:
        pass


class HiddenState(Wrong):
    """A random direction that no state dict carries."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.direction = torch.rand(16).tolist()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.weight + torch.tensor(self.direction, dtype=x.dtype)


class Upcasts(Wrong):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x.float()) * self.weight.float()


class Unused(Wrong):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class NaNGradient(Wrong):
    """The root of a square: finite, and without a gradient at zero."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 0 * self.weight).square().sum(-1, keepdim=True).sqrt() + x


class DoesNotScript(Wrong):
    def forward(self, x: Tensor, **unused: Tensor) -> Tensor:
        return torch.tanh(x) * self.weight


class BreaksTheGraph(Wrong):
    def forward(self, x: Tensor) -> Tensor:
        if bool(self.weight.sum() > 0):
            return torch.tanh(x) * self.weight
        return x


class FFNConfig(tfkit.FFNConfig):
    """Builds the module class that stands in `wrong`."""

    kind: Literal["wrong"] = "wrong"
    wrong: str

    def build(self, make: tfkit.Make) -> nn.Module:
        return {one.__name__: one for one in (Wrong, *Wrong.__subclasses__())}[self.wrong]()


BROKEN = {
    LooksAhead: "outputs before 1 change by",
    LeaksItsGradient: "has a gradient of .* to later tokens",
    CountsTheLength: "padding on the right changes",
    Unfilled: "`stack.layers.0.ffn.weight` is not filled",
    HiddenState: "the state dict misses something",
    Upcasts: "a model of torch.bfloat16 fails: mixed dtype",
    Unused: "`stack.layers.0.ffn.weight` gets no gradient",
    NaNGradient: "the gradient of .* is not finite",
    DoesNotScript: "variable number of arguments",
    BreaksTheGraph: "[Dd]ata-dependent|Could not guard",
}


def test_the_right_one_passes() -> None:
    check_component(FFNConfig, fields={"wrong": "Wrong"})


@pytest.mark.parametrize("wrong", BROKEN, ids=lambda one: one.__name__)
def test_a_broken_promise_is_named(wrong: type[nn.Module]) -> None:
    within = "decoder" if wrong in (LooksAhead, LeaksItsGradient) else "encoder"
    with pytest.raises(Exception, match=BROKEN[wrong]):
        check_component(FFNConfig, fields={"wrong": wrong.__name__}, within=[within])


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


class WholeConfig(MultiHeadConfig):
    """Says that it needs its sequence as a whole."""

    kind: Literal["whole"] = "whole"  # type: ignore[assignment]

    @property
    def kept(self) -> None:  # type: ignore[override]
        return None


def test_what_is_kept_is_checked() -> None:
    with pytest.raises(AssertionError, match=r"^read in uneven pieces, columns 3 to 3 differ from the whole by"):
        check_component(ForgetfulConfig, within=["decoder"])


def test_attention_may_need_the_whole() -> None:
    check_component(WholeConfig, within=["decoder"])


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
    wanted = {
        "left": [[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1]],
        "right": [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]],
        "rows": [[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]],
    }
    assert inputs.keys() == {"source", "target", "source_mask", "target_mask"}
    assert inputs["source_mask"].int().tolist() == wanted[padding]


def test_check_model_takes_any_graph() -> None:
    check_model(tfkit.load("gpt2", sets=TINY_GPT2), causal="tokens")
