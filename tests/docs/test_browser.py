"""The site in a browser: accessibility, widths, search, copying, and the model of the first screen."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from .browser import CHROMIUM, evaluate
from .site import build

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium"),
    pytest.mark.skipif(find_spec("furo") is None, reason="furo is not installed: make test-site"),
]
PAGES = (
    "index",
    "docs/first",
    "docs/learn",
    "docs/components",
    "docs/sweeps",
    "models/index",
    "models/gpt2",
    "kinds/attention/gqa",
    "commands/train",
    "search",
)
SEARCHES = {
    "install": "docs/installing",
    "own attention": "docs/questions",
    "new attention": "docs/questions",
    "rope": "kinds/position/rope",
    "resume": "docs/resuming",
    "lora": "docs/adapters",
    "export onnx": "docs/export",
    "count parameters": "docs/inspect",
    "kv cache": "docs/decoding",
    "load weights": "docs/questions",
    "huggingface": "docs/questions",
    "fine-tune": "docs/finetuning",
    "multi gpu": "docs/cluster",
    "own data": "docs/questions",
    "training loop": "docs/own_loop",
    "mask": "docs/masks",
    "sweep": "docs/sweeps",
    "flops": "docs/cost",
    "plugin": "docs/plugins",
    "notebook": "docs/learn",
    "loss": "docs/custom_objectives",
    "gpt2": "models/gpt2",
}
"""Questions of newcomers, by the page that must be the first result."""


@pytest.fixture(scope="module")
def site() -> Path:
    return build().site


def test_no_page_violates_level_aa(site: Path, tmp_path: Path) -> None:
    """By axe-core, in the light colours at 1,280 pixels and in the dark colours at 390."""
    package = find_spec("axe_core_python")
    if package is None or package.origin is None:
        pytest.skip("axe-core-python is not installed: make docs")
    axe = (Path(package.origin).parent / "axe.min.js").read_text(encoding="utf-8")
    script = (
        f"const source = {json.dumps(axe)}, pages = {json.dumps(PAGES)}, results = [];"
        """
        for (const page of pages) {
          for (const [width, theme] of [[1280, "light"], [390, "dark"]]) {
            const view = await open(`${page}.html?q=mask`, width);
            await until(() => page !== "search" || view.document.querySelector("#search-results li"));
            view.document.body.dataset.theme = theme;
            view.eval(source);
            const tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"];
            const {violations, passes} = await view.axe.run({runOnly: tags});
            const fault = (rule) => rule.nodes.map((node) => `${rule.id}: ${node.target} ${node.html}`);
            const faults = violations.flatMap(fault);
            results.push([page, width, passes.length, faults]);
          }
        }
        return results;
        """
    )
    results = evaluate(site, script.replace("</script", "<\\/script"), tmp_path)
    assert all(passes > 10 for _, _, passes, _ in results)
    assert [(page, width, fault) for page, width, _, faults in results for fault in faults] == []


def test_no_page_is_wider_than_a_phone(site: Path, tmp_path: Path) -> None:
    """The handwritten pages, and a tenth of the pages of models, kinds, commands, names and files.

    On phones, the content would scroll, and not the page. Tables and code scroll alone.
    """
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    handwritten = [page for page in pages if page.startswith("docs/")]
    chosen = handwritten + [page for page in pages if page not in handwritten][::10]
    assert len(handwritten) > 60
    script = (
        f"const pages = {json.dumps(chosen)}, wide = [];"
        """
        for (const page of pages) {
          const {document} = await open(page, 390);
          for (const element of document.querySelectorAll("html, .content"))
            if (element.scrollWidth > element.clientWidth) wide.push([page, element.scrollWidth, element.clientWidth]);
        }
        return wide;
        """
    )
    assert evaluate(site, script, tmp_path) == []


def test_the_first_result_answers_the_question(site: Path, tmp_path: Path) -> None:
    script = (
        f"const queries = {json.dumps(list(SEARCHES))}, results = {{}};"
        """
        for (const query of queries) {
          const view = await open(`search.html?q=${encodeURIComponent(query)}`, 1280);
          const links = () => view.document.querySelectorAll("#search-results ul.search li a");
          await until(() => links().length > 0);
          results[query] = [...links()].slice(0, 3).map((link) => new URL(link.href).pathname.slice(1));
        }
        return results;
        """
    )
    results: dict[str, list[str]] = evaluate(site, script, tmp_path)
    misses = {query: results[query] for query, page in SEARCHES.items() if results[query][0] != f"{page}.html"}
    assert misses == {}


def test_a_console_block_is_copied_without_prompts(site: Path, tmp_path: Path) -> None:
    script = """
        const view = await open("docs/first.html", 1280), copies = [];
        Object.defineProperty(view.navigator, "clipboard", {value: {writeText: async (text) => copies.push(text)}});
        const blocks = [".highlight-console", ".highlight-yaml"].map((name) => view.document.querySelector(name));
        for (const block of blocks) block.querySelector("button").click();
        return copies;
        """
    console, yaml = evaluate(site, script, tmp_path)
    assert console == "tfkit new plugin angle --slot attention\nexport TFKIT_PLUGIN_DIR=$PWD/tfkit-angle"
    assert yaml.startswith("tfkit: 1\nname: first\n")


def test_the_model_of_the_first_screen_changes_under_the_pointer(site: Path, tmp_path: Path) -> None:
    script = """
        const view = await open("index.html", 1280), states = [];
        const model = view.document.getElementById("model"), image = model.querySelector("img");
        const [norm, attention] = model.querySelectorAll("button");
        const send = (line, type) => line.dispatchEvent(new view.PointerEvent(type, {pointerType: "mouse"}));
        const record = async () => {
          await until(() => image.complete && image.naturalWidth > 0);
          states.push([image.src.split("/").pop(), attention.textContent, image.alt]);
        };
        await record();
        send(attention, "pointerenter");
        await record();
        send(attention, "pointerleave");
        await record();
        norm.click();
        attention.click();
        await record();
        return states;
        """
    states: list[Any] = evaluate(site, script, tmp_path)
    assert [name for name, _, _ in states] == ["0000.svg", "0100.svg", "0000.svg", "1100.svg"]
    assert [line.split("kind: ")[1][:3] for _, line, _ in states] == ["mha", "gqa", "mha", "gqa"]
    assert all("my_model" in text for _, _, text in states)
    assert "LayerNorm" in states[0][2]
    assert "RMSNorm" in states[3][2]
