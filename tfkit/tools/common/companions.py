"""The companions of weights: the files and fields of a published folder that no spec contains.

They are copied by value into each folder that is written from the weights: the tokenizer and its settings, the chat
template, the generation config, the configs of processors, and the fields of config.json that do not determine the
model, such as the ids that end a text. tfkit's layout has no config.json, and stores the fields in
`export_config.json`.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tfkit.checkpoint.config_json import LABELS, contains_text_model, further_fields, text_config_in, text_fields
from tfkit.component import Signal
from tfkit.decoding.text import FileTokenizer, load_tokenizer
from tfkit.errors import Diagnostic, LeftOutWarning, SpecError, listing
from tfkit.run.contract import Tokenizer
from tfkit.spec.adapter_files import base_folder
from tfkit.spec.families import FamilyConfig
from tfkit.spec.folder import (
    ADAPTER,
    CONFIG,
    EXPORT_CONFIG,
    GENERATION,
    MAX_CONFIG,
    SPEC,
    STATE,
    TOKENIZERS,
    model_folder,
)
from tfkit.spec.header import MAX_PARTS, Malformed, open_regular, parse_object, quoted_path, read_error

SETTINGS = "tokenizer_config.json"
TOKENIZER_FILES = frozenset(
    {
        *TOKENIZERS,
        SETTINGS,
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "additional_chat_templates/*.jinja",
        "vocab.json",
        "merges.txt",
        "vocab.txt",
        "vocab-src.json",
        "vocab-tgt.json",
        "target_vocab.json",
        "entity_vocab.json",
        "emoji.json",
        "normalizer.json",
        "bpe.codes",
        "dict.txt",
        "prophetnet.tokenizer",
        "sentencepiece.model",
        "spm.model",
        "tokenizer.model",
        "*.tiktoken",
        "tekken.json",
        "spiece.model",
        "sentencepiece.bpe.model",
        "source.spm",
        "target.spm",
    }
)
"""The names in transformers: https://huggingface.co/docs/transformers/main_classes/tokenizer, and the
`vocab_files_names` of its tokenizers."""
PREPROCESSOR = "preprocessor_config.json"
PROCESSOR_FILES = frozenset({PREPROCESSOR, "processor_config.json", "video_preprocessor_config.json"})
FILES = TOKENIZER_FILES | PROCESSOR_FILES | {GENERATION}
"""Names and patterns of all files that are copied."""
NOT_COPIED = (
    *("*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.gguf", "*.onnx"),
    *("*.md", "LICENSE*", "NOTICE*", "*.pdf", "*.png", "*.jpg", "*.svg", ".*", CONFIG),
)
"""Patterns of files that a published folder usually has and that are not copied: weights, and files for readers."""
MAX_FILE = 2**28
"""Maximum size of a file that is copied, in bytes."""
START, END, MASK = "decoder_start_token_id", "eos_token_id", "mask_token_id"
"""The fields with the token before a generated text, with the tokens that end it, and with the mask token."""
START_ROLES = {
    **dict.fromkeys(("t5", "mt5", "umt5", "pegasus", "marian"), "pad_token"),
    **dict.fromkeys(("bart", "mvp", "m2m_100", "fsmt"), "eos_token"),
    **dict.fromkeys(("blenderbot", "blenderbot-small", "t5gemma"), "bos_token"),
    "moonshine": "bos_token",
    "whisper": "<|startoftranscript|>",
}
"""By `model_type`, the special token that begins a text in published encoder-decoders: its role or its text. Families
that begin with the code of a language, such as mbart, have none.
"""
CODE = "auto_map"
"""The key of settings that names code of a folder, which tfkit neither runs nor copies."""
TOKEN_FIELDS = frozenset(
    """
    bad_words_ids force_words_ids suppress_tokens begin_suppress_tokens forced_decoder_ids sequence_bias
    tokenizer_class prefix
    """.split()  # noqa: SIM905
)
"""Fields with tokens whose names do not end with `_token_id`."""


@dataclass(frozen=True)
class Companions:
    """The companions of weights.

    Attributes:
        files: the contents of the files by name.
        fields: the fields of config.json.
        model_type: the `model_type` of the config.json that the fields come from.
        omitted: descriptions of the parts of the folder that are not copied.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    model_type: str | None = None
    omitted: tuple[str, ...] = ()

    @classmethod
    def read(cls, weights: Path | None, family: FamilyConfig | None) -> Companions:
        """Read the companions of weights, which are a file or a folder, for a model of a family; empty without weights.

        A folder of PEFT has few: the companions of the model that its adapter changes are added.

        Raise SpecError for a file that is not a regular file in the folder, is too large, or has invalid settings.
        """
        if weights is None:
            return cls()
        folder = model_folder(weights) if os.path.isdir(weights) else weights.parent
        files, omitted = {}, []
        for name in _companion_names(folder):
            files[name] = _read_contents(folder, name, MAX_FILE)
            if CODE in (settings := _settings_of_file(folder / name, files[name])):
                files[name] = _json_bytes({key: value for key, value in settings.items() if key != CODE})
                omitted.append(f"`{CODE}` of {name}")
        source = next((name for name in (EXPORT_CONFIG, CONFIG) if os.path.lexists(folder / name)), None)
        if source is None and os.path.isfile(folder / ADAPTER) and not os.path.lexists(folder / STATE):
            base = cls.read(base_folder(folder), family)
            return replace(base, files={**base.files, **files}, omitted=(*base.omitted, *omitted))
        if source is None:
            return cls(files, omitted=tuple(omitted))
        config = _parsed_object(folder / source, _read_contents(folder, source, MAX_CONFIG))
        if family is not None and contains_text_model(config, family):
            config = text_fields(text_config_in(config), config)
            omitted += [f"{name}, of images or sound" for name in files if name in PROCESSOR_FILES]
            files = {name: content for name, content in files.items() if name not in PROCESSOR_FILES}
        model_type = config.get("model_type")
        if not os.path.lexists(folder / SPEC):  # a folder of tfkit has no further files
            omitted += _further_names(folder)
        fields = further_fields(config, family)
        return cls(files, fields, model_type if isinstance(model_type, str) else None, tuple(omitted))

    @property
    def tokenizer_names(self) -> list[str]:
        """The names of the files that belong to the tokenizer."""
        return [name for name in self.files if _has_match(name, TOKENIZER_FILES)]

    def with_tokenizer(self, tokenizer: Tokenizer) -> Companions:
        """Return the companions with the tokenizer of a run's data, which may be the tokenizer of the weights.

        Fields with ids of tokens are omitted if the ids stand for different tokens.
        """
        content, folder = _tokenizer_bytes(tokenizer), getattr(tokenizer, "folder", None)
        before = self._of_tokenizer()
        after = before if folder is None else Companions.read(folder, None)._of_tokenizer()
        loaded = _loaded_tokenizer(before)
        same = not before or (folder is not None and after == before)
        same = same or (loaded is not None and _token_bytes(loaded) == _token_bytes(tokenizer) is not None)
        after = after if same or folder is not None else {}
        # A class of transformers may change the tokenizer of the file: the run has ids of the changed tokenizer.
        unchanged = (loaded := _loaded_tokenizer(after)) is not None and _encoding_sections(
            _tokenizer_bytes(loaded)
        ) == _encoding_sections(content)
        after = after if unchanged else {**after, tokenizer.file: content}
        files = {name: value for name, value in self.files.items() if name not in before} | after
        companions = replace(self, files=files)
        return companions if same else companions._without_ids()

    def _of_tokenizer(self) -> dict[str, bytes]:
        return {name: self.files[name] for name in self.tokenizer_names}

    def _without_ids(self) -> Companions:
        """Return the companions without ids of tokens, which would stand for different tokens."""
        fields, generation = _without_token_fields(self.fields), _without_token_fields(self.generation)
        names = [*(self.fields.keys() - fields.keys()), *(self.generation.keys() - generation.keys())]
        omitted = tuple(f"`{name}`, an id of a different tokenizer" for name in sorted(set(names)))
        files = {**self.files, **({GENERATION: _json_bytes(generation)} if GENERATION in self.files else {})}
        return replace(self, files=files, fields=fields, omitted=(*self.omitted, *omitted))

    @property
    def generation(self) -> dict[str, Any]:
        """The generation config; empty without that file."""
        return _parsed_object(Path(GENERATION), self.files[GENERATION]) if GENERATION in self.files else {}

    def with_ids(self, start: int | None, end: int | None, mask: int | None = None) -> Companions:
        """Return the companions with the tokens that begin and end a text in a run, and with its mask token."""
        tokens = ((START, start), (END, end), (MASK, mask))
        ids = {name: token for name, token in tokens if token is not None}
        generation = self.generation
        changed = {name: token for name, token in ids.items() if token not in _token_ids(generation.get(name))}
        files = (
            self.files
            if not (generation and changed)
            else {**self.files, GENERATION: _json_bytes(generation | changed)}
        )
        changed = {name: token for name, token in ids.items() if token not in _token_ids(self.fields.get(name))}
        return replace(self, files=files, fields={**self.fields, **changed})

    def with_start(self, family: FamilyConfig | None) -> Companions:
        """Return the companions of an encoder-decoder with the token that begins a text, where it is missing.

        In transformers, `generate` reads it from the generation config, and training with `labels` from config.json.
        Without it in either file, it is the special token that begins the texts of the family.
        """
        role = None if family is None else START_ROLES.get(family.model_type)
        ids = self.ids(START) or self._ids(START) or ([] if role is None else self._special_ids(role))
        if not ids:
            return self
        generation, start = self.generation, {START: ids[0]}
        is_complete = not generation or _token_ids(generation.get(START))
        files = self.files if is_complete else {**self.files, GENERATION: _json_bytes(generation | start)}
        return replace(self, files=files, fields={**self.fields, START: (self._ids(START) or ids)[0]})

    def _ids(self, name: str) -> list[int]:
        return _token_ids(self.fields.get(name))

    def _special_ids(self, role: str) -> list[int]:
        """Return the ids of a special token by its role, such as `pad_token`, or by its text."""
        if ids := self.ids(f"{role}_id") or self._ids(f"{role}_id"):
            return ids
        settings = _parsed_object(Path(SETTINGS), self.files[SETTINGS]) if SETTINGS in self.files else {}
        token = settings.get(role, role)
        text = token.get("content") if isinstance(token, dict) else token
        tokenizer = _loaded_tokenizer(self._of_tokenizer())
        if not isinstance(tokenizer, FileTokenizer) or not isinstance(text, str):
            return []
        return _token_ids(tokenizer.special(text))

    def with_classes(self, names: Sequence[str] | None) -> Companions:
        """Return the companions with the names of classes, or without names for classes without names."""
        fields = {name: value for name, value in self.fields.items() if name not in LABELS}
        if names is not None:
            fields["id2label"] = {str(number): name for number, name in enumerate(names)}
            fields["label2id"] = {name: number for number, name in enumerate(names)}
        return replace(self, fields=fields)

    def with_image_processor(self, image: Signal, mean: Sequence[float], std: Sequence[float]) -> Companions:
        """Return the companions with the processor of RGB images, which resizes and normalizes them for a model.

        Images with a different number of channels have no processor: transformers reads all images as RGB.
        """
        files = {name: self.files[name] for name in self.files.keys() - PROCESSOR_FILES}
        if image.channels == 3:
            files[PREPROCESSOR] = _json_bytes(
                {
                    "image_processor_type": "ViTImageProcessor",
                    "do_resize": True,
                    "size": {"height": image.rows, "width": image.width},
                    "do_rescale": True,
                    "rescale_factor": 1 / 255,
                    "do_normalize": True,
                    "image_mean": [*mean],
                    "image_std": [*std],
                }
            )
        return replace(self, files=files)

    def ids(self, name: str) -> list[int]:
        """Return the ids of a field, in the generation config or in config.json; empty without the field."""
        return _token_ids(self.generation.get(name, self.fields.get(name)))

    def write_files(self, target: Path) -> None:
        """Write the files to a folder."""
        for name, content in self.files.items():
            (target / name).parent.mkdir(exist_ok=True)
            (target / name).write_bytes(content)

    def write(self, target: Path) -> None:
        """Write the files and the fields to a folder of tfkit's layout."""
        self.write_files(target)
        if self.fields:
            model_type = {} if self.model_type is None else {"model_type": self.model_type}
            (target / EXPORT_CONFIG).write_bytes(_json_bytes({**model_type, **self.fields}))


NO_COMPANIONS = Companions(MappingProxyType({}), MappingProxyType({}))


def _tokenizer_bytes(tokenizer: Tokenizer) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / tokenizer.file
        tokenizer.save(path)
        return path.read_bytes()


def _loaded_tokenizer(files: Mapping[str, bytes]) -> Tokenizer | None:
    """Return the tokenizer in files; None if tfkit cannot read any of them."""
    name = next((name for name in TOKENIZERS if name in files), None)
    if name is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / name).write_bytes(files[name])
        with suppress(SpecError):
            return load_tokenizer(Path(folder) / name)  # type: ignore[return-value]  # both are of the contract
    return None


def _encoding_sections(content: bytes) -> dict[str, Any]:
    """Return the contents of a tokenizer's file without the sections that have no effect on the ids of a text."""
    sections = _parsed_object(Path(TOKENIZERS[0]), content, max_values=None)
    return {name: value for name, value in sections.items() if name not in ("decoder", "truncation", "padding")}


def _token_bytes(tokenizer: object) -> Sequence[bytes | None] | None:
    pieces = getattr(tokenizer, "pieces", None)
    return None if pieces is None else pieces()


def is_companion(name: str) -> bool:
    """Return True for the name of a file, or of a folder with files, that is copied."""
    return name == EXPORT_CONFIG or _has_match(name, FILES) or any(pattern.startswith(f"{name}/") for pattern in FILES)


def _token_ids(value: object) -> list[int]:
    """Return the ids of tokens in a field, which has a single id or a list."""
    values = value if isinstance(value, list) else [value]
    return [token for token in values if type(token) is int and token >= 0]


def _without_token_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in values.items() if not name.endswith("_token_id") and name not in TOKEN_FIELDS
    }


def _has_match(name: str, patterns: frozenset[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _companion_names(folder: Path) -> list[str]:
    """Return the names of the companion files in a folder, sorted."""
    inner = [pattern.partition("/")[0] for pattern in FILES if "/" in pattern]
    try:
        names = os.listdir(folder) if os.path.isdir(folder) else []
        folders = [name for name in inner if os.path.isdir(folder / name)]
        names += [f"{name}/{file}" for name in folders for file in os.listdir(folder / name)]
    except OSError as error:
        raise read_error(folder, error) from error
    return sorted(name for name in names if _has_match(name, FILES))


def _further_names(folder: Path) -> Iterator[str]:
    """Yield the names of files of a published folder that are neither copied nor expected to be omitted."""
    for name in sorted(os.listdir(folder)):
        if not is_companion(name) and not any(fnmatchcase(name, pattern) for pattern in NOT_COPIED):
            yield f"{name}/" if os.path.isdir(folder / name) else name


def _read_contents(folder: Path, name: str, limit: int) -> bytes:
    """Return the contents of a regular file in a folder, or in the blobs of the folder in the cache of the Hub."""
    path, base = folder / name, folder.resolve()
    roots = [base, base.parents[1] / "blobs"] if base.parent.name == "snapshots" else [base]
    if not any(path.resolve().is_relative_to(root) for root in roots):
        message = f"{quoted_path(path)} must be a file in its folder; got a link out of the folder"
        raise SpecError(Diagnostic(message, help="copy the file into the folder"))
    with open_regular(path) as file:
        try:
            content = file.read(limit + 1)
        except OSError as error:
            raise read_error(path, error) from error
    if len(content) > limit:
        raise SpecError(Diagnostic(f"{quoted_path(path)} must have at most {limit:,} bytes"))
    return content


def _settings_of_file(path: Path, content: bytes) -> dict[str, Any]:
    """Return the settings in a file of settings; empty for any other file."""
    return _parsed_object(path, content) if path.name.endswith("_config.json") else {}


def _parsed_object(path: Path, content: bytes, *, max_values: int | None = MAX_PARTS) -> dict[str, Any]:
    try:
        return parse_object(content, max_values=max_values)
    except Malformed as error:
        raise SpecError(Diagnostic(f"cannot read {quoted_path(path)}: {error}")) from error


def _json_bytes(values: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(values, indent=2, ensure_ascii=False)}\n".encode()


def companions_of(weights: Path | None, family: FamilyConfig | None) -> Companions:
    """Read the companions of weights, and issue a warning about the parts of their folder that are not copied."""
    if weights is None:
        return NO_COMPANIONS
    if os.path.exists(weights):
        companions = Companions.read(weights, family)
    else:
        companions = Companions(omitted=("the tokenizer and all settings, because it no longer exists",))
    if companions.omitted:
        text = f"not copied from {quoted_path(weights)}: {listing(companions.omitted, 12)}"
        warnings.warn(text, LeftOutWarning, stacklevel=4)
    return companions
