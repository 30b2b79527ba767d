"""Opens a folder as transformers does, and compares it with the results of a model: it needs torch and transformers.

As a program it reads lines of JSON. The first has the folders in which Python looks for modules. Each further line has
the folder of a model and the file of its `ModelFacts`, and is answered with an error or null. tfkit cannot be imported
there.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from torch import Tensor


class ModelFacts(TypedDict):
    """ModelFacts about a model with which a folder is compared.

    Attributes:
        shapes: of the model's tensors, by their names in the folder.
        auto: the class of transformers that opens the folder.
        tokens: token ids [b, t]; None if the model is too large to run.
        types: their types; None if the model takes none.
        mask: a padding mask for them, with padding on the left and inside.
        logits: the logits of all tokens, and of each sequence without its padding.
        pieces: the number of tokens in each of several calls.
        tolerance: the largest difference where kernels may round differently: with padding, and in cached steps.
        threads: the number of threads in which the model ran: another number rounds sums differently.
    """

    shapes: dict[str, list[int]]
    auto: str
    tokens: "Tensor | None"
    types: "Tensor | None"
    mask: "Tensor"
    logits: "list[Tensor]"
    pieces: list[int]
    tolerance: float
    threads: int


def compared(folder: Path, facts: ModelFacts) -> str | None:
    """Describe an error in a folder; None if its model has the same tensors and computes the same."""
    import torch
    import transformers

    torch.set_num_threads(facts["threads"])
    loaded: Any = getattr(transformers, facts["auto"]).from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True, dtype="auto"
    )
    model, loading = loaded
    model.eval()
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if loading[kind]:
            return f"from_pretrained reports {kind.replace('_', ' ')}: {', '.join(map(str, sorted(loading[kind])[:3]))}"
    tied = model.all_tied_weights_keys
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}
    if shapes != facts["shapes"]:
        names = [name for name in {**shapes, **facts["shapes"]} if shapes.get(name) != facts["shapes"].get(name)]
        return f"it has other tensors: {', '.join(names[:3])}"
    if facts["tokens"] is None:
        return None
    with torch.no_grad():
        return _computed(model, facts) or _saved(model, folder, facts)


def _computed(model: Any, facts: ModelFacts) -> str | None:
    """Describe a difference in what a model computes."""
    import torch

    tokens, mask, types = facts["tokens"], facts["mask"], facts["types"]
    further = {} if types is None else {"token_type_ids": types}
    assert tokens is not None
    for padding, logits in zip((None, mask), facts["logits"], strict=True):
        kind = "tokens" if padding is None else "padded tokens"
        real = torch.ones_like(mask) if padding is None else padding
        output = model(tokens, attention_mask=padding, use_cache=False, **further)
        tolerance = 0.0 if padding is None else facts["tolerance"]
        if error := _difference(output.logits[real], logits[real], tolerance):
            return f"it computes something else for {kind}: {error}"
        cache, start = None, 0
        for count in facts["pieces"]:
            stop = start + count
            attention_mask = None if padding is None else padding[:, :stop]
            output = model(tokens[:, start:stop], attention_mask=attention_mask, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            part = real[:, start:stop]
            if error := _difference(output.logits[part], logits[:, start:stop][part], facts["tolerance"]):
                return f"it computes something else for {kind} that are read in pieces: {error}"
            start = stop
    return None


def _difference(ours: "Tensor", theirs: "Tensor", tolerance: float) -> str | None:
    """Describe the largest difference of two tensors, if it is larger than the tolerance."""
    difference = float((ours - theirs).abs().max()) if ours.numel() else 0.0
    return None if difference <= tolerance else f"a difference of {difference:.2g} where {tolerance:.2g} is allowed"


def _saved(model: Any, folder: Path, facts: ModelFacts) -> str | None:
    """Describe a difference after the model was saved and loaded again."""
    import torch
    import transformers

    with TemporaryDirectory(dir=folder.parent) as copy:
        model.save_pretrained(copy)
        loaded = getattr(transformers, facts["auto"]).from_pretrained(copy, trust_remote_code=True, dtype="auto").eval()
        if not torch.equal(loaded(facts["tokens"]).logits, model(facts["tokens"]).logits):
            return "it computes something else once it was saved and loaded"
    return None


def answer(folder: Path, facts: Path) -> str | None:
    """Describe an error in a folder, or one that it raises; None if there is none."""
    import torch

    try:
        return compared(folder, torch.load(facts, weights_only=True))
    except Exception as cause:
        return f"{type(cause).__name__}: {cause}"


def main() -> None:
    """Answer until there are no further lines."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # text that a file prints is not an answer
    sys.path[:] = json.loads(sys.stdin.readline() or "[]")
    blocked: dict[str, Any] = sys.modules
    blocked["tfkit"] = None
    warnings.simplefilter("ignore")
    from transformers import AutoModelForCausalLM  # noqa: F401 - while the folder is still being written

    for line in sys.stdin:
        print(json.dumps(answer(*map(Path, json.loads(line)))), file=replies, flush=True)


if __name__ == "__main__":
    main()
