"""The wheel, with compiled kernels and without."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from ops.wheel_platform import FOLDER
from shared.native import targets

ROOT = Path(__file__).parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "ops/wheel_platform.py")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with little more than the project file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    for name in (*SOURCES, *included):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            (tmp_path / name).mkdir()
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    for package in ("shared", "workers"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    return tmp_path


def build(checkout: Path) -> Path:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel"],
        cwd=checkout,
        check=True,
        capture_output=True,
    )
    (wheel,) = (checkout / "dist").glob("*.whl")
    return wheel


def test_a_wheel_without_kernels_is_for_any_machine(checkout: Path) -> None:
    assert build(checkout).name.endswith("-py3-none-any.whl")


def test_a_wheel_with_kernels_is_for_machines_like_this_one(checkout: Path) -> None:
    assert Path(FOLDER) == targets.FOLDER.relative_to(ROOT)
    names = [f"{FOLDER}/{targets.file_name(target)}" for target in targets.TARGETS]
    for name in names:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).touch()
    wheel = build(checkout)
    assert "-py3-none-manylinux_2_" in wheel.name
    assert wheel.name.endswith("_x86_64.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {*names} <= {*archive.namelist()}
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        assert "Root-Is-Purelib: false" in archive.read(metadata).decode()
