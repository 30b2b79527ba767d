"""docs/retention.md: its plugin keeps all guarantees, and its spec runs, exports and decodes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import tfkit
from tfkit.testing import check_component, check_model
from tfkit.tools.eject.proof import check
from tfkit.tools.eject.remote_code.modeling import code_of
from tfkit.tools.eject.write import eject

from .page import follow, run

PAGE = Path(__file__).parents[2] / "docs" / "retention.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCK = re.compile(r"(?:^`(?P<file>[\w./]+)`\n\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [match.groupdict() for match in BLOCK.finditer(TEXT)]
MEMORY = """
tfkit: 1
name: translator
d_model: 16
vocab_size: 11
max_len: 16
inputs: [source, target]
graph:
  source_embedding: {block: embedding, input: source}
  embedding: {block: embedding, input: target}
  decoder:
    block: decoder
    memory: source_embedding
    n_layers: 2
    attention: {kind: retention, n_heads: 2, position: decay}
    ffn: {kind: gelu, d_ff: 24}
  logits: {block: lm_head}
"""


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> object:
    folder = tmp_path_factory.mktemp("plugin")
    write(folder, "retention.py")
    return tfkit.load_plugins(plugin_dirs=[folder], entry_points=False)


def write(folder: Path, name: str) -> None:
    (text,) = [block["text"] for block in BLOCKS if block["file"] == name]
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")


def of(language: str) -> list[str]:
    return [block["text"] for block in BLOCKS if block["language"] == language and block["file"] is None]


def test_no_block_is_left_unread() -> None:
    assert len(BLOCKS) == TEXT.count("```") / 2
    assert {block["file"] for block in BLOCKS} == {
        "retention.py",
        "retnet.yaml",
        "relative_keys.py",
        "relative.yaml",
        "plays.yaml",
        "tasks/words.jsonl",
        "tasks/words.yaml",
        None,
    }
    assert {block["language"] for block in BLOCKS} == {"python", "yaml", "console", "text"}


@pytest.mark.slow
def test_the_page_as_a_reader_types_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    follow(PAGE, tmp_path, lambda command: run(command, capsys.readouterr))
    assert {"retnet.py", "retnet.ts", "hub"} <= {file.name for file in tmp_path.iterdir()}


def test_its_python_but_for_the_long_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in BLOCKS:
        if block["file"] is not None:
            write(tmp_path, block["file"])
    names: dict[str, object] = {}
    for text in of("python"):
        if not re.search("check_component|check_model", text):
            exec(compile(text, "retention.md", "exec"), names)
    assert {"expected", "actual"} <= {*names}


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"position": "alibi"}, {"position": "decay", "d_head": 6}])
def test_it_keeps_every_promise_with_other_fields(fields: dict[str, object], plugins: object) -> None:
    check_component("retention", slot="attention", fields=fields, plugins=plugins)


@pytest.mark.slow
def test_it_keeps_them_in_cross_attention_and_windows(plugins: object) -> None:
    check_model(tfkit.loads(MEMORY, plugins=plugins), plugins=plugins)
    windowed = MEMORY.replace("position: decay}", "position: decay, mask: {left: 3, right: 0}}")
    check_model(tfkit.loads(windowed, plugins=plugins), plugins=plugins)


@pytest.mark.slow
def test_it_leaves_with_a_memory(plugins: object) -> None:
    graph = tfkit.loads(MEMORY, plugins=plugins)
    assert check(graph, eject(graph)).ran


def test_its_code_for_transformers_needs_no_tfkit(plugins: object) -> None:
    (text,) = [block["text"] for block in BLOCKS if block["file"] == "retnet.yaml"]
    code = code_of(tfkit.loads(text, plugins=plugins)).modeling
    assert code.count("def update_cache(") == 1  # the function for the cache of transformers
    assert "tfkit" not in code


def test_a_cache_of_a_memory_is_read_once(plugins: object) -> None:
    model = tfkit.build(tfkit.loads(MEMORY, plugins=plugins)).eval()
    source, target = torch.randint(11, (2, 6)), torch.randint(11, (2, 7))
    cached = tfkit.CachedModel(model, length=8)
    cached.start(2, source=source)
    chunks = [cached(target[:, :3]), *(cached(target[:, n : n + 1]) for n in range(3, 7))]
    torch.testing.assert_close(torch.cat(chunks, dim=1), model(source, target))


def test_rotary_positions_are_refused(plugins: object) -> None:
    with pytest.raises(tfkit.SpecError, match="retention does not rotate queries and keys"):
        tfkit.loads(MEMORY.replace("position: decay", "position: rope"), plugins=plugins)
