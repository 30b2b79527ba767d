"""Models with a single layer, because the time of an exporter grows with the layers."""

from __future__ import annotations

from pathlib import Path

from torch import fx

import tfkit

PLUGINS = Path(__file__).parent / "plugins"


def one_layer(ffn: str = "gelu", *, block: str = "decoder", vocab_size: int = 40) -> fx.GraphModule:
    """A model with such an FFN, among those of the plugin `odd`."""
    d_ff = ", d_ff: 24" if ffn == "gelu" else ""
    text = f"""\
tfkit: 1
name: small
d_model: 16
vocab_size: {vocab_size}
max_len: 24
graph:
  embedding: {{block: embedding, position: learned}}
  stack: {{block: {block}, n_layers: 1, attention: {{n_heads: 2}}, ffn: {{kind: {ffn}{d_ff}}}}}
  logits: {{block: lm_head, tie: embedding}}
"""
    return tfkit.build(tfkit.loads(text, plugins=tfkit.load_plugins(plugin_dirs=[PLUGINS], entry_points=False)))
