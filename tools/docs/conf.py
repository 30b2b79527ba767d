"""Settings of Sphinx for the site."""

import posixpath
import re
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from furo.navigation import get_navigation_tree
from sphinx import search
from sphinx.application import Sphinx
from sphinx.builders.latex.transforms import FootnoteDocnameUpdater
from sphinx.search.en import SearchEnglish
from sphinx.transforms.i18n import RemoveTranslatableInline, TranslationProgressTotaliser

HERE = Path(__file__).parent

project = "tfkit"
author = "the tfkit authors"
release = metadata.version("tfkit")
html_title = f"tfkit {release}"
html_theme = "furo"
html_static_path = [str(HERE / "static")]
html_css_files = ["site.css"]
html_js_files = [("copy.js", {"defer": "defer"})]
html_search_scorer = str(HERE / "static" / "scorer.js")
html_extra_path = [str(HERE.parents[1] / "out" / "docs" / "extra")]
html_copy_source = False
html_show_sphinx = html_show_copyright = False
extensions = ["myst_parser"]
myst_enable_extensions = ["html_image"]
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]  # a spec with `...` in it is shown as text
toc_object_entries = False
smartquotes = False  # keep the plain quotes of the repository

TREE: list[str] = []
"""The sidebar without a current page, once it is built; its links lead from the root of the site."""
SIDEBARS: dict[str, list[str]] = {}
"""The entries of the sidebar by the folder of the page: their links lead from that folder."""

_LINK = re.compile(r'(?<=<a class="reference internal" href=")[^"]+')
_CURRENT = re.compile(r'( class="current"| current\b|(?<=")current )')
_ENTRY = '<li class="toctree-l'


class CachedEnglish(SearchEnglish):
    """A stemmer of English that caches stems: a site of 800 pages has few distinct words."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self.stem = cache(super().stem)  # type: ignore[method-assign]


def setup(app: Sphinx) -> None:
    """Connect the hooks of the site; furo computes its sidebar between the two hooks of a page."""
    search.languages["en"] = CachedEnglish
    for transform in (TranslationProgressTotaliser, RemoveTranslatableInline, FootnoteDocnameUpdater):
        # For translations and LaTeX, which the site has not: each visits all nodes of all pages.
        app.registry.transforms.remove(transform)
    app.connect("html-page-context", defer_sidebar, priority=400)
    app.connect("html-page-context", share_sidebar, priority=600)


def defer_sidebar(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Hide the contents from furo, which takes half of the time of a page to show them."""
    context["contents"] = context.pop("toctree", None)


def share_sidebar(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Set the sidebar, built once for all pages."""
    if contents := context.pop("contents"):
        options = {"collapse": False, "titles_only": True, "maxdepth": -1, "includehidden": True}  # as furo does
        context["furo_navigation_tree"] = sidebar(page, lambda: str(contents(**options)))


def sidebar(page: str, build: Callable[[], str]) -> str:
    """Return the sidebar of a page; `build` returns the contents for the page, and is called for the first page."""
    folder, name = posixpath.split(page)
    if not TREE:
        html = (
            build()
            .replace('href="#"', f'href="{name}.html"')
            .replace('role="heading"', 'role="heading" aria-level="2"')
        )
        html = _CURRENT.sub("", html)
        TREE.append(
            get_navigation_tree(_LINK.sub(lambda link: posixpath.normpath(posixpath.join(folder, link[0])), html))
        )
    if folder not in SIDEBARS:
        html = _LINK.sub(lambda link: posixpath.relpath(link[0], folder or "."), TREE[0])
        SIDEBARS[folder] = html.split(_ENTRY)
    return _ENTRY.join(_marked(SIDEBARS[folder], f'href="{name}.html"'))


def _marked(entries: list[str], link: str) -> list[str]:
    """Return the entries of a sidebar; the entry with the link, and the entries that contain it, are current."""
    entries = entries.copy()
    page = next((number for number, entry in enumerate(entries) if link in entry), 0)
    level, suffix = int(entries[page][0]) if page else 0, " current-page"
    for number in range(page, 0, -1):
        if entries[number].startswith(f"{level}"):
            head, _, rest = entries[number].partition('">')
            rest = rest.replace(' class="toctree-checkbox"', ' checked="" class="toctree-checkbox"', 1)
            entries[number] = f'{level} current{head[1:]}{suffix}">{rest}'
            level, suffix = level - 1, ""
    return entries
