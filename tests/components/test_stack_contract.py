"""The stack of docs/stack.md, which is outside tfkit, through every tool that handles stacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tfkit
from tfkit.building.first_loss import first_losses
from tfkit.testing import check_model
from tfkit.tools.draw.model_scene import scene_of
from tfkit.tools.draw.scene import Tower
from tfkit.tools.eject.proof import check
from tfkit.tools.show.layer_programs import programs_of

from ..docs.page import ROOT, blocks

SPEC = next(block.text for block in blocks(ROOT / "docs" / "stack.md") if block.file == "looped.yaml")
D_MODEL, D_FF = 32, 64
NORM, READ = 2 * D_MODEL, (32 + 16 + 16 + 32) * D_MODEL + 32 + 32 + 32
THINK = 3 * D_MODEL * D_FF + 2 * D_FF + D_MODEL


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> tfkit.plugin.manager.Plugins:
    folder = tmp_path_factory.mktemp("plugin")
    text = next(block.text for block in blocks(ROOT / "docs" / "stack.md") if block.file == "plugins/loop.py")
    (folder / "loop.py").write_text(text, encoding="utf-8")
    return tfkit.load_plugins(plugin_dirs=[folder], entry_points=False)


@pytest.fixture
def looped(plugins: Any) -> Callable[..., tfkit.Graph]:
    return lambda *sets: tfkit.loads(SPEC, sets=sets, plugins=plugins)


def test_it_is_no_stack_of_ours(looped: Callable[..., tfkit.Graph]) -> None:
    _, *parents = (
        value for value in type(looped().node("loop").config).__mro__ if value.__module__.startswith("tfkit")
    )
    assert {base.__module__ for base in parents} == {"tfkit.component.block", "tfkit.component.config"}


def test_show_writes_its_programs(looped: Callable[..., tfkit.Graph]) -> None:
    think = "x = x + 0.5 * think(layernorm(x))"
    assert [(value.title, value.lines) for value in programs_of(looped())] == [
        ("layer 0, thinking, each 2 times in a row", (think,)),
        ("layers 1-2, reading, each 2 times in a row", ("x = x + learned_vector * read(layernorm(x))", think)),
        ("after the last layer", ("x = layernorm(x)",)),
    ]


def test_params_has_a_row_for_each_component(looped: Callable[..., tfkit.Graph]) -> None:
    counted = tfkit.count_params(looped())
    rows = {row.name: row.parameters for row in counted.rows}
    assert rows["attention"] == 2 * READ
    assert rows["ffn"] == 3 * THINK
    assert rows["norm"] == 6 * NORM
    assert rows["loop"] == 2 * D_MODEL
    assert "shared: loop runs 6 layers with the weights of 3, counted once" in counted.notes
    layers = {row.name: row.parameters for row in tfkit.count_params(looped(), by="layer").rows}
    assert layers["loop.layers.0"] == NORM + THINK
    assert layers["loop.layers.1"] == layers["loop.layers.2"] == 2 * NORM + THINK + READ + D_MODEL
    assert layers["loop.final_norm"] == NORM


def test_it_is_drawn_as_a_tower_with_all_its_weights(looped: Callable[..., tfkit.Graph]) -> None:
    scene = scene_of(looped())
    tower = scene.nodes["loop"]
    assert isinstance(tower, Tower)
    assert [(layer.name, layer.times) for layer in tower.layers] == [("thinking", 2), ("reading", 4)]
    assert [box.title for box in tower.layers[1].boxes()] == [
        "LayerNorm",
        "causal self-attention",
        "× learned vector",
        "LayerNorm",
        "FFN",
    ]
    assert tower.closing is not None
    assert tower.rest == 0
    assert scene.counted == scene.total == tfkit.count_params(looped()).total


def test_cost_counts_what_its_mask_hides(looped: Callable[..., tfkit.Graph]) -> None:
    """Of 6 queries and keys, a causal mask hides 15 of 36 pairs, in scores and what they weigh."""
    actual = tfkit.cost(looped(), length=6, mode="prefill").total
    pairs = 4 * 2 * 2 * 4 * 6 * 6 * 8  # runs of reading, scores and values, multiply and add, heads, pairs, width
    assert actual.flops_forward - actual.visible_forward == pytest.approx(pairs * 15 / 36)


def test_solve_makes_it_deeper(plugins: Any, tmp_path: Path) -> None:
    (tmp_path / "looped.yaml").write_text(SPEC, encoding="utf-8")
    solved = tfkit.solve(tmp_path / "looped.yaml", tfkit.Budget("params", 100_000), plugins=plugins)
    for size in solved.sizes:
        assert size.n_layers["loop"] % 2 == 0
        assert size.n_layers["loop"] >= 4
        assert size.d_ff == 2 * (size.d_model or 0)
        assert size.n_heads == 2 * (size.n_kv_heads or 0)


def test_its_first_loss_is_known(looped: Callable[..., tfkit.Graph]) -> None:
    graph = looped("init={kind: normal, std: 0.3}", "embedding.scale=50")
    with pytest.warns(tfkit.FirstLossWarning, match="`logits` starts at a loss of about"):
        model = tfkit.build(graph).eval()
    (actual,) = first_losses(model, graph)
    tokens = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(0))
    measured = nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert actual.loss == pytest.approx(measured.item(), rel=0.2)
    assert actual.own_token


def test_it_decodes_step_by_step(looped: Callable[..., tfkit.Graph]) -> None:
    model = tfkit.build(looped()).eval()
    tokens = torch.arange(18).view(2, 9)
    cached = tfkit.CachedModel(model, length=16)
    steps = [cached(tokens[:, :4]), cached(tokens[:, 4:5]), cached(tokens[:, 5:])]
    torch.testing.assert_close(torch.cat(steps, dim=1), model(tokens), atol=1e-5, rtol=1e-5)
    assert tfkit.generate(model, [[1, 2, 3], [4]], max_new_tokens=3).tokens.shape == (2, 3)


@pytest.mark.slow
def test_it_keeps_every_promise_of_a_model(looped: Callable[..., tfkit.Graph]) -> None:
    check_model(looped())


@pytest.mark.slow
def test_its_file_has_a_class_for_each_variant(looped: Callable[..., tfkit.Graph]) -> None:
    text = tfkit.eject(looped())
    assert {"class Thinking(nn.Module):", "class Reading(nn.Module):"} <= set(text.splitlines())
    assert check(looped(), text).ran


def renamed(stack: tfkit.Layers) -> tfkit.Layers:
    first, *rest = stack.layers
    return replace(stack, layers=(replace(first, steps=(replace(first.steps[0], name="consider"),)), *rest))


@pytest.mark.parametrize(
    ("invalid", "message"),
    [
        (renamed, "block `loop` describes layers with modules that it does not have: layers.0.consider, "),
        (
            lambda stack: replace(stack, layers=tuple(replace(x, input_norm=stack.final_norm) for x in stack.layers)),
            "modules that it does not have: layers.0.input_norm, layers.1.input_norm",
        ),
        (
            lambda stack: replace(stack, layers=tuple(replace(x, around=x.steps[0].residual) for x in stack.layers)),
            "modules that it does not have: layers.0.residual_read, layers.0.residual_write",
        ),
        (
            lambda stack: replace(stack, layers=stack.layers[:2]),
            "has a module `layers.2`, but its `stack` omits it",
        ),
    ],
)
def test_a_stack_that_describes_other_modules_is_refused(
    looped: Callable[..., tfkit.Graph],
    invalid: Callable[[tfkit.Layers], tfkit.Layers],
    message: str,
) -> None:
    graph = looped()
    nodes = tuple(replace(node, stack=invalid(node.stack)) if node.stack else node for node in graph.nodes)
    with pytest.raises(tfkit.SpecError, match=message):
        tfkit.build(replace(graph, nodes=nodes), device="meta")


def test_a_stack_that_fails_to_describe_itself_is_one_error(
    looped: Callable[..., tfkit.Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(looped().node("loop").config), "stack", lambda self: 1 / 0)
    with pytest.raises(tfkit.SpecError, match="block `loop` failed in `stack`"):
        looped()


@pytest.mark.parametrize(
    ("layers", "period", "minimum"),
    [
        ("null", 1, 1),
        ("{groups: 2}", 2, 2),
        ("{variants: {local: {ffn: {d_ff: 64}}}, pattern: [local*2, base]}", 3, 3),
        ("{variants: {local: {ffn: {d_ff: 64}}}, pattern: {0-1: local, rest: base}}", 1, 3),
        ("{variants: {local: {ffn: {d_ff: 64}}}, pattern: {0-1: local, 2-5: base}}", None, 7),
    ],
)
def test_the_numbers_of_layers_that_a_pattern_fits(layers: str, period: int | None, minimum: int) -> None:
    stack = tfkit.load("gpt2", sets=["decoder.n_layers=6", f"decoder.layers={layers}"]).node("decoder").stack
    assert stack is not None
    assert (stack.period, stack.minimum) == (period, minimum)


def test_a_residual_around_the_sublayers_is_shown() -> None:
    plugins = tfkit.load_plugins(plugin_dirs=[ROOT / "plugins" / "tfkit-streams"], entry_points=False)
    layer, *_, last = programs_of(tfkit.load("gemma3n_e4b", plugins=plugins))
    assert layer.lines[0] == "x = altup(streams)"
    assert layer.lines[-1] == "streams = altup(streams, x)"
    assert last.lines == ("x = rmsnorm(altup(streams))",)
