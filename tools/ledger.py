"""Record the results of tests."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
LEDGER = ROOT / "out" / "ledger.jsonl"


def known_seconds() -> dict[str, float]:
    """Return the seconds of each test in its latest run."""
    if not LEDGER.exists():
        return {}
    entries = map(json.loads, LEDGER.read_text(encoding="utf-8").splitlines())
    return {entry["test"]: entry["seconds"] for entry in entries}
