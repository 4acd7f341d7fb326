"""The lower bounds of pyproject.toml, which `make tests-lowest` installs."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from ops.install import LOWEST, locked_torch

PROJECT = tomllib.loads((Path(LOWEST).parent / "pyproject.toml").read_text())


def requirements() -> Iterator[Requirement]:
    project = PROJECT["project"]
    extras = project["optional-dependencies"].values()
    for group in (project["dependencies"], *extras, PROJECT["dependency-groups"]["dev"]):
        yield from map(Requirement, group)


def bounds() -> dict[str, Version]:
    """The highest lower bound of each package."""
    lowest: dict[str, Version] = {}
    for requirement in requirements():
        (bound,) = (each.version for each in requirement.specifier if each.operator == ">=")
        version = Version(bound)
        lowest[requirement.name] = max(version, lowest.get(requirement.name, version))
    return lowest


def test_the_oldest_versions_are_those_that_pyproject_names() -> None:
    """A bound that no other package allows would be untrue; `make lock` writes the list."""
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)", LOWEST.read_text(), re.MULTILINE))
    versions = {name: Version(version) for name, version in pinned.items()}
    # torch is installed in its locked version.
    expected = {name: version for name, version in bounds().items() if name != "torch"}
    assert {name: versions[name] for name in expected} == expected


def test_the_locked_torch_is_allowed() -> None:
    (torch,) = (each for each in requirements() if each.name == "torch")
    assert torch.specifier.contains(locked_torch().removeprefix("torch=="))
