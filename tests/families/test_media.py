"""Families of images and sound: imported, compared, saved, opened by transformers, ejected, decoded."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, fx

import tfkit
from tfkit.checkpoint.tensor_names import name_matcher
from tfkit.errors import LeftOutWarning
from tfkit.tools.common.loading_weights import build_with_weights
from tfkit.tools.compare.other_model import CHANNELS_FIRST, NAMES
from tfkit.tools.eject.proof import check
from tfkit.tools.import_.importing import import_config
from tfkit.tools.save.save import save

from ..sampling import chosen
from .changed_fields import NOT_THE_MODEL, others, quiet
from .media import BATCH, MEDIA, MediaCase

QUICK_CASES = {"vit", "wav2vec2"}
SOUND_INPUTS = {"whisper": "mel", "moonshine": "waveform"}
"""The input of the encoder of models that write the text of a sound."""
AXES: dict[str, Callable[[Tensor], Tensor]] = {
    "waveform": lambda samples: samples[:, :, None],
    "spectrogram": lambda frames: frames.transpose(1, 2)[:, None],
}
"""Inputs of one channel, which their classes take without an axis for it."""


@dataclass(frozen=True)
class MediaTrial:
    """A case that transformers saved and tfkit read."""

    case: MediaCase
    theirs: Any
    ours: fx.GraphModule
    folder: Path

    @classmethod
    def of(cls, name: str, folder: Path) -> MediaTrial:
        case = MEDIA[name]
        theirs = random_model(case)
        theirs.save_pretrained(folder / "theirs")
        with warnings.catch_warnings(record=True) as records:
            warnings.simplefilter("always", LeftOutWarning)
            ours = imported(folder / "theirs")
        assert len(records) == bool(case.left_out), list(map(str, records))
        return cls(case, theirs, ours, folder)

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What our model reads."""
        return inputs_of(self.ours, self.case)


def random_model(case: MediaCase) -> Any:
    """A model of theirs with random weights, in eval mode."""
    model_class = getattr(transformers, case.architecture)
    torch.manual_seed(0)
    config = model_class.config_class(**case.config)
    model = model_class._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            norm = parameter.dim() == 1 and path.endswith("weight")
            parameter.normal_(1.0 if norm else 0.0, case.std)
    return model


def imported(folder: Path) -> fx.GraphModule:
    """The model of a folder of theirs."""
    return build_with_weights(tfkit.loads(import_config(folder).text), folder).eval()


def inputs_of(model: fx.GraphModule, case: MediaCase) -> dict[str, Tensor]:
    """What a model of a case reads."""
    names = {name: NAMES.get(name, name) for name in model.meta["graph"].inputs}
    values = {name: case.inputs[theirs] for name, theirs in names.items()}
    values = {n: x.transpose(1, 2) if names[n] in CHANNELS_FIRST else x for n, x in values.items()}
    return {n: AXES[n](x) if n in AXES else x for n, x in values.items()}


def output_of(model: Any, case: MediaCase) -> Tensor:
    """The first output of a model of theirs."""
    with torch.no_grad():
        result = model(**case.inputs)
    return result.logits if hasattr(result, "logits") else result[0]  # type: ignore[no-any-return]


def close(actual: Tensor, expected: Tensor) -> None:
    largest = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * largest)


@pytest.mark.parametrize("name", chosen(MEDIA, QUICK_CASES))
@torch.no_grad()
def test_a_published_model_is_exactly_this(name: str, tmp_path: Path) -> None:
    trial = MediaTrial.of(name, tmp_path)
    case, expected = trial.case, output_of(trial.theirs, trial.case)
    assert expected.std() > 0.02
    actual = trial.ours(**trial.inputs)
    close(actual[0] if isinstance(actual, tuple) else actual, expected)
    if isinstance(actual, tuple):
        close(actual[1], trial.theirs(**case.inputs)[1])
    left_out = name_matcher(case.left_out)
    theirs = {path: p.numel() for path, p in trial.theirs.named_parameters() if not left_out.fullmatch(path)}
    assert sum(p.numel() for p in trial.ours.parameters()) == sum(theirs.values())
    save(trial.ours, tmp_path / "ours", layout="huggingface", allow_drop=bool(case.left_out))
    before, after = (load_file(tmp_path / side / "model.safetensors") for side in ("theirs", "ours"))
    assert {path for path in before if not left_out.fullmatch(path)} == after.keys()
    assert all(torch.equal(before[path], after[path]) for path in after)
    with quiet():
        again = type(trial.theirs).from_pretrained(tmp_path / "ours", attn_implementation="eager", **case.reopened)
    torch.testing.assert_close(output_of(again.eval(), case), expected)


@pytest.mark.parametrize("name", chosen(MEDIA, set()))
def test_compared_and_ejected(name: str, tmp_path: Path) -> None:
    trial = MediaTrial.of(name, tmp_path)
    graph = trial.ours.meta["graph"]
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore", LeftOutWarning)
        compared = tfkit.compare(graph, tmp_path / "theirs", weights=tmp_path / "theirs")
    assert compared.equal, compared.first
    assert check(graph, tfkit.eject(graph)).ran
    assert tfkit.export(trial.ours, tmp_path / "model.ts").difference <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", SOUND_INPUTS)
@torch.no_grad()
def test_the_text_of_a_sound_is_decoded_with_a_cache(name: str, tmp_path: Path) -> None:
    trial = MediaTrial.of(name, tmp_path)
    sound, target = trial.inputs.values()
    inputs = {SOUND_INPUTS[name]: sound}
    expected = output_of(trial.theirs, trial.case)
    cached = tfkit.CachedModel(trial.ours, length=target.size(1))
    cached.start(BATCH, **inputs)
    close(torch.cat([cached(piece) for piece in target.split([4, 1, 1, 3], dim=1)], dim=1), expected)
    tokens = tfkit.generate(trial.ours, target[:, :3], max_new_tokens=4, **inputs).tokens
    for step in range(4):
        text = {**trial.case.inputs, "decoder_input_ids": torch.cat((target[:, :3], tokens[:, :step]), dim=1)}
        assert trial.theirs(**text).logits[:, -1].argmax(-1).tolist() == tokens[:, step].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moonshine", "moonshine_untied"])
@torch.no_grad()
def test_the_text_of_a_padded_waveform(name: str, tmp_path: Path) -> None:
    """Logits of rows with padding in sound and text equal logits of the row alone, also with a cache."""
    trial = MediaTrial.of(name, tmp_path)
    sound, target = trial.case.inputs.values()
    lengths = ((3300, 9), (2048, 5), (2047, 6))  # 7, 4 and 3 frames
    mask, text_mask = (
        torch.arange(x.size(1)) < torch.tensor(sizes)[:, None]
        for x, sizes in zip((sound, target), zip(*lengths, strict=True), strict=True)
    )
    inputs = {"waveform": sound[:, :, None], "waveform_mask": mask}
    together = trial.ours(**inputs, target=target, target_mask=text_mask)
    cached = tfkit.CachedModel(trial.ours, length=9)
    cached.start(BATCH, **inputs)
    incremental = torch.cat([cached(piece) for piece in target.split([3, 1, 5], dim=1)], dim=1)
    for row, (samples, tokens) in enumerate(lengths):
        text = {"input_values": sound[row : row + 1, :samples], "decoder_input_ids": target[row : row + 1, :tokens]}
        alone = trial.theirs(**text).logits[0]
        close(together[row, :tokens], alone)
        close(incremental[row, :tokens], alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    """
    wav2vec2 wav2vec2_stable wav2vec2_classes hubert hubert_body hubert_classes unispeech unispeech_sat_classes
    data2vec_audio data2vec_audio_classes
    """.split(),  # noqa: SIM905
)
@torch.no_grad()
def test_padded_waveforms(name: str, tmp_path: Path) -> None:
    """Frames of a padded row equal the frames of the row alone, and of the class unless padding has an effect there."""
    trial = MediaTrial.of(name, tmp_path)
    samples, lengths = trial.case.inputs["input_values"], (131, 95, 37)
    mask = torch.arange(131) < torch.tensor(lengths)[:, None]
    actual = trial.ours(samples[:, :, None], waveform_mask=mask)
    together = trial.theirs(samples, attention_mask=mask.long())
    for row, length in enumerate(lengths):
        alone = output_of(trial.theirs, replace(trial.case, inputs={"input_values": samples[row : row + 1, :length]}))[
            0
        ]
        frames = slice(len(alone)) if actual.dim() == 3 else slice(None)
        close(actual[row, frames], alone)
        if getattr(trial.theirs.config, "feat_extract_norm", "") == "layer":
            close(actual[row, frames], (together.logits if hasattr(together, "logits") else together[0])[row, frames])


@pytest.mark.slow
def test_older_files_have_other_names_of_a_weight_norm(tmp_path: Path) -> None:
    trial = MediaTrial.of("wav2vec2", tmp_path)
    file = tmp_path / "theirs/model.safetensors"
    older = {"parametrizations.weight.original0": "weight_g", "parametrizations.weight.original1": "weight_v"}
    tensors = load_file(file)
    renamed = {reduce(lambda name, pair: name.replace(*pair), older.items(), name): x for name, x in tensors.items()}
    assert len(renamed.keys() - tensors.keys()) == 2
    save_file(renamed, file)
    again = build_with_weights(trial.ours.meta["graph"], tmp_path / "theirs")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in trial.ours.state_dict().items())


@pytest.mark.parametrize(
    ("name", "field", "value", "why"),
    [
        ("wav2vec2", "add_adapter", True, "convolutions after the encoder are not supported"),
        ("wav2vec2_stable", "adapter_attn_dim", 4, "adapters in the layers are not supported"),
        ("wav2vec2", "conv_dim", [12, 12, 16], "`conv_dim` must be a list of equal numbers"),
        ("wav2vec2", "conv_dim", [12, 12], "must have as many numbers as `stem.sizes`"),
        ("wav2vec2_classes", "use_weighted_layer_sum", True, "the spec has the last layer alone"),
        ("hubert_body", "conv_pos_batch_norm", True, "its norm would count padding"),
        ("moonshine", "decoder_num_attention_heads", 2, "`encoder_num_attention_heads` gives `4`"),
        ("moonshine", "encoder_num_key_value_heads", 2, "`encoder_num_attention_heads` gives `4`"),
        ("beit", "use_shared_relative_position_bias", True, "which beit does not support here"),
        ("beit", "use_mean_pooling", False, "the spec has the mean of the patches"),
        ("beit", "image_size", [16, 12], "`image_size` must have equal sides; got [16, 12]"),
        ("ast", "patch_size", [4, 4], "patch_size"),
    ],
)
def test_values_that_are_refused(name: str, field: str, value: object, why: str, tmp_path: Path) -> None:
    case = MEDIA[name]
    config = getattr(transformers, case.architecture).config_class(**case.config).to_dict()
    config |= {"architectures": [case.architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    import_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(tfkit.SpecError, match=re.escape(why)):
        import_config(tmp_path)


SIZES = {"image_size", "input_length", "max_length", "num_channels", "num_mel_bins"}
"""Fields with the sizes of an input, which the cases do not change."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    """
    ast beit data2vec_audio hubert ijepa_classes moonshine moonshine_untied unispeech unispeech_sat vit_msn wav2vec2
    wav2vec2_classes wav2vec2_stable
    """.split(),  # noqa: SIM905
)
@torch.no_grad()
def test_a_changed_field_is_followed_or_refused(name: str, tmp_path: Path) -> None:
    case, followed = MEDIA[name], set()
    fields = getattr(transformers, case.architecture).config_class(**case.config).to_dict()
    for field, value in fields.items():
        for other in others(field, value) if field not in NOT_THE_MODEL | SIZES else ():
            changed = replace(case, config={**case.config, field: other})
            try:
                with quiet():
                    theirs = random_model(changed)
                    expected = output_of(theirs, changed)
                    theirs.save_pretrained(tmp_path / "theirs")
            except Exception:  # transformers says in many ways that it cannot
                continue
            try:
                with quiet(), warnings.catch_warnings(action="ignore", category=LeftOutWarning):
                    ours = imported(tmp_path / "theirs")
            except tfkit.SpecError:
                continue
            difference = (ours(**inputs_of(ours, changed)) - expected).abs().max()
            assert difference <= 1e-3 * max(1.0, expected.abs().max()), f"{field}={other}"
            followed.add(field)
    usual = {"hidden_act", "hidden_size", "layer_norm_eps", "num_hidden_layers"}
    moonshine = {"encoder_hidden_act", "decoder_hidden_act", "encoder_num_attention_heads", "rope_parameters"}
    assert followed >= (moonshine if name.startswith("moonshine") else usual)
