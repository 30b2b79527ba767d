"""Valid names of nodes and inputs, which become attributes and arguments of the built module."""

from __future__ import annotations

import builtins
import keyword

RESERVED_NAMES = frozenset(
    """add_module add_submodule apply bfloat16 buffers cache call_super_init children code compile components cpu cuda
    delete_all_unused_submodules delete_submodule double dump_patches eval extra_repr float forward get_buffer
    get_extra_state get_parameter get_submodule graph half ipu keep load_state_dict meta modules mtia named_buffers
    named_children named_modules named_parameters parameters past print_readable recompile requires_grad_ self
    set_extra_state set_submodule shape_env share_memory spec state_dict T_destination to to_empty to_folder
    train training type xpu zero_grad""".split()  # noqa: SIM905
)
"""Names that nodes cannot have, in addition to names that start with `register_`: attributes of the built module, and
arguments of the module for decoding steps."""
CODE_NAMES = frozenset(
    """Config F NamedTuple NoneType OrderedDict Tensor add_caches batch config dataclass device empty_state first_value
    fx_pytree getattr inf keep_value kept_value length like made math min move_on nan nn operator past_of piece pytree
    read result start state step torch""".split()  # noqa: SIM905
)
"""Names that generated code uses for other purposes: code of torch.fx and `torch.export`, the methods of a TorchScript
file, and ejected files."""
SPELLING = (
    "it becomes a name in Python and in TorchScript: a letter from a to z or A to Z, then such letters, digits and `_`"
)


def is_identifier(name: str) -> bool:
    """Return True if `name` can be a public name in Python and in TorchScript.

    TorchScript accepts only ASCII. Python accepts more letters, but replaces some by others (`ﬁ` by `fi`, by NFKC).
    """
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("_")


def name_conflict(name: str, *, of_input: bool) -> str | None:
    """Return why a name is not available; None if it is."""
    if name.endswith("_mask"):
        return "it names a padding mask"
    if name in RESERVED_NAMES or name.startswith("register_"):
        return "every module has an attribute of this name"
    if name in CODE_NAMES:
        return "the code written for a model uses this name for something else"
    if of_input and not name.islower():
        return "torch writes arguments in lower case into an ONNX file"
    if of_input and hasattr(builtins, name):
        return "as an argument it would hide a built-in name of Python"
    return None
