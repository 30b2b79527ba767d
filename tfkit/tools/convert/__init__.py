"""The command `convert`: weights in other layouts, as a published folder of safetensors."""
