"""One body with several heads: every class of transformers for a type, imported, run, compared and saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

import tfkit
from tfkit.tools.compare.comparison import compare
from tfkit.tools.eject.runner import build_model, loaded_module
from tfkit.tools.eject.write import eject
from tfkit.tools.import_.importing import import_config

from ..known import KNOWN
from ..sampling import chosen, some
from .case import Trial, reference
from .cases import CASES, earlier
from .changed_fields import quiet
from .generated import HEADS, classes, prove, served, varied

transformers.utils.logging.disable_progress_bar()
QUICK_CLASSES = frozenset(
    """
    llama-sequence llama-question bert-causal bart-causal roberta-sequence t5-token
    """.split()  # noqa: SIM905
)
"""Those that differ most: in tokens that are read, prefix, mask, transform, parts of the body, and a node more."""

PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")

FIRST = [name for name in sorted(CASES) if not any(earlier(name))]
"""One case of each family: others have a few fields away from those, as they get here, and the same heads."""
NO_BODY = {
    "bert-generation": "its class without a head has another name",
    **dict.fromkeys(("exaone", "sarvam_moe"), "its class without a head has other names of tensors"),
    **dict.fromkeys(
        ("gemma3", "idefics3", "llava", "mistral3", "paligemma", "qwen2_5_vl", "smolvlm", "voxtral"),
        "the class without a head has other names of tensors, and no folder with it is published",
    ),
}
NOT_SERVED = {
    "gemma3": {"Gemma3ForSequenceClassification"},  # no head of texts with images
    "unispeech": {"UniSpeechForPreTraining"},  # no head with a quantizer, as the next two
    "unispeech-sat": {"UniSpeechSatForPreTraining"},
    "wav2vec2": {"Wav2Vec2ForPreTraining"},
}
CLASSIFIERS = {
    "data2vec-audio": {"Data2VecAudioForSequenceClassification"},
    "hubert": {"HubertForSequenceClassification"},
    "ijepa": {"IJepaForImageClassification"},
    "unispeech": {"UniSpeechForSequenceClassification"},
    "unispeech-sat": {"UniSpeechSatForSequenceClassification"},
    "wav2vec2": {"Wav2Vec2ForSequenceClassification"},
}
"""Classes of transformers for the classification of sounds and images, next to the class of the family."""
SERVED = {key for name in FIRST for key, _ in served(name, CASES[name])}


@pytest.mark.parametrize("name", chosen(sorted(SERVED | QUICK_CLASSES), QUICK_CLASSES))
def test_another_head_is_exactly_theirs(name: str, tmp_path: Path) -> None:
    prove(HEADS[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRST)
def test_many_fields_away_from_their_defaults(name: str, tmp_path: Path) -> None:
    case = varied(name, CASES[name], tmp_path / "config", tries=10)
    # Nearly all fields of T5 Gemma are in its two parts, which count as one field each.
    minimum = 2 if name == "t5gemma" else 3
    assert sum(value != CASES[name].config.get(field) for field, value in case.config.items()) >= minimum
    prove(case, tmp_path)


@pytest.mark.parametrize("model_type", some(sorted(KNOWN.by_model_type), 5))
def test_a_family_serves_the_classes_that_transformers_has(model_type: str) -> None:
    """No more and no less; what a type has besides, such as choices among several texts, is refused."""
    family = tfkit.load(KNOWN.by_model_type[model_type]).spec.family
    assert family is not None
    encoders = {cls for cls, head in family.classes.items() if head == "EncoderModel"}
    served_classes = {*classes(model_type).values(), family.architecture, *CLASSIFIERS.get(model_type, set())}
    expected = served_classes - NOT_SERVED.get(model_type, set())
    body = set() if model_type in NO_BODY else {MODEL_MAPPING_NAMES[model_type]}
    assert {*family.classes} - encoders - {*family.aliases} == expected | body


@pytest.mark.parametrize("name", ["llama-sequence", "bert-question", "electra-pretraining"])
def test_compared_with_their_class(name: str, tmp_path: Path) -> None:
    trial = Trial.of(HEADS[name], tmp_path)
    with quiet():
        assert compare(trial.ours.meta["graph"], tmp_path / "theirs").equal


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bart-causal", "bert-sequence", "modernbert-token", "t5-token"])
@torch.no_grad()
def test_ejected(name: str, tmp_path: Path) -> None:
    trial = Trial.of(HEADS[name], tmp_path)
    ids = torch.randint(3, 61, (3, 9))
    with loaded_module(eject(trial.ours.meta["graph"])) as module:
        alone = build_model(module).eval()
        alone.load_state_dict(trial.ours.state_dict())
        torch.testing.assert_close(alone(ids), trial.ours(ids), rtol=0, atol=0)


def test_compared_where_no_token_is_padding(tmp_path: Path) -> None:
    theirs = reference(HEADS["gpt2-sequence"])
    theirs.config.pad_token_id = None  # type: ignore[union-attr]
    trial = Trial.read(HEADS["gpt2-sequence"], theirs, tmp_path)
    with quiet():
        assert compare(trial.ours.meta["graph"], tmp_path / "theirs").equal


@pytest.mark.parametrize(("name", "theirs"), [("bert", "seq_relationship_logits"), ("albert", "sop_logits")])
@torch.no_grad()
def test_a_second_output(name: str, theirs: str, tmp_path: Path) -> None:
    trial = Trial.of(HEADS[f"{name}-pretraining"], tmp_path)
    ids = torch.randint(3, 61, (3, 9))
    torch.testing.assert_close(trial.ours(ids)[1], trial.theirs(ids)[theirs], rtol=1e-5, atol=1e-5)


def test_the_names_of_classes_come_back(tmp_path: Path) -> None:
    trial = Trial.of(HEADS["bert-sequence"], tmp_path)
    tfkit.save(trial.ours, tmp_path / "back", layout="huggingface")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert config["id2label"] == {"0": "so", "1": "not so", "2": "unsaid"}


@pytest.mark.parametrize("meaning", some(PROBLEMS, 1))
def test_the_meaning_of_logits_comes_back(meaning: str, tmp_path: Path) -> None:
    config = transformers.BertConfig(**CASES["bert"].config, problem_type=meaning, num_labels=3)
    config.architectures = ["BertForTokenClassification"]
    config.save_pretrained(tmp_path)
    graph = import_config(tmp_path).graph
    assert graph.spec.model.graph["classes"].problem_type == meaning
    tfkit.save(tfkit.build(graph), tmp_path / "back", layout="huggingface")
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (written["problem_type"], written["id2label"]) == (meaning, {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["BertForMultipleChoice"]},
            "class BertForMultipleChoice is not supported by the family bert",
        ),
        ({"id2label": {"0": "a", "2": "b"}}, "not numbered from 0 to 1"),
        ({"id2label": ["a"]}, "a mapping of numbers to names"),
        ({"id2label": {}, "num_labels": 3}, "a mapping of numbers to names"),
        ({"num_labels": "many"}, "must be a number of classes"),
        ({"problem_type": "guess"}, "does not support"),
    ],
)
def test_a_config_that_makes_no_sense_of_its_classes(change: dict[str, object], message: str, tmp_path: Path) -> None:
    config = transformers.BertConfig(**CASES["bert"].config).to_dict() | {"id2label": None}
    options = config | {"architectures": ["BertForTokenClassification"]} | change
    (tmp_path / "config.json").write_text(json.dumps(options))
    with pytest.raises(tfkit.SpecError, match=message):
        import_config(tmp_path)
