"""Recording the constructor arguments of torch modules while a model is built, and merging equal modules."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import tfkit.nn
from tfkit.nn import Rearrange
from tfkit.tools.eject.config import text_of
from tfkit.tools.eject.source import ejection_error
from tfkit.torch_private.tensors import storage_key

STANDS_FOR: dict[type[nn.Module], type[nn.Module]] = {tfkit.nn.Linear: nn.Linear, tfkit.nn.Table: nn.Embedding}
"""Modules that differ from torch's only in their initial weights."""
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
OF_PARAMETERS = (nn.ParameterList, nn.ParameterDict)
_MODULE_ATTRIBUTES = frozenset(nn.Module().__dict__)
_CONSTRUCTOR_ARGUMENTS = "_tfkit_made_with"
"""Attribute in which torch's modules store their arguments while a model is ejected."""
MOVED = "_tfkit_moved"
"""Attribute of a `GraphModule` with the attributes of a module that was dissolved into it."""
_LEFT_OUT = ("self", "device", "_weight", "_freeze")
_MAKERS = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn)


class Sizes(TorchFunctionMode):
    """Records the sizes with which tensors are created, including the names of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, tuple[Any, ...]] = {}
        self._tensors: list[torch.Tensor] = []
        """Keeps the tensors alive, because a new tensor could otherwise get the same storage key."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _MAKERS and args:
            sizes = args[0] if isinstance(args[0], tuple | list) else args
            self._sizes[storage_key(result)] = tuple(sizes)
            self._tensors.append(result)
        return result

    def of(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """Return the shape of a tensor, with named numbers if it was created with them."""
        shape = tuple(tensor.shape)
        sizes = self._sizes.get(storage_key(tensor))
        return sizes if sizes == shape else shape


@contextmanager
def record_arguments() -> Iterator[Sizes]:
    """Record the arguments of tensors and torch modules, and of their copies, inside the context."""
    kinds = [kind for kind in vars(nn).values() if isinstance(kind, type) and issubclass(kind, nn.Module)]
    bases = {
        base for kind in kinds for base in kind.__mro__ if issubclass(base, nn.Module) and "__init__" in vars(base)
    }
    originals = {base: vars(base)["__init__"] for base in bases - {nn.Module, *CONTAINERS, *OF_PARAMETERS}}
    for base, original in originals.items():
        base.__init__ = _recording_init(original)  # type: ignore[method-assign]
    try:
        with Sizes() as sizes:
            yield sizes
    finally:
        for base, original in originals.items():
            base.__init__ = original  # type: ignore[method-assign]


def _recording_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        self.__dict__.setdefault(_CONSTRUCTOR_ARGUMENTS, (args, dict(kwargs)))
        original(self, *args, **kwargs)

    return init


def merge_equal(model: nn.Module) -> None:
    """Replace equal modules by the first of them. Modules are equal if class, numbers and children are equal.

    The numbers of rearrangements must also have equal names, because the enclosing module uses these names.
    """
    first: dict[Hashable, nn.Module] = {}

    def merged(module: nn.Module) -> nn.Module:
        for name, child in module._modules.items():
            module._modules[name] = None if child is None else merged(child)
        children = tuple((name, id(child)) for name, child in module._modules.items())
        named = [*module._parameters.items(), *module._buffers.items()]
        passing = module._non_persistent_buffers_set
        tensors = [(n, None if t is None else (t.shape, t.dtype, t.requires_grad, n in passing)) for n, t in named]
        axes = [text_of(getattr(module, axis)) for axis in module.known] if isinstance(module, Rearrange) else []
        numbers = (repr(sorted(plain_attributes(module).items())), repr(axes))
        return first.setdefault((type(module), children, *numbers, repr(tensors)), module)

    merged(model)


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are neither parameters nor modules."""
    if isinstance(module, torch.fx.GraphModule):
        return dict(module.__dict__.get(MOVED, {}))
    return {
        name: value
        for name, value in module.__dict__.items()
        if name not in _MODULE_ATTRIBUTES and name not in (_CONSTRUCTOR_ARGUMENTS, MOVED)
    }


def has_torch_class(module: nn.Module) -> bool:
    """Return True if the file creates a module with a class of torch."""
    return _is_torch(module) or type(module) in STANDS_FOR


def _is_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.") and not isinstance(module, torch.fx.GraphModule)


def torch_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of torch with which the file creates a module."""
    return STANDS_FOR.get(type(module), type(module))


def arguments_of(module: nn.Module) -> dict[str, Any]:
    """Return the arguments that create a torch module, without arguments that have their default values.

    Arguments without a name are `arg_0`, `arg_1`, ...
    """
    args, kwargs = module.__dict__.get(_CONSTRUCTOR_ARGUMENTS, ((), {}))
    signature = inspect.signature(torch_class(module))
    arguments: dict[str, Any] = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        parameter = signature.parameters[name]
        simple = isinstance(value, bool | int | float | str | tuple)
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            arguments |= {f"arg_{index}": item for index, item in enumerate(value)}
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= value
        elif value is not parameter.default and not (simple and value == parameter.default):
            arguments[name] = value
    return {name: value for name, value in arguments.items() if name not in _LEFT_OUT}


def constructor_call(module: nn.Module, texts: Mapping[str, str]) -> str:
    """Return the call that creates a torch module. Arguments without a default are positional."""
    kind = torch_class(module)
    parameters = inspect.signature(kind).parameters
    positional = [name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty]
    parts = [
        text if name in positional or (name not in parameters and name.startswith("arg_")) else f"{name}={text}"
        for name, text in texts.items()
    ]
    return f"nn.{kind.__name__}({', '.join(parts)})"


def check_reproducible(module: nn.Module) -> None:
    """Raise SpecError unless a torch module equals the module that its public class creates from its arguments."""
    kind = type(module)
    if kind in STANDS_FOR or kind in OF_PARAMETERS:
        return
    if getattr(nn, kind.__name__, None) is not kind:
        raise ejection_error(module, "torch.nn has no public class of this name")
    if not all(map(_is_torch, module.modules())):
        raise ejection_error(module, "it calls modules that do not belong to torch")
    args, kwargs = module.__dict__.get(_CONSTRUCTOR_ARGUMENTS, ((), {}))
    with torch.device("meta"):
        again = kind(*args, **kwargs)
    if _module_state(again) != _module_state(module):
        raise ejection_error(
            module, "it was changed after its creation: pass arguments to its constructor, or write a class"
        )


def _module_state(module: nn.Module) -> object:
    """Return the state of a module, which any change of the module affects."""
    inner = [
        (path, type(child), {n: repr(v) for n, v in plain_attributes(child).items() if not n.startswith("_")})
        for path, child in module.named_modules(remove_duplicate=False)
    ]
    return inner, [(name, tensor.shape) for name, tensor in module.state_dict().items()]
