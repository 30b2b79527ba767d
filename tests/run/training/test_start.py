"""Runs that begin with trained weights: all or some, partly frozen, and saved again as published."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import tfkit
from tfkit.cli import main
from tfkit.errors import SpecError
from tfkit.run.checked_run import load_run
from tfkit.run.training.loop import Trainer
from tfkit.spec.weight_files import content_of
from tfkit.tools.import_.importing import import_config

from ...sampling import chosen, spread
from .runs import PLUGINS, Memory, same, small_run, trained, write_run

transformers.utils.logging.disable_progress_bar()
SMALL_CONFIG = {"vocab_size": 256, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0}
PUBLISHED: dict[str, transformers.PretrainedConfig] = {
    "gpt2": transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=12, vocab_size=256),
    "llama": transformers.LlamaConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=24,
        **SMALL_CONFIG,
    ),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)


def published(name: str) -> Path:
    """A folder as transformers publishes it, and `NAME.yaml` beside it."""
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(PUBLISHED[name])
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.3)
    theirs.save_pretrained("theirs")
    Path(f"{name}.yaml").write_text(import_config(Path("theirs")).text, encoding="utf-8")
    return Path("theirs")


def train(*words: str) -> int:
    return main(["train", *words])


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_checkpoint_is_fine_tuned_and_published_again(name: str) -> None:
    published(name)
    run = f"""
        tfkit: 1
        name: tuned
        model: {name}.yaml
        weights: theirs
        freeze: ["embedding.*"]
        data: {{kind: text, files: sheep.txt, tokenizer: bytes}}
        batch: {{sequences: 4, length: 12}}
        steps: 3
        optimizer: {{kind: adamw, lr: 1e-2}}
    """
    Path("tune.yaml").write_text("\n".join(line[8:] for line in run.splitlines()), encoding="utf-8")
    assert train("tune.yaml", "-o", "out") == 0
    assert main(["save", "out", "--layout", "huggingface", "-o", "again"]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained("again").eval()
    before = transformers.AutoModelForCausalLM.from_pretrained("theirs").eval()
    tokens = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, tfkit.build("out").eval()(tokens), rtol=1e-4, atol=1e-4)
        assert not torch.allclose(theirs(tokens).logits, before(tokens).logits, atol=1e-2)
    old, new = before.get_input_embeddings().weight, theirs.get_input_embeddings().weight
    assert torch.equal(old, new)
    text = Path("out/metrics.jsonl").read_text(encoding="utf-8")
    notes = [json.loads(line) for line in text.splitlines()][:2]
    assert notes[0]["weights"].endswith("theirs")
    assert "embedding.tokens.weight" in notes[1]["frozen"]


RUN = """
tfkit: 1
name: tuned
model: {model}
weights: {weights}
data: {{kind: text, files: sheep.txt, tokenizer: bytes}}
batch: {{sequences: 4, length: 12}}
steps: 1
optimizer: {{kind: adamw, lr: 1e-2}}
eval: {{every: 1, splits: {{val: 1}}, metrics: [loss, accuracy, bits_per_byte]}}
"""


def tuned(model: str, weights: str) -> Trainer:
    Path("tune.yaml").write_text(RUN.format(model=model, weights=weights), encoding="utf-8")
    return Trainer(load_run("tune.yaml", PLUGINS), Memory())


@pytest.mark.parametrize("head", ["lm_head.weight", "lm_head.*"])
def test_a_new_head_on_an_untied_checkpoint(head: str) -> None:
    published("llama")
    weights = f"{{path: theirs, missing: ['logits.*'], unused: ['{head}']}}"
    trainer = tuned("llama.yaml", weights)
    state, before = trainer.model.state_dict(), tfkit.build("llama.yaml", weights="theirs").state_dict()
    fresh = tfkit.build("llama.yaml", seed=trainer.run.config.seed).state_dict()
    assert same(before, state, [name for name in before if name != "logits.output.weight"])
    assert same(fresh, state, ["logits.output.weight"])
    with pytest.raises(SpecError, match=r"has tensors that the model lacks:\n *= *lm_head.weight"):
        tuned("llama.yaml", "{path: theirs, missing: ['logits.*']}")


def test_another_head_in_place_of_an_untied_one() -> None:
    published("llama")
    graph = "{logits: null, classes: {block: classifier, n_classes: 256}}"
    weights = "{path: theirs, missing: ['classes.*'], unused: ['lm_head.weight']}"
    model = f"{{extends: llama.yaml, checkpoint: {{head: ForTokenClassification}}, graph: {graph}}}"
    state = tuned(model, weights).model.state_dict()
    before = tfkit.build("llama.yaml", weights="theirs").state_dict()
    assert same(before, state, [name for name in before if name != "logits.output.weight"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("missing: ['lm_head.weight']", "no weight of the model matches `lm_head.weight`"),
        ("missing: ['logits.*'], unused: ['logits.*']", "no tensor that the model does not read matches `logits.*`"),
    ],
)
def test_a_name_of_the_other_side_is_explained(words: str, message: str) -> None:
    published("llama")
    with pytest.raises(SpecError) as error:
        tuned("llama.yaml", f"{{path: theirs, {words}}}")
    assert message in str(error.value)
    help = "`missing` takes the names of the model's weights, `unused` the names of the file's tensors"
    assert help in " ".join(str(error.value).split())


def test_a_table_may_have_more_rows_than_the_tokenizer_has_tokens(tmp_path: Path) -> None:
    """Published tables are often padded; transformers samples from all rows, and so does tfkit."""
    sets = ["vocab_size=300", "d_model=16", "max_len=12", "decoder.n_layers=1", "decoder.attention.n_heads=2"]
    tfkit.save(tfkit.build("gpt2", sets=sets), "wide")
    tuned("wide/spec.yaml", "wide")
    assert train("tune.yaml", "-o", "out") == 0
    assert set(tfkit.evaluate("out")) == {"val.loss", "val.accuracy", "val.bits_per_byte"}


def test_the_first_loss_is_that_of_the_weights_that_a_run_begins_with(tmp_path: Path) -> None:
    base, weights = trained(small_run(tmp_path))
    del base
    assert train("small.yaml", "-o", "base") == 0
    for path in ("base", "base/step-8", "base/step-8/model.safetensors"):
        trainer = Trainer(small_run(tmp_path, f"weights={path}", "seed=9"), Memory())
        assert same(weights, trainer.model.state_dict())


def test_frozen_weights_have_no_gradient_and_no_state(tmp_path: Path) -> None:
    run = small_run(
        tmp_path, "freeze=['embedding.*', '*.attention.*']", "optimizer.weight_decay=0.5", "optimizer.decay_all=true"
    )
    first = Trainer(run, Memory()).model.state_dict()
    memory, weights = trained(run)
    frozen = [name for name in weights if name.startswith("embedding.") or ".attention." in name]
    assert len(frozen) == 2 + 2 * 4
    assert same(first, weights, frozen)
    assert not any(torch.equal(first[name], weights[name]) for name in weights if name not in frozen)
    assert memory.saved
    assert {name.split("/")[0] for name in memory.saved.optimizer} == set(weights) - set(frozen)
    assert memory.lines[0]["frozen"].startswith("embedding.tokens.weight, embedding.position.table")


def test_a_frozen_run_continues_with_the_same_bits(tmp_path: Path) -> None:
    sets = ["freeze=['embedding.*']", "model.dropout=0.2"]
    uninterrupted, weights = trained(small_run(tmp_path, *sets))
    part, _ = trained(small_run(tmp_path, *sets), until=3)
    rest, continued = trained(small_run(tmp_path, *sets), Memory(part.saved))
    assert part.lines + rest.lines == uninterrupted.lines
    assert same(weights, continued)


def test_weights_in_part(tmp_path: Path) -> None:
    _, weights = trained(small_run(tmp_path))
    del weights["head.output.weight"]
    weights |= {"other.0.weight": torch.ones(2), "other.1.weight": torch.ones(2)}
    save_file(weights, "part.safetensors")
    allowed = "weights={path: part.safetensors, missing: ['head.*'], unused: ['other.*']}"
    memory = Memory()
    trainer = Trainer(small_run(tmp_path, allowed), memory)
    fresh = Trainer(small_run(tmp_path), Memory()).model.state_dict()
    state = trainer.model.state_dict()
    del weights["other.0.weight"], weights["other.1.weight"]
    assert same(weights, state)
    assert torch.equal(state["head.output.weight"], fresh["head.output.weight"])
    trainer.train()
    text = memory.lines[0]["weights"]
    assert "; missing: head.output.weight; unused: other.0-1.weight" in text


def test_another_head_is_left_out_on_both_sides(tmp_path: Path) -> None:
    _, weights = trained(small_run(tmp_path))
    weights["head.output.weight"] = torch.zeros(5, 16)
    save_file(weights, "other.safetensors")
    setting = "weights={path: other.safetensors, missing: ['head.*'], unused: ['head.*']}"
    assert Trainer(small_run(tmp_path, setting), Memory()).notes["weights"].endswith("unused: head.output.weight")


FAULTS = {
    "lacking": ["weights=part.safetensors"],
    "shapes": ["weights=whole.safetensors", "model.decoder.ffn.d_ff=48"],
    "missing_nothing": ["weights={path: whole.safetensors, missing: ['haed.*']}"],
    "unused_nothing": ["weights={path: whole.safetensors, unused: ['head.*']}"],
    "another_model": ["weights=base", "model.norm=rmsnorm", "model.norm={kind: layernorm, eps: 1e-3}"],
    "not_there": ["weights=nowhere"],
    "no_tensors": ["weights=small.yaml"],
    "freeze_nothing": ["freeze=['embeding.*']"],
    "freeze_all": ["freeze=['*']"],
    "group_of_frozen": ["freeze=['head.*']", "optimizer.groups=[{match: 'head.*', lr: 1}]"],
    "no_memory_of_path": ["weights={missing: ['head.*']}"],
}


@pytest.mark.parametrize(
    ("name", "sets"),
    chosen(FAULTS.items(), [*spread([*FAULTS.items()], 5), ("no_memory_of_path", FAULTS["no_memory_of_path"])]),
)
def test_errors(
    name: str, sets: list[str], golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, weights = trained(small_run(tmp_path))
    save_file(weights, "whole.safetensors")
    del weights["head.output.weight"]
    weights["other.weight"] = torch.ones(2)
    save_file(weights, "part.safetensors")
    if name == "another_model":
        assert train("small.yaml", "-o", "base") == 0
        capsys.readouterr()
    assert train("small.yaml", "-o", "out", *(word for change in sets for word in ("--set", change))) == 1
    errors = capsys.readouterr().err
    golden(f"runs/weights/{name}", errors.replace(str(tmp_path), "..."))
    assert not Path("out/latest").exists()
    for command in (["validate"], ["train", "--plan"]):
        words = [*command, "small.yaml", "--no-plugins"]
        assert main([*words, *(word for change in sets for word in ("--set", change))]) == 1
        assert capsys.readouterr().err.splitlines()[:2] == errors.splitlines()[:2]


@pytest.mark.parametrize("sets", [["weights=whole.safetensors"], ["freeze=['embedding.*']"]])
def test_a_start_that_fits_is_valid(sets: list[str], tmp_path: Path) -> None:
    _, weights = trained(small_run(tmp_path))
    save_file(weights, "whole.safetensors")
    options = [word for change in sets for word in ("--set", change)]
    assert main(["validate", "small.yaml", "--no-plugins", *options]) == 0


def test_the_meaning_of_a_run_has_the_content_of_its_weights(tmp_path: Path) -> None:
    _, weights = trained(small_run(tmp_path))
    save_file(weights, "one.safetensors")
    save_file(dict(reversed(weights.items())), "two.safetensors", metadata={"note": "the same tensors"})
    names = sorted(weights)
    Path("shards").mkdir()
    save_file({name: weights[name] for name in names[:5]}, "shards/a.safetensors")
    save_file({name: weights[name] for name in names[5:]}, "shards/b.safetensors")
    files = {name: "a.safetensors" if name in names[:5] else "b.safetensors" for name in names}
    Path("shards/model.safetensors.index.json").write_text(json.dumps({"weight_map": files}), encoding="utf-8")
    digests = [
        small_run(tmp_path, f"weights={value}").digest for value in ("one.safetensors", "two.safetensors", "shards")
    ]
    assert len(set(digests)) == 1
    weights["head.output.weight"][0, 0] += 1
    save_file(weights, "three.safetensors")
    assert small_run(tmp_path, "weights=three.safetensors").digest not in digests
    assert small_run(tmp_path).digest not in digests
    assert content_of(Path("one.safetensors")) != content_of(Path("three.safetensors"))


def hostile(case: str) -> str:
    """Write weights that could harm their reader, and return their path."""
    if case == "nested":
        header = b'{"w":' * 100_000
        Path("w.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    elif case == "pipe":
        os.mkfifo("w.safetensors")
    elif case == "truncated":
        save_file({"w": torch.ones(9)}, "w.safetensors")
        os.truncate("w.safetensors", Path("w.safetensors").stat().st_size - 1)
    elif case == "pickle":
        torch.save({"w": torch.ones(9)}, "w.safetensors")
    elif case == "escape":
        text = json.dumps({"weight_map": {"w": "../../../../etc/passwd"}})
        Path("model.safetensors.index.json").write_text(text, encoding="utf-8")
        return "model.safetensors.index.json"
    elif case == "index":
        Path("model.safetensors.index.json").write_text("[" * 100_000, encoding="utf-8")
        return "model.safetensors.index.json"
    return "w.safetensors"


@pytest.mark.parametrize(
    ("case", "cause"),
    {
        "nested": "its JSON is nested too deeply",
        "pipe": "it is a folder, a pipe or a device, not a file",
        "truncated": "the file is truncated",
        "pickle": "is a pickle, which can run any code when it is read",
        "escape": "names a file outside its folder: `../../../../etc/passwd`",
        "index": "its JSON is nested too deeply",
    }.items(),
)
def test_weights_are_read_without_trust(case: str, cause: str, tmp_path: Path) -> None:
    run = small_run(tmp_path, f"weights={hostile(case)}")
    with pytest.raises(SpecError, match=re.escape(cause)) as error:
        _ = run.digest
    assert len(error.value.diagnostics) == 1
    assert error.value.diagnostics[0].path == "weights"


def test_weights_changed_under_a_run_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, weights = trained(small_run(tmp_path))
    save_file(weights, "base.safetensors")
    words = ["small.yaml", "-o", "out", "--set", "weights=base.safetensors"]
    assert train(*words, "--stop-after", "3") == 0
    weights["head.output.weight"] *= 2
    save_file(weights, "base.safetensors")
    assert train(*words) == 1
    assert "weights_content: " in capsys.readouterr().err


def test_weights_that_are_not_finite_are_an_error(tmp_path: Path) -> None:
    _, weights = trained(small_run(tmp_path))
    weights["head.output.weight"][0, 0] = float("nan")
    save_file(weights, "base.safetensors")
    with pytest.raises(SpecError, match="infinite or NaN"):
        Trainer(small_run(tmp_path, "weights=base.safetensors"), Memory())


def test_tensors_of_a_checkpoint_are_read_as_saved(tmp_path: Path) -> None:
    """The record of a run that began with weights is read again, with the same meaning."""
    _, weights = trained(small_run(tmp_path))
    save_file(weights, "base.safetensors")
    words = ["small.yaml", "-o", "out", "--set", "weights=base.safetensors", "--set", "freeze=['embedding.*']"]
    assert train(*words, "--stop-after", "3") == 0
    assert train("out") == 0
    assert torch.equal(
        load_file("out/step-8/model.safetensors")["embedding.tokens.weight"], weights["embedding.tokens.weight"]
    )


def test_tokens_in_both_vocabularies_keep_their_rows_and_layers_are_mapped(tmp_path: Path) -> None:
    assert train("small.yaml", "-o", "base", "--set", "steps=1") == 0
    Path("other.txt").write_text("zebras and 3 goats.\n" * 40, encoding="utf-8")
    sets = ["data.files=other.txt", "model.decoder.n_layers=1"]
    words = "path: base, tokens: ['embedding.tokens.*', 'head.*'], unused: ['decoder.layers.*']"
    weights = f"weights={{{words}, map: {{'decoder.layers.{{i}}': 'decoder.layers.{{i + 1}}'}}}}"
    run = small_run(tmp_path, *sets, weights)
    state, fresh = (
        Trainer(run, Memory()).model.state_dict(),
        Trainer(small_run(tmp_path, *sets), Memory()).model.state_dict(),
    )
    old, new = tfkit.load_tokenizer(Path("base/step-1/chars.json")), run.data.tokenizer
    before = load_file("base/step-1/model.safetensors")
    common = set(old.characters) & set(new.characters)
    assert 3 < len(common) < new.vocab_size
    for name in ("embedding.tokens.weight", "head.output.weight"):
        for character in new.characters:
            row = before[name][old.encode(character)] if character in common else fresh[name][new.encode(character)]
            assert torch.equal(state[name][new.encode(character)], row)
    layer = "decoder.layers.{}.ffn.up.weight"
    assert torch.equal(state[layer.format(0)], before[layer.format(1)])
    digests = {small_run(tmp_path, *sets, text).digest for text in (weights, weights.replace("i + 1", "i"))}
    assert len({run.digest, *digests}) == 2
    Path("base/step-1/chars.json").write_text('{"characters": "' + old.characters[::-1].replace("\n", "\\n") + '"}')
    assert small_run(tmp_path, *sets, weights).digest not in digests
    Path("base/step-1/chars.json").unlink()
    with pytest.raises(SpecError, match="must have a tokenizer next to them"):
        Trainer(small_run(tmp_path, *sets, weights), Memory())
