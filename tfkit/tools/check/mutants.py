"""Bugs in the code of components, planted in memory, and the properties of `tfkit check` that see them.

A bug replaces the code objects of functions that exist, `function.__code__`. Every reference to a function then runs
the bug: classes, registered kinds, generated forwards. Nothing is imported again, and no file is written. For each bug,
the models are built again from their specs, because configs compute values of a model as well.
"""

from __future__ import annotations

import ast
import copy
import functools
import gc
import linecache
import random
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from tfkit.building.builder import build
from tfkit.building.placement import thread_count
from tfkit.component import Component
from tfkit.decoding.cached import CachedModel
from tfkit.errors import Diagnostic, SpecError, listing
from tfkit.graph.expand import Graph
from tfkit.spec.messages import kind_of
from tfkit.tools.check.check import AnySubject, Work, outcomes_of
from tfkit.tools.check.measure import Property, in_words
from tfkit.tools.check.model_under_test import ModelUnderTest
from tfkit.tools.check.mutations import Mutation, mutations
from tfkit.tools.check.properties.forms import scripted_model
from tfkit.tools.check.properties.steps import SequenceBatch
from tfkit.tools.check.runs import call, cast_inputs
from tfkit.tools.common.model_inputs import as_tensors

Result: TypeAlias = Literal["seen", "survives", "no effect", "raises an error", "not run"]
Subjects: TypeAlias = Sequence[tuple[AnySubject, str]]
FunctionKey: TypeAlias = tuple[str, int]
"""The qualified name and the first line of a function."""
Span: TypeAlias = tuple[int, int, int, int]
"""The first line and column, and the last line and column."""
Executed: TypeAlias = tuple[str, Span]
"""The file and the span of an instruction that was executed."""
LONG_LENGTH = 150
"""Tokens of a sequence that is longer than two chunks of a recurrence."""
CACHE = type(functools.cache(len))
HOLDERS = (
    dict,
    list,
    tuple,
    FunctionType,
    CellType,
    CACHE,
    property,
    classmethod,
    staticmethod,
    functools.cached_property,
)
"""Types of objects that refer to functions."""
LAST_COLUMN = 1 << 30


@dataclass(frozen=True)
class Bug:
    """A bug that was planted in the code of a component.

    Attributes:
        file: the path of the source file.
        line: the line of the bug.
        type: the type of the bug, such as `sign`.
        before: the changed expression.
        after: the expression with the bug.
        result: `seen` by a property; `survives`; `no effect` if no value, gradient or cache differs; `raises an error`
            if a model cannot be built or called; `not run` if no model runs the line.
        property: the property that sees the bug; empty for all other results.
        detail: the message of the property, or of the error.
    """

    file: str
    line: int
    type: str
    before: str
    after: str
    result: Result
    property: str = ""
    detail: str = ""


@dataclass(frozen=True)
class PlantedBugs:
    """The bugs that were planted in components, and what became of them.

    Attributes:
        components: the components, such as `ffn swiglu`.
        n_models: the number of models in which each bug is measured.
        n_possible: the number of bugs among which `bugs` were drawn.
        seed: of the draw, and of weights and inputs.
        bugs: the planted bugs, by file and line.
    """

    components: tuple[str, ...]
    n_models: int
    n_possible: int
    seed: int
    bugs: tuple[Bug, ...]

    @property
    def counts(self) -> Mapping[Result, int]:
        """The number of bugs with each result."""
        return Counter(bug.result for bug in self.bugs)


def plant_bugs(
    work: Work,
    subjects_of: Callable[[], Subjects],
    components: Collection[type[Component]],
    *,
    limit: int,
    on_progress: Callable[[int, int, str], Any] = lambda done, total, text: None,
) -> PlantedBugs:
    """Plant bugs in the code of components, a single bug at a time, and measure properties until one sees the bug.

    Args:
        work: the properties, and the seed.
        subjects_of: returns new models around the components.
        components: the components whose code is changed.
        limit: the largest number of bugs; they are drawn by the seed.
        on_progress: called with the number of finished stages, the number of all stages, and the next stage.

    Raises:
        SpecError: a property is broken without a bug, or the code of the components is not Python that can be read.
    """
    properties = [prop for prop in work.chosen if prop.of == "model" and prop.level == "quick"]
    properties = [prop for prop in properties if prop is not scripted_model]  # TorchScript reads the files
    if not properties:
        help = "choose properties of models that take no programs, such as `--only padding`"
        raise SpecError(Diagnostic(f"`{work.chosen[0].name}` cannot see planted bugs", help=help))
    names = tuple(f"{kind_of(component)} `{component.kind_name()}`" for component in components)
    with thread_count(1), warnings.catch_warnings():  # several threads slow down a small model
        warnings.simplefilter("ignore")
        reach = _Reach(components)
        subjects, expected = reach.record(subjects_of)
        if not subjects:
            message = f"no bug can be planted in {listing(names)}: it is not part of a model"
            raise SpecError(Diagnostic(message, help="choose a component of a model, or run without `--mutate`"))
        code = _Code(reach)
        drawn, n_possible = code.draw(limit, work.seed)
        if not drawn:
            message = f"no bug can be planted in {listing(names)}: no model runs a line of Python in it"
            raise SpecError(Diagnostic(message, help="choose a component with methods in Python"))
        total = len(subjects) + len(drawn)
        for number, (subject, words) in enumerate(subjects):
            on_progress(number, total, f"without a bug: {words}")
            _require_all(subject, properties, words)
        trial = _Trial(subjects_of, properties, expected, reach)
        bugs = []
        for number, plant in enumerate(drawn, len(subjects)):
            on_progress(number, total, f"{plant.location}: {plant.mutation.type}")
            bugs.append(trial.bug(code, plant))
    return PlantedBugs(names, len(subjects), n_possible, work.seed, tuple(bugs))


def kinds_of(graph: Graph) -> list[type[Component]]:
    """Return the kinds of all components of a model, in the order of its spec."""
    return list(dict.fromkeys(type(config) for _, config in graph.configs(Component)))


def _require_all(subject: ModelUnderTest, properties: Iterable[Property], words: str) -> None:
    """Raise SpecError if a property is broken without a bug."""
    for outcome in outcomes_of(subject, properties):
        if outcome.status == "failed":
            message = f"bugs are planted only in code without a bug; `{outcome.name}` is broken"
            notes = (f"in {words or subject.name}: {outcome.fault}",)
            raise SpecError(Diagnostic(message, notes=notes, help="run the command without `--mutate`"))


# ---- the code that belongs to components ----


class _Reach:
    """The functions that run while components are built and called, and the lines that each model runs.

    A function belongs to a component if a method of its config, or of a module that its config builds, runs it directly
    or indirectly. The code of components inside it does not belong to it, and neither do libraries and tfkit itself.
    """

    def __init__(self, components: Collection[type[Component]]) -> None:
        self.components = frozenset(components)
        self.functions: dict[str, set[FunctionKey]] = defaultdict(set)
        self.names: dict[str, Mapping[str, Any]] = {}
        self.modules: set[str] = set()
        self._executed: dict[str, set[Executed]] = {}
        self._spans: set[Executed] = set()
        self._positions = functools.cache(lambda code: tuple(code.co_positions()))
        self._owners: dict[type, set[type]] = defaultdict(set)
        self._packages = {_package(component.__module__) for component in components}
        self._is_followed = functools.cache(lambda module: _package(module) in self._packages)

    def record(
        self, subjects_of: Callable[[], Subjects]
    ) -> tuple[list[tuple[ModelUnderTest, str]], Mapping[str, _Evidence]]:
        """Build the models and call them; return them, and what they computed."""
        with self._recording() as in_all:
            subjects = [(subject, words) for subject, words in subjects_of() if isinstance(subject, ModelUnderTest)]
        evidence = {}
        for subject, words in subjects:
            with self._recording() as spans:
                evidence[words] = _Evidence(subject)
            self._executed[words] = spans | in_all
        return subjects, evidence

    def models_of(self, file: str, span: Span) -> list[str]:
        """Return the models that run an expression."""
        return [
            words
            for words, executed in self._executed.items()
            if any(name == file and span[:2] <= part[:2] and part[2:] <= span[2:] for name, part in executed)
        ]

    @contextmanager
    def _recording(self) -> Iterator[set[Executed]]:
        spans: set[Executed] = set()
        self._spans = spans
        tracer = sys.gettrace()
        sys.settrace(self._on_call)
        try:
            yield spans
        finally:
            sys.settrace(tracer)

    def _on_call(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if code is nn.Module.__init__.__code__:
            owner = next((caller for caller in _callers(frame) if isinstance(caller, Component)), None)
            self._owners[type(_first_argument(frame))].add(type(owner))
        module = frame.f_globals.get("__name__", "")
        if not self._is_followed(module):
            return None
        self.modules.add(module)
        if not self._belongs(frame):
            return None
        self.functions[code.co_filename].add((code.co_qualname, code.co_firstlineno))
        self.names[code.co_filename] = frame.f_globals
        frame.f_trace_opcodes = True
        return self._on_instruction

    def _on_instruction(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode":
            first, last, start, end = self._positions(frame.f_code)[frame.f_lasti // 2]
            if first is not None and last is not None:
                # Python may omit columns: then any expression of the line counts as run.
                if start is None or end is None:
                    start, end = LAST_COLUMN, -1
                self._spans.add((frame.f_code.co_filename, (first, start, last, end)))
        return self._on_instruction

    def _belongs(self, frame: FrameType) -> bool:
        for caller in _callers(frame):
            if isinstance(caller, Component):
                return type(caller) in self.components
            if owners := self._owners.get(type(caller), set()) - {type(None)}:
                return not owners.isdisjoint(self.components)
        return False


def _package(module: str) -> str:
    """Return the package whose modules may belong to a component of a module; of tfkit, `tfkit.components`."""
    return ".".join(module.split(".")[: 2 if module.startswith("tfkit.") else 1])


def _callers(frame: FrameType | None) -> Iterator[object]:
    """Yield the objects whose methods run, the innermost first."""
    while frame is not None:
        yield _first_argument(frame)
        frame = frame.f_back


def _first_argument(frame: FrameType) -> object:
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


# ---- planting ----


@dataclass(frozen=True)
class _Plant:
    """A bug before it is planted: the functions, their code, and their code with the bug."""

    file: str
    mutation: Mutation
    swaps: tuple[tuple[FunctionType, CodeType, CodeType], ...]

    @property
    def location(self) -> str:
        return f"{self.file}:{self.mutation.line}"


class _Code:
    """The source files of components, with their functions in this process."""

    def __init__(self, reach: _Reach) -> None:
        self._names = dict(sorted(reach.names.items()))
        self._running = {
            file: {(key[0].rpartition(".")[2], key[1]) for key in reach.functions[file]} for file in self._names
        }
        self._trees = {file: _tree(file, names) for file, names in self._names.items()}
        self._codes = {file: _codes(_compiled(tree, file)) for file, tree in self._trees.items()}
        self._functions: dict[tuple[str, FunctionKey], list[FunctionType]] = defaultdict(list)
        objects = list(_objects_in(self._names.values(), reach.modules))
        self._caches = [item for item in objects if type(item) is CACHE]
        for item in objects:
            if type(item) is FunctionType and item.__code__.co_filename in self._trees:
                code = item.__code__
                self._functions[code.co_filename, (code.co_qualname, code.co_firstlineno)].append(item)

    def draw(self, limit: int, seed: int) -> tuple[list[_Plant], int]:
        """Draw bugs from all bugs of the functions that run; return them, and the number of all."""
        possible = [
            (file, mutation)
            for file, tree in self._trees.items()
            for mutation in mutations(tree, self._names[file])
            if mutation.function in self._running[file]
        ]
        order = random.Random(seed).sample(range(len(possible)), len(possible))
        plants = ((index, plant) for index in order if (plant := self._plant(*possible[index])) is not None)
        drawn = dict(islice(plants, limit))
        return [drawn[index] for index in sorted(drawn)], len(possible)

    def _plant(self, file: str, mutation: Mutation) -> _Plant | None:
        """Compile a file with a bug; return None if the functions of this process cannot contain it."""
        with mutation.applied():
            codes = _codes(_compiled(self._trees[file], file))
        swaps = []
        for key, code in codes.items():
            if code != self._codes[file].get(key):
                for function in self._functions[file, key]:
                    if function.__code__ != self._codes[file].get(key):
                        message = f"the file has changed since it was imported: {file}"
                        raise SpecError(Diagnostic(message, help="run the command again"))
                    if function.__code__.co_freevars != code.co_freevars:
                        return None
                    swaps.append((function, function.__code__, code))
        return _Plant(file, mutation, tuple(swaps)) if swaps else None

    @contextmanager
    def planted(self, plant: _Plant) -> Iterator[None]:
        """Run the functions with a bug within the context."""
        try:
            for function, _, code in plant.swaps:
                function.__code__ = code
            self._clear()
            yield
        finally:
            for function, code, _ in plant.swaps:
                function.__code__ = code
            self._clear()

    def _clear(self) -> None:
        for cache in self._caches:
            cache.cache_clear()


def _objects_in(namespaces: Iterable[Mapping[str, Any]], modules: Collection[str]) -> Iterator[object]:
    """Yield the classes and functions of modules, the functions inside decorators, and what is between them."""
    pending: list[Any] = [*namespaces]
    seen = set[int]()
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        yield item
        if type(item) is FunctionType and item.__module__ not in modules:
            pending += [item.__closure__, vars(item)]  # a decorator from elsewhere
        elif type(item) in HOLDERS or (isinstance(item, type) and item.__module__ in modules):
            pending += gc.get_referents(item)


def _tree(file: str, names: Mapping[str, Any]) -> ast.Module:
    text = "".join(linecache.getlines(file, dict(names)))
    if not text:
        message = f"no bug can be planted in module `{names.get('__name__')}`: its source text cannot be read"
        raise SpecError(Diagnostic(message, notes=(f"its file is {file}",), help="define the component in a file"))
    return ast.parse(text)


def _compiled(tree: ast.Module, file: str) -> CodeType:
    code: CodeType = compile(tree, file, "exec", dont_inherit=True)
    return code


def _codes(module: CodeType) -> dict[FunctionKey, CodeType]:
    """Return the code objects inside a code object, except those that share a name and a line."""
    codes: dict[FunctionKey, CodeType | None] = {}
    pending = [module]
    while pending:
        for code in pending.pop().co_consts:
            if isinstance(code, CodeType):
                key = code.co_qualname, code.co_firstlineno
                codes[key] = None if key in codes else code
                pending.append(code)
    return {key: code for key, code in codes.items() if code is not None}


# ---- the effect of a bug ----


class _Evidence:
    """Values that a model computes, in several ways; longer sequences and more types than properties take."""

    def __init__(self, subject: ModelUnderTest) -> None:
        self.values = {way.__name__: _values(way, subject) for way in WAYS}

    def differs(self, subject: ModelUnderTest) -> bool:
        """Return True if a model computes anything else."""
        return any(not _equal(_values(way, subject), self.values[way.__name__]) for way in WAYS)


Values: TypeAlias = Sequence[Tensor] | str
"""Tensors, or the error that was raised."""


def _values(way: Callable[[ModelUnderTest], Sequence[Tensor]], subject: ModelUnderTest) -> Values:
    try:
        return [tensor.detach().clone() for tensor in way(subject)]
    except Exception as error:
        return in_words(error)


def _equal(result: Values, expected: Values) -> bool:
    if isinstance(result, str) or isinstance(expected, str):
        return result == expected
    return len(result) == len(expected) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        for a, b in zip(result, expected, strict=True)
    )


def _outputs(subject: ModelUnderTest) -> list[Tensor]:
    return [
        tensor
        for padding in ("none", "left", "right", "rows")
        for tensor in subject.run(subject.inputs(padding=padding))
    ]


def _initial_weights(subject: ModelUnderTest) -> list[Tensor]:
    return [] if subject.has_weights else [*build(subject.graph, seed=subject.seed).state_dict().values()]


def _documents(subject: ModelUnderTest) -> list[Tensor]:
    return _outputs_of_documents(subject, subject.model, subject.length)


def _outputs_of_documents(subject: ModelUnderTest, model: Any, length: int) -> list[Tensor]:
    """Return the outputs of a row of three documents of different lengths."""
    inputs = subject.inputs(batch=1, length=length)
    documents = torch.arange(length) * 7 // length // 3
    masks = {f"{name}_mask": (documents[:, None] == documents)[None] for name in subject.padded[-1:]}
    return subject.run({**inputs, **masks}, model)


def _gradients(subject: ModelUnderTest) -> list[Tensor]:
    """Return the outputs with dropout, and the gradients of all parameters."""
    model = copy.deepcopy(subject.model).train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(subject.seed)
        outputs = call(model, subject.inputs(padding="right"))
    sum((output.float() ** 2).sum() for output in outputs if output.requires_grad).backward()  # type: ignore[union-attr]
    return [*outputs, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def _steps(subject: ModelUnderTest) -> list[Tensor]:
    return _outputs_in_steps(subject, subject.model, subject.length)


def _long_outputs(subject: ModelUnderTest) -> list[Tensor]:
    return subject.run(subject.inputs(length=LONG_LENGTH, padding="left"), _long_model(subject))


def _long_steps(subject: ModelUnderTest) -> list[Tensor]:
    return _outputs_in_steps(subject, _long_model(subject), LONG_LENGTH)


def _long_documents(subject: ModelUnderTest) -> list[Tensor]:
    return _outputs_of_documents(subject, _long_model(subject), LONG_LENGTH)


def _long_model(subject: ModelUnderTest) -> Any:
    limits = {
        path: LONG_LENGTH for path, value in subject.values.items() if path[-1] == "max_len" and value is not None
    }
    return subject.build(subject.changed(limits))


def _outputs_in_steps(subject: ModelUnderTest, model: Any, length: int) -> list[Tensor]:
    rows = SequenceBatch.of(model, subject.inputs(length=length))
    cached, outputs = CachedModel(model, length=length), []
    cached.start(rows.batch, **rows.once)
    first = torch.arange(length // 2) >= torch.arange(rows.batch)[:, None]
    borders = [0, length // 2, length - 2, length - 1, length]
    with torch.no_grad():
        for start, end in pairwise(borders):
            steps: dict[str, Any] = {name: value[:, start:end] for name, value in rows.stepwise.items()}
            outputs += as_tensors(cached(steps.pop(rows.main), None if start else first, **steps))
    return [*outputs, *(tensor for _, _, tensor in cached.tensors())]


def _bfloat16(subject: ModelUnderTest) -> list[Tensor]:
    model = copy.deepcopy(subject.model).to(torch.bfloat16)
    return subject.run(cast_inputs(subject.inputs(padding="left"), torch.bfloat16), model)


WAYS = (
    *(_outputs, _gradients, _steps, _documents, _bfloat16, _initial_weights),
    *(_long_outputs, _long_steps, _long_documents),
)


class _Trial:
    """Measures the properties of the models with a bug."""

    def __init__(
        self,
        subjects_of: Callable[[], Subjects],
        properties: Sequence[Property],
        expected: Mapping[str, _Evidence],
        reach: _Reach,
    ) -> None:
        self._subjects_of, self._properties, self._expected, self._reach = subjects_of, properties, expected, reach
        self._seen_by: Counter[str] = Counter()

    def bug(self, code: _Code, plant: _Plant) -> Bug:
        """Plant a bug and describe its result."""
        mutation = plant.mutation
        with code.planted(plant):
            result, name, detail = self._result(self._reach.models_of(plant.file, mutation.span))
        self._seen_by[name] += 1
        return Bug(plant.file, mutation.line, mutation.type, mutation.before, mutation.after, result, name, detail)

    def _result(self, models: Sequence[str]) -> tuple[Result, str, str]:
        if not models:
            return "not run", "", ""
        try:
            subjects = {words: subject for subject, words in self._subjects_of()}
        except Exception as error:
            return "raises an error", "", in_words(error)
        result: Result = "no effect"
        for words in models:
            subject = subjects.get(words)
            if not isinstance(subject, ModelUnderTest):
                return "raises an error", "", f"no model is built: {words}"
            try:
                subject.run(subject.inputs())
            except Exception as error:
                return "raises an error", "", in_words(error)
            differs = self._expected[words].differs(subject)
            if differs:
                result = "survives"
            if differs or words == models[0]:  # the first model also measures what no output shows, such as FLOPs
                for prop in sorted(self._properties, key=lambda prop: -self._seen_by[prop.name]):
                    (outcome,) = outcomes_of(subject, [prop])
                    if outcome.status == "failed":
                        return "seen", prop.name, outcome.fault
        return result, "", ""
