"""The command line: what it prints, to where, and with which exit status."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tfkit.cli import main
from tfkit.cli.app import SECTIONS
from tfkit.tools import first_run
from tfkit.tools.units import short

TINY = """\
tfkit: 1
name: tiny
description: A decoder of two layers
d_model: 16
vocab_size: 50
max_len: 8
dropout: 0.1
graph:
  embedding: {block: embedding, position: learned}
  decoder:
    block: decoder
    n_layers: 2
    attention: {kind: gqa, n_heads: 4, n_kv_heads: 2}
    ffn: {kind: gelu, d_ff: 32}
  logits: {block: lm_head, tie: embedding}
"""
PAIR = """\
tfkit: 1
name: pair
d_model: 16
vocab_size: 40
inputs: [source, target]
graph:
  source_embedding: {block: embedding, input: source}
  encoder: {block: encoder, n_layers: 1, attention: {n_heads: 2}, ffn: {kind: swiglu, d_ff: 24}, norm: rmsnorm}
  target_embedding: {block: embedding, input: target, tie: source_embedding}
  decoder:
    block: decoder
    memory: encoder
    n_layers: 3
    placement: post
    attention: {n_heads: 2, position: t5}
    ffn: {kind: relu, d_ff: 32}
    layers:
      variants: {wide: {ffn: {d_ff: 48}}}
      pattern: [base, wide]
  logits: {block: lm_head, bias: true}
"""
BROKEN_PLUGIN = "import there_is_no_such_module\n"
FAILING_PLUGIN = '''
from typing import Literal
import tfkit
from torch import nn

class Fails(nn.Module):
    def forward(self, x):
        return x @ x

class FailsConfig(tfkit.FFNConfig):
    """An FFN whose forward fails."""
    kind: Literal["fails"] = "fails"
    def build(self, make):
        return Fails()

@tfkit.hookimpl
def tfkit_register(register):
    register(FailsConfig)
'''
COMMANDS = [str(command.name) for family in SECTIONS.values() for command in family]
Golden = Callable[[str, str], None]


@pytest.fixture(autouse=True)
def specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two specs, a wrong one among them, to stand in; a terminal of 80 columns."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    (tmp_path / "pair.yaml").write_text(PAIR)
    (tmp_path / "wrong.yaml").write_text(TINY.replace("gqa", "gqqa").replace("n_layers: 2", "n_layers: two"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("TFKIT_DISABLE", raising=False)
    return tmp_path


def script(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """The same in a process of its own."""
    code = "import sys; from tfkit.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, **options
    )  # type: ignore[call-overload,no-any-return]


# ---- help and usage ----


def test_help(run: Callable[..., str], golden: Golden) -> None:
    texts = [run("--help"), *(run(name, "--help") for name in COMMANDS)]
    golden("cli/help", "\n\n".join(text.rstrip() for text in texts))


def test_alone_it_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    alone = capsys.readouterr().out
    main(["--help"])
    assert alone.rstrip() == capsys.readouterr().out.rstrip()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("unknown_command", ["parms"]),
        ("unknown_command_like_no_other", ["xyz"]),
        ("missing_argument", ["build"]),
        ("unknown_option", ["params", "tiny.yaml", "--bye", "node"]),
        ("wrong_choice", ["params", "tiny.yaml", "--by", "nodes"]),
        ("no_folder_of_plugins", ["plugins", "--plugin-dir", "nowhere"]),
        ("force_alone", ["build", "tiny.yaml", "--force"]),
        ("unknown_device", ["build", "tiny.yaml", "--device", "warp"]),
        ("meta_has_no_weights", ["build", "tiny.yaml", "--device", "meta", "-o", "out"]),
    ],
)
def test_wrong_usage(run: Callable[..., str], golden: Golden, name: str, arguments: list[str]) -> None:
    golden(f"cli/usage_{name}", run(*arguments, status=2, stderr=True))


def test_help_and_usage_errors_import_little() -> None:
    code = f"""
import sys
from tfkit.cli import main
for line in {[[], ["--help"], ["parms"], ["build"], ["params", "--bye"], *([name, "--help"] for name in COMMANDS)]}:
    main(line)
print([name for name in ("torch", "pydantic", "rich", "yaml", "tfkit.spec", "tfkit.plugin") if name in sys.modules])
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert out.splitlines()[-1] == "[]"


def test_version(run: Callable[..., str]) -> None:
    assert re.fullmatch(r"tfkit[ ,].+\n", run("--version"))


# ---- errors ----


def test_wrong_spec(run: Callable[..., str], golden: Golden) -> None:
    golden("cli/wrong_spec", run("params", "wrong.yaml", status=1, stderr=True))


@pytest.mark.parametrize("command", ["build", "params", "show"])
def test_errors_as_json(run: Callable[..., str], command: str) -> None:
    errors = json.loads(run(command, "wrong.yaml", "--json", status=1))["errors"]
    assert [(one["path"], one["line"]) for one in errors] == [
        ("graph.decoder.n_layers", 12),
        ("graph.decoder.attention.kind", 13),
    ]


def test_set_is_checked(run: Callable[..., str]) -> None:
    assert "--set:1:" in run("params", "tiny.yaml", "--set", "decoder.n_layer=3", status=1, stderr=True)


def test_a_broken_plugin_is_one_line(specs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (specs / "broken_one.py").write_text(BROKEN_PLUGIN)
    assert main(["params", "tiny.yaml", "--json", "--plugin-dir", "broken_one.py"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)[0]["name"] == "tiny"
    assert len(err.splitlines()) == 1
    assert "`broken_one`" in err
    assert "there_is_no_such_module" in err
    name = re.search(r"--disable (\S+)", err)
    assert name is not None
    assert main(["params", "tiny.yaml", "--plugin-dir", "broken_one.py", "--disable", name[1]]) == 0
    assert capsys.readouterr().err == ""


def test_interrupt(run: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object, **given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tfkit.spec.load.read_spec", interrupt)
    assert run("params", "tiny.yaml", status=130, stderr=True) == "interrupted\n"


def test_broken_pipe() -> None:
    code = "import sys; from tfkit.cli import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=60) == 128 + signal.SIGPIPE
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()


def test_styles_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    colours = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    assert "\x1b" in script("list", env={**colours, "FORCE_COLOR": "1"}).stdout
    assert "\x1b" not in script("list", env={**colours, "FORCE_COLOR": "1", "NO_COLOR": "1"}).stdout


# ---- params ----


def test_params(run: Callable[..., str], golden: Golden) -> None:
    golden("cli/params", run("params", "tiny.yaml"))


@pytest.mark.parametrize("by", ["node", "layer", "module"])
def test_params_by(run: Callable[..., str], golden: Golden, by: str) -> None:
    golden(f"cli/params_by_{by}", run("params", "pair.yaml", "--by", by))


def test_params_side_by_side(run: Callable[..., str], golden: Golden) -> None:
    golden("cli/params_side_by_side", run("params", "tiny.yaml", "pair.yaml", "tiny.yaml"))


def test_params_of_a_single_block(run: Callable[..., str]) -> None:
    rows = {line.split()[0]: line.split()[1] for line in run("params", "block_512").splitlines() if "%" in line}
    assert rows == {
        "attention": "1,048,576",
        "FFN": "2,097,152",
        "LayerNorm": "2,048",
        "total": "3,147,776",
    }


def test_params_fit_80_columns_at_any_size(run: Callable[..., str]) -> None:
    run("params", "llama3_405b", "palm_540b", "gpt3_175b")


def test_params_json(run: Callable[..., str]) -> None:
    (count,) = json.loads(run("params", "tiny.yaml", "--json"))
    assert count["total"] == sum(row["parameters"] for row in count["rows"]) == count["trainable"]
    assert [row["name"] for row in count["rows"]] == ["embedding", "position", "attention", "ffn", "norm"]


# ---- specs ----


def test_validate(run: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("validate", "tiny.yaml", "pair.yaml") == "tiny.yaml: ok\npair.yaml: ok\n"
    assert main(["validate", "tiny.yaml", "wrong.yaml", "pair.yaml"]) == 1
    out, err = capsys.readouterr()
    assert out == "tiny.yaml: ok\npair.yaml: ok\n"
    assert err.startswith("error: ")
    results = json.loads(run("validate", "tiny.yaml", "wrong.yaml", "--json", status=1))
    assert [(one["spec"], len(one["errors"])) for one in results] == [("tiny.yaml", 0), ("wrong.yaml", 2)]


def test_show(run: Callable[..., str], golden: Golden) -> None:
    golden("cli/show", run("show", "tiny.yaml", "--set", "decoder.n_layers=3"))
    golden("cli/show_pair", run("show", "pair.yaml"))


def test_show_json(run: Callable[..., str]) -> None:
    found = json.loads(run("show", "tiny.yaml", "--json"))
    values = {one["path"]: one for one in found["values"]}
    assert values["graph.decoder.d_model"] == {
        "path": "graph.decoder.d_model",
        "value": "16",
        "how": "inherited",
        "file": "tiny.yaml",
        "line": 4,
    }
    assert found["programs"][0]["lines"] == [
        "x = x + dropout(attention(layernorm(x)))",
        "x = x + dropout(ffn(layernorm(x)))",
    ]


def test_diff(run: Callable[..., str], golden: Golden) -> None:
    golden("cli/diff", run("diff", "tiny.yaml", "pair.yaml"))
    assert run("diff", "tiny.yaml", "tiny.yaml").startswith("no value differs")
    found = json.loads(run("diff", "tiny.yaml", "pair.yaml", "--json"))
    (sizes,) = [one for one in found["differences"] if one["path"] == "vocab_size"]
    assert (sizes["before"], sizes["after"]) == ("50", "40")


def test_models_of_one_name_are_told_apart(run: Callable[..., str], specs: Path) -> None:
    Path("again.yaml").write_text(Path("tiny.yaml").read_text().replace("d_model: 16", "d_model: 32"))
    head = run("diff", "tiny.yaml", "again.yaml").splitlines()[0]
    assert head.split() == ["value", "tiny.yaml", "again.yaml"]
    assert json.loads(run("diff", "tiny.yaml", "again.yaml", "--json"))["b"] == "again.yaml"
    columns = run("params", "tiny.yaml", "again.yaml").splitlines()[0]
    assert columns.split() == ["component", "tiny.yaml", "share", "again.yaml", "share"]
    Path("again.yaml").write_text(Path("tiny.yaml").read_text().replace("name: tiny", "name: other"))
    assert run("diff", "tiny.yaml", "again.yaml").splitlines()[2].split() == ["value", "tiny", "other"]


def test_list(run: Callable[..., str]) -> None:
    assert "gpt2" in [line.split(" ")[0] for line in run("list").splitlines()]
    (found,) = json.loads(run("list", "encoder", "BERT-base-uncased", "--json"))
    assert (found["name"], found["kind"], found["model_type"]) == ("bert_base", "encoder", "bert")
    assert "0 specs" in run("list", "no_such_word")


def test_list_says_which_specs_need_a_plugin_that_is_not_there(run: Callable[..., str]) -> None:
    every = json.loads(run("list", "--json", "--no-plugins"))
    needing = [one for one in every if one["requires"]]
    assert {name for one in needing for name in one["requires"]} == {"tfkit-mla", "tfkit-moe"}
    assert all(one["missing"] == one["requires"] for one in needing)
    text = " ".join(run("list", "mixtral", "--no-plugins").split())
    assert "needs tfkit-moe" in text
    assert "tfkit-moe, needed by 2, is not loaded: " in text
    assert "not loaded" not in run("list", "gpt2", "--no-plugins")


def test_list_runs_no_plugin(run: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "tfkit_moe.py").write_text("raise SystemExit('it ran')")
    assert "needs" not in run("list", "mixtral", "--no-plugins", "--plugin-dir", str(tmp_path))


# ---- the language ----


def test_schema(run: Callable[..., str], specs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "--no-plugins"]) == 0
    printed = capsys.readouterr().out
    run("schema", "-o", "schema.json")
    assert json.loads((specs / "schema.json").read_text()) == json.loads(printed)
    assert [path.name for path in specs.iterdir() if path.name.startswith(".")] == []


def test_components(run: Callable[..., str], golden: Golden) -> None:
    texts = [run("components"), run("components", "attention"), run("components", "attention", "gqa")]
    golden("cli/components", "\n".join(texts))
    golden("cli/components_unknown", run("components", "atention", status=1, stderr=True))
    (found,) = json.loads(run("components", "attention", "gqa", "--json"))
    assert [field["name"] for field in found["fields"] if field["required"]] == ["d_model", "n_heads", "n_kv_heads"]


def test_plugins(specs: Path, run: Callable[..., str]) -> None:
    folder = specs / "plugins"
    folder.mkdir()
    (folder / "failing.py").write_text(FAILING_PLUGIN)
    (folder / "broken_one.py").write_text(BROKEN_PLUGIN)
    out = run("plugins", "--plugin-dir", "plugins")
    assert re.search(r"^failing .* 1$", out, re.MULTILINE)
    assert "broken: broken_one" in out
    assert "No module named 'there_is_no_such_module'" in out
    assert "switched off: failing" in run("plugins", "--plugin-dir", "plugins", "--disable", "failing")
    found = json.loads(run("plugins", "--plugin-dir", "plugins", "--json"))
    assert [one["name"] for one in found["loaded"]] == ["tfkit", "failing"]
    assert [one["name"] for one in found["broken"]] == ["broken_one"]


# ---- build ----


def test_build(run: Callable[..., str], golden: Golden) -> None:
    for name in ("tiny", "pair"):
        golden(f"cli/build_{name}", re.sub(r"\d+\.\d\d s", "0.00 s", run("build", f"{name}.yaml")))


def test_build_on_meta(run: Callable[..., str]) -> None:
    found = json.loads(run("build", "gpt2_xl", "--device", "meta", "--dtype", "bfloat16", "--json"))
    assert found["parameters"] == 1_557_611_200
    assert found["bytes"] == 2 * found["parameters"]
    assert found["nodes"][-1]["shape"] == [2, 16, 50257]
    assert found["files"] == []


def test_build_writes_a_model(run: Callable[..., str], specs: Path) -> None:
    files = json.loads(run("build", "tiny.yaml", "-o", "deep/out", "--seed", "3", "--json"))["files"]
    assert [Path(file).name for file in files] == ["spec.yaml", "model.safetensors"]
    assert {path.name for path in (specs / "deep").iterdir()} == {"out"}
    assert "already exists" in run("build", "tiny.yaml", "-o", "deep/out", status=1, stderr=True)
    run("build", "tiny.yaml", "-o", "deep/out", "--force")
    assert json.loads(run("params", "deep/out/spec.yaml", "--json"))[0]["name"] == "tiny"


def test_build_refuses_what_does_not_fit(
    run: Callable[..., str], golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfkit.tools.memory.free_memory", lambda device: 10_000)
    golden("cli/no_memory", run("build", "tiny.yaml", status=1, stderr=True))
    run("build", "tiny.yaml", "--device", "meta")


def test_build_names_the_node_that_fails(run: Callable[..., str], specs: Path) -> None:
    (specs / "failing.py").write_text(FAILING_PLUGIN)
    (specs / "fails.yaml").write_text(TINY.replace("{kind: gelu, d_ff: 32}", "fails"))
    found = run("build", "fails.yaml", "--plugin-dir", "failing.py", status=1, stderr=True)
    assert found.startswith("error: the forward of ffn kind `fails` fails, in `decoder.layers.0.ffn`: RuntimeError: ")
    assert "(graph.decoder.ffn)" in found
    for command in ("explain", "cost"):
        found = run(command, "fails.yaml", "--plugin-dir", "failing.py", status=1, stderr=True)
        assert found.startswith("error: the forward of ffn kind `fails` fails, in `decoder.layers.0.ffn`: ")


def test_progress_is_for_terminals_and_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def slow(*args: object, **given: object) -> object:
        time.sleep(0.3)
        return build(*args, **given)  # type: ignore[arg-type]

    build = first_run.build
    monkeypatch.setattr(first_run, "build", slow)
    monkeypatch.setattr("tfkit.cli.output.PATIENCE", 0.05)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    assert main(["build", "tiny.yaml", "--no-plugins"]) == 0
    assert "building" in terminal.getvalue()


@pytest.mark.parametrize(
    ("count", "text"),
    [(999, "999"), (1000, "1.0K"), (124_439_808, "124.4M"), (999_960, "1.0M"), (405_853_388_800, "405.9B")],
)
def test_short(count: int, text: str) -> None:
    assert short(count) == text
