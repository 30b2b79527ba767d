"""Each guarantee of docs/guarantees.md names a test that exists."""

from __future__ import annotations

import re

from .page import ROOT

ROW = re.compile(r"^\| (?!guarantee|-)(.+) \| (.+) \|$", re.MULTILINE)
TEST = re.compile(r"`((?:tests|plugins)/\S+\.py)::(test_\w+)`")


def test_each_guarantee_has_a_test() -> None:
    rows = ROW.findall((ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8"))
    assert len(rows) >= 30
    for guarantee, cell in rows:
        tests = TEST.findall(cell)
        assert ", ".join(f"`{path}::{name}`" for path, name in tests) == cell, guarantee
        for path, name in tests:
            assert f"\ndef {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{name}"
