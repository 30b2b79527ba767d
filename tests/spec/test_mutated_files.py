"""Every shipped run and sweep with changes of its structure: each file is valid, or an error with a place.

The changes are drawn from a seed, so each mutant can be repeated. A mutant that is valid is also planned, which builds its
model on the meta device.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

import tfkit
from tests.training.runs import PLUGINS
from tfkit.graph.run import load_run
from tfkit.plugin.known_specs import own_specs
from tfkit.spec.run import RunSpec
from tfkit.spec.source import parse, plain
from tfkit.spec.sweep import SweepSpec
from tfkit.tools.cost.of_run import flops_of_step
from tfkit.tools.sweep.sweep import Sweep
from tfkit.tools.train.plan import plan

from ..time_limit import cheaply
from .test_run_mutations import check_refusal


@dataclass(eq=False)
class Raw:
    """Text that is written without quotes; as a key it differs from every other key, so a mapping can repeat one."""

    text: str


ODD = [
    *(0, -1, 1, 2, 7, 10**9, 2**63, -(2**64), 10**40, 1.5, -0.0, 1e-320, 1e300, True, False, None),
    *("", " ", "text", "all", "auto", "none", "val", "train.loss", "5%", "-5%", "1e400%", "4k", "7M", "-3k", "é\u202e\u0000", "\U0001f600"),
    *("a" * 300, "x" * 5000, "/", "..", "/dev/null", "/dev/zero", "missing.yaml", "gpt2", "minigpt_relu", "a.b.c", ".", "..."),
    *("steps * 2", "20 * params", "1 / 0", "9 ** 9 ** 9", "params" * 40, "(" * 60, "[", "embedding.*", "*", "%"),
    *([], [[]], [None], [0.9], [0.9, 0.9, 0.9], [1, 2], ["a", 1], {}, {"": 0}, {"kind": "text"}, {"kind": None}, {"kind": []}),
    *({"a": {"b": {"c": 1}}}, [{"kind": "adamw"}], {"low": 1, "high": 0}, list(range(5000)), {str(n): n for n in range(2000)}),
    *(Raw(".nan"), Raw(".inf"), Raw("-.inf"), Raw("007"), Raw("0x1F"), Raw("1_000"), Raw("2026-01-01"), Raw("~"), Raw("")),
    *(Raw("!!python/object/apply:os.system [ls]"), Raw("!!str 1"), Raw("!t 1"), Raw("!!binary aGk="), Raw("&a [*a]")),
    *(Raw("*missing"), Raw("&a {x: 1}"), Raw("[" * 60 + "]" * 60), Raw("{a: " * 60 + "1" + "}" * 60), Raw("{<<: 3}")),
    *(Raw("{a: 1, a: 2}"), Raw("{? [1, 2] : 3}"), Raw("{1: 2, null: 3, true: 4}"), Raw("'unclosed"), Raw("{[")),
]  # fmt: skip
"""Values that may stand in any place."""
FIELDS = sorted(
    {*RunSpec.model_fields, *SweepSpec.model_fields, "extends", "model", "base", "requires", "kind", "model.decoder.ffn"}
    | {name for slot in PLUGINS.registry.slots() for one in PLUGINS.registry.kinds(slot).values()
       for name in one.config.model_fields}
)  # fmt: skip
Place = tuple[Any, Any]
"""A container, and the key or index of a value in it."""


def places(node: Any) -> Iterator[Place]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield node, key
        yield from places(value)


def any_place(random: Random, root: Any) -> Place:
    return random.choice(list(places(root)) or [({"a": root}, "a")])


# ---- changes ----


def odd_value(random: Random, root: Any) -> None:
    node, key = any_place(random, root)
    node[key] = deepcopy(random.choice(ODD))


def near_value(random: Random, root: Any) -> None:
    """A number of another size, the other truth value, or a word of a shipped file: often valid."""
    values = [(node, key) for node, key in places(root) if not isinstance(node[key], dict | list | Raw)]
    node, key = random.choice(values or [(root, "seed")])
    value = node.get(key) if isinstance(node, dict) else node[key]
    if isinstance(value, bool):
        node[key] = not value
    elif isinstance(value, int | float):
        node[key] = random.choice([value + 1, value * 2, value // 2, value / 2, -value, 1 - value, value * 1000])
    else:
        node[key] = random.choice(WORDS)


def without_a_key(random: Random, root: Any) -> None:
    node, key = any_place(random, root)
    del node[key]


def another_key(random: Random, root: Any) -> None:
    """Rename a key, to a name of the language or to nonsense; or repeat the key."""
    node, key = random.choice([place for place in places(root) if isinstance(place[0], dict)] or [(root, None)])
    names = [random.choice(FIELDS), str(key)[:-1], f"{key}.{random.choice(FIELDS)}", "", "é", Raw(str(key)), Raw("<<")]
    names += [Raw("1"), Raw("null"), Raw(".nan"), Raw("[1]"), Raw("*a"), "k" * 400]
    value = node.get(key) if random.random() < 0.4 else node.pop(key, None)
    node[random.choice(names)] = value


def new_key(random: Random, root: Any) -> None:
    nodes = [root, *(node[key] for node, key in places(root) if isinstance(node[key], dict))]
    random.choice(nodes)[random.choice(FIELDS)] = deepcopy(random.choice(ODD))


def moved(random: Random, root: Any) -> None:
    """Put a copy of a value, of this file or of another, in another place, perhaps inside itself."""
    source = root if random.random() < 0.5 else random.choice(ORIGINALS)
    node, key = any_place(random, source)
    value = deepcopy(node[key])
    node, key = any_place(random, root)
    node[key] = value


def other_form(random: Random, root: Any) -> None:
    """A list of the value, a mapping with it, a part of it, or its text."""
    node, key = any_place(random, root)
    value = node[key]
    inside = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    text = value.text if isinstance(value, Raw) else json.dumps(value, default=str)
    forms = [[value], [[value]], [value] * 3, {"a": value}, {"kind": value}, Raw(json.dumps(text)), *inside[:2]]
    node[key] = random.choice(forms)


def other_length(random: Random, root: Any) -> None:
    """A list with another number of items; if there is none, any other change of form."""
    lists = [node[key] for node, key in places(root) if isinstance(node[key], list)]
    if not lists:
        return other_form(random, root)
    values = random.choice(lists)
    values[:] = random.choice([values[:1], values[:-1], [], values * 2, [*values, random.choice(ODD)], values[:1] * 5000])
    return None


CHANGES = [odd_value, odd_value, near_value, near_value, without_a_key, another_key, new_key, moved, other_form, other_length]


def mutant(original: dict[Any, Any], random: Random) -> str:
    root = deepcopy(original)
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        random.choice(CHANGES)(random, root)
    text = "\n".join(f"{written(key)}: {written(value)}" for key, value in root.items()) + "\n"
    return text + random.choice(["---\n", "\t", "...\nmore", "\ufeff", "\r"]) if random.random() < 0.02 else text


def written(value: Any) -> str:
    """A value as YAML in one line."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, dict):
        return "{" + ", ".join(f"{written(key)}: {written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_./(]([\w./ *%+()-]*[\w.*%)])?", value, re.ASCII):
        return value
    return json.dumps(value, ensure_ascii=False)


# ---- files ----


def originals(kind: str) -> dict[str, dict[Any, Any]]:
    files = sorted((own_specs() / kind).glob("*.yaml"))
    return {path.stem: plain(parse(path.read_text(encoding="utf-8"), path.name)) for path in files}


RUNS, SWEEPS = originals("runs"), originals("sweeps")
ORIGINALS = [*RUNS.values(), *SWEEPS.values()]
WORDS = sorted({node[key] for root in ORIGINALS for node, key in places(root) if isinstance(node[key], str)})
QUICK, MANY = 50, 2_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a mutant finds the runs that it extends."""
    folder = tmp_path_factory.mktemp("mutants")
    for kind in ("runs", "sweeps"):
        shutil.copytree(own_specs() / kind, folder / kind)
    return folder


def read(path: Path) -> object:
    """The plan of a run, or the runs of a sweep; raises SpecError."""
    if path.parent.name == "sweeps":
        return Sweep(path, PLUGINS, path.parent / "out").outline()
    return plan(load_run(path, PLUGINS, count=flops_of_step))


def check(name: str, count: int, path: Path) -> None:
    """Read mutants of a file. Each message of a failure has the number of the mutant, and its text."""
    original = (RUNS if path.parent.name == "runs" else SWEEPS)[name]
    for number in range(count):
        text = mutant(original, Random(f"{path.parent.name} {name} {number}"))
        path.write_text(text, encoding="utf-8")
        try:
            with cheaply():
                read(path)
        except tfkit.SpecError as error:
            check_refusal(error)
        except Exception as error:
            pytest.fail(f"mutant {number} of {name}: {type(error).__name__}: {error}\n{text[:2000]}")


def counts(files: dict[str, Any], total: int) -> list[tuple[str, int]]:
    """Mutants for each file, this many in total."""
    return [(name, total * (index + 1) // len(files) - total * index // len(files)) for index, name in enumerate(files)]


pytestmark = pytest.mark.filterwarnings("ignore::tfkit.errors.SpecWarning", "ignore::tfkit.errors.FirstLossWarning")
