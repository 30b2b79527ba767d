from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from tfkit.errors import Source
from tfkit.spec import source
from tfkit.spec.source import Mapping, Node, Scalar, Sequence, parse, parse_value, plain_data, read

from .texts import GOOD, failure


def marked(node: Node) -> str:
    """The text that a node's span points at."""
    start = node.span.column - 1
    return node.span.source.line(node.span.line)[start : start + node.span.length]


@pytest.mark.usefixtures("parser")
def test_values_know_their_places() -> None:
    spec = parse(GOOD, "good.yaml")
    graph = spec.items["graph"]
    assert isinstance(graph, Mapping)
    decoder, encoder = graph.items["decoder"], graph.items["encoder"]
    assert isinstance(decoder, Mapping)
    assert isinstance(encoder, Mapping)
    assert isinstance(encoder.items["pattern"], Sequence)
    assert marked(spec.items["dropout"]) == "1e-1"
    assert marked(spec.items["name"]) == "'vaswani base'"
    assert marked(spec.items["inputs"]) == "[source, target]"
    assert marked(encoder) == "block: encoder"
    assert [marked(item) for item in encoder.items["pattern"].items] == ["local*5", "global"]
    assert (encoder.items["block"].span.line, encoder.items["block"].span.column) == (10, 12)
    assert (graph.keys["decoder"].line, graph.keys["decoder"].column, graph.keys["decoder"].length) == (
        15,
        3,
        7,
    )
    assert decoder.keys["memory"].column == 41
    assert decoder.keys["attention"] == encoder.keys["attention"], "a merged key stands where it was written"
    assert spec.items["name"] == Scalar("vaswani base", spec.items["name"].span, quoted=True)


@pytest.mark.usefixtures("parser")
def test_places_count_characters() -> None:
    spec = parse("\ufeffé: ['𝄞', x]\r\nb: &a  # note\r\n  c: *d\r\n".replace("*d", "y"), "s")
    assert isinstance(spec.items["é"], Sequence)
    assert [(item.span.column, marked(item)) for item in spec.items["é"].items] == [(5, "'𝄞'"), (10, "x")]
    assert (spec.items["b"].span.line, marked(spec.items["b"])) == (3, "c: y")


WORDS: list[tuple[str, object]] = [
    *((word, None) for word in ("", "~", "null", "Null", "NULL")),
    *((word, True) for word in ("true", "True", "TRUE")),
    *((word, False) for word in ("false", "False", "FALSE")),
    *((word, word) for word in ("yes", "no", "on", "off", "y", "N", "tRUE", "nULL")),
    *((word, word) for word in ("1_000", "1:30", "0b11", "2001-01-01", "-0x1F", "0o8", "1e", ".", "0-2", "=")),
    ("0", 0),
    ("-0", 0),
    ("+12", 12),
    ("999999999999999999", 10**18 - 1),
    ("0o17", 15),
    ("0x1F", 31),
    ("1e-5", 1e-5),
    ("1E5", 1e5),
    (".5", 0.5),
    ("5.", 5.0),
    ("-1.5e+3", -1500.0),
    ("0.0", 0.0),
    ("'1'", "1"),
    ('"null"', "null"),
    ("''", ""),
    ('"a\\u0007"', "a\x07"),
    ("d_head ** -0.5", "d_head ** -0.5"),
    ("a#b", "a#b"),
    ("\u0661", "\u0661"),
]


@pytest.mark.usefixtures("parser")
def test_words_by_yaml_1_2() -> None:
    for text, value in WORDS:
        node = parse(f"a: {text}\n", "s").items["a"]
        assert isinstance(node, Scalar), text
        assert (type(node.value), node.value) == (type(value), value), text
        assert node.quoted == text.startswith(("'", '"')), text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("b: {<<: *base, y: 3}", {"x": 1, "y": 3}),
        ("b: {y: 3, <<: *base}", {"y": 3, "x": 1}),
        ("b: {z: 0, <<: *base, w: 4}", {"z": 0, "x": 1, "y": 2, "w": 4}),
        ("b: {<<: [*base, *other]}", {"x": 1, "y": 2, "v": 8}),
        ("b: {<<: [*other, *base]}", {"x": 9, "v": 8, "y": 2}),
        ("b: {<<: {x: 5}}", {"x": 5}),
        ("b: {<<: [], c: 1}", {"c": 1}),
        ("b: {<<: &m {<<: *base, x: 7}, n: *m}", {"y": 2, "x": 7, "n": {"y": 2, "x": 7}}),
    ],
)
def test_merge_keys(text: str, expected: dict[str, Any]) -> None:
    spec = plain_data(parse(f"base: &base {{x: 1, y: 2}}\nother: &other {{x: 9, v: 8}}\n{text}\n", "s"))
    assert list(spec["b"].items()) == list(expected.items())
    assert spec["base"] == {"x": 1, "y": 2}


@pytest.mark.parametrize(
    "text", ["012", "a: b: c", "[1, 2", "*x", "!t 1", "# only", "1\n---\n2", "{a: 1, a: 2}", "\x07"]
)
def test_errors_in_one_value_point_into_the_whole_argument(text: str) -> None:
    argument = Source("--set", f"graph.decoder.n_layers={text}")
    error = failure(lambda: parse_value(argument, len("graph.decoder.n_layers=")))
    span = error.diagnostics[0].span
    assert span is not None
    assert span.source == argument
    assert span.line > 1 or span.column > len("graph.decoder.n_layers=")


def test_one_value() -> None:
    def value(text: str) -> Any:
        return plain_data(parse_value(Source("--set", f"a.b={text}"), 4))

    assert value("12") == 12
    assert value("") is None
    assert value("{kind: gqa, n: [1, no]}") == {"kind": "gqa", "n": [1, "no"]}
    assert value("x=y") == "x=y"
    node = parse_value(Source("--set", "a.b={k: 7}"), 4)
    assert isinstance(node, Mapping)
    assert (node.span.column, node.keys["k"].column, node.items["k"].span.column) == (5, 6, 9)


def test_a_value_of_a_set_argument_that_is_only_a_comment(golden: Callable[[str, str], None]) -> None:
    golden("source/set_comment", str(failure(lambda: parse_value(Source("--set", "name=#1"), 5))))


def test_an_alias_stands_where_it_is_used() -> None:
    spec = parse("a: &x {y: 1}\nb: *x\n", "s")
    a, b = spec.items["a"], spec.items["b"]
    assert isinstance(a, Mapping)
    assert isinstance(b, Mapping)
    assert (marked(a), marked(b), b.span.line) == ("{y: 1}", "*x", 2)
    assert b.items["y"] is a.items["y"]


def test_read(tmp_path: Path) -> None:
    path = tmp_path / "good.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    spec = read(path)
    assert plain_data(spec) == plain_data(parse(GOOD, "s"))
    assert spec.span.source.name == str(path)
    assert read(str(path), name="specs/good.yaml").span.source.name == "specs/good.yaml"


FILES = {
    "not_utf8": "name: ok\nnöte: 日本".encode() + "caf\xe9\n".encode("latin-1"),
    "utf16": "\ufeffa: 1\n".encode("utf-16-le"),
    "too_large": b"#" * ((1 << 20) + 1),
}


@pytest.mark.parametrize("name", FILES)
def test_unreadable_contents(name: str, tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_bytes(FILES[name])
    golden(f"source/{name}", str(failure(lambda: read(path, name="specs/tiny.yaml"))))


def test_unreadable_files(tmp_path: Path, golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").touch()
    golden("source/missing_file", str(failure(lambda: read("tinny.yaml"))))
    golden("source/missing_folder", str(failure(lambda: read("nowhere/llama.yaml"))))
    golden("source/directory", str(failure(lambda: read(tmp_path, name="specs"))))
    assert re.search("null (byte|character)", str(failure(lambda: read("a\0b"))))
    assert "cannot read `" in str(failure(lambda: read("x" * 10_000, name="specs/tiny.yaml")))

    def refuse(*_: object) -> bytes:
        raise PermissionError

    monkeypatch.setattr(source, "file_bytes", refuse)
    golden("source/no_permission", str(failure(lambda: read("tiny.yaml"))))


def test_a_file_that_hides_its_size_is_read_in_part() -> None:
    zero = Path("/dev/zero")
    if not zero.exists():
        pytest.skip("no /dev/zero")
    assert "larger than 1 MiB" in str(failure(lambda: read(zero)))


@pytest.mark.parametrize("text", ["", "# a comment\n", "~", "null  # nothing\n", "---\n"])
def test_a_spec_without_a_value_is_empty(text: str) -> None:
    assert "the file is empty" in str(failure(lambda: parse(text, "s")))


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    """Also if its writer begins later, as a process whose output is a file for the shell."""
    path = tmp_path / "pipe.yaml"
    os.mkfifo(path)
    assert "the file is empty" in str(failure(lambda: read(path)))
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(path, os.O_WRONLY)
    Timer(0.05, lambda: (os.write(writer, GOOD.encode()), os.close(writer))).start()
    assert plain_data(read(path)) == plain_data(parse(GOOD, "s"))
    os.close(reader)


def test_missing_space_is_found_only_where_it_is() -> None:
    assert failure(lambda: parse("https://example.org\n", "s")).diagnostics[0].help is None
