"""The handwritten pages, with links that work in the site, and the files to which they link."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path

from tools.docs.page import ORPHAN, ROOT, Page, code, link, search_entries

DOCS = ROOT / "docs"
LANGUAGES = {".py": "python", ".pyi": "python", ".toml": "toml", ".yaml": "yaml", ".hpp": "cpp", ".cpp": "cpp"}
PROJECT = ("stability.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")
FURTHER = (
    *PROJECT,
    "README.md",
    "specs/README.md",
    "tfkit/README.md",
    "tools/bench/README.md",
    "docs/pictures/README.md",
    *(path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("plugins/*/README.md"))),
)
"""Pages that are neither in docs/ nor in its index."""
LONGEST_LISTING = 30
"""Maximum number of files for which the page of a folder shows the contents; above it, only the names."""

_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))|(?<=<img src=\")([^\"]+)(?=\")")
_FILE_NAME = re.compile(r"\[[\w./-]+\.md\](\([^)]*\))")
_ADDRESS = re.compile(r"(`[^`]*`|<[\w/!][^>]*>|\]\([^)]*\))|(https://[^\s,;:)]*[^\s,;:).])")
_SEARCH = re.compile(r"^<!-- search: (.*) -->$", re.MULTILINE)
_ROW = re.compile(r"^\| [^|]* \| (.*) \|$", re.MULTILINE)


def sections() -> dict[str, list[str]]:
    """Return the sections of docs/README.md, which address different readers, each with its pages in order."""
    text = (DOCS / "README.md").read_text(encoding="utf-8")
    paths = {}
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        rows = [target for row in _ROW.findall(body) for target in re.findall(r"\]\(([^)#]+)\)", row)]
        locations = [Path(os.path.normpath(DOCS / target)) for target in rows]
        paths[title] = [_path(location / "README.md" if location.is_dir() else location) for location in locations]
    files = written()
    return {title: list(dict.fromkeys(page for page in pages if page in files)) for title, pages in paths.items()}


def _path(file: Path) -> str:
    return file.relative_to(ROOT).with_suffix("").as_posix()


def written() -> dict[str, Path]:
    """Return the files of the handwritten pages, by their paths in the site."""
    files = [path for path in sorted(DOCS.glob("*.md")) if path.name != "README.md"]
    files += [ROOT / name for name in FURTHER if (ROOT / name).exists()]
    return {_path(file): file for file in files}


def pages(generated: Mapping[str, str]) -> Iterator[Page]:
    """Yield the handwritten pages, and a page for each file and folder to which they link.

    `generated` contains the generated pages by the file that they show, such as `specs/gpt2.yaml`. Links to such a file
    become links to its page.
    """
    listed = {path for paths in sections().values() for path in paths}
    in_guide: set[Path] = set()
    for path, file in written().items():
        text = Links(file, generated).rewrite(file.read_text(encoding="utf-8"))
        head = "" if path in listed or file.name in PROJECT else ORPHAN
        yield Page(path, partial(str, head + text))
        in_guide |= Links(file, generated).files()
    for location in sorted(in_guide):
        yield Page(code_path(location), partial(source_page, location))


class Links:
    """Converts the links of a page from files of the repository to pages of the site."""

    def __init__(self, file: Path, generated: Mapping[str, str]) -> None:
        self.folder = file.parent
        self.text = file.read_text(encoding="utf-8")
        self.generated = generated

    def rewrite(self, text: str) -> str:
        """Return the text with converted links, linked addresses and search words. Blocks of code do not change."""
        parts = _FENCE.split(text)
        return "".join(part if index % 2 else self._rewrite(part) for index, part in enumerate(parts))

    def _rewrite(self, text: str) -> str:
        text = _SEARCH.sub(lambda match: search_entries(match[1].split(", ")), text)
        # Without a text, a link has the title of its page or section.
        text = _LINK.sub(self._target, _FILE_NAME.sub(r"*[]\1*", text))
        # Markdown links an address only between angle brackets.
        return _ADDRESS.sub(lambda match: match[1] or f"<{match[2]}>", text)

    def files(self) -> set[Path]:
        """Return the linked files and folders that have no page yet."""
        text = "".join(_FENCE.split(self.text)[::2])
        targets = [match[0] for match in _LINK.finditer(text)]
        locations = {location for target in targets if (location := self._file_of(target)) is not None}
        return {location for location in locations if not _is_asset(location) and self._page(location) is None}

    def _target(self, match: re.Match[str]) -> str:
        target, location = match[0], self._file_of(match[0])
        if location is None:
            return target
        anchor = f"#{target.partition('#')[2]}" if "#" in target else ""
        if _is_asset(location):
            return f"/{location.relative_to(ROOT).as_posix()}"
        return f"/{self._page(location) or code_path(location)}.md{anchor}"

    def _file_of(self, target: str) -> Path | None:
        """Return the file of a link; None for a URL and for a link within the page."""
        if re.match(r"[a-z]+:|#", target):
            return None
        return Path(os.path.normpath(self.folder / target.partition("#")[0]))

    def _page(self, path: Path) -> str | None:
        name = path.relative_to(ROOT).as_posix()
        if name in self.generated:
            return self.generated[name]
        file = path / "README.md" if path.is_dir() else path
        return "index" if file == DOCS / "README.md" else next((p for p, f in pages_by_file() if f == file), None)


@cache
def pages_by_file() -> tuple[tuple[str, Path], ...]:
    """Return the handwritten pages: pairs of a path in the site and a file."""
    return tuple(written().items())


def _is_asset(path: Path) -> bool:
    """Return True for files that the site contains unchanged: pictures, and notebooks to download."""
    return path.suffix in (".svg", ".png", ".ipynb")


def code_path(path: Path) -> str:
    """Return the path of the page that shows a file or a folder."""
    name = path.relative_to(ROOT).as_posix()
    return f"code/{name}".replace(".", "_") if path.is_file() else f"code/{name}/index"


def source_page(location: Path) -> str:
    """Return the page of a file with its text, or of a folder with the names or the texts of its files."""
    name = location.relative_to(ROOT).as_posix()
    if location.is_file():
        return f"{ORPHAN}# {name}\n\n{_source(location)}"
    listed = (path for path in sorted(location.rglob("*")) if path.is_file() and not _is_asset(path))
    files = [path for path in listed if "__pycache__" not in path.parts]
    names = [path.relative_to(location).as_posix() for path in files]
    if len(files) > LONGEST_LISTING:
        folders = sorted({path.relative_to(location).parts[0] for path in files})
        return f"{ORPHAN}# {name}\n\n" + "\n".join(f"- `{entry}`" for entry in folders) + "\n"
    parts = [f"## {title}\n\n{_source(file)}" for title, file in zip(names, files, strict=True)]
    return f"{ORPHAN}# {name}\n\n" + "\n".join(parts)


def _source(file: Path) -> str:
    return code(file.read_text(encoding="utf-8"), LANGUAGES.get(file.suffix, "text"))


def source_link(file: Path) -> str:
    """Return a link to the page of a file."""
    return link(file.relative_to(ROOT).as_posix(), code_path(file))
