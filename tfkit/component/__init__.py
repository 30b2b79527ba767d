"""The contract between tfkit and a component: what a config declares, and what it is given to build.

A component is a pydantic config and the `nn.Module` that the config builds. The base class of the config names the slot
that the component fills, its `kind` is the name under which a spec asks for it, and its fields are the keys of the YAML
mapping. Nothing here imports torch: a spec is checked before any tensor exists.

`config.py` has what every config is made of, `slots.py` the slots inside a block, `block.py` the nodes of the graph.
"""

from tfkit.component.block import (
    OWN_MASK,
    BlockConfig,
    Signal,
    Signals,
    expect,
)
from tfkit.component.config import (
    Component,
    Config,
    Count,
    Dim,
    Extent,
    Make,
    MaskedWire,
    PatchMarker,
    PositiveFloat,
    Probability,
    Shared,
    SharedMarker,
    TableWire,
    Wire,
    WireMarker,
    marker,
    optional_slot,
    slot,
)
from tfkit.component.slots import (
    ActivationConfig,
    AttentionConfig,
    AttentionPositionConfig,
    FFNConfig,
    InitConfig,
    InputPositionConfig,
    MaskConfig,
    NormConfig,
    PositionConfig,
    RopeScalingConfig,
    RotaryConfig,
    ScoreBiasConfig,
    divisors,
)

__all__ = [
    "OWN_MASK",
    "ActivationConfig",
    "AttentionConfig",
    "AttentionPositionConfig",
    "BlockConfig",
    "Component",
    "Config",
    "Count",
    "Dim",
    "Extent",
    "FFNConfig",
    "InitConfig",
    "InputPositionConfig",
    "Make",
    "MaskConfig",
    "MaskedWire",
    "NormConfig",
    "PatchMarker",
    "PositionConfig",
    "PositiveFloat",
    "Probability",
    "RopeScalingConfig",
    "RotaryConfig",
    "ScoreBiasConfig",
    "Shared",
    "SharedMarker",
    "Signal",
    "Signals",
    "TableWire",
    "Wire",
    "WireMarker",
    "divisors",
    "expect",
    "marker",
    "optional_slot",
    "slot",
]
