"""The site: every name, command, kind, model, run and sweep has a page, and Sphinx builds it without a warning."""

from __future__ import annotations

import json
import re
from functools import cache
from html import escape
from pathlib import Path

import pytest
import yaml

import tfkit
from tests.known import RUNS, SWEEPS
from tfkit.plugin.commands import built_in_commands
from tfkit.plugin.manager import load_plugins

pytest.importorskip("tools.docs.build", reason="the site is built in a checkout")
from tfkit.tools.components.component_docs import component_doc
from tfkit.tools.list_.gallery import shipped_specs
from tools.docs import guide, home, kinds, models, names, runs
from tools.docs.build import all_pages, write_pages
from tools.docs.page import ROOT, Page, docstring, table

from .site import build

SEARCHES = {
    "docs/questions": [
        *("add attention", "custom attention", "load llama", "pretrained weights", "plan"),
        *("train on my text", "text file", "cite", "citation", "bibtex"),
    ],
    "docs/cluster": ["multi gpu", "ddp", "fsdp"],
    "docs/own_loop": ["flash attention", "custom training loop"],
    "docs/training": ["perplexity"],
    "docs/precision": ["bf16", "mixed precision", "gradient accumulation", "out of memory"],
    "docs/monitoring": ["early stopping", "patience"],
    "docs/data": ["dataloader"],
    "docs/callbacks": ["custom dataset"],
    "docs/custom_objectives": ["custom loss"],
    "docs/preferences": ["dpo"],
    "docs/adapters": ["lora", "lora fine-tune"],
    "docs/resuming": ["seed", "reproducible", "loss nan"],
    "docs/decoding": ["kv cache"],
    "docs/weights": ["hf download", "hugging face hub"],
    "tools/bench/README": ["benchmark", "speed", "hugging face speed"],
    "commands/train": ["--plan"],
}
"""Searches of newcomers, by the page that must be among the first results."""


@cache
def pages() -> dict[str, Page]:
    return {page.path: page for page in all_pages()}


def test_everything_has_its_page() -> None:
    plugins = load_plugins()
    kinds_of = {slot: plugins.registry.kinds(slot) for slot in plugins.registry.slots()}
    expected = {
        *(f"commands/{name}" for name in built_in_commands()),
        *(f"kinds/{slot}/{kind}" for slot, kinds in kinds_of.items() for kind in kinds),
        *(f"models/{name}" for name in plugins.specs.files),
        *(f"runs/{name}" for name in RUNS),
        *(f"sweeps/{name}" for name in SWEEPS),
        *(f"docs/{path.stem}" for path in (ROOT / "docs").glob("*.md") if path.name != "README.md"),
    }
    assert expected - pages().keys() == set()
    assert sorted(name for group in names.groups().values() for name, _ in group) == tfkit.__all__


def test_the_paths_by_reader_are_the_index_of_the_docs() -> None:
    sections = guide.sections()
    assert list(sections)[:6] == [
        "Start",
        "I change architectures",
        "I train",
        "I look inside",
        "I port models",
        "I write plugins",
    ]
    listed = {page for pages in sections.values() for page in pages}
    assert {f"docs/{path.stem}" for path in (ROOT / "docs").glob("*.md")} - listed == {"docs/README"}


def test_a_name_has_its_signature_arguments_errors_and_an_example() -> None:
    text = names.entry("build")
    assert "tfkit.build(spec: AnySpec, *, sets" in text
    assert "stage: Callable[[str], Any] = ...," in names.entry("export")
    assert all(f"**{title}**" in text for title in ("Arguments", "Returns", "Raises"))
    assert re.search(r"\*\*Example\*\*, from the pages .*\n\n```python\n.*tfkit\.build\(", text)


def test_each_name_has_words() -> None:
    bare = [name for name in tfkit.__all__ if len(names.description(name).split()) < 2]
    assert bare == []


def test_a_command_has_its_options() -> None:
    text = pages()["commands/train"].write()
    assert "| `--plan` | Print the run's length and costs; train nothing. |" in text
    assert "tfkit train \\[OPTIONS\\] RUN" in text or "tfkit train [OPTIONS] RUN" in text


def test_a_kind_has_its_fields_formula_and_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "users", dict)  # they need all models
    text = pages()["kinds/norm/rmsnorm"].write()
    assert "| `eps` | float" in text
    assert "def rmsnorm(part" in text
    assert "<https://arxiv.org/abs/1910.07467>" in text
    assert "[tfkit/components/norm.py](/code/tfkit/components/norm_py.md)" in text


def test_a_formula_has_the_functions_that_it_calls() -> None:
    def formula(slot: str, kind: str) -> str:
        registered = load_plugins().registry.find(slot, kind)
        assert registered is not None
        return "".join(kinds._formula(component_doc(registered)))

    assert "def delta_rule(" in formula("mixer", "gated_delta")  # called in a comprehension
    assert "Here `activation` is `silu`" in formula("ffn", "swiglu")


def test_each_kind_that_computes_has_a_formula() -> None:
    registry = load_plugins().registry
    computed = ("activation", "attention", "ffn", "mixer", "norm", "residual", "rope_scaling", "mask_rule")
    formulas = kinds.formulas()
    missing = [(slot, kind) for slot in computed for kind in registry.kinds(slot) if kind not in formulas.get(slot, {})]
    assert missing == [("residual", "add")]  # the layer computes it


def test_required_fields_are_first_and_inherited_fields_last() -> None:
    registered = load_plugins().registry.find("attention", "gqa")
    assert registered is not None
    fields = sorted(component_doc(registered).fields, key=kinds._order)
    assert [field.name for field in fields[:2]] == ["n_heads", "n_kv_heads"]
    inherited = [field.inherited for field in fields]
    assert inherited == sorted(inherited)
    assert "d_model" in [field.name for field in fields if field.inherited]


def test_a_model_has_its_weights_and_family(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = {spec.name: spec for spec in shipped_specs()}
    monkeypatch.setattr(models, "shipped_specs", specs.values)  # they are slow to list
    assert models.weights().keys() <= {name for name, spec in specs.items() if spec.model_type}
    model = models.Model(specs["gpt2"], tfkit.load("gpt2"), ROOT / "specs" / "gpt2.yaml", None)
    facts = dict(models._facts(model))
    assert facts["weights"] == (
        "[openai-community/gpt2](https://huggingface.co/openai-community/gpt2), not compared with the spec; "
        "their licence is on its page"
    )
    assert "[gpt2_xl](/models/gpt2_xl.md)" in facts["family"]
    assert "(/models/gpt2.md)" not in facts["family"]


def test_the_model_of_the_first_screen_is_drawn_for_each_choice_of_lines() -> None:
    texts = dict(home.files())
    assert len(texts) == len(set(texts.values())) == 2 ** len(home.LINES)
    html = home.figure()
    assert all(escape(line) in html for lines in home.LINES.values() for line in lines)
    assert tfkit.count_params(tfkit.loads(home._spec((0, 0, 0, 0)))).total == 124_439_808  # GPT-2


def test_a_plan_is_what_the_command_prints() -> None:
    (entry,) = [entry for entry in runs.shipped_documents() if entry.name == "reverse"]
    assert runs.plan_of(entry) == ["train", "reverse", "--plan"]
    assert "parameters" in runs.printed(runs.plan_of(entry))


def test_pages_that_no_longer_exist_are_removed(tmp_path: Path) -> None:
    write_pages([Page("a/b", lambda: "one"), Page("c", lambda: "two")], tmp_path)
    time = (tmp_path / "c.md").stat().st_mtime_ns
    write_pages([Page("c", lambda: "two")], tmp_path)
    assert [path.name for path in tmp_path.rglob("*.md")] == ["c.md"]
    assert (tmp_path / "c.md").stat().st_mtime_ns == time


def test_text_of_a_docstring_has_no_other_meaning_in_markdown() -> None:
    text = docstring("Return a_b * c_d[i] < 3, `x[0]`; see https://example.org/a_b.\n\nArgs:\n    x: a *star*.\n")
    assert text == (
        "Return a\\_b \\* c\\_d\\[i\\] \\< 3, `x[0]`; see <https://example.org/a_b>.\n\n"
        "**Arguments**\n\n- `x`: a \\*star\\*.\n"
    )
    assert table(["a"], [("x | y",)]) == "| a |\n|---|\n| x \\| y |\n"


def test_the_site_has_titles_for_names_of_files_and_words_for_its_search() -> None:
    links = guide.Links(ROOT / "docs" / "questions.md", {})
    address = "https://arxiv.org/abs/1706.03762"
    assert (
        links.rewrite(f"see {address}, `{address}`, [it]({address})")
        == f"see <{address}>, `{address}`, [it]({address})"
    )
    assert links.rewrite("[it](examples/learn.ipynb)") == "[it](/docs/examples/learn.ipynb)"
    text = links.rewrite("<!-- search: cite, bibtex -->\n[data.md](data.md#a-classifier), [your data](data.md)\n")
    assert text == (
        "```{index} ! cite, ! bibtex\n```\n\n*[](/docs/data.md#a-classifier)*, [your data](/docs/data.md)\n"
    )


def test_the_entry_for_bibtex_agrees_with_the_citation() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    text = (ROOT / "docs" / "questions.md").read_text(encoding="utf-8")
    fields = dict(re.findall(r"^  (\w+) = \{+(.*?)\}+,?$", text, re.MULTILINE))
    authors = " and ".join(author["name"] for author in citation["authors"])
    assert fields == {"author": authors, **{name: citation[name] for name in ("title", "version", "license")}}


def test_a_sidebar_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("furo")
    from tools.docs import conf

    monkeypatch.setattr(conf, "TREE", [])
    monkeypatch.setattr(conf, "SIDEBARS", {})
    link = '<a class="reference internal" href="{}">{}</a>'
    inner = f'<ul><li class="toctree-l2">{link.format("more/c.html", "C")}</li></ul>'
    current = link.format("#", "A").replace("reference", "current reference")
    html = (
        f'<ul class="current"><li class="toctree-l1 current">{current}</li>'
        f'<li class="toctree-l1">{link.format("../b.html", "B")}{inner}</li></ul>'
    )
    entry = re.compile(r'<li class="toctree-l\d([^"]*)"><a[^>]*href="([^"]+)"')
    first = conf.sidebar("pages/a", lambda: html)
    assert entry.findall(first) == [
        (" current current-page", "a.html"),
        (" has-children", "../b.html"),
        ("", "more/c.html"),
    ]
    second = conf.sidebar("pages/more/c", lambda: pytest.fail("built twice"))
    assert entry.findall(second) == [
        ("", "../a.html"),
        (" current has-children", "../../b.html"),
        (" current current-page", "c.html"),
    ]
    assert [text.count('checked=""') for text in (first, second)] == [0, 1]


@pytest.mark.slow
def test_sphinx_builds_the_site_without_a_warning() -> None:
    pytest.importorskip("furo")
    site = build().site
    assert (site / "searchindex.js").exists()
    foreign = re.compile(r'<(script|img|link|iframe)\b[^>]*(src|href)="https?:')
    assert [page for page in site.rglob("*.html") if foreign.search(page.read_text(encoding="utf-8"))] == []
    pictures = {path.stem for path in (site / "pictures").glob("*.svg")}
    assert pictures == {path.stem for path in (site / "models").glob("*.html")} - {"index"}
    entries = search_entries(site)
    assert [words for page in SEARCHES for words in SEARCHES[page] if page not in entries.get(words, ())] == []


def search_entries(site: Path) -> dict[str, set[str]]:
    """Return the entries of the index, which are the first results of a search, with their pages."""
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    pages_of = index["indexentries"].items()
    return {words: {index["docnames"][number] for number, *_ in matches} for words, matches in pages_of}
