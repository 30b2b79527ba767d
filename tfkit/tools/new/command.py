"""Write the project of a new plugin: a component, a spec, tests."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from keyword import iskeyword
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tfkit.console.commands import Reader, command
from tfkit.console.completion import complete_type
from tfkit.console.options import output_option
from tfkit.errors import Diagnostic, SpecError, printable_text, quoted
from tfkit.plugin.discover import normalized_name
from tfkit.tools.common.atomic_files import names_in, written_folder

if TYPE_CHECKING:
    from tfkit.graph.documents import DocumentType
    from tfkit.plugin.manager import Plugins


def complete_new(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return `plugin` and the types of document that begin with `incomplete`."""
    return [*(["plugin"] if "plugin".startswith(incomplete) else []), *complete_type(context, parameter, incomplete)]


@command(
    "new",
    section="The language",
    order=640,
    sets=False,
    notes="""
    The plugin works immediately: its FFN, attention, mixer, mask rule or
    residual is a kind NAME, its spec is NAME_tiny, and its tests prove what
    tfkit guarantees for a component. Its README describes what to change first,
    and where `make test` gets tfkit from. `tfkit new run SPEC` writes a commented
    run file for a model, which trains as it is on data that comes with tfkit.
    Plugins add further types of document.
    """,
    examples="""
    tfkit new plugin shift
    cd tfkit-shift && make test
    tfkit new plugin token_shift -o ~/token-shift
    tfkit new plugin angle --slot attention
    tfkit new plugin smooth --slot mixer
    tfkit new run gpt2 -o my_run.yaml && tfkit train my_run.yaml --plan
    """,
)
@click.argument("what", metavar="{plugin|TYPE}", shell_complete=complete_new)
@click.argument("name", metavar="NAME|SPEC")
@click.option(
    "--slot",
    type=click.Choice(["ffn", "attention", "mixer", "mask_rule", "residual"]),
    metavar="SLOT",
    help="The slot that the plugin fills: ffn, attention, mixer, mask_rule or residual.  [default: ffn]",
)
@output_option("PATH", "The folder or file to write.  [default: tfkit-NAME, TYPE.yaml]")
def new(reader: Reader, what: str, name: str, slot: str | None, output: Path | None) -> None:
    if what in SLOTS:
        words = shlex.join(["tfkit", "new", "plugin", name, "--slot", what])
        raise SpecError(Diagnostic(f"{quoted(what)} is a slot", help=f"write a plugin for it: `{words}`"))
    if what != "plugin":
        document = reader.type_named(what, "plugin")
        if slot is not None:
            raise click.UsageError(f"--slot cannot be combined with `new {what}`")
        _new_document(reader, document, name, output or Path(f"{what}.yaml"))
        return
    names = checked_names(name, reader.loaded, slot or "ffn")
    folder = output or Path(names.distribution)
    files = write_plugin(names, folder)
    click.echo(f"wrote {printable_text(str(folder))}: {len(files)} files; next: make test, in it")


def _new_document(reader: Reader, document: DocumentType, spec: str, file: Path) -> None:
    """Write a document for a spec. Raise SpecError if the file exists, or if the type has no template."""
    from tfkit.tools.common.atomic_files import write_file

    if os.path.exists(file):
        raise SpecError(Diagnostic(f"{quoted(str(file))} exists already", help="name a new file: -o FILE"))
    text = document.template(spec, file.absolute().parent, reader.plugins)
    if text is None:
        raise SpecError(
            Diagnostic(f"the type of document `{document.name}` has no template", help="write the file by hand")
        )
    write_file(file, text)
    command = shlex.join(["tfkit", document.config.command, str(file), *reader.plugin_options])
    click.echo(f"wrote {printable_text(str(file))}; next: {printable_text(command)}")


# ---- the project of a new plugin: the files in `template/`, a plugin that works, under another name ----


TEMPLATE = Path(__file__).parent / "template"
SLOTS = {
    "ffn": {
        "@KIND@": "FFN",
        "@ABOUT@": "maxout (https://arxiv.org/abs/1302.4389)",
        "@FIELD@": "n_pieces: int > 0, default 2",
    },
    "attention": {
        "@KIND@": "attention",
        "@ABOUT@": "cosines of queries and keys (https://arxiv.org/abs/2010.04245)",
        "@FIELD@": "start: float > 0, default 10.0",
    },
    "mixer": {
        "@KIND@": "mixer",
        "@ABOUT@": "a short convolution between two gates (https://arxiv.org/abs/2511.23404)",
        "@FIELD@": "size: int > 0, default 3",
    },
    "mask_rule": {
        "@KIND@": "mask rule",
        "@ABOUT@": "a dilated window (https://arxiv.org/abs/2004.05150)",
        "@FIELD@": "step: int > 0, default 2",
    },
    "residual": {
        "@KIND@": "residual",
        "@ABOUT@": "several streams with learned weights (https://arxiv.org/abs/2409.19606)",
        "@FIELD@": "streams: int > 0, default 2",
    },
}
"""The slots that a new plugin can fill, with the texts of its README; `template/slots` has the files that differ."""
CACHES = re.compile(r"\..*|__pycache__")
WORDS = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
MAX_NAME = 24
NOT_IN_YAML = ("null", "true", "false")


@dataclass(frozen=True)
class PluginNames:
    """The names that follow from the name of a plugin, `token_shift`."""

    word: str
    slot: str = "ffn"
    """The slot of its component."""

    @property
    def distribution(self) -> str:
        """`tfkit-token-shift`."""
        return f"tfkit-{self.word.replace('_', '-')}"

    @property
    def camel(self) -> str:
        """`TokenShift`, with which the names of classes begin."""
        return "".join(word.capitalize() for word in self.word.split("_"))

    def rendered(self, text: str) -> str:
        """Fill in a text of the template, or a file name, for this plugin."""
        for name, words in {"@SLOT@": self.slot, **SLOTS[self.slot]}.items():
            text = text.replace(name, words)
        text = text.replace("tfkit-template", self.distribution).replace("@TFKIT@", _for_make(installed_from()))
        return text.replace("Template", self.camel).replace("template", self.word)


def checked_names(name: str, plugins: Plugins, slot: str = "ffn") -> PluginNames:
    """Derive the names of a plugin; raise SpecError if `name` is not lower-case words, or is taken."""
    names = PluginNames(name.replace("-", "_"), slot)
    if not WORDS.fullmatch(name) or len(name) > MAX_NAME:
        message = f"{quoted(name)} is not a name for a plugin"
        raise SpecError(Diagnostic(message, help=f"use lower-case words, up to {MAX_NAME} characters: token_shift"))
    taken = _name_conflict(names, plugins)
    if taken is not None:
        raise SpecError(Diagnostic(f"the name {quoted(name)} is taken: {taken}"))
    return names


def _name_conflict(names: PluginNames, plugins: Plugins) -> str | None:
    """Describe the existing user of a name; None if the name is free."""
    if iskeyword(names.word) or names.word in NOT_IN_YAML:
        return "it is a word of Python's or YAML's"
    if names.word in sys.stdlib_module_names:
        return "it is a module of Python's library"
    plugin_names = [
        *(plugin.name for plugin in plugins.loaded),
        *(plugin.name for plugin in plugins.broken),
        *plugins.disabled,
    ]
    names_in_use = {normalized_name(name): name for name in plugin_names}
    if names.distribution in names_in_use:
        return f"there is a plugin {names_in_use[names.distribution]}"
    kind, spec = plugins.registry.find(names.slot, names.word), plugins.specs.files.get(f"{names.word}_tiny")
    if spec is not None:
        return f"there is a spec {spec.path.stem}, {spec.plugin}"
    article = "an" if names.slot in ("ffn", "attention") else "a"
    return None if kind is None else f"it is {article} {names.slot} kind, {kind.plugin}"


def write_plugin(names: PluginNames, folder: Path) -> list[Path]:
    """Write the project to a folder, completely or not at all. Return the relative paths of its files.

    Raises:
        SpecError: the folder cannot be written, is not empty, or is the current folder.
    """
    if names_in(folder):
        raise SpecError(Diagnostic(f"{quoted(str(folder))} is not empty", help="name a new folder: -o DIR"))
    if os.path.exists(folder) and folder.samefile(Path()):
        raise SpecError(Diagnostic("the current folder cannot be replaced", help="name a new folder: -o DIR"))
    files = dict(_project_files(names))
    with written_folder(folder) as new:
        for path, text in files.items():
            (new / path).parent.mkdir(parents=True, exist_ok=True)
            (new / path).write_text(text, encoding="utf-8")
    return sorted(files)


def _project_files(names: PluginNames) -> Iterator[tuple[Path, str]]:
    """Yield the files of the project. In the template, hidden files begin with `dot-`; caches are skipped.

    The files of a slot's template come last, because they replace files of the same name.
    """
    for template in (TEMPLATE, TEMPLATE / "slots" / names.slot):
        for path in template.rglob("*"):
            parts = path.relative_to(template).parts
            if path.is_file() and parts[0] != "slots" and not any(map(CACHES.fullmatch, parts)):
                location = Path(*(re.sub("^dot-", ".", names.rendered(part)) for part in parts))
                yield location, names.rendered(path.read_text(encoding="utf-8"))


def installed_from() -> str:
    """Return the argument with which pip installs this tfkit elsewhere: a folder, a URL, or a requirement."""
    try:
        tfkit = distribution("tfkit")
    except PackageNotFoundError:
        return str(Path(__file__).parents[3])
    recorded = tfkit.read_text("direct_url.json")  # https://packaging.python.org/en/latest/specifications/direct-url/
    if recorded is None:
        return f"tfkit>={tfkit.version}"
    origin = json.loads(recorded)
    if "vcs_info" in origin:
        return f"{origin['vcs_info']['vcs']}+{origin['url']}@{origin['vcs_info']['commit_id']}"
    from urllib.parse import urlsplit
    from urllib.request import url2pathname  # this import loads network clients

    url = urlsplit(origin["url"])
    return url2pathname(url.path) if url.scheme == "file" else origin["url"]


def _for_make(text: str) -> str:
    """Escape a text for a make variable."""
    return text.replace("$", "$$").replace("#", r"\#")
