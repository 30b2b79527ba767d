"""`tfkit attention`: a map for each head, whose shades are the weights of `tfkit.attention_weights`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import tfkit

from .test_trace import SPEC

Run = Callable[..., str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("small.yaml").write_text(re.sub("(?m)^    ", "", SPEC))
    tmp_path.joinpath("text").write_text("abc <&")
    return tmp_path


def test_shades_are_the_weights(run: Run) -> None:
    model = tfkit.build("small.yaml")
    model.get_submodule("decoder.layers.1.attention.project.qkv").weight.data *= 100
    tfkit.save(model, "out", layout="tfkit")
    arguments = ("attention", "out", "--tokenizer", "text", "--prompt", "<a&", "--layer", "1", "-o", "a.svg")
    assert "wrote a.svg: 2 heads, 3 tokens" in run(*arguments)
    root, space = ElementTree.parse("a.svg").getroot(), {"s": "http://www.w3.org/2000/svg"}
    titles = [text.text for text in root.iterfind(".//s:text[@class='title']", space)]
    assert titles == [f"decoder.layers.1.attention {head}" for head in (0, 1)]
    labels = [text.text for text in root.iterfind(".//s:text", space) if text.text not in titles]
    assert labels == ["<", "a", "&"] * 4
    ids = torch.tensor([tfkit.CharacterTokenizer.of_text("abc <&").encode("<a&")])
    weights = tfkit.attention_weights(model, ids)["decoder.layers.1.attention"][0]
    for head, drawing in enumerate(root.iterfind("s:svg", space)):
        shades = torch.zeros(3, 3)
        for path in drawing.iterfind("s:path", space):
            for x, y, count in re.findall(r"M(\d+) (\d+)\.5h(\d+)", path.get("d", "")):
                shades[int(y), int(x) : int(x) + int(count)] = float(path.get("stroke-opacity", ""))
        assert (shades - weights[head]).abs().max() <= 1 / 16 + 1e-2
        assert (shades[1:] != shades[1:].flip(1)).any()
    result = json.loads(run(*arguments, "--json"))
    assert result == {"file": "a.svg", "attentions": ["decoder.layers.1.attention"]}


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["small.yaml", "-o", "a.svg"], 2, "a text must be read: add either --prompt or --tokens"),
        (["small.yaml", "--tokens", "1", "-o", "a.png"], 2, "`a.png` must end in .svg"),
        (["small.yaml", "--tokens", "1", "--tokenizer", "text", "-o", "a.svg"], 2, "--tokens cannot be combined"),
        (["small.yaml", "--tokens", "1,2", "--layer", "2", "-o", "a.svg"], 1, "layer 2 has no attention"),
        (["small.yaml", "--tokens", "1,99", "-o", "a.svg"], 1, "99"),
        (["small.yaml", "--prompt", "a", "-o", "a.svg"], 1, "there is no tokenizer.json or chars.json"),
        (["t5_small", "--tokens", "1", "-o", "a.svg"], 1, "`t5_small` must read tokens alone; its inputs are"),
        (
            ["small.yaml", "--tokenizer", "text", "--prompt", "", "-o", "a.svg"],
            1,
            "must have at least one token",
        ),
    ],
)
def test_a_wrong_argument_is_an_error(run: Run, arguments: list[str], status: int, message: str) -> None:
    assert message in run("attention", *arguments, status=status, stderr=True)
    assert not Path("a.svg").exists()
