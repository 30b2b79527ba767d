"""A published model at a small size, compared with transformers: imported, loaded, run, and saved again."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import tfkit
from tfkit.checkpoint.tensor_names import name_matcher
from tfkit.errors import LeftOutWarning
from tfkit.tools.common.loading_weights import build_with_weights
from tfkit.tools.import_.importing import Imported, import_config
from tfkit.tools.save.save import save

BATCH = 3
Kind = Literal["causal", "masked", "seq2seq", "sequence", "token", "question", "pretraining", "body"]
AUTO = {
    "causal": transformers.AutoModelForCausalLM,
    "masked": transformers.AutoModelForMaskedLM,
    "seq2seq": transformers.AutoModelForSeq2SeqLM,
    "sequence": transformers.AutoModelForSequenceClassification,
    "token": transformers.AutoModelForTokenClassification,
    "question": transformers.AutoModelForQuestionAnswering,
    "pretraining": transformers.AutoModelForPreTraining,
    "body": transformers.AutoModel,
}
CHANGED = {"mamba", "youtu"}
"""Types whose class changes weights when it loads a folder: it zeroes the row of the padding token in a tied table, or
divides by the square root of the depth."""
CLASSES = {"id2label": {0: "so", 1: "not so", 2: "unsaid"}, "label2id": {"so": 0, "not so": 1, "unsaid": 2}}


@dataclass(frozen=True)
class Case:
    """A small model of a family.

    Attributes:
        model_type: as transformers calls it.
        config: the fields that make it small, and switch on what it can do.
        kind: which head it has.
        family: the spec that says what the fields mean, if it is not the one of the model type.
        sides: where padding may stand so that the reference's logits of real tokens do not depend on it.
        alone: the reference counts padding: sequences with padding in front are run one by one.
        length: of the input; beyond the windows of the model.
        norm_mean: the mean of the random weights of its norms; 0 where they are distances from one.
        std: spread of the other random parameters.
        uncounted: names of parameters of theirs that are no parameters here, with `*`; each with the reason.
        buffers: names of buffers of theirs that are parameters here; each with the reason.
        token_types: how many there are, if the model has some.
        cached: whether steps give the full result: not where attention attends to later tokens.
        leaves_out: the file has tensors that the model leaves out; None if that is not checked.
        prepare: changes their model before it is saved.
        repair: takes out a defect of their class, which no file says.
    """

    model_type: str
    config: Mapping[str, Any]
    kind: Kind = "causal"
    family: str | None = None
    sides: tuple[str, ...] = ("none", "right", "left")
    alone: bool = False
    length: int = 11
    norm_mean: float = 1.0
    std: float = 0.25
    uncounted: Mapping[str, str] = field(default_factory=dict)
    buffers: Mapping[str, str] = field(default_factory=dict)
    token_types: int = 0
    cached: bool = True
    leaves_out: bool | None = False
    prepare: Callable[[Any], None] | None = None
    repair: Callable[[Any], None] | None = None


def reference(case: Case) -> nn.Module:
    """Their model in eval mode, every parameter and persistent number drawn at random."""
    labels = CLASSES if case.kind in ("sequence", "token") else {}
    config = transformers.AutoConfig.for_model(case.model_type, **deepcopy(dict(case.config)), **labels)
    if case.kind == "sequence" and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0  # a decoder needs it to find the last token
    torch.manual_seed(0)
    model: nn.Module = AUTO[case.kind].from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name_matcher(case.uncounted).fullmatch(name):
                continue
            norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.normal_(case.norm_mean if norm else 0.0, case.std)
        for name in case.buffers:
            model.get_buffer(name).normal_(0.0, case.std)
    for change in (case.prepare, case.repair):
        if change is not None:
            change(model)
    return model


@dataclass(frozen=True)
class Trial:
    """A case that was saved by them and read by us."""

    case: Case
    theirs: nn.Module
    imported: Imported
    ours: torch.fx.GraphModule
    folder: Path

    @classmethod
    def of(cls, case: Case, folder: Path) -> Trial:
        return cls.read(case, reference(case), folder)

    @classmethod
    def read(cls, case: Case, theirs: nn.Module, folder: Path) -> Trial:
        """Save their model, and read it."""
        theirs.save_pretrained(folder / "theirs")  # type: ignore[operator]
        imported = import_config(folder / "theirs", family=case.family)
        graph = tfkit.loads(imported.text)  # the text says all that there is to know
        with warnings.catch_warnings(record=True) as records:
            warnings.simplefilter("always", LeftOutWarning)
            ours = build_with_weights(graph, folder / "theirs").eval()
        if case.leaves_out is not None:
            assert [record.category for record in records] == [LeftOutWarning] * case.leaves_out, list(
                map(str, records)
            )
        return cls(case, theirs, imported, ours, folder)

    @property
    def has_target(self) -> bool:
        """True if the model reads two sequences."""
        return "target" in self.ours.meta["graph"].inputs


def tokens(side: str, length: int, first: int) -> Tensor:
    """Which positions of three sequences are tokens, bool [b, length]; one sequence is full."""
    lengths = torch.tensor([[length - 2], [length], [first]])
    positions = torch.arange(length)
    if side == "none":
        return torch.ones(BATCH, length, dtype=torch.bool)
    return positions < lengths if side == "right" else positions >= length - lengths


@torch.no_grad()
def check_logits(trial: Trial, side: str, tolerance: float = 1e-5) -> None:
    """Logits of all real tokens equal theirs."""
    case, ids, masks = trial.case, *_batch(trial, side)
    types = [torch.randint(0, case.token_types, ids[0].shape)] if case.token_types else []
    output = trial.ours(*ids, *types) if side == "none" else trial.ours(*ids, *types, *masks)
    output = output[0] if isinstance(output, tuple) else output
    pools_padding = case.kind == "sequence" and _has_encoder(trial)  # theirs takes the first place, whatever is there
    if side == "left" and (case.alone or pools_padding):
        expected = _alone(trial, ids, masks, types)
    else:
        expected = _theirs(trial, ids, masks, side, types)
    assert output.shape == expected.shape
    real = torch.ones(BATCH, dtype=torch.bool) if case.kind == "sequence" else masks[-1]
    assert expected[real].std() > 0.05, "outputs so small that everything is near"
    largest = max(1.0, expected[real].abs().max().item())
    torch.testing.assert_close(output[real], expected[real], rtol=tolerance, atol=tolerance * largest)


def _batch(trial: Trial, side: str) -> tuple[list[Tensor], list[Tensor]]:
    case = trial.case
    config: Any = trial.theirs.config
    torch.manual_seed(1)
    targets = [(case.length - 2, 1)] if case.kind == "seq2seq" else [(case.length, 3)]
    masks = [tokens(side, length, first) for length, first in [(case.length, 3), *targets * trial.has_target]]
    ids = [torch.randint(3, vocab, mask.shape) for vocab, mask in zip(_vocab(trial)[-len(masks) :], masks, strict=True)]
    if case.kind == "sequence" and trial.has_target:  # theirs reads the classes where the source ends
        last = masks[0].long().cumsum(dim=1).argmax(dim=1)
        ids[0] = ids[0].scatter(1, last[:, None], config.eos_token_id)
    pad = getattr(config, "pad_token_id", None) or 0
    return [value.masked_fill(~mask, pad) for value, mask in zip(ids, masks, strict=True)], masks


def _vocab(trial: Trial) -> tuple[int, int]:
    """Sizes of the vocabularies that it reads and writes."""
    config: Any = trial.theirs.config
    source = getattr(config, "src_vocab_size", config.vocab_size)
    return source, getattr(config, "decoder_vocab_size", config.vocab_size)


def _theirs(trial: Trial, ids: list[Tensor], masks: list[Tensor], side: str, types: list[Tensor]) -> Tensor:
    options = _inputs_of(ids, types)
    if side != "none":
        options["attention_mask"] = masks[0].long()
        if trial.has_target:
            options["decoder_attention_mask"] = masks[1].long()
        elif _has_positions(trial):
            options["position_ids"] = (masks[0].long().cumsum(dim=1) - 1).clamp(min=0)
    return logits_of(trial.theirs(**options))


def _inputs_of(ids: list[Tensor], types: list[Tensor]) -> dict[str, Tensor]:
    names = ["input_ids", "decoder_input_ids"][: len(ids)] + ["token_type_ids"] * len(types)
    return dict(zip(names, [*ids, *types], strict=True))


def _has_positions(trial: Trial) -> bool:
    """True if theirs are told the positions: those of causal models, which count padding unless told."""
    return "position_ids" in inspect.signature(trial.theirs.forward).parameters and not _has_encoder(trial)


def _has_encoder(trial: Trial) -> bool:
    return any(node.block == "encoder" for node in trial.ours.meta["graph"].spec.model.graph.values())


def logits_of(outputs: Any) -> Tensor:
    """The logits in what a model of theirs returns, of an answer's two ends side by side; else the hidden states."""
    if hasattr(outputs, "start_logits"):
        return torch.stack([outputs.start_logits, outputs.end_logits], dim=-1)
    if hasattr(outputs, "prediction_logits"):
        return outputs.prediction_logits  # type: ignore[no-any-return]
    return outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state  # type: ignore[no-any-return]


def _alone(trial: Trial, ids: list[Tensor], masks: list[Tensor], types: list[Tensor]) -> Tensor:
    """Their logits for each sequence by itself, without padding, put back in its place."""
    result: list[Tensor] = []
    for row in range(BATCH):
        row_inputs = [value[row, mask[row]][None] for value, mask in zip(ids, masks, strict=True)]
        logits = logits_of(
            trial.theirs(**_inputs_of(row_inputs, [value[row, masks[0][row]][None] for value in types]))
        )[0]
        if logits.dim() == 2:
            columns = masks[-1][row].nonzero()[:, 0]
            logits = torch.zeros(masks[-1].size(1), logits.size(-1)).index_copy(0, columns, logits)
        result.append(logits)
    return torch.stack(result)


@torch.no_grad()
def check_cached(trial: Trial) -> None:
    """Logits of steps that are read with the cache equal the logits of the full sequence."""
    ids, masks = _batch(trial, "none")
    expected = _theirs(trial, ids, masks, "none", [])
    cached = tfkit.CachedModel(trial.ours, length=trial.case.length)
    target = ids[-1]
    cached.start(BATCH, **({"source": ids[0]} if trial.has_target else {}))
    actual = [cached(piece) for piece in target.split([4, 1, 1, target.size(1) - 6], dim=1)]
    torch.testing.assert_close(torch.cat(actual, dim=1), expected, rtol=1e-5, atol=1e-5)


def check_count(trial: Trial) -> None:
    """The number of parameters is theirs."""
    uncounted = name_matcher(trial.case.uncounted)
    theirs = {p: p.numel() for name, p in trial.theirs.named_parameters() if not uncounted.fullmatch(name)}
    buffers = sum(trial.theirs.get_buffer(name).numel() for name in trial.case.buffers)
    assert sum(p.numel() for p in trial.ours.parameters()) == sum(theirs.values()) + buffers


@torch.no_grad()
def check_saved(trial: Trial) -> None:
    """Saved again, every tensor has the same bits, and transformers opens it with the same logits."""
    back = trial.folder / "ours"
    if trial.case.leaves_out:
        with pytest.raises(tfkit.SpecError, match="tensors of the file that filled the model would be missing"):
            save(trial.ours, back, layout="huggingface")
    save(trial.ours, back, layout="huggingface", allow_drop=trial.case.leaves_out is not False)
    before, after = load_file(trial.folder / "theirs" / "model.safetensors"), load_file(back / "model.safetensors")
    family = trial.ours.meta["graph"].spec.family
    before = {_today(name, family.older): tensor for name, tensor in before.items()}
    left = name_matcher([*family.copies, *family.ignored, *family.zeros, *family.computed])
    assert not {name for name in before.keys() ^ after.keys() if not left.fullmatch(name)}
    tables = name_matcher(family.computed)
    for name in after:
        assert before[name].dtype == after[name].dtype, name
        if tables.fullmatch(name):
            start = 3 * (before[name].dim() > 1)  # rows before the first position are never read
            torch.testing.assert_close(after[name][start:], before[name][start:])
        else:
            assert torch.equal(before[name], after[name]), name
    again, loaded = AUTO[trial.case.kind].from_pretrained(back, output_loading_info=True, attn_implementation="eager")
    assert not {*loaded["unexpected_keys"], *loaded["mismatched_keys"]}
    filled = name_matcher(
        name for name, text in family.computed.items() if text.startswith("of_mixer")
    )  # by their class
    lost = {name for name in loaded["missing_keys"] if tables.fullmatch(name) and not filled.fullmatch(name)}
    assert trial.case.leaves_out or not lost
    if trial.case.repair is not None:
        trial.case.repair(again)
    ids, masks = _batch(trial, "none")
    if trial.case.model_type in CHANGED:
        theirs = AUTO[trial.case.kind].from_pretrained(trial.folder / "theirs", attn_implementation="eager")
        trial = replace(trial, theirs=theirs.eval())
    expected = _theirs(trial, ids, masks, "none", [])
    actual = _theirs(replace(trial, theirs=again.eval()), ids, masks, "none", [])
    torch.testing.assert_close(actual, expected)  # the bits depend on where the weights lie in memory


def _today(name: str, older: Mapping[str, str]) -> str:
    """A name with its ending of today; transformers still writes some older ones."""
    endings = {old.lstrip("*"): new.lstrip("*") for old, new in older.items()}
    return next((name.removesuffix(old) + new for old, new in endings.items() if name.endswith(old)), name)
