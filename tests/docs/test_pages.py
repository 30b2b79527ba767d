"""Every block of the README and of the pages by task, and every link."""

from __future__ import annotations

import inspect
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import click
import pytest
import transformers

import tfkit
from tfkit.cli import cli
from tfkit.console.commands import Reader
from tfkit.errors import Diagnostic, SpecError
from tfkit.plugin import hookspecs
from tfkit.plugin.hooks import HOOKS
from tfkit.tools.eject.write import eject
from tfkit.tools.list_.gallery import shipped_specs
from tfkit.tools.sweep import sweep

from ..tools.sweep.in_process import InProcess
from .page import ROOT, blocks, follow, matches, run

DOCS = ROOT / "docs"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PLUGINS = {folder.name for folder in (ROOT / "plugins").iterdir() if folder.is_dir()}
NEEDED_PLUGINS = {page: {"tfkit-media", "tfkit-streams"} for page in ("custom_objectives", "flow_matching", "jepa")}
"""The plugins that a page asks its reader to install."""
README = ROOT / "README.md"
ELSEWHERE = {"around.md", "first.md", "hybrids.md", "learn.md", "media.md", "retention.md", "tuning.md"}
"""Pages that have tests of their own, or that only the slow test runs."""
PAGES = [README, *(page for page in sorted(DOCS.glob("*.md")) if page.name not in ELSEWHERE)]
LONG_PAGES = {
    "by_step",
    "callbacks",
    "check_mutants",
    "check_runs",
    "cluster",
    "compare_runs",
    "components",
    "convert",
    "cost",
    "custom_objectives",
    "data",
    "decoding",
    "export",
    "families",
    "finetuning",
    "flow_matching",
    "growing",
    "inspect",
    "installing",
    "jepa",
    "ladders",
    "masked_diffusion",
    "monitoring",
    "outputs",
    "own_loop",
    "plugins",
    "precision",
    "preferences",
    "recipes",
    "resuming",
    "specs",
    "sweeps",
    "tasks",
    "training",
    "transformers",
    "weights",
    "wires",
}
WRITTEN = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "stability.md",
    ROOT / "tfkit" / "README.md",
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("specs/*.md"),
    *ROOT.glob("plugins/*/README.md"),
]


@pytest.fixture
def _as_a_reader(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In an empty folder, at 80 columns, with only the plugins that the page needs; its own plugins are forgotten."""
    before = set(sys.modules)
    disabled = PLUGINS - NEEDED_PLUGINS.get(Path(request.node.callspec.params["page"]).stem, set())
    transformers.utils.logging.disable_progress_bar()
    monkeypatch.chdir(tmp_path)
    values = {"COLUMNS": "80", "NO_COLOR": "1", "TFKIT_DISABLE": ",".join(sorted(disabled)), "PWD": str(tmp_path)}
    for name, value in {**values, "TFKIT_PLUGIN_DIR": ""}.items():  # which a page may export
        monkeypatch.setenv(name, value)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("tfkit_"):
            del sys.modules[name]


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page.stem in LONG_PAGES), id=page.stem) for page in PAGES]
)
@pytest.mark.usefixtures("_as_a_reader")
def test_a_page_does_what_it_says(
    page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "train_missing_runs", InProcess())
    follow(page, tmp_path, lambda command: run(command, capsys.readouterr), hurry=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of what exports and profiles
@pytest.mark.parametrize(
    "page",
    [
        "check",
        "components",
        "cost",
        "export",
        "first",
        "llama_names",
        "masks",
        "mixers",
        "start",
        "streams",
        "sweeps",
        "transformers",
    ],
)
@pytest.mark.usefixtures("_as_a_reader")
def test_a_page_does_what_it_says_to_the_end(page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    follow(DOCS / f"{page}.md", tmp_path, lambda command: run(command, capsys.readouterr))


def test_slow_blocks_are_run_by_the_slow_test() -> None:
    """What the quick test leaves out stands on those pages only."""
    slow = re.compile(r"^\$ (python|tfkit (eject|export|profile)) |check_component", re.MULTILINE)
    actual = {page.stem for page in PAGES if any(slow.search(block.text) for block in blocks(page))}
    assert actual == {
        "start",
        "check",
        "components",
        "export",
        "cost",
        "masks",
        "mixers",
        "streams",
        "transformers",
        "llama_names",
    }


def test_a_failure_shows_the_line_of_the_page(tmp_path: Path) -> None:
    page, outputs = tmp_path / "page.md", {"first": "1", "second": "3"}
    page.write_text("# A page\n\n```console\n$ first\n1\n$ second\n2\n```\n", encoding="utf-8")
    with pytest.raises(AssertionError, match=r"^page\.md:6: \$ second\n--- the page\n(.*\n)*-2\n") as caught:
        follow(page, tmp_path, outputs.__getitem__)
    assert [entry.name for entry in caught.traceback.filter(caught)] == ["test_a_failure_shows_the_line_of_the_page"]
    page.write_text("# A page\n\n```python\nx = 1\n\nassert x == 2\n```\n", encoding="utf-8")
    with pytest.raises(AssertionError) as caught:
        follow(page, tmp_path, outputs.__getitem__)
    assert (caught.traceback[-1].path, caught.traceback[-1].lineno + 1) == (page, 6)


@pytest.mark.parametrize("printed", ["a\nx\ny\nb 3.1 2 ms", "a\nb 3.1 10 s"])
def test_what_matches(printed: str) -> None:
    assert matches("a\n...\nb ...", printed)
    assert matches("a\n...\nb 3.1 1.5 s", printed)
    assert not matches("a\nb ...\nc", printed)
    assert not matches("a", printed)


# ---- what stands between the blocks ----


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_the_text_can_be_called(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the arguments and options that they need, until they read a file; a name alone is only a mention."""

    def stop(*_: object) -> None:
        raise SpecError(Diagnostic("nothing is read here"))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(click.Path, "convert", lambda kind, value, *_: kind.coerce_path_result(value))  # none exists
    monkeypatch.setattr(Reader, "load", stop)
    monkeypatch.setattr(Reader, "plugins", property(stop))
    root = click.Context(cli)
    for words in re.findall(r"`(tfkit [a-z][^`]*)`", prose(page)):
        name, *arguments = shlex.split(words)[1:]
        command = cli.get_command(root, name)
        assert command is not None, words
        if arguments not in ([], ["--help"]):
            try:
                with suppress(SpecError, click.exceptions.Exit), command.make_context(name, arguments, root) as context:
                    command.invoke(context)
            except click.UsageError as error:
                pytest.fail(f"{words}: {error.format_message()}")


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"", prose(page))
    for target in ("".join(value) for value in targets):
        if not target.startswith("https://"):
            assert (page.parent / target.partition("#")[0]).exists(), target


def headings(page: Path) -> set[str]:
    """Return the anchors of the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_sections(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)\s#:]*)#([^)\s]+)\)", prose(page)):
        file = page.parent / target if target else page
        if file.suffix == ".md":
            assert anchor in headings(file), f"{target}#{anchor}"


APPENDICES = {"check_bugs", "decisions", "experiments", "names"}
"""Pages of tables, which readers search and do not read from the top."""


@pytest.mark.parametrize(
    "page", [page for page in sorted(DOCS.glob("*.md")) if page.stem not in APPENDICES], ids=lambda page: page.stem
)
def test_a_page_has_at_most_1500_words(page: Path) -> None:
    """Blocks and words for the search do not count."""
    assert len(re.sub(r"<!-- .* -->", "", prose(page)).split()) <= 1500


def test_a_newcomer_reads_few_words_before_a_new_attention() -> None:
    """From the top of the README to the first command of docs/first.md that uses the attention."""
    readme, first = prose(README), prose(DOCS / "first.md")
    before = readme.partition("(docs/first.md)")[0] + first.partition("`check`\nmeasures")[0]
    assert 100 < len(before.split()) <= 150


def test_the_index_lists_every_page() -> None:
    listed = set(re.findall(r"\]\((\w+\.md)\)", (DOCS / "README.md").read_text(encoding="utf-8")))
    assert listed == {page.name for page in DOCS.glob("*.md")} - {"README.md"}


def test_each_hook_has_its_section() -> None:
    """With its signature as it is in the code."""
    page = (DOCS / "plugins.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (tfkit_\w+)\n\n`(.*)`$", page, re.MULTILINE)
    signatures = {name: str(inspect.signature(vars(hookspecs)[name])).replace("'", "") for name in HOOKS}
    assert dict(sections) == {name: f"{name}{signature}" for name, signature in signatures.items()}


def test_the_first_screen_is_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (commands,) = [block.text for block in blocks(README) if block.language == "sh"]
    for line in commands.splitlines():
        assert re.search(rf"^{line.split()[1]}:", makefile, re.MULTILINE), line


@pytest.mark.slow
def test_one_command_installs_all_that_the_specs_need() -> None:
    (command,) = re.findall(r'`(pip install "\.\[all\]".*?)`', README.read_text(encoding="utf-8"))
    projects = [tomllib.loads((ROOT / path / "pyproject.toml").read_text())["project"] for path in command.split()[3:]]
    assert {project["name"] for project in projects} == {name for spec in shipped_specs() for name in spec.requires}


@pytest.mark.slow
def test_the_readme_counts_the_specs_of_a_wheel() -> None:
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["sources"] == {"specs": "tfkit/_specs"}
    files = {path for pattern in wheel["include"] for path in ROOT.glob(pattern.lstrip("/"))}
    brought = sum(path.parent == ROOT / "specs" for path in files)
    text = README.read_text(encoding="utf-8")
    assert f"the name of one of the {brought} specs that come with tfkit" in text
    assert f"the {brought} models that come with tfkit" in text
    assert f"[plugins](plugins) | {len(shipped_specs()) - brought} further models" in text


def test_no_message_sends_to_a_registry_for_tfkit() -> None:
    """tfkit is not published: `pip install tfkit` would find nothing, or somebody else's.

    With an extra, pip takes the tfkit that is installed.
    """
    sources = [*ROOT.glob("tfkit/**/*.py"), *ROOT.glob("plugins/tfkit-m*/**/*.md"), *PAGES]
    sent = re.compile(r"pip install \"?tfkit(?!\[)")
    assert [path for path in sources if sent.search(path.read_text(encoding="utf-8"))] == []


def test_messages_name_the_extra_of_a_missing_package() -> None:
    extras = {*PROJECT["project"]["optional-dependencies"]}
    named = re.compile(r"pip install (\"tfkit\[(\w+)\]\"|[\w-]+)")
    for path in ROOT.glob("tfkit/**/*.py"):
        for requirement, extra in named.findall(path.read_text(encoding="utf-8")):
            assert extra in extras or requirement == "FOLDER", f"{path}: {requirement}"


@pytest.mark.slow
def test_the_ejected_example_is_what_eject_writes(request: pytest.FixtureRequest) -> None:
    path = DOCS / "examples" / "gpt2.py"
    text = eject(tfkit.load("gpt2"))
    if request.config.getoption("--renew-golden"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, "pytest tests/docs --renew-golden"
    assert len(text.splitlines()) < 215
