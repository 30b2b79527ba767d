"""Specs and the tensors of published folders: `tests/published/index` has the names in the index of a folder.

`{0-3}` stands for the numbers of layers, `[q k]` for each of these words, as `tools/published_index.py` writes them. An
index has no shapes, but the size of all tensors together, in the dtype of the folder. `left_out` has the bytes of the
tensors that the spec does not read. A fine-tune may have another `vocab_size`. Whether a folder is a copy or
a fine-tune is known from its name and config.json only, since its weights were not read.
"""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import tfkit
from tfkit.checkpoint.links import published_map
from tfkit.checkpoint.tensor_names import name_matcher
from tfkit.spec.families import expanded_names

from .. import known
from ..sampling import chosen

FOLDER = Path(__file__).parents[1] / "published/index"
TOOL = Path(__file__).parents[2] / "tools/published_index.py"
INDEXES: dict[str, dict[str, Any]] = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.yaml"))
}


def tensor_names(entry: str) -> Iterator[str]:
    """Yield the names for which an entry of an index stands."""
    match = re.search(r"\{(\d+)-(\d+)\}", entry)
    if not match:
        yield from expanded_names(entry)
        return
    for number in range(int(match[1]), int(match[2]) + 1):
        yield from tensor_names(entry.replace(match[0], str(number), 1))


@pytest.mark.parametrize("name", chosen(INDEXES, {"llama32_3b", "llama_7b", "pythia_12b"}))
def test_a_spec_reads_all_tensors_of_its_folder(name: str) -> None:
    index = INDEXES[name]
    names = [tensor for entry in index["tensors"] for tensor in tensor_names(entry)]
    sets = {"vocab_size": index["vocab_size"]} if "vocab_size" in index else {}
    model = tfkit.build(name, sets=sets, device="meta")
    weights = published_map(model, model.meta["graph"].spec.family).for_names(names)
    read = [tensor for link in weights.links for tensor in link.file]
    left_out: dict[str, int] = index.get("left_out", {})
    unread = [tensor for tensor in names if name_matcher(left_out).fullmatch(tensor)]
    assert sorted([*read, *unread]) == sorted(names)
    assert all(map(name_matcher(weights.unread).fullmatch, unread))
    size = sum(parameter.numel() for parameter in model.parameters()) * getattr(torch, index["dtype"]).itemsize
    assert index["total_size"] in (None, size + sum(left_out.values()))
    assert index["source"]


@pytest.mark.parametrize("name", ["interleaved", *chosen(INDEXES, {"llama_7b"})])
def test_the_short_form_stands_for_all_names(name: str) -> None:
    layers = [f"h.{layer}.{'norm' if layer % 3 else 'gate.1'}.weight" for layer in range(12)]
    entries = INDEXES[name]["tensors"] if name in INDEXES else [*layers, "h.3.bias", "head"]
    names = [tensor for entry in entries for tensor in tensor_names(entry)]
    form = runpy.run_path(str(TOOL))["short_form"](names)
    assert sorted(tensor for entry in form for tensor in tensor_names(entry)) == sorted(names)
    assert len(form) <= 18


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
