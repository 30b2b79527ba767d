"""The models that come with tfkit and its plugins: a page for each model, and a gallery to sort and compare them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from html import escape
from pathlib import Path

from tfkit.component import Component
from tfkit.graph.expand import Graph, load
from tfkit.spec.source import plain_data, read
from tfkit.tools.common.memory_needs import cache_size
from tfkit.tools.common.units import bytes_text, count_text
from tfkit.tools.draw.picture import draw
from tfkit.tools.draw.svg import to_svg
from tfkit.tools.list_.gallery import PublishedFolder, Shipped, published_folders, shipped_specs
from tfkit.tools.show.differences import spec_differences
from tools.docs.page import ORPHAN, Page, code, joined, link, plugins, prose, search_entries, table

PICTURES = "pictures"
"""The folder of the site with a picture of each model."""
MECHANISMS = ("attention", "mixer", "ffn", "position", "residual")
"""Slots whose kinds characterize the mechanism of a model."""
MAX_RELATIVES = 12
"""Maximum number of models of the same family on a page."""
MAX_CHANGES = 60
"""Maximum number of differences from the parent on a page."""


@dataclass(frozen=True)
class Model:
    """A model of the gallery. `parent` is the model that its spec extends."""

    shipped: Shipped
    graph: Graph
    file: Path
    parent: str | None

    @property
    def year(self) -> str:
        """The year of its source, if the URL contains it; else empty."""
        match = re.search(r"arxiv\.org/abs/(\d\d)\d\d\.", self.shipped.source or "")
        return f"20{match[1]}" if match else ""

    @property
    def kinds(self) -> list[tuple[str, str]]:
        """The slots and kinds of its components, without duplicates."""
        components = [config for _, config in self.graph.configs(Component)]
        return list(dict.fromkeys((config.slot, config.kind_name()) for config in components))

    @property
    def mechanisms(self) -> list[str]:
        """The kinds that characterize its mechanism."""
        return [kind for slot in MECHANISMS for owner, kind in self.kinds if owner == slot]


def path_of(name: str) -> str:
    """Return the path of a model's page."""
    return f"models/{name}"


def pages() -> Iterator[Page]:
    """Yield the gallery, and the page of each model."""
    yield Page("models/index", _gallery)
    for name in plugins().specs.files:
        yield Page(path_of(name), partial(_page, name))


@cache
def models() -> dict[str, Model]:
    """Load all models, and return them by name."""
    entries = {}
    for spec in shipped_specs():
        file = Path(plugins().specs.files[spec.name].path)
        parent = plain_data(read(file)).get("extends")
        parent = parent if parent in plugins().specs.files else None
        entries[spec.name] = Model(spec, load(spec.name, plugins=plugins()), file, parent)
    return entries


@cache
def users() -> dict[tuple[str, str], list[str]]:
    """Return the names of the models that use each kind."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, model in models().items():
        for slot, kind in model.kinds:
            names.setdefault((slot, kind), []).append(name)
    return names


@cache
def weights() -> dict[str, PublishedFolder]:
    """Return the folder of each model's weights, if it is known."""
    return {entry.spec: entry for entry in published_folders(shipped_specs()) if entry.folder is not None}


@cache
def families() -> dict[str, list[str]]:
    """Return the names of the models of each family."""
    names: dict[str, list[str]] = {}
    for spec in shipped_specs():
        if spec.model_type:
            names.setdefault(spec.model_type, []).append(spec.name)
    return names


def picture(model: Model) -> str:
    """Return the picture of a model as SVG."""
    return to_svg(draw(model.graph))


def _page(name: str) -> str:
    model = models()[name]
    spec = model.shipped
    return joined(
        [
            f"{ORPHAN}# {name}",
            search_entries([name]),
            prose(spec.description or ""),
            table(["", ""], _facts(model)),
            f'<figure class="model"><img src="../{PICTURES}/{name}.svg" alt="The layers of {name}"></figure>',
            *_changes(model),
            "## The spec",
            code(model.file.read_text(encoding="utf-8"), "yaml"),
            "## Commands",
            code("\n".join(_commands(spec)), "sh"),
        ]
    )


def _commands(spec: Shipped) -> Iterator[str]:
    if spec.name in weights():
        yield f"hf download {weights()[spec.name].folder} --local-dir FOLDER"
    if spec.model_type:
        yield f"tfkit build {spec.name} --weights FOLDER      # load published weights from a downloaded folder"
    yield from (f"tfkit show {spec.name} --prose", f"tfkit draw {spec.name} -o {spec.name}.svg")
    yield f"tfkit build {spec.name} --device meta"


def _facts(model: Model) -> Iterator[tuple[str, str]]:
    spec = model.shipped
    if spec.parameters:
        yield "parameters", f"{spec.parameters:,}"
    cache = cache_size(model.graph)
    if cache is not None:
        states = f", {bytes_text(cache.states)} of states" if cache.states else ""
        yield f"cache in {cache.dtype}", f"{bytes_text(cache.per_token)} per token{states}"
    yield "type", spec.kind
    if spec.model_type:
        relatives = [name for name in families()[spec.model_type] if name != spec.name]
        links = [link(name, path_of(name)) for name in relatives[:MAX_RELATIVES]]
        more = f" and {len(relatives) - MAX_RELATIVES} more" if len(relatives) > MAX_RELATIVES else ""
        yield "family", f"`{spec.model_type}`" + (f", with {', '.join(links)}{more}" if links else "")
        if spec.name in weights():
            published = weights()[spec.name]
            proof = "its tensors were compared with the spec" if published.compared else "not compared with the spec"
            text = f"[{published.folder}](https://huggingface.co/{published.folder}), {proof}"
            yield "weights", f"{text}; their licence is on its page"
        else:
            yield "weights", link("how to load them", "docs/weights")
    if spec.source:
        yield "source", f"<{spec.source}>"
    if spec.requires:
        yield "plugins", ", ".join(f"`{name}`" for name in spec.requires)
    links = [link(kind, f"kinds/{slot}/{kind}") for slot, kind in model.kinds if slot in MECHANISMS]
    yield "mechanism", ", ".join(links)


def _changes(model: Model) -> Iterator[str]:
    """Yield the differences from the model that the spec extends."""
    if model.parent is None:
        return
    changes = spec_differences(models()[model.parent].graph, model.graph)
    yield f"## Differences from {link(model.parent, path_of(model.parent))}"
    rows = [(f"`{change.path}`", _value(change.before), _value(change.after)) for change in changes[:MAX_CHANGES]]
    yield table(["value", model.parent, model.shipped.name], rows) or "No value differs."
    yield f"And {len(changes) - MAX_CHANGES} more." if len(changes) > MAX_CHANGES else ""


def _value(text: str | None) -> str:
    return "-" if text is None else f"`{text}`"


GALLERY = """Every model that comes with tfkit and its plugins, as `tfkit draw` draws it. Choose two models to see them
side by side. `tfkit diff A B` lists their differences, and `tfkit draw A B -o two.svg` marks them. The year is the
year of the paper on arXiv.

<form class="gallery-tools" onsubmit="return false">
<label>Sort by <select id="gallery-sort">
<option value="name">name</option><option value="year">year</option><option value="size">size</option>
<option value="mechanism">mechanism</option></select></label>
<label>Only <input id="gallery-words" type="search" placeholder="mamba, 2024, encoder ..."></label>
<span id="gallery-count"></span>
</form>
<p id="gallery-note" role="status" hidden></p>
<dialog id="gallery-pair" aria-label="Two models side by side">
<form method="dialog"><code id="gallery-diff"></code><button>close</button></form>
<div class="pair"></div>
</dialog>
"""


def _gallery() -> str:
    cards = "\n".join(_card(model) for model in models().values())
    return (
        f'# Models\n\n{GALLERY}\n<div id="gallery">\n{cards}\n</div>\n\n<script src="../_static/gallery.js"></script>\n'
    )


def _card(model: Model) -> str:
    spec, mechanisms = model.shipped, " ".join(model.mechanisms)
    size = count_text(spec.parameters) if spec.parameters else ""
    words = " ".join(filter(None, (spec.name, spec.kind, spec.model_type, model.year, mechanisms, spec.description)))
    facts = " · ".join(filter(None, (size, model.year, mechanisms)))
    return (
        f'<figure data-name="{spec.name}" data-year="{model.year}" data-size="{spec.parameters or 0}" '
        f'data-mechanism="{mechanisms}" data-words="{escape(words.casefold())}">'
        f'<a href="{spec.name}.html" tabindex="-1" aria-hidden="true">'
        f'<img src="../{PICTURES}/{spec.name}.svg" alt="" loading="lazy"></a>'
        f'<figcaption><a href="{spec.name}.html">{spec.name}</a><small>{facts}</small>'
        f'<button type="button" data-pick="{spec.name}">compare</button></figcaption></figure>'
    )
