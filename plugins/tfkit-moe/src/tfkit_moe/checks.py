"""Warnings about experts that the fast kernel does not support, and about routers that cannot learn."""

from __future__ import annotations

from collections.abc import Iterator

import tfkit
from tfkit_moe.moe import MoEConfig
from tfkit_moe.stacked import ALIGNMENT

WIDTHS = ALIGNMENT // 2  # of bfloat16
VANISHING = 1e-6
"""Values of `eps` below this leave the weight of a single expert at 1."""


def slow_widths(graph: tfkit.Graph) -> Iterator[tfkit.Diagnostic]:
    """Warn about widths of experts without a grouped product in bfloat16, the dtype that all devices support.

    The experts are then multiplied one after the other, and compiled code computes all of them for every token.
    """
    for path, config in graph.configs(MoEConfig):
        for name, width in (("d_model", config.d_model), ("d_ff", config.d_ff)):
            if width % WIDTHS:
                nearest = max(1, round(width / WIDTHS)) * WIDTHS
                yield tfkit.Diagnostic(
                    f"experts of `{name}` {width:,} are multiplied one after another",
                    path=f"{path}.{name}",
                    notes=(f"torch multiplies all experts in one operation if their widths are multiples of {WIDTHS}",),
                    help=f"choose a width near it: `{name}: {nearest}`",
                )


def idle_routers(graph: tfkit.Graph) -> Iterator[tfkit.Diagnostic]:
    """Yield a warning for each router that has no gradient, because its chosen experts always have weight 1."""
    for path, config in graph.configs(MoEConfig):
        router, single = config.router, config.n_experts == 1
        if router.sparse_mixer is not None and not router.sparse_mixer.jitter:
            yield tfkit.Diagnostic(
                "the router learns nothing from the loss of the model: with `jitter: 0`, every expert has weight 1",
                path=f"{path}.router.sparse_mixer.jitter",
                help="write `jitter: 0.01`, so that the softmax of an expert has further experts",
            )
            continue
        constant_softmax = router.score == "softmax" and (single or router.order == "topk_then_score")
        divided = router.renormalize and (router.eps or 0.0) < VANISHING
        if config.n_experts_per_token == 1 and _normalizes(config.norm_out):
            yield tfkit.Diagnostic(
                "the router learns nothing from the loss of the model: `norm_out` removes the weight of the expert",
                path=f"{path}.norm_out",
                help="choose several experts for each token, or remove `norm_out`",
            )
        elif config.n_experts_per_token == 1 and (constant_softmax or divided):
            weight = "the softmax over it" if constant_softmax else "its score over itself, by `renormalize`,"
            way_out = "write `order: score_then_topk`" if constant_softmax else "remove `renormalize`"
            help = f"{way_out}, which makes its score its weight; or choose two experts"
            yield tfkit.Diagnostic(
                "the router learns nothing from the loss of the model: a token's single expert always has weight 1",
                path=f"{path}.n_experts_per_token",
                notes=(f"{weight} is 1, whatever the score",),
                help="choose among several experts, or use a dense FFN" if single else help,
            )


def _normalizes(norm: tfkit.NormConfig | None) -> bool:
    """Return True for a norm that divides a vector by its size."""
    return norm is not None and norm.kind_name() in ("rmsnorm", "layernorm")
