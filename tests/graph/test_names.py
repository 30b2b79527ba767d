"""Names of nodes, inputs, variants and models: invalid names are rejected when read, valid names work in every tool."""

from __future__ import annotations

import copy
import keyword
import pickle
from pathlib import Path

import pytest
import torch

import tfkit
from tfkit.cli import main
from tfkit.graph.node_names import CODE_NAMES, RESERVED_NAMES
from tfkit.tools.eject.proof import check
from tfkit.tools.eject.write import eject

PLUGINS = tfkit.load_plugins(entry_points=False)
SPEC = """
tfkit: 1
name: mine
d_model: 8
vocab_size: 13
max_len: 32
inputs: [INPUT]
graph:
  NODE: {block: embedding, input: INPUT}
  decoder: {block: decoder, n_layers: 1, attention: {n_heads: 2}, ffn: {kind: gelu, d_ff: 12}}
  logits: {block: lm_head, tie: NODE}
"""
LETTERS = ["a b", *"λ é naïve ﬁ ｄecoder µ a·b ª x² 名 a-b a.b 2nd _x __init__".split()]  # noqa: SIM905
BUILTINS = "sum print len int list isinstance object id input super slice".split()  # noqa: SIM905
PYTHON = [*BUILTINS[1:], "range", "__name__", "K", "Any", "Types", "sourceTokens"]
ALLOWED = """Any Decoder Dict Embedding List Mine Optional Parameter Union add annotate aten bias case cast clone cuda_
    fn fx gelu hook int64 jit layers linear mask match memory mul name operators ops output prim relu setattr_ shape
    size sqrt tables tie uint8 values weight wrap x""".split()  # noqa: SIM905
"""Names that a careless writer of code would use himself."""


def spec(node: str = "embedding", tokens: str = "tokens") -> str:
    return SPEC.replace("NODE", f'"{node}"').replace("INPUT", f'"{tokens}"')


def refuse(what: str, text: str) -> None:
    with pytest.raises(tfkit.SpecError, match=f"cannot be the name of {what}"):
        tfkit.loads(text, plugins=PLUGINS)


@pytest.mark.slow
def test_names_that_would_break_what_is_written_are_refused() -> None:
    for name in [*LETTERS, *CODE_NAMES, *RESERVED_NAMES, *keyword.kwlist, "a_mask", "register_x"]:
        refuse("a node", spec(node=name))
        refuse("an input", spec(tokens=name))


def test_an_input_hides_nothing_of_python_and_keeps_its_name() -> None:
    for name in PYTHON:
        refuse("an input", spec(tokens=name))


@pytest.mark.parametrize("name", ["λ", "ﬁ", "forward", "a b", "training", "keys"])
def test_names_of_variants(name: str) -> None:
    layers = f'layers: {{variants: {{"{name}": {{ffn: {{d_ff: 16}}}}}}, pattern: [base, "{name}"]}}'
    with pytest.raises(tfkit.SpecError, match="cannot be the name of a variant"):
        tfkit.loads(spec().replace("n_layers: 1", f"n_layers: 2, {layers}"))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model with all names that are allowed: of nodes, inputs, a further table, a variant and the model itself."""
    nodes = [*ALLOWED, *BUILTINS]
    norms = "".join(f"  {name}: {{block: norm}}\n" for name in nodes)
    text = spec(node="e", tokens="k").replace('["k"]', "[k, types]").replace("name: mine", "name: torch")
    text = text.replace('input: "k"', "input: k, tables: {types: 2}").replace("  decoder:", f"{norms}  decoder:")
    text = text.replace("n_layers: 1", "n_layers: 2, layers: {variants: {F: {ffn: {d_ff: 16}}}, pattern: [F, base]}")
    path = tmp_path_factory.mktemp("names") / "names.yaml"
    path.write_text(text + "outputs: [logits, sum]\n", encoding="utf-8")
    return path


def inputs() -> dict[str, torch.Tensor]:
    return {"k": torch.randint(13, (2, 5)), "types": torch.randint(2, (2, 5))}


def test_the_model_is_copied_as_it_is(path: Path) -> None:
    model, options = tfkit.build(path).eval(), inputs()
    compile(model.code, "code", "exec")
    expected = model(**options)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(copied(**options), expected)
    assert copy.deepcopy(model).meta["graph"] is model.meta["graph"]


def test_it_decodes(path: Path) -> None:
    model, options = tfkit.build(path).eval(), inputs()
    cached = tfkit.CachedModel(model, length=8)
    parts = [cached(options["k"][:, part], types=options["types"][:, part]) for part in (slice(0, 3), slice(3, 5))]
    for index, expected in enumerate(model(**options)):
        torch.testing.assert_close(torch.cat([part[index] for part in parts], dim=1), expected)


@pytest.mark.parametrize("name", ["k", "match", "memory", "x"])
def test_the_next_tokens_are_found_whatever_the_input_is_called(name: str) -> None:
    model, tokens = tfkit.build(tfkit.loads(spec(tokens=name))).eval(), torch.randint(13, (2, 5))
    loss = torch.nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(tfkit.Loss(model)(tokens), loss)


@pytest.mark.slow
def test_it_is_ejected(path: Path) -> None:
    graph = tfkit.load(path)
    assert check(graph, eject(graph)).ran


FORMATS = ["safetensors", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ts", "pt2", "onnx"))]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_it_is_exported(form: str, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command reads each file again, and compares it with the model; AOTInductor compiles the programs of pt2."""
    assert main(["export", str(path), "-o", str(tmp_path / f"out.{form}")]) == 0, capsys.readouterr().err
