"""Typical first components of readers of docs/components.md: a norm, an FFN, an attention.

They were written from the docs alone. Where that took a look into the code, the text was mended.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import tfkit
from tfkit.testing import check_component

SCALE_NORM = '''
"""ScaleNorm: one learned length for all vectors. https://arxiv.org/abs/1910.05895"""

from typing import Literal

import torch
from torch import Tensor, nn

import tfkit


class ScaleNormConfig(tfkit.NormConfig):
    """length * x / |x|."""

    kind: Literal["scalenorm"] = "scalenorm"
    eps: tfkit.PositiveFloat = 1e-5
    """The least length that a vector is divided by."""

    def build(self, make: tfkit.Make, width: int) -> nn.Module:
        return ScaleNorm(width, self.eps)


class ScaleNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.start = width**0.5
        self.eps = eps
        self.length = nn.Parameter(torch.empty(1))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.length, self.start)

    def forward(self, x: Tensor) -> Tensor:
        return self.length * x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=self.eps)


@tfkit.hookimpl
def tfkit_register(register: tfkit.Register) -> None:
    register(ScaleNormConfig)
'''

GROUPED = '''
"""An FFN of several narrow networks side by side.

b batch, t positions, g groups, d width of a group, f width of its hidden layer.
"""

from typing import Literal

import torch
from torch import Tensor, nn

import tfkit


class GroupedConfig(tfkit.FFNConfig):
    """Each group of channels has a hidden layer of its own; then a linear layer mixes them."""

    kind: Literal["grouped"] = "grouped"
    d_ff: tfkit.Dim
    """Width of all hidden layers together."""
    n_groups: tfkit.Count = 2
    activation: tfkit.ActivationConfig = tfkit.slot("gelu")

    def check(self) -> None:
        super().check()
        for name in ("d_model", "d_ff"):
            width = getattr(self, name)
            if width % self.n_groups:
                raise tfkit.Invalid("n_groups", f"{name} ({width}) must be a multiple of n_groups ({self.n_groups})")

    def build(self, make: tfkit.Make) -> nn.Module:
        return Grouped(self, make(self.activation))


class Grouped(nn.Module):
    """[b, t, d_model] -> the same."""

    def __init__(self, config: GroupedConfig, activation: nn.Module) -> None:
        super().__init__()
        groups = config.n_groups
        self.weight = nn.Parameter(torch.empty(groups, config.d_ff // groups, config.d_model // groups))
        self.split = tfkit.Rearrange("b t (g d) -> b t g d", g=groups)
        self.merge = tfkit.Rearrange("b t g f -> b t (g f)")
        self.activation = activation
        self.down = tfkit.Linear(config.d_ff, config.d_model, bias=False, residual=True)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.size(2) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("b t g d, g f d -> b t g f", self.split(x), self.weight)
        return self.down(self.merge(self.activation(hidden)))


@tfkit.hookimpl
def tfkit_register(register: tfkit.Register) -> None:
    register(GroupedConfig)
'''

COSINE = '''
"""Attention by the angle of queries and keys, with one head of keys and values. https://arxiv.org/abs/2010.04245

b batch, h heads, q queries, k keys, d width of a head.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tfkit


class CosineConfig(tfkit.MultiHeadConfig):
    """Scores are cosines times a learned factor of each head."""

    kind: Literal["cosine"] = "cosine"
    start: tfkit.PositiveFloat = 10.0
    """Where the factors start."""

    def check(self) -> None:
        super().check()
        for name in ("scale", "softcap", "sinks"):
            if getattr(self, name):
                raise tfkit.Invalid(name, f"cosine attention has no `{name}`")

    @property
    def kv_heads(self) -> int:
        return 1

    def build_core(self, make: tfkit.Make, *, causal: bool) -> nn.Module:
        return Cosine(self.n_heads, self.start, self.dropout)


class Cosine(nn.Module):
    """Queries [b, h, q, d], keys and values [b, 1, k, d] and a mask -> [b, h, q, d]."""

    def __init__(self, n_heads: int, start: float, dropout: float) -> None:
        super().__init__()
        self.start = start
        self.factor = nn.Parameter(torch.empty(n_heads))
        self.softmax = tfkit.Softmax()
        self.dropout = dropout

    def reset_parameters(self) -> None:
        nn.init.constant_(self.factor, self.start)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        scores = torch.einsum("b h q d, b k d -> b h q k", q, k[:, 0]) * self.factor[:, None, None]
        weights = F.dropout(self.softmax(scores, mask), self.dropout, self.training)
        return torch.einsum("b h q k, b k d -> b h q d", weights, v[:, 0])


@tfkit.hookimpl
def tfkit_register(register: tfkit.Register) -> None:
    register(CosineConfig)
'''

SPEC = """
tfkit: 1
name: half_an_hour
requires: [scalenorm, grouped, cosine]
d_model: 32
vocab_size: 50
max_len: 16
norm: scalenorm
graph:
  embedding: {block: embedding}
  decoder:
    block: decoder
    n_layers: 2
    attention: {kind: cosine, n_heads: 4, position: rope}
    ffn: {kind: grouped, d_ff: 64, n_groups: 4, activation: silu}
  logits: {block: lm_head, tie: embedding}
"""
WRITTEN = {"scalenorm": SCALE_NORM, "grouped": GROUPED, "cosine": COSINE}


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("plugins")
    for name, text in WRITTEN.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    actual = tfkit.load_plugins(plugin_dirs=[folder], entry_points=False)
    assert actual.broken == ()
    return actual


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "slot", "fields"),
    [
        ("scalenorm", "norm", {}),
        ("grouped", "ffn", {}),
        ("cosine", "attention", {}),
        ("cosine", "attention", {"position": "alibi"}),
    ],
)
def test_they_keep_every_promise(kind: str, slot: str, fields: dict[str, Any], plugins: Any) -> None:
    check_component(kind, slot=slot, fields=fields, plugins=plugins)


def test_a_bound_that_no_vector_reaches_has_an_effect(plugins: Any) -> None:
    check_component("scalenorm", slot="norm", plugins=plugins, within=["encoder"], only=["values"])


def test_they_compute_what_was_meant(plugins: Any) -> None:
    model = tfkit.build(tfkit.loads(SPEC, plugins=plugins)).eval()
    layer = model.get_submodule("decoder.layers.0")
    x = torch.randn(2, 5, 32)
    torch.testing.assert_close(layer.ffn_norm_in(x).norm(dim=-1), torch.full((2, 5), 32**0.5))
    hidden = [F.silu(part @ weight.T) for part, weight in zip(x.chunk(4, dim=2), layer.ffn.weight, strict=True)]
    torch.testing.assert_close(layer.ffn(x), layer.ffn.down(torch.cat(hidden, dim=2)))
    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 1, 3, 8), torch.randn(1, 1, 3, 8)
    scores = 10 * F.cosine_similarity(q[:, :, :, None], k[:, :, None], dim=-1)
    torch.testing.assert_close(layer.attention.core(q, k, v, None), scores.softmax(dim=-1) @ v)


def test_they_decode_and_lead_out(plugins: Any) -> None:
    model = tfkit.build(tfkit.loads(SPEC, plugins=plugins)).eval()
    tokens = torch.randint(0, 50, (2, 9))
    cached = tfkit.CachedModel(model, length=16)
    chunks = torch.cat([cached(tokens[:, :6]), *(cached(tokens[:, n : n + 1]) for n in range(6, 9))], dim=1)
    torch.testing.assert_close(chunks, model(tokens))
    assert model.get_submodule("decoder.layers.0.attention.project.qkv").weight.shape == (32 + 2 * 8, 32)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("decoder.attention.softcap=30", "cosine attention has no `softcap`"),
        ("decoder.ffn.n_groups=3", "must be a multiple of n_groups"),
        ("norm={kind: scalenorm, eps: 0}", "greater than 0|above 0"),
    ],
)
def test_they_refuse_what_cannot_work(change: str, text: str, plugins: Any) -> None:
    with pytest.raises(tfkit.SpecError, match=text):
        tfkit.loads(SPEC, plugins=plugins, sets=[change])
