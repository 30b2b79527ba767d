"""Every shipped run and sweep with structural changes: the file is valid, or an error has a location.

The changes are drawn from a seed, so each mutant can be repeated. A valid mutant is also planned, which runs its model
on the meta device.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tfkit
from tests.run.test_run_mutations import check_refusal
from tests.run.training.runs import PLUGINS, WITH_PLUGINS
from tfkit.plugin.known_specs import built_in_specs_folder
from tfkit.run.checked_run import load_run
from tfkit.run.run_spec import RunSpec
from tfkit.run.sweep_spec import SweepSpec
from tfkit.spec.source import MAX_BYTES, parse, plain_data
from tfkit.tools.cost.of_run import flops_of_step
from tfkit.tools.sweep.sweep import Sweep
from tfkit.tools.train.plan import run_plan

from ..sampling import some
from ..time_limit import cheaply


@dataclass(eq=False)
class Raw:
    """Text that is written without quotes; as a key it differs from every other key, so a mapping can repeat one."""

    text: str


ODD = [
    *(0, -1, 1, 2, 7, 10**9, 2**63, -(2**64), 10**40, 1.5, -0.0, 1e-320, 1e300, True, False, None),
    *("", " ", "text", "all", "auto", "none", "val", "train.loss", "5%", "-5%", "1e400%", "4k", "7M", "-3k"),
    *("a" * 300, "x" * 5000, "/", "..", ".", "...", "a.b.c", "/dev/null", "/dev/zero", "é\u202e\0", "\U0001f600"),
    *("missing.yaml", "gpt2", "minigpt_relu", "steps * 2", "20 * params", "1 / 0", "9 ** 9 ** 9", "params" * 40),
    *("(" * 60, "[", "embedding.*", "*", "%", [], [[]], [None], [0.9], [0.9, 0.9, 0.9], [1, 2], ["a", 1]),
    *({}, {"": 0}, {"kind": "text"}, {"kind": None}, {"kind": []}, {"a": {"b": {"c": 1}}}, {"low": 1, "high": 0}),
    *([{"kind": "adamw"}], list(range(5000)), {str(number): number for number in range(2000)}),
    *(
        Raw(".nan"),
        Raw(".inf"),
        Raw("-.inf"),
        Raw("007"),
        Raw("0x1F"),
        Raw("1_000"),
        Raw("2026-01-01"),
        Raw("~"),
        Raw(""),
    ),
    *(Raw("!!python/object/apply:os.system [ls]"), Raw("!!str 1"), Raw("!t 1"), Raw("!!binary aGk="), Raw("&a [*a]")),
    *(Raw("*missing"), Raw("&a {x: 1}"), Raw("[" * 60 + "]" * 60), Raw("{a: " * 60 + "1" + "}" * 60), Raw("{<<: 3}")),
    *(Raw("{a: 1, a: 2}"), Raw("{? [1, 2] : 3}"), Raw("{1: 2, null: 3, true: 4}"), Raw("'unclosed"), Raw("{[")),
]
"""Values that may stand in any place."""
FIELDS = sorted(
    {*RunSpec.model_fields, *SweepSpec.model_fields, "extends", "model", "base", "requires", "model.decoder.ffn"}
    | {name for slot in PLUGINS.registry.slots() for entry in PLUGINS.registry.kinds(slot).values()
       for name in entry.config.model_fields}
)  # fmt: skip
Location = tuple[Any, Any]
"""A container, and the key or index of a value in it."""


def locations_in(node: Any) -> Iterator[Location]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield node, key
        yield from locations_in(value)


def any_location(random: Random, root: Any) -> Location:
    return random.choice(list(locations_in(root)) or [({"a": root}, "a")])


# ---- changes ----


def odd_value(random: Random, root: Any) -> None:
    node, key = any_location(random, root)
    node[key] = deepcopy(random.choice(ODD))


def near_value(random: Random, root: Any) -> None:
    """A number of another size, the other truth value, or a word of a shipped file: often valid."""
    values = [(node, key) for node, key in locations_in(root) if not isinstance(node[key], dict | list | Raw)]
    node, key = random.choice(values or [(root, "seed")])
    value = node.get(key) if isinstance(node, dict) else node[key]
    if isinstance(value, bool):
        node[key] = not value
    elif isinstance(value, int | float):
        node[key] = random.choice([value + 1, value * 2, value // 2, value / 2, -value, 1 - value, value * 1000])
    else:
        node[key] = random.choice(WORDS)


def without_a_key(random: Random, root: Any) -> None:
    node, key = any_location(random, root)
    del node[key]


def another_key(random: Random, root: Any) -> None:
    """Rename a key, to a name of the language or to nonsense; or repeat the key."""
    node, key = random.choice(
        [location for location in locations_in(root) if isinstance(location[0], dict)] or [(root, None)]
    )
    names = [random.choice(FIELDS), str(key)[:-1], f"{key}.{random.choice(FIELDS)}", "", "é", Raw(str(key)), Raw("<<")]
    names += [Raw("1"), Raw("null"), Raw(".nan"), Raw("[1]"), Raw("*a"), "k" * 400]
    value = node.get(key) if random.random() < 0.4 else node.pop(key, None)
    node[random.choice(names)] = value


def new_key(random: Random, root: Any) -> None:
    nodes = [root, *(node[key] for node, key in locations_in(root) if isinstance(node[key], dict))]
    random.choice(nodes)[random.choice(FIELDS)] = deepcopy(random.choice(ODD))


def moved(random: Random, root: Any) -> None:
    """Put a copy of a value, of this file or of another, in another place, perhaps inside itself."""
    source = root if random.random() < 0.5 else random.choice(ORIGINALS)
    node, key = any_location(random, source)
    value = deepcopy(node[key])
    node, key = any_location(random, root)
    node[key] = value


def other_form(random: Random, root: Any) -> None:
    """A list of the value, a mapping with it, a part of it, or its text."""
    node, key = any_location(random, root)
    value = node[key]
    inside = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    text = value.text if isinstance(value, Raw) else json.dumps(plain_keys(value), default=str)
    forms = [[value], [[value]], [value] * 3, {"a": value}, {"kind": value}, Raw(json.dumps(text)), *inside[:2]]
    node[key] = random.choice(forms)


def plain_keys(value: Any) -> Any:
    """A value that JSON can express."""
    if isinstance(value, dict):
        return {str(key): plain_keys(item) for key, item in value.items()}
    return list(map(plain_keys, value)) if isinstance(value, list) else value


def other_length(random: Random, root: Any) -> None:
    """A list with another number of items; if there is none, any other change of form."""
    lists = [node[key] for node, key in locations_in(root) if isinstance(node[key], list)]
    if not lists:
        return other_form(random, root)
    values = random.choice(lists)
    more = [*values, deepcopy(random.choice(ODD))]
    values[:] = random.choice([values[:1], values[:-1], [], values * 2, more, values[:1] * 5000])
    return None


CHANGES = [odd_value, near_value, without_a_key, another_key, new_key, moved, other_form, other_length]


def mutant(original: dict[Any, Any], random: Random) -> str:
    root = deepcopy(original)
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        random.choices(CHANGES, [2, 2, 1, 1, 1, 1, 1, 1])[0](random, root)
    text = lines(root)[: MAX_BYTES // 4]  # a larger file is rejected before it is read, and has no place
    return text + random.choice(["---\n", "\t", "...\nmore", "\ufeff", "\r"]) if random.random() < 0.02 else text


def lines(root: dict[Any, Any]) -> str:
    """A file with a line for each key at the top."""
    return "".join(f"{written(key)}: {written(value)}\n" for key, value in root.items())


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
    files = sorted((built_in_specs_folder() / kind).glob("*.yaml"))
    return {path.stem: plain_data(parse(small(path), path.name)) for path in files}


def small(path: Path) -> str:
    """The text of a run or sweep, on less data."""
    return path.read_text(encoding="utf-8").replace("tinyshakespeare", "../data.txt")


RUNS, SWEEPS = originals("runs"), originals("sweeps")
ORIGINALS = [*RUNS.values(), *SWEEPS.values()]
WORDS = sorted({node[key] for root in ORIGINALS for node, key in locations_in(root) if isinstance(node[key], str)})
QUICK_COUNT, FULL_COUNT, SLOW_COUNT = 10, 2_000, 100
SLOW = ("calculator", "calculator_exact", "reverse", "architecture", "ladder")
"""Files that take longer to read: the quick test leaves them out, and the slow test has fewer mutants of them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a mutant finds the runs and weights that it names."""
    folder = tmp_path_factory.mktemp("mutants")
    for path in (
        *(built_in_specs_folder() / "runs").glob("*.yaml"),
        *(built_in_specs_folder() / "sweeps").glob("*.yaml"),
    ):
        copied = folder / path.parent.name / path.name
        copied.parent.mkdir(exist_ok=True)
        copied.write_text(small(path), encoding="utf-8")
    data = gzip.decompress((resources.files("tfkit") / "data" / "tinyshakespeare.txt.gz").read_bytes()).decode()
    (folder / "data.txt").write_text("".join(sorted(set(data))) + data[:20_000], encoding="utf-8")
    for path in (built_in_specs_folder() / "runs").glob("*.*"):
        if path.suffix != ".yaml":
            shutil.copyfile(path, folder / "runs" / path.name)
    save_file({"weight": torch.zeros(1)}, folder / "runs" / "base")
    return folder


def read(path: Path, *, planned: bool = True) -> None:
    """Read a run or a sweep, and plan it; raises SpecError."""
    if path.parent.name == "sweeps":
        sweep = Sweep(path, WITH_PLUGINS, path.parent / "out")
        if planned:
            sweep.outline()
        return
    run = load_run(path, WITH_PLUGINS, count=flops_of_step)
    if planned:
        run_plan(run)


def check(name: str, numbers: Iterable[int], path: Path, *, planned: bool = True) -> int:
    """Read mutants of a file, and return the number of valid ones. A failure reports the mutant and its text."""
    kind, valid = path.parent.name, 0
    original = (RUNS if kind == "runs" else SWEEPS)[name]
    for number in numbers:
        text = mutant(original, Random(f"{kind} {name} {number}"))
        path.write_text(text, encoding="utf-8")
        try:
            with cheaply():
                read(path, planned=planned)
            valid += 1
        except tfkit.SpecError as error:
            check_refusal(error)
        except BaseException as error:
            error.add_note(f"mutant {number} of {name}:\n{text[:2000]}")
            raise
    return valid


FILES = [(kind, name) for kind, files in (("runs", RUNS), ("sweeps", SWEEPS)) for name in files]


@pytest.mark.parametrize(("kind", "name"), some(FILES, 2))
def test_the_originals_are_valid(kind: str, name: str, folder: Path) -> None:
    """Written as the mutants are, they are read without an error."""
    original = (RUNS if kind == "runs" else SWEEPS)[name]
    path = folder / kind / "original.yaml"
    path.write_text(lines(original), encoding="utf-8")
    read(path)


@pytest.mark.parametrize("kind", ["runs", "sweeps"])
def test_mutants(kind: str, folder: Path) -> None:
    names = [name for of, name in FILES if of == kind and name not in SLOW]
    for index, name in enumerate(names):
        check(name, range(index, QUICK_COUNT, len(names)), folder / kind / "mutant.yaml", planned=False)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), FILES)
def test_many_mutants(kind: str, name: str, folder: Path) -> None:
    """2,000 of each kind in total. Some of them are valid, which reaches the plan."""
    fast_files = [other for of, other in FILES if of == kind and other not in SLOW]
    slow = sum(of == kind for of, _ in FILES) - len(fast_files)
    count = SLOW_COUNT if name in SLOW else -(-(FULL_COUNT - SLOW_COUNT * slow) // len(fast_files))
    assert check(name, range(QUICK_COUNT, QUICK_COUNT + count), folder / kind / "mutant.yaml") >= 3


pytestmark = pytest.mark.filterwarnings("ignore::tfkit.errors.SpecWarning", "ignore::tfkit.errors.FirstLossWarning")
