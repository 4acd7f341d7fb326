"""Counters of copies and synchronisations on torch's device `meta`, which has no values.

A tensor that comes from the host keeps its values, and so do tensors that are computed from such
tensors alone. A read of a value by the host is a synchronisation; an unknown value is one with
which no row needs special treatment. A copy between the host and the device is counted with the
line that causes it, unless it is asynchronous. Triton kernels are not launched.
"""

import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime.jit import JITFunction

DEVICE = torch.device("meta")
HOST = torch.device("cpu")
NUM_PROBLEMS = 12
MAX_KNOWN = 1 << 20
"""Most values of a tensor that are known."""
SIZED = (torch.ops.aten.repeat_interleave.Tensor, torch.ops.aten.repeat_interleave.self_Tensor)
"""Operations that read their size from the device, unless it is given."""


class Record:
    """Copies and synchronisations with their lines, and problems."""

    def __init__(self) -> None:
        self.is_recording = False
        self.copies: Counter[str] = Counter()
        self.syncs: Counter[str] = Counter()
        self.problems: Counter[str] = Counter()

    def clear(self) -> None:
        self.copies.clear()
        self.syncs.clear()

    def add_copy(self, kind: str) -> None:
        self._add(self.copies, f"copy {kind}")

    def add_sync(self, kind: str) -> None:
        self._add(self.syncs, kind)

    def _add(self, counter: Counter[str], kind: str) -> None:
        event = f"{kind} at {find_line()}"
        counter[event] += 1
        if self.is_recording:
            self.problems[f"in a recorded decode: {event}"] += 1

    def add_mixed(self, function: object) -> None:
        self.problems[f"tensors of two devices in {function} at {find_line()}"] += 1


def find_line() -> str:
    """Return the innermost line that is neither in this file nor in torch."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename != __file__ and "/torch/" not in frame.filename:
            name = frame.filename.split("site-packages/")[-1].removeprefix(f"{os.getcwd()}/")
            return f"{name}:{frame.lineno}"
    return "?"


def is_on_device(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == DEVICE.type


class ConstructorCounter(TorchFunctionMode):
    """Counts tensors that are made of lists on the device, and indexes that are lists.

    Below this level, torch copies neither to `meta`.
    """

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in ("tensor", "as_tensor") and not isinstance(args[0], Tensor):
            device = kwargs.get("device")
            is_empty = isinstance(args[0], list) and not args[0]
            if not is_empty and device is not None and torch.device(device).type == DEVICE.type:
                self._record.add_copy("cpu>meta")
                return mirror(function(*args, **kwargs | {"device": HOST}))
        if name in ("__getitem__", "__setitem__") and is_on_device(args[0]):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            for part in index:
                if isinstance(part, list):
                    self._record.add_copy("cpu>meta")
        return function(*args, **kwargs)


class OperationCounter(TorchDispatchMode):
    """Counts copies and reads of values, and answers the reads."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # In inference mode, operations that consist of others arrive whole.
        with self:
            output = function.decompose(*args, **kwargs)
        if output is not NotImplemented:
            return output
        name = function.overloadpacket.__name__
        if name in ("_to_copy", "copy_"):
            return self._copy(function, args, kwargs)
        if not any(map(is_on_device, tree_leaves(args))):
            return make(function, args, kwargs)
        args = self._count(function, args, kwargs)
        if all(map(is_known, tree_leaves((args, kwargs)))):
            return run_on_host(function, args, kwargs)
        if (answer := ANSWERS.get(name)) is not None:
            return answer(*args, **kwargs)
        if function._schema.is_mutable:
            forget(args[0])
        output = function(*args, **kwargs)
        if name == "any":
            output.holds = False
        return output

    def _count(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Count an operation that copies nothing, and return its arguments as for `meta`."""
        name = function.overloadpacket.__name__
        if name in ANSWERS or (function in SIZED and kwargs.get("output_size") is None):
            self._record.add_sync(name.removeprefix("_"))
        elif name in ("index", "index_put_"):
            return (args[0], self._check_index(args[1]), *args[2:])
        elif any(isinstance(each, Tensor) and is_foreign(each) for each in tree_leaves(args)):
            self._record.add_mixed(function)
        return args

    def _copy(self, function: Any, args: Any, kwargs: Any) -> Any:
        if function.overloadpacket.__name__ == "copy_":
            target, source = args[:2]
            is_waiting = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            if is_on_device(target) != is_on_device(source) and source.ndim and is_waiting:
                self._record.add_copy(f"{source.device.type}>{target.device.type}")
            if is_on_device(target) and is_known(target) and is_known(source):
                target.known.copy_(values_of(source))
                return target
            forget(target)
            return target if is_on_device(source) else function(*args, **kwargs)
        source, device = args[0], kwargs.get("device", args[0].device)
        if is_on_device(source) and device.type != DEVICE.type:
            self._record.add_sync("to_host")
            if is_known(source):
                return values_of(source).to(kwargs.get("dtype") or source.dtype, copy=True)
            return torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        is_upload = not is_on_device(source) and device.type == DEVICE.type
        if is_upload and not kwargs.get("non_blocking"):
            self._record.add_copy("cpu>meta")
        if device.type == DEVICE.type and is_known(source):
            return run_on_host(function, args, kwargs)
        return function(*args, **kwargs)

    def _check_index(self, index: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the index with numbers in place of masks with known values."""
        numbers: list[Tensor | None] = []
        for part in index:
            if part is None or part.dtype != torch.bool:
                if part is not None and is_foreign(part):
                    self._record.add_copy("cpu>meta")
                numbers.append(part)
                continue
            self._record.add_sync("index by a mask")
            known = is_known(part)
            numbers += map(mirror, values_of(part).nonzero(as_tuple=True)) if known else [part]
        return numbers


def mirror(values: Tensor) -> Tensor:
    """Return a tensor on the device with known values."""
    tensor: Any = torch.empty_strided(
        values.shape, values.stride(), dtype=values.dtype, device=DEVICE
    )
    if values.numel() <= MAX_KNOWN:
        tensor.known = values
    return cast(Tensor, tensor)


def is_known(leaf: object) -> bool:
    """Return whether the values of a tensor are known; anything else is no tensor."""
    return not isinstance(leaf, Tensor) or not is_on_device(leaf) or hasattr(leaf, "known")


def values_of(tensor: Tensor) -> Tensor:
    values: Tensor = getattr(tensor, "known", tensor)
    return values


def forget(tensor: Any) -> None:
    if hasattr(tensor, "known"):
        del tensor.known


def run_on_host(function: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Run an operation on known values, and return its results on the device."""
    of_values: dict[int, Tensor] = {}

    def value(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return HOST
        if not isinstance(leaf, Tensor):
            return leaf
        of_values[id(values_of(leaf))] = leaf
        return values_of(leaf)

    def result(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return of_values[id(leaf)] if id(leaf) in of_values else mirror(leaf)

    output = function(*tree_map(value, args), **tree_map(value, dict(kwargs)))
    if not function.is_view:
        return tree_map(result, output)
    # A new tensor would not be a view, which torch checks.
    views = function(*args, **kwargs)
    for view, values in zip(tree_leaves(views), tree_leaves(output), strict=True):
        view.known = values
    return views


def make(function: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Run an operation without tensors on the device; it may make some, with known numbers."""
    output = function(*args, **kwargs)
    if not isinstance(output, Tensor) or not is_on_device(output) or output.dtype.is_floating_point:
        return output
    is_empty = function.overloadpacket.__name__.startswith("empty")
    return output if is_empty or output.numel() > MAX_KNOWN else run_on_host(function, args, kwargs)


def is_foreign(tensor: Tensor) -> bool:
    """Return whether a tensor is on the host; operations take its value if it is a scalar."""
    return tensor.device.type != DEVICE.type and tensor.ndim > 0


def _read_scalar(tensor: Tensor) -> bool | int | float:
    """Return a condition that needs no special treatment: `all` holds, and `any` does not."""
    if tensor.dtype == torch.bool:
        holds: bool = getattr(tensor, "holds", True)
        return holds
    return 1.0 if tensor.dtype.is_floating_point else 1


def _find_nothing(tensor: Tensor) -> Tensor:
    return torch.empty(0, tensor.ndim, dtype=torch.int64, device=DEVICE)


def _keep_all(
    tensor: Tensor, is_sorted: bool = True, inverse: bool = False, counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return unique values, as if all values were different."""
    values = tensor.flatten()
    indexes = torch.empty(tensor.shape, dtype=torch.int64, device=DEVICE)
    return values, indexes, indexes.flatten()


ANSWERS: dict[str, Callable[..., Any]] = {
    "_local_scalar_dense": _read_scalar,
    "nonzero": _find_nothing,
    "_unique2": _keep_all,
}


def replace_launches(record: Record) -> None:
    """Check that the tensors of a kernel are on the device, instead of launching it."""

    def launch(function: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        for name, value in zip(function.arg_names, args, strict=False):
            if isinstance(value, Tensor) and not is_on_device(value):
                record.problems[f"kernel {function.__name__}: {name} is on {value.device}"] += 1

    JITFunction.run = launch


@contextmanager
def counting(record: Record) -> Iterator[None]:
    with ConstructorCounter(record), OperationCounter(record):
        yield


class Count(NamedTuple):
    """Copies and synchronisations of one step or call."""

    kind: str
    copies: float
    syncs: float


def is_within(
    most: Mapping[str, float], name: str, counts: Iterable[Count], record: Record, *, verbose: bool
) -> bool:
    """Print the counts by kind, and return whether there are no problems and no more than `most`.

    An exception of the iterator is a problem.
    """
    try:
        for kind, copies, syncs in counts:
            say(f"  {name:13} {kind:12} {copies:5.1f} copies, {syncs:5.1f} synchronisations")
            if copies + syncs > most[kind]:
                record.problems[f"{kind}: more than {most[kind]}"] += 1
            for event, count in (record.copies + record.syncs).items() if verbose else ():
                say(f"      {count:4} {event}")
    except Exception as error:
        cause = error.__cause__ or error
        say(f"{name}: FAILED with {type(cause).__name__}: {str(cause)[:300]}")
        for frame in traceback.extract_tb(cause.__traceback__)[-8:]:
            say(f"      {frame.filename.split('site-packages/')[-1]}:{frame.lineno} {frame.name}")
        return False
    say(f"{name}: {'PROBLEMS' if record.problems else 'ok'}")
    for problem, count in record.problems.most_common(NUM_PROBLEMS):
        say(f"      {problem}, {count} times")
    return not record.problems


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
