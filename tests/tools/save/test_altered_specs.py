"""Published specs that differ from their family in one slot: everything that tfkit wrote is read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import tfkit

from ...run.training.runs import TEXT
from ...sampling import chosen
from ...small_specs import reductions

pytestmark = pytest.mark.filterwarnings("ignore:.*no longer has an effect")
"""Shared values of a component that a change replaces."""
PLUGIN = '''
from typing import Literal

import torch
from torch import nn

import tfkit


class LabFFNConfig(tfkit.FFNConfig):
    """An FFN of the laboratory."""

    kind: Literal["lab"] = "lab"

    def build(self, make):
        return nn.Sequential(nn.Linear(self.d_model, 10), nn.Tanh(), nn.Linear(10, self.d_model))


class LabNormConfig(tfkit.NormConfig):
    """A norm of the laboratory."""

    kind: Literal["lab"] = "lab"

    def build(self, make, width):
        return LabNorm(width)


class LabNorm(nn.Module):
    """[..., width] -> [..., width]."""

    def __init__(self, width):
        super().__init__()
        self.alpha, self.weight = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(width))

    def reset_parameters(self):
        nn.init.constant_(self.alpha, 0.5)
        nn.init.ones_(self.weight)

    def forward(self, x):
        return self.weight * torch.tanh(self.alpha * x)


@tfkit.hookimpl
def tfkit_register(register):
    register(LabFFNConfig)
    register(LabNormConfig)
'''
STACKS = {
    "bart_base": "decoder",
    "bert_base": "encoder",
    "bloom_560m": "decoder",
    "gpt2": "decoder",
    "llama3_8b": "decoder",
    "t5_small": "decoder",
}
CHANGES = (
    "ffn={kind: swiglu, d_ff: 24}",
    "ffn={kind: gelu, d_ff: 40}",
    "ffn={kind: moe, d_ff: 24, n_experts: 4, n_experts_per_token: 2}",
    "ffn={kind: lab}",
    "norm={kind: lab}",
    "norm={kind: layernorm}",
    "norm={kind: rmsnorm}",
    "final_norm={kind: lab}",
    "attention={kind: gqa, n_heads: 4, n_kv_heads: 2, qk_norm: rmsnorm}",
    "attention={kind: additive, n_heads: 2}",
    "attention.position={kind: t5}",
    "attention.position={kind: rope}",
    "attention.gate={activation: silu}",
    "placement=sandwich",
    "placement=parallel_two_norms",
    "residual={kind: gated, rank: 3}",
)
"""Changes of a stack. A family describes some of them."""
QUICK_CASES = (
    ("gpt2", "ffn={kind: swiglu, d_ff: 24}"),
    ("gpt2", "norm={kind: lab}"),
    ("gpt2", "attention={kind: gqa, n_heads: 4, n_kv_heads: 2, qk_norm: rmsnorm}"),
    ("llama3_8b", "ffn={kind: lab}"),
    ("bert_base", "attention.position={kind: t5}"),
    ("t5_small", "placement=sandwich"),
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The installed plugins, and an FFN and a norm of a folder."""
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "lab.py").write_text(PLUGIN, encoding="utf-8")
    return tfkit.load_plugins(plugin_dirs=[folder])


def altered(name: str, change: str, plugins: Any) -> tfkit.Graph:
    """A tiny model of a published spec, with a change of its stack."""
    stack, slot = STACKS[name], change.partition("=")[0]
    sizes = [text for text in reductions(tfkit.load(name)) if not text.startswith(f"{stack}.{slot}.")]
    return tfkit.load(name, sets=[*sizes, f"{stack}.{change}"], plugins=plugins)


def outputs(model: fx.GraphModule) -> list[torch.Tensor]:
    graph: tfkit.Graph = model.meta["graph"]
    inputs = {name: torch.arange(1, 8)[None] for name, signal in graph.inputs.items() if not signal.optional}
    with torch.no_grad():
        results = model.eval()(**inputs)
    return list(results.values()) if isinstance(results, dict) else [results]


def check_equal(folder: Path, model: fx.GraphModule, plugins: Any = None) -> None:
    again = tfkit.build(tfkit.load(folder, plugins=plugins))
    state, read = model.state_dict(), again.state_dict()
    assert state.keys() == read.keys()
    assert all(torch.equal(tensor, read[name]) for name, tensor in state.items())
    assert all(torch.equal(*pair) for pair in zip(outputs(model), outputs(again), strict=True))


@pytest.mark.parametrize(
    ("name", "change"), chosen([(name, change) for name in STACKS for change in CHANGES], QUICK_CASES)
)
def test_a_saved_model_is_read_by_its_names(name: str, change: str, lab: Any, tmp_path: Path) -> None:
    model = tfkit.build(altered(name, change, lab), seed=4)
    tfkit.save(model, tmp_path / "out")
    check_equal(tmp_path / "out", model, lab)


SWIGLU = "decoder.ffn={kind: swiglu, d_ff: 24}"
RUN = """\
tfkit: 1
name: tuned
model: built/spec.yaml
weights: built
data: {kind: text, files: sheep.txt, tokenizer: bytes}
batch: {sequences: 4, length: 12}
steps: 1
optimizer: {kind: adamw, lr: 1e-2}
"""


def sizes(*changes: str) -> list[str]:
    """Changes of GPT-2: a small model for bytes."""
    reduced = [text for text in reductions(tfkit.load("gpt2")) if not text.startswith(("decoder.ffn", "vocab", "max"))]
    return [*reduced, "vocab_size=256", "max_len=24", *changes]


def test_the_commands_read_what_they_wrote(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run("build", "gpt2", *(word for text in sizes(SWIGLU) for word in ("--set", text)), "--seed", "5", "-o", "built")
    run("save", "built", "--layout", "tfkit", "-o", "saved")
    check_equal(Path("saved"), tfkit.build("built"))
    prompt = ("--tokens", "5,7,9", "--max-new-tokens", "6", "--json")
    texts = [
        json.loads(run("generate", *words, *prompt))["texts"]
        for words in (["saved"], ["built/spec.yaml", "--weights", "saved/model.safetensors"])
    ]
    assert texts[0] == texts[1]
    error = run("save", "built", "--layout", "huggingface", "-o", "published", status=1, stderr=True)
    assert "cannot describe this model" in error


@pytest.mark.slow
def test_what_a_run_wrote_is_read(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sheep.txt").write_text(TEXT, encoding="utf-8")
    Path("run.yaml").write_text(RUN, encoding="utf-8")
    tfkit.save(tfkit.build(tfkit.load("gpt2", sets=sizes(SWIGLU))), "built")
    run("train", "run.yaml", "-o", "out", stderr=True)
    model = tfkit.build("out")
    check_equal(next(Path("out").glob("step-*")), model)
    run("eval", "out", "--split", "val", stderr=True)
    run("save", "out", "--layout", "transformers", "-o", "code")
    check_equal(Path("code"), model)
    run("save", "code", "--layout", "tfkit", "-o", "again")
    check_equal(Path("again"), model)


def test_the_names_of_the_file_decide_which_map_is_reported(tmp_path: Path) -> None:
    """Files of a different model by the names of that model, and by the names of the family."""
    swiglu, plain = tfkit.load("gpt2", sets=sizes(SWIGLU)), tfkit.build(tfkit.load("gpt2", sets=sizes()), seed=2)
    for layout in ("tfkit", "huggingface"):
        tfkit.save(plain, tmp_path / layout, layout=layout)
    with pytest.raises(tfkit.SpecError, match=r"lacks tensors of the model\n *= decoder\.layers\.0-1\.ffn\.gate"):
        tfkit.build(swiglu, weights=tmp_path / "tfkit")
    with pytest.raises(tfkit.SpecError, match=r"the family has no entry for tensors of the model"):
        tfkit.build(swiglu, weights=tmp_path / "huggingface")
    ffn = ["decoder.layers.*.ffn.*"]
    model = tfkit.build(swiglu, weights=tmp_path / "tfkit", missing=ffn, unused=ffn, allow_change=True)
    state = plain.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items() if ".ffn." not in name)
