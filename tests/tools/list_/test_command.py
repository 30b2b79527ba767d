"""The command `list`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.known import RUNS, SWEEPS
from tfkit.tools.list_.command import _show_folders
from tfkit.tools.list_.gallery import PublishedFolder

pytestmark = pytest.mark.usefixtures("specs")


def test_list(run: Callable[..., str]) -> None:
    assert "gpt2" in [line.split(" ")[0] for line in run("list").splitlines()]
    (report,) = json.loads(run("list", "encoder", "BERT-base-uncased", "--json"))
    assert (report["name"], report["kind"], report["model_type"]) == ("bert_base", "encoder", "bert")
    assert "0 specs" in run("list", "no_such_word")


def test_list_ends_with_runs_and_sweeps(run: Callable[..., str], golden: Callable[[str, str], None]) -> None:
    shipped = {"run": RUNS, "sweep": SWEEPS}
    entries = json.loads(run("list", "--json"))
    for sort, names in shipped.items():
        assert [entry["name"] for entry in entries if entry["sort"] == sort] == names
    assert {entry["sort"] for entry in entries} == {"model", "run", "sweep"}
    _, last = run("list", "--no-plugins").split("tfkit train")
    assert all(f"\n{name} " in last for names in shipped.values() for name in names)
    assert f" specs, {len(shipped['run'])} runs, {len(shipped['sweep'])} sweeps\n" in last
    golden("cli/list_experiments", run("list", "swiglu"))
    assert run("list", "backwards").splitlines()[-1] == "1 run"


def test_list_says_which_specs_need_a_plugin_that_is_not_there(run: Callable[..., str]) -> None:
    entries = json.loads(run("list", "--json", "--no-plugins"))
    needing = [entry for entry in entries if entry.get("requires")]
    assert {name for entry in needing for name in entry["requires"]} == {
        "tfkit-encoders",
        "tfkit-media",
        "tfkit-mla",
        "tfkit-moe",
        "tfkit-recurrent",
        "tfkit-streams",
    }
    assert all(entry["missing"] == entry["requires"] for entry in needing)
    text = " ".join(run("list", "mixtral", "--no-plugins").split())
    assert "needs tfkit-moe" in text
    assert "tfkit-moe, needed by 2, is not loaded: " in text
    assert "not loaded" not in run("list", "gpt2", "--no-plugins")


def test_list_runs_no_plugin(run: Callable[..., str], tmp_path: Path) -> None:
    points = '[project.entry-points.tfkit]\nlab = "lab"\n[project.entry-points."tfkit.specs"]\nlab = "lab.specs"\n'
    (tmp_path / "lab/specs").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "tfkit-lab"\nversion = "0.3"\n{points}')
    (tmp_path / "lab/__init__.py").write_text("raise SystemExit('it ran')")
    (tmp_path / "lab/specs/lab_gpt.yaml").write_text("extends: gpt2\nname: lab_gpt\nrequires: [tfkit-other]\n")
    text = " ".join(run("list", "lab", "--no-plugins", "--plugin-dir", str(tmp_path)).split())
    assert "from tfkit-lab 0.3; needs tfkit-other" in text
    assert "tfkit-other, needed by 1, is not loaded: " in text


def test_list_names_the_specs_of_plugins_that_are_not_there(
    run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFKIT_DISABLE", "tfkit-mla")
    spec = next(spec for spec in json.loads(run("list", "deepseek_v3", "--json")) if spec["name"] == "deepseek_v3")
    assert (spec["plugin"], spec["model_type"], spec["missing"]) == ("tfkit-mla", "deepseek_v3", ["tfkit-mla"])
    text = run("list", "deepseek_v3")
    assert "it is switched off" in text


def test_list_names_the_version_of_a_plugin_that_does_not_meet_a_requirement(
    run: Callable[..., str], tmp_path: Path
) -> None:
    """The name of a plugin may be written with capitals and with `_`, as for pip."""
    (tmp_path / "lab/specs").mkdir(parents=True)
    points = '[project.entry-points.tfkit]\nlab = "lab"\n[project.entry-points."tfkit.specs"]\nlab = "lab.specs"\n'
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "tfkit-lab"\nversion = "0.3"\n{points}')
    (tmp_path / "lab/__init__.py").touch()
    (tmp_path / "lab/specs/lab_gpt.yaml").write_text("extends: gpt2\nname: lab_gpt\nrequires: ['TFKIT_Lab>=1']\n")
    text = " ".join(run("list", "lab_gpt", "--plugin-dir", str(tmp_path)).split())
    assert "TFKIT_Lab>=1, needed by 1, is another version than 0.3" in text


def test_published_folders_are_counted_without_a_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    folders = [
        PublishedFolder("a", "org/a", True),
        PublishedFolder("b", "org/b", False),
        PublishedFolder("c", None, False),
    ]
    _show_folders(folders)
    _, _, *rows, last = capsys.readouterr().out.splitlines()
    assert [row.split() for row in rows] == [["a", "org/a", "tensors"], ["b", "org/b"], ["c"]]
    assert last == "2 of 3 folders are known"
