"""The command `components`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated

import pytest
from pydantic import Field

from tfkit.tools.components.component_docs import _annotation_text

Golden = Callable[[str, str], None]
pytestmark = pytest.mark.usefixtures("specs")


def test_the_type_of_a_field_has_all_of_its_bounds() -> None:
    bounded = Annotated[int, Field(gt=2), Field(lt=7)]
    for annotation, text in {
        bounded: "int > 2, < 7",
        list[bounded]: "list of int > 2, < 7",
        dict[str, bounded]: "mapping of int > 2, < 7",
    }.items():
        assert _annotation_text(annotation, False) == text


def test_components(run: Callable[..., str], golden: Golden) -> None:
    texts = [run("components"), run("components", "attention"), run("components", "attention", "gqa")]
    golden("cli/components", "\n".join(texts))
    golden("cli/components_unknown", run("components", "atention", status=1, stderr=True))
    golden("cli/components_kind", run("components", "rope", status=1, stderr=True))
    (report,) = json.loads(run("components", "attention", "gqa", "--json"))
    assert [field["name"] for field in report["fields"] if field["required"]] == ["d_model", "n_heads", "n_kv_heads"]
