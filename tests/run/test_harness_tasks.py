"""Tasks of lm-evaluation-harness give its numbers: `harness/numbers.json` has those of version 0.4.13.

`make test-around` runs the harness itself, on the same folder. To store its numbers again:
`pytest -m "" tests/run/test_harness_tasks.py --renew-golden`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

import tfkit
from tfkit.run.tasks import ContinuationScores
from tfkit.tools.eval_ import evaluation

FOLDER = Path(__file__).with_name("harness")
STORED = FOLDER / "numbers.json"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
MERGES = [
    ("t", "h"),
    ("th", "e"),
    ("Ġ", "the"),
    ("Ġ", "t"),
    ("i", "n"),
    ("i", "s"),
    ("Ġ", "is"),
    ("e", "r"),
    ("Ġ", "a"),
]
END = 256 + len(MERGES)
SETS = [
    *("d_model=32", "decoder.n_layers=2", "decoder.attention.n_heads=2", "decoder.ffn.d_ff=64"),
    *("max_len=64", "dropout=0", f"vocab_size={END + 1}"),
]


def bpe() -> tokenizers.Tokenizer:
    """Return a byte-level tokenizer with a few merges, so that a text and its end are not encoded apart."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: index for index, text in enumerate(alphabet)}
    for index, pair in enumerate(MERGES):
        vocabulary["".join(pair)] = 256 + index
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=MERGES))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken("<|endoftext|>", special=True)])
    return tokenizer


def write_model(folder: Path) -> Path:
    """Write a small GPT-2 with weights that never change, and its tokenizer, as transformers reads them."""
    model = tfkit.build("gpt2", sets=SETS)
    stream = np.random.RandomState(1)  # whose numbers no version of NumPy changes
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            values = torch.from_numpy(stream.standard_normal(parameter.shape))
            if "norm" in name:
                continue
            parameter.copy_(values * (1.0 if "tokens" in name else 0.1))
    tfkit.save(model, folder, layout="huggingface")
    bpe().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"eos_token_id": END, "bos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("harness") / "model")


@cache
def stored() -> dict[str, Any]:
    return dict(json.loads(STORED.read_text(encoding="utf-8"))["tasks"])


def check_numbers(model: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare every likelihood and every metric with the harness."""
    scores: dict[str, ContinuationScores] = {}
    errors: dict[str, float] = {}
    of_tasks = evaluation.Evaluation.of_tasks

    def recorded(
        numbers: dict[str, float], tasks: Any, of_names: dict[str, ContinuationScores]
    ) -> evaluation.Evaluation:
        scores.update(of_names)
        result = of_tasks(numbers, tasks, of_names)
        errors.update(result.errors)
        return result

    monkeypatch.setattr(evaluation.Evaluation, "of_tasks", recorded)
    numbers = tfkit.evaluate(model, tasks=[str(FOLDER / f"{name}.yaml") for name in NAMES])
    assert [*scores] == NAMES == [*expected]
    for name, task in expected.items():
        np.testing.assert_allclose(scores[name].likelihoods, task["likelihoods"], rtol=2e-5, atol=1e-4)
        assert scores[name].greedy.tolist() == task["greedy"]
        actual = {f"{name}.{key}": value for key, value in task["metrics"].items()}
        for key in [key for key in actual if key.endswith("_stderr")]:
            error = actual.pop(key)
            assert errors[key.removesuffix("_stderr")] == pytest.approx(error)
        assert {key: numbers[key] for key in numbers if key.startswith(f"{name}.")} == pytest.approx(actual, rel=1e-4)


def test_the_numbers_are_those_of_the_harness(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_numbers(model, stored(), monkeypatch)


def test_the_stored_numbers_distinguish_the_metrics() -> None:
    metrics = stored()["questions"]["metrics"]
    assert len({metrics[name] for name in ("acc", "acc_norm", "acc_bytes")}) == 3
    assert metrics["acc_stderr"] > 0
    assert 0 < stored()["endings"]["metrics"]["acc"] < 1
    assert 0 < stored()["sentences"]["metrics"]["acc"] < 1


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("lm_eval"), reason="pip install --group around -e .")
def test_the_harness_itself(model: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    command = [sys.executable, FOLDER / "harness_numbers.py", model]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(model.parent), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = json.loads(done.stdout.splitlines()[-1])
    if request.config.getoption("--renew-golden"):
        source = "lm-evaluation-harness 0.4.13, by harness_numbers.py on the model of test_harness_tasks.py"
        text = json.dumps({"source": source, "tasks": expected}, indent=1)
        STORED.write_text(f"{text}\n", encoding="utf-8")
    check_numbers(model, expected, monkeypatch)
