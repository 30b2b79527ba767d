"""Loads ejected files, and, run as a program, compares them with the results of a model: it needs only torch.

The program reads lines of JSON, and answers each. The first line has the search path of Python; each further line names
a folder with `model.py` and `given.pt`, see `ExpectedResults`. tfkit cannot be imported in this process.
"""

import inspect
import json
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from torch import Tensor, nn

FILE = "<ejected>"
CODE, INPUTS = "model.py", "given.pt"


class ExpectedResults(TypedDict):
    """Tensors and results of a model, with which a file is compared.

    Attributes:
        shapes: the names and shapes in the model's state dict, in order.
        frozen: the names of the frozen parameters.
        state: its tensors; None if the model is too large to run.
        cases: for each call a name for the inputs, the inputs, and all that the model returns for them.
        threads: the number of threads of the model's run, on which the rounding of sums depends.
    """

    shapes: list[tuple[str, list[int]]]
    frozen: list[str]
    state: "dict[str, Tensor] | None"
    cases: "list[tuple[str, dict[str, Tensor], list[Tensor]]]"
    threads: int


@contextmanager
def loaded_module(text: str) -> Iterator[ModuleType]:
    """Load the file as a module in `sys.modules`, which dataclasses require."""
    module = ModuleType(FILE)
    sys.modules[FILE] = module
    try:
        exec(compile(text, FILE, "exec", dont_inherit=True), module.__dict__)
        yield module
    finally:
        del sys.modules[FILE]


def build_model(module: ModuleType) -> "nn.Module":
    """Build the model of an ejected file: its last class, with the defaults of its `Config`."""
    *_, root = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == FILE]
    takes_config = "config" in inspect.signature(root).parameters
    model: nn.Module = root(module.Config()) if takes_config else root()
    return model


def evaluate_annotations(module: ModuleType) -> None:
    """Evaluate the annotations of an ejected file, which must also run with a Python older than 3.14, which does so."""
    kinds = (type, FunctionType)
    for value in [value for value in vars(module).values() if isinstance(value, kinds) and value.__module__ == FILE]:
        for member in (value, *vars(value).values()):
            if isinstance(member, kinds):
                inspect.get_annotations(member)


def comparison_error(text: str, facts: ExpectedResults) -> str | None:
    """Describe an error in a file; None if its tensors and results equal the model's bit by bit."""
    import torch

    torch.set_num_threads(facts["threads"])
    with loaded_module(text) as module:
        evaluate_annotations(module)
        with torch.device("meta"):
            model = build_model(module).eval()
        ours = dict(facts["shapes"])
        theirs = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
        if list(theirs.items()) != list(ours.items()):
            names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
            return f"it has other tensors: {', '.join(names[:3]) or 'their order'}"
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        if frozen != facts["frozen"]:
            return (
                f"it trains different parameters: it freezes {frozen or 'none'} instead of {facts['frozen'] or 'none'}"
            )
        if facts["state"] is not None:
            if any(name not in ours for name, _ in model.named_buffers()):  # files do not have their values
                model = build_model(module).eval()
            model.load_state_dict(facts["state"], assign=True)
        for words, inputs, outputs in facts["cases"]:
            with torch.no_grad():
                result = model(**inputs)
            if not all(map(torch.equal, outputs, [result] if isinstance(result, torch.Tensor) else result)):
                return f"it computes something else for {words} tokens"
    return None


def folder_error(folder: Path) -> str | None:
    """Describe an error in the file of a folder, or an exception that it raises; None if there is none."""
    import torch

    try:
        runpy.run_path(str(folder / CODE), run_name="__main__")  # as `python model.py` does
        facts = torch.load(folder / INPUTS, mmap=True, weights_only=True)
        return comparison_error((folder / CODE).read_text(encoding="utf-8"), facts)
    except Exception as cause:
        return f"{type(cause).__name__}: {cause}"


def main() -> None:
    """Answer each line of standard input."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # text that a file prints is not an answer
    sys.path[:] = json.loads(sys.stdin.readline() or "[]")
    blocked: dict[str, Any] = sys.modules
    blocked["tfkit"] = None
    import torch  # noqa: F401 - while the file is still being written

    for line in sys.stdin:
        print(json.dumps(folder_error(Path(json.loads(line)))), file=replies, flush=True)


if __name__ == "__main__":
    main()
