"""Families of language models that read images: equal to transformers, with no, one and several images in a row."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, fx

import tfkit
from tfkit.errors import LeftOutWarning
from tfkit.graph.decode_split import split_for_decoding
from tfkit.graph.input_shapes import max_len
from tfkit.tools.common.loading_weights import build_with_weights
from tfkit.tools.common.model_inputs import cached_cases
from tfkit.tools.eject.proof import check
from tfkit.tools.import_.importing import export_config, import_config
from tfkit.tools.save.save import save

from ..sampling import chosen
from .changed_fields import NOT_THE_MODEL, others, quiet
from .image_text import BATCH, IMAGE_TEXT, ImageTextCase

QUICK_CASES = {"llava"}
NAMES = chosen(IMAGE_TEXT, QUICK_CASES)
LENGTH, PREFIX = 18, 15
IMAGES = {"none": [0, 0, 0], "one": [1, 1, 1], "two": [2, 2, 2], "mixed": [2, 0, 1]}


@dataclass(frozen=True)
class ImageTextTrial:
    """A case that transformers saved and tfkit read."""

    case: ImageTextCase
    theirs: Any
    ours: fx.GraphModule

    @classmethod
    def of(cls, case: ImageTextCase, folder: Path, seed: int = 0) -> ImageTextTrial:
        """Draw the parameters of their model, save it, and read it."""
        model_class = getattr(transformers, case.architecture)
        torch.manual_seed(seed)
        config = model_class.config_class(**deepcopy(dict(case.config)))
        theirs = model_class._from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for path, parameter in theirs.named_parameters():
                parameter.normal_(1.0 if parameter.dim() == 1 and path.endswith("weight") else 0.0, 0.2)
        theirs.save_pretrained(folder / "theirs")
        graph = tfkit.loads(import_config(folder / "theirs").text)
        with warnings.catch_warnings(record=True) as records:
            warnings.simplefilter("always", LeftOutWarning)
            ours = build_with_weights(graph, folder / "theirs").eval()
        assert len(records) == bool(case.left_out), list(map(str, records))
        return cls(case, theirs, ours)

    @torch.no_grad()
    def logits(self, images: list[int], seed: int, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return our logits and theirs, at tokens."""
        tokens, (pixels, used) = self.case.tokens(images, LENGTH, seed), self.case.images(images, seed)
        options: dict[str, Any] = self.case.theirs(used, tokens)
        if mask is not None:
            options["attention_mask"] = mask.long()
        if mask is not None and self.case.layout != "patches":  # otherwise the class computes them from the tokens
            options["position_ids"] = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
        real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        if self.case.prefix:
            options["token_type_ids"] = (real.long().cumsum(dim=1) > PREFIX).long()
        if self.case.typed:
            options["token_type_ids"] = (tokens == self.case.token).long()
        expected = self.theirs(input_ids=tokens, **options).logits
        masks = {} if mask is None else {"tokens_mask": mask}
        actual = self.ours(tokens, pixels, **self.prefix(PREFIX), **masks)
        return actual[real], expected[real]

    def prefix(self, length: int) -> dict[str, Tensor]:
        """Return the lengths of prefixes, if the model takes any."""
        return {"prefix": torch.full((BATCH,), length)} if self.case.prefix else {}


def close(actual: Tensor, expected: Tensor) -> None:
    assert expected.std() > 0.05
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * max(1.0, expected.abs().max().item()))


def padding(side: str) -> Tensor:
    """Padding of three rows, one of which is full. Placeholders are in the middle of all rows."""
    real = torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 1], [LENGTH - 2]])
    return real if side == "right" else real.flip(1)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_theirs(name: str, tmp_path: Path) -> None:
    trial = ImageTextTrial.of(IMAGE_TEXT[name], tmp_path)
    for seed, images in enumerate(IMAGES.values()):
        close(*trial.logits(images, seed))
    no_images, with_images = trial.logits([0, 0, 0], 0)[0], trial.logits([1, 1, 1], 0)[0]
    assert (no_images - with_images).abs().max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("name", IMAGE_TEXT)
def test_logits_are_theirs_in_further_seeds(name: str, seed: int, tmp_path: Path) -> None:
    trial = ImageTextTrial.of(IMAGE_TEXT[name], tmp_path, seed)
    for images in IMAGES.values():
        close(*trial.logits(images, seed))


@pytest.mark.parametrize("name", NAMES)
def test_rows_may_have_padding(name: str, tmp_path: Path) -> None:
    trial = ImageTextTrial.of(IMAGE_TEXT[name], tmp_path)
    for side in ("left", "right"):
        case = trial.case
        images = [1, 1, 1] if side == "left" else [1, 0, 1]
        tokens, mask = case.tokens(images, LENGTH, 3), padding(side)
        assert not (tokens.masked_fill(mask, 0) == case.token).any()
        close(*trial.logits(images, 3, mask))


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_incremental_reading_and_generation_are_theirs(name: str, tmp_path: Path) -> None:
    trial = ImageTextTrial.of(IMAGE_TEXT[name], tmp_path)
    case = trial.case
    tokens, (pixels, used) = case.tokens([2, 0, 1], LENGTH, 4), case.images([2, 0, 1], 4)
    options = types = case.theirs(used, tokens)
    if case.typed:
        options = types = {**options, "token_type_ids": (tokens == case.token).long()}
    if case.prefix:
        types, options = (
            {**types, "token_type_ids": (torch.arange(LENGTH) >= n).long().expand(BATCH, -1)} for n in (LENGTH, PREFIX)
        )
    expected = trial.theirs(input_ids=tokens, **options).logits
    cached = tfkit.CachedModel(trial.ours, length=LENGTH + 6)
    chunks = [LENGTH] if case.prefix else [7, 1, LENGTH - 8] if case.typed else [3, 1, 6, LENGTH - 10]
    for sizes in ([LENGTH - 2, 1, 1], chunks):  # the last splits images
        cached.start(BATCH, **case.ours(pixels), **trial.prefix(PREFIX))
        close(torch.cat([cached(piece) for piece in tokens.split(sizes, dim=1)], dim=1), expected)
    assert cached.used == LENGTH
    with quiet():
        theirs = trial.theirs.generate(
            input_ids=tokens,
            max_new_tokens=6,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **types,
        )
    inputs = {**case.ours(pixels), **trial.prefix(LENGTH)}
    ours = tfkit.generate(trial.ours, tokens, max_new_tokens=6, **inputs).tokens
    assert ours.tolist() == theirs[:, LENGTH:].tolist()


@torch.no_grad()
def test_padded_prompts_are_read_incrementally(tmp_path: Path) -> None:
    trial = ImageTextTrial.of(IMAGE_TEXT["llava"], tmp_path)
    case = trial.case
    images, mask = [2, 1, 1], padding("left")
    tokens, (pixels, _) = case.tokens(images, LENGTH, 5), case.images(images, 5)
    expected = trial.ours(tokens, pixels, tokens_mask=mask)
    tokens = tokens.masked_fill(~mask, case.token)  # padding is no placeholder
    cached = tfkit.CachedModel(trial.ours, length=LENGTH + 2)
    cached.start(BATCH, images=pixels)
    chunks = zip(tokens.split([5, 4, 9], dim=1), mask.split([5, 4, 9], dim=1), strict=True)
    actual = torch.cat([cached(piece, real) for piece, real in chunks], dim=1)
    close(actual[mask], expected[mask])
    cached.rewind(9, mask[:, -9:])  # after it, the same tokens have the same images
    close(cached(tokens[:, -9:], mask[:, -9:])[mask[:, -9:]], expected[:, -9:][mask[:, -9:]])


def test_an_image_in_two_pieces_is_an_error_if_its_vectors_attend_to_each_other(tmp_path: Path) -> None:
    trial = ImageTextTrial.of(IMAGE_TEXT["gemma3"], tmp_path)
    tokens, (pixels, _) = trial.case.tokens([1, 1, 1], LENGTH, 8), trial.case.images([1, 1, 1], 8)
    cached = tfkit.CachedModel(trial.ours, length=LENGTH)
    cached.start(BATCH, images=pixels)
    cached(tokens[:, :3])
    with pytest.raises(ValueError, match="`image_blocks` must have all tokens of a block in one piece"):
        cached(tokens[:, 3:])


def test_the_steps_of_an_export_have_images_in_the_first_alone(tmp_path: Path) -> None:
    """Exported programs read the tokens of the other steps one by one."""
    model = ImageTextTrial.of(IMAGE_TEXT["gemma3"], tmp_path).ours
    graph = model.meta["graph"]
    token = graph.node("image_blocks").config.token
    for case in cached_cases(model, split_for_decoding(graph)):
        assert [bool((piece["tokens"] == token).any()) for piece in case.steps[1:]] == [False] * len(case.steps[1:])


def test_more_placeholders_than_vectors_are_an_error(tmp_path: Path) -> None:
    trial = ImageTextTrial.of(IMAGE_TEXT["llava"], tmp_path)
    tokens, (pixels, _) = trial.case.tokens([2, 1, 1], LENGTH, 7), trial.case.images([1, 1, 1], 7)
    with pytest.raises(ValueError, match="a row with 8 placeholders of images, the token 60; its 1 images have 4"):
        trial.ours(tokens, pixels)
    with pytest.raises(ValueError, match="must be images of 3 x 16 x 16"):
        trial.ours(tokens, pixels[..., :-1])
    with pytest.raises(ValueError, match=r"`images` must be images \[b, n, channels, height, width\]"):
        trial.ours(tokens, pixels[:, 0])


def test_a_published_config_omits_sizes_of_the_text_model() -> None:
    imported = import_config(Path(__file__).parents[1] / "published/llava_1_5_7b.json")
    assert imported.graph.spec.model.graph == tfkit.load("llava_1_5_7b").spec.model.graph


def test_an_older_config_has_the_fields_of_the_text_model_next_to_the_others() -> None:
    imported = import_config(Path(__file__).parents[1] / "published/qwen25_vl_3b.json")
    assert imported.graph.spec.model.graph == tfkit.load("qwen25_vl_3b").spec.model.graph
    text = export_config(imported.graph)["text_config"]
    assert text["rope_parameters"]["mrope_section"] == [16, 24, 24]
    assert text["hidden_size"] == 2048


def test_positions_of_sounds_do_not_limit_the_text() -> None:
    assert max_len(tfkit.load("voxtral_mini_3b")) == 131072


@pytest.mark.parametrize("name", NAMES)
def test_saved_models_are_theirs(name: str, tmp_path: Path) -> None:
    trial = ImageTextTrial.of(IMAGE_TEXT[name], tmp_path)
    left_out = trial.case.left_out
    if left_out:
        with pytest.raises(tfkit.SpecError, match="tensors of the file that filled the model would be missing"):
            save(trial.ours, tmp_path / "ours", layout="huggingface")
    save(trial.ours, tmp_path / "ours", layout="huggingface", allow_drop=bool(left_out))
    before, after = (load_file(tmp_path / side / "model.safetensors") for side in ("theirs", "ours"))
    expected = {path for path in before if not any(fnmatchcase(path, pattern) for pattern in left_out)}
    assert expected == after.keys()
    assert all(torch.equal(before[path], after[path]) for path in after)
    with quiet():
        again = type(trial.theirs).from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    close(*replace(trial, theirs=again).logits([2, 0, 1], 6))


@pytest.mark.parametrize("name", chosen(IMAGE_TEXT, set()))
def test_compared_ejected_and_exported(name: str, tmp_path: Path) -> None:
    trial = ImageTextTrial.of(IMAGE_TEXT[name], tmp_path)
    graph = trial.ours.meta["graph"]
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore", LeftOutWarning)
        compared = tfkit.compare(graph, tmp_path / "theirs", weights=tmp_path / "theirs")
    assert compared.equal, compared.first
    compared_nodes = {part.name.partition(".")[0] for part in compared.parts}
    packed = trial.case.layout in ("patches", "sizes")  # in one sequence, whose shape is not ours
    encoder = set() if packed else {"sound_encoder" if trial.case.layout == "sounds" else "image_encoder"}
    assert {"decoder", *encoder} <= compared_nodes
    assert any(".layers.1." in part.name for part in compared.parts)
    assert check(graph, tfkit.eject(graph)).ran
    assert tfkit.export(trial.ours, tmp_path / "model.ts").difference <= 1e-5


WORDS: dict[str, tuple[Any, ...]] = {
    "vision_feature_select_strategy": ("default", "full"),
    "vision_feature_layer": (-1, -3, [-2], [-2, -1]),
    "model_type": ("qwen2", "siglip_vision_model"),
}
"""Further values of fields."""


def changed(config: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path of each field, also of the configs inside, with other values."""
    for field, value in config.items():
        yield from (((field,), word) for word in WORDS.get(field, ()) if word != value)
        if isinstance(value, dict) and field.endswith("_config"):
            yield from (((field, *path), other) for path, other in changed(value))
        elif field not in NOT_THE_MODEL:
            yield from (((field,), other) for other in others(field, value))


def with_value(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    inner = value if len(path) == 1 else with_value(config[path[0]], path[1:], value)
    return {**config, path[0]: inner}


@pytest.mark.slow
@pytest.mark.parametrize("name", IMAGE_TEXT)
def test_each_field_is_followed_or_rejected(name: str, tmp_path: Path) -> None:
    """Their class with the field changed has the logits of the spec that is imported, or the field is an error."""
    case = IMAGE_TEXT[name]
    config = getattr(transformers, case.architecture).config_class(**deepcopy(dict(case.config))).to_dict()
    verdicts: dict[str, str] = {}
    for number, (path, value) in enumerate(changed(config)):
        if path == ("model_type",):
            continue  # of another class
        variant = replace(case, config=with_value(config, path, value), left_out=())
        verdicts[f"{'.'.join(path)}={value!r}"] = _verdict(variant, tmp_path / str(number))
    assert {change: verdict for change, verdict in verdicts.items() if verdict == "wrong"} == {}
    assert sum(verdict == "followed" for verdict in verdicts.values()) > 20
    print(json.dumps(verdicts, indent=1))


def _verdict(case: ImageTextCase, folder: Path) -> str:
    model_class = getattr(transformers, case.architecture)
    try:
        with quiet():
            torch.manual_seed(0)
            theirs = model_class._from_config(
                model_class.config_class(**deepcopy(dict(case.config))), attn_implementation="eager"
            ).eval()
            with torch.no_grad():
                for path, parameter in theirs.named_parameters():
                    parameter.normal_(1.0 if parameter.dim() == 1 and path.endswith("weight") else 0.0, 0.2)
            of_sound = case.layout == "sounds"
            token = theirs.config.audio_token_id if of_sound else theirs.config.image_token_id
            case = replace(case, token=token, image=_image_of(case))
            features = case.theirs(case.images([1], 0)[1])
            vectors = (theirs.get_audio_features if of_sound else theirs.get_image_features)(**features).pooler_output
            case = replace(case, vectors=len(vectors if of_sound else vectors[0]))
            tokens, (_, used) = case.tokens([1, 1, 1], LENGTH, 0), case.images([1, 1, 1], 0)
            theirs(input_ids=tokens, **case.theirs(used, tokens))
            theirs.save_pretrained(folder)
    except Exception:  # their class rejects the value, or the number of vectors changes
        return "illegal"
    try:
        graph = tfkit.loads(import_config(folder).text)
    except tfkit.SpecError:
        return "rejected"
    if not case.ours(torch.empty(0)).keys() <= graph.inputs.keys():
        return "text alone"  # of a different family, which a note says
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = build_with_weights(graph, folder).eval()
    actual, expected = ImageTextTrial(case, theirs, ours).logits([1, 1, 1], 0)
    return "followed" if torch.allclose(actual, expected, rtol=1e-3, atol=1e-3) else "wrong"


def _image_of(case: ImageTextCase) -> tuple[int, int, int]:
    if case.layout == "sounds":
        sound = case.config["audio_config"]
        return (1, sound["num_mel_bins"], 2 * sound["max_source_positions"])
    vision = case.config["vision_config"]
    rows, columns = vision["input_size"] if "input_size" in vision else [vision["image_size"]] * 2
    return (vision["in_channels" if "in_channels" in vision else "num_channels"], rows, columns)


@pytest.mark.slow
def test_a_text_model_of_a_different_family_is_imported_alone(tmp_path: Path) -> None:
    """Ministral 3 is published in the class of Mistral Small 3.1."""
    case = IMAGE_TEXT["mistral3"]
    text = {**case.config["text_config"], "model_type": "ministral3"}
    config = {**case.config, "text_config": {**text, "sliding_window": None}}
    trial = ImageTextTrial.of(replace(case, config=config, left_out=("*vision_tower*",)), tmp_path)
    assert trial.ours.meta["graph"].spec.family.model_type == "ministral3"


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_weights_decide_on_a_tie_that_the_config_does_not_state(tied: bool, tmp_path: Path) -> None:
    case = IMAGE_TEXT["mistral3"]
    ImageTextTrial.of(replace(case, config={**case.config, "tie_word_embeddings": tied}), tmp_path)
    path = tmp_path / "theirs" / "config.json"
    fields = json.loads(path.read_text())
    assert fields.pop("tie_word_embeddings") == tied
    path.write_text(json.dumps(fields))
    imported = import_config(tmp_path / "theirs")
    assert (imported.graph.spec.model.graph["logits"].tie == "embedding") == tied
    tfkit.build(imported.graph)
