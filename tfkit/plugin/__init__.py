"""Plugins: how they are found, loaded and called.

`docs/plugins.md` shows each hook and `docs/components.md` how to write a component; `hookspecs.py` is the reference.
The base classes in `tfkit.component` document the arguments of each slot's `build` and of its module's `forward`.

To be decoded token by token, attention declares in `cached` the heads and widths that it caches of a token, and passes
them to `tfkit.update_cache`; a subclass that overrides `build_core` of `mha` inherits both. A block declares in
`decoding` its requirements for reading a sequence step by step: `tfkit.Decoding()` if it computes each position
independently, which also lets `tfkit.Loss` compute a head in chunks.

A folder of plugins may hold single files, packages (which import their own modules relatively: `from .kernel import
scan`), and projects with a `pyproject.toml`, or be one of these. Names that begin with `_`, `.` or `test_`,
`conftest.py`, `setup.py` and `tests` are ignored. A project in a plugin folder replaces the same distribution if it is
installed, so that you can work on it. Loading a plugin runs its code, so only plugins that you installed or named are
loaded. A spec is data, and never loads a plugin. A spec that requires a missing plugin is an error, which names the
location of the plugin.

To test the loading itself, call `tfkit.load_plugins` with `plugin_dirs=[...]` and `entry_points=False`.
"""
