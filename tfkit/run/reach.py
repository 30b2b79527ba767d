"""The source code that a class depends on, as digests.

The unit is a statement at the top of a module: a class, a function, a constant. A class reaches the statements that
bind the names in it, then the names in those, and so on, through imports into other modules. Therefore an edit of a
helper module changes the digest of each kind that uses it, and a new kind in the same file changes no digest. When a
researcher adds the next variant to the file of the previous variant, the runs of the previous variant stay valid.

A digest covers the syntax tree without comments, docstrings and layout, so that a reformatted file is the same code. It
does not use `ast.dump`, whose text differs between versions of Python.

Imports are followed inside the package of the importing module, and into modules next to that package, which belong to
the same plugin. Installed libraries are not followed: the run folder records the versions that matter. Of tfkit,
the modules that compute the numbers of a run are followed. How tfkit reads a spec is not code of the run, since the
values that it read are compared themselves.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import TypeAlias

import tfkit
from tfkit.plugin.import_code import MODULE_PREFIX

PACKAGE = "tfkit"
COMPUTING = (
    "tfkit.component",
    "tfkit.components",
    "tfkit.nn",
    "tfkit.building.initialize",
    "tfkit.learning",
    "tfkit.run.contract",
    "tfkit.run.kinds",
    "tfkit.run.training",
)
"""The modules of tfkit that compute the numbers of a run."""
LIBRARIES = ("site-packages", "dist-packages")
Reference: TypeAlias = tuple[str, str | None]
"""A module and a name in it; None for all its names."""
_INERT_FIELDS = frozenset({"ctx", "kind", "type_comment"})
"""Fields of a syntax tree that have no effect."""
_DEFINITION = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_IMPORT = ast.Import | ast.ImportFrom
_REFERRING = frozenset({ast.Import, ast.ImportFrom, ast.Attribute})


@cache  # an edit of a module that has been imported does not run in this process
def digests_of_class(cls: type) -> Mapping[str, str]:
    """Return a digest for each module with statements that a class reaches."""
    enabled = gc.isenabled()
    gc.disable()  # a collection would search all objects of torch several times, which takes longer than the rest
    try:
        return _collect_digests(cls)
    finally:
        if enabled:
            gc.enable()


def _collect_digests(cls: type) -> Mapping[str, str]:
    pending: list[Reference] = [(cls.__module__, cls.__qualname__.partition(".")[0])]
    seen: set[Reference] = set()
    counted: dict[str, set[int]] = {}
    while pending:
        reference = pending.pop()
        if reference not in seen:
            seen.add(reference)
            pending += _references_of_name(*reference, counted)
    digests = ((module, _digest_of_statements(module, numbers)) for module, numbers in sorted(counted.items()))
    return {_displayed_name(module): digest for module, digest in digests if digest}


def _references_of_name(module: str, name: str | None, counted: dict[str, set[int]]) -> Iterator[Reference]:
    """Count the statements that a name of a module needs; yield the references in them."""
    source = _module_source(module)
    if name is not None and name not in source.names:
        if _module_file(f"{module}.{name}") is not None:
            yield f"{module}.{name}", None
            return
        if any(name in _module_source(star).names for star in source.stars):
            yield from ((star, name) for star in source.stars)
            return
        name = None  # created by `__getattr__`, or in a file that is not source code
    numbers = counted.setdefault(module, set())
    for number in source.needed(name) - numbers:
        numbers.add(number)
        statement = source.statements[number]
        yield from statement.imports
        names = source.names if "globals" in statement.uses else statement.uses | statement.binds
        yield from ((module, part) for part in names & source.names)
        yield from ((star, part) for star in source.stars for part in names & _module_source(star).names)


def _digest_of_statements(module: str, numbers: Iterable[int]) -> str:
    """Return the digest of statements; empty if they are followed imports, whose modules have separate digests."""
    statements = [_module_source(module).statements[number] for number in sorted(numbers)]
    digests = [statement.digest for statement in statements if not (statement.is_import and statement.imports)]
    return hashlib.blake2b(b"".join(digests), digest_size=8).hexdigest() if digests else ""


class _ModuleSource:
    """The statements of a module."""

    def __init__(self, statements: Iterable[_Statement]) -> None:
        self.statements = tuple(statements)
        self.names = frozenset(name for statement in self.statements for name in statement.binds)
        self.stars = [module for statement in self.statements for module, name in statement.imports if name == "*"]
        imports = [statement for statement in self.statements if statement.is_import]
        self._foreign = frozenset(name for statement in imports if not statement.imports for name in statement.binds)

    def needed(self, name: str | None) -> set[int]:
        """Return the indices of the statements that a name needs; of all statements for None."""
        if name is None:
            return set(range(len(self.statements)))
        return self._needed.get(name, set()) | self._needed.get(None, set())

    @cached_property
    def _needed(self) -> dict[str | None, set[int]]:
        """The indices of the statements that each name needs; under None, the statements that every name needs.

        `TABLE["gqa"] = build` binds no name, so the names in it need it. `@counted` may add a function to a table. A
        decorator of a library, such as `dataclass`, affects only the definition below it.
        """
        needed: dict[str | None, set[int]] = {}
        for number, statement in enumerate(self.statements):
            anywhere = {None} if statement.decorators & self.names - self._foreign else set()
            for name in statement.binds | statement.effects | anywhere:
                needed.setdefault(name, set()).add(number)
        return needed


class _Statement:
    """A statement at the top of a module."""

    def __init__(self, node: ast.stmt, module: str) -> None:
        self._node, self._module = node, module
        self.is_import = isinstance(node, _IMPORT)
        self.binds = frozenset(_bound_names(node))

    @property
    def digest(self) -> bytes:
        """The digest of the statement's syntax tree."""
        return self._content[0]

    @property
    def uses(self) -> frozenset[str]:
        """All names in the statement."""
        return self._content[1]

    @property
    def imports(self) -> frozenset[Reference]:
        """The references of the followed imports in the statement, at any depth."""
        return self._content[2]

    @property
    def decorators(self) -> frozenset[str]:
        """The names in the decorators of a definition."""
        parts = getattr(self._node, "decorator_list", ())
        return frozenset(part.id for decorator in parts for part in ast.walk(decorator) if isinstance(part, ast.Name))

    @property
    def effects(self) -> frozenset[str]:
        """The names that the statement may change without binding them; none if it only binds names."""
        targets = getattr(self._node, "targets", None) or [getattr(self._node, "target", None)]
        plain = isinstance(self._node, _DEFINITION | _IMPORT) or (
            isinstance(self._node, ast.Assign | ast.AnnAssign)
            and all(
                isinstance(part, ast.Name | ast.Tuple | ast.Store) for target in targets for part in ast.walk(target)
            )
        )
        return frozenset() if plain else self.uses

    @cached_property
    def _content(self) -> tuple[bytes, frozenset[str], frozenset[Reference]]:
        reader = _SyntaxReader(self._module)
        reader.read(self._node)
        digest = hashlib.blake2b("\n".join(reader.text).encode(), digest_size=16).digest()
        return digest, frozenset(reader.uses), frozenset(reader.imports)


class _SyntaxReader:
    """Text of a syntax tree, equal for equal code in every version of Python, and the names in it."""

    def __init__(self, module: str) -> None:
        self.text: list[str] = []
        self.uses: set[str] = set()
        self.imports: set[Reference] = set()
        self._module = module

    def read(self, node: ast.AST) -> None:
        """Read a node and all nodes below it."""
        add, kind = self.text.append, type(node)
        add(kind.__name__)
        for name in node._fields:
            value = getattr(node, name, None)
            if value is None or value == [] or name in _INERT_FIELDS:  # a later version of Python has more empty fields
                continue
            add(name)
            for part in value if type(value) is list else (value,):
                if not isinstance(part, ast.AST):
                    add(repr(part))
                elif type(part) is not ast.Expr or not _is_docstring(part):
                    self.read(part)
        add(")")
        if kind is ast.Name:
            self.uses.add(node.id)  # type: ignore[attr-defined]
        elif kind in _REFERRING:
            self.imports |= {
                imported
                for imported in _imported_references(node, self._module)
                if _is_followed(imported[0], self._module)
            }


def _is_docstring(node: ast.AST) -> bool:
    """Return True for a statement that consists of a string, such as a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _bound_names(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement binds in its module."""
    if isinstance(node, _DEFINITION):
        yield node.name
    elif isinstance(node, _IMPORT):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names if alias.name != "*")
    else:
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                yield part.id
            elif part is not node and isinstance(part, _DEFINITION | _IMPORT):
                yield from _bound_names(part)


def _imported_references(node: ast.AST, module: str) -> Iterator[Reference]:
    """Yield the references of an import, or of a public name of tfkit."""
    if isinstance(node, ast.Attribute):
        if isinstance(node.value, ast.Name) and node.value.id == PACKAGE:
            yield _home_module(node.attr), node.attr
    elif isinstance(node, ast.Import):
        yield from ((alias.name, None) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        package = module if _is_package(module) else module.rpartition(".")[0]
        above = package.rsplit(".", node.level - 1)[0] if node.level else ""
        name = ".".join(filter(None, [above, node.module]))
        for alias in node.names:
            yield _home_module(alias.name) if name == PACKAGE else name, alias.name


def _home_module(name: str) -> str:
    """Return the module of a public name of tfkit."""
    return str(getattr(getattr(tfkit, name, None), "__module__", PACKAGE))


def _is_followed(name: str, importer: str) -> bool:
    """Return True if the code of a module belongs to the code of the module that imports it."""
    top, package = name.partition(".")[0], importer.partition(".")[0]
    if top == PACKAGE:
        return any(name == computing or name.startswith(f"{computing}.") for computing in COMPUTING)
    if top == package or top not in sys.modules:
        return top == package
    folder = _module_folder(top)
    return folder is not None and folder == _module_folder(package) and folder.name not in LIBRARIES


@cache
def _module_source(module: str) -> _ModuleSource:
    """Return the statements of a module; a file that is not source code counts as a single statement."""
    file = _module_file(module)
    content = b"" if file is None else file.read_bytes()
    try:
        return _ModuleSource(
            _Statement(part, module) for node in ast.parse(content).body for part in _statement_parts(node)
        )
    except (SyntaxError, ValueError, RecursionError):
        return _ModuleSource(
            [_Statement(ast.Expr(ast.Constant(hashlib.blake2b(content).hexdigest().encode())), module)]
        )


def _statement_parts(node: ast.stmt) -> Iterator[ast.stmt]:
    """Yield a statement without docstrings; split an import into one statement per name."""
    if isinstance(node, ast.Import):
        yield from (ast.Import([alias]) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (ast.ImportFrom(node.module, [alias], node.level) for alias in node.names)
    elif not _is_docstring(node):
        yield node


@cache
def _module_file(module: str) -> Path | None:
    """Return the file of a module, imported or not; None if there is none."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is not None:
        return Path(file)
    package, _, name = module.rpartition(".")
    folder = _module_file(package) if package else None
    if folder is None or folder.name != "__init__.py":
        return None
    files = folder.parent / f"{name}.py", folder.parent / name / "__init__.py"
    return next((candidate for candidate in files if candidate.is_file()), None)


def _is_package(module: str) -> bool:
    file = _module_file(module)
    return file is not None and file.stem == "__init__"


def _module_folder(module: str) -> Path | None:
    """Return the folder that a module or a package is in."""
    file = _module_file(module)
    return None if file is None else file.parent.parent if file.stem == "__init__" else file.parent


def _displayed_name(module: str) -> str:
    """Return the name of a module, without the digest of the path if the module is a plugin file or folder."""
    return re.sub(rf"^{MODULE_PREFIX}(.*?)_[0-9a-f]{{8}}(?=\.|$)", r"\1", module)
