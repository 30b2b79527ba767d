"""The digest of a run does not change when a kind gets a new field; a changed default is reported."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.run.training.runs import PLUGINS, small_run
from tfkit.component import Component, Config, slot
from tfkit.run.checked_run import Run
from tfkit.run.contract import ScheduleConfig
from tfkit.run.kinds.schedules import ConstantConfig, CosineConfig
from tfkit.run.run_meaning import RunSemantics, files_content
from tfkit.run.run_spec import RunSpec
from tfkit.spec.annotations import shape_of, slot_setting
from tfkit.spec.model_spec import ModelSpec


class Part(Config):
    width: int = 1


class Before(ScheduleConfig):
    kind: Literal["constant"] = "constant"

    def after(self, done: int, left: int) -> float:
        return 1.0


class Later(Before):
    flag: bool = False
    number: float = 1.0
    empty: Part | None = None
    part: Part = Part()
    names: tuple[str, ...] = ("a",)
    inside: ScheduleConfig = slot("constant")
    several: tuple[ScheduleConfig, ...] = slot("constant")


class Changed(Later):
    flag: bool = True


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return small_run(tmp_path)


Of = Callable[[ScheduleConfig], RunSemantics]


@pytest.fixture
def of(run: Run) -> Of:
    """The meaning of a run with a schedule."""
    return lambda schedule: RunSemantics(
        run.config.model_copy(update={"schedule": schedule}), run.graph.spec.model, {"steps": 8}
    )


def later(kind: type[Later] = Later, **options: Any) -> Later:
    filled = {"inside": ConstantConfig(), "several": (ConstantConfig(),)}
    return kind(**{**filled, **options})


def test_a_new_field_with_a_default_changes_nothing(of: Of) -> None:
    old, new = of(Before()), of(later())
    assert new.digest == old.digest
    assert len(new.values) > len(old.values)
    assert new.differences(old.values) == []


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"flag": True}, "flag"),
        ({"number": 2.0}, "number"),
        ({"empty": Part()}, "empty"),
        ({"part": Part(width=2)}, "part.width"),
        ({"names": ()}, "names.0"),
        ({"names": ("b",)}, "names.0"),
        ({"inside": CosineConfig()}, "inside.kind"),
        ({"inside": ConstantConfig(warmup=3)}, "inside.warmup"),
        ({"several": (ConstantConfig(), ConstantConfig())}, "several.1.kind"),
    ],
)
def test_every_other_value_does(of: Of, options: dict[str, Any], path: str) -> None:
    usual, other = of(later()), of(later(**options))
    assert other.digest != usual.digest
    assert f"schedule.{path}" in other.differences(usual.values)


def test_other_values_have_other_digests(of: Of) -> None:
    arguments = [
        {"empty": None},
        {"empty": Part()},
        {"names": ()},
        {"number": 0.0},
        {"flag": True},
        {"part": Part(width=0)},
    ]
    assert len({of(later(**argument)).digest for argument in arguments}) == len(arguments)


def test_a_default_that_has_changed_is_noticed(of: Of) -> None:
    """The digest cannot tell; the values in the folder can."""
    before, after = of(later()), of(later(Changed))
    assert after.digest == before.digest
    assert after.differences(before.values) == ["schedule.flag"]
    assert before.differences(after.values) == ["schedule.flag"]


def test_a_value_that_no_field_has_any_more_is_a_difference(of: Of) -> None:
    assert of(Before()).differences({**of(Before()).values, "schedule.flag": True}) == ["schedule.flag"]


def test_the_content_of_files_is_that_of_their_names_and_bytes(tmp_path: Path) -> None:
    """A file that changes while a process runs may keep its size; a file of a folder may get a different name."""
    path = tmp_path / "teacher.yaml"
    path.write_bytes(b"name: ab")
    before, time = files_content(path), path.stat().st_mtime_ns
    path.write_bytes(b"name: ac")
    os.utime(path, ns=(time, time + 10**6))
    assert files_content(path) != before
    digests = []
    for number, files in enumerate(
        ({"a": "x", "b": "y"}, {"a": "x", "b": "z"}, {"a": "x", "c": "y"}, {"a": "x", "b": "y"})
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        digests.append(files_content(folder))
    assert len({*digests}) == 3
    assert digests[0] == digests[3]


def test_the_defaults_of_all_kinds(golden: Callable[[str, str], None]) -> None:
    """A line may come or go with its field. One that changes makes runs and weights of before mean something else:
    that takes a field or a kind of another name, or a new version of the language.
    """
    registry = PLUGINS.registry
    kinds = [component.config for name in registry.slots() for component in registry.kinds(name).values()]
    lines = [line for cls in _with_parts([RunSpec, ModelSpec, *kinds]) for line in _defaults(cls)]
    golden("data/defaults", "\n".join(lines))


def _with_parts(classes: Sequence[type[Config]]) -> list[type[Config]]:
    """Classes of configs, and of those without a kind inside them."""
    actual = list(classes)
    for cls in actual:  # which grows
        shapes = [shape_of(info.annotation) for info in cls.model_fields.values()]
        parts = [shape.config for shape in shapes if shape is not None and not issubclass(shape.config, Component)]
        actual += [part for part in dict.fromkeys(parts) if part not in actual]
    return actual


def _defaults(cls: type[Config]) -> Iterator[str]:
    name = f"{cls.slot} {cls.kind_name()}" if issubclass(cls, Component) else cls.__name__
    for field, info in cls.model_fields.items():
        kind = slot_setting(info, "default_kind")
        if kind is not None or not (info.is_required() or field == cls.word_key):
            yield f"{name}: {field} = {kind or repr(info.get_default(call_default_factory=True))}"
    yield from (f"{name}: {field} = {text}" for field, text in cls.derived.items())
