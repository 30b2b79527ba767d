"""tfkit: transformers as YAML, built to plain PyTorch.

    model = tfkit.build("gpt2")           # an ordinary nn.Module
    graph = tfkit.load("my_model.yaml")   # the checked spec, before any tensor exists

Names are imported when they are first used, so that `import tfkit` is quick and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from tfkit.builder import build as build
    from tfkit.component import ActivationConfig as ActivationConfig
    from tfkit.component import AttentionBackend as AttentionBackend
    from tfkit.component import AttentionConfig as AttentionConfig
    from tfkit.component import AttentionPositionConfig as AttentionPositionConfig
    from tfkit.component import BlockConfig as BlockConfig
    from tfkit.component import Cached as Cached
    from tfkit.component import Component as Component
    from tfkit.component import Config as Config
    from tfkit.component import Count as Count
    from tfkit.component import Dim as Dim
    from tfkit.component import Extent as Extent
    from tfkit.component import FFNConfig as FFNConfig
    from tfkit.component import Immaterial as Immaterial
    from tfkit.component import InitConfig as InitConfig
    from tfkit.component import InputPositionConfig as InputPositionConfig
    from tfkit.component import LengthsWire as LengthsWire
    from tfkit.component import Make as Make
    from tfkit.component import MaskConfig as MaskConfig
    from tfkit.component import MaskedWire as MaskedWire
    from tfkit.component import MemoryWire as MemoryWire
    from tfkit.component import NormConfig as NormConfig
    from tfkit.component import Pieces as Pieces
    from tfkit.component import PositiveFloat as PositiveFloat
    from tfkit.component import Probability as Probability
    from tfkit.component import RopeScalingConfig as RopeScalingConfig
    from tfkit.component import RotaryConfig as RotaryConfig
    from tfkit.component import ScoreBiasConfig as ScoreBiasConfig
    from tfkit.component import Shared as Shared
    from tfkit.component import Signal as Signal
    from tfkit.component import Signals as Signals
    from tfkit.component import TableWire as TableWire
    from tfkit.component import TemperatureConfig as TemperatureConfig
    from tfkit.component import Wire as Wire
    from tfkit.component import divisors as divisors
    from tfkit.component import expect as expect
    from tfkit.component import optional_slot as optional_slot
    from tfkit.component import slot as slot
    from tfkit.decoding.cached import CachedModel as CachedModel
    from tfkit.decoding.generate import Generated as Generated
    from tfkit.decoding.generate import generate as generate
    from tfkit.decoding.prepare import Prepared as Prepared
    from tfkit.decoding.prepare import prepare_decoding as prepare_decoding
    from tfkit.errors import FirstLossWarning as FirstLossWarning
    from tfkit.errors import Invalid as Invalid
    from tfkit.errors import SpecError as SpecError
    from tfkit.graph.expand import Graph as Graph
    from tfkit.graph.expand import load as load
    from tfkit.graph.expand import loads as loads
    from tfkit.nn import Cache as Cache
    from tfkit.nn import Context as Context
    from tfkit.nn import Linear as Linear
    from tfkit.nn import Past as Past
    from tfkit.nn import Program as Program
    from tfkit.nn import Softmax as Softmax
    from tfkit.nn import Table as Table
    from tfkit.nn import update_cache as update_cache
    from tfkit.plugin.hookspecs import Register as Register
    from tfkit.plugin.hookspecs import hookimpl as hookimpl
    from tfkit.plugin.manager import load_plugins as load_plugins
    from tfkit.tools.attention import attention_weights as attention_weights
    from tfkit.tools.compare import compare as compare
    from tfkit.tools.cost import cost as cost
    from tfkit.tools.draw import draw as draw
    from tfkit.tools.eject import eject as eject
    from tfkit.tools.explain import explain as explain
    from tfkit.tools.export import export as export
    from tfkit.tools.importing import import_config as import_config
    from tfkit.tools.params import count_params as count_params
    from tfkit.tools.profile import profile as profile
    from tfkit.tools.save import save as save
    from tfkit.tools.solve import Budget as Budget
    from tfkit.tools.solve import solve as solve
    from tfkit.tools.weights import load_weights as load_weights
    from tfkit.training.loss import Loss as Loss
    from tfkit.training.loss import loss as loss
    from tfkit.training.optimizer import adamw as adamw
    from tfkit.training.optimizer import parameter_groups as parameter_groups

_NAMES = {
    "tfkit.builder": ["build"],
    "tfkit.component": [
        "ActivationConfig",
        "AttentionBackend",
        "AttentionConfig",
        "AttentionPositionConfig",
        "BlockConfig",
        "Component",
        "Config",
        "Count",
        "Dim",
        "Extent",
        "FFNConfig",
        "Immaterial",
        "InitConfig",
        "InputPositionConfig",
        "Cached",
        "LengthsWire",
        "Make",
        "MaskConfig",
        "MaskedWire",
        "MemoryWire",
        "Pieces",
        "NormConfig",
        "PositiveFloat",
        "Probability",
        "RopeScalingConfig",
        "RotaryConfig",
        "ScoreBiasConfig",
        "Shared",
        "Signal",
        "Signals",
        "TableWire",
        "TemperatureConfig",
        "Wire",
        "divisors",
        "expect",
        "optional_slot",
        "slot",
    ],
    "tfkit.decoding.cached": ["CachedModel"],
    "tfkit.decoding.generate": ["Generated", "generate"],
    "tfkit.decoding.prepare": ["Prepared", "prepare_decoding"],
    "tfkit.errors": ["FirstLossWarning", "Invalid", "SpecError"],
    "tfkit.graph.expand": ["Graph", "load", "loads"],
    "tfkit.nn": ["Cache", "Context", "Linear", "Past", "Program", "Softmax", "Table", "update_cache"],
    "tfkit.plugin.hookspecs": ["Register", "hookimpl"],
    "tfkit.plugin.manager": ["load_plugins"],
    "tfkit.training.loss": ["Loss", "loss"],
    "tfkit.training.optimizer": ["adamw", "parameter_groups"],
    "tfkit.tools.attention": ["attention_weights"],
    "tfkit.tools.compare": ["compare"],
    "tfkit.tools.cost": ["cost"],
    "tfkit.tools.draw": ["draw"],
    "tfkit.tools.eject": ["eject"],
    "tfkit.tools.explain": ["explain"],
    "tfkit.tools.export": ["export"],
    "tfkit.tools.importing": ["import_config"],
    "tfkit.tools.params": ["count_params"],
    "tfkit.tools.profile": ["profile"],
    "tfkit.tools.save": ["save"],
    "tfkit.tools.solve": ["Budget", "solve"],
    "tfkit.tools.weights": ["load_weights"],
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("tfkit")
    if name not in _HOME:
        raise AttributeError(_unknown(name))
    return getattr(importlib.import_module(_HOME[name]), name)


def _unknown(name: str) -> str:
    text = f"module 'tfkit' has no attribute {name!r}"
    if name.startswith("_"):
        return text
    from tfkit.errors import closest

    near = closest(name, __all__)
    return f"{text}: one with a similar name is {near!r}" if near else text


def __dir__() -> list[str]:
    return __all__
