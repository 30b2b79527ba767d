"""Models of images and sound, from a plugin, at small sizes, with non-default fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

BATCH = 3


@dataclass(frozen=True)
class MediaCase:
    """A small model of a class of transformers.

    Attributes:
        architecture: the class.
        config: the fields of its config.
        inputs: what it reads, by the names of transformers.
        left_out: the names of tensors that the model leaves out.
        std: spread of the random parameters.
        reopened: arguments for their class when it opens what was saved.
    """

    architecture: str
    config: Mapping[str, Any]
    inputs: Mapping[str, Tensor]
    left_out: tuple[str, ...] = ()
    std: float = 0.2
    reopened: Mapping[str, Any] = field(default_factory=dict)


def normal(*shape: int) -> Tensor:
    return torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(1))


def ids(length: int) -> Tensor:
    return torch.randint(3, 61, (BATCH, length), generator=torch.Generator().manual_seed(2))


VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 4,
    "num_channels": 2,
    "num_labels": 3,
    "layer_norm_eps": 1e-3,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.2,
    "initializer_range": 0.03,
}
WIDE = {**VIT, "image_size": [14, 19], "intermediate_size": 48}
"""An image with rows and columns that do not fill a patch."""
DINO = {**VIT, "image_size": 16, "mlp_ratio": 3}
WHISPER = {
    "vocab_size": 61,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "max_source_positions": 12,
    "max_target_positions": 20,
    "num_mel_bins": 10,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "activation_function": "relu",
    "dropout": 0.1,
    "attention_dropout": 0.2,
    "activation_dropout": 0.3,
    "scale_embedding": True,
}
SIGLIP = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 4,
    "image_size": 16,
    "num_channels": 2,
    "intermediate_size": 48,
    "hidden_act": "relu",
    "layer_norm_eps": 1e-3,
    "attention_dropout": 0.2,
}
DINO3 = {**SIGLIP, "num_register_tokens": 3, "image_size": [14, 19], "rope_theta": 50.0, "initializer_range": 0.03}
TEXT = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-4,
    "attention_dropout": 0.1,
    "max_position_embeddings": 12,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
BEIT = {**VIT, "image_size": 16, "intermediate_size": 48, "use_relative_position_bias": True}
AST = {
    **{name: value for name, value in VIT.items() if name not in ("num_channels", "patch_size")},
    "patch_size": 4,
    "frequency_stride": 3,
    "time_stride": 2,
    "num_mel_bins": 12,
    "max_length": 19,
    "intermediate_size": 48,
}
SPEECH = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": [12, 12, 12],
    "conv_kernel": [5, 3, 2],
    "conv_stride": [3, 2, 2],
    "num_conv_pos_embeddings": 6,
    "num_conv_pos_embedding_groups": 4,
    "layer_norm_eps": 1e-3,
    "vocab_size": 17,
    "input_length": 131,
    "mask_time_prob": 0.0,
}
"""The first convolution has a group norm, and layers have norms after their sublayers."""
STABLE = {
    **SPEECH,
    "conv_bias": True,
    "feat_extract_norm": "layer",
    "feat_extract_activation": "relu",
    "do_stable_layer_norm": True,
    "num_conv_pos_embeddings": 5,
    "hidden_act": "silu",
}
DEEP = {
    **{name: value for name, value in SPEECH.items() if name != "num_conv_pos_embeddings"},
    "num_conv_pos_embeddings": 3,
    "conv_pos_kernel_size": 4,
    "feat_extract_activation": "relu",
}
"""Positions by three convolutions."""
MOONSHINE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 3,
    "encoder_num_attention_heads": 4,
    "decoder_num_attention_heads": 4,
    "max_position_embeddings": 20,
    "attention_dropout": 0.2,
    "initializer_range": 0.03,
    "pad_token_id": 0,
    "input_length": 3300,
}
"""Of the 8 channels of a head, transformers rotates 8 at the frequencies of 7."""
TOWERS = {"text_config": TEXT, "vision_config": SIGLIP}
SPECTROGRAM, WAVEFORM = {"input_values": normal(19, 12)}, {"input_values": normal(131)}
SPEECH_TO_TEXT = {"input_values": normal(3300), "decoder_input_ids": ids(9)}
SOUND = {"input_features": normal(10, 24), "decoder_input_ids": ids(9)}
WIDE_IMAGE, IMAGE = {"pixel_values": normal(2, 14, 19)}, {"pixel_values": normal(2, 16, 16)}
MEDIA: dict[str, MediaCase] = {
    "vit": MediaCase("ViTForImageClassification", {**WIDE, "qkv_bias": False, "hidden_act": "relu"}, WIDE_IMAGE),
    "vit_body": MediaCase("ViTModel", WIDE, WIDE_IMAGE, left_out=("pooler.*",)),
    "vit_msn": MediaCase("ViTMSNModel", {**WIDE, "qkv_bias": False}, WIDE_IMAGE),
    "ijepa": MediaCase("IJepaModel", WIDE, WIDE_IMAGE),
    "ijepa_classes": MediaCase("IJepaForImageClassification", {**WIDE, "qkv_bias": False}, WIDE_IMAGE),
    "deit": MediaCase("DeiTForImageClassification", {**WIDE, "hidden_act": "gelu_new"}, WIDE_IMAGE),
    "dinov2": MediaCase("Dinov2ForImageClassification", {**DINO, "qkv_bias": False}, IMAGE, left_out=("*.mask_token",)),
    "dinov2_gated": MediaCase(
        "Dinov2ForImageClassification", {**DINO, "use_swiglu_ffn": True, "use_mask_token": False}, IMAGE
    ),
    "dinov2_body": MediaCase("Dinov2Model", {**DINO, "use_mask_token": False}, IMAGE),
    "dinov2_with_registers": MediaCase(
        "Dinov2WithRegistersForImageClassification",
        {**DINO, "num_register_tokens": 3, "hidden_act": "relu"},
        IMAGE,
        left_out=("*.mask_token",),
    ),
    "dinov2_with_registers_gated": MediaCase(
        "Dinov2WithRegistersForImageClassification",
        {**DINO, "num_register_tokens": 2, "use_swiglu_ffn": True},
        IMAGE,
        left_out=("*.mask_token",),
    ),
    "beit": MediaCase("BeitForImageClassification", {**BEIT, "hidden_act": "relu"}, IMAGE),
    "beit_absolute": MediaCase(
        "BeitForImageClassification",
        {**BEIT, "use_relative_position_bias": False, "use_absolute_position_embeddings": True, "use_mask_token": True},
        IMAGE,
        left_out=("*.mask_token",),
    ),
    "beit_shared": MediaCase(
        "BeitModel",
        {**BEIT, "use_relative_position_bias": False, "use_shared_relative_position_bias": True},
        IMAGE,
    ),
    "ast": MediaCase("ASTForAudioClassification", {**AST, "hidden_act": "relu"}, SPECTROGRAM),
    "ast_body": MediaCase("ASTModel", {**AST, "qkv_bias": False}, SPECTROGRAM),
    "wav2vec2": MediaCase("Wav2Vec2ForCTC", SPEECH, WAVEFORM),
    "wav2vec2_stable": MediaCase("Wav2Vec2ForCTC", STABLE, WAVEFORM),
    "wav2vec2_masked": MediaCase(
        "Wav2Vec2Model", {**STABLE, "mask_time_prob": 0.05}, WAVEFORM, left_out=("masked_spec_embed",)
    ),
    "wav2vec2_classes": MediaCase(
        "Wav2Vec2ForSequenceClassification", {**SPEECH, "classifier_proj_size": 20}, WAVEFORM
    ),
    "hubert": MediaCase("HubertForCTC", {**STABLE, "feat_proj_layer_norm": False}, WAVEFORM),
    "hubert_body": MediaCase("HubertModel", SPEECH, WAVEFORM),
    "hubert_classes": MediaCase("HubertForSequenceClassification", {**STABLE, "num_labels": 3}, WAVEFORM),
    "unispeech": MediaCase("UniSpeechForCTC", {**STABLE, "feat_extract_norm": "group"}, WAVEFORM),
    "unispeech_classes": MediaCase("UniSpeechForSequenceClassification", {**SPEECH, "num_labels": 3}, WAVEFORM),
    "unispeech_sat": MediaCase("UniSpeechSatForCTC", STABLE, WAVEFORM, left_out=("*.masked_spec_embed",)),
    "unispeech_sat_classes": MediaCase(
        "UniSpeechSatForSequenceClassification", SPEECH, WAVEFORM, left_out=("*.masked_spec_embed",)
    ),
    "data2vec_audio": MediaCase("Data2VecAudioForCTC", DEEP, WAVEFORM),
    "data2vec_audio_body": MediaCase("Data2VecAudioModel", {**DEEP, "conv_pos_kernel_size": 5}, WAVEFORM),
    "data2vec_audio_classes": MediaCase(
        "Data2VecAudioForSequenceClassification", {**DEEP, "conv_bias": True}, WAVEFORM
    ),
    "moonshine": MediaCase("MoonshineForConditionalGeneration", MOONSHINE, SPEECH_TO_TEXT),
    "moonshine_untied": MediaCase(
        "MoonshineForConditionalGeneration",
        {
            **MOONSHINE,
            "head_dim": 12,
            "attention_bias": True,
            "pad_head_dim_to_multiple_of": 8,
            "encoder_hidden_act": "silu",
            "decoder_hidden_act": "relu",
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0, "partial_rotary_factor": 0.5},
        },
        SPEECH_TO_TEXT,
    ),
    "moonshine_body": MediaCase("MoonshineModel", {**MOONSHINE, "partial_rotary_factor": 0.5}, SPEECH_TO_TEXT),
    "siglip": MediaCase(
        "SiglipModel",
        {**TOWERS, "text_config": {**TEXT, "projection_size": 32, "eos_token_id": 2}},
        {"input_ids": ids(9), **IMAGE},
    ),
    "clip": MediaCase(
        "CLIPModel",
        {**TOWERS, "text_config": {**TEXT, "eos_token_id": 60}, "projection_dim": 20, "logit_scale_init_value": 1.5},
        {"input_ids": ids(9).index_fill(1, torch.tensor([4, 7]), 60), **IMAGE},
    ),
    "clip_older": MediaCase(
        "CLIPModel",
        {**TOWERS, "text_config": {**TEXT, "eos_token_id": 2}, "projection_dim": 20},
        {"input_ids": ids(9), **IMAGE},
    ),
    "siglip_vision": MediaCase("SiglipVisionModel", SIGLIP, IMAGE),
    "dinov3": MediaCase("DINOv3ViTModel", {**DINO3, "key_bias": True}, WIDE_IMAGE, left_out=("*.mask_token",)),
    "dinov3_gated": MediaCase(
        "DINOv3ViTModel",
        {**DINO3, "use_gated_mlp": True, "hidden_act": "silu", "mlp_bias": False, "query_bias": False},
        WIDE_IMAGE,
        left_out=("*.mask_token",),
    ),
    "whisper": MediaCase("WhisperForConditionalGeneration", WHISPER, SOUND, std=0.15, reopened={"pad_token_id": 0}),
    "whisper_untied": MediaCase(
        "WhisperForConditionalGeneration",
        {**WHISPER, "tie_word_embeddings": False},
        SOUND,
        std=0.15,
        reopened={"pad_token_id": 0},
    ),
}
