"""The options of `hookimpl` apply across plugins: each call has the order and the result of plain pluggy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from typing import Any

import pluggy
import pytest

import tfkit
from tfkit.errors import Diagnostic, SpecError
from tfkit.plugin import hookspecs
from tfkit.plugin.discover import Candidate
from tfkit.plugin.hooks import HookError, Hooks, PluginError

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tryfirst": {"tryfirst": True},
    "trylast": {"trylast": True},
    "wrapper": {"wrapper": True},
    "first wrapper": {"wrapper": True, "tryfirst": True},
    "last wrapper": {"wrapper": True, "trylast": True},
    "hookwrapper": {"hookwrapper": True},
}
NAMES = ("ada", "bo", "cy")


class StopError(Exception):
    """An error that a wrapper can handle."""


class Plugin:
    """A plugin that records its calls in `events`. A plain implementation returns a list, or raises `error`."""

    def __init__(self, name: str, events: list[str], error: Exception | None = None) -> None:
        self.name, self.events, self.error = name, events, error

    def value(self) -> list[Diagnostic]:
        self.events.append(self.name)
        if self.error is not None:
            raise self.error
        return [Diagnostic(self.name)]

    def around(self) -> Generator[Any, Any, Any]:
        self.events.append(f"{self.name} begins")
        values = yield
        self.events.append(f"{self.name} ends after {listed(values)}")
        return [*reversed(values), [Diagnostic(f"of {self.name}")]]

    def handling(self) -> Generator[Any, Any, Any]:
        try:
            return (yield)
        except StopError:
            self.events.append(f"{self.name} handles it")
            return []

    def around_result(self) -> Generator[Any, Any, Any]:
        self.events.append(f"{self.name} begins")
        outcome = yield
        outcome.force_result([*reversed(outcome.get_result()), [Diagnostic(f"of {self.name}")]])

    def around_error(self) -> Generator[Any, Any, Any]:
        outcome = yield
        self.events.append(f"{self.name} receives {outcome.exception}")


def listed(values: Any) -> list[str]:
    return [diagnostic.message for value in values for diagnostic in value]


def plugin(name: str, option: str, events: list[str], hook: str = "tfkit_checks", **fields: Any) -> Plugin:
    """A plugin whose hook has an option, and handles errors if it is the wrapper of a hook that acts."""
    acts = hook != "tfkit_checks"

    def plain(self: Plugin, graph: Any) -> Any:
        value = self.value()
        return None if acts else value

    def wrapper(self: Plugin, graph: Any) -> Any:
        return (yield from self.handling() if acts else self.around())

    def hookwrapper(self: Plugin, graph: Any) -> Any:
        yield from self.around_error() if acts else self.around_result()

    options = OPTIONS[option]
    function = hookwrapper if "hookwrapper" in options else wrapper if "wrapper" in options else plain
    cls = type(name.title(), (Plugin,), {hook: tfkit.hookimpl(**options)(function)})
    built = cls(name, events, **fields)
    assert isinstance(built, Plugin)
    return built


def add(hooks: Hooks, *plugins: Plugin) -> list[Candidate]:
    candidates = [Candidate(part.name, "", "test", lambda: (), f"{part.name}.py") for part in plugins]
    for part, candidate in zip(plugins, candidates, strict=True):
        hooks.add(part, candidate)
    return candidates


def hooks_of(*plugins: Plugin) -> Hooks:
    hooks = Hooks()
    add(hooks, *plugins)
    return hooks


def plain_pluggy(*plugins: Plugin) -> pluggy.PluginManager:
    manager = pluggy.PluginManager("tfkit")
    manager.add_hookspecs(hookspecs)
    for part in plugins:
        manager.register(part)
    return manager


def test_values_and_order_are_those_of_pluggy() -> None:
    """Every pair of options occurs in every pair of the three plugins."""
    manager, hooks, names = plain_pluggy(), Hooks(), list(OPTIONS)
    for first, second in itertools.product(range(7), repeat=2):
        options = names[first], names[second], names[(first + 2 * second) % 7]
        expected_events: list[str] = []
        events: list[str] = []
        parts = [plugin(*pair, expected_events) for pair in zip(NAMES, options, strict=True)]
        for part in parts:
            manager.register(part)
        expected = manager.hook.tfkit_checks(graph="")
        for part in parts:
            manager.unregister(part)
        candidates = add(hooks, *(plugin(*pair, events) for pair in zip(NAMES, options, strict=True)))
        answers = hooks.call("tfkit_checks", list, graph="")
        for candidate in candidates:
            hooks.remove(candidate)
        assert (events, listed(value for _, value in answers.values)) == (expected_events, listed(expected)), options
        assert answers.faults == ()


def test_an_order_by_hand() -> None:
    """Pluggy: the last plugin first, then `trylast`; of the wrappers, `tryfirst` is the outermost."""
    events: list[str] = []
    hooks = hooks_of(
        plugin("ada", "first wrapper", events),
        plugin("bo", "wrapper", events),
        plugin("cy", "trylast", events),
        plugin("dee", "plain", events),
        plugin("eve", "plain", events),
    )
    hooks.call("tfkit_checks", list, graph="")
    assert events[:5] == ["ada begins", "bo begins", "eve", "dee", "cy"]
    assert events[5:] == ["bo ends after ['eve', 'dee', 'cy']", "ada ends after ['cy', 'dee', 'eve', 'of bo']"]


@pytest.mark.parametrize("failing", [1, 2])
def test_errors_of_hooks_that_act_are_those_of_pluggy(failing: int) -> None:
    """The first plugin is a wrapper of any type, and another plugin fails."""
    for options in itertools.product(OPTIONS, ("plain", "wrapper", "hookwrapper"), ("plain", "trylast")):
        expected_events: list[str] = []
        events: list[str] = []
        error, parts = StopError("stop"), []
        for into in (expected_events, events):
            errors = [error if index == failing else None for index in range(3)]
            names = zip(NAMES, options, errors, strict=True)
            parts.append([plugin(n, option, into, "tfkit_spec_loaded", error=e) for n, option, e in names])
        expected = error_of(lambda: plain_pluggy(*parts[0]).hook.tfkit_spec_loaded(graph=""))  # noqa: B023
        actual = error_of(lambda: hooks_of(*parts[1]).act("tfkit_spec_loaded", graph=""))  # noqa: B023
        assert events == expected_events, options
        assert (None if actual is None else actual.__cause__) is expected, options
        if actual is not None:
            expected_text = f"plugin {NAMES[failing]}.py: `tfkit_spec_loaded` failed: StopError: stop"
            assert expected_text in str(actual)


def error_of(function: Callable[[], object]) -> BaseException | None:
    try:
        function()
    except (StopError, SpecError) as error:
        return error
    return None


# ---- isolation ----


def bad(name: str, function: Any, hook: str = "tfkit_checks", **options: Any) -> Plugin:
    built = type(name.title(), (Plugin,), {hook: tfkit.hookimpl(**options)(function)})(name, [])
    assert isinstance(built, Plugin)
    return built


def no_yield(self: Any, graph: Any) -> Any:
    if graph is None:
        yield
    return []


def two_yields(self: Any, graph: Any) -> Any:
    yield
    yield


def before(self: Any, graph: Any) -> Any:
    raise KeyError("before")
    yield


def after(self: Any, graph: Any) -> Any:
    yield
    raise KeyError("after")


def nothing(self: Any, graph: Any) -> Any:
    yield


def number(self: Any, graph: Any) -> Any:
    yield
    return [3]


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        (no_yield, "failed: RuntimeError: a wrapper must yield once; got no `yield`"),
        (two_yields, "failed: RuntimeError: a wrapper must yield once; got a second `yield`"),
        (before, "failed: KeyError: 'before'"),
        (after, "failed: KeyError: 'after'"),
        (nothing, "failed: TypeError: a wrapper must return a list of results; got None"),
        (number, "must be a list; got int"),
    ],
)
@pytest.mark.parametrize("outermost", [False, True])
def test_a_wrapper_that_fails_loses_no_result(function: Any, cause: str, outermost: bool) -> None:
    events: list[str] = []
    parts = [plugin("ada", "wrapper", events), bad("bo", function, wrapper=True), plugin("cy", "plain", events)]
    hooks = hooks_of(*(parts if outermost else [parts[1], parts[0], parts[2]]))
    answers = hooks.call("tfkit_checks", diagnostics, graph="")
    assert [(label, value[0].message) for label, value in answers.values] == [("cy.py", "cy"), ("ada.py", "of ada")]
    (fault,) = answers.faults
    assert fault.message == f"plugin bo.py: `tfkit_checks` {cause}"
    assert fault.help == "this hook is skipped; to switch the plugin off: TFKIT_DISABLE=bo"


def diagnostics(returned: Any) -> list[Diagnostic]:
    if not isinstance(returned, list):
        raise TypeError(f"must be a list; got {type(returned).__name__}")
    return [*returned]


def test_wrappers_receive_the_results_of_plugins_that_work() -> None:
    events: list[str] = []
    parts = [
        plugin("ada", "wrapper", events),
        plugin("bo", "hookwrapper", events),
        plugin("cy", "plain", events, error=StopError("no")),
        plugin("dee", "trylast", events),
    ]
    answers = hooks_of(*parts).call("tfkit_checks", list, graph="")
    assert [label for label, _ in answers.values] == ["ada.py", "dee.py", "bo.py"]
    assert [fault.message for fault in answers.faults] == ["plugin cy.py: `tfkit_checks` failed: StopError: no"]


def test_an_interrupt_is_no_failure_of_a_plugin() -> None:
    def interrupt(self: Any, graph: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hooks_of(bad("bo", interrupt)).call("tfkit_checks", list, graph="")
    with pytest.raises(KeyboardInterrupt):
        hooks_of(bad("bo", interrupt, "tfkit_spec_loaded")).act("tfkit_spec_loaded", graph="")


# ---- options without an effect, and the rest of the options ----


@pytest.mark.parametrize("hook", ["tfkit_register", "tfkit_specs"])
@pytest.mark.parametrize("option", ["wrapper", "hookwrapper", "tryfirst", "trylast"])
def test_an_option_without_an_effect_is_refused(hook: str, option: str) -> None:
    def function(self: Any) -> Any:
        yield

    message = f"`{hook}` must not have `{option}`, because tfkit calls it for each plugin separately"
    with pytest.raises(PluginError, match=message):
        hooks_of(bad("bo", function, hook, **{option: True}))


def test_several_implementations_of_an_object() -> None:
    class Two:
        name = "two"

        @tfkit.hookimpl
        def tfkit_checks(self, graph: Any) -> list[Diagnostic]:
            return [Diagnostic("first")]

        @tfkit.hookimpl(specname="tfkit_checks", trylast=True)
        def later(self) -> list[Diagnostic]:
            return [Diagnostic("second")]

        @tfkit.hookimpl(optionalhook=True)
        def tfkit_of_tomorrow(self) -> None: ...

        @tfkit.hookimpl
        def tfkit_spec_loaded(self, graph: Any = "default") -> None:
            self.graph = graph

    part, hooks = Two(), Hooks()
    assert hooks.add(part, Candidate("two", "", "test", tuple, "two.py")) == []
    assert listed(value for _, value in hooks.call("tfkit_checks", list, graph="").values) == ["first", "second"]
    hooks.act("tfkit_spec_loaded", graph="the graph")
    expected = Two()
    plain_pluggy(expected).hook.tfkit_spec_loaded(graph="the graph")  # type: ignore[arg-type]
    assert part.graph == expected.graph


def test_classes_are_plugins_if_their_hooks_need_no_object() -> None:
    class Static:
        name = "static"

        @staticmethod
        @tfkit.hookimpl
        def tfkit_checks(graph: Any) -> list[Diagnostic]:
            return [Diagnostic("static")]

        @classmethod
        @tfkit.hookimpl(specname="tfkit_checks")
        def of_class(cls, graph: Any) -> list[Diagnostic]:
            return [Diagnostic(cls.name)]

    class Methods:
        name = "methods"

        @tfkit.hookimpl
        def tfkit_checks(self, graph: Any) -> list[Diagnostic]:
            return []

    assert len(hooks_of(Static).call("tfkit_checks", list, graph="").values) == 2  # type: ignore[arg-type]
    (fault,) = hooks_of(Methods).call("tfkit_checks", list, graph="").faults  # type: ignore[arg-type]
    assert "missing 1 required positional argument: 'graph'" in fault.message


def test_an_object_is_registered_once() -> None:
    part = plugin("ada", "plain", [])
    with pytest.raises(PluginError, match=r"it names an object again that belongs to plugin ada\.py"):
        hooks_of(part, part)


def test_values_of_a_plugin_that_is_called_separately() -> None:
    hooks = Hooks()
    owners = add(hooks, plugin("ada", "plain", []), plugin("bo", "plain", [], error=StopError("no")))
    assert listed(hooks.call_one(owners[0], "tfkit_checks", list, graph="")) == ["ada"]
    with pytest.raises(HookError, match="`tfkit_checks` failed: StopError: no"):
        hooks.call_one(owners[1], "tfkit_checks", list, graph="")
