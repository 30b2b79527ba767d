"""Tokenizers, and streamed text, which equals the text of decoding all tokens together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

import tfkit
from tfkit.decoding.text import CharacterTokenizer, FileTokenizer, NumberTokenizer, Texts, TextStream, load_tokenizer

LINES = ["the quick brown fox", "jumps over the lazy dog", "naïve café 你好 🙂🙃", "x = [1, 2]\n\n\treturn"] * 3
END = "<|end|>"


def byte_level(lines: Sequence[str] = LINES, size: int = 300) -> tokenizers.Tokenizer:
    """As GPT-2's: a character may be spread over several tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if size > 256 else []
    tokenizer.train_from_iterator(
        lines,
        trainers.BpeTrainer(vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False),
    )
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama's: blanks are part of words, the first one is dropped, unknown characters become bytes."""
    words = sorted(set("▁abcdefghijklmnopqrstuvwxyz") | {"▁the", "he", "in", "▁q", "th"})
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", *(f"<0x{i:02X}>" for i in range(256)), *words])}
    merges = [("h", "e"), ("i", "n"), ("t", "h"), ("▁", "q")]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return tokenizer


BYTE_LEVEL, BYTE_FALLBACK = FileTokenizer(byte_level()), FileTokenizer(byte_fallback())
TEXT = st.text(st.sampled_from("the quick 你🙂é\n▁"), max_size=120)


def streamed(stream: TextStream, ids: Sequence[int]) -> tuple[list[str], str]:
    return [stream.feed(token) for token in ids], stream.finish()


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte level", "byte fallback"])
@settings(deadline=None, max_examples=80)
@given(text=TEXT)
def test_a_stream_gives_the_whole_text_and_no_half_characters(tokenizer: FileTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    parts, rest = streamed(TextStream(tokenizer), ids)
    assert "".join(parts) + rest == tokenizer.decode(ids)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in parts)
    assert rest == ""


@settings(deadline=None, max_examples=80)
@given(ids=st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=50), times=st.integers(1, 9))
def test_a_stream_of_any_tokens_gives_the_whole_text(ids: list[int], times: int) -> None:
    ids = ids * times  # longer than what is decoded again for each token
    parts, rest = streamed(TextStream(BYTE_LEVEL), ids)
    assert "".join(parts) + rest == BYTE_LEVEL.decode(ids)


def test_a_character_comes_when_it_is_complete() -> None:
    ids = BYTE_LEVEL.encode("a🚀b")
    parts, rest = streamed(TextStream(BYTE_LEVEL), ids)
    assert [piece for piece in parts if piece] == ["a", "🚀", "b"]
    assert len(parts) > 3
    assert streamed(TextStream(BYTE_LEVEL), ids[:-2]) == (
        ["a", "", "", ""][: len(ids) - 2],
        "\N{REPLACEMENT CHARACTER}",
    )
    assert rest == ""


@settings(deadline=None, max_examples=100)
@given(text=st.text("ab\n", max_size=30), stop=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
def test_a_stop_text_ends_the_stream_and_is_never_shown(text: str, stop: list[str]) -> None:
    tokenizer = CharacterTokenizer("ab\n")
    stream = TextStream(tokenizer, stop)
    output = ""
    for end, token in enumerate(tokenizer.encode(text), 1):
        output += stream.feed(token)
        assert text.startswith(output)
        assert stream.stopped == any(marker in text[:end] for marker in stop)
    ends = [start for marker in stop if (start := text.find(marker)) >= 0]
    if not ends:
        assert output + stream.finish() == text
    else:
        assert not any(marker in output for marker in stop)
        assert stream.finish() == ""


def test_a_stop_text_over_several_tokens() -> None:
    parts, rest = streamed(TextStream(BYTE_LEVEL, ["fox\n"]), BYTE_LEVEL.encode("quick foxes, a fox\nthe end"))
    assert "".join(parts) == "quick foxes, a "
    assert rest == ""


def test_the_first_of_two_stop_texts_in_one_token() -> None:
    tokenizer = CharacterTokenizer("ab")
    tokenizer.decode = lambda ids: "xaxbx" * len(ids)  # type: ignore[method-assign]
    assert TextStream(tokenizer, ["b", "a"]).feed(0) == TextStream(tokenizer, ["a", "b"]).feed(0) == "x"


def test_the_texts_of_several_rows() -> None:
    calls = []
    texts = Texts(CharacterTokenizer("abc\n"), 3, ["\n", "cc"], lambda texts: calls.append(list(texts.texts)))
    assert texts([0, 1, 2]) == []
    assert texts([0, 3, None]) == [1]
    assert texts.complete == [False, True, True]
    assert texts([2, None, None]) == [1]
    assert texts.finish() == ["aac", "b", "c"]
    assert texts.complete == [True] * 3
    assert calls == [["a", "b", ""], ["aa", "b", "c"], ["aa", "b", "c"], ["aac", "b", "c"]]


# ---- tokenizers ----


def test_a_tokenizer_file_is_what_the_library_reads(tmp_path: Path) -> None:
    theirs = byte_level()
    theirs.enable_truncation(3)
    theirs.enable_padding(length=8)
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path / "tokenizer.json")
    text = "the lazy dog, naïve 🙂"
    assert ours.encode(text) == byte_level().encode(text).ids, "neither cut nor padded"
    assert ours.vocab_size == byte_level().get_vocab_size()
    end = ours.special(END)
    assert end == byte_level().token_to_id(END)
    assert ours.special("the") is None
    assert ours.decode([*ours.encode(text), end]) == text  # type: ignore[list-item]


def test_special_tokens_are_added_and_not_shown() -> None:
    ids = BYTE_FALLBACK.encode("the end")
    assert ids[0] == BYTE_FALLBACK.special("<s>")
    assert BYTE_FALLBACK.decode(ids) == "the end"


def test_characters(tmp_path: Path) -> None:
    tokenizer = CharacterTokenizer.of_text("hello\nwörld")
    assert tokenizer.characters == "\ndehlorwö"
    assert tokenizer.decode(tokenizer.encode("wöw\n")) == "wöw\n"
    assert tokenizer.decode([0, 99]) == "\n\N{REPLACEMENT CHARACTER}"
    tokenizer.save(tmp_path / "chars.json")
    (tmp_path / "text.txt").write_text("hello\nwörld", encoding="utf-8")
    for name in ("chars.json", "text.txt"):
        again = load_tokenizer(tmp_path / name)
        assert isinstance(again, CharacterTokenizer)
        assert again.characters == tokenizer.characters
    assert json.loads((tmp_path / "chars.json").read_text(encoding="utf-8")) == {"characters": "\ndehlorwö"}
    with pytest.raises(ValueError, match=r"^not among the 9 characters of the tokenizer: `x`, `!`$"):
        tokenizer.encode("lox!x")
    with pytest.raises(ValueError, match=r"^characters must not be empty or repeat$"):
        CharacterTokenizer("aba")


def test_ids_beyond_the_vocabulary_of_bytes() -> None:
    assert tfkit.ByteTokenizer().decode([104, 105, 300, 33]) == "hi\N{REPLACEMENT CHARACTER}!"


def test_numbers() -> None:
    tokenizer = NumberTokenizer()
    assert tokenizer.encode(" 3, 14,15") == [3, 14, 15]
    assert tokenizer.encode("") == []
    assert tokenizer.decode([3, 14]) == "3, 14"
    assert tokenizer.special("7") == 7
    for name in ("-1", "1.5", "two", "1,,2", "9" * 10):
        with pytest.raises(ValueError, match=r"is not a token id: ids are integers, as in `5,7`$"):
            tokenizer.encode(name)


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("missing.json", None, "No such file or directory"),
        ("broken.json", b"{", "not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("other.json", b'{"model": 3}', None),
        ("list.json", b"[]", None),
        ("empty.txt", b"", "characters must not be empty or repeat"),
        (
            "twice.json",
            b'{"characters": "aa"}',
            "characters must not be empty or repeat",
        ),
        ("binary.txt", b"\xff\xfe", "it is not UTF-8"),
    ],
)
def test_files_that_are_no_tokenizers(tmp_path: Path, name: str, content: bytes | None, cause: str | None) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(tfkit.SpecError) as refused:
        load_tokenizer(path)
    text = str(refused.value)
    assert text.startswith("error: cannot read the tokenizer ")
    assert text.endswith(cause or "")
    assert "\n" not in text
