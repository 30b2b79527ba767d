"""Types of document of plugins: the hook `tfkit_documents`, and the folders that a project declares."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from jsonschema import Draft202012Validator

from tfkit.cli import cli, main
from tfkit.console.completion import VARIABLE
from tfkit.errors import SpecError
from tfkit.graph.documents import document_types
from tfkit.plugin.manager import available_plugins
from tfkit.tools.list_.gallery import shipped_documents

from .written import load, write

POINTS = """
[project]
name = "tfkit-lab"
version = "0.3"

[project.entry-points.tfkit]
lab = "tfkit_lab"

[project.entry-points."tfkit.documents"]
survey = "tfkit_lab.surveys:ask"
"""
CODE = '''
import tfkit

class Survey(tfkit.Document):
    """A model and the questions that it is asked."""

    sort, command, typical = "survey", "ask", ("model", "questions")
    further_keys = ("model",)
    exclusive_keys = frozenset({"count", "time"})
    listed_keys = ("questions",)

    questions: tuple[str, ...]
    """The questions."""
    description: str | None = None
    """The purpose."""
    count: tfkit.Count | None = None
    """The number of texts."""
    time: tfkit.Count | None = None
    """The number of seconds."""

    def check(self) -> None:
        super().check()
        if self.count and self.time:
            raise tfkit.Invalid("time", "a survey has a count or a time")

class Surveys(tfkit.DocumentType):
    def check(self, name, plugins, *, sets=()):
        graph = super().check(name, plugins, sets=sets)
        if graph.name == "forbidden":
            raise tfkit.SpecError(tfkit.Diagnostic("this model must not be surveyed"))
        return graph

    def template(self, spec, folder, plugins):
        return f"tfkit: 1\\nmodel: {spec}\\nquestions: hello\\n"

class Archive(tfkit.Document):
    """Several surveys."""

    sort, command, typical = "archive", "serve", ("surveys",)

    surveys: tuple[str, ...]

@tfkit.hookimpl
def tfkit_documents():
    return [Surveys(Survey), tfkit.DocumentType(Archive)]
'''
BIRDS = """\
tfkit: 1
model:
  name: small
  d_model: 12
  vocab_size: 35
  graph:
    embedding: {block: embedding}
    decoder: {block: decoder, n_layers: 3, attention: {kind: mha, n_heads: 2}, ffn: {kind: gelu, d_ff: 20}}
    head: lm_head
questions: ["once", "wärme"]
count: 7
"""
Run = Callable[..., tuple[str, str]]


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A project with two types of document and a named survey, and a survey in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    write("lab/pyproject.toml", POINTS)
    write("lab/src/tfkit_lab/__init__.py", CODE)
    write("lab/src/tfkit_lab/surveys/trees.yaml", f"{BIRDS}description: About trees.\n".replace("count: 7\n", ""))
    Path("birds.yaml").write_text(BIRDS, encoding="utf-8")
    Path("timed.yaml").write_text("extends: birds.yaml\ntime: 3\nquestions: twice\n", encoding="utf-8")
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "tfkit_lab"]:
        del sys.modules[name]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command with the plugin, and return its output and its errors."""

    def call(*arguments: str, status: int = 0) -> tuple[str, str]:
        actual = main([*arguments, "--no-plugins", "--plugin-dir", "lab"])
        out, err = capsys.readouterr()
        assert actual == status, err
        return out, err

    return call


def completions(*words: str) -> list[str]:
    *args, incomplete = words
    args = [*args[:1], "--no-plugins", "--plugin-dir", "lab", *args[1:]]
    return [item.value for item in ShellComplete(cli, {}, "tfkit", VARIABLE).get_completions(args, incomplete)]


def test_commands_take_its_model(run: Run) -> None:
    expected = run("params", "birds.yaml")[0]
    assert "small: 4.4K parameters" in expected
    assert run("params", "timed.yaml")[0].replace("timed", "birds") == expected
    assert run("params", "trees")[0].replace("trees", "birds.yaml") == expected
    assert run("show", "birds.yaml", "--set", "model.decoder.n_layers=4")[0].count("n_layers: 4") == 1


def test_errors_have_locations(run: Run) -> None:
    write("wrong.yaml", f"{BIRDS}question: x\n")
    _, error = run("params", "wrong.yaml", status=1)
    assert error.startswith("error: unknown key `question`\n   --> wrong.yaml:12:1  (question)\n")
    assert "= keys of a survey: " in error
    _, error = run("show", "birds.yaml", "--set", "model.decoder.ffn.d_ff=0", status=1)
    assert "(model.graph.decoder.ffn.d_ff)" in error
    _, error = run("show", "birds.yaml", "--set", "d_model=24", status=1)
    assert "the survey has no key `d_model`" in error
    write("bare.yaml", "tfkit: 1\nquestions: a\nmodel: [gpt2]\n")
    assert "`model` must be a spec" in run("params", "bare.yaml", status=1)[1]


def test_validate_checks_fields_model_and_type(run: Run) -> None:
    assert run("validate", "birds.yaml", "timed.yaml", "trees")[0] == "birds.yaml: ok\ntimed.yaml: ok\ntrees: ok\n"
    out, _ = run("validate", "birds.yaml", "--set", "time=3", "--set", "questions=again")
    assert out == "birds.yaml: ok\n"
    _, error = run("validate", "birds.yaml", "--set", "model.name=forbidden", status=1)
    assert "this model must not be surveyed" in error
    write("both.yaml", f"{BIRDS}time: 2\n")
    assert "a survey has a count or a time" in run("validate", "both.yaml", status=1)[1]


def test_schema_of_a_type(run: Run) -> None:
    schema = json.loads(run("schema", "survey")[0])
    assert schema["title"] == "A survey as tfkit reads it"
    validator = Draft202012Validator(schema)
    good = {"tfkit": 1, "model": "gpt2", "questions": "one"}
    assert validator.is_valid(good)
    assert validator.is_valid({"extends": "birds.yaml", "model": {"d_model": 8}})
    assert not validator.is_valid({**good, "question": "x"})
    assert not validator.is_valid({"tfkit": 1, "questions": "one"})
    for command in ("schema", "new"):
        arguments = [command, "archive", *(["gpt2"] if command == "new" else [])]
        assert "`archive` is not one of" in run(*arguments, status=2)[1]


def test_a_new_document_of_a_type(run: Run) -> None:
    out, _ = run("new", "survey", "gpt2", "-o", "mine.yaml")
    assert out == "wrote mine.yaml; next: tfkit ask mine.yaml --plugin-dir=lab --no-plugins\n"
    assert run("validate", "mine.yaml")[0] == "mine.yaml: ok\n"
    assert "exists already" in run("new", "survey", "gpt2", "-o", "mine.yaml", status=1)[1]
    write("lab/src/tfkit_lab/__init__.py", CODE.replace("def template", "def no_template"))
    del sys.modules["tfkit_lab"]
    assert "the type of document `survey` has no template" in run("new", "survey", "gpt2", status=1)[1]


def test_names_without_running_the_plugin(run: Run) -> None:
    write("lab/src/tfkit_lab/__init__.py", "raise SystemExit('it ran')")
    out, _ = run("list", "surveys")
    assert out.startswith("tfkit ask   description\n")
    assert "\ntrees       About trees.; from tfkit-lab 0.3\n" in out
    assert out.endswith("\n1 survey\n")
    (entry,) = json.loads(run("list", "trees", "--json")[0])
    assert (entry["sort"], entry["plugin"], entry["description"]) == ("survey", "tfkit-lab 0.3", "About trees.")
    assert completions("params", "tre") == ["trees"]
    assert completions("schema", "su") == ["survey"]
    assert completions("new", "") == ["plugin", "run", "survey"]
    assert "tfkit_lab" not in sys.modules


def test_a_file_that_cannot_be_read_is_listed_with_its_error() -> None:
    write("lab/src/tfkit_lab/surveys/torn.yaml", "model: [\n")
    entries = shipped_documents(["survey"], available_plugins(plugin_dirs="lab", entry_points=False))
    assert {entry.name: entry.error for entry in entries} == {"torn": "the text ends inside brackets", "trees": None}


def test_documents_of_a_type_of_tfkit(run: Run) -> None:
    points = POINTS.replace('survey = "tfkit_lab.surveys:ask"', 'run = "tfkit_lab.runs"')
    write("lab/pyproject.toml", points)
    write("lab/src/tfkit_lab/runs/lab_reverse.yaml", "extends: reverse\nname: lab_reverse\ndescription: Backwards.\n")
    out, _ = run("list", "lab_reverse")
    assert out.startswith("tfkit train   description\n")
    assert "Backwards.; from tfkit-lab 0.3" in out
    assert completions("train", "lab_") == ["lab_reverse"]
    assert run("validate", "lab_reverse")[0] == "lab_reverse: ok\n"


def test_a_file_of_a_different_type_names_its_command(run: Run) -> None:
    _, error = run("train", "birds.yaml", "--plan", status=1)
    assert error.startswith("error: `birds.yaml` must be a run; got a survey\n")
    assert error.endswith("help: read it with `tfkit ask`\n")
    write("dinner.yaml", "tfkit: 1\nsurveys: [birds]\n")
    assert "`dinner.yaml` must be a model; got a archive" in run("params", "dinner.yaml", status=1)[1]


# ---- faults ----


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("return [Survey]", "must return a list of tfkit.DocumentType; got ModelMetaclass"),
        ("return tfkit.DocumentType(int)", "must return types whose `config` is a subclass of tfkit.Document"),
        ("Survey.command = ''; return [Surveys(Survey)]", "`Survey` has no `command`"),
        ("Survey.sort = 'model'; return [Surveys(Survey)]", "`Survey.sort` must be a lower-case word other than"),
        ("Survey.typical = ('x',); return [Surveys(Survey)]", "`Survey.typical` must contain keys of the document"),
        ("1 / 0", "failed: ZeroDivisionError"),
    ],
)
def test_a_hook_that_fails_is_a_warning(body: str, text: str, run: Run) -> None:
    write("lab/src/tfkit_lab/__init__.py", f"{CODE.partition('    return [Surveys')[0]}    {body}\n")
    Path("small.yaml").write_text(BIRDS.partition("model:\n")[2].partition("questions:")[0].replace("\n  ", "\n")[2:])
    Path("small.yaml").write_text(f"tfkit: 1\n{Path('small.yaml').read_text()}")
    out, error = run("params", "small.yaml")
    assert "4.4K parameters" in out
    assert f"warning: plugin tfkit-lab 0.3: `tfkit_documents` {text}" in " ".join(error.split())


def test_two_types_of_the_same_name() -> None:
    write("lab/src/tfkit_lab/__init__.py", CODE.replace('"survey", "ask"', '"run", "ask"'))
    with pytest.raises(SpecError, match="there are two types of document named `run`") as caught:
        document_types(load("lab"))
    assert caught.value.diagnostics[0].notes == ("built in", "tfkit-lab 0.3")


def test_two_documents_of_the_same_name() -> None:
    write("lab/pyproject.toml", POINTS.replace("survey =", "run ="))
    write("lab/src/tfkit_lab/surveys/reverse.yaml", BIRDS)
    with pytest.raises(SpecError, match="there are two runs named `reverse`"):
        available_plugins(plugin_dirs="lab", entry_points=False)


def test_a_folder_without_documents() -> None:
    write("lab/pyproject.toml", POINTS.replace("tfkit_lab.surveys", "tfkit_lab"))
    (broken,) = available_plugins(plugin_dirs="lab", entry_points=False).broken
    assert "which it declares for `tfkit.documents`, holds no *.yaml" in broken.cause


def test_a_base_class_of_types_is_no_type(run: Run) -> None:
    code = CODE.replace("class Survey(tfkit.Document)", "class Inquiry(tfkit.Document): ...\n\nclass Survey(Inquiry)")
    write("lab/src/tfkit_lab/__init__.py", code.replace("questions", "riddles"))  # no other test has this key
    write("birds.yaml", BIRDS.replace("questions", "riddles"))
    assert "must be a run; got a survey" in run("train", "birds.yaml", "--plan", status=1)[1]
    assert run("validate", "birds.yaml")[0] == "birds.yaml: ok\n"
