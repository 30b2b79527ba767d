"""How to write a plugin: a component of your own, in a file of your own.

A component is a config, which is what a spec can say about it, and the `nn.Module` that the config builds.
The config's base class says which slot it fills, and its `kind` is the name that a spec uses (in a block, the
field is `block`):

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

The base classes in `tfkit.component` say what each slot's `build` is given and what its module's `forward`
takes. A field marked `Shared` takes its value from the enclosing parts of the spec, as `d_model` does above.
What a component cannot work with it refuses by raising `tfkit.Invalid` in its `check`, which the user sees
with file, line and column. `tfkit.Linear` and `tfkit.Table` are filled by the spec's `init`; every other module
that owns parameters fills them in `reset_parameters`.

To be decoded token by token, attention says in `cached` what it caches of a token and hands it to
`tfkit.update_cache`; who overrides `build_core` of `mha` has that already. A block says in `pieces` what it takes
to read a sequence in pieces: `tfkit.Pieces()` if it computes every position alone, which lets `tfkit.Loss` cut a
head in pieces too.

There are two ways to hand it to tfkit:

- `tfkit --plugin-dir plugins/ ...`, without packaging; `export TFKIT_PLUGIN_DIR=$PWD/plugins` does it for every
  command and for Python (whole paths, separated as in `PATH`). The folder may hold single files, packages (which
  import their own parts relatively: `from .kernel import scan`), and projects with a `pyproject.toml`, or be
  one of these. Names that begin with `_`, `.` or `test_`, `conftest.py`, `setup.py` and `tests` are left
  alone.
- an entry point in your distribution, which is then found wherever it is installed:

      [project.entry-points.tfkit]
      double_gelu = "tfkit_double_gelu"

A project in a plugin folder takes the place of the same distribution installed, so that you can work on it.

Loading a plugin runs its code, so only what you installed or named is loaded. A spec is data: it says in `requires:
[tfkit-double-gelu]` what it needs, and is refused, with the place where the plugin was found, until you allow it.

`tfkit plugins` shows what was found and `tfkit components` what it brought. A plugin that fails is left out,
with the cause; `TFKIT_DISABLE=tfkit-double-gelu` leaves it out by name. Two plugins that register the same
kind in the same slot are an error that names both.

To test it, call `tfkit.testing.check_component` on your config: it builds small models around it, and proves what
tfkit promises of every model (causality, padding, gradients, TorchScript, capture, the state dict). To test the
loading itself, call `tfkit.load_plugins` with `plugin_dirs=[...]` and `entry_points=False`.

`plugins/tfkit-additive` is a real plugin whose README tells how it was written, step by step, from an empty folder.
The built-in components (`tfkit/components/`) come in through the same hook and use nothing more.
"""
