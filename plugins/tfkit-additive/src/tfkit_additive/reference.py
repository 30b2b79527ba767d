"""The formula of the paper in NumPy, with which `tfkit check` compares every model that has additive attention."""

from typing import Any

import numpy as np

from tfkit.reference import Part, Scope, multi_head, softmax


def additive(part: Part, x: Any, scope: Scope) -> Any:
    """Project, split into heads and project back as multi-head attention does, with another core."""
    return multi_head(part, x, scope, part.config.n_heads, core)


def core(part: Part, q: Any, k: Any, v: Any, bias: Any, visible: Any) -> Any:
    """Queries [h, q, d], keys and values [h, k, d], biases of scores [h, q, k], visible keys [q, k] -> [q, h, d]."""
    outputs = []
    for head, weight in enumerate(part.weight("core.weight")):
        scores = np.tanh(q[head][:, None] + k[head]) @ weight
        outputs.append(softmax(scores + bias[head], visible) @ v[head])
    return np.stack(outputs, axis=1)
