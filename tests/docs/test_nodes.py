"""The graphs of docs/nodes.md compute what their stack or their published class computes, and every tool takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tfkit
from tfkit.plugin.manager import Plugins
from tfkit.testing import check_model
from tfkit.tools.draw.svg import to_svg
from tfkit.tools.eject.proof import Alone, check
from tfkit.tools.show.prose import prose_of

from .page import ROOT, blocks

GRAPHS = ("transformer", "qformer", "flamingo", "detr", "perceiver", "unet_attention")
BATCH, MEMORY = 3, 5
REAL = torch.tensor([5, 2, 4])[:, None] > torch.arange(MEMORY)
"""Which positions of the memory are tokens."""


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Plugins:
    """The plugins of the page, in a folder with all of its files."""
    folder = tmp_path_factory.mktemp("nodes")
    for block in blocks(ROOT / "docs" / "nodes.md"):
        if block.file is not None:
            (folder / block.file).write_text(block.text, encoding="utf-8")
    return tfkit.load_plugins(plugin_dirs=[folder])


def graph_of(name: str) -> str:
    """Return the text of a spec on the page."""
    (text,) = (block.text for block in blocks(ROOT / "docs" / "nodes.md") if block.file == f"{name}.yaml")
    return text


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_is_built(name: str, plugins: Plugins) -> None:
    assert tfkit.build(tfkit.loads(graph_of(name), plugins=plugins), device="meta").code


# ---- the published classes ----


def features(width: int, *, length: int = MEMORY) -> Tensor:
    return torch.randn(BATCH, length, width)


class QFormer(nn.Module):
    """BLIP-2's Q-Former with its query tokens."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import Blip2QFormerConfig
        from transformers.models.blip_2.modeling_blip_2 import Blip2QFormerModel

        config = Blip2QFormerConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            encoder_hidden_size=24,
            layer_norm_eps=1e-5,
        )
        self.model = Blip2QFormerModel(config)
        self.queries = nn.Parameter(torch.empty(8, 32))

    def forward(self, image: Tensor) -> Tensor:
        queries = self.queries.expand(BATCH, -1, -1)
        result = self.model(queries, encoder_hidden_states=image, encoder_attention_mask=REAL.long())
        return result.last_hidden_state


class Flamingo(nn.Module):
    """IDEFICS' gated cross-attention before its decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import IdeficsConfig
        from transformers.models.idefics import modeling_idefics

        config = IdeficsConfig(
            hidden_size=32,
            num_attention_heads=4,
            intermediate_size=64,
            rms_norm_eps=1e-6,
            alpha_type="float",
            vision_config={"embed_dim": 24},
            dropout=0.0,
        )
        config._attn_implementation = "eager"
        self.embedding = nn.Embedding(64, 32)
        self.gated = modeling_idefics.IdeficsGatedCrossAttentionLayer(config, layer_idx=0)
        self.layer = modeling_idefics.IdeficsDecoderLayer(config, layer_idx=0)
        self.norm = modeling_idefics.IdeficsRMSNorm(32)
        self.head = nn.Linear(32, 64, bias=False)

    def forward(self, tokens: Tensor, image: Tensor) -> Tensor:
        x, length = self.embedding(tokens), tokens.size(1)
        image_mask = added(REAL[:, None, None])
        x = self.gated(x, image_hidden_states=image, image_attention_mask=image_mask, cross_attention_gate=tokens >= 0)
        causal = added(torch.ones(length, length, dtype=torch.bool).tril()[None, None])
        x = self.layer(x, attention_mask=causal, position_ids=torch.arange(length)[None])
        return self.head(self.norm(x))


class Detr(nn.Module):
    """DETR's decoder with its object queries and its classifier."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import DetrConfig
        from transformers.models.detr.modeling_detr import DetrDecoder

        config = DetrConfig(d_model=32, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=64)
        self.decoder = DetrDecoder(config)
        self.queries = nn.Parameter(torch.empty(8, 32))
        self.classes = nn.Linear(32, 5)

    def forward(self, image: Tensor, image_positions: Tensor) -> Tensor:
        queries = self.queries.expand(BATCH, -1, -1)
        result = self.decoder(
            inputs_embeds=torch.zeros_like(queries),
            encoder_hidden_states=image,
            encoder_attention_mask=REAL.long(),
            spatial_position_embeddings=image_positions,
            object_queries_position_embeddings=queries,
        )
        return self.classes(result.last_hidden_state)


class Perceiver(nn.Module):
    """Perceiver IO with two blocks of two layers, and learned queries of its output."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import PerceiverConfig
        from transformers.models.perceiver.modeling_perceiver import PerceiverBasicDecoder, PerceiverModel

        config = PerceiverConfig(
            num_latents=8,
            d_latents=32,
            d_model=24,
            num_blocks=2,
            num_self_attends_per_block=2,
            num_self_attention_heads=4,
            num_cross_attention_heads=4,
            cross_attention_shape_for_attention="q",
        )
        decoder = PerceiverBasicDecoder(
            config,
            output_num_channels=3,
            num_channels=16,
            num_heads=2,
            trainable_position_encoding_kwargs={"num_channels": 16, "index_dims": 6},
        )
        self.model = PerceiverModel(config, decoder=decoder)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x, attention_mask=REAL.long()).logits


class UNetAttention(nn.Module):
    """The block of diffusers' transformers."""

    def __init__(self) -> None:
        super().__init__()
        attention = pytest.importorskip("diffusers.models.attention")
        self.block = attention.BasicTransformerBlock(32, 4, 8, cross_attention_dim=24, ff_inner_dim=64)

    def forward(self, pixels: Tensor, text: Tensor) -> Tensor:
        return self.block(pixels, encoder_hidden_states=text, encoder_attention_mask=added(REAL[:, None]))


class Transformer(nn.Module):
    """The shipped `vaswani_base` with one layer on each side."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ["d_model=32", "vocab_size=64", "max_len=32"]
        stacks = [f"{side}.{key}" for side in ("encoder", "decoder") for key in ("n_layers=1", "attention.n_heads=4")]
        ffns = [f"{side}.ffn.d_ff=64" for side in ("encoder", "decoder")]
        self.model = tfkit.build(tfkit.load("vaswani_base", sets=[*sizes, *stacks, *ffns]))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.model(source, target, source_mask=REAL)


def added(visible: Tensor) -> Tensor:
    """Return the additive mask of scores."""
    return torch.zeros(visible.shape).masked_fill(~visible, -1e9)


def tokens(length: int) -> Tensor:
    return torch.randint(64, (BATCH, length))


QKV = {"q": "query", "k": "key", "v": "value"}
PROJ = {letter: f"{letter}_proj" for letter in "qkv"}
TO = {letter: f"to_{letter}" for letter in "qkv"}


@dataclass(frozen=True)
class Published:
    """A published model, and the paths of its modules in ours."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    masks: tuple[str, ...]
    """The masks of ours that are `REAL`."""
    modules: Mapping[str, str]
    """Their module, or parameter, by ours; parts of a matrix are separated by spaces."""
    sets: Mapping[str, Tensor] = field(default_factory=dict)
    """Parameters of ours that they do not have, and their value."""


def attention(ours: str, theirs: str, names: Mapping[str, str], output: str) -> dict[str, str]:
    """Return the modules of an attention; `theirs` is the path of its projections."""
    modules = {f"{ours}.output": output}
    if ours.endswith(".cross_attention"):
        return modules | {f"{ours}.project.{letter}": f"{theirs}.{name}" for letter, name in names.items()}
    return modules | {f"{ours}.project.qkv": " ".join(f"{theirs}.{name}" for name in names.values())}


def qformer_layer(ours: str, theirs: str, *, crossing: bool) -> dict[str, str]:
    of = {"attention": "attention"} | ({"cross_attention": "crossattention"} if crossing else {})
    modules: dict[str, str] = {}
    for name, published in of.items():
        path = f"{theirs}.{published}"
        modules |= attention(f"{ours}.{name}", f"{path}.attention", QKV, f"{path}.output.dense")
        modules[f"{ours}.{name}_norm_after"] = f"{path}.output.LayerNorm"
    return {
        **modules,
        f"{ours}.ffn.up": f"{theirs}.intermediate_query.dense",
        f"{ours}.ffn.down": f"{theirs}.output_query.dense",
        f"{ours}.ffn_norm_after": f"{theirs}.output_query.LayerNorm",
    }


def perceiver_attention(ours: str, theirs: str) -> dict[str, str]:
    return attention(ours, f"{theirs}.attention.self", QKV, f"{theirs}.attention.output.dense")


def perceiver_layer(index: int) -> dict[str, str]:
    ours, theirs = f"encoder.layers.{index}", f"model.encoder.self_attends.{index}"
    return {
        **perceiver_attention(f"{ours}.attention", theirs),
        f"{ours}.attention_norm_in": f"{theirs}.attention.self.layernorm1",
        f"{ours}.ffn_norm_in": f"{theirs}.layernorm",
        f"{ours}.ffn.up": f"{theirs}.mlp.dense1",
        f"{ours}.ffn.down": f"{theirs}.mlp.dense2",
    }


def swiglu(ours: str, theirs: str) -> dict[str, str]:
    return {f"{ours}.gate_up": f"{theirs}.gate_proj {theirs}.up_proj", f"{ours}.down": f"{theirs}.down_proj"}


PUBLISHED = {
    "transformer": Published(
        Transformer,
        lambda: {"source": tokens(MEMORY), "target": tokens(7)},
        ("source_mask",),
        {
            "source_embedding.tokens": "model.source_embedding.tokens",
            "encoder_attention.layers.0.attention": "model.encoder.layers.0.attention",
            "encoder_norm": "model.encoder.layers.0.attention_norm_after",
            "encoder_ffn": "model.encoder.layers.0.ffn",
            "encoder": "model.encoder.layers.0.ffn_norm_after",
            "attention.layers.0.attention": "model.decoder.layers.0.attention",
            "norm": "model.decoder.layers.0.attention_norm_after",
            "cross_attention.layers.0.cross_attention": "model.decoder.layers.0.cross_attention",
            "norm_2": "model.decoder.layers.0.cross_attention_norm_after",
            "ffn": "model.decoder.layers.0.ffn",
            "norm_3": "model.decoder.layers.0.ffn_norm_after",
        },
    ),
    "qformer": Published(
        QFormer,
        lambda: {"image": features(24)},
        ("image_mask",),
        {
            "queries.weight": "queries",
            "queries_norm": "model.layernorm",
            **qformer_layer("layer.layers.0", "model.encoder.layer.0", crossing=True),
            **qformer_layer("layer_2.layers.0", "model.encoder.layer.1", crossing=False),
        },
    ),
    "flamingo": Published(
        Flamingo,
        lambda: {"tokens": tokens(7), "image": features(24)},
        ("image_mask",),
        {
            "embedding.tokens": "embedding",
            "gated_norm": "gated.input_layernorm",
            **attention(
                "gated_attention.layers.0.cross_attention", "gated.cross_attn", PROJ, "gated.cross_attn.o_proj"
            ),
            "gated_sum.write.gate": "gated.alpha_cross_attn",
            "gated_norm_2": "gated.post_attention_layernorm",
            **swiglu("gated_ffn", "gated.mlp"),
            "gated_sum_2.write.gate": "gated.alpha_dense",
            "layer.layers.0.attention_norm_in": "layer.input_layernorm",
            **attention("layer.layers.0.attention", "layer.self_attn", PROJ, "layer.self_attn.o_proj"),
            "layer.layers.0.ffn_norm_in": "layer.post_attention_layernorm",
            **swiglu("layer.layers.0.ffn", "layer.mlp"),
            "end": "norm",
            "logits.output": "head",
        },
    ),
    "detr": Published(
        Detr,
        lambda: {"image": features(32), "image_positions": features(32)},
        ("image_mask",),
        {
            "queries.weight": "queries",
            **attention(
                "attention.layers.0.cross_attention",
                "decoder.layers.0.self_attn",
                PROJ,
                "decoder.layers.0.self_attn.o_proj",
            ),
            "norm": "decoder.layers.0.self_attn_layer_norm",
            **attention(
                "cross_attention.layers.0.cross_attention",
                "decoder.layers.0.encoder_attn",
                PROJ,
                "decoder.layers.0.encoder_attn.o_proj",
            ),
            "norm_2": "decoder.layers.0.encoder_attn_layer_norm",
            "ffn.up": "decoder.layers.0.mlp.fc1",
            "ffn.down": "decoder.layers.0.mlp.fc2",
            "norm_3": "decoder.layers.0.final_layer_norm",
            "end": "decoder.layernorm",
            "classes.output": "classes",
        },
        {"stream.weight": torch.zeros(8, 32)},
    ),
    "perceiver": Published(
        Perceiver,
        lambda: {"x": features(24)},
        ("x_mask",),
        {
            "latents.weight": "model.embeddings.latents",
            "query_norm": "model.encoder.cross_attention.attention.self.layernorm1",
            "x_norm": "model.encoder.cross_attention.attention.self.layernorm2",
            **perceiver_attention("cross_attention.layers.0.cross_attention", "model.encoder.cross_attention"),
            "ffn_norm": "model.encoder.cross_attention.layernorm",
            "ffn.up": "model.encoder.cross_attention.mlp.dense1",
            "ffn.down": "model.encoder.cross_attention.mlp.dense2",
            **perceiver_layer(0),
            **perceiver_layer(1),
            "output_queries.weight": "model.decoder.output_position_encodings.position_embeddings",
            "output_norm": "model.decoder.decoding_cross_attention.attention.self.layernorm1",
            "latents_norm": "model.decoder.decoding_cross_attention.attention.self.layernorm2",
            **perceiver_attention("output.layers.0.cross_attention", "model.decoder.decoding_cross_attention"),
            "output_ffn_norm": "model.decoder.decoding_cross_attention.layernorm",
            "output_ffn.up": "model.decoder.decoding_cross_attention.mlp.dense1",
            "output_ffn.down": "model.decoder.decoding_cross_attention.mlp.dense2",
            "values": "model.decoder.final_layer",
        },
    ),
    "unet_attention": Published(
        UNetAttention,
        lambda: {"pixels": features(32, length=9), "text": features(24)},
        ("text_mask",),
        {
            "norm": "block.norm1",
            **attention(
                "attention.layers.0.attention",
                "block.attn1",
                TO,
                "block.attn1.to_out.0",
            ),
            "norm_2": "block.norm2",
            **attention(
                "cross_attention.layers.0.cross_attention",
                "block.attn2",
                TO,
                "block.attn2.to_out.0",
            ),
            "norm_3": "block.norm3",
            "ffn.gate_up": "block.ff.net.0.proj",
            "ffn.down": "block.ff.net.2",
        },
    ),
}


def weights_from(theirs: Mapping[str, Tensor], published: Published, names: list[str]) -> dict[str, Tensor]:
    """Return their weights by our names; every tensor of theirs is used once."""
    weights: dict[str, Tensor] = dict(published.sets)
    used: list[str] = []
    for name in names:
        if name in weights:
            continue
        (match,) = (item for item in published.modules.items() if f"{name}.".startswith(f"{item[0]}."))
        ours, sources = match
        paths = [f"{source}{name.removeprefix(ours)}" for source in sources.split()]
        used += paths
        weights[name] = torch.cat([theirs[path] for path in paths])
        if ours == "ffn.gate_up":  # diffusers has the gate last
            weights[name] = torch.cat(weights[name].chunk(2)[::-1])
    assert sorted(used) == sorted(theirs)
    return weights


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_computes_what_its_published_model_computes(name: str, plugins: Plugins) -> None:
    published = PUBLISHED[name]
    torch.manual_seed(0)
    theirs = published.build().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.1, 0.3)
    ours = tfkit.build(tfkit.loads(graph_of(name), plugins=plugins)).eval()
    ours.load_state_dict(weights_from(theirs.state_dict(), published, [*ours.state_dict()]))
    inputs = published.inputs()
    with torch.no_grad():
        expected = theirs(**inputs)
        actual = ours(**inputs, **dict.fromkeys(published.masks, REAL))
    assert actual.std() > 0.1
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        unmasked = ours(**inputs)
    assert (unmasked - expected).abs().max() > 1e-3


# ---- every tool once ----

EXPORTS = {"torchscript": "ts", "pt2": "pt2", "onnx": "onnx", "safetensors": "safetensors"}


@pytest.fixture(scope="module")
def alone() -> Iterator[Alone]:
    with Alone() as process:
        yield process


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of what exports
@pytest.mark.parametrize("name", GRAPHS)
def test_every_tool_takes_a_graph(name: str, plugins: Plugins, alone: Alone, tmp_path: Path) -> None:
    graph = tfkit.loads(graph_of(name), plugins=plugins)
    model = tfkit.build(graph).eval()
    total = sum(parameter.numel() for parameter in model.parameters())
    params = tfkit.count_params(graph)
    assert params.total == sum(row.parameters for row in params.rows) == total
    parts = tfkit.cost(graph).parts
    assert {part.node for part in parts} <= {node.name for node in graph.nodes}
    prose = str(prose_of(graph))
    picture = to_svg(tfkit.draw(graph))
    for node in graph.nodes:
        assert node.name in prose
        assert node.name in picture or node.name.replace("_", " ") in picture
    check_model(graph, plugins=plugins)
    assert check(graph, tfkit.eject(graph), alone).ran
    for format, ending in EXPORTS.items():
        assert tfkit.export(model, tmp_path / f"model.{ending}", format=format, plugins=plugins).difference <= 1e-5
    points = [f"{node.name}" for node in graph.nodes]
    inputs = PUBLISHED[name].inputs()
    with tfkit.trace(model, read=points) as values:
        output = model(**inputs)
    assert [*values] == points
    assert torch.equal(values[points[-1]], output)
    folder = tfkit.save(model, tmp_path / "saved", plugins=plugins)[0].parent
    again = tfkit.build(tfkit.load(folder, plugins=plugins)).eval()
    assert torch.equal(again(**inputs), output)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tokens_name"), [("transformer", "target"), ("flamingo", "tokens")])
def test_a_causal_graph_is_decoded_with_caches(name: str, tokens_name: str, plugins: Plugins) -> None:
    model = tfkit.build(tfkit.loads(graph_of(name), plugins=plugins)).eval()
    inputs = PUBLISHED[name].inputs()
    expected = model(**inputs)
    read = inputs.pop(tokens_name)
    cached = tfkit.CachedModel(model, length=8)
    cached.start(BATCH, **inputs)
    actual = torch.cat([cached(read[:, :3]), cached(read[:, 3:4]), cached(read[:, 4:])], dim=1)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
