"""Classes of transformers that its automatic classes do not include."""

from __future__ import annotations

import transformers

# `exist_ok`: without it, they pass over classes of their own.
transformers.AutoModelForCausalLM.register(transformers.Mistral4Config, transformers.Mistral4ForCausalLM, exist_ok=True)
