"""Every shipped spec, tiny and ejected: tensors, results, lint."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tfkit
from tfkit.tools.eject import shapes
from tfkit.tools.eject.proof import Alone, check
from tfkit.tools.eject.runner import build_model, loaded_module
from tfkit.tools.eject.text import in_docs
from tfkit.tools.eject.write import eject

from ...sampling import chosen, some
from ...small_specs import COVERING, covering, reduced
from ..conftest import DECODER

LINT = [
    "--isolated",
    "--select=E,F,W,I,UP,B,SIM,C4,RET,N",
    "--ignore=N801,N812,B905",  # N801: Llama3_8b, as digits that meet would read as another number
    "--line-length=120",
    "--target-version=py311",
]
WITHOUT_TFKIT = """
import sys
sys.path.append(sys.argv[1])  # the packages, but no editable install: `-S` reads no .pth files
import importlib.util, runpy
assert importlib.util.find_spec("tfkit") is None
runpy.run_path(sys.argv[2], run_name="__main__")
assert "tfkit" not in sys.modules
"""


@pytest.mark.parametrize("name", covering("t5_small", among=[*COVERING, "deepseek_v3"]))
def test_an_ejected_spec_is_the_model(alone: Alone, name: str, tmp_path: Path) -> None:
    graph = reduced(name)
    text = eject(graph)
    proof = check(graph, text, alone)
    assert proof.ran
    assert proof.tensors == len(tfkit.build(graph, device="meta").state_dict())
    imported = {node.module or "" for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    imported |= {
        value.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import) for value in node.names
    }
    assert {name.partition(".")[0] for name in imported} <= {"torch", "math", "dataclasses", "typing"}
    file = tmp_path / f"{graph.name}.py"
    file.write_text(text, encoding="utf-8")
    for command in (["check", *LINT], ["format", "--check", "--isolated", "--line-length=120"]):
        words = [sys.executable, "-m", "ruff", *command, str(file)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_gpt2_is_short_and_runs_without_tfkit(tmp_path: Path) -> None:
    text = eject(tfkit.load("gpt2"))
    assert len(text.splitlines()) < 215
    file = tmp_path / "gpt2.py"
    file.write_text(text, encoding="utf-8")
    packages = str(Path(torch.__file__).parents[1])
    command = [sys.executable, "-I", "-S", "-c", WITHOUT_TFKIT, packages, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "124,439,808 parameters, output.shape=torch.Size([1, 16, 50257])\n"


def test_shapes_stand_in_comments() -> None:
    text = eject(tfkit.load("llama3_8b", sets=["decoder.n_layers=2"]))
    assert "x = x + self.attention(self.attention_norm_in(x), context)  # [b, t, 4096]" in text
    assert "gate, up = self.gate_up(x).chunk(2, dim=-1)  # [b, t, 14336]" in text


def test_sizes_in_comments_are_products_of_letters() -> None:
    sizes = [(shapes.BATCH * length * 2, length, 7) for length in (shapes.LENGTHS[0], shapes.CHUNKED_LENGTHS[1])]
    texts = [shapes._shape_text(torch.empty(size, device="meta")) for size in sizes]
    assert texts == ["[b * t * 2, t, 7]", "[b * s * 2, s, 7]"]


def test_a_line_with_several_shapes_has_no_comment() -> None:
    watch = shapes._Watch("x = f(y)\nz = g(x)\n")
    watch.found = {1: {"[b, t, 7]", "[b, s, 7]"}, 2: {"[b, t, 3]"}}
    assert watch.commented() == "x = f(y)\nz = g(x)  # [b, t, 3]\n"


def test_the_config_says_the_sizes() -> None:
    graph = tfkit.load("gpt2", sets=["decoder.n_layers=2"])
    with loaded_module(eject(graph)) as module, torch.device("meta"):
        assert module.Config().d_head == 64
        smaller = module.Gpt2(module.Config(d_model=16, n_heads=2, d_ff=24, n_layers=3, vocab_size=13, max_len=8))
    sets = ["d_model=16", "decoder.attention.n_heads=2", "decoder.ffn.d_ff=24", "decoder.n_layers=3", "vocab_size=13"]
    ours = tfkit.build("gpt2", sets=[*sets, "max_len=8"], device="meta")
    assert [(n, p.shape) for n, p in smaller.named_parameters()] == [(n, p.shape) for n, p in ours.named_parameters()]


@pytest.mark.slow
def test_it_trains_as_the_model_does() -> None:
    graph = reduced("gpt2")
    ours = tfkit.build(graph).train()
    with loaded_module(eject(graph)) as module:
        theirs = build_model(module).train()
    theirs.load_state_dict(ours.state_dict())
    tokens = torch.randint(13, (2, 7))
    with pytest.raises(ValueError, match="tokens_mask has pairs of tokens"):
        theirs(tokens=tokens, tokens_mask=torch.ones(2, 7, 7, dtype=torch.bool))
    gradients = []
    for model in (ours, theirs):
        torch.manual_seed(0)
        model(tokens=tokens).logsumexp(dim=-1).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


HOSTILE = (
    '"""\n' + "raise SystemExit\n" + '"""',
    'a "quote"',
    "a path\\",
    '\\"""',
    "\\N{BULLET}",
    "a\0b",
    "a\rb",
    "\u2028\x0c\x85",
)


@pytest.mark.parametrize("words", HOSTILE)
def test_any_words_stand_in_a_docstring(words: str) -> None:
    actual = ast.literal_eval(f'"""{in_docs(words)}\n"""')
    assert actual.strip("\n") == "".join(word for word in words if word.isprintable() or word == "\n").replace(
        '"""', "'''"
    )


@pytest.mark.parametrize("key", chosen(["description", "source"], ["description"]))
def test_what_a_spec_says_is_no_code(alone: Alone, key: str) -> None:
    text = eject(graph := tfkit.loads(f"{key}: {json.dumps(' '.join(HOSTILE))}\n{DECODER}"))
    assert check(graph, text, alone).ran
    assert not [node for node in ast.parse(text).body if isinstance(node, ast.Raise)]
    assert "\\N{BULLET} ab ab" in (ast.get_docstring(ast.parse(text)) or "")


@pytest.mark.slow
@pytest.mark.parametrize("name", some(["None", "config", "Tensor", "Layer", "3b"], 2))
def test_any_name_of_a_model_is_a_class(alone: Alone, name: str) -> None:
    graph = tfkit.loads(DECODER.replace("name: small", f"name: {json.dumps(name)}"))
    assert check(graph, eject(graph), alone).ran
