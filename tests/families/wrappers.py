"""Small models of images, sound and text that contain a text model of a family, as transformers builds them."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

from .case import Case
from .cases import CASES

TEXT_ALONE = {"blip-2", "florence2", "instructblip", "instructblipvideo", "llama4"}
"""Types whose class does not run without images, or has two inputs of text: their text model runs alone."""
MISNAMED = {
    "cosmos3_omni": "version 5.24 writes the names of all of its parts without their prefixes",
    "kimi_k25": "version 5.24 writes `blocks` instead of `layers`, also in the text model",
    "qianfan_ocr": "version 5.24 writes `encoder` instead of `layers`, also in the text model",
}
"""Types whose folders transformers writes with names that published folders do not have."""
UNREAD = {"shieldgemma2": "version 5.24 does not read the names that it writes"}
"""Types whose folders transformers does not read as it wrote them."""
WITH_IMAGES = {
    "gemma3": "gemma3_1b",
    "mistral3": "mistral_7b",
    "paligemma": "gemma_2b",
    "qwen2_5_vl": "qwen2_0_5b",
    **dict.fromkeys(("idefics3", "llava", "smolvlm", "voxtral"), "llama_7b"),
}
"""Types that have a family, each with the spec that imports the text model alone."""
REJECTED = {"paligemma": "a decoder of tfkit reads no later tokens"}
"""Types whose text model computes otherwise than every spec, with the error."""
SIZES = {
    r"(.*_)?(num_hidden_layers|num_layers|depth|encoder_layers|decoder_layers|n_layer)": 1,
    r"(.*_)?(num_attention_heads|num_heads|num_key_value_heads|encoder_attention_heads|decoder_attention_heads)": 2,
    r"(.*_)?(hidden_size|d_model|embed_dim|projection_dim|output_dim|hidden_dim)": 16,
    r"(.*_)?(intermediate_size|ffn_dim)": 24,
    r"image_size": 16,
    r"patch_size": 8,
}
"""Sizes of the models around the text model, by the names of their fields."""
STAGES = {"embed_dim": [16, 16], "num_heads": [2, 2], "num_groups": [2, 2], "depths": [1, 1], "window_size": 4}
FURTHER: dict[str, dict[str, Any]] = {
    "qwen3_asr": {"pad_token_id": 5, "eos_token_id": [7, 9]},
    "gemma4": {
        "vision_config": {
            "hidden_size": 16,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_hidden_layers": 1,
            "intermediate_size": 24,
            "patch_size": 8,
        }
    },
    "gemma4_unified": {
        "vision_config": {"patch_size": 8, "pooling_kernel_size": 1, "mm_embed_dim": 16, "mm_posemb_size": 4}
    },
    "perception_lm": {"vision_config": {"model_type": "timm_wrapper", "model_args": {"embed_dim": 5}}},
    "florence2": {
        "vision_config": {
            **STAGES,
            "patch_size": [3, 3],
            "patch_stride": [2, 2],
            "patch_padding": [1, 1],
            "patch_prenorm": [False, True],
            "projection_dim": 16,
        }
    },
    "apertus1p5": {
        "image_token_offset": 41,
        "audio_token_offset": 51,
        "vision_config": {
            "codebook_size": 10,
            "embed_dim": 8,
            "latent_channels": 8,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
        },
        "audio_config": {
            "model_type": "wavtokenizer_encoder",
            "num_filters": 4,
            "upsampling_ratios": [2, 2],
            "num_lstm_layers": 1,
            "hidden_size": 8,
            "codebook_dim": 8,
            "codebook_size": 10,
        },
    },
    "janus": {
        "vq_config": {
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_embeddings": 20,
            "embed_dim": 4,
            "num_patches": 4,
            "latent_channels": 4,
            "num_res_blocks": 1,
        }
    },
}
"""Configs that the names of fields do not make small."""
PLANES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 1, 1]}}
OF_TEXT: dict[str, dict[str, Any]] = {"qwen2_vl": PLANES, "qwen2_5_vl": PLANES, "qwen3_vl": PLANES}
"""Further fields of text models."""
TOO_LARGE = {"fun_asr_nano", "nemo_speechlm", "nemotron_h_omni", "vibevoice", "vibevoice_asr"}
"""Types with encoders of sound or images that are large at any size, or whose sizes depend on each other."""
TIMM = {"gemma3n_vision", "timm_wrapper"}
"""Encoders of the package timm, which is not installed."""


class Tower(nn.Module):
    """Stands for an encoder of timm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.stem = nn.Linear(3, 5)


TEXT_TYPES = {
    "apertus1p5": "apertus1p5_text",
    "aria": "aria_text",
    "aya_vision": "cohere2",
    "blip-2": "opt",
    "cohere2_vision": "cohere2",
    "cohere_compass": "cohere_compass_text",
    "cosmos3_omni": "qwen3_vl_text",
    "deepseek_vl": "llama",
    "deepseek_vl_hybrid": "llama",
    "exaone4_5": "exaone4",
    "fast_vlm": "qwen2",
    "florence2": "bart",
    "fuyu": "persimmon",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "glmasr": "llama",
    "got_ocr2": "qwen2",
    "granite_speech": "granite",
    "granite_speech_plus": "granite",
    "hyperclovax_vision_v2": "hyperclovax",
    "idefics2": "mistral",
    "idefics3": "llama",
    "instructblip": "opt",
    "instructblipvideo": "opt",
    "internvl": "qwen2",
    "janus": "llama",
    "kimi_k25": "deepseek_v3",
    "lfm2_vl": "lfm2",
    "lfm3_vl": "lfm3",
    "lighton_ocr": "qwen3",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_next_video": "llama",
    "llava_onevision": "qwen2",
    "minicpm_ocr": "qwen3_5_text",
    "minicpmv4_6": "qwen3_5_text",
    "minicpmv4_7": "qwen3_5_text",
    "mistral3": "mistral",
    "moss_transcribe_diarize": "qwen3",
    "omniasr": "llama",
    "ovis2": "qwen2",
    "paligemma": "gemma",
    "perception_lm": "llama",
    "pp_chart2table": "qwen2",
    "qianfan_ocr": "qwen3",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_audio": "qwen2",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_asr": "qwen3",
    "qwen3_vl": "qwen3_vl_text",
    "shieldgemma2": "gemma3_text",
    "smolvlm": "llama",
    "video_llama_3": "qwen2",
    "video_llava": "llama",
    "vipllava": "llama",
    "voxtral": "llama",
}
"""The types whose text model is of a family that tfkit has, with the default type of the text model."""


SAME_AS = {
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}
"""Types of text models that are models of a different family, if there are no images."""


def text_types() -> dict[str, str]:
    """The types of transformers that contain a text model, each with the default type of the text model."""
    configs = {name: transformers.CONFIG_MAPPING[name] for name in _class_names()}
    parts = {name: getattr(config(), "text_config", None) for name, config in configs.items() if _has_text(config)}
    return {name: part.model_type for name, part in parts.items() if part is not None}


def _has_text(config: Any) -> bool:
    return "text_config" in getattr(config, "sub_configs", {})


def _class_names() -> dict[str, str]:
    """The class of each type of images or sound and text."""
    names = ("SPEECH_SEQ_2_SEQ", "MULTIMODAL_LM", "IMAGE_TEXT_TO_TEXT")
    mappings = [getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES") for name in names]
    return {model_type: name for mapping in mappings for model_type, name in mapping.items()}


def text_case(model_type: str) -> Case:
    """The first case of the text model of a type."""
    family = SAME_AS.get(TEXT_TYPES[model_type], TEXT_TYPES[model_type])
    return next(case for case in CASES.values() if case.model_type == family)


def wrapper(model_type: str, **fields: Any) -> Any:
    """A small model of a type, with random weights, around the model of the first case of its text type."""
    case = text_case(model_type)
    config_class = transformers.CONFIG_MAPPING[model_type]
    parts = {name: getattr(config_class(), name, None) for name in config_class.sub_configs}
    small = {name: _small(part) for name, part in parts.items() if part is not None}
    text = {
        "text_config": {
            "model_type": TEXT_TYPES[model_type],
            **deepcopy({**case.config, **OF_TEXT.get(model_type, {})}),
        }
    }
    config = config_class(**small | text | FURTHER.get(model_type, {}) | fields)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, _class_names()[model_type])(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.normal_(case.norm_mean if norm else 0.0, case.std)
    return model


def _small(config: Any) -> dict[str, Any]:
    values = {name: value for name, value in config.to_dict().items() if type(value) is int}
    sizes = {name: size for name in values for pattern, size in SIZES.items() if re.fullmatch(pattern, name)}
    return {"model_type": config.model_type, **sizes}
