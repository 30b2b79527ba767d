"""Settings of Sphinx for the site."""

import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

HERE = Path(__file__).parent

project = "tfkit"
author = "the tfkit authors"
release = metadata.version("tfkit")
html_title = f"tfkit {release}"
html_theme = "furo"
html_static_path = [str(HERE / "static")]
html_css_files = ["site.css"]
html_extra_path = [str(HERE.parents[1] / "out" / "docs" / "extra")]
html_copy_source = False
html_show_sphinx = html_show_copyright = False
extensions = ["myst_parser"]
myst_enable_extensions = ["html_image"]
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]  # a spec with `...` in it is shown as text
toc_object_entries = False

SHARED: dict[str, Any] = {}
"""The sidebar of pages that it does not list, by their folder."""


def setup(app: Sphinx) -> None:
    """Connect the hooks of the site."""
    app.connect("html-page-context", share_sidebar, priority=400)


def share_sidebar(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Compute the sidebar once for all pages of a folder that it does not list: it takes half of the time of a page."""
    if "orphan" in app.env.metadata.get(page, {}):
        context["toctree"] = shared(os.path.dirname(page), context["toctree"])


def shared(folder: str, build: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that builds the sidebar of a folder, or returns the sidebar that was built before."""
    return lambda **options: SHARED[folder] if folder in SHARED else SHARED.setdefault(folder, build(**options))
