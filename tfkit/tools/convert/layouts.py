"""Layouts of weights other than transformers': nanoGPT's, Meta's and litgpt's.

Each layout has a function that returns the tensors under the names of a class of transformers, and its config.json.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tfkit.checkpoint.files import TensorFiles
from tfkit.errors import Diagnostic, SpecError, listing, quoted

USE_SOURCE = "convert the weights to the layout of transformers with the tools of their source"
GELU = "the FFN has the exact GELU, as nanoGPT since May 2023"
ZEROS = "the model has no biases: they are written as zeros, because GPT-2 of transformers always has biases"
FACTOR = "no setting has the factor of the rotary positions: it is 32 if the output matrix is tied (Llama 3.2), else 8"
NO_TEXT_IDS = {"bos_token_id": None, "eos_token_id": None}
"""The classes of transformers have ids by default, which belong to the tokenizers of certain models."""


def words(text: str) -> list[str]:
    """Return the words of a text."""
    return text.split()


def fields(names: str, *values: object) -> dict[str, Any]:
    """Return fields from a text with their names, and their values."""
    return dict(zip(words(names), values, strict=True))


class StoredTensors:
    """Tensors under the names of their source, in one or several files.

    Attributes:
        files: the files.
        names: the names of all tensors.
    """

    def __init__(self, files: Sequence[TensorFiles]) -> None:
        self.files = files
        self.names = list(dict.fromkeys(name for file in files for name in file.names))

    def parts(self, name: str) -> list[Tensor]:
        """Return the tensors with a name, one of each file that has it."""
        return [file.read(name) for file in self.files if name in file.names]

    def read(self, name: str) -> Tensor:
        """Return the tensor with a name, from the first file that has it."""
        return self.parts(name)[0]

    def rows(self, name: str) -> int:
        """Return the length of the first axis; raise SpecError if the tensor is missing."""
        if name not in self.names:
            raise SpecError(Diagnostic(f"the tensor {quoted(name)} is missing", help=USE_SOURCE))
        return self.read(name).shape[0]

    def check_layers(self, prefix: str, stated: int) -> None:
        """Raise SpecError if the names have a different number of layers than stated."""
        layers = {match[1] for name in self.names if (match := re.match(rf"{re.escape(prefix)}(\d+)\.", name))}
        if len(layers) != stated:
            message = f"the settings have {stated} layers, but the tensors `{prefix}*` have {len(layers)}"
            raise SpecError(Diagnostic(message, help="take the settings and the weights from the same checkpoint"))

    def is_tied(self, output: str, embedding: str) -> bool:
        """Return True if the output matrix is missing, or equals the embedding table."""
        if output not in self.names:
            return True
        tables = [*self.parts(output), *self.parts(embedding)]
        return len(tables) == 2 and torch.equal(*tables)


@dataclass
class Conversion:
    """The tensors of a published model, computed when they are read.

    Attributes:
        stored: the tensors of the source.
        config_json: the fields of config.json; None if the source has a config.json.
        ignored: the pattern of stored tensors that the model omits, such as masks.
        notes: warnings: what the source does not state.
    """

    stored: StoredTensors
    config_json: dict[str, Any] | None = None
    ignored: str = "(?!)"
    notes: list[Diagnostic] = field(default_factory=list)
    _entries: dict[str, tuple[str, Callable[[str], Tensor]]] = field(default_factory=dict)

    def put(self, name: str, source: str, read: Callable[[str], Tensor] | None = None) -> None:
        """Add a tensor of the model, which is read from a tensor of the source."""
        self._entries[name] = source, read or self.stored.read

    def modules(self, target: str, source: str, names: Mapping[str, str]) -> None:
        """Add weights of modules, and the biases that the source has. `names` are their names in both models."""
        for ours, theirs in names.items():
            for leaf in ("weight", "bias"):
                if leaf == "weight" or f"{source}{theirs}.bias" in self.stored.names:
                    self.put(f"{target}{ours}.{leaf}", f"{source}{theirs}.{leaf}")

    def check(self) -> Conversion:
        """Return this conversion. Raise SpecError if tensors of the source are missing or unknown."""
        sources = {source for source, _ in self._entries.values()}
        missing = sources - set(self.stored.names)
        unknown = [name for name in self.stored.names if name not in sources and not re.search(self.ignored, name)]
        if missing or unknown:
            message = "the tensors are not the tensors of the model that the settings describe"
            sets = {"missing": sorted(missing), "unknown": sorted(unknown)}
            notes = tuple(f"{key}: {listing(map(quoted, names), 6)}" for key, names in sets.items() if names)
            raise SpecError(Diagnostic(message, notes=notes, help=USE_SOURCE))
        return self

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors of the model. Raise SpecError for a shape that the settings rule out."""
        for name, (source, read) in self._entries.items():
            try:
                tensor = read(source).contiguous()
            except (RuntimeError, ValueError) as error:
                message = f"tensor {quoted(source)} does not have the shape that the settings describe"
                raise SpecError(Diagnostic(message, notes=(str(error).partition("\n")[0],), help=USE_SOURCE)) from error
            yield name, tensor


def checked_settings(stated: object, defaults: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return settings with their defaults.

    Args:
        stated: the settings of the source.
        defaults: the default of each setting; `int` for a positive integer without default. A setting whose default is
            in a tuple must have that value.
        origin: the file, for errors.

    Raises:
        SpecError: a setting is unsupported or missing, or has an unsupported value.
    """
    if not isinstance(stated, Mapping):
        raise SpecError(Diagnostic(f"{origin} must be a mapping with the settings of the model", help=USE_SOURCE))
    errors, settings = [], dict[str, Any]()
    for name, value in stated.items():
        if name not in defaults:
            errors.append(f"{quoted(str(name))} is not supported; got {value!r}")
        elif isinstance(defaults[name], tuple) and value != defaults[name][0]:
            errors.append(f"{quoted(name)} must be {defaults[name][0]!r}; got {value!r}")
    for name, default in defaults.items():
        settings[name] = stated.get(name, default[0] if isinstance(default, tuple) else default)
        if default is int and (type(settings[name]) is not int or settings[name] < 1):
            errors.append(f"{quoted(name)} must be a positive integer; got {stated.get(name)!r}")
    if errors:
        raise SpecError(*(Diagnostic(f"{origin}: {error[:200]}", help=USE_SOURCE) for error in errors))
    return settings


# ---- nanoGPT ----


NANOGPT = {**dict.fromkeys(words("n_layer n_head n_embd block_size vocab_size"), int), "bias": True, "dropout": 0.0}


def nanogpt(stored: StoredTensors, stated: object) -> Conversion:
    """Return GPT-2 of a checkpoint `ckpt.pt` of nanoGPT, whose matrices are [out, in] instead of [in, out]."""
    args = checked_settings(stated, NANOGPT, "model_args")
    stored.check_layers("transformer.h.", args["n_layer"])
    tied = stored.is_tied("lm_head.weight", "transformer.wte.weight")
    config = {
        **fields("architectures model_type activation_function", ["GPT2LMHeadModel"], "gpt2", "gelu"),
        **fields("vocab_size n_positions n_layer", args["vocab_size"], args["block_size"], args["n_layer"]),
        **fields("n_head n_embd layer_norm_epsilon tie_word_embeddings", args["n_head"], args["n_embd"], 1e-5, tied),
        **dict.fromkeys(words("resid_pdrop embd_pdrop attn_pdrop"), args["dropout"]),
        **NO_TEXT_IDS,
    }
    model = Conversion(stored, config, r"\.attn\.bias$" + (r"|^lm_head\.weight$" if tied else ""))
    help = "earlier versions have the tanh approximation: set `activation_function` to gelu_new in config.json"
    model.notes.append(Diagnostic(GELU, help=help))
    if "transformer.ln_f.bias" not in stored.names:
        model.notes.append(Diagnostic(ZEROS))

    def transposed(name: str) -> Tensor:
        return stored.read(name).mT

    def zeros(name: str) -> Tensor:
        matrix = stored.read(name)
        return matrix.new_zeros(matrix.shape[0])

    layers = [f"transformer.h.{number}." for number in range(args["n_layer"])]
    matrices = [layer + name for layer in layers for name in words("attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj")]
    norms = [layer + name for layer in layers for name in words("ln_1 ln_2")]
    for name in words("transformer.wte.weight transformer.wpe.weight"):
        model.put(name, name)
    for name in ("transformer.ln_f", *norms, *matrices):
        model.put(f"{name}.weight", f"{name}.weight", transposed if name in matrices else None)
        if f"{name}.bias" in stored.names:
            model.put(f"{name}.bias", f"{name}.bias")
        else:
            model.put(f"{name}.bias", f"{name}.weight", zeros)
    if not tied:
        model.put("lm_head.weight", "lm_head.weight")
    return model.check()


# ---- Meta's Llama ----


META = {
    **dict.fromkeys(words("dim n_layers n_heads"), int),
    **fields("n_kv_heads norm_eps rope_theta use_scaled_rope", None, 1e-5, 10000.0, False),
    # The shapes have their values, or the model does not depend on them.
    **dict.fromkeys(words("vocab_size multiple_of ffn_dim_multiplier max_batch_size max_seq_len")),
}
BY_COLUMNS = {"wo", "w2"}
"""Matrices that several files split by columns, and not by rows."""


def meta(stored: StoredTensors, stated: object) -> Conversion:
    """Return Llama of Meta's files, whose rotary positions rotate the numbers 2i and 2i + 1 of a head.

    transformers rotates the numbers i and i + d/2.
    """
    args = checked_settings(stated, META, "params.json")
    stored.check_layers("layers.", args["n_layers"])
    heads = {"q": args["n_heads"], "k": args["n_kv_heads"] or args["n_heads"]}
    tied = stored.is_tied("output.weight", "tok_embeddings.weight")

    def joined(name: str) -> Tensor:
        return torch.cat(stored.parts(name), int(name.split(".")[-2] in BY_COLUMNS))

    def table(name: str) -> Tensor:
        parts = stored.parts(name)  # split by columns in Llama 1 and 2, and by tokens in Llama 3
        return torch.cat(parts, int(parts[0].shape[1] != args["dim"]))

    def halves(name: str) -> Tensor:
        count = heads[name.split(".")[-2].removeprefix("w")]
        return joined(name).unflatten(0, (count, -1, 2)).transpose(1, 2).flatten(0, 2)

    model = Conversion(stored, ignored=r"^rope\.freqs$" + (r"|^output\.weight$" if tied else ""))
    model.put("model.embed_tokens.weight", "tok_embeddings.weight", table)
    for number in range(args["n_layers"]):
        source, target = f"layers.{number}.", f"model.layers.{number}."
        norms = {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}
        model.modules(target, source, norms)
        for name in "qkvo":
            read = halves if name in heads else joined
            model.put(f"{target}self_attn.{name}_proj.weight", f"{source}attention.w{name}.weight", read)
        for name, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
            model.put(f"{target}mlp.{name}_proj.weight", f"{source}feed_forward.{theirs}.weight", joined)
    model.modules("model.", "", {"norm": "norm"})
    if not tied:
        model.put("lm_head.weight", "output.weight", joined)
    model.check()
    vocab_size, width = table("tok_embeddings.weight").shape[0], joined("layers.0.feed_forward.w1.weight").shape[0]
    sizes = vocab_size, args["dim"], args["n_layers"], heads["q"], heads["k"], width
    length = 131072 if args["use_scaled_rope"] else 8192 if args["rope_theta"] == 500000 else 4096
    model.config_json = _llama_config("llama", sizes, length, args["rope_theta"], args["norm_eps"], tied)
    if args["use_scaled_rope"]:
        model.config_json["rope_scaling"] = _scaling(32.0 if tied else 8.0, 1.0, 4.0, 8192)
        model.notes.append(Diagnostic(FACTOR, help="if it differs, correct `rope_scaling` in config.json"))
    return model


def _llama_config(
    model_type: str, sizes: Sequence[int], length: int, theta: float, eps: float, tied: bool
) -> dict[str, Any]:
    architecture = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[model_type]
    names = "num_hidden_layers num_attention_heads num_key_value_heads intermediate_size"
    return {
        **fields("architectures model_type hidden_act", [architecture], model_type, "silu"),
        **fields(f"vocab_size hidden_size {names}", *sizes),
        **fields("max_position_embeddings rope_theta rms_norm_eps tie_word_embeddings", length, theta, eps, tied),
        **NO_TEXT_IDS,
    }


def _scaling(factor: float, low: float, high: float, length: int) -> dict[str, Any]:
    """Return the scaling of the rotary positions of Llama 3.1."""
    names = "rope_type factor low_freq_factor high_freq_factor original_max_position_embeddings"
    return fields(names, "llama3", factor, low, high, length)


# ---- litgpt ----


LITGPT = {
    **dict.fromkeys(words("n_layer n_head n_embd block_size"), int),
    **fields("norm_class_name mlp_class_name gelu_approximate", "LayerNorm", "GptNeoxMLP", "none"),
    **fields("parallel_residual bias attn_bias rotary_percentage norm_eps", True, True, False, 0.25, 1e-5),
    **fields("rope_base rope_adjustments n_query_groups head_size intermediate_size", 10000, None, None, None, None),
    **fields("norm_1 norm_2 n_expert rope_condense_ratio", (True,), (True,), (0,), (1,)),
    **dict.fromkeys(words("shared_attention_norm scale_embeddings norm_qk post_attention_norm"), (False,)),
    **dict.fromkeys(words("post_mlp_norm rope_interleave lm_head_bias"), (False,)),
    **dict.fromkeys(words("attention_scores_scalar sliding_window_size attention_logit_softcapping"), (None,)),
    **dict.fromkeys(words("final_logit_softcapping latent_attention rope_local_base_freq"), (None,)),
    # Settings of the vocabulary; and of experts, windows and local positions, which the values above rule out.
    **dict.fromkeys(words("name hf_config org vocab_size padded_vocab_size padding_multiple norm_qk_type")),
    **dict.fromkeys(words("n_expert_per_token n_shared_expert n_expert_groups n_topk_groups n_topk_scores_per_group")),
    **dict.fromkeys(words("moe_intermediate_size first_k_dense_replace routed_scaling_factor norm_topk_prob")),
    **dict.fromkeys(words("sliding_window_indices rope_indices")),
}
LLAMA = {
    **fields("norm_class_name mlp_class_name", "RMSNorm", "LLaMAMLP"),
    **fields("parallel_residual bias rotary_percentage", False, False, 1.0),
}
NEOX = {"norm_class_name": "LayerNorm", "mlp_class_name": "GptNeoxMLP", "bias": True, "rope_adjustments": None}
ACTIVATIONS = {"none": "gelu", "tanh": "gelu_pytorch_tanh"}
NORMS = {"input_layernorm": "norm_1", "post_attention_layernorm": "norm_2"}


def litgpt(stored: StoredTensors, stated: object) -> Conversion:
    """Return Llama, Qwen2 or GPT-NeoX of a `lit_model.pth` and a `model_config.yaml` of litgpt."""
    args = checked_settings(stated, LITGPT, "model_config.yaml")
    stored.check_layers("transformer.h.", args["n_layer"])
    args["n_query_groups"] = args["n_query_groups"] or args["n_head"]
    args["head_size"] = args["head_size"] or args["n_embd"] // args["n_head"]
    args["intermediate_size"] = args["intermediate_size"] or 4 * args["n_embd"]
    if all(args[name] == value for name, value in LLAMA.items()):
        return _litgpt_llama(stored, args).check()
    plain = args["n_query_groups"] == args["n_head"] and args["head_size"] * args["n_head"] == args["n_embd"]
    if plain and all(args[name] == value for name, value in NEOX.items()) and args["gelu_approximate"] in ACTIVATIONS:
        return _litgpt_neox(stored, args).check()
    names = [*LLAMA, "n_query_groups", "head_size", "rope_adjustments", "gelu_approximate"]
    notes = (", ".join(f"{name}: {args[name]!r}" for name in names),)
    message = "model_config.yaml describes neither Llama, Qwen2 nor GPT-NeoX"
    raise SpecError(Diagnostic(message, notes=notes, help=USE_SOURCE))


def _litgpt_llama(stored: StoredTensors, args: Mapping[str, Any]) -> Conversion:
    tied = stored.is_tied("lm_head.weight", "transformer.wte.weight")
    names = words("n_embd n_layer n_head n_query_groups intermediate_size")
    sizes = (stored.rows("transformer.wte.weight"), *(args[name] for name in names))
    model_type = "qwen2" if args["attn_bias"] else "llama"
    config = _llama_config(model_type, sizes, args["block_size"], args["rope_base"], args["norm_eps"], tied)
    config["head_dim"] = args["head_size"]
    if (stated := args["rope_adjustments"]) is not None:
        keys = words("factor low_freq_factor high_freq_factor original_max_seq_len")
        if not isinstance(stated, dict) or stated.keys() != set(keys):
            message = f"model_config.yaml: `rope_adjustments` must have {listing(keys)}; got {stated!r}"
            raise SpecError(Diagnostic(message[:300], help=USE_SOURCE))
        config["rope_scaling"] = _scaling(*(stated[key] for key in keys))
    model = Conversion(stored, config, r"^lm_head\.weight$" if tied else "(?!)")
    model.modules("model.", "transformer.", {"embed_tokens": "wte", "norm": "ln_f"})
    for number in range(args["n_layer"]):
        source, target = f"transformer.h.{number}.", f"model.layers.{number}."
        for index, name in enumerate("qkv"):
            for leaf in words("weight bias" if args["attn_bias"] else "weight"):
                read = _qkv_reader(stored, args, index)
                model.put(f"{target}self_attn.{name}_proj.{leaf}", f"{_qkv(stored, source)}.{leaf}", read)
        ffn = {"mlp.gate_proj": "mlp.fc_1", "mlp.up_proj": "mlp.fc_2", "mlp.down_proj": "mlp.proj"}
        model.modules(target, source, {**NORMS, "self_attn.o_proj": "attn.proj", **ffn})
    if not tied:
        model.modules("", "", {"lm_head": "lm_head"})
    return model


def _litgpt_neox(stored: StoredTensors, args: Mapping[str, Any]) -> Conversion:
    vocab_size = stored.rows("transformer.wte.weight")
    config = {
        **fields("architectures model_type vocab_size", ["GPTNeoXForCausalLM"], "gpt_neox", vocab_size),
        **fields("hidden_size num_hidden_layers num_attention_heads", args["n_embd"], args["n_layer"], args["n_head"]),
        **fields("intermediate_size layer_norm_eps", args["intermediate_size"], args["norm_eps"]),
        **fields("max_position_embeddings rotary_emb_base", args["block_size"], args["rope_base"]),
        **fields("rotary_pct use_parallel_residual", args["rotary_percentage"], args["parallel_residual"]),
        **fields("hidden_act tie_word_embeddings", ACTIVATIONS[args["gelu_approximate"]], False),
        **NO_TEXT_IDS,
    }
    model = Conversion(stored, config)

    def by_head(name: str) -> Tensor:
        parts = [_qkv_reader(stored, args, index)(name).unflatten(0, (args["n_head"], -1)) for index in range(3)]
        return torch.cat(parts, 1).flatten(0, 1)

    model.modules("gpt_neox.", "transformer.", {"embed_in": "wte", "final_layer_norm": "ln_f"})
    for number in range(args["n_layer"]):
        source, target = f"transformer.h.{number}.", f"gpt_neox.layers.{number}."
        for leaf in ("weight", "bias"):
            model.put(f"{target}attention.query_key_value.{leaf}", f"{_qkv(stored, source)}.{leaf}", by_head)
        ffn = {"mlp.dense_h_to_4h": "mlp.fc", "mlp.dense_4h_to_h": "mlp.proj"}
        model.modules(target, source, {**NORMS, "attention.dense": "attn.proj", **ffn})
    model.modules("", "", {"embed_out": "lm_head"})
    return model


def _qkv(stored: StoredTensors, layer: str) -> str:
    """Return the module of queries, keys and values of a layer: `attn.attn` before version 0.5.5, else `attn.qkv`."""
    older = f"{layer}attn.attn"
    return older if f"{older}.weight" in stored.names else f"{layer}attn.qkv"


def _qkv_reader(stored: StoredTensors, args: Mapping[str, Any], index: int) -> Callable[[str], Tensor]:
    """Return a function that reads the queries (0), keys (1) or values (2) from a fused tensor.

    In `attn.qkv`, all queries precede all keys and all values. In the older `attn.attn`, the queries of each group
    precede its key and its value.
    """
    groups, width = args["n_query_groups"], args["head_size"]
    rows = args["n_head"] // groups * width, width, width

    def read(name: str) -> Tensor:
        tensor = stored.read(name)
        if ".attn.attn." in name:
            return tensor.unflatten(0, (groups, -1)).split(rows, 1)[index].flatten(0, 1)
        return tensor.split([groups * count for count in rows])[index]

    return read


LAYOUTS: Mapping[str, Callable[[StoredTensors, object], Conversion]] = {
    "nanoGPT": nanogpt,
    "Meta": meta,
    "litgpt": litgpt,
}
