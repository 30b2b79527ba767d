"""Opens a folder with transformers, and compares its results with a model's. It imports only torch and transformers.

The program reads lines of JSON. The first line has the search path of Python. Each further line has the folder of a
model and the file of its `ModelFacts`; the answer is an error or null. tfkit cannot be imported in this process.
"""

import importlib.util
import inspect
import json
import math
import os
import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


DEVIATIONS = 6
"""Largest difference of two means of random weights, in standard deviations. The seeds are constant."""


class ModelFacts(TypedDict):
    """Tensors and results of a model, with which a folder is compared.

    Attributes:
        shapes: of the model's tensors, by their names in the folder.
        initial: the `sample_moments` of the tensors of a new model, by the same names, with variance 0 for tensors that
            do not depend on the seed; empty if the model is too large.
        auto: the class of transformers that opens the folder.
        inputs: the inputs by their names in transformers.
        masks: padding masks, with padding on the left and inside, by the same names.
        outputs: the results for the inputs, by their names; empty if the model is too large to run.
        padded: the results with the padding masks; NaN is not compared. Empty if no input can be padded.
        steps: the name of the input that is decoded token by token.
        step_lengths: the number of tokens in each of several calls; one call if results depend on the length of a row.
        tolerance: the largest difference where kernels may round differently: with padding, and in cached steps.
        stateful: whether the caches have states of recurrences, which several sequences in a row would mix.
        exact: whether results without padding are equal bit for bit. Separate projections round differently.
        threads: the number of threads of the model's run, on which the rounding of sums depends.
    """

    shapes: dict[str, list[int]]
    initial: dict[str, list[float]]
    auto: str
    inputs: "dict[str, Tensor]"
    masks: "dict[str, Tensor]"
    outputs: "dict[str, Tensor]"
    padded: "dict[str, Tensor]"
    steps: str
    step_lengths: list[int]
    tolerance: float
    stateful: bool
    exact: bool
    threads: int


def comparison_error(folder: Path, facts: ModelFacts) -> str | None:
    """Describe an error in a folder; None if its tensors and results equal the model's."""
    import torch
    import transformers

    torch.set_num_threads(facts["threads"])
    if facts["initial"] and (error := _initialization_error(folder, facts)):
        return error
    loaded: Any = getattr(transformers, facts["auto"]).from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True, dtype="auto"
    )
    model, loading = loaded
    _align_weights(model)
    model.eval()
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if loading[kind]:
            return f"from_pretrained reports {kind.replace('_', ' ')}: {', '.join(map(str, sorted(loading[kind])[:3]))}"
    tied = model.all_tied_weights_keys
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}
    if shapes != facts["shapes"]:
        names = [name for name in {**shapes, **facts["shapes"]} if shapes.get(name) != facts["shapes"].get(name)]
        return f"its tensors differ: {', '.join(names[:3])}"
    with torch.no_grad():
        return (
            (
                _output_error(model, facts)
                or _packed_row_error(model, facts)
                or _eager_attention_error(model, facts)
                or _reload_error(model, folder, facts)
                or _pipeline_error(model, folder, facts)
            )
            if facts["outputs"]
            else None
        )


def sample_moments(tensor: "Tensor") -> list[float]:
    """Return the mean of the values and of their squares, each followed by the variance of this mean."""
    values = tensor.detach().double().flatten()
    return [
        float(part) for power in (values, values**2) for part in (power.mean(), power.var(correction=0) / len(power))
    ]


def _initialization_error(folder: Path, facts: ModelFacts) -> str | None:
    """Describe a weight of a new model that has a different distribution than tfkit's."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = getattr(transformers, facts["auto"]).from_config(config, trust_remote_code=True)
    return distribution_error(model.state_dict(), facts["initial"])


def distribution_error(state: "Mapping[str, Tensor]", initial: dict[str, list[float]]) -> str | None:
    """Describe the first tensor whose moments differ from `initial` by more than chance; None if there is none."""
    for name, (mean, mean_variance, square, square_variance) in initial.items():
        ours = sample_moments(state[name])
        pairs = (ours[:2], (mean, mean_variance)), (ours[2:], (square, square_variance))
        if not all(_is_close(*pair) for pair in pairs):
            texts = [f"mean {a:.3g} and root mean square {b**0.5:.3g}" for a, b in ((ours[0], ours[2]), (mean, square))]
            return f"in a new model, `{name}` has {texts[0]}; tfkit's has {texts[1]}"
    return None


def _is_close(ours: list[float], theirs: tuple[float, float]) -> bool:
    """Return True if two means with their variances may differ by chance; False for NaN."""
    if theirs[1] == 0:
        return math.isclose(ours[0], theirs[0], rel_tol=1e-9)
    return abs(ours[0] - theirs[0]) <= DEVIATIONS * (ours[1] + theirs[1]) ** 0.5


def _align_weights(model: Any) -> None:
    """Copy the weights to aligned memory, because the address of a mapped file affects the rounding of sums."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def _output_error(model: Any, facts: ModelFacts) -> str | None:
    """Describe a difference between the results."""
    import transformers

    inputs = facts["inputs"]
    no_cache = {"use_cache": False} if facts["step_lengths"] else {}
    for kind, masks, outputs in (("inputs", {}, facts["outputs"]), ("padded inputs", facts["masks"], facts["padded"])):
        if not outputs:
            continue
        result = model(**inputs, **masks, **no_cache)
        for name, expected in outputs.items():
            tolerance = 0.0 if facts["exact"] and not masks else facts["tolerance"]
            if error := _difference_text(result[name], expected, tolerance):
                return f"its results differ for {kind}: {error}"
        caches: list[Any] = [None] * (facts["step_lengths"] != [])
        if model._can_compile_fullgraph:  # it takes static caches
            caches.append(transformers.StaticCache(model.config, max_cache_len=sum(facts["step_lengths"]) + 3))
        for cache in caches:
            if error := _cached_steps_error(model, facts, masks, outputs["logits"], cache):
                return f"its results differ for {kind} in several cached steps: {error}"
    return None


def _cached_steps_error(
    model: Any, facts: ModelFacts, masks: "dict[str, Tensor]", logits: "Tensor", cache: Any
) -> str | None:
    """Describe a difference between the logits of several calls, with a cache, and the expected logits."""
    inputs, steps, start = facts["inputs"], facts["steps"], 0
    for count in facts["step_lengths"]:
        stop = start + count
        piece = inputs | {steps: inputs[steps][:, start:stop]}
        mask_of_steps = steps.replace("input_ids", "attention_mask")
        piece_masks = {name: mask[:, :stop] if name == mask_of_steps else mask for name, mask in masks.items()}
        result = model(**piece, **piece_masks, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        if error := _difference_text(result.logits, logits[:, start:stop], facts["tolerance"]):
            return error
        start = stop
    return None


def _packed_row_error(model: Any, facts: ModelFacts) -> str | None:
    """Describe a difference between a row of two sequences, whose positions begin at 0, and the sequences alone."""
    import torch

    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    if not takes_positions or facts["stateful"] or len(facts["step_lengths"]) == 1:
        return None
    rows, logits = facts["inputs"][facts["steps"]], facts["outputs"]["logits"]
    lengths = [rows.shape[1] - rows.shape[1] // 3, rows.shape[1] // 3]
    row, expected = (
        torch.cat([values[index, :length] for index, length in enumerate(lengths)])[None] for values in (rows, logits)
    )
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    error = _difference_text(model(row, position_ids=positions).logits, expected, facts["tolerance"])
    return error and f"its results differ for a row of two sequences: {error}"


def _eager_attention_error(model: Any, facts: ModelFacts) -> str | None:
    """Describe a difference with `attn_implementation="eager"`."""
    if "ALL_ATTENTION_FUNCTIONS" not in vars(sys.modules[type(model).__module__]):  # no layer has a choice
        return None
    model.set_attn_implementation("eager")
    result = model(**facts["inputs"])
    model.set_attn_implementation("sdpa")
    errors = (_difference_text(result[name], facts["outputs"][name], facts["tolerance"]) for name in facts["outputs"])
    error = next(filter(None, errors), None)
    return error and f"its results differ with eager attention: {error}"


def _difference_text(ours: "Tensor", theirs: "Tensor", tolerance: float) -> str | None:
    """Describe the largest difference of two tensors, if it is larger than the tolerance."""
    import torch

    difference = float(torch.where(theirs.isnan(), 0, ours - theirs).abs().max()) if ours.numel() else 0.0
    return None if difference <= tolerance else f"a difference of {difference:.2g} where {tolerance:.2g} is allowed"


def _reload_error(model: Any, folder: Path, facts: ModelFacts) -> str | None:
    """Describe a difference after saving and loading the model."""
    import torch
    import transformers

    with TemporaryDirectory(dir=folder.parent) as copy:
        model.save_pretrained(copy)
        loaded = getattr(transformers, facts["auto"]).from_pretrained(copy, trust_remote_code=True, dtype="auto").eval()
        _align_weights(loaded)
        results = loaded(**facts["inputs"]), model(**facts["inputs"])
        if not all(torch.equal(results[0][name], results[1][name]) for name in facts["outputs"]):
            return "its results differ after it is saved and loaded"
    return None


def _pipeline_error(model: Any, folder: Path, facts: ModelFacts) -> str | None:
    """Describe a difference between the scores of a random image by `pipeline`, and by the model."""
    import torch

    is_complete = facts["auto"] == "AutoModelForImageClassification" and (folder / "preprocessor_config.json").is_file()
    has_classes = is_complete and facts["outputs"]["logits"].dim() == 2
    if not has_classes or importlib.util.find_spec("PIL") is None:
        return None
    from PIL import Image
    from transformers import pipeline

    rows, columns = facts["inputs"]["pixel_values"].shape[2:]
    image = Image.effect_noise((columns, rows), 64).convert("RGB")
    classify: Any = pipeline("image-classification", str(folder), trust_remote_code=True)
    results = classify(image, function_to_apply="none", top_k=model.config.num_labels)
    scores = {result["label"]: result["score"] for result in results}
    logits = model(**classify.image_processor(image, return_tensors="pt").to(model.dtype)).logits[0]
    ours = torch.tensor([scores.get(model.config.id2label[index], math.inf) for index in range(len(logits))])
    error = _difference_text(ours, logits.float(), facts["tolerance"])
    return error and f"its results differ in a pipeline: {error}"


def folder_error(folder: Path, facts: Path) -> str | None:
    """Describe an error in a folder, or an exception that it raises; None if there is none."""
    import torch

    try:
        return comparison_error(folder, torch.load(facts, weights_only=True))
    except Exception as cause:
        return f"{type(cause).__name__}: {cause}"


def main() -> None:
    """Answer each line of standard input."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the folder's code may print
    # If the caller has opened folders with code, its path has the modules of those folders, under the same package.
    sys.path[:] = [os.environ["HF_MODULES_CACHE"], *json.loads(sys.stdin.readline() or "[]")]
    blocked: dict[str, Any] = sys.modules
    blocked["tfkit"] = None
    warnings.simplefilter("ignore")
    from transformers import AutoModelForCausalLM  # noqa: F401 - while the folder is still being written

    for line in sys.stdin:
        print(json.dumps(folder_error(*map(Path, json.loads(line)))), file=replies, flush=True)


if __name__ == "__main__":
    main()
