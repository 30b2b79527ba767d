"""Language models that read images, at small sizes, with non-default fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from einops import rearrange
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
        layout: images as the class takes them: the images of all rows, `batch`, also with their `sizes`; of each
            `row`, [b, n, ...], where it skips images of zeros; or all `patches`, square by square. `sounds` are
            spectrograms [n, bands, frames].
    """

    architecture: str
    config: Mapping[str, Any]
    token: int
    vectors: int
    image: tuple[int, int, int] = (3, 16, 16)
    left_out: tuple[str, ...] = ()
    layout: Literal["batch", "row", "patches", "sizes", "sounds"] = "batch"
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
        if self.layout == "row":
            used = torch.arange(count) < torch.tensor(images)[:, None]
            return pixels, pixels * used[:, :, None, None, None]
        used = torch.cat([pixels[row, :used] for row, used in enumerate(images)])
        if self.layout == "sounds":
            used = used[:, 0]
        return pixels, self.patches(used) if self.layout == "patches" else used

    def ours(self, images: Tensor) -> dict[str, Tensor]:
        """Return images by the name of our input."""
        return {"sounds" if self.layout == "sounds" else "images": images}

    def theirs(self, used: Tensor, tokens: Tensor | None = None) -> dict[str, Tensor]:
        """Return what the class takes in addition to tokens: images, in its layout, and their sizes."""
        if not used.numel():
            return {}
        name = "input_features" if self.layout == "sounds" else "pixel_values"
        return {name: used, **self.about(used, tokens)}

    def patches(self, images: Tensor) -> Tensor:
        """Return the patches of images as the processor of Qwen2-VL cuts them, square by square, each frame twice."""
        vision = self.config["vision_config"]
        size, square, frames = (vision[name] for name in ("patch_size", "spatial_merge_size", "temporal_patch_size"))
        video = images[:, None].expand(-1, frames, -1, -1, -1)
        pattern = "n t c (i r p) (j s q) -> (n i j r s) (c t p q)"
        return rearrange(video, pattern, r=square, s=square, p=size, q=size)

    def about(self, used: Tensor, tokens: Tensor | None = None) -> dict[str, Tensor]:
        """Return what the class takes next to the pixels of images."""
        if self.layout == "sizes":
            return {"image_sizes": torch.tensor([self.image[1:]] * len(used))}
        if self.layout == "patches":
            size = self.config["vision_config"]["patch_size"]
            grid = [1, self.image[1] // size, self.image[2] // size]
            grids = torch.tensor([grid] * (len(used) // (grid[1] * grid[2])))
            types = {} if tokens is None else {"mm_token_type_ids": (tokens == self.token).int()}
            return {"image_grid_thw": grids, **types}
        return {}


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
QWEN_VISION = {
    "hidden_size": 32,
    "out_hidden_size": 24,
    "intermediate_size": 20,
    "num_heads": 4,
    "depth": 3,
    "fullatt_block_indexes": [1],
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "window_size": 19,
    "input_size": [16, 24],
    "rope_parameters": {"rope_type": "axial", "rope_theta": 50.0},
}
QWEN_TEXT = {
    **{name: value for name, value in LLAMA.items() if name != "head_dim"},
    "model_type": "qwen2_5_vl_text",
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rope_parameters": {"rope_theta": 500.0, "mrope_section": [2, 1, 3]},
}
QWEN = {
    "vision_config": QWEN_VISION,
    "text_config": QWEN_TEXT,
    "image_token_id": 60,
    "video_token_id": 59,
    "vision_start_token_id": 3,
    "vision_end_token_id": 4,
}
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
        layout="row",
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
        layout="row",
    ),
    "qwen2_5_vl": ImageTextCase("Qwen2_5_VLForConditionalGeneration", QWEN, 60, 6, (3, 16, 24), layout="patches"),
    "qwen2_5_vl_tied": ImageTextCase(
        "Qwen2_5_VLForConditionalGeneration",
        {
            **QWEN,
            "vision_config": {
                **QWEN_VISION,
                "hidden_act": "gelu",
                "temporal_patch_size": 3,
                "fullatt_block_indexes": [],
            },
            "text_config": {**QWEN_TEXT, "rope_parameters": {**YARN, "mrope_section": [1, 3, 2]}},
            "tie_word_embeddings": True,
        },
        60,
        6,
        (3, 16, 24),
        layout="patches",
    ),
    "mistral3": ImageTextCase(
        "Mistral3ForConditionalGeneration",
        {
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": 32,
                "num_attention_heads": 4,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "patch_size": 4,
                "image_size": 64,
                "input_size": [16, 24],
                "hidden_act": "silu",
                "rope_parameters": {"rope_type": "axial", "rope_theta": 50.0},
            },
            "text_config": {**LLAMA, "model_type": "mistral", "sliding_window": 7, "rms_norm_eps": 1e-2},
            "image_token_index": 60,
            "multimodal_projector_bias": True,
            "projector_hidden_act": "relu",
            "tie_word_embeddings": False,
        },
        60,
        6,
        (3, 16, 24),
        layout="sizes",
    ),
    "voxtral": ImageTextCase(
        "VoxtralForConditionalGeneration",
        {
            "audio_config": {
                "hidden_size": 16,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_mel_bins": 6,
                "max_source_positions": 12,
                "activation_function": "relu",
            },
            "text_config": LLAMA,
            "audio_token_id": 60,
            "projector_hidden_act": "silu",
        },
        60,
        4,
        (1, 6, 24),
        layout="sounds",
    ),
}
