"""Environments of clients from PyPI and npm, in build/interop. New versions replace them."""

import shutil
import subprocess
import sys
from pathlib import Path

from ops.install import UV, index_options

FOLDER = Path(__file__).parents[2] / "build" / "interop"
PROGRAMS = Path(__file__).parent / "clients"
CONSTRAINTS = PROGRAMS / "constraints.txt"
LOCK = PROGRAMS / "package-lock.json"
STAMP = "pins"
# Some packages need a newer node than a system has.
NODE = "node_modules/.bin/node"


def python_with(package: str) -> Path:
    """Return a Python that has a package of PyPI, in the version of constraints.txt."""
    folder = FOLDER / package
    python = folder / "bin" / "python"
    if not _has_stamp(folder, CONSTRAINTS):
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, folder], check=True)
        install = [UV, "pip", "install", "--quiet", "--system-certs", "--python", str(python)]
        pins = ["--constraints", str(CONSTRAINTS), *index_options()]
        subprocess.run([*install, *pins, package], check=True)
        shutil.copy(CONSTRAINTS, folder / STAMP)
    return python


def node_with_packages() -> Path:
    """Return a folder with the programs for node, the packages of package-lock.json, and NODE."""
    folder = FOLDER / "npm"
    if not _has_stamp(folder, LOCK):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(PROGRAMS, folder)
        subprocess.run(["npm", "ci", "--no-audit", "--no-fund", "--silent"], cwd=folder, check=True)
        shutil.copy(LOCK, folder / STAMP)
    for program in PROGRAMS.glob("*.mjs"):
        shutil.copy(program, folder)
    return folder


def _has_stamp(folder: Path, pins: Path) -> bool:
    """Return whether an environment has been completed with these versions."""
    stamp = folder / STAMP
    return stamp.is_file() and stamp.read_bytes() == pins.read_bytes()
