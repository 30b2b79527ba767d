"""What the checkpoints of a run have next to their weights, from its data and from the weights that it starts with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import ViTImageProcessorPil

import tfkit
from tests.run.kinds.small import small_run
from tfkit.run.checked_run import load_run
from tfkit.tools.common.companions import Companions
from tfkit.tools.save.save import save
from tfkit.tools.train.checkpoints import run_companions

ROWS = [
    {"source": f"so {n}", "target": "near" if n % 2 else "far", "label": ("nö", "far", "so")[n % 3]} for n in range(9)
]
PAIRS = "{kind: pairs, files: rows.jsonl, layout: %s, end: 250, start: 251, tokenizer: bytes}"
LABELLED = "{kind: labelled, files: rows.jsonl, text: source, tokenizer: bytes, order: sequential}"
WORDS = ("<pad>", "so", "near", "far", "not", "it")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "".join(f"{json.dumps(row)}\n" for row in ROWS)
    (tmp_path / "rows.jsonl").write_text(lines, encoding="utf-8")
    monkeypatch.chdir(tmp_path)


def words(folder: str, *names: str, **settings: Any) -> None:
    """Write a tokenizer of words, and settings next to it."""
    Path(folder).mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
    tokenizer.add_special_tokens(["<pad>"])
    tokenizer.save(f"{folder}/tokenizer.json")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", **settings}
    Path(folder, "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


@pytest.mark.parametrize("data", [PAIRS % "sequence", f"{{kind: mixture, of: {{a: {{data: {PAIRS % 'sequence'}}}}}}}"])
def test_the_end_of_the_data_ends_a_text(data: str, tmp_path: Path) -> None:
    run = small_run(tmp_path, data, length=40)
    assert (run.data.start, run.data.end) == (251, 250)
    assert run_companions(run, None).fields == {"decoder_start_token_id": 251, "eos_token_id": 250}


@pytest.mark.parametrize(
    ("labels", "names"),
    [(("so", "nö", "far"), ["far", "nö", "so"]), (("so", "7", "0"), ["0", "7", "so"]), ("021", None)],
)
def test_the_names_of_classes(labels: Sequence[str], names: list[str] | None, tmp_path: Path) -> None:
    rows = [{"source": "ab" * (number + 1), "label": label} for number, label in enumerate([*labels] * 4)]
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    run = small_run(
        tmp_path,
        LABELLED,
        "model.graph.head=null",
        "model.graph.pooled={block: pooler, select: last}",
        "model.graph.classes={block: classifier, n_classes: data.n_classes}",
        length=32,
    )
    expected = None if names is None else {str(number): name for number, name in enumerate(names)}
    assert run_companions(run, None).fields.get("id2label") == expected


IMAGES = """tfkit: 1
name: small
model:
  requires: [tfkit-media]
  d_model: 16
  inputs: {image: {type: image, channels: CHANNELS, height: 4, width: 8}}
  graph:
    patches: {block: patches, size: 4}
    encoder: {block: encoder, n_layers: 1, attention: {kind: mha, n_heads: 2}, ffn: {kind: gelu, d_ff: 32}}
    pooled: pooler
    logits: {block: classifier, n_classes: data.vocab_size}
data: {kind: images, images: images.npy, labels: labels.npy, mean: MEAN, std: 0.2}
batch: {sequences: 4}
steps: 2
optimizer: {kind: adamw, lr: 1e-2}
"""


@pytest.mark.parametrize(("channels", "kind"), [(3, np.uint8), (1, np.uint8), (3, np.float32)])
def test_the_processor_of_images_computes_the_inputs_of_the_run(
    channels: int, kind: type[np.number[Any]], tmp_path: Path
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, channels, 4, 8)).astype(kind)
    np.save("images.npy", pixels)
    np.save("labels.npy", np.arange(20) % 2)
    mean = "[0.4, 0.5, 0.6]" if channels == 3 else "0.4"
    Path("images.yaml").write_text(IMAGES.replace("CHANNELS", str(channels)).replace("MEAN", mean))
    run = load_run(tmp_path / "images.yaml", tfkit.load_plugins())
    companions = run_companions(run, None)
    if channels == 1 or kind is np.float32:  # neither is what transformers reads
        assert "preprocessor_config.json" not in companions.files
        return
    companions.write_files(tmp_path)
    processor = ViTImageProcessorPil.from_pretrained(tmp_path)
    images = [Image.fromarray(np.moveaxis(image, 0, 2)) for image in pixels]
    values = np.stack([processor(image, return_tensors="np")["pixel_values"][0] for image in images])
    batch = run.data.examples("train", "sequential").batch(np.arange(4)).inputs["image"]
    assert np.abs(batch[:, None] - values).max(axis=(2, 3, 4)).min(axis=1).max() < 1e-5


def test_the_end_replaces_ids_that_lack_it() -> None:
    generation = b'{"eos_token_id": [7, 8], "temperature": 0.7}'
    companions = Companions({"generation_config.json": generation}, {"eos_token_id": 7})
    assert companions.with_ids(None, 8).files["generation_config.json"] == generation
    assert companions.with_ids(None, 8).fields == {"eos_token_id": 8}
    assert companions.with_ids(None, 9).generation == {"eos_token_id": 9, "temperature": 0.7}


def _start(tmp_path: Path, tokenizer: str, *sets: str) -> Companions:
    """Return the companions of a run that starts with the weights in `base`, whose tokenizer has WORDS."""
    words("base", *WORDS, chat_template="{{ 'ü' }}")
    Path("base/config.json").write_text('{"eos_token_id": 4, "use_cache": false}')
    Path("text.txt").write_text("so near it is not so far " * 20)
    data = f"{{kind: text, files: text.txt, tokenizer: {tokenizer}}}"
    run = small_run(tmp_path, data, "weights=base", *sets, length=8)
    return run_companions(run, None)


def test_the_tokenizer_of_the_weights_is_copied_unchanged(tmp_path: Path) -> None:
    companions = _start(tmp_path, "{kind: pretrained, path: base}")
    assert companions.fields == {"eos_token_id": 4, "use_cache": False}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert companions.files[name] == Path("base", name).read_bytes()
    assert _start(tmp_path, "{kind: file, path: base/tokenizer.json}") == companions


def test_ids_of_different_tokens_are_omitted_by_name(tmp_path: Path) -> None:
    words("new", *reversed(WORDS), chat_template="{{ 'new' }}")
    companions = _start(tmp_path, "{kind: pretrained, path: new}")
    assert companions.fields == {"use_cache": False}
    assert companions.files["tokenizer_config.json"] == Path("new/tokenizer_config.json").read_bytes()
    assert companions.omitted == ("`eos_token_id`, an id of a different tokenizer",)


def test_every_checkpoint_has_them_after_the_source_is_gone(tmp_path: Path) -> None:
    words("base", *WORDS, chat_template="{{ 'ü' }}")
    Path("text.txt").write_text("so near it is not so far " * 20)
    data = "{kind: text, files: text.txt, tokenizer: {kind: file, path: base/tokenizer.json}}"
    save(tfkit.build(small_run(tmp_path, data, length=8).graph), "first", files_from="base")
    settings = Path("base/tokenizer_config.json").read_bytes()
    sets = ["weights=first", "checkpoint.every=1", "callbacks={kind: ema, decay: 0.5}"]
    tfkit.train(tmp_path / "small.yaml", output="out", sets=sets, stop_after=1, quiet=True)
    Path("first/tokenizer_config.json").unlink()
    tfkit.train(tmp_path / "small.yaml", output="out", sets=sets, quiet=True)
    for folder in ("step-1", "step-2", "ema"):
        assert Path("out", folder, "tokenizer_config.json").read_bytes() == settings
