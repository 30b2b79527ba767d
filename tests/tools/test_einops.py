"""The layers and functions of einops in the forward of a plugin's component, with every tool."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from torch import fx

import tfkit
from tfkit.plugin.manager import load_plugins
from tfkit.spec.render import render_spec
from tfkit.tools.eject.proof import Alone, check
from tfkit.tools.eject.remote_code.folder import write_folder
from tfkit.tools.eject.remote_code.modeling import code_of
from tfkit.tools.eject.remote_code.proof import Folders
from tfkit.tools.eject.runner import build_model, loaded_module
from tfkit.tools.eject.write import eject
from tfkit.tools.export.export import export
from tfkit.torch_private.torchscript import no_deprecation_warnings

from ..sampling import chosen, some

SPEC = """
tfkit: 1
name: named
d_model: 8
vocab_size: 13
graph:
  embedding: {block: embedding}
  decoder: {block: decoder, n_layers: 2, attention: {n_heads: 2}, ffn: {kind: mixed, d_ff: 12}}
  logits: {block: lm_head}
"""
PLUGIN = '''
from typing import Literal

import einops
import torch
from einops import pack, rearrange, reduce, repeat, unpack
from einops.layers.torch import EinMix, Rearrange, Reduce
from torch import Tensor, nn

import tfkit

REPEATED = "... d -> n ... d"


class MixedConfig(tfkit.FFNConfig):
    """Groups of channels."""

    kind: Literal["mixed"] = "mixed"
    d_ff: tfkit.Dim
    groups: tfkit.Count = 3

    def build(self, make):
        return Mixed(self)


class Mixed(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.groups = config.groups
        self.up = nn.Linear(config.d_model, config.d_ff)
        self.down = nn.Linear(config.d_ff, config.d_model)
        self.scale = nn.Parameter(torch.empty(config.groups))
        INIT

    def reset_parameters(self):
        nn.init.uniform_(self.scale, 0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        BODY


@tfkit.hookimpl
def tfkit_register(register):
    register(MixedConfig)
'''
LAYERS = (
    """
    self.split = Rearrange("b t (g d) -> b g t d", g=config.groups)
    self.mean = Reduce("b g t d -> b 1 t d", "mean")
    self.merge = Rearrange("b g t d -> b t (g d)")
    """,
    """
    h = self.split(torch.relu(self.up(x)))
    h = (h - self.mean(h)) * self.scale[:, None, None]
    return self.down(self.merge(h))
    """,
)
FUNCTIONS = (
    "",
    """
    h = rearrange(torch.relu(self.up(x)), "b t (g d) -> b g t d", g=self.groups)
    h = h - reduce(h, "b g t d -> b 1 t d", "mean")
    h = h * repeat(self.scale, "g -> g t d", t=h.shape[2], d=h.shape[3])
    return self.down(einops.rearrange(h, "... g t d -> ... t (g d)"))
    """,
)
MIXES = (
    """
    sizes = {"c": config.d_model, "g": config.groups, "d": config.d_ff // config.groups}
    self.mix = EinMix("b t c -> b t (g d)", weight_shape="c g d", bias_shape="g d", **sizes)
    """,
    """
    h = torch.relu(self.up(x) + self.mix(x))
    a = rearrange(h, "b t (g d) -> b t g d", g=self.groups)
    a = einops.einsum(a, self.scale, "b t g d, g -> b t d")
    packed, shapes = pack([h, a], "b t *")
    h, a = unpack(torch.tanh(packed), shapes, "b t *")
    return self.down(h) + a.mean(dim=2, keepdim=True)
    """,
)
EINMIX_ALONE = (MIXES[0], "return self.down(torch.relu(self.up(x) + self.mix(x)) * self.scale.sum())")
PLUGINS = {"layers": LAYERS, "functions": FUNCTIONS, "mixes": MIXES}


def graph_with(folder: Path, init: str, body: str) -> tfkit.Graph:
    texts = {"INIT": init, "BODY": body}
    text, folder = PLUGIN, Path(mkdtemp(dir=folder))
    for name, lines in texts.items():
        text = text.replace(f"        {name}\n", textwrap.indent(textwrap.dedent(lines).strip() + "\n", " " * 8))
    (folder / "mixed.py").write_text(text, encoding="utf-8")
    return tfkit.loads(SPEC, plugins=load_plugins(plugin_dirs=[folder]))


@pytest.fixture(params=PLUGINS)
def graph(request: pytest.FixtureRequest, tmp_path: Path) -> tfkit.Graph:
    """A model with the layers, the functions, or the layer with a weight and the functions without axis sizes."""
    return graph_with(tmp_path, *PLUGINS[request.param])


def trained(graph: tfkit.Graph) -> fx.GraphModule:
    """The model after a step of training, so that no weight has its initial value."""
    model = tfkit.build(graph, seed=3).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.arange(24).reshape(4, 6) % 13
    torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())
    optimizer.step()
    return model.eval()


WRITTEN = {
    "layers": """
        # b t (g d) -> b g t d
        h = torch.relu(self.up(x)).unflatten(2, (self.g, -1)).transpose(1, 2)
        # mean: b g t d -> b 1 t d
        h = (h - h.mean(dim=1).unsqueeze(1)) * self.scale[:, None, None]
        # b g t d -> b t (g d)
        return self.down(h.transpose(1, 2).flatten(2))""",
    "functions": """
        # b t (g d) -> b g t d
        h = torch.relu(self.up(x)).unflatten(2, (self.groups, -1)).transpose(1, 2)
        # mean: b g t d -> b 1 t d
        h = h - h.mean(dim=1).unsqueeze(1)
        # g -> g t d
        h = h * self.scale.unsqueeze(1).unsqueeze(2).expand(-1, h.shape[2], h.shape[3])
        # ... g t d -> ... t (g d)
        return self.down(h.transpose(-3, -2).flatten(-2))""",
    "mixes": """
        # b t g d, g -> b t d
        a = torch.einsum("abcd,c->abd", a, self.scale)
        tensors = [h, a]
        shapes = [tensor.shape[2 : tensor.dim()] for tensor in tensors]
        flat = [tensor.reshape(*tensor.shape[:2], -1, *tensor.shape[tensor.dim() :]) for tensor in tensors]
        # b t *
        h, a = unpack(torch.tanh(torch.cat(flat, dim=2)), shapes)
        return self.down(h) + a.mean(dim=2, keepdim=True)""",
}
EINMIX = """
        # b t c -> b t (g d), weight c g d
        result = torch.einsum("aeb,bdc->aedc", input, self.weight)
        result += self.bias
        # b t g d -> b t (g d)
        return result.flatten(2)"""


@pytest.mark.parametrize("name", chosen(PLUGINS, ("mixes",)))
def test_an_ejected_file_has_operations_of_torch_next_to_patterns(name: str, alone: Alone, tmp_path: Path) -> None:
    graph = graph_with(tmp_path, *PLUGINS[name])
    text = eject(graph)
    assert check(graph, text, alone).ran
    assert "einops" not in text
    code = re.sub(r"  # \[.*", "", text)  # without shapes
    assert WRITTEN[name] + "\n\n\nclass Layer(" in code
    assert (EINMIX in code) == (name == "mixes")


BODIES = {
    "taken names": (
        """
        self.g, self.d, self.x = nn.Linear(config.d_ff, config.d_ff), 5, 0.5
        self.split = Rearrange("b t (half g) -> b half t g", half=config.groups, g=4)
        self.again, self.twice = self.split, Rearrange("b (x d) t -> b d t x", d=2)
        """,
        """
        h = self.split(input=self.g(self.up(x))) * self.scale[:, None, None] * self.d
        h = rearrange(h, "b x t d -> b t (x d)") * self.x
        h = rearrange(self.twice(rearrange(h, "b t d -> b d t")), "b d t x -> b t (d x)")
        return self.down(h + rearrange(self.again(h), "b g t d -> b t (g d)"))
        """,
    ),
    "sequence": (
        """
        self.chain = nn.Sequential(Rearrange("b t (g d) -> b t g d", d=4), Reduce("b t g d -> b t d", "max"))
        self.layers = nn.ModuleList([Rearrange("b t d -> t b d"), Rearrange("t b d -> b t d")])
        """,
        """
        h = self.chain(self.up(x))
        for layer in self.layers:
            h = layer(h) * self.scale.sum()
        return h.mean(dim=2, keepdim=True) + self.down(self.up(x))
        """,
    ),
    "other shapes": (
        "self.sizes = [[], [-1], [2, 3]]",
        """
        h = self.up(x)
        a, h, c = unpack(h, [[], [-1], [2, 3]], "b t *")
        a += self.scale.sum()
        packed, shapes = pack([c, h[..., None, None].expand(-1, -1, -1, 2, 3)], "b t * d")
        c, h = unpack(packed, shapes, "b t * d")
        total, shapes = pack((a, h.amax(dim=2), c), "b t *")
        return self.down(rearrange(total, "b t (d e) -> b t (e d)", e=13)[..., :1] + self.up(x))
        """,
    ),
    "lists": (
        "self.pattern = 'n b t d -> b t (n d)'",
        """
        h = self.up(x) * self.scale.sum()
        parts = [part * 2 for part in h.chunk(3, dim=2)]
        joined = rearrange(pattern=self.pattern, tensor=parts)
        q, k = repeat(joined, REPEATED, n=2)
        return self.down(q * k + rearrange([h, h], "n b t d -> b t n d").sum(dim=2))
        """,
    ),
}


@pytest.mark.parametrize("name", chosen(BODIES, ("taken names", "other shapes")))
def test_any_use_of_einops_is_ejected(name: str, alone: Alone, tmp_path: Path) -> None:
    graph = graph_with(tmp_path, *BODIES[name])
    text = eject(graph)
    assert check(graph, text, alone).ran
    assert "einops" not in text


REJECTED = {
    "return rearrange(x, str(x.dim()))": "a pattern or a reduction of einops that is not a constant text",
    'return reduce(x, "b t d -> b t", torch.amax)': "a pattern or a reduction of einops that is not a constant text",
    'return rearrange(x, "b t d -> b t d", **{"d": 8})': "a `*` or a `**` in the call of a module or of a function",
    'return rearrange(x, "b t (g d) -> b t g d")': "`b t (g d) -> b t g d`: Could not infer sizes for",
    'return x + reduce(x, "... d -> d", "sum")': "a reduction over `...` depends on the number of axes: name them",
    'return reduce(x, "b t d -> b t", "median")': "`b t d -> b t`: Unknown reduction median. Expect one of",
}


@pytest.mark.parametrize("body", some(REJECTED, 4))
def test_a_call_that_cannot_be_ejected_is_an_error(body: str, tmp_path: Path) -> None:
    with pytest.raises(tfkit.SpecError) as caught:
        eject(graph_with(tmp_path, "", body))
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.message.startswith("`Mixed` (mixed.py) cannot be ejected: forward: ")
    assert REJECTED[body] in diagnostic.message


@pytest.mark.parametrize(
    ("layer", "why"),
    [("'... d -> d', 'mean'", "a reduction over `...`"), ("'b t d -> b t', torch.amax", "Unknown reduction <")],
)
def test_a_layer_that_cannot_be_ejected_is_an_error(layer: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(tfkit.SpecError, match=f"`Reduce` .* cannot be ejected: .* {why}"):
        eject(graph_with(tmp_path, f"self.mean = Reduce({layer})", "return x + self.mean(x)"))


def test_einmix_is_filled_as_by_its_constructor(tmp_path: Path) -> None:
    graph = graph_with(tmp_path, *MIXES)
    model, again = tfkit.build(graph, seed=3), tfkit.build(graph, seed=3)
    weights = [model.get_parameter(f"decoder.layers.{layer}.ffn.mix.weight") for layer in (0, 1)]
    assert torch.equal(weights[0], again.get_parameter("decoder.layers.0.ffn.mix.weight"))
    assert not torch.equal(*weights)
    with loaded_module(eject(graph)) as module:
        weights.append(build_model(module).get_parameter("decoder.layers.0.ffn.mix.weight"))
    bound = (3 / 8) ** 0.5
    assert all(0.9 * bound < weight.abs().max() <= bound for weight in weights)
    bias = model.get_parameter("decoder.layers.0.ffn.mix.bias")
    assert 0.7 * (1 / 8) ** 0.5 < bias.abs().max() <= (1 / 8) ** 0.5


def test_a_step_of_training_and_cached_decoding(graph: tfkit.Graph) -> None:
    model = trained(graph)
    tokens = torch.arange(10).reshape(2, 5)
    cached = tfkit.CachedModel(model, length=9)
    steps = torch.cat([cached(tokens[:, :3]), cached(tokens[:, 3:4]), cached(tokens[:, 4:])], dim=1)
    assert torch.allclose(steps, model(tokens), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [LAYERS, EINMIX_ALONE], ids=["without weights", "EinMix"])
def test_layers_script(layers: tuple[str, str], tmp_path: Path) -> None:
    model = tfkit.build(graph_with(tmp_path, *layers), seed=3).eval()
    tokens = torch.arange(10).reshape(2, 5)
    with no_deprecation_warnings():
        assert torch.equal(torch.jit.script(model)(tokens), model(tokens))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "format"), [("mixes", "pt2"), ("functions", "onnx"), ("layers", "torchscript")])
def test_exports(name: str, format: str, tmp_path: Path) -> None:
    model = trained(graph_with(tmp_path, *PLUGINS[name]))
    assert export(model, tmp_path / "file", format=format).difference < 1e-5


@pytest.mark.parametrize("name", some(["functions", "mixes"], 1))
def test_functions_are_no_torchscript(name: str, tmp_path: Path) -> None:
    model = tfkit.build(graph_with(tmp_path, *PLUGINS[name]))
    with pytest.raises(tfkit.SpecError, match="ffn kind `mixed` cannot be scripted by TorchScript"):
        export(model, tmp_path / "file", format="torchscript")


@pytest.mark.slow
def test_compiled(graph: tfkit.Graph) -> None:
    model = trained(graph)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for shape in ((2, 5), (3, 7)):
        tokens = torch.arange(shape[0] * shape[1]).reshape(shape) % 13
        assert torch.allclose(compiled(tokens), model(tokens), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLUGINS)
def test_the_code_for_transformers(name: str, tmp_path: Path) -> None:
    modeling = code_of(graph_with(tmp_path, *PLUGINS[name])).modeling
    assert "einops" not in modeling
    assert "# b t (g d) -> b" in modeling


@pytest.mark.slow
def test_a_folder_for_transformers(tmp_path: Path) -> None:
    with Folders() as process:
        for name, plugin in PLUGINS.items():
            (tmp_path / name).mkdir()
            model = trained(graph_with(tmp_path, *plugin))
            write_folder(model, tmp_path / name, render_spec(model.meta["graph"].spec.model), process)
