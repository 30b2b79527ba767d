"""A version of torch without a private name lacks one feature, which reports it; models are built, run and trained."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.torch_private.without_names import FEATURES
from tfkit.tools.check.measure import Deviation, outcome_of, property_of
from tfkit.torch_private import (
    MissingName,
    MissingNameError,
    dispatch,
    optional_name,
    private_attribute,
    private_name,
    transforms,
)

ADAPTERS = sorted(Path(__file__).parents[2].glob("tfkit/torch_private/*.py"))
NAME, FEATURE = "torch._inductor.no_such_name", "decoding backwards"
VERSION = re.escape(torch.__version__)
TEXT = rf"^error: torch {VERSION} has no `{NAME}`, which tfkit needs for {FEATURE}\n.*a tested version of"


def names() -> Iterator[str]:
    """The names that the adapters look up: dotted paths, and attributes of objects."""
    for path in ADAPTERS:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w+)*\._\w+(\.\w+)*", str(node.value)):
                yield node.value
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "private_attribute":
                yield from (name.value for name in node.args[1:2] if isinstance(name, ast.Constant))


def test_every_name_is_hidden_once() -> None:
    from tfkit.torch_private.hooks import HOOKS

    assert {*names(), *HOOKS, "_state_dict_hooks"} == FEATURES.keys()


@pytest.mark.slow
def test_a_missing_name_costs_one_feature_and_gives_one_message() -> None:
    script = Path(__file__).with_name("without_names.py")
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    results = [json.loads(line) for line in run.stdout.splitlines() if line]
    assert [result["name"] for result in results] == [*FEATURES]
    assert {result["name"]: result["fault"] for result in results if result["fault"]} == {}
    for result in results:
        name, messages = result["name"], [*result["warnings"], *filter(None, [result["error"]])]
        attribute_of_objects = not name.startswith("torch.")
        if name == "_state_dict_hooks":  # without it, a hook is registered several times, to the same effect
            assert messages == []
        for message in messages:
            assert f"torch {torch.__version__} has no `" in message
            assert (f".{name}`" if attribute_of_objects else f"`{name}`") in message
            assert ", which tfkit needs for " in message
        assert len(set(messages)) == len(messages)
        assert messages or name == "_state_dict_hooks", name


def test_the_use_of_a_missing_name_names_the_version_and_the_feature() -> None:
    missing = private_name(NAME, FEATURE)
    assert isinstance(missing, MissingName)
    for use in (lambda: missing(2), lambda: missing.config, lambda: private_attribute(missing, "config", FEATURE)):
        with pytest.raises(MissingNameError, match=TEXT):
            use()

    class Mode(missing):  # type: ignore[misc, valid-type]
        pass

    with pytest.raises(MissingNameError, match=TEXT):
        Mode()
    with pytest.raises(MissingNameError, match=r"has no `Linear\._speed`, which tfkit needs for decoding backwards"):
        private_attribute(torch.nn.Linear(2, 3), "_speed", FEATURE)


def test_an_optional_name_that_is_missing_is_reported_once() -> None:
    assert optional_name("torch.Tensor._version", FEATURE) is vars(torch._C.TensorBase)["_version"]
    with pytest.warns(UserWarning, match=rf"^torch .* has no `{NAME}2`, which tfkit needs for {FEATURE}$"):
        assert optional_name(f"{NAME}2", FEATURE) is None
    with warnings.catch_warnings(action="error"):
        assert optional_name(f"{NAME}2", FEATURE) is None


def test_a_counter_that_would_miss_an_operation_is_not_created(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch.DispatchMode()
    monkeypatch.setattr(dispatch, "OPERATIONS", (dispatch.SOFTMAX, MissingName(NAME, FEATURE)))
    with pytest.raises(MissingNameError, match=TEXT):
        dispatch.DispatchMode()


@pytest.mark.parametrize("index", range(3))
def test_operations_are_watched_if_torch_cannot_tell(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not transforms.is_watched()
    names = [*transforms._observer_functions()]
    names[index] = None
    monkeypatch.setattr(transforms, "_observer_functions", lambda: names)
    assert transforms.is_watched()


def test_a_property_that_needs_a_missing_name_does_not_apply() -> None:
    @property_of("backwards", "can be read from its end")
    def backwards(_: Any) -> Iterator[Deviation]:
        yield Deviation(0.0, "")
        private_name(NAME, FEATURE)(3)

    outcome = outcome_of(backwards, None)  # type: ignore[arg-type]
    assert outcome.status == "does not apply"
    assert outcome.detail == f"torch {torch.__version__} has no `{NAME}`, which tfkit needs for {FEATURE}"
