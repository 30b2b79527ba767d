"""Keys and values that layers share: in a forward pass, in caches and in exported programs, and errors of wires."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tfkit

LENGTH = 14
SHARED = {"kv_name": None, "kv_from": "full"}
LOCAL = {"mask": {"left": 3, "right": 0}, "kv_name": "local"}


def spec(layers: dict[str, Any] | None = None, **attention: Any) -> Any:
    base = {"kind": "gqa", "n_heads": 4, "n_kv_heads": 2, "position": "rope", "qk_norm": "rmsnorm", "kv_name": "full"}
    variants = {
        "local": {"attention": LOCAL},
        "local_shared": {"attention": LOCAL | {"kv_name": None, "kv_from": "local"}},
        "shared": {"attention": SHARED},
    }
    pattern = ["local", "base", "local_shared", "shared", "base", "shared"]
    stack = {"block": "decoder", "n_layers": 6, "attention": base | {"mask": {"right": 0}} | attention}
    stack |= {"layers": layers or {"variants": variants, "pattern": pattern}, "ffn": {"kind": "gelu", "d_ff": 24}}
    graph = {"embedding": {"block": "embedding"}, "decoder": stack, "logits": {"block": "lm_head"}}
    return {"tfkit": 1, "name": "shared", "d_model": 16, "vocab_size": 17, "max_len": 32, "graph": graph}


def built(spec: Any, **options: Any) -> Any:
    model = tfkit.build(spec, **options).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


@torch.no_grad()
def test_a_layer_attends_to_the_keys_of_the_last_layer_that_gave_them() -> None:
    model, ids = built(spec()), torch.arange(LENGTH)[None] % 17
    inputs: dict[int, tuple[Any, ...]] = {}
    """Queries, keys and values of each layer."""
    for number, layer in enumerate(model.decoder.layers):
        layer.attention.core.register_forward_pre_hook(lambda _, args, n=number: inputs.__setitem__(n, args))
    model(ids)
    for taker, giver in {2: 0, 3: 1, 5: 4}.items():
        assert torch.equal(inputs[taker][1], inputs[giver][1])
        assert torch.equal(inputs[taker][2], inputs[giver][2])
        assert not torch.equal(inputs[taker][0], inputs[giver][0])
    assert not torch.equal(inputs[1][1], inputs[4][1])
    names = {name for name, _ in model.decoder.layers[3].attention.named_parameters()}
    assert names == {"project.q.weight", "project.q.bias", "q_norm.weight", "output.weight", "output.bias"}


@torch.no_grad()
@pytest.mark.parametrize("layers", [None, {"groups": 2, "order": "looped"}], ids=["pattern", "looped"])
def test_shared_keys_are_cached_once(layers: dict[str, Any] | None) -> None:
    if layers is not None:
        # With fewer heads, the second layer shares no mask and no positions with the first.
        shared = {"attention": SHARED | {"n_heads": 2, "d_head": 4}}
        layers = layers | {"variants": {"shared": shared}, "pattern": ["base", "shared"]}
    model, ids = built(spec(layers)), torch.arange(3 * LENGTH).view(3, LENGTH) % 17
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, :3], mask[2, 11:] = False, False
    y = model(ids, mask)
    for row, real, actual in zip(ids, mask, y, strict=True):
        torch.testing.assert_close(actual[real], model(row[real][None])[0], rtol=0, atol=1e-5)
    for padding, cuts in ((None, [1] * LENGTH), (None, [7, 1, 6]), (mask, [6, 1, 4, 3])):
        cached = tfkit.CachedModel(model, length=LENGTH)
        chunks = [
            cached(part, None if padding is None else real)
            for part, real in zip(ids.split(cuts, dim=1), mask.split(cuts, dim=1), strict=True)
        ]
        real = torch.ones_like(mask) if padding is None else padding
        expected = model(ids) if padding is None else y
        torch.testing.assert_close(torch.cat(chunks, dim=1)[real], expected[real], rtol=0, atol=1e-5)
    assert len([tensor for _, _, tensor in cached.tensors()]) == 6


@pytest.mark.slow
def test_recomputed_and_scripted_layers_have_equal_bits() -> None:
    layers = {
        "groups": 2,
        "order": "looped",
        "variants": {"shared": {"attention": SHARED}},
        "pattern": ["base", "shared"],
    }
    model, recomputed = built(spec(layers)), built(spec(layers), recompute=True)
    ids = torch.arange(LENGTH)[None] % 17
    with pytest.warns(UserWarning, match="TorchScript type system"):
        scripted = torch.jit.script(model)
    assert torch.equal(scripted(ids), model(ids))
    for module in (model, recomputed):
        module(ids).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, recomputed.get_parameter(name).grad)


@pytest.mark.parametrize(
    ("pattern", "attention", "message"),
    [
        (["shared", "base", "local", "local_shared"], {}, "layer 0 takes `full.keys`, but no earlier layer gives it"),
        (["shared", "base"], {}, "layer 0 takes `full.keys`, but no earlier layer gives it"),
        (["base", "local", "local_shared", "base"], {}, "gives `full.keys`, which has no effect"),
        (None, {"value_norm": "rmsnorm"}, "`value_norm` has no effect: the keys and values come from an earlier layer"),
        (None, {"values": "keys"}, "`values` has no effect: the keys and values come from an earlier layer"),
        (None, {"kv_name": "full", "mask": {"left": 2, "right": 0}}, "`mask` must be equal"),
    ],
)
def test_an_unmet_wire_is_an_error(pattern: list[str] | None, attention: dict[str, Any], message: str) -> None:
    broken = spec(**attention)
    layers = broken["graph"]["decoder"]["layers"]
    if pattern is not None and len(pattern) == 2:
        layers |= {"groups": 2, "order": "looped", "variants": {"shared": layers["variants"]["shared"]}}
    if pattern is not None:
        layers["pattern"] = pattern
    used = {*layers["pattern"]}
    layers["variants"] = {name: variant for name, variant in layers["variants"].items() if name in used}
    if "mask" in attention:
        layers["variants"]["shared"]["attention"] = SHARED | {"mask": {"left": 4, "right": 0}}
    with pytest.raises(tfkit.SpecError, match=message):
        tfkit.build(broken)
