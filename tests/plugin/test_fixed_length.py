"""Inputs with a fixed number of positions: the spec declares them, and every tool respects them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tfkit
from tfkit.cli import main
from tfkit.component import Signal
from tfkit.testing import check_model
from tfkit.tools.check.reduced import reduced_model
from tfkit.tools.common.model_inputs import random_inputs
from tfkit.torch_private.torchscript import no_deprecation_warnings

from ..sampling import slow

PLUGIN = Path(__file__).parent / "patches.py"
PLUGINS = tfkit.load_plugins(plugin_dirs=[PLUGIN], entry_points=False)
CLASSES = """\
tfkit: 1
name: small_vit
d_model: 16
inputs: {pixels: {type: features, width: 3, length: 64}}
graph:
  patches: {block: patches, image_size: 8, patch_size: 4}
  encoder:
    block: encoder
    n_layers: 2
    attention: {kind: mha, n_heads: 2}
    ffn: {kind: gelu, d_ff: 24}
  pooler: {block: pooler}
  classes: {block: classifier, n_classes: 10}
"""
CAPTIONS = """\
tfkit: 1
name: small_captioner
d_model: 16
vocab_size: 19
max_len: 32
inputs: {pixels: {type: features, width: 3, length: 64}, words: tokens}
graph:
  patches: {block: patches, input: pixels, image_size: 8, patch_size: 4}
  encoder: &stack
    block: encoder
    n_layers: 1
    attention: {kind: mha, n_heads: 2}
    ffn: {kind: gelu, d_ff: 24}
  embedding: {block: embedding, input: words, position: learned}
  decoder: {<<: *stack, block: decoder, input: embedding, memory: encoder}
  logits: {block: lm_head, tie: embedding}
"""
TYPES = """\
tfkit: 1
name: typed
d_model: 16
vocab_size: 23
inputs: {tokens: {type: tokens, length: 4}, types: {type: tokens, length: 4, optional: true}}
graph:
  embedding: {block: embedding, input: tokens, tables: {types: 2}}
  encoder: {block: encoder, n_layers: 1, attention: {n_heads: 2}, ffn: {kind: relu, d_ff: 24}}
"""
DECODER = """\
tfkit: 1
name: words
d_model: 16
vocab_size: 23
graph:
  embedding: {block: embedding}
  decoder: {block: decoder, n_layers: 1, attention: {n_heads: 2}, ffn: {kind: relu, d_ff: 24}}
  logits: {block: lm_head}
"""
PADDED = """\
tfkit: 1
name: visible_patches
d_model: 16
inputs: {patches: {type: features, width: 3, length: 6, padded: true}}
graph:
  embedded: {block: linear, input: patches}
  positions: {block: latents, input: patches, n_latents: 6}
  placed: {block: add, inputs: [embedded, positions]}
  encoder: {block: encoder, n_layers: 1, attention: {kind: mha, n_heads: 2}, ffn: {kind: relu, d_ff: 24}}
"""
TEXTS = {"classes": CLASSES, "captions": CAPTIONS}
FORMATS = ["torchscript", "pt2", "onnx"]


@pytest.fixture(params=TEXTS)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"{request.param}.yaml"
    path.write_text(TEXTS[request.param])
    return path


@pytest.mark.parametrize(
    "command",
    [
        "build",
        "cost --mode prefill",
        "params",
        "cost",
        "validate",
        "show",
        "show --prose",
        slow("profile --steps 2 --warmup 0"),
    ],
)
def test_every_command_reads_it(command: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, *options = command.split()
    assert main([name, str(file), *options, "--plugin-dir", str(PLUGIN), "--no-plugins"]) == 0, capsys.readouterr().err


@pytest.mark.slow
def test_it_is_drawn_and_ejected(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command, suffix in (("draw", "svg"), ("eject", "py")):
        target = tmp_path / f"out.{suffix}"
        arguments = [command, str(file), "-o", str(target), "--plugin-dir", str(PLUGIN), "--no-plugins"]
        assert main(arguments) == 0, capsys.readouterr().err
        assert target.is_file()


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_it_is_exported(format: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / f"out.{format}"
    arguments = ["export", str(file), "-o", str(target), "--format", format]
    assert main([*arguments, "--plugin-dir", str(PLUGIN), "--no-plugins"]) == 0, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("text", [CLASSES, CAPTIONS])
def test_it_keeps_every_promise(text: str) -> None:
    check_model(tfkit.loads(text, plugins=PLUGINS), plugins=PLUGINS)


def test_a_reduced_model_keeps_the_sizes_that_a_fixed_length_depends_on() -> None:
    text = CAPTIONS.replace("d_model: 16", "d_model: 64").replace("words: tokens", "words: {type: tokens, length: 30}")
    text = text.replace("length: 64", "length: 144").replace("image_size: 8", "image_size: 12")
    small = reduced_model(tfkit.loads(text, plugins=PLUGINS), PLUGINS).graph
    assert small.node("patches").output == Signal("sequence", width=32, length=10)
    check_model(small, plugins=PLUGINS, only=("forward", "look-ahead-gradient"))


def test_tokens_of_a_fixed_length_are_checked() -> None:
    text = DECODER.replace("graph:", "inputs: {tokens: {type: tokens, length: 20}}\ngraph:")
    check_model(tfkit.loads(text, plugins=PLUGINS), plugins=PLUGINS, only=("look-ahead-gradient", "documents"))


def test_another_length_is_refused() -> None:
    """By the model, by a script of it, and before the steps of decoding, which read the pixels once."""
    classes, captions = (tfkit.build(tfkit.loads(text, plugins=PLUGINS)).eval() for text in TEXTS.values())
    assert classes(torch.randn(2, 64, 3)).shape == (2, 10)
    with pytest.raises(ValueError, match=r"`pixels` must have 64 positions; got \[2, 16, 3\]"):
        classes(torch.randn(2, 16, 3))
    with no_deprecation_warnings():
        scripted = torch.jit.script(classes)
    with pytest.raises(torch.jit.Error, match="pixels must have 64 positions, which this model always reads; got 16"):
        scripted(torch.randn(2, 16, 3))
    with pytest.raises(ValueError, match="`pixels` must have 64 positions, which this model always reads; got 16"):
        tfkit.CachedModel(captions, length=8).start(2, pixels=torch.randn(2, 16, 3))


def test_another_length_of_an_optional_input_is_refused() -> None:
    model, tokens = tfkit.build(tfkit.loads(TYPES)).eval(), torch.ones(2, 4, dtype=torch.long)
    assert not torch.equal(model(tokens), model(tokens, tokens))
    with pytest.raises(ValueError, match=r"`types` must have 4 positions; got \[2, 1\]"):
        model(tokens, tokens[:, :1])
    with no_deprecation_warnings():
        scripted = torch.jit.script(model)
    assert torch.equal(scripted(tokens), model(tokens))
    with pytest.raises(torch.jit.Error, match="types must have 4 positions, which this model always reads; got 1"):
        scripted(tokens, tokens[:, :1])


def test_the_order_of_pixels_the_axes_of_kernels_and_the_type_of_what_is_read_once() -> None:
    for text in TEXTS.values():
        check_model(
            tfkit.loads(text, plugins=PLUGINS), plugins=PLUGINS, only=("token-order", "every-row", "cached-types")
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("length: 63", "must be sequences of exactly 64 positions; got 63 positions"),
        ("", "must be sequences of exactly 64 positions; got any length"),
    ],
)
def test_a_block_says_what_it_takes(change: str, message: str) -> None:
    text = CLASSES.replace(", length: 64", change and f", {change}")
    with pytest.raises(tfkit.SpecError, match=message) as caught:
        tfkit.loads(text, plugins=PLUGINS)
    assert caught.value.diagnostics[0].path == "graph.patches.input"
    assert caught.value.diagnostics[0].help == "write the fixed length of the input: `length: 64`"


def test_lengths_that_are_fixed_must_agree() -> None:
    text = """\
tfkit: 1
name: two
d_model: 3
inputs: {a: {type: features, width: 3, length: 4}, b: {type: features, width: 3, length: 5}}
graph:
  sum: {block: JOIN, inputs: [a, b]ALONG}
  body: {block: encoder, n_layers: 1, ffn: {kind: relu, d_ff: 4}}
"""
    for join, along in (("add", ""), ("concat", ", along: width")):
        with pytest.raises(tfkit.SpecError, match="all inputs must have the same length, 4 positions; got 5"):
            tfkit.loads(text.replace("JOIN", join).replace("ALONG", along), plugins=PLUGINS)
    graph = tfkit.loads(text.replace("JOIN", "concat").replace("ALONG", ""), plugins=PLUGINS)
    assert graph.node("body").output.length == 9


def test_a_length_has_no_effect_on_lengths() -> None:
    text = CAPTIONS.replace("words: tokens", "words: tokens, known: {type: lengths, length: 3}")
    with pytest.raises(tfkit.SpecError, match="`length` has no effect: an input of lengths"):
        tfkit.loads(text, plugins=PLUGINS)


def test_inputs_are_as_long_as_they_say() -> None:
    graph = tfkit.loads(CAPTIONS, plugins=PLUGINS)
    inputs = random_inputs(graph, batch=3, length=7)
    assert {name: tuple(value.shape) for name, value in inputs.items()} == {"pixels": (3, 64, 3), "words": (3, 7)}
    assert "pixels_mask" not in tfkit.building.builder.inputs_of(tfkit.build(graph))


def test_another_length_is_refused_where_it_is_asked_for() -> None:
    graph = tfkit.loads(CLASSES, plugins=PLUGINS)
    assert tfkit.cost(graph).length == 64
    with pytest.raises(tfkit.SpecError, match=r"length \(32\) has no effect: .* always has 64 positions"):
        tfkit.cost(graph, length=32)


def test_what_comes_in_pieces_has_no_fixed_length() -> None:
    text = CAPTIONS.replace("words: tokens", "words: {type: tokens, length: 8}")
    with pytest.raises(tfkit.SpecError, match="`words` always has 8 positions, and cannot be read step by step"):
        tfkit.CachedModel(tfkit.build(tfkit.loads(text, plugins=PLUGINS)).eval(), length=8)


def test_the_patches_are_those_of_a_convolution() -> None:
    """Against `torch.nn.Conv2d` on the image itself."""
    model = tfkit.build(tfkit.loads(CLASSES, plugins=PLUGINS))
    patches = model.get_submodule("patches")
    image = torch.randn(2, 3, 8, 8)
    conv = torch.nn.Conv2d(3, 16, 4, stride=4, bias=False)
    conv.weight.data = patches.weight.data
    actual = patches(image.flatten(2).transpose(1, 2)) - patches.position
    torch.testing.assert_close(actual[:, 1:], conv(image).flatten(2).transpose(1, 2))
    torch.testing.assert_close(actual[:, :1], patches.whole.expand(2, -1, -1))


def test_a_fixed_length_may_have_padding() -> None:
    check_model(tfkit.loads(PADDED), only=("padding",))
    model = tfkit.build(tfkit.loads(PADDED)).eval()
    x, mask = torch.randn(2, 6, 3), torch.tensor([[1, 1, 0, 1, 0, 1], [1] * 6], dtype=torch.bool)
    changed = torch.where(mask[..., None], x, torch.randn(2, 6, 3))
    with torch.no_grad():
        torch.testing.assert_close(model(changed, patches_mask=mask)[mask], model(x, patches_mask=mask)[mask])
        assert (model(x) - model(x, patches_mask=mask))[0].abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore::tfkit.EditedModelWarning")
def test_the_contents_of_padding_are_checked() -> None:
    model = tfkit.build(tfkit.loads(PADDED))
    model.embedded.register_forward_hook(lambda module, args, x: x + x.mean(1, keepdim=True))
    with pytest.raises(AssertionError, match="the contents of padding on the right change the outputs of tokens"):
        check_model(model, only=("position-wise", "look-ahead", "padding"))


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_a_padded_model_is_exported(format: str, tmp_path: Path) -> None:
    exported = tfkit.export(tfkit.build(tfkit.loads(PADDED)), tmp_path / "model", format=format)
    assert exported.difference <= 1e-5
    assert any("padded" in check.case for check in exported.checks)
