"""Evaluate a folder with lm-evaluation-harness, in a process without tfkit, and print its numbers as JSON.

Argument: the folder of the model. The tasks are the files in this folder.
"""

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

blocked: dict[str, Any] = sys.modules
blocked["tfkit"] = None

import lm_eval  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

folder = Path(__file__).parent
os.chdir(folder)  # the harness resolves the paths of rows from the current folder
logging.disable(logging.WARNING)
names = sorted(path.stem for path in folder.glob("*.yaml"))
model = HFLM(pretrained=sys.argv[1], device="cpu", batch_size=3, dtype="float32")
manager = TaskManager(include_path=str(folder), include_defaults=False)
results: Any = lm_eval.simple_evaluate(model=model, tasks=names, task_manager=manager, bootstrap_iters=2)
numbers = {}
for name in names:
    metrics = {key.removesuffix(",none"): value for key, value in results["results"][name].items()}
    metrics.pop("perplexity_stderr", None)  # random numbers decide it
    samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
    numbers[name] = {
        "metrics": {key: metrics[key] for key in sorted(metrics) if isinstance(metrics[key], float)},
        "likelihoods": [float(part[0][0]) for sample in samples for part in sample["resps"]],
        "greedy": [bool(part[0][1]) for sample in samples for part in sample["resps"]],
    }
print(json.dumps(numbers))
