"""Specs and the tensors of published folders: `tests/published/index` has the names in the index of a folder.

`{0-3}` stands for the numbers of layers, `[q k]` for each of these words. An index has no shapes, but the size of all
tensors together, in the dtype of the folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import tfkit
from tfkit.checkpoint.links import published_map
from tfkit.spec.families import expanded_names

from .. import known
from ..sampling import chosen

FOLDER = Path(__file__).parents[1] / "published/index"
INDEXES: dict[str, dict[str, Any]] = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.yaml"))
}


def tensor_names(entry: str) -> Iterator[str]:
    """Yield the names for which an entry of an index stands."""
    match = re.search(r"\{(\d+)-(\d+)\}", entry)
    numbers = range(int(match[1]), int(match[2]) + 1) if match else [0]
    for number in numbers:
        yield from expanded_names(entry.replace(match[0], str(number)) if match else entry)


@pytest.mark.parametrize("name", chosen(INDEXES, {"llama32_3b"}))
def test_a_spec_reads_all_tensors_of_its_folder(name: str) -> None:
    index = INDEXES[name]
    names = [tensor for entry in index["tensors"] for tensor in tensor_names(entry)]
    model = tfkit.build(name, device="meta")
    links = published_map(model, model.meta["graph"].spec.family).for_names(names).links
    assert sorted(tensor for link in links for tensor in link.file) == sorted(names)
    size = sum(parameter.numel() for parameter in model.parameters()) * getattr(torch, index["dtype"]).itemsize
    assert index["total_size"] in (None, size)
    assert index["source"]


@pytest.mark.slow
@pytest.mark.usefixtures("specs")
def test_the_list_has_each_spec_with_a_family(run: Callable[..., str]) -> None:
    entries = json.loads(run("list", "--published", "--json"))
    assert {entry["spec"] for entry in entries if entry["compared"]} == INDEXES.keys()
    assert {entry["spec"] for entry in entries} <= {*known.NAMES}
    assert sum(entry["folder"] is not None for entry in entries) > 350
    table = run("list", "--published", "granite_3_1b")
    assert re.search(r"granite_3_1b_a400m +ibm-granite/granite-3.1-1b-a400m-instruct +tensors", table)
    assert table.endswith("1 of 1 folders are known\n")
