"""A run belongs to the code that trained it, which its record names; different code is an error unless accepted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tfkit
from tests.run.training.runs import PLUGINS, small_run
from tfkit.cli import main
from tfkit.run.run_code import EXAMPLES, LOOP, code_of

from ...sampling import chosen, slow, some
from .plugin import OWN_RUN, edit, forget, write_plugin


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TFKIT_PLUGIN_DIR", str(tmp_path / "own"))
    write_plugin()
    yield
    forget()


def train(*words: str) -> int:
    return main(["train", "small.yaml", "-o", "out", *words])


def facts() -> dict[str, Any]:
    return json.loads(Path("out/run.json").read_text(encoding="utf-8"))


def test_the_record_has_the_code_of_each_kind_and_process() -> None:
    assert train("--stop-after", "2") == 0
    assert train("--stop-after", "4") == 0
    first, second = facts()["sessions"]
    assert {"ffn own", "attention mha", "data text", "tokenizer characters", "optimizer adamw", LOOP} <= {
        *first["code"]
    }
    assert {"own", "own.helper", "tfkit.component.slots"} <= {*first["code"]["ffn own"]}
    assert list(first["code"][EXAMPLES]) == ["train", "val"]
    assert "code" not in second  # it is that of the process before
    assert first["environment"]["tfkit"] == second["environment"]["tfkit"] == tfkit.__version__
    assert "own" in first["environment"]["plugins"]


@pytest.mark.parametrize(
    ("file", "old", "new", "note"),
    [
        ("helper.py", "torch.relu(x)", "torch.tanh(x)", "module `own.helper`, used by ffn `own`"),
        slow(("__init__.py", "self.up(x)", "2 * self.up(x)", "module `own`, used by ffn `own`")),
    ],
)
def test_other_code_does_not_continue(
    file: str, old: str, new: str, note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--stop-after", "2") == 0
    edit(file, old, new)
    capsys.readouterr()
    before = facts()
    assert train() == 1
    printed = capsys.readouterr().err
    assert "error: the code of the run in `out` has changed since it began" in printed
    assert f"   = {note}\n" in printed
    assert "help: --allow-change" in printed
    assert facts() == before
    assert train("--allow-change") == 0
    assert f"warning: the run continues with other code: {note}" in capsys.readouterr().err
    first, second = facts()["sessions"]
    assert first["code"]["ffn own"] != second["code"]["ffn own"]
    assert first["code"]["norm layernorm"] == second["code"]["norm layernorm"]
    assert train() == 0  # complete, by the code of now


def test_a_complete_run_is_not_that_of_other_code(
    golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train() == 0
    edit("helper.py", "torch.relu(x)", "torch.tanh(x)")
    capsys.readouterr()
    assert train() == 1
    golden("runs/errors/other_code", capsys.readouterr().err)
    with pytest.raises(tfkit.SpecError, match="has changed since it began"):
        tfkit.train("small.yaml", output="out", quiet=True)
    assert tfkit.train("small.yaml", output="out", quiet=True, allow_change=True).steps_made == 0


@pytest.mark.parametrize(
    ("file", "old", "new"),
    some(
        [
            ("helper.py", "    return torch.relu(x)", "    # better\n    return (torch.relu(x))"),
            (
                "__init__.py",
                "class Stripes:",
                "class Unused(OwnConfig):\n    kind: Literal['unused'] = 'unused'\n\n\nclass Stripes:",
            ),
            ("__init__.py", "% 12", "% 11"),  # the code of another kind
        ],
        1,
    ),
)
def test_the_same_code_continues(file: str, old: str, new: str) -> None:
    assert train("--stop-after", "2") == 0
    edit(file, old, new)
    assert train() == 0


def test_a_run_that_failed_before_its_first_checkpoint_takes_the_code_that_was_repaired() -> None:
    edit("helper.py", "torch.relu(x)", "torch.relu(y)")
    with pytest.raises(NameError):
        train()
    edit("helper.py", "torch.relu(y)", "torch.relu(x)")
    assert train() == 0
    assert ["code" in session for session in facts()["sessions"]] == [False, True]


def test_rows_that_are_generated_differently_are_other_data(capsys: pytest.CaptureFixture[str]) -> None:
    text = OWN_RUN.replace("{kind: text, files: sheep.txt}", "stripes").replace(", length: 12}", "}")
    Path("small.yaml").write_text(text, encoding="utf-8")
    assert train("--stop-after", "2") == 0
    record = facts()
    record["sessions"][0]["code"]["examples"]["val"] = "0" * 16  # as of another version of numpy
    Path("out/run.json").write_text(json.dumps(record), encoding="utf-8")
    assert train() == 1
    assert "   = examples of split `val`\n" in capsys.readouterr().err
    edit("__init__.py", "% 12", "% 11")
    assert train() == 1
    printed = capsys.readouterr().err
    assert "   = module `own`, used by data `stripes`\n" in printed
    assert "   = examples of split `train`\n" in printed


def test_a_record_without_digests_agrees_with_all_code() -> None:
    assert train("--stop-after", "2") == 0
    record = facts()
    del record["sessions"][0]["code"]
    Path("out/run.json").write_text(json.dumps(record), encoding="utf-8")
    edit("helper.py", "torch.relu(x)", "torch.tanh(x)")
    assert train() == 0
    assert "ffn own" in facts()["sessions"][1]["code"]


USES = {
    "eval": ["eval", "out"],
    "eval of weights": ["eval", "small.yaml", "--weights", "out/step-8/model.safetensors"],
    "generate": ["generate", "out", "--prompt", "3", "--max-new-tokens", "2"],
    "generate from a checkpoint": ["generate", "out/step-8", "--prompt", "3", "--max-new-tokens", "2"],
    "save": ["save", "out", "--layout", "tfkit", "-o", "saved"],
}
WARNING = """\
warning: the code of the run in `out` has changed since it began
   = module `own.helper`, used by ffn `own`

"""


@pytest.mark.parametrize("use", chosen(USES, ("eval", "save")))
def test_weights_of_other_code_are_used_with_a_warning(use: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train() == 0
    edit("__init__.py", "% 12", "% 11")  # the code of a kind that is not in use
    capsys.readouterr()
    assert main(USES[use]) == 0
    assert "warning" not in capsys.readouterr().err
    edit("helper.py", "torch.relu(x)", "torch.tanh(x)")
    assert main([*USES[use], *["--force"] * (use == "save")]) == 0
    assert capsys.readouterr().err.startswith(WARNING)
    Path("out/run.json").write_text("{", encoding="utf-8")
    assert main([*USES[use], *["--force"] * (use == "save")]) == 0
    assert (
        "warning: changes of code since the training are unknown: cannot read `out/run.json`" in capsys.readouterr().err
    )


def test_trackers_are_not_code_of_a_run(tmp_path: Path) -> None:
    assert "tracker tensorboard" not in code_of(small_run(tmp_path, "track=[tensorboard]"))
    assert PLUGINS.registry.find("tracker", "tensorboard")


# ---- the content behind a path ----


@pytest.mark.slow
def test_another_teacher_is_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path("small.yaml").read_text(encoding="utf-8")
    Path("teacher.yaml").write_text(text, encoding="utf-8")
    assert main(["train", "teacher.yaml", "-o", "teacher", "--stop-after", "1"]) == 0
    Path("small.yaml").write_text(text + "loss: {kind: taught, teacher: teacher}\n", encoding="utf-8")
    assert train("--stop-after", "2") == 0
    assert "loss.teacher" not in facts()["meaning"]
    digest = facts()["meaning"]["loss.teacher_content"]
    shutil.copytree("teacher", "elsewhere")
    assert train("--stop-after", "3", "--set", "loss.teacher=elsewhere") == 0  # the same content
    Path("below").mkdir()
    monkeypatch.chdir("below")
    assert main(["train", "../small.yaml", "-o", "../out", "--stop-after", "4"]) == 0  # the path starts at the file
    monkeypatch.chdir(tmp_path)
    assert main(["train", "teacher.yaml", "-o", "teacher", "--stop-after", "2"]) == 0
    capsys.readouterr()
    assert train() == 1
    assert f'loss.teacher_content: "{digest}" -> "' in " ".join(capsys.readouterr().err.split())
    assert train("--set", "loss.teacher=nowhere") == 1
    assert "cannot read `nowhere`: there is no such file" in capsys.readouterr().err
