"""Mixture of experts: the `ffn` kind `moe`, and the `loss` kind `balanced`.

`moe.py` has the config and the full layer, `router.py` the choice of experts, `sparse_mixer.py` a choice of one after
another, `capacity.py` the tokens that an expert admits, `experts.py` their computation, `stacked.py` a linear layer of
all experts, `balance.py` the loss, `checks.py` warnings, and `properties.py` a property for `tfkit check`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tfkit
from tfkit_moe.balance import BalancedConfig, BalancedLoss
from tfkit_moe.capacity import Capacity
from tfkit_moe.checks import idle_routers, slow_widths
from tfkit_moe.experts import Experts, Gate, SharedExperts
from tfkit_moe.moe import MoE, MoEConfig, SharedConfig
from tfkit_moe.router import GroupsConfig, Router, RouterConfig
from tfkit_moe.sparse_mixer import SparseMixer, SparseMixerConfig
from tfkit_moe.stacked import ExpertLinear

__all__ = [
    "BalancedConfig",
    "BalancedLoss",
    "Capacity",
    "ExpertLinear",
    "Experts",
    "Gate",
    "GroupsConfig",
    "MoE",
    "MoEConfig",
    "Router",
    "RouterConfig",
    "SharedConfig",
    "SharedExperts",
    "SparseMixer",
    "SparseMixerConfig",
]


@tfkit.hookimpl
def tfkit_register(register: tfkit.Register) -> None:
    """Register the configs."""
    register(MoEConfig)
    register(BalancedConfig)


@tfkit.hookimpl
def tfkit_checks(graph: tfkit.Graph) -> Iterator[tfkit.Diagnostic]:
    """Warn about slow widths, and about routers that cannot learn."""
    yield from slow_widths(graph)
    yield from idle_routers(graph)


@tfkit.hookimpl
def tfkit_properties() -> list[tfkit.Property]:
    """Return the property `expert-order`."""
    from tfkit_moe.properties import expert_order

    return [tfkit.Property("expert-order", "is invariant to the order of experts", expert_order)]


@tfkit.hookimpl
def tfkit_reference() -> dict[str, dict[str, Callable[..., Any]]]:
    """Return the formulas of the mixture."""
    from tfkit_moe import reference

    return {"ffn": {"moe": reference.moe}}
