"""Values inside a model by name: equal to hooks of torch on its modules, and to the hidden states of transformers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx

import tfkit
from tests.small_specs import reduced

SPEC = """
    tfkit: 1
    name: small
    d_model: 16
    vocab_size: 11
    dropout: 0.1
    graph:
      embedding: embedding
      decoder: {block: decoder, n_layers: 2, attention: {kind: mha, n_heads: 2}, ffn: {kind: relu, d_ff: 24}}
      logits: {block: lm_head, tie: embedding}
"""
TOKENS = torch.arange(12).view(2, 6) % 11
MODULES = {
    "stream.out": ("", None),
    "stream.in": ("", 0),
    "attention.in": ("attention", 0),
    "attention.q": ("attention.core", 0),
    "attention.heads": ("attention.merge_heads", 0),
    "attention.out": ("attention", None),
    "ffn.hidden": ("ffn.dropout", None),
    "ffn.out": ("ffn", None),
}
"""The module of a layer, and its argument or its output, for some of the names."""
PLACEMENTS = {
    "pre": ["decoder.placement=pre"],
    "sandwich": ["decoder.placement=sandwich"],
    "parallel": ["decoder.placement=parallel"],
    "scaled": ["decoder.residual={scale: 0.5}"],
    "learned": ["decoder.residual={learned: vector, scale: 3}"],
    "looped": ["decoder.layers={groups: 1, order: looped}"],
}


def built(*sets: str) -> fx.GraphModule:
    return tfkit.build(tfkit.loads(SPEC, sets=sets)).eval()


def inputs_of(graph: tfkit.Graph) -> dict[str, Tensor]:
    return {name: TOKENS % 2 if name == "token_types" else TOKENS % 7 for name in graph.inputs}


def n_hooks(model: fx.GraphModule) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_values_equal_plain_hooks() -> None:
    model = built("decoder.ffn.dropout=0.1")
    expected: dict[str, Tensor] = {}
    handles = []
    for name, (path, argument) in MODULES.items():
        module = model.get_submodule(f"decoder.layers.1.{path}".rstrip("."))

        def keep(_: Any, args: Any, output: Any = None, name: str = name, argument: int | None = argument) -> None:
            expected[name] = output if argument is None else args[argument]

        register = module.register_forward_hook if argument is None else module.register_forward_pre_hook
        handles.append(register(keep))
    logits = model(TOKENS)
    for handle in handles:
        handle.remove()
    names = ["decoder.layers.*.stream.*", "decoder.layers.*.*.out", *(f"decoder.layers.1.{name}" for name in MODULES)]
    with tfkit.trace(model, read=[*names, "logits", "embedding"]) as values:
        model(TOKENS)
    for name, value in expected.items():
        assert torch.equal(values[f"decoder.layers.1.{name}"], value), name
    assert torch.equal(values["logits"], logits)
    assert torch.equal(values["embedding"], values["decoder.layers.0.stream.in"])
    assert torch.equal(values["decoder.layers.0.stream.out"], values["decoder.layers.1.stream.in"])
    assert len(values) == 2 + 2 * 5 + 4


def test_a_patched_stream_gives_the_output_of_the_other_prompt() -> None:
    model, other = built(), (TOKENS + 3) % 11
    name = "decoder.layers.0.stream.out"
    with tfkit.trace(model, read=name) as values:
        expected = model(other)
    with tfkit.trace(model, read=[name, "decoder.layers.1.stream.in"], write={name: values[name]}) as patched:
        assert torch.equal(model(TOKENS), expected)
    assert all(torch.equal(value, values[name]) for value in patched.values())
    assert not torch.equal(model(TOKENS), expected)


def test_an_ablated_head_is_a_head_without_an_output_weight() -> None:
    model = built()

    def ablate(heads: Tensor) -> Tensor:
        heads[:, 1] = 0
        return heads

    name = "decoder.layers.1.attention.heads"
    with tfkit.trace(model, read="decoder.layers.1.attention.in", write={name: ablate}) as values:
        logits = model(TOKENS)
    before = values["decoder.layers.1.attention.in"].clone()
    model.decoder.layers[1].attention.output.weight.data[:, 8:] = 0  # type: ignore[union-attr, index]
    torch.testing.assert_close(model(TOKENS), logits)
    assert torch.equal(values["decoder.layers.1.attention.in"], before)


def test_a_function_that_writes_in_place_writes_a_copy() -> None:
    """Post-LN attention takes the stream, to which its output is added."""
    model, name = built("decoder.placement=post"), "decoder.layers.1.attention.in"
    outputs = []
    for edit in (torch.Tensor.zero_, torch.zeros_like):
        with tfkit.trace(model, write={name: edit}):
            outputs.append(model(TOKENS))
    assert torch.equal(*outputs)


def test_gradients_flow_through_reads_and_writes() -> None:
    model, steer = built(), torch.zeros(16, requires_grad=True)
    write = {"decoder.layers.0.stream.out": lambda x: x + steer}
    with tfkit.trace(model, read="decoder.layers.*.stream.out", write=write) as values:
        loss = model(TOKENS)[..., 1].sum()
    (first,) = torch.autograd.grad(loss, values["decoder.layers.0.stream.out"], retain_graph=True)
    (direction,) = torch.autograd.grad(loss, steer)
    assert first.abs().sum() > 0
    torch.testing.assert_close(direction, first.sum(dim=(0, 1)))


def test_hooks_are_removed_also_after_an_error() -> None:
    model = built()
    message = r"the replacement of `logits` must be a tensor, torch.float32 \[2, 6, 11\]; got torch.float32 \[6, 11\]"
    traced = tfkit.trace(model, read="decoder", write={"logits": lambda x: x[0]})
    with pytest.raises(ValueError, match=message), traced:
        model(TOKENS)
    assert n_hooks(model) == 0


def test_steps_of_generate_are_a_list() -> None:
    model = built()
    with tfkit.trace(model, read=["decoder.layers.1.stream.out", "decoder.layers.0.attention.k"]) as values:
        output = tfkit.generate(model, TOKENS[:1, :3], max_new_tokens=3)
    stream, keys = values.values()
    tokens = torch.cat([TOKENS[:1, :3], output.tokens[:, :2]], dim=1)
    with torch.no_grad(), tfkit.trace(model, read=[*values]) as full:
        model(tokens)
    torch.testing.assert_close(torch.cat(values["decoder.layers.1.stream.out"], dim=1), [*full.values()][1])
    assert len(stream) == len(keys) == 3


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("decoder.layers.0.atention.out", "`small` has no value `decoder.layers.0.atention.out`: a value with a similar"
         " name exists: `decoder.layers.*.attention.out`"),
        ("encoder.layers.*.stream.out", "a value with a similar name exists: `decoder.layers.*.stream.out`"),
        ("decoder.layers.2.stream.out", "a value with a similar name exists: `decoder.layers.*.stream.out`"),
        ("*.stream.out", "`small` has no value `*.stream.out`"),
    ],
)  # fmt: skip
def test_a_wrong_name_is_an_error(names: str, message: str) -> None:
    for arguments in ({"read": names}, {"write": {names: torch.zeros_like}}):
        with pytest.raises(ValueError, match=re.escape(message)):
            tfkit.trace(built(), **arguments)  # type: ignore[arg-type]


def test_a_model_that_is_not_called_or_runs_layers_again_is_an_error() -> None:
    with pytest.raises(ValueError, match="`decoder` was not computed"), tfkit.trace(built(), read="decoder"):
        pass
    model = tfkit.build(tfkit.loads(SPEC), recompute=True)
    with pytest.raises(ValueError, match="built with `recompute`"), tfkit.trace(model, read="decoder"):
        pass


PAIR = """
    tfkit: 1
    name: pair
    d_model: 16
    vocab_size: 11
    inputs: [source, target]
    graph:
      source_embedding: {block: embedding, input: source}
      encoder: {block: encoder, n_layers: 2, attention: {n_heads: 2}, ffn: {kind: relu, d_ff: 24}}
      embedding: {block: embedding, input: target}
      decoder: {block: decoder, memory: encoder, n_layers: 1, attention: {n_heads: 2}, ffn: {kind: relu, d_ff: 24}}
      logits: lm_head
"""


def test_a_position_may_exist_in_some_of_the_matching_values() -> None:
    model, source, target = tfkit.build(tfkit.loads(PAIR)).eval(), TOKENS, TOKENS[:, :4]
    plain = model(source, target)
    edit = {"*.layers.0.stream.out": lambda x: 2 * x}
    with tfkit.trace(model, write=edit, positions=5):  # the target has positions up to 3
        assert not torch.allclose(model(source, target), plain)
    with pytest.raises(ValueError, match=r"has no positions \[6\]"), tfkit.trace(model, write=edit, positions=[5, 6]):
        model(source, target)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_lens_and_contributions(placement: str) -> None:
    model = built(*PLACEMENTS[placement])
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    with tfkit.trace(model, read="decoder.layers.*.stream.out") as values:
        logits = model(TOKENS)
    last = [*values.values()][-1]
    of_layers = [*tfkit.lens(model, TOKENS).values()][-1]
    additions = [*tfkit.contributions(model, TOKENS).values()]
    if placement == "looped":
        assert not torch.equal(of_layers[0], logits)
        last, of_layers = last[1], of_layers[1]
        additions = [additions[0], *(x for run in additions[1:] for x in run)]
    assert torch.equal(of_layers, logits)
    assert len(additions) == 5
    torch.testing.assert_close(sum(additions), last)
    assert n_hooks(model) == 0


def test_contributions_refuse_a_norm_of_the_sum_and_a_lens_needs_a_head() -> None:
    with pytest.raises(ValueError, match=r"`decoder.layers.0.attention` must be added to the residual stream"):
        tfkit.contributions(built("decoder.placement=post"), TOKENS)
    with pytest.raises(ValueError, match="must have one head that takes the output of a stack; got none"):
        tfkit.lens(tfkit.build(reduced("block_512")), x=torch.zeros(1, 2, 16))


DELTA = "{kind: gated_delta, n_heads: 4, n_key_heads: 2, d_key: 4, d_value: 4, size: 2}"


def with_mixer() -> fx.GraphModule:
    text = SPEC.replace("attention: {kind: mha, n_heads: 2}", f"sublayers: [mixer, ffn], mixer: {DELTA}")
    return tfkit.build(tfkit.loads(text)).eval()


@pytest.mark.parametrize("kind", ["mamba", "gated_delta"])
def test_padding_is_where_it_was_in_a_mixer(kind: str) -> None:
    model = tfkit.build(reduced("mamba_130m")).eval() if kind == "mamba" else with_mixer()
    mask = torch.tensor([[False, False, True, True, True]])
    read = ["decoder.layers.0.mixer.*", "decoder.layers.0.stream.*"]
    with tfkit.trace(model, read=read) as alone:
        model(TOKENS[:1, 2:5])
    with tfkit.trace(model, read=read) as padded:
        logits = model(TOKENS[:1, :5], tokens_mask=mask)
    assert len(alone) == (6 if kind == "mamba" else 12 + 1)
    for name, value in alone.items():
        axis = value.dim() - 2
        torch.testing.assert_close(padded[name].narrow(axis, 2, 3), value, msg=name)
    write = {f"decoder.layers.0.mixer.{name}": lambda x: x for name in ("in", "inner", "out")}
    with tfkit.trace(model, write=write):
        assert torch.equal(model(TOKENS[:1, :5], tokens_mask=mask), logits)
    (gradient,) = torch.autograd.grad(logits[:, 3].sum(), padded["decoder.layers.0.mixer.out"])
    assert gradient[:, 2:4].all()
    assert not gradient[:, 4].any()


def test_the_state_of_a_mixer_is_read_and_written_at_each_step() -> None:
    model, name = with_mixer(), "decoder.layers.1.mixer.state"
    states: list[Tensor] = []
    mixer = model.get_submodule("decoder.layers.1.mixer")
    handle = mixer.register_forward_hook(lambda _m, args, _y: states.append(args[1].cache.tensors[1].clone()))
    with handle, tfkit.trace(model, read=name) as values:
        tfkit.generate(model, TOKENS[:1, :3], max_new_tokens=3)
    assert len(values[name]) == 3
    assert torch.equal(torch.stack(values[name]), torch.stack(states))
    outputs = []
    for context in (
        tfkit.ablate(model, f"{name}.1"),
        tfkit.ablate(model, "decoder.layers.1.mixer.v.1", positions=[0, 1]),
    ):
        with context, tfkit.trace(model, read="decoder.layers.1.mixer.heads") as heads:
            cached = tfkit.CachedModel(model, length=4)
            for piece in (TOKENS[:1, :2], TOKENS[:1, 2:3]):
                cached(piece)
        outputs.append(heads["decoder.layers.1.mixer.heads"][1])
    torch.testing.assert_close(*outputs)  # a state of values of zero is zero
    message = f"`{name}` was not computed: read the sequence with `generate` or `CachedModel` before the trace ends"
    with pytest.raises(ValueError, match=re.escape(message)), tfkit.trace(model, read=name):
        model(TOKENS)


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich", "parallel"])
def test_the_stream_between_sublayers(placement: str) -> None:
    model, name = built(f"decoder.placement={placement}"), "decoder.layers.0.stream.mid"
    if placement == "parallel":
        with pytest.raises(ValueError, match=r"has no value `decoder.layers.0.stream.mid`"):
            tfkit.trace(model, read=name)
        return
    with tfkit.trace(model, read=[name, "decoder.layers.0.stream.in", "decoder.layers.0.attention.out"]) as values:
        model(TOKENS)
    stream, added, mid = values.values()
    layer: Any = model.get_submodule("decoder.layers.0")
    added = layer.attention_norm_out(added) if placement == "sandwich" else added
    expected = stream + added
    torch.testing.assert_close(mid, layer.attention_norm_after(expected) if placement == "post" else expected)
    if placement == "post":
        with tfkit.ablate(model, name), tfkit.trace(model, read="decoder.layers.0.ffn.in") as values:
            model(TOKENS)
        assert not values["decoder.layers.0.ffn.in"].any()
    else:
        with pytest.raises(ValueError, match=f"`{name}` can only be read"):
            tfkit.ablate(model, name)


def repeated(keys: Tensor, queries: Tensor) -> Tensor:
    return keys.repeat_interleave(queries.size(1) // keys.size(1), dim=1)


def additive(attention: Any, q: Tensor, k: Tensor) -> Tensor:
    return (torch.tanh(q[:, :, :, None] + k[:, :, None]) * attention.core.weight[:, None, None]).sum(-1)


SCORES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "gpt2": lambda _, q, k: q @ k.mT / q.size(-1) ** 0.5,
    "llama3_8b": lambda _, q, k: q @ repeated(k, q).mT / q.size(-1) ** 0.5,
    "t5_small": lambda _, q, k: q @ k.mT,
    "additive": additive,
}


@pytest.mark.parametrize("name", SCORES)
def test_scores_and_weights_are_the_formula(name: str) -> None:
    graph = tfkit.loads(SPEC, sets=["decoder.attention.kind=additive"]) if name == "additive" else reduced(name)
    model, inputs = tfkit.build(graph).eval(), inputs_of(graph)
    path = f"decoder.layers.1.{'cross_attention' if name == 't5_small' else 'attention'}"
    names = [f"{path}.{value}" for value in ("q", "k", "v", "scores", "weights", "heads")]
    expected = model(**inputs)
    with tfkit.trace(model, read=names) as values:
        output = model(**inputs)
    torch.testing.assert_close(output, expected)
    q, k, v, scores, weights, heads = (values[name] for name in names)
    torch.testing.assert_close(scores, SCORES[name](model.get_submodule(path), q, k))
    future = torch.ones(6, 6, dtype=torch.bool).triu(1) & (name != "t5_small")
    torch.testing.assert_close(weights, scores.masked_fill(future, -torch.inf).softmax(dim=-1))
    torch.testing.assert_close(heads, weights @ repeated(v, q))
    with tfkit.trace(model, read=names[-1:], write={names[3]: torch.zeros_like, names[4]: lambda w: 2 * w}) as uniform:
        model(**inputs)
    mean = (~future).float() / (~future).sum(dim=-1, keepdim=True)
    torch.testing.assert_close(uniform[names[-1]], 2 * mean @ repeated(v, q))
    assert torch.equal(model(**inputs), expected)


def test_weights_are_read_with_other_hooks_in_training_and_in_generate() -> None:
    model, name = built("dropout=0", "decoder.attention.dropout=0.5"), "decoder.layers.1.attention.weights"
    edit = {"decoder.layers.0.stream.out": torch.zeros_like}
    with tfkit.trace(model, write=edit), tfkit.trace(model, read=name) as values:
        loss = model(TOKENS).sum()
        with tfkit.trace(model, read=name) as nested:
            model(TOKENS)
        model(TOKENS)
    past = torch.ones(6, 6).tril()
    torch.testing.assert_close(values[name][0], (past / past.sum(1, keepdim=True)).expand(2, 2, 6, 6))
    assert len(values[name]) == 3
    assert torch.equal(nested[name], values[name][0])
    loss.backward()
    assert model.get_parameter("decoder.layers.1.attention.output.bias").grad.any()  # type: ignore[union-attr]
    with tfkit.trace(model, read=name) as steps:
        tfkit.generate(model, TOKENS[:1, :3], max_new_tokens=2)
    assert [weights.shape[2:] for weights in steps[name]] == [(3, 3), (1, 4)]
    outputs = []
    for train in (True, False):
        with tfkit.trace(model.train(train), read=name):
            outputs.append([model(TOKENS) for _ in range(2)])
    assert not torch.equal(*outputs[0])
    assert torch.equal(*outputs[1])
    assert n_hooks(model) == 0


def test_the_router_chooses_the_experts_that_are_written() -> None:
    graph = reduced("mixtral_8x7b")
    model, path = tfkit.build(graph).eval(), "decoder.layers.0.ffn"
    with tfkit.trace(model, read=f"{path}.*") as values:
        model(TOKENS)
    ffn: Any = model.get_submodule(path)
    tokens = values[f"{path}.in"].flatten(0, 1)
    logits = tokens @ ffn.router.weight.T
    torch.testing.assert_close(values[f"{path}.router_logits"], logits)
    probabilities, experts = logits.topk(2)
    torch.testing.assert_close(values[f"{path}.router"].sort().values, probabilities.softmax(dim=-1).sort().values)
    assert torch.equal(values[f"{path}.experts"].sort().values, experts.sort().values)
    chosen = torch.tensor([1, 0]).expand(12, 2)
    with tfkit.trace(model, read=f"{path}.out", write={f"{path}.experts": chosen}) as written:
        model(TOKENS)
    mixed = ffn.experts(tokens, chosen, values[f"{path}.router"])
    torch.testing.assert_close(written[f"{path}.out"].flatten(0, 1), mixed)


INNER = {
    "attention.q": ("attention.core", 0),
    "attention.k": ("attention.core", 1),
    "attention.v": ("attention.core", 2),
    "attention.heads": ("attention.core", None),
    "cross_attention.q": ("cross_attention.core", 0),
    "cross_attention.heads": ("cross_attention.core", None),
    "ffn.hidden": ("ffn.down", 0),
    "ffn.router": ("ffn.router", None),
    "ffn.router_logits": ("ffn.router.bound", None),
    "mixer.inner": ("mixer.output", 0),
    "mixer.q": ("mixer.rule", 0),
    "mixer.beta": ("mixer.rule", 4),
    "mixer.heads": ("mixer.rule", None),
    "mixer.step": ("mixer.step_up", None),
    "mixer.opening": ("mixer.gates", None),
}
"""The module of a layer, and its argument or its output, for values inside sublayers."""


def by_hooks(model: fx.GraphModule, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the values of a forward, by hooks of torch on the modules that the layers have."""
    values: dict[str, Tensor] = {}

    def hook(path: str, name: str, argument: int | None) -> Any:
        def keep(_: Any, args: Any, output: Any = None) -> None:
            value = output if argument is None else args[argument]
            values.setdefault(name, value[0] if isinstance(value, tuple) else value)

        module = model.get_submodule(path)
        register = module.register_forward_hook if argument is None else module.register_forward_pre_hook
        return register(keep)

    handles = []
    paths = {path for path, _ in model.named_modules()}
    for path in (path for path in paths if re.fullmatch(r"\w+\.layers\.\d+", path)):
        sublayers = [name for name in ("attention", "cross_attention", "ffn", "mixer") if f"{path}.{name}" in paths]
        stream = "streams" if f"{path.partition('.')[0]}.enter" in paths else "stream"
        points = {f"{stream}.in": ("", 0), f"{stream}.out": ("", None)}
        points |= {f"{name}.in": (name, 0) for name in sublayers} | {f"{name}.out": (name, None) for name in sublayers}
        for name, (module, argument) in (points | INNER).items():
            if not module or f"{path}.{module}" in paths:
                handles.append(hook(f"{path}.{module}".rstrip("."), f"{path}.{name}", argument))
    model(**inputs)
    for handle in handles:
        handle.remove()
    return values


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["bart_base", "bert_base", "deepseek_v2_lite", "gemma3_1b", "gpt_j_6b", "gpt_oss_20b", "llama3_8b", "mixtral_8x7b",
     "olmo2_7b", "palm_540b", "t5_small", "vaswani_base", "jamba_v0_1", "qwen3_next_80b_a3b", "albert_base",
     "mamba2_130m", "recurrentgemma_2b", "kimi_linear_48b_a3b", "lfm2_1_2b", "mhc_small", "depth_small",
     "gated_streams_small", "minimax_text_01", "rwkv4_169m", "xlstm_7b", "gpt2"],
)  # fmt: skip
def test_shipped_specs(name: str) -> None:
    """Values have the listed sizes and equal the values of plain hooks; rewriting them changes nothing."""
    from tfkit.tools.show.points import points_of

    graph = reduced(name)
    model, inputs = tfkit.build(graph).eval(), inputs_of(graph)
    shapes = {point.name: point.shape for point in points_of(graph) if point.state is None}
    of_hooks = {key: value for key, value in by_hooks(model, inputs).items() if key in shapes}
    assert len(of_hooks) >= 8
    with tfkit.trace(model, read=[*of_hooks]) as values:
        model(**inputs)
    for key, value in of_hooks.items():
        first = values[key][0] if isinstance(values[key], list) else values[key]
        assert torch.equal(first, value), key
    with tfkit.trace(model, read=[*shapes]):  # attention is written out, as below
        expected = model(**inputs)
    written = [point.name for point in points_of(graph) if point.name in shapes and not point.read_only]
    with tfkit.trace(model, read=[*shapes], write={key: lambda x: x for key in written}) as values:
        output = model(**inputs)
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
    assert values.keys() == shapes.keys()
    for key, shape in shapes.items():
        value = values[key][0] if isinstance(values[key], list) else values[key]
        sizes = [{"b": 2, "t": 6, "k": 6, "b*t": 12}.get(size, size) for size in shape[1:-1].split(", ")]
        sizes = [*sizes[:-1], *value.shape[len(sizes) - 1 :]] if sizes[-1] == "..." else sizes
        assert [str(size) for size in sizes] == [str(size) for size in value.shape], key
    if "logits" in graph.outputs and not any("streams.in" in key for key in shapes):
        expected = model(**inputs)
        logits = expected if isinstance(expected, Tensor) else expected[0]
        last = [*tfkit.lens(model, **inputs).values()][-1]
        assert torch.equal(last[-1] if isinstance(last, list) else last, logits)


@pytest.mark.slow
@pytest.mark.parametrize("enters", [True, False])
def test_residual_streams(enters: bool) -> None:
    sets = [
        "inputs={tokens: {type: tokens}, c: {type: vector, width: 16}}",
        "embedding={block: embedding, input: tokens}",
        "decoder.condition=c",
        "decoder.norm={kind: adaptive, d_condition: 16}",
        "decoder.residual={kind: modulated, d_condition: 16}",
    ]
    model = built(*(["decoder.residual=manifold"] if enters else sets))
    inputs = {"tokens": TOKENS} | ({} if enters else {"c": torch.randn(2, 16)})
    names = ["decoder.layers.0.ffn.out", "decoder"]
    with tfkit.trace(model, read=names) as values:
        logits = model(**inputs)
    assert [value.shape for value in values.values()] == [(2, 6, 16)] * 2
    calls: list[Callable[[], Any]] = [lambda: tfkit.contributions(model, **inputs)]
    if enters:
        calls += [lambda: tfkit.trace(model, read="decoder.layers.0.stream.out"), lambda: tfkit.lens(model, **inputs)]
    else:
        assert torch.equal([*tfkit.lens(model, **inputs).values()][-1], logits)
    for call in calls:
        with pytest.raises(ValueError, match=r"has no value|must be added"):
            call()


@pytest.mark.slow
def test_streams_are_the_hidden_states_of_transformers(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=16, n_head=2, n_layer=3, vocab_size=11, n_positions=8)
    theirs = GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path)
    model = tfkit.build(tfkit.import_config(tmp_path).graph, weights=tmp_path).eval()
    with tfkit.trace(model, read=["embedding", "decoder.layers.*.stream.out", "decoder"]) as values:
        model(TOKENS)
    hidden = theirs(TOKENS, output_hidden_states=True).hidden_states
    streams = [values["embedding"], *(values[f"decoder.layers.{n}.stream.out"] for n in (0, 1)), values["decoder"]]
    for stream, state in zip(streams, hidden, strict=True):
        torch.testing.assert_close(stream, state, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("declared", "cause"),
    [
        (
            lambda: {"gate": tfkit.InnerValue("up", cast(Any, "x"), "[b, t, 8]")},
            "TypeError: `argument` of an InnerValue",
        ),
        (
            lambda: {"gate": tfkit.InnerValue("up", 0, cast(Any, 8))},
            "TypeError: `shape` of an InnerValue must be a text; got 8",
        ),
        (
            lambda: {"gate": tfkit.InnerValue("up", -1, "[b]")},
            "TypeError: `argument` of an InnerValue",
        ),
        (lambda: {"gate": ("up", 0)}, "TypeError: `gate` must be an InnerValue; got ('up', 0)"),
        (lambda: dict[str, Any]()["gate"], "KeyError: 'gate'"),
    ],
)
def test_an_inner_value_that_is_wrong_is_an_error_of_its_kind(
    declared: Callable[[], Any], cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built()
    kind = type(model.meta["components"]["decoder.layers.0.ffn"])
    monkeypatch.setattr(kind, "inner_values", property(lambda _: declared()))
    with pytest.raises(tfkit.SpecError) as caught, tfkit.trace(model, read="*.gate"):
        model(TOKENS)
    (error,) = caught.value.diagnostics
    assert error.message == "ffn kind `relu` failed in `inner_values`"
    assert error.notes[0].startswith(cause)
