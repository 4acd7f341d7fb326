"""Replace functions and methods of the product from outside, in a worker's own process.

The product is named by attribute, so each replacement is checked against the original. A renamed
function or a changed signature is then an error, and not a replacement without effect.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

PRODUCT = ("shared", "workers")


def replace_attribute(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Set `owner.name` to `replacement`, which must be callable as the original is.

    Raises AttributeError where `owner` has no such attribute, and TypeError where `replacement`
    cannot take its place.
    """
    original = getattr(owner, name)
    check_signature(original, replacement)
    if isinstance(owner, ModuleType):
        _check_all_callers_use(owner, name, original)
    setattr(owner, name, replacement)


def wrap(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Have calls of `owner.name` go to the decorated function.

    Its first argument is the original function; the arguments of the call follow.
    """
    original = getattr(owner, name)

    def decorate(wrapper: Callable[..., Any]) -> None:
        bound = functools.partial(wrapper, original)
        check_signature(original, bound)

        @functools.wraps(original)
        def call(*args: Any, **named: Any) -> Any:
            return bound(*args, **named)

        @functools.wraps(original)
        async def call_later(*args: Any, **named: Any) -> Any:
            return await bound(*args, **named)

        is_later = inspect.iscoroutinefunction(original)
        replace_attribute(owner, name, call_later if is_later else call)

    return decorate


def skip(owner: Any, name: str) -> None:
    """Have calls of `owner.name`, which returns nothing, do nothing."""

    def nothing(*args: Any, **named: Any) -> None:
        pass

    async def nothing_later(*args: Any, **named: Any) -> None:
        pass

    is_later = inspect.iscoroutinefunction(getattr(owner, name))
    replace_attribute(owner, name, nothing_later if is_later else nothing)


def check_signature(original: Any, replacement: Callable[..., Any]) -> None:
    """Raise TypeError where `replacement` does not take the arguments of `original`."""
    name = getattr(original, "__qualname__", repr(original))
    if inspect.iscoroutinefunction(original) and not _is_async(replacement):
        raise TypeError(f"{name} is a coroutine function, its replacement is not")
    if _is_async(replacement) and not inspect.iscoroutinefunction(original):
        raise TypeError(f"{name} is no coroutine function, its replacement is one")
    parameters = inspect.signature(original).parameters.values()
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, _BOTH)]
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    try:
        inspect.signature(replacement).bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        raise TypeError(f"{name} is called otherwise than its replacement: {error}") from error


_BOTH = inspect.Parameter.POSITIONAL_OR_KEYWORD


def _is_async(function: Any) -> bool:
    if isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function)


def _check_all_callers_use(owner: ModuleType, name: str, original: Any) -> None:
    """Raise TypeError if a module has imported a function that is replaced in its own module.

    The importing module would still call the original.
    """
    if getattr(original, "__module__", None) != owner.__name__:
        return
    for module in list(sys.modules.values()):
        if (
            module is not owner
            and getattr(module, "__name__", "").partition(".")[0] in PRODUCT
            and vars(module).get(name) is original
        ):
            raise TypeError(f"{module.__name__} has imported {name} from {owner.__name__}")
