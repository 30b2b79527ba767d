"""The help of errors for what users of other tools try: the advice is printed, and following it works."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tfkit
from tests.run.training.runs import BUMP, PLUGINS, write_run
from tfkit.cli import main
from tfkit.run.checked_run import load_run

MODEL = """\
tfkit: 1
name: small
d_model: 16
vocab_size: 20
graph:
  embedding: {block: embedding}
  decoder: {block: decoder, n_layers: 2, attention: {kind: gqa, n_heads: 4, n_kv_heads: 4}, ffn: {kind: relu, d_ff: 24}}
  head: {block: lm_head}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path)
    (tmp_path / "model.yaml").write_text(MODEL, encoding="utf-8")
    (tmp_path / "notes.txt").write_text("hello", encoding="utf-8")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def help_of(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The line of help of a command that fails."""
    assert main(shlex.split(arguments)) != 0
    printed = capsys.readouterr().err
    (line,) = re.findall(r"^ *= help: (.*(?:\n {5,}.*)*)", printed, re.MULTILINE)
    return " ".join(line.split())


@pytest.mark.parametrize(
    ("command", "help"),
    [
        ("train small.yaml --resume", "repeat the same command, or call: it resumes an interrupted run"),
        ("resume out", "`tfkit train` resumes an interrupted run: repeat the command that began it"),
        ("train small.yaml --batch-size 4", "set the number of sequences in a batch: `--set batch.sequences=N`"),
        (
            "train small.yaml --lora 8",
            "train adapters: `--set weights=DIR --set 'adapters={targets: [q_proj, v_proj], rank: 8}'`",
        ),
        (
            "merge adapter",
            "`tfkit save FOLDER --layout huggingface -o DIR` merges the adapter in a folder into its model",
        ),
        ("explain attention", "`tfkit show SPEC --prose` explains a spec; `tfkit components SLOT` lists the kinds of"),
        ("show attention", "`attention` is a slot: list its kinds with `tfkit components attention`"),
        ("check gqa", "`gqa` is a kind: try `tfkit components attention gqa`, or `tfkit check --kind gqa`"),
        ("check relu", "`relu` is a kind: try `tfkit components activation relu`, or `tfkit check --kind activation.r"),
        ("check gqq", "give the path of a file: ./my_model.yaml"),
        ("train small.yaml --widht 4", "tfkit train --help"),
        ("params gpt2 --lr 4", "tfkit params --help"),
        ("train small.yaml --device cuda", "`--set machine.device=cuda` trains on a device"),
        ("train small.yaml --processes 2", "torchrun --nproc-per-node 2 -m tfkit train RUN starts 2 processes"),
        ("train small.yaml --set decoder.n_layers=3", "write the full path: `model.decoder.n_layers`"),
        ("train small.yaml --set lr=3", "write the full path: `optimizer.lr`"),
        ("params model.yaml --set n_heads=2", "write the full path: `decoder.attention.n_heads`"),
        ("train gpt2", "`gpt2` is a spec: `tfkit new run gpt2 -o run.yaml` writes a run for it"),
        ("train folder", "name a folder that `tfkit train` wrote"),
        ("build folder", "name a folder that `tfkit build`, `tfkit save` or `tfkit train` wrote"),
        ("build notes.txt", "write the path with its folder, `./notes.txt`, if the file is a spec"),
    ],
)
def test_help_of_commands(command: str, help: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert help_of(command, capsys).startswith(help)


@pytest.mark.parametrize(
    ("command", "changes"),
    [
        ("train small.yaml --lr 2e-3", ["optimizer.lr=2e-3"]),
        ("train small.yaml --steps=7", ["steps=7"]),
        ("train --machine-device x small.yaml --data.order sequential", []),
        ("train small.yaml --every 3", ["eval.every=3", "checkpoint.every=3"]),
        ("train small.yaml --weight-decay", ["optimizer.weight_decay=VALUE"]),
        ("train small.yaml --d-model 32", ["model.d_model=32"]),
        ("train small.yaml --data '{kind: copy}'", ["data={kind: copy}"]),
        ("sweep sweep.yaml --seeds '[1, 2]'", []),
        ("params model.yaml --d-model 32", ["d_model=32"]),
    ],
)
def test_an_unknown_option_that_is_a_key_names_its_path(
    command: str, changes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    help = help_of(command, capsys)
    options = [shlex.split(text) for text in re.findall("`(--set [^`]*)`", help)]
    assert options == [["--set", change] for change in changes]
    of_run = [change for change in changes if command.startswith("train") and "=VALUE" not in change]
    if of_run and "every" not in command and "data" not in command:
        assert load_run("small.yaml", PLUGINS, sets=of_run).config.name == "small"


def test_arguments_of_functions() -> None:
    functions: list[Any] = [tfkit.build, tfkit.train, tfkit.data]
    for function in functions:
        with pytest.raises(TypeError, match=r"has no argument `plugins`: load the spec with its plugins, `tfkit\.load"):
            function("small.yaml", plugins=PLUGINS)
    train: Any = tfkit.train
    with pytest.raises(TypeError, match="has no argument `resume`: repeat the same command, or call: it resumes"):
        train("small.yaml", resume=True)
    assert tfkit.build(tfkit.load("model.yaml", plugins=tfkit.load_plugins(plugin_dirs=())), device="meta").code


def test_a_kind_of_a_plugin_that_is_not_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "a.py").write_text("import nothing_of_this_name\n", encoding="utf-8")
    (tmp_path / "plugins" / "curves.py").write_text(BUMP, encoding="utf-8")
    command = "params model.yaml --set 'decoder.ffn={kind: mlp, activation: bump, d_ff: 24}'"
    option = "--plugin-dir ./plugins/curves.py"
    assert (
        help_of(command, capsys)
        == f"`plugins/curves.py` defines it; allow it in place: `{option}`, or TFKIT_PLUGIN_DIR"
    )
    assert main(shlex.split(f"{command} {option}")) == 0
    assert "=" not in help_of(command.replace("bump", "tanhh"), capsys)


def test_a_new_plugin_that_is_not_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    """Its kind, which is also a kind of schedules, and its spec."""
    assert main(["new", "plugin", "cosine", "--slot", "attention"]) == 0
    option = "--plugin-dir ./tfkit-cosine"
    commands = {
        "params model.yaml --set 'decoder.attention={kind: cosine, n_heads: 4}'": "defines it",
        "components attention cosine": "defines it",
        "check --kind attention.cosine": "defines it",
        "params cosine_tiny": "contains it",
    }
    for command, text in commands.items():
        help = f"`tfkit-cosine` {text}; allow it in place: `{option}`, or TFKIT_PLUGIN_DIR"
        assert help_of(command, capsys) == help
        assert command.startswith("check") or main(shlex.split(f"{command} {option}")) == 0
    sys.modules.pop("tfkit_cosine")


def test_a_slot_as_the_type_of_a_new_file(capsys: pytest.CaptureFixture[str]) -> None:
    help = help_of("new attention sharp", capsys)
    assert help == "write a plugin for it: `tfkit new plugin sharp --slot attention`"
    assert main(["new", "plugin", "sharp", "--slot", "attention"]) == 0


def test_a_run_requires_the_plugins_of_its_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bump.py").write_text(BUMP, encoding="utf-8")
    ffn = "model.decoder.ffn={kind: mlp, activation: bump, d_ff: 24}"
    options = ["--set", ffn, "--set", "steps=2", "--plugin-dir", "bump.py"]
    assert main(["train", "small.yaml", "-o", "out", *options]) == 0
    (tmp_path / "out" / "step-2").rename(tmp_path / "moved")
    capsys.readouterr()
    for command in ("eval out --weights moved", "train out"):
        assert help_of(command, capsys).startswith("allow it in place: `--plugin-dir ./bump.py`")
    assert main(["eval", "out", "--weights", "moved", "--plugin-dir", "./bump.py"]) == 0


def test_an_adapter_names_the_model_that_it_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    settings = {"peft_type": "LORA", "base_model_name_or_path": "org/model"}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    save_file({"base_model.model.q.lora_A.weight": torch.ones(2, 16)}, folder / "adapter_model.safetensors")
    assert help_of("build adapter", capsys).startswith("derive a spec from its base, which adapter_config.json names")
    for command in ("build model.yaml --weights adapter", "import adapter", "tensors adapter"):
        assert help_of(command, capsys).startswith(
            "download the model, and write its folder as `base_model_name_or_path`"
        )


def test_a_shard_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = tfkit.build("model.yaml").state_dict()
    names = {name: f"model-0000{1 + (number > 3)}-of-00002.safetensors" for number, name in enumerate(tensors)}
    (tmp_path / "w").mkdir()
    index = tmp_path / "w" / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}), encoding="utf-8")
    for number in (1, 2):
        file = f"model-0000{number}-of-00002.safetensors"
        command = "build model.yaml --weights w"
        assert main(shlex.split(command)) != 0
        printed = " ".join(capsys.readouterr().err.split())
        assert f"names `{file}`, which is not in its folder = missing files: {3 - number} of 2" in printed
        part = {name: tensor.clone() for name, tensor in tensors.items() if names[name] == file}
        save_file(part, tmp_path / "w" / file)
    assert main(shlex.split(command)) == 0


def test_weights_of_other_shapes_name_the_map(capsys: pytest.CaptureFixture[str]) -> None:
    tfkit.save(tfkit.build("model.yaml"), "w")
    command = "build model.yaml --set decoder.attention.n_kv_heads=2 --weights w --allow-change"
    assert help_of(command, capsys).startswith(
        "convert them in a run with `map`, for instance to fewer key-value heads"
    )
