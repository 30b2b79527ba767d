"""From a file's name to a checked spec: find it, read it, apply `extends` and `--set`, resolve it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfkit.errors import Diagnostic, Span, SpecError, closest, quoted
from tfkit.plugin.discover import canonical
from tfkit.plugin.manager import Plugins
from tfkit.spec import source
from tfkit.spec.document import ModelSpec
from tfkit.spec.merge import assign, merge
from tfkit.spec.provenance import Provenance
from tfkit.spec.resolve import Resolver
from tfkit.spec.scope import Given
from tfkit.spec.tree import Mapping, Node, Scalar
from tfkit.spec.tree import Sequence as ListNode

Read = Callable[..., Mapping]

MAX_EXTENDS = 16
SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class Spec:
    """A spec that has been read: the resolved model, and where each of its values came from."""

    model: ModelSpec
    provenance: Provenance
    file: str


def specs_folder() -> Path:
    """The folder of the specs that come with tfkit: inside the package, or beside it in a checkout."""
    package = Path(__file__).parent.parent
    shipped = package / "_specs"
    return shipped if shipped.is_dir() else package.parent / "specs"


def shipped_specs() -> list[str]:
    """The bare names of the specs that come with tfkit."""
    return sorted(path.stem for path in specs_folder().glob("*.yaml"))


def find_spec(name: str | os.PathLike[str], *, beside: Path | None = None, span: Span | None = None) -> Path:
    """The file of a spec, by its path or by the bare name of one that comes with tfkit.

    Relative paths start from the folder `beside`. Raises SpecError when there is no such file.
    """
    text = os.fspath(name)
    path = (beside or Path()) / text
    if text.endswith(SUFFIXES) or os.sep in text:
        if os.path.exists(path) or span is None:
            return path
        near = closest(path.stem, [one.stem for one in path.parent.glob("*") if one.suffix in SUFFIXES])
        help = f"a spec with a similar name is there: `{near}`" if near else "paths start from the spec's own folder"
        raise SpecError(Diagnostic(f"there is no file {quoted(text)}", span, "extends", help=help))
    shipped = specs_folder() / f"{text}.yaml"
    if os.path.isfile(shipped):
        return shipped
    near = closest(text, shipped_specs())
    raise SpecError(
        Diagnostic(
            f"there is no spec named {quoted(text)}",
            span,
            "extends" if span else "",
            help=f"a spec with a similar name exists: `{near}`" if near else "give the path of a file: ./my_model.yaml",
        )
    )


def read_spec(name: str | os.PathLike[str], plugins: Plugins, *, sets: Iterable[str] = ()) -> Spec:
    """Read and resolve the spec of that path or bare name, changed by `sets` (`path=value`).

    Raises SpecError with everything that is wrong with it.
    """
    return resolve_spec(read_tree(name), plugins, sets=sets, file=_shown(find_spec(name)))


def read_tree(name: str | os.PathLike[str], *, read: Read = source.read) -> Mapping:
    """The tree of the spec of that path or bare name, `extends` applied and nothing resolved; raises SpecError.

    `read` reads one file: who reads many specs hands in one that remembers.
    """
    return _extended(find_spec(name), (), read)


def parse_spec(text: str, plugins: Plugins, *, sets: Iterable[str] = (), name: str = "<spec>") -> Spec:
    """The same for a spec's text."""
    root = source.parse(text, name)
    return resolve_spec(_with_base(root, Path(), ()), plugins, sets=sets, file=name)


def without_idle(root: Mapping, plugins: Plugins) -> Mapping:
    """A tree without the values at its top that no part of the model takes."""
    shared = plugins.registry.shared_names()
    scope: dict[str, Given] = {}
    scope |= {name: Given(node, (name,), scope) for name, node in root.items.items() if name in shared}
    resolver = Resolver(plugins)
    resolver.config(ModelSpec, _inputs_as_mapping(_without(root, scope))[0], (), scope)
    return root if resolver.diagnostics else _without(root, [n for n in scope if (n,) not in resolver.used])


def resolve_spec(root: Mapping, plugins: Plugins, *, sets: Iterable[str] = (), file: str) -> Spec:
    """Resolve a tree whose `extends` has been applied."""
    _check_required(root, plugins)
    shared = plugins.registry.shared_names()
    changes = list(sets)
    root, errors = _changed(
        _without(root, {"parameters"} if changes else ()), changes, frozenset(ModelSpec.model_fields) | shared
    )
    scope: dict[str, Given] = {}
    scope |= {name: Given(node, (name,), scope) for name, node in root.items.items() if name in shared}
    own, wrong = _inputs_as_mapping(_without(root, scope))
    resolver = Resolver(plugins)
    resolver.provenance.spans |= {(name,): given.node.span for name, given in scope.items()}
    model = resolver.config(ModelSpec, own, (), scope)
    errors += [*wrong, *resolver.diagnostics]
    for name in [] if errors else [name for name in scope if (name,) not in resolver.used]:
        message = f"`{name}` has no effect: no part of the model takes it"
        errors.append(Diagnostic(message, root.keys[name], name, help="remove it"))
    if errors:
        raise SpecError(*errors)
    return Spec(model, resolver.provenance, file)


def _check_required(root: Mapping, plugins: Plugins) -> None:
    """Raise SpecError where a spec names plugins that are not loaded: what they bring would all be unknown."""
    wanted = root.items.get("requires")
    there = {canonical(plugin.name) for plugin in plugins.loaded}
    errors = []
    for item in wanted.items if isinstance(wanted, ListNode) else ():
        if isinstance(item, Scalar) and isinstance(item.value, str) and canonical(item.value) not in there:
            message = f"the spec needs the plugin {quoted(item.value)}, which is not loaded"
            help = "install it with pip, by its name or from its folder, or load it with `--plugin-dir`"
            errors.append(Diagnostic(message, item.span, "requires", help=help))
    if errors:
        raise SpecError(*errors)


def _changed(root: Mapping, sets: Iterable[str], fields: frozenset[str]) -> tuple[Mapping, list[Diagnostic]]:
    """`root` changed by all `--set` arguments that can be applied, and what is wrong with the others."""
    errors: list[Diagnostic] = []
    for argument in sets:
        try:
            root = assign(root, argument, fields)
        except SpecError as wrong:
            errors += wrong.diagnostics
    return root, errors


def _without(root: Mapping, names: Collection[str]) -> Mapping:
    items = {name: node for name, node in root.items.items() if name not in names}
    return Mapping(items, {name: root.keys[name] for name in items}, root.span)


def _inputs_as_mapping(root: Mapping) -> tuple[Mapping, list[Diagnostic]]:
    """`inputs: [source, target]` is short for two inputs of tokens."""
    inputs = root.items.get("inputs")
    if not isinstance(inputs, ListNode):
        return root, []
    items: dict[str, Node] = {}
    spans: dict[str, Span] = {}
    errors = []
    for item in inputs.items:
        if not isinstance(item, Scalar) or not isinstance(item.value, str):
            help = "write `inputs: [source, target]`, or a mapping of names to types"
            errors.append(Diagnostic("an input in a list is a name", item.span, "inputs", help=help))
        elif item.value in items:
            errors.append(Diagnostic(f"input {quoted(item.value)} stands in the list twice", item.span, "inputs"))
        else:
            items[item.value] = Scalar("tokens", item.span)
            spans[item.value] = item.span
    return Mapping({**root.items, "inputs": Mapping(items, spans, inputs.span)}, root.keys, root.span), errors


def _extended(path: Path, chain: Sequence[Path], read: Read) -> Mapping:
    return _with_base(read(path, name=_shown(path)), path.parent, (*chain, _real(path)), read)


def _with_base(root: Mapping, folder: Path, chain: Sequence[Path], read: Read = source.read) -> Mapping:
    """`root` merged over the spec that it extends, if it does."""
    word = root.items.get("extends")
    if word is None:
        return root
    if not isinstance(word, Scalar) or not isinstance(word.value, str):
        help = "write `extends: gpt2`, or a path: `extends: ./my_model.yaml`"
        raise SpecError(Diagnostic("`extends` takes the name or path of one spec", word.span, "extends", help=help))
    path = find_spec(word.value, beside=folder, span=word.span)
    if _real(path) in chain:
        names = [_shown(one) for one in (*chain[chain.index(_real(path)) :], _real(path))]
        notes = (f"by way of {' -> '.join(names)}",) if len(names) > 2 else ()
        raise SpecError(Diagnostic("a spec cannot extend itself", word.span, "extends", notes))
    if len(chain) >= MAX_EXTENDS:
        raise SpecError(Diagnostic(f"a chain of more than {MAX_EXTENDS} specs", word.span, "extends"))
    base = _extended(path, chain, read)
    return merge(_without(base, {"parameters"}), _without(root, {"extends"}))


def _shown(path: Path) -> str:
    """A path as errors show it: relative where the file lies below the current folder."""
    try:
        return str(_real(path).relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _real(path: Path) -> Path:
    """Where a path leads; unlike `Path.resolve`, of a loop of links and of a name that is too long as well."""
    return Path(os.path.realpath(path))
