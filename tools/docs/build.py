"""Build the site: `python -m tools.docs.build`, or `make docs`. It needs no network.

The pages are written to out/docs/source, and Sphinx writes the site to out/docs/site. A warning, such as a link to a
page or a heading that does not exist, ends the build with status 1.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tfkit.tools.list_.gallery import shipped_documents
from tools.docs import commands, guide, home, kinds, models, names, runs
from tools.docs.page import ROOT, Page, hidden_index, joined, plugins

OUT = ROOT / "out" / "docs"
HOME = ROOT / "tools" / "docs" / "index.md"
ASSETS = ("docs/pictures", "docs/examples")
"""Folders with pictures and notebooks of pages."""
REFERENCE = ("commands/index", "kinds/index", "api/index", "models/index", "runs/index")


def main() -> int:
    """Write the pages and the pictures, run Sphinx, and return its exit status."""
    # All graphs and all pages stay in memory, and searching them for garbage takes long.
    gc.set_threshold(1_000_000, 50, 50)
    source, site = OUT / "source", OUT / "site"
    write_pages(all_pages(), source)
    for folder in ASSETS:
        shutil.copytree(
            ROOT / folder, source / folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.md", "*.py")
        )
    write_pictures(OUT / "extra" / models.PICTURES)
    for name, text in home.files():
        _write(OUT / "extra" / home.FOLDER / name, text)
    from sphinx.cmd.build import main as sphinx

    # Build all pages, because a new page changes the sidebars of unchanged pages.
    options = ["-a", "-W", "--keep-going", "-q", "-b", "html", "-d", str(OUT / "doctrees"), "-c", str(HOME.parent)]
    return int(sphinx([*options, str(source), str(site)]))


def all_pages() -> list[Page]:
    """Return all pages without duplicates: several parts of the site yield the page of the same file."""
    generated = [
        *commands.pages(),
        *kinds.pages(),
        *names.pages(),
        *models.pages(),
        *runs.pages(),
    ]
    pages = [Page("index", _home), *guide.pages(files_in_site()), *generated]
    return list({page.path: page for page in pages}.values())


def files_in_site() -> dict[str, str]:
    """Return the generated pages by the file of the repository that they show."""
    specs = {Path(spec.path): models.path_of(name) for name, spec in plugins().specs.files.items()}
    entries = {runs.file_of(entry): runs.path_of(entry.sort, entry.name) for entry in shipped_documents()}
    folders = {file.parent: "models/index" for file in specs}
    return {
        file.resolve().relative_to(ROOT).as_posix(): page
        for file, page in {**folders, **specs, **entries}.items()
        if file.resolve().is_relative_to(ROOT) and file != ROOT / "specs"
    }


def _home() -> str:
    parts = [HOME.read_text(encoding="utf-8").replace("<!-- model -->", home.figure())]
    parts += [hidden_index(paths, caption=title) for title, paths in guide.sections().items()]
    project = [Path(name).stem for name in guide.PROJECT if (ROOT / name).exists()]
    parts += [hidden_index(REFERENCE, caption="Reference"), hidden_index(project, caption="Project")]
    return joined(parts)


def write_pages(pages: Iterable[Page], folder: Path) -> None:
    """Write pages that have changed, and remove the files of pages that no longer exist."""
    files = {folder / f"{page.path}.md": page.write for page in pages}
    for file, text in files.items():
        _write(file, text())
    for file in set(folder.rglob("*.md")) - files.keys():
        file.unlink()


def write_pictures(folder: Path) -> None:
    """Draw each model whose picture is older than its spec or than the code that draws it."""
    newest = max(path.stat().st_mtime for path in _drawing())
    for name, model in models.models().items():
        file = folder / f"{name}.svg"
        if not file.exists() or file.stat().st_mtime < newest:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(models.picture(model), encoding="utf-8")


def _drawing() -> Iterator[Path]:
    """Yield the files on which a picture depends: all code and all specs."""
    yield from (ROOT / "tfkit").rglob("*.py")
    yield from ROOT.glob("plugins/*/src/**/*.py")
    yield from ROOT.glob("specs/*.yaml")
    yield from ROOT.glob("plugins/*/src/**/*.yaml")


def _write(file: Path, text: str) -> None:
    """Write a text unless the file already contains it, because Sphinx rereads every file that was written."""
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
