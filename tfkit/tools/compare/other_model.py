"""The second model of a comparison: from a spec, from transformers, or a program that torch wrote.

Modules of two implementations correspond if they hold the same tensors.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from tfkit.arguments import AnyPath
from tfkit.building.builder import graph_of
from tfkit.building.edits import MeasuredModel
from tfkit.checkpoint.links import published_map
from tfkit.checkpoint.tensor_names import enclosing_modules
from tfkit.checkpoint.weight_map import Link
from tfkit.errors import Diagnostic, SpecError, listing, quoted
from tfkit.graph.expand import Graph
from tfkit.nn import Rearrange
from tfkit.spec.folder import CONFIG, MAX_CONFIG
from tfkit.spec.header import quoted_path, read_object
from tfkit.spec.weight_files import read_headers
from tfkit.tools.common.loading_weights import build_with_weights


def matching_modules(model: nn.Module, links: tuple[Link, ...], theirs: Mapping[str, bool]) -> dict[str, str]:
    """Return the paths of another model's modules, by the paths of the matching modules of `model`.

    Modules match if `links` maps their tensors to each other. `theirs` has all paths of the other model; its values are
    True for a module without children.
    """
    modules_with: dict[str, set[str]] = {}
    owners: dict[str, set[str]] = {}
    for link in links:
        files = {name.rpartition(".")[0] for name in link.file}
        for path in {path for name in link.model for path in enclosing_modules(name)}:
            modules_with.setdefault(path, set()).update(files)
        for name in link.file:
            for path in enclosing_modules(name):
                owners.setdefault(path, set()).add(name.rpartition(".")[0])
    matches: dict[str, str] = {}
    for path, _ in model.named_modules():
        files_inside = modules_with.get(path, set())
        common = _common_module(files_inside)
        # Of modules with equal tensors, the outermost matches a container, and the innermost a module without children.
        if (
            files_inside
            and common in theirs
            and owners.get(common) == files_inside
            and (theirs[common] or common not in matches)
        ):
            matches[common] = path
    return {path: common for common, path in matches.items()}


def _common_module(paths: set[str]) -> str:
    """Return the deepest module that holds all of these."""
    split = [path.split(".") for path in paths]
    parts = []
    for words in zip(*split, strict=False):
        if len(set(words)) > 1:
            break
        parts.append(words[0])
    return ".".join(parts)


NAMES = {
    "tokens": "input_ids",
    "source": "input_ids",
    "target": "decoder_input_ids",
    "token_types": "token_type_ids",
    "task_types": "task_type_ids",
    "image": "pixel_values",
    "images": "pixel_values",
    "mel": "input_features",
    "sounds": "input_features",
    "spectrogram": "input_values",
    "waveform": "input_values",
}
"""Inputs as transformers calls them."""
BY_ROW = "pixel_attention_mask"
"""An input of the classes that take the images of each row; others take the images of all rows in a single axis."""
SIZES, GRIDS = "image_sizes", "image_grid_thw"
"""Inputs of the classes that take images of several sizes: pixels with padding, or the patches of all images."""
PIXTRAL = "pixtral"
"""The only tower that takes `image_sizes`. Classes with another tower pass them on, and fail."""
CHANNELS_FIRST = {"input_features"}
"""Inputs of transformers with positions in the last axis."""


MAX_SHAPES = 8
"""Maximum number of tensors that an error lists."""


class ShapeError(SpecError):
    """Raised if tensors of a folder do not have the shapes of the class that the folder names."""


@dataclass(frozen=True)
class Other:
    """The model that is compared with A: a function to run it, and the names of A's modules in it."""

    run: Callable[[Mapping[str, Tensor]], Any]
    model: nn.Module | None
    names: Mapping[str, str]
    alone: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())


def other_model(
    model: fx.GraphModule,
    b: MeasuredModel | Path,
    weights: AnyPath | None,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int,
) -> Other:
    """Prepare B to run: with `weights` if it is a spec, with its stored weights otherwise."""
    if isinstance(b, MeasuredModel):
        second = build_with_weights(b, weights, device=device, dtype=dtype, seed=seed, allow_change=True).eval()
        ours, theirs = ([name for name, _ in network.named_modules()] for network in (model, second))
        alone = _outermost_modules(ours, theirs), _outermost_modules(theirs, ours)
        return Other(lambda inputs: second(**inputs), second, {n: n for n in ours if n in theirs}, alone)
    if os.path.isdir(b):
        return _transformers_model(model, b, device, dtype)
    return Other(_load_program(b, device), None, {})


def _outermost_modules(names: list[str], other_names: list[str]) -> tuple[str, ...]:
    """Return the outermost modules that the other model lacks."""
    shared = set(other_names)
    return tuple(name for name in names if name not in shared and name.rpartition(".")[0] in shared)


def _transformers_model(model: fx.GraphModule, folder: Path, device: torch.device | str, dtype: torch.dtype) -> Other:
    """Load a transformers model, and match its modules by the weight map of its family."""
    graph = graph_of(model)
    family = graph.spec.family
    if family is None:
        message = f"{quoted(graph.name)} has no `checkpoint`, which would name its modules in transformers"
        raise SpecError(Diagnostic(message, None, "checkpoint", help="write it as specs/README.md shows"))
    if not os.path.isfile(folder / CONFIG):
        raise SpecError(Diagnostic(f"{quoted(str(folder))} has no {CONFIG}: it is not a transformers model"))
    architecture = _architecture_name(folder / CONFIG) or family.architecture
    architecture = family.aliases.get(architecture, architecture)
    theirs = _loaded_model(folder, architecture, dtype).to(device).eval()
    theirs.config.use_cache = False
    modules = {path: not list(module.children()) for path, module in theirs.named_modules()}
    links = published_map(model, family).for_names(theirs.state_dict()).links
    if getattr(theirs.config, "pad_token_id", None) is None:
        theirs.config.pad_token_id = -1  # without it, a classifier of transformers rejects several sequences
    parameters = inspect.signature(theirs.forward).parameters

    def run(inputs: Mapping[str, Tensor]) -> Any:
        return _first_output(theirs(**_renamed_inputs(inputs, parameters, graph, theirs.config)))

    return Other(run, theirs, matching_modules(model, links, modules))


def _loaded_model(folder: Path, architecture: str, dtype: torch.dtype) -> Any:
    """Load the model of a folder by its class in transformers."""
    read_headers(folder)  # explains what is wrong with a file, and rejects pickles
    try:
        import transformers
    except ImportError:
        message = "transformers must be installed to run one of its models"
        raise SpecError(Diagnostic(message, help='pip install "tfkit[transformers]"')) from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    cls: Any = getattr(transformers, architecture, None)
    is_model = isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)
    if not is_model:
        # An Auto class could run code that is in the folder.
        message = f"transformers has no model {quoted(architecture)}"
        raise SpecError(Diagnostic(message, help="install a version that has it"))
    # The default kernels of mixtures need widths that are multiples of 16 bytes.
    eager: Any = {"attn_implementation": "eager", "experts_implementation": "eager"}
    reading: Any = {"use_safetensors": True, "ignore_mismatched_sizes": True, "output_loading_info": True}
    try:
        theirs, loaded = cls.from_pretrained(folder, **eager, dtype=dtype, **reading)
    except Exception as error:
        message = f"transformers cannot load {quoted_path(folder)}"
        raise SpecError(Diagnostic(message, notes=(_error_summary(error),))) from error
    if loaded["mismatched_keys"]:
        misfits = sorted(loaded["mismatched_keys"])
        shapes = [f"{name}: {[*shape]}; expected {[*expected]}" for name, shape, expected in misfits[:MAX_SHAPES]]
        message = f"tensors of {quoted_path(folder)} do not have the shapes of {architecture}"
        raise ShapeError(Diagnostic(message, notes=tuple(shapes)))
    return theirs


def _architecture_name(config: Path) -> str | None:
    """Return the first of the `architectures` of a config.json; None if it has none."""
    names = read_object(config, max_bytes=MAX_CONFIG).get("architectures") or [None]
    if not isinstance(names, list) or not isinstance(names[0], str | None):
        message = f"`architectures` in {quoted_path(config)} must be a list of names; got {quoted(str(names))}"
        raise SpecError(
            Diagnostic(message, help='write the class of the model: `"architectures": ["GPT2LMHeadModel"]`')
        )
    return names[0]


def _error_summary(error: Exception) -> str:
    first_line, _, _ = str(error).strip().partition("\n")
    return f"{type(error).__name__}: {first_line}"


def _first_output(result: Any) -> Any:
    """Return the first output of a transformers model: logits, or the last hidden state if it has no head.

    The logits of the start and the end of an answer are concatenated.
    """
    if hasattr(result, "start_logits"):
        return torch.stack([result.start_logits, result.end_logits], dim=-1)
    return result.logits if hasattr(result, "logits") else result[0]


def _renamed_inputs(
    inputs: Mapping[str, Tensor], parameters: Collection[str], graph: Graph, fields: Any
) -> dict[str, Tensor]:
    """Return our inputs under their names in transformers. Its classes accept any name, and ignore unknown names."""
    renamed = {NAMES.get(name, name): value for name, value in inputs.items()}
    if "images" in inputs and BY_ROW not in parameters:
        renamed["pixel_values"] = images = inputs["images"].flatten(0, 1)
        if SIZES in parameters and fields.vision_config.model_type == PIXTRAL:
            renamed[SIZES] = torch.tensor([[*images.shape[2:]]] * len(images), device=images.device)
        if GRIDS in parameters:
            renamed["pixel_values"], renamed[GRIDS] = _patches(images, fields.vision_config)
            renamed["mm_token_type_ids"] = (inputs["tokens"] == fields.image_token_id).int()
    if "sounds" in inputs:  # spectrograms, with the frames in the last axis
        renamed["input_features"] = inputs["sounds"].flatten(0, 2).transpose(1, 2)
    if "spectrogram" in inputs:
        renamed["input_values"] = inputs["spectrogram"][:, 0].transpose(1, 2)
    if "waveform" in inputs:
        renamed["input_values"] = inputs["waveform"][:, :, 0]
    blocks = [node.stack.blocks for node in graph.nodes if node.stack is not None and node.stack.blocks is not None]
    for token in (token for name in blocks for token in graph.node(name).config.placeholders().values()):
        renamed["token_type_ids"] = (inputs["tokens"] == token).long()
    if "prefix" in inputs:  # the type of a token is 0 in the prefix, and 1 after it
        positions = torch.arange(inputs["tokens"].size(1), device=inputs["tokens"].device)
        renamed["token_type_ids"] = (positions >= renamed.pop("prefix")[:, None]).long()
    if unknown := sorted(renamed.keys() - parameters):
        raise SpecError(Diagnostic(f"the model of transformers has no input {listing(map(quoted, unknown))}"))
    return {name: value.transpose(1, 2) if name in CHANNELS_FIRST else value for name, value in renamed.items()}


def _patches(images: Tensor, fields: Any) -> tuple[Tensor, Tensor]:
    """Return the patches of images [n, c, height, width] and the sizes of their grids, as Qwen2-VL takes them.

    The patches of a square of patches that is merged follow each other. A patch has several equal frames.
    """
    size, square, frames = fields.patch_size, fields.spatial_merge_size, fields.temporal_patch_size
    to_patches = Rearrange("n t c (i r p) (j s q) -> (n i j r s) (c t p q)", r=square, s=square, p=size, q=size)
    grid = [1, images.size(2) // size, images.size(3) // size]
    return to_patches(images[:, None].expand(-1, frames, -1, -1, -1)), torch.tensor(
        [grid] * len(images), device=images.device
    )


def _load_program(path: Path, device: torch.device | str) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """Load a program that torch wrote: TorchScript, or a file of torch.export."""
    try:
        if path.suffix == ".pt2":
            program = torch.export.load(path).module()
        else:
            program = torch.jit.load(str(path), map_location=device)
    except Exception as error:
        message = f"{quoted(str(path))} is neither a spec, nor a folder, nor a program that torch wrote"
        raise SpecError(Diagnostic(message, notes=(_error_summary(error),))) from error
    return lambda inputs: program(**inputs)
