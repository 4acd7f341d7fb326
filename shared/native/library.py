"""Library of C++ kernels: compiled in advance, or compiled for this processor and cached.

Without AVX-512, or without a compiler and such a library, models run on torch.
"""

import contextlib
import ctypes
import fcntl
import functools
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog

from shared.native import targets

FLAGS = (*targets.COMMON_FLAGS, "-march=native")
BUILD_PREFIX = "build-"
STALE_AFTER_S = 3600.0
"""Age of a build folder after which its compilation must have been killed."""


@functools.cache
def load() -> ctypes.CDLL | None:
    """Return the library, or None without one. The reason is logged once."""
    log = structlog.get_logger()
    if "avx512f" not in processor_flags():
        log.info("native_kernels_unavailable", reason="the processor has no AVX-512")
        return None
    try:
        if (compiled := targets.find_compiled(processor_flags(), targets.FOLDER)) is not None:
            return _declare(ctypes.CDLL(str(compiled)))
        if (compiler := _find_compiler()) is None:
            reason = targets.missing_reason(processor_flags(), targets.FOLDER)
            log.warning("native_kernels_unavailable", reason=reason)
            return None
        return _declare(_open(compiler))
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        log.warning("native_kernels_unavailable", reason=lines[-1] if lines else str(error))
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
        log.warning("native_kernels_unavailable", reason=str(error))
    return None


def can_load() -> bool:
    """Return whether this machine has what `load` needs, without compiling the library."""
    flags = processor_flags()
    is_compiled = targets.find_compiled(flags, targets.FOLDER) is not None
    return "avx512f" in flags and (is_compiled or _find_compiler() is not None)


def _find_compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++")


def _open(compiler: str) -> ctypes.CDLL:
    target = _compile(compiler)
    try:
        return ctypes.CDLL(str(target))
    except OSError:
        # The file was truncated by a power cut or a full disk. Another process may remove it first.
        target.unlink(missing_ok=True)
        return ctypes.CDLL(str(_compile(compiler)))


def _compile(compiler: str) -> Path:
    """Return the cached library, or compile it.

    Its name is a hash of all inputs, so that different machines can share the cache.
    """
    version = subprocess.run(
        [compiler, "--version"], check=True, capture_output=True, timeout=targets.COMPILE_TIMEOUT_S
    ).stdout
    inputs = " ".join([*FLAGS, *sorted(processor_flags())]).encode() + version
    target = cache_folder() / f"native-{targets.hash_with_sources(inputs)}.so"
    if target.is_file():
        return target
    with only_process(target.parent):
        # Another process may have compiled it meanwhile.
        if not target.is_file():
            _remove_stale_builds(target.parent)
            with tempfile.TemporaryDirectory(prefix=BUILD_PREFIX, dir=target.parent) as build:
                built = Path(build) / target.name
                targets.compile_library(compiler, FLAGS, built)
                built.replace(target)
    return target


@contextlib.contextmanager
def only_process(cache: Path) -> Iterator[None]:
    """Hold a lock of all processes for compiling or measuring. It ends with a dead process."""
    folder = os.open(cache, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some network file systems have no locks. Several processes may then compile the same.
        with contextlib.suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _remove_stale_builds(cache: Path) -> None:
    for build in cache.glob(f"{BUILD_PREFIX}*"):
        # Another process may remove it first.
        with contextlib.suppress(FileNotFoundError):
            if build.stat().st_mtime < time.time() - STALE_AFTER_S:
                shutil.rmtree(build, ignore_errors=True)


def cache_folder() -> Path:
    """Return a folder that only this user can write to, because its files are executed."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "pagemill"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
        raise PermissionError(f"{folder} is writable by other users")
    return folder


@functools.cache
def processor_flags() -> frozenset[str]:
    """Return the CPU features of an x86-64 processor; none on other machines."""
    return frozenset(_cpuinfo("flags").split())


def processor_name() -> str:
    return _cpuinfo("model name")


def _cpuinfo(field: str) -> str:
    if platform.machine() == "x86_64":
        with contextlib.suppress(OSError):
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith(field):
                    return line.partition(":")[2].strip()
    return ""


def pointers(*tensors: Any) -> list[int | None]:
    """Return the addresses of tensors, which the caller must keep; None for None."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    signatures = {
        "pagemill_has_tiles": (integer, []),
        "pagemill_allocate": (pointer, [size]),
        "pagemill_free": (None, [pointer, size]),
        "pagemill_pack": (None, [integer, pointer, integer, integer, integer, integer, pointer]),
        "pagemill_decoder": (pointer, [pointer, pointer, pointer, pointer, integer]),
        "pagemill_forward": (None, [pointer, pointer]),
        "pagemill_delete": (None, [pointer]),
        "pagemill_shared_team": (pointer, [integer]),
        "pagemill_attend": (None, [pointer, pointer]),
        "pagemill_attend_cached": (None, [pointer, pointer]),
        "pagemill_multiply": (None, [pointer, pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library
