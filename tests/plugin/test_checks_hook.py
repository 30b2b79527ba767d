"""Checks of plugins: the hook `tfkit_checks`, in `tfkit validate` and `tfkit build`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import tfkit
from tfkit.cli import main
from tfkit.tools.common.plugin_checks import warnings_of

from .test_formats_hook import SPEC
from .written import load, write

HEAD = "import tfkit\nfrom tfkit.component import BlockConfig\n\n\n@tfkit.hookimpl\ndef tfkit_checks(graph):\n"
WIDE = f"""{HEAD}    for path, config in graph.configs(BlockConfig):
        yield tfkit.Diagnostic(f"{{path}} is a {{config.block}}", path=f"{{path}}.block", help="it may be")
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write("tiny.yaml", SPEC)


def warnings_in(text: str) -> list[tfkit.Diagnostic]:
    plugins = load(write("mine.py", text))
    assert not plugins.broken
    return warnings_of(tfkit.load("tiny.yaml", plugins=plugins), plugins)


def test_its_warnings_have_a_place_and_the_name_of_the_plugin() -> None:
    first, second = warnings_in(WIDE)
    assert first.message == "graph.embedding is a embedding"
    assert (first.span is not None and first.span.line, first.notes) == (6, ("from the plugin mine.py",))
    assert (second.path, second.help) == ("graph.logits.block", "it may be")


def test_one_without_a_path_has_no_place() -> None:
    (actual,) = warnings_in(f"{HEAD}    return [tfkit.Diagnostic('so')]\n")
    assert actual.span is None


def test_nothing_to_say() -> None:
    assert warnings_in(f"{HEAD}    return []\n") == warnings_in(f"{HEAD}    return None\n") == []


def test_validate_and_build_show_them(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--no-plugins", "--plugin-dir", str(write("mine.py", WIDE))]
    assert main(["validate", "tiny.yaml", *options]) == 0
    out, err = capsys.readouterr()
    assert out == "tiny.yaml: ok\n"
    assert err.startswith("warning: graph.embedding is a embedding\n  --> tiny.yaml:6:")
    assert main(["validate", "tiny.yaml", "--json", *options]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["errors"] == []
    assert [warning["line"] for warning in report["warnings"]] == [6, 7]
    assert main(["build", "tiny.yaml", *options]) == 0
    assert "warning: graph.embedding is a embedding\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "cause", "line"),
    [
        ("{}['x']", "failed: KeyError: 'x'", 7),
        ("yield tfkit.Diagnostic('a')\n    raise SystemExit", "failed: SystemExit", 8),
        ("return 3", "must return a list of tfkit.Diagnostic; got int", 5),
        ("return 'slow'", "must return a list of tfkit.Diagnostic; got str", 5),
    ],
)
def test_one_that_fails_is_a_warning_itself(body: str, cause: str, line: int) -> None:
    (actual,) = warnings_in(f"{HEAD}    {body}\n")
    assert actual.message == f"plugin mine.py: `tfkit_checks` {cause}"
    assert actual.notes == (f"{Path('mine.py').resolve()}:{line}",)


def test_a_failing_one_does_not_hide_the_others() -> None:
    write("plugins/a.py", f"{HEAD}    raise ValueError\n")
    write("plugins/b.py", f"{HEAD}    yield tfkit.Diagnostic('b')\n")
    plugins = load("plugins")
    actual = warnings_of(tfkit.load("tiny.yaml", plugins=plugins), plugins)
    assert [warning.message for warning in actual] == ["b", "plugin plugins/a.py: `tfkit_checks` failed: ValueError"]


def test_trace(run: Callable[..., str]) -> None:
    write("plugins/bad.py", f"{HEAD}    pass\n\n\n@tfkit.hookimpl\ndef tfkit_export_formats():\n    return 3\n")
    write(
        "plugins/lab/pyproject.toml", '[project]\nname = "lab"\n[project.entry-points."tfkit.specs"]\nlab = "lab.s"\n'
    )
    write("plugins/lab/lab/s/lab_gpt.yaml", "extends: gpt2\nname: lab_gpt\n")
    folder = "    return Path(__file__).parents[1] / 'more'\n"
    write(
        "plugins/more.py", f"import tfkit\nfrom pathlib import Path\n\n\n@tfkit.hookimpl\ndef tfkit_specs():\n{folder}"
    )
    write("more/more_gpt.yaml", "extends: gpt2\nname: more_gpt\n")
    report = json.loads(run("plugins", "--trace", "--plugin-dir", "plugins", "--json"))
    rows = {(call["hook"], call["plugin"]): call for call in report}
    assert "ffn swiglu" in rows["tfkit_register", "built in"]["gave"]
    assert rows["tfkit_export_formats", "built in"]["gave"] == ["torchscript", "pt2", "aoti", "onnx", "safetensors"]
    saved = [call["gave"] for call in report if call["hook"] == "tfkit_save_layouts"]
    assert saved == [["transformers", "sentence_transformers"], ["tfkit", "huggingface", "peft"]]
    assert rows["tfkit_export_formats", "plugins/bad.py"]["failed"].startswith(
        "`tfkit_export_formats` must return a list"
    )
    assert rows["tfkit_checks", "plugins/bad.py"]["note"].startswith("called for each spec")
    assert rows["tfkit.specs", "lab"]["gave"] == ["lab_gpt"]
    assert rows["tfkit_specs", "plugins/more.py"]["gave"] == [str(Path("more").resolve())]
    assert ("tfkit.specs", "plugins/more.py") not in rows
    text = run("plugins", "--trace", "--plugin-dir", "plugins")
    assert "lab_gpt" in text
    assert "must return" in text
