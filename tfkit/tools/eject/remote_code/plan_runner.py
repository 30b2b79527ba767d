"""Opens a folder with transformers in one of two processes, and compares the divided model with the complete model.

It imports only torch and transformers. The program reads lines of JSON. The first line has the search path of Python.
Each further line has the folder of a model and the kind of its plan, `tp`, `pp` or `ep`. The answer is an error or
null. The environment has the number of the process and the address at which the processes meet, as after torchrun.
"""

import json
import os
import sys
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

PROCESSES = 2
TOLERANCE = 1e-4
"""Largest difference, relative to the largest value: sums over processes round differently."""
TIMEOUT = timedelta(minutes=5)
"""Time that a process waits for a process that has failed."""


def plan_error(folder: Path, kind: str) -> str | None:
    """Describe a difference between the divided model and the complete model; None if there is none."""
    import torch
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"trust_remote_code": True, "dtype": torch.float32}
    complete, divided = (AutoModelForCausalLM.from_pretrained(folder, **options).eval() for _ in range(2))
    _divide(divided, kind)
    ids = torch.arange(24).reshape(2, 12) * 5 % complete.config.vocab_size
    with torch.no_grad():
        if kind == "pp":
            return _difference(divided(ids, use_cache=False).logits, complete(ids, use_cache=False).logits)
        if error := _output_error(complete, divided, ids):
            return error
    direction = torch.randn(*ids.shape, complete.config.vocab_size, generator=torch.Generator().manual_seed(0))
    gradients = [_gradients(model, ids, direction) for model in (complete, divided)]
    largest = max(float(gradient.abs().max()) for gradient in gradients[0].values())
    for name, expected in gradients[0].items():
        if error := _difference(gradients[1].get(name), expected, largest):
            return f"the gradient of `{name}` has {error}"
    return None


def _divide(model: Any, kind: str) -> None:
    """Divide a model among the processes, as `from_pretrained(..., distributed_config=...)` does after reading it.

    `from_pretrained` itself also needs accelerate.
    """
    import torch
    from transformers.distributed.configuration_utils import DistributedConfig

    # The ranks of a group of experts also divide the other layers, as `tp` does.
    sizes: dict[str, Any] = (
        {"ep_size": PROCESSES, "tp_size": PROCESSES} if kind == "ep" else {f"{kind}_size": PROCESSES}
    )
    plan = DistributedConfig(**sizes)
    _, _, mesh = model.prepare_distribute_model(plan)
    for name in model.all_tied_weights_keys:  # transformers ties them after it has divided the model
        module, _, leaf = name.rpartition(".")
        owner = model.get_submodule(module)
        setattr(owner, leaf, torch.nn.Parameter(getattr(owner, leaf).detach().clone()))
    model.maybe_distribute_model(model, plan, mesh)
    model.tie_weights()


def _output_error(complete: Any, divided: Any, ids: "Tensor") -> str | None:
    """Describe a difference between the logits, with the first module whose output differs."""
    expected, logits, failure = _recorded(complete, ids)
    if logits is None:
        return failure
    outputs, divided_logits, failure = _recorded(divided, ids)
    error = failure or _difference(divided_logits, logits)
    if error is None:
        return None
    for name, output in outputs.items():
        # Only some outputs are divided. An error in them changes a later output.
        if output.shape == expected[name].shape and (inside := _difference(output, expected[name])) and not failure:
            return f"the product with `{name}.weight` has {inside}"
    return failure or f"the logits have {error}"


def _recorded(model: Any, ids: "Tensor") -> "tuple[dict[str, Tensor], Tensor | None, str | None]":
    """Return the outputs of the linear layers and tables in the order of their calls, the logits, and an error."""
    import torch

    outputs: dict[str, Tensor] = {}
    running: list[str] = []

    def enter(name: str, *_: Any) -> None:
        running.append(name)

    def leave(name: str, module: Any, args: Any, output: Any) -> None:
        running.remove(name)
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            outputs[name] = output

    handles = []
    for name, module in model.named_modules():
        handles += [module.register_forward_pre_hook(partial(enter, name))]
        handles += [module.register_forward_hook(partial(leave, name))]
    try:
        logits = model(ids, use_cache=False).logits
    except Exception as cause:
        product = hasattr(model.get_submodule(running[-1]), "weight")
        weight = f"`{running[-1]}.weight`" if product else f"the product with `{list(outputs)[-1]}.weight`"
        return outputs, None, f"{weight} cannot be used: {type(cause).__name__}: {cause}"
    finally:
        for handle in handles:
            handle.remove()
    return outputs, logits, None


def _gradients(model: Any, ids: "Tensor", direction: "Tensor") -> "dict[str, Tensor]":
    """Return the complete gradients of a weighted sum of the logits, by parameter."""
    (model(ids, use_cache=False).logits * direction).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in gradients.items()}


def _difference(ours: "Tensor | None", theirs: "Tensor", largest: float = 0.0) -> str | None:
    """Describe the difference of two tensors, if it is larger than the tolerance."""
    if ours is None or ours.shape != theirs.shape:
        return f"the shape {None if ours is None else list(ours.shape)} in place of {list(theirs.shape)}"
    difference = float((ours - theirs).abs().max())
    allowed = TOLERANCE * max(float(theirs.abs().max()), 0.01 * largest)
    return None if difference <= allowed else f"a difference of {difference:.2g} where {allowed:.2g} is allowed"


def main() -> None:
    """Answer each line of standard input."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the folder's code may print
    # If the caller has opened folders with code, its path has the modules of those folders, under the same package.
    sys.path[:] = [os.environ["HF_MODULES_CACHE"], *json.loads(sys.stdin.readline() or "[]")]
    blocked: dict[str, Any] = sys.modules
    blocked["tfkit"] = None
    warnings.simplefilter("ignore")
    import torch
    from transformers import AutoModelForCausalLM  # noqa: F401 - while the folder is still being written

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=TIMEOUT)
    for line in sys.stdin:
        folder, kind = json.loads(line)
        try:
            error = plan_error(Path(folder), kind)
        except Exception as cause:
            error = f"{type(cause).__name__}: {cause}"
        print(json.dumps(error), file=replies, flush=True)


if __name__ == "__main__":
    main()
