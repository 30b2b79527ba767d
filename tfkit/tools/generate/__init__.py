"""The command `generate`: prompts in, text out; `tfkit.decoding` does the work."""
