"""The command `components`."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

Golden = Callable[[str, str], None]
pytestmark = pytest.mark.usefixtures("specs")


def test_components(run: Callable[..., str], golden: Golden) -> None:
    texts = [run("components"), run("components", "attention"), run("components", "attention", "gqa")]
    golden("cli/components", "\n".join(texts))
    golden("cli/components_unknown", run("components", "atention", status=1, stderr=True))
    golden("cli/components_kind", run("components", "rope", status=1, stderr=True))
    (report,) = json.loads(run("components", "attention", "gqa", "--json"))
    assert [field["name"] for field in report["fields"] if field["required"]] == ["d_model", "n_heads", "n_kv_heads"]
