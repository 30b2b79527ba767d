"""Errors of `tfkit generate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from .conftest import PROMPT, WEIGHTS, Golden, Run

pytestmark = pytest.mark.filterwarnings("ignore::tfkit.FirstLossWarning")  # sure of its tokens on purpose


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("nothing", []),
        ("tokens_and_prompt", ["--tokens", "1", "--prompt", "a"]),
        ("two_standard_inputs", ["--prompt", "-", "--prompt", "-"]),
        ("empty_stop", ["--prompt", "a", "--stop", ""]),
        ("top_k_alone", ["--prompt", "a", "--top-k", "3"]),
        ("samples_alone", ["--prompt", "a", "--samples", "3"]),
        ("top_p_range", ["--prompt", "a", "--top-p", "1.5"]),
        ("steps_without_mask", ["--prompt", "a", "--steps", "4"]),
        ("start_without_encoder", [*PROMPT, "--start", "3"]),
        ("on_meta", [*PROMPT, "--device", "meta"]),
    ],
)
def test_wrong_usage(run: Run, golden: Golden, name: str, arguments: list[str]) -> None:
    out, err = run("small.yaml", *arguments, status=2)
    assert out == ""
    golden(f"generate/usage_{name}", err)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("no_tokenizer", ["small.yaml", "--prompt", "a"]),
        ("no_tokenizer_beside", ["small.yaml", "--weights", "small.yaml", "--prompt", "a"]),
        ("tokenizer_missing", ["small.yaml", "--tokenizer", "nowhere.json", "--prompt", "a"]),
        ("vocabulary", ["small.yaml", *PROMPT, "--set", "vocab_size=50"]),
        ("prompt_empty", ["small.yaml", *PROMPT, "--prompt", ""]),
        ("prompt_long", ["small.yaml", *WEIGHTS, "--prompt", "the quick " * 30]),
        ("no_room", ["small.yaml", *PROMPT, "--max-new-tokens", "60"]),
        ("prompt_file_missing", ["small.yaml", *WEIGHTS, "--prompt-file", "nowhere.txt"]),
        ("unknown_character", ["small.yaml", "--tokenizer", "small.yaml", "--prompt", "öz"]),
        ("no_id", ["small.yaml", *WEIGHTS, "--tokens", "1,two"]),
        ("id_beyond", ["small.yaml", *WEIGHTS, "--tokens", "1,60"]),
        ("encoder", ["reader.yaml", "--tokens", "1"]),
        ("mask_of_a_decoder", ["small.yaml", "--tokens", "1", "--mask-token", "2"]),
        ("mask_beyond", ["reader.yaml", "--tokens", "1", "--mask-token", "60"]),
        ("few_steps", ["reader.yaml", "--tokens", "1", "--mask-token", "2", "--steps", "4", "--block-length", "7"]),
        ("no_start", ["pair.yaml", "--tokens", "1"]),
        ("start_unknown", ["pair.yaml", "--weights", "pair/model.safetensors", "--prompt", "a", "--start", "<s>"]),
        ("weights_missing", ["small.yaml", "--weights", "out/nowhere.safetensors", "--prompt", "a"]),
        ("weights_folder", ["small.yaml", "--weights", "empty", "--tokens", "1"]),
        ("weights_of_another", ["small.yaml", "--weights", "pair/model.safetensors", "--prompt", "a"]),
        ("weights_of_other_sizes", ["small.yaml", *PROMPT, "--set", "decoder.n_layers=3", "--set", "max_len=50"]),
    ],
)
def test_wrong_input(run: Run, golden: Golden, name: str, arguments: list[str]) -> None:
    out, err = run(*arguments, status=1)
    assert out == ""
    golden(f"generate/{name}", "".join(f"{line}\n" for line in err.splitlines() if not line.startswith("warning: ")))
    assert json.loads(run(*arguments, "--json", status=1)[0])["errors"]


def test_not_utf8(run: Run, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    err = run("small.yaml", *WEIGHTS, "--prompt-file", str(tmp_path / "latin.txt"), status=1)[1]
    assert err.endswith(": it is not UTF-8\n")


def test_logits_that_are_no_numbers(run: Run, tmp_path: Path) -> None:
    weights = {name: tensor * 1e36 for name, tensor in load_file("out/model.safetensors").items()}
    save_file(weights, tmp_path / "w.safetensors")
    err = run("small.yaml", "--weights", str(tmp_path / "w.safetensors"), "--tokens", "1", status=1)[1]
    assert err == "error: the logits are NaN in torch.float32: the weights are corrupt, or too large for this type\n"
