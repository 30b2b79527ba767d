from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tfkit
from tfkit.checkpoint import folder_format
from tfkit.tools.common import atomic_files
from tfkit.tools.common.atomic_files import write_file
from tfkit.tools.common.companions import Companions
from tfkit.tools.save.layouts import layouts_of
from tfkit.tools.save.save import save

from ...small_specs import reduced


def test_what_is_saved_is_the_model(small: tfkit.Graph, tmp_path: Path) -> None:
    model = tfkit.build(small, seed=5)
    spec, weights = save(model, tmp_path / "out")
    again = tfkit.build(spec)
    again.load_state_dict(load_file(weights))
    tokens = torch.arange(8)[None]
    assert torch.equal(model.eval()(tokens), again.eval()(tokens))
    assert os.stat(spec).st_mode == os.stat(weights).st_mode


def test_the_tokenizer_of_the_weights_comes_along(small: tfkit.Graph, tmp_path: Path) -> None:
    published, out = tmp_path / "published", tmp_path / "out"
    published.mkdir()
    for name in ("tokenizer.json", "merges.txt", "README.md", "model.safetensors"):
        (published / name).write_text(name)
    files = save(tfkit.build(small), out, files_from=published / "model.safetensors")
    assert {path.name for path in files} == {"spec.yaml", "model.safetensors", "tokenizer.json", "merges.txt"}
    assert [(out / name).read_text() for name in ("tokenizer.json", "merges.txt")] == ["tokenizer.json", "merges.txt"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("before", ["nothing", "a model"])
@pytest.mark.parametrize("when", ["writing", "renaming"])
def test_a_failure_in_the_middle_leaves_all_as_it_was(
    small: tfkit.Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, before: str, when: str
) -> None:
    folder = tmp_path / "deep" / "out"
    if before == "a model":
        save(tfkit.build(small, seed=1), folder)
    old = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def half(model: object, path: str, metadata: object) -> None:
        Path(path).write_bytes(b"half")
        raise error

    def fail(*names: Path) -> None:
        raise error

    if when == "writing":
        monkeypatch.setattr(folder_format, "save_model", half)
    else:
        monkeypatch.setattr(atomic_files, "move_to_target", fail)
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else tfkit.SpecError
    with pytest.raises(expected, match=None if expected is KeyboardInterrupt else "No space left on device"):
        save(tfkit.build(small, seed=2), folder, force=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == old
    assert folder.exists() == bool(old)
    assert (tmp_path / "deep").exists() == bool(old)
    assert not list(tmp_path.rglob(".*"))


def test_a_folder_with_other_files_is_never_replaced(small: tfkit.Graph, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(tfkit.SpecError, match=r"thesis\.tex"):
        save(tfkit.build(small), tmp_path, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_where_it_may_write(small: tfkit.Graph, tmp_path: Path) -> None:
    check_folder = layouts_of(tfkit.load_plugins(entry_points=False)).check_folder
    check_folder(tmp_path, force=False)  # there, and empty
    check_folder(tmp_path / "new", force=False)
    (tmp_path / "file").touch()
    with pytest.raises(tfkit.SpecError, match="is a file"):
        check_folder(tmp_path / "file", force=True)
    save(tfkit.build(small), tmp_path / "out")
    with pytest.raises(tfkit.SpecError, match="already exists"):
        check_folder(tmp_path / "out", force=False)
    check_folder(tmp_path / "out", force=True)
    (tmp_path / "out" / "tokenizer.json").write_text("{}")
    with pytest.raises(tfkit.SpecError, match=r"must hold only the files of a model; got tokenizer\.json"):
        check_folder(tmp_path / "out", force=True)
    check_folder(tmp_path / "out", force=True, companions=Companions({"merges.txt": b""}, {}))


def test_a_text_is_replaced_whole(tmp_path: Path) -> None:
    write_file(tmp_path / "a.json", "old")
    write_file(tmp_path / "a.json", "new")
    assert (tmp_path / "a.json").read_text() == "new"
    with pytest.raises(tfkit.SpecError, match="cannot write"):
        write_file(tmp_path / "nowhere" / "a.json", "text")
    with pytest.raises(UnicodeEncodeError):
        write_file(tmp_path / "a.json", "\ud800")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "new")]
    write_file(Path(os.devnull), "text")
    assert not Path(os.devnull).is_file()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_kept_and_replace_no_others(
    small: tfkit.Graph, tmp_path: Path, value: float
) -> None:
    sound, broken, out = tfkit.build(small), tfkit.build(small), tmp_path / "out"
    broken.get_parameter("embedding.tokens.weight").data[1, 2] = value
    with pytest.warns(
        tfkit.NotFiniteWarning, match=r"infinite or NaN\n   = in `embedding\.tokens\.weight`\n.*does not load"
    ) as caught:
        _, weights = save(broken, out)
    assert caught[0].filename == __file__
    assert not load_file(weights)["embedding.tokens.weight"].isfinite().all()
    with pytest.raises(tfkit.SpecError, match="values that are infinite or NaN"):
        tfkit.build(out)
    with pytest.raises(tfkit.SpecError, match="cannot replace the model in"):
        save(broken, out, force=True)
    save(sound, out, force=True)
    assert torch.equal(tfkit.build(out).get_parameter("embedding.tokens.weight"), sound.embedding.tokens.weight)


@pytest.mark.parametrize("layout", ["tfkit", "huggingface", pytest.param("export", marks=pytest.mark.slow)])
def test_equal_models_are_equal_bytes(layout: Any, tmp_path: Path) -> None:
    """Each file has three or more texts of metadata, whose order would be random."""
    model, files = tfkit.build(reduced("gpt2"), seed=2), []
    for number in range(3):
        folder = tmp_path / str(number)
        if layout == "export":
            tfkit.export(model, folder.with_suffix(".safetensors"))
            files.append(folder.with_suffix(".safetensors"))
        else:
            tfkit.save(model, folder, layout=layout)
            files.append(folder / "model.safetensors")
    assert len({file.read_bytes() for file in files}) == 1
