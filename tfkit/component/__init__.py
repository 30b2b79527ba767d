"""The contract between tfkit and a component: the declarations of a config, and the arguments of its `build`.

A component is a pydantic config and the `nn.Module` that the config builds. The base class of the config names the slot
that the component fills, its `kind` is the name under which a spec asks for it, and its fields are the keys of the YAML
mapping. Nothing here imports torch: a spec is checked before any tensor exists.

`config.py` has the base classes of configs, `slots.py` the slots inside a block, `block.py` the nodes of the graph,
`field.py` the slot of a family's fields, `stack.py` the description of a block's layers that tools read.

`tfkit.component` is also the function that builds a component alone: the package can be called.
"""

import sys
from types import ModuleType

from tfkit.component.block import OWN_MASK as OWN_MASK
from tfkit.component.block import BlockConfig as BlockConfig
from tfkit.component.block import Decoding as Decoding
from tfkit.component.block import Signal as Signal
from tfkit.component.block import Signals as Signals
from tfkit.component.block import expect as expect
from tfkit.component.block import same_length as same_length
from tfkit.component.config import AttentionBackend as AttentionBackend
from tfkit.component.config import Changeable as Changeable
from tfkit.component.config import ChangeableMarker as ChangeableMarker
from tfkit.component.config import Component as Component
from tfkit.component.config import Config as Config
from tfkit.component.config import ContentMarker as ContentMarker
from tfkit.component.config import ContentPath as ContentPath
from tfkit.component.config import Count as Count
from tfkit.component.config import Dim as Dim
from tfkit.component.config import Extent as Extent
from tfkit.component.config import FieldPath as FieldPath
from tfkit.component.config import Immaterial as Immaterial
from tfkit.component.config import ImmaterialMarker as ImmaterialMarker
from tfkit.component.config import LengthsWire as LengthsWire
from tfkit.component.config import Make as Make
from tfkit.component.config import MaskedWire as MaskedWire
from tfkit.component.config import MemoryWire as MemoryWire
from tfkit.component.config import PatchMarker as PatchMarker
from tfkit.component.config import PositiveFloat as PositiveFloat
from tfkit.component.config import Probability as Probability
from tfkit.component.config import Shared as Shared
from tfkit.component.config import SharedMarker as SharedMarker
from tfkit.component.config import TableWire as TableWire
from tfkit.component.config import VectorWire as VectorWire
from tfkit.component.config import Wire as Wire
from tfkit.component.config import WireMarker as WireMarker
from tfkit.component.config import kinds_in as kinds_in
from tfkit.component.config import leaf_values as leaf_values
from tfkit.component.config import marker as marker
from tfkit.component.config import optional_slot as optional_slot
from tfkit.component.config import parts as parts
from tfkit.component.config import slot as slot
from tfkit.component.config import training_only_values as training_only_values
from tfkit.component.config import with_values as with_values
from tfkit.component.field import ABSENT as ABSENT
from tfkit.component.field import FieldConfig as FieldConfig
from tfkit.component.field import Reading as Reading
from tfkit.component.field import Writing as Writing
from tfkit.component.field import case_of as case_of
from tfkit.component.field import value_of as value_of
from tfkit.component.slots import ActivationConfig as ActivationConfig
from tfkit.component.slots import AttentionConfig as AttentionConfig
from tfkit.component.slots import AttentionPositionConfig as AttentionPositionConfig
from tfkit.component.slots import Cached as Cached
from tfkit.component.slots import ContentScoreConfig as ContentScoreConfig
from tfkit.component.slots import FFNConfig as FFNConfig
from tfkit.component.slots import GateConfig as GateConfig
from tfkit.component.slots import InitConfig as InitConfig
from tfkit.component.slots import InnerValue as InnerValue
from tfkit.component.slots import InputPositionConfig as InputPositionConfig
from tfkit.component.slots import MaskConfig as MaskConfig
from tfkit.component.slots import MaskRuleConfig as MaskRuleConfig
from tfkit.component.slots import MixerConfig as MixerConfig
from tfkit.component.slots import NormConfig as NormConfig
from tfkit.component.slots import PositionConfig as PositionConfig
from tfkit.component.slots import RopeScalingConfig as RopeScalingConfig
from tfkit.component.slots import RotaryConfig as RotaryConfig
from tfkit.component.slots import ScoreBiasConfig as ScoreBiasConfig
from tfkit.component.slots import State as State
from tfkit.component.slots import StreamConfig as StreamConfig
from tfkit.component.slots import StreamPart as StreamPart
from tfkit.component.slots import SublayerConfig as SublayerConfig
from tfkit.component.slots import TemperatureConfig as TemperatureConfig
from tfkit.component.slots import divisors as divisors
from tfkit.component.stack import Call as Call
from tfkit.component.stack import Dropout as Dropout
from tfkit.component.stack import Head as Head
from tfkit.component.stack import Layer as Layer
from tfkit.component.stack import Layers as Layers
from tfkit.component.stack import LearnedFactor as LearnedFactor
from tfkit.component.stack import Lookup as Lookup
from tfkit.component.stack import Projection as Projection
from tfkit.component.stack import ResidualConfig as ResidualConfig
from tfkit.component.stack import Scale as Scale
from tfkit.component.stack import Stage as Stage
from tfkit.component.stack import Step as Step


class _Package(ModuleType):
    def __call__(self, *args: object, **kwargs: object) -> object:
        import tfkit

        return tfkit.__getattr__("component")(*args, **kwargs)


sys.modules[__name__].__class__ = _Package
