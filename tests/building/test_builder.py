"""Tests that a built model is an ordinary module: it can be copied, saved, moved, compiled, scripted and exported."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import tfkit
from tests.sampling import chosen
from tests.small_specs import reduced
from tfkit.building.builder import allocate_tensors
from tfkit.nn import Written
from tfkit.testing import check_script, example_inputs

LAYER = ["n_layers=2", "attention.n_heads=2", "ffn.d_ff=24"]
SPECS = {
    "gpt2": ["d_model=16", "vocab_size=13", "max_len=32", *(f"graph.decoder.{field}" for field in LAYER)],
    "vaswani_base": [
        *("d_model=16", "vocab_size=13", "max_len=32"),
        *(f"graph.{stack}.{field}" for stack in ("encoder", "decoder") for field in LAYER),
    ],
    "bert_base": ["d_model=16", "vocab_size=13", "max_len=32", *(f"graph.encoder.{field}" for field in LAYER)],
}
TABLE = {"gpt2": "embedding", "vaswani_base": "source_embedding", "bert_base": "embedding"}


def graph_of(name: str) -> tfkit.Graph:
    return tfkit.load(name, sets=SPECS[name])


def model_of(name: str) -> torch.fx.GraphModule:
    """The model without dropout, so that a training step can be repeated."""
    return tfkit.build(graph_of(name)).eval()


def inputs_of(name: str, length: int = 6, batch: int = 3) -> dict[str, Tensor]:
    inputs = example_inputs(graph_of(name), length=length, batch=batch, padding="left")
    return {key: value for key, value in inputs.items() if key != "token_types_mask"}


# ---- what `build` is told ----


@pytest.mark.parametrize("name", SPECS)
def test_the_meta_device_has_the_same_shapes_and_no_memory(name: str) -> None:
    meta, real = tfkit.build(graph_of(name), device="meta"), model_of(name)
    shapes = [{n: (t.shape, t.dtype) for n, t in m.state_dict().items()} for m in (meta, real)]
    assert shapes[0] == shapes[1]
    assert all(tensor.is_meta for tensor in meta.state_dict().values())
    output = meta(**{key: value.to("meta") for key, value in inputs_of(name).items()})
    assert output.shape == real(**inputs_of(name)).shape


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_a_type_is_the_type_of_everything(name: str, dtype: torch.dtype) -> None:
    model = tfkit.build(graph_of(name), dtype=dtype).eval()
    assert {tensor.dtype for tensor in model.state_dict().values()} == {dtype}
    assert model(**inputs_of(name)).dtype == dtype


def test_memory_is_allocated_once_for_a_shared_module_and_only_where_there_is_none() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.LSTM(3, 5), nn.Linear(2, 3).requires_grad_(False))
        module.append(module[0])
    module[3].bias = filled = nn.Parameter(torch.ones(3))
    module.register_buffer("seen", torch.ones(1, device="meta"), persistent=False)
    allocate_tensors(module, "cpu")
    tensors = [*module.parameters(), *module.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    assert module[0] is module[4]
    assert module[3].bias is filled
    assert [tensor.requires_grad for tensor in module[3].parameters()] == [False, True]
    assert "seen" not in module.state_dict()
    module[2](torch.zeros(1, 3))  # its list of weights has the new ones


def test_the_default_type_of_torch_is_the_default_type() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert next(model_of("gpt2").parameters()).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_path_a_name_and_a_graph_give_the_same(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("tfkit: 1\nextends: gpt2\nname: mine\n", encoding="utf-8")
    states = [tfkit.build(name, sets=SPECS["gpt2"]).state_dict() for name in ("gpt2", path, str(path))]
    states.append(tfkit.build(graph_of("gpt2")).state_dict())
    for other in states[1:]:
        assert all(torch.equal(states[0][key], value) for key, value in other.items())


def test_each_submodule_knows_the_component_that_made_it() -> None:
    model = model_of("gpt2")
    actual = {path: (config.slot, config.kind_name()) for path, config in model.meta["components"].items()}
    assert actual["decoder.layers.0.attention"] == ("attention", "mha")
    assert actual["decoder.layers.1.ffn_norm_in"] == ("norm", "layernorm")
    assert actual["embedding.position"] == ("position", "learned")
    assert set(actual) <= {name for name, _ in model.named_modules()}


@pytest.mark.parametrize("name", ["gpt2", "llama3_8b", "t5_small", "deepseek_v3"])
def test_the_code_reads_as_if_written_by_hand(name: str, golden: Callable[[str, str], None]) -> None:
    model = tfkit.build(reduced(name), device="meta")
    texts: dict[str, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, Written):
            texts.setdefault(inspect.getsource(type(module)), path)
    golden(f"code_{name}", "\n".join([model.code, *(f"# {path}\n{text}" for text, path in texts.items())]).strip())


# ---- what can be done with it ----


def through_safetensors(model: nn.Module, name: str, tmp_path: Path) -> nn.Module:
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other = tfkit.build(graph_of(name), seed=1).eval()
    assert not torch.equal(next(other.parameters()), next(model.parameters()))
    other.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    return other


def through_a_file(model: nn.Module, name: str, tmp_path: Path) -> nn.Module:
    torch.save(model, tmp_path / "model.pt")
    return torch.load(tmp_path / "model.pt", weights_only=False)


def exported(model: nn.Module, name: str, tmp_path: Path) -> nn.Module:
    inputs = inputs_of(name)
    shapes = {key: {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC} for key in inputs}
    return torch.export.export(model, (), inputs, dynamic_shapes=shapes).module()


def compiled(model: nn.Module, name: str, tmp_path: Path) -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, dynamic=True, backend="eager")


def scripted(model: nn.Module, name: str, tmp_path: Path) -> nn.Module:
    check_script(model, inputs_of(name))
    with pytest.warns(UserWarning, match="TorchScript type system"):
        return torch.jit.script(model)


def scripted_and_saved(model: nn.Module, name: str, tmp_path: Path) -> nn.Module:
    torch.jit.save(scripted(model, name, tmp_path), tmp_path / "model.pt")
    return torch.jit.load(tmp_path / "model.pt")


WAYS: dict[str, Callable[[nn.Module, str, Path], nn.Module]] = {
    "deepcopy": lambda model, name, tmp_path: copy.deepcopy(model),
    "pickle": lambda model, name, tmp_path: pickle.loads(pickle.dumps(model)),
    "torch.save": through_a_file,
    "safetensors": through_safetensors,
    "to": lambda model, name, tmp_path: model.to(torch.float64).to(torch.float32),
    "compile": compiled,
    "script": scripted,
    "script and save": scripted_and_saved,
    "export": exported,
}
QUICK_CASES = {
    ("vaswani_base", "deepcopy"),
    ("bert_base", "pickle"),
    ("gpt2", "torch.save"),
    ("vaswani_base", "safetensors"),
    ("bert_base", "to"),
}
"""Each way that is quick, of one spec; `tfkit check` takes the others, of every spec."""


@pytest.mark.slow
def test_a_saved_model_loads_in_another_process(tmp_path: Path) -> None:
    model, inputs = model_of("vaswani_base"), inputs_of("vaswani_base")
    torch.save((model, inputs, model(**inputs).detach()), tmp_path / "all.pt")
    code = (
        "model, inputs, want = torch.load(sys.argv[1], weights_only=False); assert torch.equal(model(**inputs), want)"
    )
    command = [sys.executable, "-c", f"import sys, torch; {code}", str(tmp_path / "all.pt")]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


def train_one_step(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    torch.manual_seed(0)
    output = model(**inputs)
    (output * torch.randn_like(output)).mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(5.0 * parameter.grad)


@pytest.mark.parametrize(("name", "way"), chosen(product(SPECS, WAYS), QUICK_CASES))
def test_equal_before_and_after_a_training_step(name: str, way: str, tmp_path: Path) -> None:
    """The step moves a tied weight by the gradients of all its uses, and all of them see it move."""
    reference = model_of(name)
    other = WAYS[way](copy.deepcopy(reference), name, tmp_path)
    sizes = [sorted(p.numel() for p in model.parameters()) for model in (reference, other)]
    assert sizes[0] == sizes[1]
    for length, batch in ((6, 3), (9, 2)):
        inputs = inputs_of(name, length, batch)
        torch.testing.assert_close(other(**inputs), reference(**inputs), atol=1e-6, rtol=1e-5)
    inputs = inputs_of(name)
    before = reference(**inputs).detach()
    for model in (reference, other):
        train_one_step(model, inputs)
    assert (reference(**inputs) - before).abs().max() > 0.01
    torch.testing.assert_close(other(**inputs), reference(**inputs), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", SPECS)
def test_a_tied_table_gets_the_gradients_of_all_its_uses(name: str) -> None:
    tied, table = model_of(name), f"{TABLE[name]}.tokens.weight"
    sets = [*SPECS[name], "graph.logits.tie=null", *(["graph.target_embedding.tie=null"] * (name == "vaswani_base"))]
    untied = tfkit.build(name, sets=sets).eval()
    state = tied.state_dict()
    uses = [table, "logits.output.weight", *(["target_embedding.tokens.weight"] * (name == "vaswani_base"))]
    untied.load_state_dict({**state, **dict.fromkeys(uses, state[table])})
    for model in (tied, untied):
        torch.manual_seed(0)
        output = model(**inputs_of(name))
        (output * torch.randn_like(output)).mean().backward()
    apart = [untied.get_parameter(use).grad for use in uses]
    assert all(gradient is not None and gradient.any() for gradient in apart)
    torch.testing.assert_close(tied.get_parameter(table).grad, sum(apart))


def test_a_changed_table_changes_both_ends() -> None:
    model = model_of("gpt2")
    tokens = torch.zeros(1, 3, dtype=torch.long)
    before = model(tokens).detach()
    with torch.no_grad():
        model.get_parameter("embedding.tokens.weight")[5] += 1  # a row that no token of the input reads
    after = model(tokens).detach()
    changed = (before != after).any(dim=1)[0]
    assert changed.nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("name", SPECS)
def test_masks_go_by_name_or_in_the_order_of_the_inputs(name: str) -> None:
    model, inputs = model_of(name), inputs_of(name)
    order = [node.target for node in model.graph.find_nodes(op="placeholder")]
    assert torch.equal(model(**inputs), model(*(inputs.get(str(value)) for value in order)))
