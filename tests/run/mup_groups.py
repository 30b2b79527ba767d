"""Writes `mup_groups.json`: factors of rate and decay of every weight in the specs of `scaled_specs`, by `mup` 1.0.0.

    pip install --no-deps --target mup_package mup==1.0.0
    PYTHONPATH=mup_package:. python tests/run/mup_groups.py

https://github.com/microsoft/mup. Weights whose factors are 1 are omitted. `mup` demands equal names, so depth is equal.
"""

from __future__ import annotations

import json
from pathlib import Path

import tfkit
from tests.run.scaled_specs import SPECS

FILE = Path(__file__).with_suffix(".json")
RATE, DECAY = 1.0, 0.5


def mup_factors(name: str) -> dict[str, list[float]]:
    """Return the factors of rate and decay in the groups of `mup.MuAdamW`, for a spec."""
    import mup
    from mup.shape import apply_infshapes, zip_infshapes

    _, base, graph = SPECS[name].graphs()
    model, small = (tfkit.build(sized, device="meta") for sized in (graph, base))
    apply_infshapes(model, zip_infshapes(small, model))
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = mup.MuAdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    return {
        names[parameter]: [group["lr"] / RATE, group["weight_decay"] / DECAY]
        for group in optimizer.param_groups
        for parameter in group["params"]
        if group["lr"] != RATE
    }


if __name__ == "__main__":
    groups = {name: dict(sorted(mup_factors(name).items())) for name in SPECS}
    FILE.write_text(json.dumps({"package": "mup", "version": "1.0.0", "groups": groups}, indent=1) + "\n")
