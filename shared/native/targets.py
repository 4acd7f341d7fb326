"""Libraries of C++ kernels that are compiled in advance for named kinds of processors.

Container images and the wheel of `make wheel-kernels` contain them, so that they need no compiler.
`python -m shared.native.targets avx512` compiles one.
"""

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from msgspec import Struct

from shared.errors import ConfigError

SOURCES = ("decoder.cpp", "tower.cpp")
HEADERS = (
    "decoder.h", "attention.h", "segments.h", "product.h", "linear.h",
    "numbers.h", "tile_attention.h", "tiles.h", "units.h", "threads.h",
)  # fmt: skip
COMMON_FLAGS = ("-std=c++20", "-O3", "-fno-math-errno", "-shared", "-fPIC", "-pthread")
COMPILE_TIMEOUT_S = 300.0
SOURCE_FOLDER = Path(__file__).parent
FOLDER = SOURCE_FOLDER / "compiled"
"""Folder of the libraries of an image or a wheel; a checkout has none."""
BUILD_ARGUMENT = "KERNELS"
"""Build argument of compose/Dockerfile, and variable of `make wheel-kernels`, with the targets."""


class Target(Struct, frozen=True):
    """A kind of processor."""

    needs: frozenset[str]
    """Features that the processor must have, by their names in /proc/cpuinfo."""
    flags: tuple[str, ...]
    """Flags of g++ and clang++ that let the compiler use them."""


_AVX512 = frozenset(
    {"avx2", "bmi2", "f16c", "fma", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
)
_AVX512_BF16 = _AVX512 | {"avx512_bf16"}

# The best first.
TARGETS: Mapping[str, Target] = {
    "amx": Target(
        _AVX512_BF16 | {"amx_tile", "amx_bf16"},
        ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    ),
    "avx512_bf16": Target(_AVX512_BF16, ("-march=x86-64-v4", "-mavx512bf16")),
    "avx512": Target(_AVX512, ("-march=x86-64-v4",)),
}


def file_name(target: str) -> str:
    """Return the name of a target's library; it changes with the sources and the flags."""
    flags = " ".join((*COMMON_FLAGS, *TARGETS[target].flags))
    return f"{target}-{hash_with_sources(flags.encode())}.so"


def hash_with_sources(inputs: bytes) -> str:
    """Return a hash of `inputs` and of all sources."""
    digest = hashlib.sha256(inputs)
    for name in (*SOURCES, *HEADERS):
        digest.update((SOURCE_FOLDER / name).read_bytes())
    return digest.hexdigest()


def find_compiled(features: Collection[str], folder: Path) -> Path | None:
    """Return the best library in `folder` for a processor with `features`, or None."""
    if not folder.is_dir():
        return None
    for name, target in TARGETS.items():
        file = folder / file_name(name)
        if target.needs <= set(features) and file.is_file():
            return file
    return None


def compiled_targets(folder: Path) -> list[str]:
    """Return the names of the targets in `folder`."""
    return [name for name in TARGETS if (folder / file_name(name)).is_file()]


def missing_reason(features: Collection[str], folder: Path) -> str:
    """Return the reason for missing kernels on a machine without a compiler, and the remedy."""
    if not folder.is_dir():
        return "no C++ compiler is installed"
    there = ", ".join(compiled_targets(folder)) or "none"
    best = next((name for name, t in TARGETS.items() if t.needs <= set(features)), None)
    if best is None:
        return f"no kernels support this processor; there are compiled kernels for {there}"
    reason = "no kernels were compiled in advance"
    if there != "none":
        reason = f"there are compiled kernels for {there}, but none of them supports this processor"
    return f"{reason}: build the image or the wheel with {BUILD_ARGUMENT}={best}"


def compile_library(compiler: str, flags: Iterable[str], file: Path) -> None:
    """Compile all sources into `file`. Raises CalledProcessError with the compiler's messages."""
    subprocess.run(
        [compiler, *flags, *(str(SOURCE_FOLDER / name) for name in SOURCES), "-o", str(file)],
        check=True,
        capture_output=True,
        timeout=COMPILE_TIMEOUT_S,
    )


def compile_targets(names: Iterable[str], folder: Path, compiler: str = "g++") -> None:
    """Compile the libraries of these targets into `folder`. Raises ConfigError for other names."""
    names = list(names)
    for name in names:
        if name not in TARGETS:
            targets = ", ".join(sorted(TARGETS))
            raise ConfigError(f"no target {name!r}; there are: {targets}", field=BUILD_ARGUMENT)
    folder.mkdir(exist_ok=True)
    for name in names:
        file = folder / file_name(name)
        with tempfile.TemporaryDirectory(dir=folder) as build:
            built = Path(build) / file.name
            compile_library(compiler, (*COMMON_FLAGS, *TARGETS[name].flags), built)
            built.replace(file)


def main() -> int:
    try:
        compile_targets(sys.argv[1:], FOLDER)
    except ConfigError as error:
        sys.stderr.write(f"{error.field}: {error.message}\n")
        return 1
    except subprocess.CalledProcessError as error:
        sys.stderr.write(error.stderr.decode(errors="replace"))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
