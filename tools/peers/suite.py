"""The tests of transformers for the classes of two folders, which `mixins.py` runs with pytest.

The environment variable TFKIT_MIXINS has the folders by side, and the folders with the tests of transformers.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import sys
import unittest
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto import modeling_auto

SETTINGS = json.loads(os.environ["TFKIT_MIXINS"])
ROWS, COLUMNS = 13, 7
"""The sizes of inputs in transformers' `CausalLMModelTester`."""


def install_tests() -> None:
    """Make the tests of transformers importable as `tests`, with empty classes for those that are missing."""
    package = sys.modules["tests"] = ModuleType("tests")
    package.__path__ = SETTINGS["tests"]
    for name, classes in {
        "tests.generation.test_utils": ["GenerationTesterMixin"],
        "tests.exporters.test_export": ["ExportTesterMixin", "ExportGenerateTesterMixin"],
    }.items():
        parent = name.rpartition(".")[0]
        if importlib.util.find_spec(parent) is None or importlib.util.find_spec(name) is None:
            sys.modules[parent] = ModuleType(parent)
            sys.modules[name] = module = ModuleType(name)
            for class_name in classes:
                setattr(module, class_name, type(class_name, (), {}))


install_tests()
from tests.generation.test_utils import GenerationTesterMixin  # noqa: E402
from tests.test_modeling_common import ModelTesterMixin  # noqa: E402

try:
    from tests.test_configuration_common import ConfigTester
except ModuleNotFoundError:  # a file that the sdist lacks
    ConfigTester = None


def classes_of(folder: str) -> tuple[PreTrainedConfig, list[type[PreTrainedModel]]]:
    """Return the config of a folder of transformers, and its classes without and with a head."""
    config = AutoConfig.from_pretrained(folder)
    head = getattr(transformers, config.architectures[0])
    return config, [modeling_auto.MODEL_MAPPING[type(config)], head]


def registered_classes(folder: str, peers: list[type[PreTrainedModel]]) -> tuple[Any, list[type[PreTrainedModel]]]:
    """Return the config and the classes of a folder with code, after registering them.

    They are registered wherever transformers lists the classes of the peer.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    files = [
        config.auto_map["AutoModel"],
        config.auto_map["AutoModel"].partition(".")[0] + "." + config.architectures[0],
    ]
    classes = [get_class_from_dynamic_module(file, folder) for file in files]
    AutoConfig.register(config.model_type, type(config))
    for peer, model_class in zip(peers, classes, strict=True):
        for name, names in vars(modeling_auto).items():
            if not name.endswith("_MAPPING_NAMES"):
                continue
            if any(peer.__name__ in ([value] if isinstance(value, str) else value) for value in names.values()):
                names[config.model_type] = model_class.__name__
                mapping = getattr(modeling_auto, name.removesuffix("_NAMES"), None)
                if mapping is not None:
                    mapping.register(type(config), model_class, exist_ok=True)
    return config, classes


class ModelTester:
    """The sizes of a model and its inputs, as the tests of transformers ask for them."""

    batch_size = ROWS
    seq_length = encoder_seq_length = decoder_seq_length = COLUMNS
    is_training = True
    num_labels = 3

    def __init__(self, config: PreTrainedConfig, sizes: PreTrainedConfig) -> None:
        self.config = config
        self.vocab_size: int = getattr(sizes, "vocab_size", 0)
        self.hidden_size = sizes.hidden_size
        self.num_hidden_layers = sizes.num_hidden_layers
        self.num_attention_heads = getattr(sizes, "num_attention_heads", None)
        self.image_size = getattr(sizes, "image_size", None)
        if self.image_size:
            self.mask_length = (self.image_size // sizes.patch_size) ** 2
            self.num_masks = self.mask_length // 2
            self.encoder_seq_length = self.seq_length = self.mask_length + 1

    def get_config(self) -> PreTrainedConfig:
        """Return a config that a test may change."""
        return copy.deepcopy(self.config)

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict[str, Tensor]]:
        """Return a config and the inputs of a model."""
        config = self.get_config()
        if self.image_size:
            return config, {"pixel_values": torch.rand(ROWS, 3, self.image_size, self.image_size)}
        inputs = {"input_ids": self._ids(), "attention_mask": torch.ones(ROWS, COLUMNS, dtype=torch.long).tril()}
        if config.is_encoder_decoder:
            inputs |= {"decoder_input_ids": self._ids(), "decoder_attention_mask": inputs["attention_mask"].clone()}
        return config, inputs

    def _ids(self) -> Tensor:
        return torch.randint(3, self.vocab_size, (ROWS, COLUMNS))


def suite_class(side: str, config: PreTrainedConfig, classes: list[type[PreTrainedModel]], peer: Any) -> type:
    """Return the tests of a side.

    Args:
        side: the side.
        config: its config.
        classes: its classes without and with a head.
        peer: the classes of transformers and their config, which decide the labels and the tests that apply.
    """
    peer_config, peers = peer
    by_name = {model_class.__name__: ours for model_class, ours in zip(classes, peers, strict=True)}
    generates = peers[-1].can_generate()

    class Suite(ModelTesterMixin, *([GenerationTesterMixin] if generates else []), unittest.TestCase):
        all_model_classes = tuple(classes)
        is_encoder_decoder = peer_config.is_encoder_decoder
        has_attentions = peer_config.model_type != "mamba2"
        test_resize_embeddings = not hasattr(peer_config, "image_size")

        def setUp(self) -> None:
            self.model_tester = ModelTester(config, peer_config)

        def _prepare_for_class(self, inputs: Any, model_class: Any, return_labels: bool = False) -> Any:
            """Return the inputs for a class, with labels by the name of its peer."""
            return super()._prepare_for_class(inputs, by_name.get(model_class.__name__, model_class), return_labels)

        def test_config(self) -> None:
            if ConfigTester is None:
                self.skipTest("the tests of configs are missing")
            ConfigTester(self, config_class=type(config), hidden_size=32).run_common_tests()

    Suite.__name__ = Suite.__qualname__ = f"Test{side}"
    return Suite


PEER = classes_of(SETTINGS["folders"]["Transformers"])
FOLDER = registered_classes(SETTINGS["folders"]["Folder"], PEER[1])
TestFolder = suite_class("Folder", *FOLDER, PEER)
TestTransformers = suite_class("Transformers", *PEER, PEER)
