"""Settings of Sphinx for the site."""

import os
import re
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from sphinx import search
from sphinx.application import Sphinx
from sphinx.search.en import SearchEnglish

HERE = Path(__file__).parent

project = "tfkit"
author = "the tfkit authors"
release = metadata.version("tfkit")
html_title = f"tfkit {release}"
html_theme = "furo"
html_static_path = [str(HERE / "static")]
html_css_files = ["site.css"]
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

SIDEBARS: dict[str, str] = {}
"""Sidebars without a current page, by folder: relative links are equal for all pages of a folder."""


class CachedEnglish(SearchEnglish):
    """A stemmer of English that caches stems: a site of 800 pages has few distinct words."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self.stem = cache(super().stem)  # type: ignore[method-assign]


def setup(app: Sphinx) -> None:
    """Connect the hooks of the site."""
    search.languages["en"] = CachedEnglish
    app.connect("html-page-context", share_sidebar, priority=400)


def share_sidebar(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Compute the sidebar once for all pages of a folder, because it takes half of the build time of a page."""
    if "toctree" in context:
        build = context["toctree"]
        context["toctree"] = lambda **options: sidebar(page, lambda: str(build(**options)))


def sidebar(page: str, build: Callable[[], str]) -> str:
    """Return the sidebar of a page, derived from the cached sidebar of the folder."""
    folder, name = os.path.split(page)
    if folder not in SIDEBARS:
        html = build().replace('href="#"', f'href="{name}.html"')
        SIDEBARS[folder] = re.sub(r'( class="current"| current\b|(?<=")current )', "", html)
    html = SIDEBARS[folder]
    end = html.find(f'href="{name}.html"')
    if end < 0:
        return html
    level = int(html[html.rfind('<li class="toctree-l', 0, end) :].removeprefix('<li class="toctree-l')[0])
    for number in range(level, 0, -1):
        entry = f'<li class="toctree-l{number}'
        end = html.rfind(entry, 0, end)
        html = f"{html[:end]}{entry} current{html[end + len(entry) :]}"
    return html
