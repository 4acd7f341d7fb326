"""The process that tests fork commands and other Python programs from; `tests.preloaded` starts it.

python -m tests.preloading <descriptors of listening sockets> [ARGUMENT OF PYTEST ...]

The second descriptor, if there is one, belongs to a fork which collects the tests first.
"""

import atexit
import gc
import importlib
import os
import runpy
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from huggingface_hub import constants
from huggingface_hub.utils import _cache_manager
from PIL import Image
from rich.console import Console
from transformers import conversion_mapping

from shared.helpers.forking import Forks, end_with_parent
from shared.models import registry
from tests.preloaded import PYTHON, PYTHON_OF, ROLES_OF, WITHOUT_FORKED_RANKS, ForkedCommand
from tests.support.folders import check_by_engine
from workers import __main__ as pagemill
from workers import roles
from workers.cli import terminal
from workers.cli.models import reports
from workers.engine.parallel import followers
from workers.renderer.decoding.pool import SPAWNER
from workers.supervisor import preloader, processes

# Modules that workers import at their start or later with the demo model, or that tests import.
MODULES = [
    *(spec.module for spec in roles.all_roles()),
    *sorted(
        f"workers.cli.commands.{path.partition(':')[0]}"
        for paths in pagemill.COMMANDS.values()
        for path in paths
    ),
    "shared.vision.layers",
    "transformers.models.auto.processing_auto",
    "transformers.models.clip.modeling_clip",
    "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl",
    "transformers.models.qwen2_vl.modeling_qwen2_vl",
    "anyio._backends._asyncio",
    "encodings.idna",
    "openai",
    "peft",
    "uvicorn.lifespan.off",
]


# Every renderer has a spawner, whose imports take 0.4 s. Commands have theirs forked from this one.
_spawners = Forks("tests.spawners")
_execute = Forks._execute


def _fork_spawner(forks: Forks, channel: socket.socket) -> Any:
    if forks._module != SPAWNER:
        return _execute(forks, channel)
    return ForkedCommand(_spawners.fork(b"-", [channel.fileno()]))


def _main() -> None:
    # `up` has workers that use torch forked, and executes the others, which start without torch.
    # Here every worker is a fork. tests/cli/test_commands.py starts the others without torch.
    for spec in roles.all_roles():
        roles._ROLES[spec.name] = replace(spec, uses_torch=True)
    if (own := os.environ.get(ROLES_OF)) is not None:
        importlib.import_module(own).register_roles()
    if (python := os.environ.get(PYTHON_OF)) is not None:
        vars(processes)["sys"] = SimpleNamespace(executable=python, stderr=sys.stderr)
    if WITHOUT_FORKED_RANKS not in os.environ:
        vars(followers).update(PYTHON=PYTHON)
    # A console reads its width from the environment when it is made.
    for console in (terminal.out, terminal.errors):
        vars(console).update(vars(Console(stderr=console.stderr)))
    # So does the hub's library read its address and its folders, when it is imported.
    for module in (constants, _cache_manager):
        importlib.reload(module)
    # Commands would start a process that imports transformers, which is in memory here.
    vars(reports).update(check_by_engine=check_by_engine)
    Forks._execute = _fork_spawner  # type: ignore[assignment, method-assign]
    try:
        pagemill.main()
    except SystemExit as end:
        _exit(end)


def _exit(end: SystemExit) -> NoReturn:
    """Do what Python does at its end, but leave the modules as they are.

    Their teardown writes to most of the memory that a fork shares, in 0.3 s of processor time.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    code = end.code if isinstance(end.code, int) else int(end.code is not None)
    if isinstance(end.code, str):
        print(end.code, file=sys.stderr)  # noqa: T201
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = 120  # Python's own for outputs that fail.
    os._exit(code)


def _forget_exit_functions() -> None:
    """Leave to forks those exit functions alone that they register themselves.

    Torch takes apart its own modules at the end of a process, in 0.1 s of processor time.
    """
    atexit._clear()
    finalizers: Any = weakref.finalize
    for finalizer in list(finalizers._registry):
        finalizer.atexit = False
    # The next finalizer then registers the function that calls all of them.
    finalizers._registered_with_atexit = False


def _run_program() -> None:
    """Run what is on the command line: options of Python, or a command of Pagemill."""
    match sys.argv[1:]:
        case ["-m", "workers", *arguments]:
            sys.argv[1:] = arguments
            _main()
        case ["-m", module, *arguments]:
            sys.argv[1:] = arguments
            try:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            except SystemExit as end:
                _exit(end)
            _exit(SystemExit(0))
        case ["-c", script, *arguments]:
            sys.argv[:] = ["-c", *arguments]
            _call_with_room(lambda: exec(script, {"__name__": "__main__"}))
            if "pytest" in sys.modules:
                _exit(SystemExit(0))
        case _:
            _main()


def _call_with_room(function: Callable[[], None]) -> None:
    """Call a function with a mebibyte for the frames of what it calls.

    CPython 3.11 maps 16 KiB for a frame that finds no room, and unmaps them when it returns. A loop
    that makes its calls at such an edge, which depends on the depth of the process, takes twice as
    long. A larger frame gets the next power of two, and those that follow share it.
    """
    function()


_call_with_room.__code__ = _call_with_room.__code__.replace(co_stacksize=2**16)


def _serve(listener: socket.socket, collecting: socket.socket | None = None) -> None:
    """Fork a preloader for each connection, which ends with it.

    The first message on a connection may have a descriptor: stdin of what is forked.
    """
    end_with_parent()
    _spawners.start()
    gc.disable()
    for module in MODULES:
        importlib.import_module(module)
    _fill_caches()
    gc.collect()
    gc.freeze()
    _forget_exit_functions()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Linux then removes ended preloaders.
    if collecting is not None:
        if os.fork() == 0:
            end_with_parent()
            listener.close()
            listener = collecting
            _collect(sys.argv[2:])
        else:
            collecting.close()
    while True:
        channel, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
            for stdin in descriptors:
                os.dup2(stdin, 0)
                os.close(stdin)
            preloader.serve(channel, (), _run_program)
            os._exit(0)
        channel.close()


def _fill_caches() -> None:
    """Fill what libraries make once in a process, which would take each engine 0.1 s."""
    registry.list_text_model_types()
    conversion_mapping.get_checkpoint_conversion_mapping("qwen2_vl")
    Image.init()


def _collect(arguments: Sequence[str]) -> None:
    """Import the modules of tests as pytest does, which imports and reports failing ones again."""
    # Commands behave otherwise where it is imported, and so the other fork must be without it.
    import pytest

    outputs = [(output, os.dup(output)) for output in (1, 2)]
    with Path(os.devnull).open("wb") as nowhere:
        for output, _ in outputs:
            os.dup2(nowhere.fileno(), output)
    pytest.main(["--collect-only", "--quiet", *arguments])
    for output, saved in outputs:
        os.dup2(saved, output)
        os.close(saved)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _serve(*(socket.socket(fileno=int(number)) for number in sys.argv[1].split(",")))
