"""`tfkit.component`: a component alone equals the same component in a model, for every kind; and its errors."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import tfkit
from tfkit.building.component import component
from tfkit.component import AttentionConfig, Component
from tfkit.tools.check.components import Layout, models_of, required_values, with_component

from ..sampling import some
from ..spec.texts import failure

ROOT = Path(__file__).parents[2]
PLUGINS = tfkit.load_plugins(plugin_dirs=sorted(ROOT.glob("plugins/tfkit-*")), entry_points=False)
MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1], [1, 0, 1, 1, 0]]).bool()
SIDES = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1], [0, 1, 1, 1, 0]]).bool()
DOCUMENTS = torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)).bool().expand(3, 5, 5)
SOURCE_MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 1, 1]]).bool()
NAMES = {"encoder": "an encoder", "decoder": "a decoder", "memory": "a decoder with a memory"}


def kinds(slot: str) -> list[type[Component]]:
    return [entry.config for entry in PLUGINS.registry.kinds(slot).values()]


def cases() -> Iterator[Any]:
    layouts: tuple[Layout, ...] = ("encoder", "decoder")
    for slot in ("attention", "ffn", "mixer"):
        for config in kinds(slot):
            if config.kind_name() == "value_residual":
                continue  # it needs the values of an earlier layer
            for layout in layouts if slot == "attention" and config.causal else layouts[:1]:
                yield pytest.param(slot, config, layout, {}, id=f"{slot}-{config.kind_name()}-{layout}")
            if issubclass(config, AttentionConfig) and config.takes_memory and not config.chooses_keys:
                yield pytest.param("cross_attention", config, "memory", {}, id=f"cross_attention-{config.kind_name()}")
    (mha,) = (config for config in kinds("attention") if config.kind_name() == "mha")
    for position in ("rope", "alibi", "t5", {"kind": "t5", "shared": False}, "disentangled"):
        for layout in layouts:
            yield pytest.param("attention", mha, layout, {"position": position}, id=f"{position}-{layout}")


def keys_of(config: Component) -> dict[str, Any]:
    """The mapping of a config, as a spec writes it."""
    return config.model_dump(serialize_as_any=True)


@contextmanager
def inputs_of(*modules: nn.Module) -> Iterator[list[Tensor]]:
    """Record the first argument of each module."""
    inputs: list[Tensor] = []
    handles = [module.register_forward_pre_hook(lambda _, args: inputs.append(args[0])) for module in modules]
    yield inputs
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize(("slot", "config", "layout", "keys"), some(cases(), 20))
def test_a_sublayer_equals_the_sublayer_of_a_model(
    slot: str, config: type[Component], layout: Layout, keys: dict[str, Any]
) -> None:
    """The difference of the residual stream before and after the sublayer is what the component returns."""
    graph = models_of(config, PLUGINS, options={}, within=(layout,), fields=keys or None)[NAMES[layout]].graph
    model: Any = tfkit.build(graph, seed=3).eval()
    (step,) = [step for step in graph.node("stack").stack.layers[0].steps if step.role == slot]
    layer, sequence = model.stack.layers[0], "target" if layout == "memory" else "tokens"
    options: dict[str, Any] = {"causal": True} if layout == "decoder" else {}
    options |= {"d_memory": 16} if slot == "cross_attention" else {}
    alone: Any = tfkit.component(slot, **keys_of(step.config), **options, plugins=PLUGINS).eval()
    alone.get_submodule(slot).layers[0].load_state_dict(
        {f"{slot}.{name}": value for name, value in layer.get_submodule(slot).state_dict().items()}
    )
    if slot == "attention":
        alone.attention.shared.load_state_dict(model.stack.shared.state_dict())
    names = [name for name, _ in layer.named_children() if name.endswith("_norm_in")]
    before = layer.get_submodule(f"{slot}_norm_in")
    following = [*map(layer.get_submodule, names), model.stack.final_norm]
    torch.manual_seed(5)
    for mask in (None, SIDES if keys else MASK, DOCUMENTS):
        inputs = {sequence: torch.randint(0, 11, (3, 5)), **({} if mask is None else {f"{sequence}_mask": mask})}
        wires: dict[str, Tensor] = {}
        if layout == "memory":
            inputs |= {"source": torch.randint(0, 11, (3, 4)), "source_mask": SOURCE_MASK}
            wires = {"memory": model.source_embedding(inputs["source"]), "memory_mask": SOURCE_MASK}
        if config.takes_features:
            wires["layer_features"] = model.features(inputs["tokens"])
        with inputs_of(before, following[names.index(f"{slot}_norm_in") + 1]) as streams, torch.no_grad():
            model(**inputs)
            x, result = streams
            y = alone(before(x), **wires, mask=mask)
        tokens = torch.ones_like(MASK) if mask is None or mask.dim() == 3 else mask
        torch.testing.assert_close(y[tokens], (result - x)[tokens], rtol=1e-5, atol=1e-5)
        assert y[tokens].abs().max() > 1e-3


@pytest.mark.parametrize("config", kinds("norm"), ids=lambda config: config.kind_name())
def test_a_norm_equals_the_norm_of_a_model(config: type[Component]) -> None:
    graph = models_of(config, PLUGINS, options={}, within=("encoder",))["an encoder"].graph
    model: Any = tfkit.build(graph, seed=3).eval()
    part = graph.node("stack").config.norm
    norm = tfkit.component("norm", width=16, **keys_of(part), plugins=PLUGINS)
    for parameter in model.stack.layers[0].attention_norm_in.parameters():
        nn.init.normal_(parameter)
    state = model.stack.layers[0].attention_norm_in.state_dict()
    (norm.get_submodule("norm.layers.0.ffn_norm_after") if part.takes_condition else norm).load_state_dict(state)
    x, time = torch.randn(3, 5, 16), torch.randn(3, 8)
    arguments = (x, time) if part.takes_condition else (x,)
    inputs = {"tokens": torch.randint(0, 11, (3, 5)), **({"time": time} if part.takes_condition else {})}
    results: list[Tensor] = []
    module = model.stack.layers[0].attention_norm_in
    module.register_forward_pre_hook(lambda _, args: (x, *args[1:]))
    module.register_forward_hook(lambda _, args, output: results.append(output))
    model(**inputs)
    torch.testing.assert_close(norm(*arguments), results[0], rtol=0, atol=0)
    assert not torch.equal(results[0], x)


@pytest.mark.parametrize("config", kinds("activation"), ids=lambda config: config.kind_name())
def test_an_activation_takes_any_shape(config: type[Component]) -> None:
    keys = required_values(config)
    activation = tfkit.component("activation", kind=config.kind_name(), **keys, plugins=PLUGINS)
    for x in (torch.linspace(-2, 1, 7), torch.linspace(-3, 1, 120).view(2, 3, 4, 5)):
        assert activation(x).shape == x.shape
        assert not torch.equal(activation(x), x)


# ---- what users do with it ----


def attention(**keys: Any) -> Any:
    return tfkit.component("attention", **{"kind": "gqa", "d_model": 24, "n_heads": 6, "n_kv_heads": 2, **keys})


@pytest.mark.slow
def test_it_is_a_module_that_trains_and_can_be_copied_pickled_and_scripted() -> None:
    module = attention(position={"kind": "rope", "theta": 500.0}, causal=True)
    x = torch.randn(3, 5, 24)
    expected = module(x, mask=SIDES)
    with pytest.warns(UserWarning, match="TorchScript type system"):  # fx annotates attributes of the module
        scripted = torch.jit.script(module)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), scripted):
        assert torch.equal(copied(x, mask=SIDES), expected)
    expected.square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in module.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(("slot", "config", "layout", "keys"), list(cases()))
def test_each_kind_can_be_scripted(slot: str, config: type[Component], layout: Layout, keys: dict[str, Any]) -> None:
    graph = models_of(config, PLUGINS, options={}, within=(layout,), fields=keys or None)[NAMES[layout]].graph
    (step,) = [step for step in graph.node("stack").stack.layers[0].steps if step.role == slot]
    options = {"causal": True} if layout == "decoder" else {}
    alone = tfkit.component(slot, **keys_of(step.config), **options, plugins=PLUGINS).eval()
    x = [torch.randn(3, 5, 16), *[torch.randn(3, 4, 16)] * (slot == "cross_attention")]
    x += [torch.randn(3, 5, 8)] * config.takes_features
    with pytest.warns(UserWarning, match="TorchScript type system"):  # fx annotates attributes of the module
        scripted = torch.jit.script(alone)
    torch.testing.assert_close(scripted(*x, mask=SIDES), alone(*x, mask=SIDES))


def test_causal() -> None:
    """A later token changes earlier outputs only without `causal`, and without a causal `mask`."""
    x, changed = torch.randn(2, 5, 24), None
    changed = x.clone()
    changed[:, 4] += 1
    for keys, expected in (({}, False), ({"causal": True}, True), ({"mask": {"left": 3, "right": 0}}, True)):
        module = attention(**keys)
        assert torch.equal(module(x)[:, :4], module(changed)[:, :4]) is expected


def test_a_word_and_arithmetic_are_as_in_a_spec() -> None:
    module = attention(position="rope", scale="d_model ** -0.5", qk_norm={"kind": "rmsnorm", "eps": 1e-3})
    assert module.attention.layers[0].attention.core.scale == pytest.approx(24**-0.5)
    assert module.attention.layers[0].attention.q_norm.eps == 1e-3


def test_weights_come_from_the_seed_and_the_initialization() -> None:
    weight = "attention.layers.0.attention.output.weight"
    first, same, differs = (attention(seed=seed).state_dict()[weight] for seed in (7, 7, 8))
    assert torch.equal(first, same)
    assert not torch.equal(first, differs)
    wide = attention(seed=7, init={"kind": "normal", "std": 3.0}).state_dict()[weight]
    assert 2 < wide.std() < 4
    assert first.std() < 1


def test_it_cannot_be_saved_with_the_spec_of_a_different_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"was not built by `tfkit\.build`"):
        tfkit.save(attention(), tmp_path / "model")


def test_dtype_and_device() -> None:
    assert {p.dtype for p in attention(dtype="bfloat16").parameters()} == {torch.bfloat16}
    assert {p.device.type for p in attention(device="meta").parameters()} == {"meta"}
    assert tfkit.component("norm", kind="rmsnorm", width=6, dtype=torch.float64).weight.dtype == torch.float64


def test_the_mask_is_checked_as_the_mask_of_a_model() -> None:
    module = attention()
    with pytest.raises(ValueError, match="mask is not bool or 0 and 1"):
        module(torch.randn(3, 5, 24), mask=torch.full((3, 5), -1.5))


class ShiftConfig(tfkit.FFNConfig):
    """An FFN whose build fails if `fails` is set."""

    kind: Literal["shift"] = "shift"
    by: float
    fails: bool = False

    def build(self, make: tfkit.Make) -> nn.Module:
        if self.fails:
            raise KeyError("no such table")
        return Shift(self.by)


class ScaledConfig(tfkit.FFNConfig):
    """An FFN that depends on the condition of its stack."""

    kind: Literal["scaled"] = "scaled"
    takes_condition = takes_context = True

    def build(self, make: tfkit.Make) -> nn.Module:
        return Scaled()


class Scaled(nn.Module):
    def forward(self, x: Tensor, context: tfkit.Context) -> Tensor:
        condition = context.condition
        assert condition is not None
        return x * condition[:, None]


class Shift(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


def test_a_kind_that_is_not_installed() -> None:
    plugins = with_component(PLUGINS, ShiftConfig)
    x = torch.randn(2, 3, 8)
    assert torch.equal(tfkit.component("ffn", kind="shift", d_model=8, by=2.5, plugins=plugins)(x), x + 2.5)
    keys = {"kind": "shift", "d_model": 8, "by": 2.5, "fails": True}
    error = failure(lambda: tfkit.component("ffn", **keys, plugins=plugins))
    assert [(d.path, d.message) for d in error.diagnostics] == [("ffn", "ffn kind `shift` failed in `build`")]
    assert isinstance(error.__cause__, KeyError), "the traceback shows the line of the plugin"


def test_a_sublayer_with_a_condition() -> None:
    scaled = tfkit.component("ffn", kind="scaled", d_model=8, plugins=with_component(PLUGINS, ScaledConfig))
    x, condition = torch.randn(2, 3, 8), torch.randn(2, 8)
    assert torch.equal(scaled(x, condition), x * condition[:, None])
    assert torch.equal(scaled(x, condition=condition, mask=MASK[:2, :3]), x * condition[:, None])


@pytest.mark.parametrize(
    ("slot", "keys", "path", "message"),
    [
        ("attention", {"kind": "gqqa", "d_model": 8}, "attention.kind", "unknown attention kind `gqqa`"),
        (
            "attention",
            {"d_model": 8, "n_heads": 5},
            "attention.n_heads",
            "d_model (8) must be a multiple of n_heads (5)",
        ),
        ("ffn", {"kind": "gelu", "d_model": 8, "d_ff": 9, "dff": 3}, "ffn.dff", "unknown key `dff`"),
        ("norm", {"kind": "rmsnorm", "width": 8, "eps": [1]}, "norm.eps", "`eps` must be a number above 0; got a list"),
        ("norm", {"kind": "rmsnorm", "width": 8, "init": "fan"}, "init.kind", "unknown init kind `fan`"),
        (
            "ffn",
            {"kind": "gelu", "d_model": 8, "d_ff": torch},
            "ffn.d_ff",
            "a module is not a value that a spec can have",
        ),
        (
            "cross_attention",
            {"d_model": 24, "n_heads": 6, "position": "rope"},
            "cross_attention.position",
            "cross-attention has no positions: queries and keys count in two different sequences",
        ),
        (
            "attention",
            {"d_model": 24, "n_heads": 6, "kv_from": "first"},
            "attention",
            "`attention` of layer 0 takes `first.keys`, but no earlier layer gives it",
        ),
        (
            "attention",
            {"d_model": 24, "n_heads": 6, "kv_name": "first"},
            "attention",
            "`attention` gives `first.keys`, which has no effect: no later layer takes it",
        ),
    ],
)
def test_errors_have_the_path_of_the_key(slot: str, keys: dict[str, Any], path: str, message: str) -> None:
    error = failure(lambda: tfkit.component(slot, **keys))
    assert [(d.path, d.message) for d in error.diagnostics] == [(path, message)]


@pytest.mark.parametrize(
    ("slot", "keys", "message"),
    [
        ("ffn", {"kind": "gelu", "causal": True}, "`causal` of `component` has no effect on this ffn"),
        ("attention", {"n_heads": 6, "width": 8}, "`width` of `component` has no effect on this attention"),
        ("attention", {"n_heads": 6, "d_memory": 8}, "`d_memory` of `component` has no effect on this attention"),
        ("attention", {"causal": True, "mask": {"left": 2}}, "`causal` of `component` has no effect on this attention"),
        ("norm", {"kind": "rmsnorm"}, "`width` of `component` is missing: norm needs it"),
        ("attention", {"n_heads": 6}, "`d_model` of `component` is missing: attention needs it"),
        ("position", {"kind": "rope"}, "`slot` of `component` must be .*'activation'.*; got 'position'"),
        ("atention", {}, "a similar one is 'attention'"),
    ],
)
def test_arguments_without_effect(slot: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tfkit.component(slot, **keys)


class SeededConfig(ShiftConfig):
    """An FFN with a key that is also an argument of `component`."""

    kind: Literal["seeded"] = "seeded"  # type: ignore[assignment]
    seed: int = 3


def test_a_key_with_the_name_of_an_argument() -> None:
    """No kind of ours has such a key. A kind of a plugin is rejected: its key would be taken for the argument."""
    arguments = inspect.signature(component).parameters.keys() - {"keys"}
    assert len(arguments) == 9
    for slot in ("attention", "ffn", "mixer", "norm", "activation"):
        for config in kinds(slot):
            assert not arguments & config.model_fields.keys(), config
    plugins = with_component(PLUGINS, SeededConfig)
    with pytest.raises(ValueError, match="ffn `seeded` cannot be alone: its key `seed` is an argument of `component`"):
        tfkit.component("ffn", kind="seeded", d_model=8, by=2.5, seed=7, plugins=plugins)


@pytest.mark.slow
@pytest.mark.parametrize("statement", ["import tfkit.component", "import tfkit.building.component", "pass"])
def test_the_name_is_the_function_and_the_package(statement: str) -> None:
    """`tfkit.component` can be called, whether or not its package was imported before."""
    code = f"import tfkit; {statement}; tfkit.component('activation', kind='gelu'); import tfkit.component as package"
    code += "; assert package.Config is tfkit.Config; tfkit.component('activation', kind='relu')"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_features_and_conditions_have_their_own_widths() -> None:
    gate = tfkit.component("mixer", kind="feature_gate", d_model=12, d_features=5, plugins=PLUGINS)
    assert gate(torch.randn(2, 3, 12), layer_features=torch.randn(2, 3, 5)).shape == (2, 3, 12)
