"""A folder that `build -o` or `save` wrote can be used as its model, in every command and in Python."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import tfkit
from tfkit.building.edits import MeasuredModel
from tfkit.spec.weight_files import content_of
from tfkit.testing import check_model

Run = Callable[..., str]
SMALL_SPEC = """\
tfkit: 1
name: small
d_model: 16
vocab_size: 5
max_len: 24
graph:
  embedding: {block: embedding, position: learned}
  decoder: {block: decoder, n_layers: 2, attention: {n_heads: 2}, ffn: {kind: gelu, d_ff: 32}}
  logits: {block: lm_head, tie: embedding}
"""
GPT2 = ["decoder.n_layers=2", "d_model=32", "vocab_size=61", "decoder.attention.n_heads=4", "decoder.ffn.d_ff=64"]
SLOW = pytest.param("eject", marks=pytest.mark.slow)
SETS = [word for change in GPT2 for word in ("--set", change)]


PLUGIN = """
from typing import Literal
import tfkit
from torch import nn

class OtherConfig(tfkit.FFNConfig):
    '''A single layer.'''
    kind: Literal["other"] = "other"
    d_ff: tfkit.Dim

    def build(self, make):
        return tfkit.Linear(self.d_model, self.d_model, bias=True, residual=True)

@tfkit.hookimpl
def tfkit_register(register):
    register(OtherConfig)
"""


def same(model: torch.fx.GraphModule, expected: Mapping[str, Tensor]) -> bool:
    """Return True if a model has exactly these values."""
    return all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> Path:
    """`out`, a model with seed 7, and the characters that it knows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    Path("small.yaml").write_text(SMALL_SPEC)
    run("build", "small.yaml", "-o", "out", "--seed", "7")
    Path("out/chars.json").write_text('{"characters": "abcde"}')
    return tmp_path


def test_in_python(folder: Path) -> None:
    assert tfkit.load("out").name == tfkit.load(Path("out")).name == "small"
    expected = tfkit.build("small.yaml", seed=7).state_dict()
    for spec in ("out", Path("out"), "./out", folder / "out"):
        actual = tfkit.build(spec).state_dict()
        assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
    actual = tfkit.build("small.yaml", weights="out", dtype=torch.float64).state_dict()
    assert all(torch.equal(actual[name], tensor.double()) for name, tensor in expected.items())
    assert next(tfkit.build("out", device="meta").parameters()).is_meta
    with pytest.raises(tfkit.SpecError, match="belong to a different model"):
        tfkit.build("out", sets=["decoder.norm.eps=0.1"])
    tfkit.build("out", sets=["decoder.norm.eps=0.1"], allow_change=True)
    with pytest.raises(ValueError, match="`allow_change` has no effect without weights"):
        tfkit.build("small.yaml", allow_change=True)


def test_a_loaded_graph_has_the_weights_of_its_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tfkit.build("out").state_dict()
    graph = tfkit.load("out")
    monkeypatch.chdir("/")
    assert same(tfkit.build(graph), expected)
    assert not same(tfkit.build(tfkit.load(folder / "out/spec.yaml"), seed=3), expected)
    assert same(tfkit.build(graph, weights=folder / "out"), expected)
    with pytest.raises(tfkit.SpecError, match="belong to a different model"):
        tfkit.build(tfkit.load(folder / "out", sets=["decoder.norm.eps=0.1"]))
    tfkit.build(tfkit.load(folder / "out", sets=["decoder.norm.eps=0.1"]), allow_change=True)
    (folder / "out/model.safetensors").unlink()
    with pytest.raises(tfkit.SpecError, match="has neither `model"):
        tfkit.build(graph)


def test_a_folder_whose_spec_needs_a_plugin(folder: Path) -> None:
    Path("plugins").mkdir()
    Path("plugins/mine.py").write_text(PLUGIN)
    Path("mine.yaml").write_text(SMALL_SPEC.replace("kind: gelu", "kind: other"))
    plugins = tfkit.load_plugins(plugin_dirs=[Path("plugins")])
    tfkit.save(model := tfkit.build(tfkit.load("mine.yaml", plugins=plugins), seed=3), "other")
    assert same(tfkit.build(tfkit.load("other", plugins=plugins)), model.state_dict())


@pytest.mark.slow
def test_tools_in_python_use_the_weights_of_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tfkit.tools.profile import measurement

    tfkit.save(tfkit.build("small.yaml", seed=8), "other")
    assert tfkit.compare("out", "out").equal
    assert not tfkit.compare("out", "other").equal
    assert tfkit.compare("out", "small.yaml").equal
    assert tfkit.compare(tfkit.load("small.yaml"), tfkit.load("out")).equal
    assert tfkit.compare("small.yaml", "other", weights="out", other_weights="out").equal
    graph = tfkit.load("out")
    assert tfkit.count_params(graph).total == tfkit.count_params("small.yaml").total
    check_model(graph, only=["weights", "init", "forward"])
    built: list[bool] = []

    def assemble_profile(model: torch.fx.GraphModule, *_: object) -> None:
        built.append(same(model, tfkit.build("out").state_dict()))

    monkeypatch.setattr(measurement, "assemble_profile", assemble_profile)
    monkeypatch.setattr(measurement, "_run_steps", lambda *_: None)
    tfkit.profile(graph, device="cpu", length=4)
    assert built == [True]


def test_weights_may_be_the_folder_of_a_run(folder: Path, run: Run) -> None:
    """Its latest checkpoint is read, in Python and by commands."""
    run("build", "small.yaml", "-o", "run/step-2", "--seed", "9")
    Path("run/run.yaml").write_text("")
    Path("run/latest").write_text("step-2")
    digest = content_of(Path("run/step-2/model.safetensors"))
    Path("run/step-2/state.json").write_text(json.dumps({"model": digest}))
    Path("run/step-2/chars.json").write_text('{"characters": "abcde"}')
    expected = tfkit.build("run").state_dict()
    assert same(tfkit.build(tfkit.load("run")), expected)
    assert same(tfkit.build("small.yaml", weights="run"), expected)
    model = tfkit.build("small.yaml")
    tfkit.load_weights(model, "run")
    assert same(model, expected)
    assert tfkit.compare("run", "small.yaml", other_weights="run").equal
    run("build", "small.yaml", "--weights", "run", "-o", "again")
    assert same(tfkit.build("again"), expected)
    assert Path("again/chars.json").exists()


@pytest.mark.slow
def test_an_imported_graph_has_the_weights_of_its_folder(folder: Path, run: Run) -> None:
    run("build", "gpt2", *SETS, "-o", "gpt2_small")
    run("save", "gpt2_small", "--layout", "huggingface", "-o", "published")
    expected = tfkit.build("gpt2_small").state_dict()
    assert same(tfkit.build(tfkit.import_config("published").graph), expected)
    assert not same(tfkit.build(tfkit.import_config("published/config.json").graph, seed=1), expected)


@pytest.mark.parametrize("command", ["params", "validate", "show", "draw", "cost", SLOW])
def test_commands_that_need_no_weights(command: str, folder: Path, run: Run) -> None:
    more = {"draw": ["-o", "out.svg"], "eject": ["-o", "out.py"]}.get(command, [])
    assert run(command, "out", *more)
    assert "small" in run("diff", "out", "small.yaml")


def test_what_solve_writes_finds_the_folder_again(folder: Path, run: Run) -> None:
    Path("deep").mkdir()
    run("solve", "out", "--params", "18K", "--keep", "n_layers", "-o", "deep/solved.yaml")
    assert "extends: ../out/spec.yaml" in Path("deep/solved.yaml").read_text()
    assert run("validate", "deep/solved.yaml") == "deep/solved.yaml: ok\n"


def test_commands_that_run_the_model_take_its_weights(folder: Path, run: Run) -> None:
    options = run("generate", "small.yaml", "--weights", "out", "--prompt", "ab", "--max-new-tokens", "9", "--json")
    text = run("generate", "out", "--prompt", "ab", "--max-new-tokens", "9", "--json")
    assert json.loads(text)["texts"] == json.loads(options)["texts"]
    run("build", "out", "-o", "again", "--dtype", "float64")
    run("export", "out", "-o", "file.safetensors")
    before = load_file("out/model.safetensors")
    for file in ("again/model.safetensors", "file.safetensors"):
        assert all(torch.equal(tensor.to(before[name]), before[name]) for name, tensor in load_file(file).items())
    assert Path("again/chars.json").read_text() == Path("out/chars.json").read_text()
    run("save", "out", "--layout", "tfkit", "-o", "third")
    assert sorted(path.name for path in Path("third").iterdir()) == ["chars.json", "model.safetensors", "spec.yaml"]


def test_two_folders_are_compared_with_their_own_weights(folder: Path, run: Run) -> None:
    run("build", "small.yaml", "-o", "other", "--seed", "8")
    assert "equal to 1e-05" in run("compare", "out", "out")
    assert "they diverge at embedding.tokens" in run("compare", "out", "other", status=1)
    for pair in (("out", "small.yaml"), ("small.yaml", "out")):
        assert "equal to 1e-05" in run("compare", *pair)


@pytest.mark.slow
def test_profile_reads_the_weights_of_a_folder(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from tfkit.tools.profile import measurement

    read: list[object] = []

    def build(model: MeasuredModel, path: Path, **options: object) -> torch.fx.GraphModule:
        read.append(path)
        return tfkit.build(model.graph)

    monkeypatch.setattr(measurement, "build_with_weights", build)
    arguments = ["--device", "cpu", "--steps", "2", "--warmup", "0", "--length", "4"]
    run("profile", "out", "small.yaml", "--mode", "prefill", *arguments, stderr=True)
    assert read == [Path("out"), None]


def test_the_published_layout_is_a_folder_too_and_keeps_the_tokenizer(folder: Path, run: Run) -> None:
    run("build", "gpt2", *SETS, "-o", "gpt2_small")
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json", "notes.txt"):
        Path("gpt2_small", name).write_text(f'{{"file": "{name}"}}')
    run("save", "gpt2_small", "--layout", "huggingface", "-o", "published")
    assert sorted(path.name for path in Path("published").iterdir()) == [
        *("config.json", "merges.txt", "model.safetensors", "spec.yaml", "tokenizer_config.json", "vocab.json")
    ]
    assert Path("published/vocab.json").read_text() == '{"file": "vocab.json"}'
    before, after = tfkit.build("gpt2_small").state_dict(), tfkit.build("published").state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    run("import", "published", "-o", "again.yaml")
    run("build", "again.yaml", "--weights", "published")


def test_a_tokenizer_is_never_lost(folder: Path, run: Run) -> None:
    """A folder with a tokenizer is only replaced by a model that has one."""
    invalid = run("build", "small.yaml", "-o", "out", "--force", status=1, stderr=True)
    assert "`out` must hold only the files of a model; got chars.json" in invalid
    run("build", "out", "-o", "other")
    Path("out/chars.json").write_text('{"characters": "edcba"}')
    run("build", "out", "-o", "other", "--force")
    assert "edcba" in Path("other/chars.json").read_text()


def test_folders_that_are_no_model(folder: Path, run: Run, golden: Callable[[str, str], None]) -> None:
    Path("empty").mkdir()
    golden("folder/empty", run("params", "./empty", status=1, stderr=True))
    Path("theirs").mkdir()
    Path("theirs/config.json").write_text("{}")
    Path("theirs/model.safetensors").write_text("")
    golden("folder/published", run("generate", "theirs", "--prompt", "a", status=1, stderr=True))
    Path("mine").mkdir()
    Path("mine/model.yaml").write_text(SMALL_SPEC)
    golden("folder/another_name", run("build", "mine", status=1, stderr=True))
    Path("child.yaml").write_text("extends: mine\nname: child\n")
    golden("folder/extends", run("params", "child.yaml", status=1, stderr=True))
    Path("child.yaml").write_text("extends: out\nname: child\n")
    assert "child" in run("params", "child.yaml")
    golden("folder/no_weights_to_save", run("save", "gpt2", "--layout", "tfkit", "-o", "x", status=2, stderr=True))
    for command in (["build", "gpt2"], ["generate", "gpt2", "--tokens", "1"], ["export", "gpt2", "-o", "a.pt2"]):
        assert "--allow-change has no effect without weights" in run(*command, "--allow-change", status=2, stderr=True)


def test_names_that_are_no_folder(folder: Path, run: Run) -> None:
    for name in ("", "a" * 300, "nowhere"):
        assert run("params", name, status=1, stderr=True).startswith("error: there is no spec named")


def test_a_name_that_comes_with_tfkit_is_not_a_folder(folder: Path, run: Run) -> None:
    Path("out").rename("gpt2")
    assert "the folder is ./gpt2" in run("params", "gpt2", stderr=True)
    assert "small" in run("params", "./gpt2")


def test_weights_of_another_model_are_refused(folder: Path, run: Run, golden: Callable[[str, str], None]) -> None:
    changed = ["--set", "decoder.norm.eps=0.1", "--set", "decoder.attention.position=alibi"]
    golden("folder/other_weights", run("build", "out/spec.yaml", "--weights", "out", *changed, status=1, stderr=True))
    run("build", "out/spec.yaml", "--weights", "out", *changed, "--allow-change")


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_every_command_that_runs_a_folder_refuses_weights_of_another_model(run: Run) -> None:
    changed = ["--set", "decoder.norm.eps=0.1", "--set", "decoder.attention.position=alibi"]
    for command in (
        ["generate", "out", "--prompt", "a"],
        ["save", "out", "--layout", "tfkit", "-o", "new"],
        ["export", "out", "-o", "new.safetensors"],
        ["compare", "out", "out"],
        ["profile", "out", "--device", "cpu"],
    ):
        assert "decoder.norm.eps: 1e-05 in the file, 0.1 here" in run(*command, *changed, status=1, stderr=True)
    run("save", "out", "--layout", "tfkit", "-o", "new", *changed, "--allow-change")
    run("build", "new")
    run("compare", "out", "out", *changed, "--allow-change")
