"""`make sbom`: the packages of the wheel in CycloneDX's format, with versions, hashes and licences.

The dependencies come from the installed metadata, versions and hashes from requirements.lock. The
same lock makes the same file.
"""

import json
import re
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "requirements.lock"
PACKAGE = "pagemill"
EXTRAS = ("gpu", "otel", "video")
SPEC_VERSION = "1.6"
# torch's builds for CUDA bring these, with versions of torch's own metadata and NVIDIA's licence.
CUDA_PACKAGES = ("nvidia-", "cuda-")
ALLOWED = frozenset(
    (
        "0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause",
        "BSL-1.0", "CC0-1.0", "CNRI-Python", "ISC", "MIT", "MIT-0", "MIT-CMU", "PSF-2.0", "Zlib",
        # Libraries that are used as they are, and can be replaced: tqdm, soxr.
        "MPL-2.0", "LGPL-2.1-or-later",
    )
)  # fmt: skip
"""Licences that a dependency may have."""

# Names of licences that are no SPDX identifiers.
_SPDX = {
    "3-clause bsd license": "BSD-3-Clause",
    "apache 2 license": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "bsd 3-clause license": "BSD-3-Clause",
    "bsd license": "BSD-3-Clause",
    "bsd-3-clause, apache-2.0, dependency licenses": "BSD-3-Clause AND Apache-2.0",
    "isc license": "ISC",
    "isc license (iscl)": "ISC",
    "mit license": "MIT",
}
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


class SupplyError(Exception):
    """Raised for a dependency that is not locked, or has an unknown licence."""


@dataclass
class Locked:
    """One package of the lock."""

    version: str
    hashes: list[str] = field(default_factory=list)
    """SHA-256 of each file of this version. torch has none: its builds are other files."""


@dataclass
class Component:
    """One package that is installed with the wheel."""

    name: str
    version: str
    licence: str
    """SPDX expression."""
    hashes: list[str]
    requires: list[str]
    is_optional: bool = False
    """Whether only extras of the wheel bring it."""

    @property
    def ref(self) -> str:
        return f"pkg:pypi/{self.name}@{self.version}"


def read_lock(text: str) -> dict[str, Locked]:
    """Return the packages of a lock, by their normal names, that are for this Python."""
    packages: dict[str, Locked] = {}
    current = Locked("")
    for line in text.splitlines():
        current.hashes += _HASH.findall(line)
        if line.startswith((" ", "#")) or not line:
            continue
        pinned = Requirement(line.rstrip("\\ "))
        current = Locked(str(pinned.specifier).removeprefix("=="))
        if pinned.marker is None or pinned.marker.evaluate():
            packages[canonicalize_name(pinned.name)] = current
    return packages


def licence_of(name: str, declared: list[str]) -> str:
    """Return the SPDX expression of a package, of what it declares in several places.

    Raises SupplyError if none of it is an expression.
    """
    for text in declared:
        spdx = _SPDX.get(text.strip().lower(), text.strip())
        try:
            return str(canonicalize_license_expression(spdx))
        except InvalidLicenseExpression:
            continue
    raise SupplyError(f"{name} names no licence that has an SPDX id: {declared}")


def declared_by(installed: Distribution) -> list[str]:
    """Return what a package's metadata says of its licence, the most exact first."""
    metadata = installed.metadata
    classifiers = metadata.get_all("Classifier") or []
    return [
        *(metadata[name] for name in ("License-Expression", "License") if name in metadata),
        *(text.rpartition(" :: ")[2] for text in classifiers if text.startswith("License")),
    ]


def is_allowed(expression: str) -> bool:
    """Return whether one way to read an expression needs licences of `ALLOWED` alone."""
    for joined, judge in ((" OR ", any), (" AND ", all)):
        parts = _split(expression, joined)
        if len(parts) > 1:
            return judge(is_allowed(part) for part in parts)
    if expression.startswith("("):
        return is_allowed(expression[1:-1])
    return expression in ALLOWED


def _split(expression: str, joined: str) -> list[str]:
    """Split at an operator that stands in no parentheses."""
    parts, depth = [""], 0
    for token in re.split(rf"([()]|{joined})", expression):
        depth += {"(": 1, ")": -1}.get(token, 0)
        if token == joined and depth == 0:
            parts.append("")
        else:
            parts[-1] += token
    return parts


def components(locked: Mapping[str, Locked]) -> dict[str, Component]:
    """Return the packages that the wheel brings, by name, without the wheel itself."""
    packages: dict[str, Component] = {}
    for extra in ("", *EXTRAS):
        for name in requirements_of(distribution(PACKAGE), {extra}):
            _add(packages, name, locked, is_optional=extra != "")
    return dict(sorted(packages.items()))


def _add(
    packages: dict[str, Component], name: str, locked: Mapping[str, Locked], *, is_optional: bool
) -> None:
    if name in packages:
        return
    installed = distribution(name)
    version, _, _ = installed.version.partition("+")  # The build of torch.
    if name not in locked or locked[name].version != version:
        raise SupplyError(
            f"{name} {version} is installed, but not in {LOCK.name}: run `make install`"
        )
    licence = licence_of(name, declared_by(installed))
    requires = list(requirements_of(installed, {""}))
    packages[name] = Component(name, version, licence, locked[name].hashes, requires, is_optional)
    for required in requires:
        _add(packages, required, locked, is_optional=is_optional)


def requirements_of(installed: Distribution, extras: set[str]) -> Iterator[str]:
    """Yield the names of what a package needs here, with these of its extras."""
    for text in installed.requires or []:
        required = Requirement(text)
        name, marker = canonicalize_name(required.name), required.marker
        is_wanted = (
            "" in extras
            if marker is None
            else any(marker.evaluate({"extra": extra}) for extra in extras)
        )
        if is_wanted and not name.startswith(CUDA_PACKAGES):
            yield name


def bill_of(version: str, packages: Mapping[str, Component]) -> dict[str, Any]:
    """Return the bill of materials of a version of the wheel."""
    root = f"pkg:pypi/{PACKAGE}@{version}"
    edges = {root: [c.ref for c in packages.values() if c.name in _direct()]}
    edges |= {c.ref: [packages[name].ref for name in c.requires] for c in packages.values()}
    body = {
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": root,
                "name": PACKAGE,
                "version": version,
                "purl": root,
                "licenses": [{"expression": "Apache-2.0"}],
            }
        },
        "components": [_component(component) for component in packages.values()],
        "dependencies": [
            {"ref": ref, "dependsOn": sorted(required)} for ref, required in edges.items()
        ],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(body, sort_keys=True))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": SPEC_VERSION,
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        **body,
    }


def _direct() -> set[str]:
    return set(requirements_of(distribution(PACKAGE), {"", *EXTRAS}))


def _component(component: Component) -> dict[str, Any]:
    distribution_page = {
        "type": "distribution",
        "url": f"https://pypi.org/project/{component.name}/{component.version}/",
        "hashes": [{"alg": "SHA-256", "content": content} for content in component.hashes],
    }
    return {
        "type": "library",
        "bom-ref": component.ref,
        "name": component.name,
        "version": component.version,
        "scope": "optional" if component.is_optional else "required",
        "purl": component.ref,
        "licenses": [{"expression": component.licence}],
        "externalReferences": [distribution_page] if component.hashes else [],
    }


def main() -> None:
    packages = components(read_lock(LOCK.read_text()))
    refused = [c for c in packages.values() if not is_allowed(c.licence)]
    if refused:
        sys.exit("\n".join(f"{c.name}: {c.licence} is not allowed" for c in refused))
    version = distribution(PACKAGE).version
    file = ROOT / "dist" / f"{PACKAGE}-{version}.cdx.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(bill_of(version, packages), indent=1) + "\n")
    sys.stdout.write(f"{file.relative_to(ROOT)}: {len(packages)} packages\n")


if __name__ == "__main__":
    main()
