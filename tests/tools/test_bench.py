"""The functions that benchmarks share, at tiny sizes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[2] / "tools/bench"
SIZES = {"n_layers": 2, "d_model": 32, "n_heads": 4, "d_ff": 48, "vocab_size": 64, "length": 12, "batch": 2}
KV_HEADS = {"gpt2": 4, "llama": 2}
PEERS = [
    ("by hand", "gpt2"),
    ("by hand", "llama"),
    *(pytest.param("transformers", name, marks=pytest.mark.slow) for name in ("gpt2", "llama")),
]


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scripts import one another by name, as they do when one of them is run."""
    monkeypatch.syspath_prepend(str(BENCH))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(BENCH) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize(("name", "family"), [*PEERS, ("torch.nn", "gpt2")])
def test_peers_are_the_same_model_and_learn_the_same(name: str, family: str, tmp_path: Path) -> None:
    from peers import Shape
    from train_worker import Trainer

    shape = Shape(family, n_kv_heads=KV_HEADS[family], **SIZES)
    both = [Trainer(value, shape, tmp_path, compiled=False, device="cpu") for value in ("tfkit", name)]
    assert both[0].parameters == both[1].parameters
    assert both[1].difference < 1e-6
    for trainer in both:
        for _ in range(5):
            trainer.step()
    torch.testing.assert_close(both[0].last, both[1].last, rtol=0, atol=1e-5)


def test_what_a_library_cannot_express_is_said() -> None:
    from peers import Shape, peer

    with pytest.raises(ValueError, match="has no llama"):
        peer("torch.nn").build(Shape("llama", n_kv_heads=2, **SIZES))


def test_everybody_has_every_place_in_turn() -> None:
    from measure import take_turns

    order: list[str] = []

    def contender(name: str) -> float:
        order.append(name)
        return float(len(order))

    actual = take_turns({name: lambda name=name: contender(name) for name in "abc"}, rounds=6, warm_up=1)
    assert [len(values) for values in actual.values()] == [6, 6, 6]
    rounds = ["".join(order[i : i + 3]) for i in range(3, len(order), 3)]
    assert all(sorted(value) == list("abc") for value in rounds)
    assert [sorted(value[column] for value in rounds) for column in range(3)] == [sorted("aabbcc")] * 3


def test_ratios_are_paired() -> None:
    from measure import ratio

    tensors = ratio([2.0, 4.0, 9.0], [1.0, 4.0, 3.0])
    assert (tensors.median, tensors.low, tensors.high, tensors.of_minima) == (2.0, 1.0, 3.0, 2.0)
    assert tensors.quartiles == (1.5, 2.5)


@pytest.mark.slow
def test_a_worker_answers_and_says_why_it_failed(tmp_path: Path) -> None:
    from worker import Worker

    script = tmp_path / "answers.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(BENCH)!r})\n"
        "from worker import serve\n"
        "def answer(what, details):\n"
        "    print('what a library prints is no answer')\n"
        "    return {what: 1 / details['by']}\n"
        "serve(answer)\n"
    )
    worker = Worker([sys.executable, str(script)])
    try:
        assert worker.ask("share", by=4) == {"share": 0.25}
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            worker.ask("share", by=0)
    finally:
        worker.close()


@pytest.mark.slow
def test_the_whole_script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import train_step
    from peers import Shape

    shape = Shape("llama", n_kv_heads=2, **SIZES)
    monkeypatch.setattr(train_step, "SHAPES", {"llama": shape})
    monkeypatch.setattr(train_step, "FILES", {"tfkit": "tfkit", "by hand": "by_hand", "torch.nn": "torch_nn"})
    arguments = ["--rounds", "2", "--json", "--operators", "--python", f"by hand={sys.executable}"]
    monkeypatch.setattr(sys, "argv", ["train_step.py", *arguments])
    with pytest.raises(SystemExit):
        train_step.main()
    (race,) = json.loads(capsys.readouterr().out)["races"]
    assert race["shape"] == asdict(shape)
    assert {name: len(values) for name, values in race["seconds"].items()} == {"tfkit": 2, "by hand": 2}
    assert race["loss"]["tfkit"] == pytest.approx(race["loss"]["by hand"], abs=1e-5)
    assert "aten::mm" in race["operators"]["tfkit"]
    assert "it has no llama" in race["missing"]["torch.nn"]


@pytest.mark.parametrize("name", ["litgpt", "lidgpt=python", "litgpt=/nowhere/python"])
def test_an_interpreter_that_is_none(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import train_step

    monkeypatch.setattr(sys, "argv", ["train_step.py", "--python", name])
    with pytest.raises(SystemExit) as exit:
        train_step.main()
    assert exit.value.code == 2
    assert "--python" in capsys.readouterr().err
