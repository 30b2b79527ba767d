"""Writing a plugin: a component of your own, in a file of your own.

A plugin may also bring specs, formats of `tfkit export`, checks and commands: `hookspecs.py` documents their hooks.

A component is a config, whose fields are its keys in a spec, and the `nn.Module` that the config builds. The config's
base class determines the slot it fills, and its `kind` is the name that a spec uses (in a block, the field is
`block`):

    # tfkit_double_gelu.py
    from typing import Literal

    from torch import nn

    import tfkit


    class DoubleGeluConfig(tfkit.FFNConfig):
        '''Two GELU layers in a row.'''

        kind: Literal["double_gelu"] = "double_gelu"
        d_ff: tfkit.Dim
        '''Width between the layers.'''

        def build(self, make: tfkit.Make) -> nn.Module:
            up = tfkit.Linear(self.d_model, self.d_ff, bias=True)
            down = tfkit.Linear(self.d_ff, self.d_model, bias=True, residual=True)
            return nn.Sequential(up, nn.GELU(), down, nn.GELU())


    @tfkit.hookimpl
    def tfkit_register(register: tfkit.Register) -> None:
        register(DoubleGeluConfig)

The base classes in `tfkit.component` document the arguments of each slot's `build` and of its module's `forward`. A
field marked `Shared` inherits its value from the enclosing mappings of the spec, as `d_model` does above. A component
refuses values that it cannot work with by raising `tfkit.Invalid` in its `check`, which the user sees with file, line
and column. `tfkit.Linear` and `tfkit.Table` are filled by the spec's `init`; every other module that owns parameters
fills them in `reset_parameters`.

To be decoded token by token, attention declares in `cached` the heads and widths that it caches of a token, and passes
them to `tfkit.update_cache`; a subclass that overrides `build_core` of `mha` inherits both. A block declares in
`pieces` its requirements for reading a sequence step by step: `tfkit.Pieces()` if it computes every position by itself,
which also lets `tfkit.Loss` compute a head in chunks.

There are two ways to give it to tfkit:

- `tfkit --plugin-dir plugins/ ...`, without packaging; `export TFKIT_PLUGIN_DIR=$PWD/plugins` does it for every
  command and for Python (absolute paths, separated as in `PATH`). The folder may hold single files, packages (which
  import their own modules relatively: `from .kernel import scan`), and projects with a `pyproject.toml`, or be
  one of these. Names that begin with `_`, `.` or `test_`, `conftest.py`, `setup.py` and `tests` are ignored.
- an entry point in your distribution, which is found wherever it is installed:

      [project.entry-points.tfkit]
      double_gelu = "tfkit_double_gelu"

A project in a plugin folder replaces the same distribution if it is installed, so that you can work on it. Loading a
plugin runs its code, so only plugins that you installed or named are loaded. A spec is data: it lists the plugins it
needs in `requires: [tfkit-double-gelu>=0.1]`, and is refused, with the place where the plugin was found, until you
allow it.
`tfkit plugins` lists the plugins found and `tfkit components` their components. A plugin that fails is left out, with
the cause; `TFKIT_DISABLE=tfkit-double-gelu` leaves it out by name. Two plugins that register the same kind in the same
slot are an error that names both.

To test it, call `tfkit.testing.check_component` on your config: it builds small models around it, and proves the
properties that tfkit promises of every model (causality, padding, gradients, TorchScript, capture, the state dict). To
test the loading itself, call `tfkit.load_plugins` with `plugin_dirs=[...]` and `entry_points=False`.

`plugins/tfkit-additive` is a real plugin; its README shows how it was written, step by step, from an empty folder.
The built-in components (`tfkit/components/`) come in through the same hook and use nothing more.
"""
