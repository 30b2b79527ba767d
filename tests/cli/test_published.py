"""The commands about published models: import, tensors, save, compare, and build with weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import tfkit
from tfkit.cli import main

Run = Callable[..., str]
Golden = Callable[[str, str], None]
SMALL_CONFIG = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24, "resid_pdrop": 0.0}
SMALL_CONFIG |= {"bos_token_id": 0, "eos_token_id": 0}
transformers.utils.logging.disable_progress_bar()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder `theirs` of a small GPT-2, beside which the test runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**SMALL_CONFIG)).save_pretrained("theirs")
    return tmp_path


def test_from_a_folder_and_back(folder: Path, run: Run, golden: Golden, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "theirs"]) == 0
    golden("published/import", capsys.readouterr().out)
    golden("published/import_to_a_file", run("import", "theirs", "-o", "my.yaml", "--name", "my"))
    golden("published/tensors", run("tensors", "theirs"))
    assert json.loads(run("tensors", "theirs", "--json"))["transformer.wte.weight"]["shape"] == [61, 32]
    assert "28,192 parameters" in run("build", "my.yaml", "--weights", "theirs")
    golden("published/save", run("save", "my.yaml", "--weights", "theirs", "--layout", "huggingface", "-o", "back"))
    again = transformers.AutoModelForCausalLM.from_pretrained("back")
    before = load_file("theirs/model.safetensors")
    assert all(torch.equal(before[name], tensor) for name, tensor in load_file("back/model.safetensors").items())
    assert again.config.n_head == 4
    run("save", "my.yaml", "--weights", "back", "--layout", "tfkit", "-o", "own", "--dtype", "bfloat16")
    assert load_file("own/model.safetensors")["decoder.final_norm.bias"].dtype == torch.bfloat16
    names = ["export_config.json", "generation_config.json", "model.safetensors", "spec.yaml"]
    assert sorted(path.name for path in Path("own").iterdir()) == names


def test_what_was_built_can_be_saved_in_the_published_layout(folder: Path, run: Run) -> None:
    """A spec that is written out in full still says what its family calls each value."""
    run("import", "theirs", "-o", "my.yaml")
    run("build", "my.yaml", "--weights", "theirs", "-o", "built")
    run("save", "built/spec.yaml", "--weights", "built", "--layout", "huggingface", "-o", "back")
    before, after = load_file("theirs/model.safetensors"), load_file("back/model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())


def test_diff(folder: Path, run: Run, golden: Golden) -> None:
    """The values that a spec and a config.json have and the other does not, whichever comes first."""
    run("import", "theirs", "-o", "my.yaml")
    assert run("diff", "my.yaml", "theirs").startswith("no value differs")
    changes = ["--set", "decoder.attention.n_heads=2", "--set", "decoder.ffn.d_ff=64", "--set", "logits.tie=null"]
    golden("published/diff", run("diff", "my.yaml", "theirs", *changes))
    report = json.loads(run("diff", "theirs/config.json", "my.yaml", *changes, "--json"))
    (heads,) = [difference for difference in report["differences"] if difference["path"].endswith("n_heads")]
    assert (report["a"], report["b"]) == ("theirs/config.json", "my.yaml")
    assert (heads["before"], heads["after"]) == ("4", "2")
    assert report["parameters"] == [28192, tfkit.count_params(tfkit.load("my.yaml", sets=changes[1::2])).total]


def test_a_folder_with_a_spec_is_that_spec(folder: Path, run: Run) -> None:
    run("import", "theirs", "-o", "theirs/spec.yaml", "--name", "of_the_spec")
    assert "of_the_spec" in run("diff", "gpt2", "theirs")
    assert "of_the_spec" not in run("diff", "gpt2", "theirs/config.json")


WRONG_DIFFS = {
    "family_without_a_config": (["gpt2", "gpt2_medium", "--family", "gpt2"], 2),
    "set_without_a_spec": (["theirs", "theirs", "--set", "decoder.n_layers=1"], 2),
    "family_without_a_section": (["gpt2", "theirs", "--family", "plain.yaml"], 1),
    "no_config": (["gpt2", "elsewhere"], 1),
    "no_such_file": (["gpt2", "theirs/confg.json"], 1),
    "no_such_type": (["gpt2", "odd"], 1),
    "no_data": (["gpt2", "broken.json"], 1),
}


@pytest.mark.parametrize("name", WRONG_DIFFS)
def test_a_wrong_diff(name: str, folder: Path, run: Run, golden: Golden) -> None:
    arguments, status = WRONG_DIFFS[name]
    for value in ("elsewhere", "odd"):
        Path(value).mkdir()
    Path("elsewhere/model.safetensors").touch()
    Path("odd/config.json").write_text('{"model_type": "gtp2"}', encoding="utf-8")
    Path("plain.yaml").write_text("extends: gpt2\nname: plain\ncheckpoint: null\n", encoding="utf-8")
    Path("broken.json").write_text('{"model_type": ', encoding="utf-8")
    text = run("diff", *arguments, status=status, stderr=True)
    text = re.sub(r"= known: .*?\n   = help", "= known: ...\n   = help", text, flags=re.DOTALL)
    golden(f"published/diff_{name}", text)


def test_compare(folder: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("import", "theirs", "-o", "my.yaml")
    assert main(["compare", "my.yaml", "theirs"]) == 0
    out = capsys.readouterr().out
    assert "20 components compared" in out
    assert "equal to 1e-05" in out
    changes = ["--set", "decoder.norm.eps=1e-3", "--reference", "float64"]
    assert main(["compare", "my.yaml", "theirs", *changes]) == 1
    out = capsys.readouterr().out
    assert "they diverge at decoder.layers.0.attention_norm_in: " in out
    assert main(["compare", "my.yaml", "theirs", *changes, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["first"]["other"] == "transformer.h.0.ln_1"
    assert report["first"]["reference"] < 1e-6 < report["first"]["difference"]
    assert report["first"]["values"][0] != report["first"]["values"][1]


@pytest.mark.filterwarnings("ignore:The TorchScript type system:UserWarning")
def test_compare_specs_and_programs(folder: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("import", "theirs", "-o", "my.yaml")
    text = Path("my.yaml").read_text()
    Path("other.yaml").write_text(text.replace("approximate: tanh", "approximate: none", 1))
    assert main(["compare", "my.yaml", "my.yaml"]) == 0
    assert "largest difference of the outputs: 0.0e+00" in capsys.readouterr().out
    assert main(["compare", "my.yaml", "other.yaml", "--tolerance", "1e-7"]) == 1
    assert "they diverge at decoder.layers.0.ffn.activation" in capsys.readouterr().out
    model = tfkit.build("my.yaml").eval()
    torch.jit.script(model).save("scripted.pt")
    assert main(["compare", "my.yaml", "scripted.pt"]) == 0
    example = {"tokens": torch.zeros(2, 16, dtype=torch.long)}
    torch.export.save(torch.export.export(model, (), kwargs=example), "exported.pt2")
    assert main(["compare", "my.yaml", "exported.pt2"]) == 0
    assert "1 component compared" in capsys.readouterr().out


WRONG_CONFIGS = {
    "unknown_type": {"model_type": "gpt9"},
    "unknown_type_near": {"model_type": "gtp2"},
    "no_type": {"model_type": None},
    "value_that_cannot_be_said": {"activation_function": "mish"},
    "only_one_value": {"scale_attn_by_inverse_layer_idx": True},
    "field_missing": {"n_head": ...},
    "relation": {"n_head": 5},
    "wrong_type": {"n_layer": "two"},
    "another_head": {"architectures": ["GPT2ForMaskedLM"]},
}


@pytest.mark.parametrize("name", WRONG_CONFIGS)
def test_a_config_that_cannot_be_imported(name: str, folder: Path, run: Run, golden: Golden) -> None:
    path = folder / "theirs" / "config.json"
    fields = {**json.loads(path.read_text()), **WRONG_CONFIGS[name]}
    path.write_text(json.dumps({key: value for key, value in fields.items() if value is not ...}, indent=2))
    text = run("import", "theirs", "-o", "my.yaml", status=1, stderr=True)
    golden(f"published/{name}", re.sub(r"= known: .*?\n    = help", "= known: ...\n    = help", text, flags=re.DOTALL))
    assert not Path("my.yaml").exists()


def test_a_field_that_the_class_ignores_is_a_warning(folder: Path, run: Run) -> None:
    """Without code in the folder, the class of transformers is the only reader of the file."""
    path = folder / "theirs" / "config.json"
    expected = run("import", "theirs")
    fields = {**json.loads(path.read_text()), "n_experts": 8}
    path.write_text(json.dumps(fields, indent=2))
    output = run("import", "theirs", stderr=True)
    assert "warning: gpt2 does not have the field `n_experts`" in output
    assert "its class in transformers ignores the field" in output
    path.write_text(json.dumps({**fields, "quantization_config": {"quant_method": "mxfp4", "bits": 4}}))
    assert "warning: the weights of this folder are quantized by `mxfp4`" in run("import", "theirs", stderr=True)
    run("import", "theirs", "-o", "my.yaml", stderr=True)
    assert Path("my.yaml").read_text().endswith(expected)
    path.write_text(json.dumps({**fields, "auto_map": {"AutoConfig": "code.Config"}}, indent=2))
    output = run("import", "theirs", status=1, stderr=True)
    assert output.startswith("error: gpt2 does not have the field `n_experts`")


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": }', "\x00", "word"])
def test_a_file_that_is_no_config(text: str, folder: Path, run: Run) -> None:
    (folder / "theirs" / "config.json").write_text(text)
    assert run("import", "theirs", status=1, stderr=True).startswith("error: ")


def test_what_cannot_be_saved(folder: Path, run: Run, golden: Golden) -> None:
    run("import", "theirs", "-o", "my.yaml")
    arguments = ["--weights", "theirs", "--layout", "huggingface", "-o", "back"]
    refused = run("save", "my.yaml", *arguments, "--set", "decoder.ffn.activation=1", status=1, stderr=True)
    assert refused.startswith("error: unknown key `activation`")
    changes = ["--set", "decoder.placement=sandwich"]
    text = run("save", "my.yaml", *arguments, *changes, status=1, stderr=True)
    golden("published/other_weights", re.sub(r"--> \S*specs", "--> specs", text))
    changes = ["--set", "embedding.scale=2.0"]
    golden("published/no_such_config", run("save", "my.yaml", *arguments, *changes, status=1, stderr=True))
    changes = ["--set", "checkpoint=null"]
    golden("published/no_checkpoint", run("save", "my.yaml", *arguments, *changes, status=1, stderr=True))
    assert not Path("back").exists()


def test_compare_with_what_is_no_model(folder: Path, run: Run, golden: Golden) -> None:
    run("import", "theirs", "-o", "my.yaml")
    Path("theirs/config.json").rename("config.json")
    golden("published/compare_no_config", run("compare", "my.yaml", "theirs", status=1, stderr=True))
    Path("text.pt").write_text("no program")
    assert "`text.pt` is neither a spec, nor a folder, nor a program" in run(
        "compare", "my.yaml", "text.pt", status=1, stderr=True
    )
