"""Commands that take a spec also take a run, and print the output for the run's model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.training.runs import RUN, TEXT, write_run
from tfkit.cli import main

MODEL = RUN[RUN.index("model:\n") : RUN.index("data:")].replace("model:\n", "").replace("\n  ", "\n")[2:]
SPEC = f"tfkit: 1\nname: small\n\n\n{MODEL.replace('data.vocab_size', str(len(set(TEXT))))}"
QUICK_COMMANDS = ["params --by node", "cost --length 8", "show", "show --prose", "show --points", "diff gpt2"]
SLOW = ["draw -o a.svg", "export -o a.pt2", "eject", "compare gpt2"]
SLOW += ["generate --tokens 1,2 --max-new-tokens 4 --weights saved", "save --layout tfkit --weights saved -o copy"]
TIMED = ["build", "check --level quick", "profile --steps 2"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    Path("longer.yaml").write_text("extends: small.yaml\nsteps: 50\n", encoding="utf-8")
    Path("model.yaml").write_text(SPEC, encoding="utf-8")


def printed(command: str, spec: str, capsys: pytest.CaptureFixture[str]) -> str:
    word, *options = command.split()
    status = main([word, spec, *options, *(["--force"] if word == "save" else [])])
    out, err = capsys.readouterr()
    assert status == (word == "compare"), err  # other weights
    return out


@pytest.mark.parametrize(
    "command", [*QUICK_COMMANDS, *(pytest.param(command, marks=pytest.mark.slow) for command in SLOW)]
)
def test_a_run_is_read_as_its_model(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "saved" in command:
        assert main(["build", "model.yaml", "-o", "saved"]) == 0
        capsys.readouterr()
    expected = printed(command, "model.yaml", capsys)
    assert printed(command, "small.yaml", capsys).replace("small.yaml", "model.yaml") == expected != ""


@pytest.mark.slow
@pytest.mark.parametrize("command", TIMED)
def test_a_command_that_measures_takes_a_run(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(command, "longer.yaml", capsys)


def test_names_and_changes_are_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "reverse", "--set", "model.d_model=32"]) == 0
    assert "d_model: 32" in capsys.readouterr().out
    assert main(["params", "small.yaml", "--set", "model.decoder.ffn.d_ff=0"]) == 1
    assert "(model.graph.decoder.ffn.d_ff)" in capsys.readouterr().err
    assert main(["params", "small.yaml", "--set", "d_model=32"]) == 1
    assert "the run has no key `d_model`" in capsys.readouterr().err


def test_a_run_is_validated_with_its_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "longer.yaml"]) == 0
    assert capsys.readouterr().out == "longer.yaml: ok\n"
    assert main(["validate", "longer.yaml", "--set", "model.vocab_size=5"]) == 1
    assert "but the model has `vocab_size` 5" in capsys.readouterr().err
