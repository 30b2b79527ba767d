"""The terminal: commands and their options, tables, progress, signals."""
