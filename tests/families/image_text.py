"""Language models that read images, at small sizes, with non-default fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BATCH = 3


@dataclass(frozen=True)
class ImageTextCase:
    """A small model of a class of transformers.

    Attributes:
        architecture: the class.
        config: the fields of its config.
        token: the id of the placeholder token.
        vectors: the number of placeholders of an image.
        image: channels, rows and columns of an image.
        left_out: names of tensors that the model leaves out, with `*`.
        prefix: true if all queries attend to the first tokens of a row, which have the type 0.
        typed: true if the tokens of images have the type 1.
        by_row: true if the class takes the images of each row, [b, n, ...], and skips images of zeros.
    """

    architecture: str
    config: Mapping[str, Any]
    token: int
    vectors: int
    image: tuple[int, int, int] = (3, 16, 16)
    left_out: tuple[str, ...] = ()
    by_row: bool = False
    prefix: bool = False
    typed: bool = False

    def tokens(self, images: list[int], length: int, seed: int) -> Tensor:
        """Draw rows of tokens with placeholders for this many images, with text before, between and after images."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(5, self.token - 1, (len(images), length), generator=generator)
        for row, count in enumerate(images):
            text = length - count * self.vectors
            first = [2 + number * (text // (count + 1)) + number * self.vectors for number in range(count)]
            for start in first:
                tokens[row, start : start + self.vectors] = self.token
        return tokens

    def images(self, images: list[int], seed: int) -> tuple[Tensor, Tensor]:
        """Draw images: [b, n, channels, rows, columns]; and the images that rows use, as the class takes them."""
        count = max(images)
        pixels = torch.randn(len(images), count, *self.image, generator=torch.Generator().manual_seed(seed))
        if self.by_row:
            used = torch.arange(count) < torch.tensor(images)[:, None]
            return pixels, pixels * used[:, :, None, None, None]
        return pixels, torch.cat([pixels[row, :used] for row, used in enumerate(images)])


CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
    "num_channels": 3,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-3,
    "attention_dropout": 0.1,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
    "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1000.0}
LLAVA = {"vision_config": CLIP, "text_config": LLAMA, "image_token_index": 60, "image_seq_length": 4}
UNREAD = ("*vision_tower.encoder.layers.2.*", "*post_layernorm.*")
IMAGE_TEXT: dict[str, ImageTextCase] = {
    "llava": ImageTextCase("LlavaForConditionalGeneration", LLAVA, 60, 4, left_out=UNREAD),
    "llava_full": ImageTextCase(
        "LlavaForConditionalGeneration",
        {
            **LLAVA,
            "vision_config": {**CLIP, "image_size": 19, "hidden_act": "quick_gelu"},
            "text_config": {**LLAMA, "tie_word_embeddings": True, "attention_bias": True, "rope_parameters": YARN},
            "vision_feature_select_strategy": "full",
            "vision_feature_layer": 1,
            "projector_hidden_act": "relu",
            "multimodal_projector_bias": False,
            "image_token_index": 57,
            "tie_word_embeddings": True,
        },
        57,
        5,
        (3, 19, 19),
        left_out=("*vision_tower.encoder.layers.[12].*", "*post_layernorm.*"),
    ),
    "paligemma": ImageTextCase(
        "PaliGemmaForConditionalGeneration",
        {
            "vision_config": {**CLIP, "model_type": "siglip_vision_model", "vision_use_head": False},
            "text_config": {**LLAMA, "model_type": "gemma"},
            "image_token_index": 60,
            "projection_dim": 24,
        },
        60,
        4,
        prefix=True,
    ),
    "gemma3": ImageTextCase(
        "Gemma3ForConditionalGeneration",
        {
            "vision_config": {**CLIP, "model_type": "siglip_vision_model", "image_size": 32, "vision_use_head": False},
            "text_config": {
                **LLAMA,
                "model_type": "gemma3_text",
                "num_hidden_layers": 3,
                "sliding_window": 6,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "query_pre_attn_scalar": 20,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                },
            },
            "image_token_index": 60,
            "mm_tokens_per_image": 4,
        },
        60,
        4,
        (3, 32, 32),
        typed=True,
    ),
    "idefics3": ImageTextCase(
        "Idefics3ForConditionalGeneration",
        {
            "vision_config": {**CLIP, "model_type": "idefics3_vision"},
            "text_config": {**LLAMA, "tie_word_embeddings": True, "rope_parameters": YARN},
            "image_token_id": 60,
            "scale_factor": 1,
            "tie_word_embeddings": True,
        },
        60,
        4,
        by_row=True,
    ),
    "smolvlm": ImageTextCase(
        "SmolVLMForConditionalGeneration",
        {
            "vision_config": {**CLIP, "model_type": "smolvlm_vision", "image_size": 32, "hidden_act": "gelu_new"},
            "text_config": LLAMA,
            "image_token_id": 60,
            "scale_factor": 2,
        },
        60,
        4,
        (3, 32, 32),
        by_row=True,
    ),
}
