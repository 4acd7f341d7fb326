"""The OpenAPI document is valid and describes the application."""

import hashlib
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs
import pytest

from shared.bus.bus import Bus
from shared.config.parsing import parse_config
from shared.telemetry.metrics import Metrics
from tests.cluster.conftest import CONFIG, Cluster
from tests.gateway.conftest import Gateway, start_gateway
from workers.gateway import worker
from workers.gateway.app import AppContext
from workers.gateway.openapi.document import TABLES, document
from workers.gateway.routes import page

DIALECT = "https://json-schema.org/draft/2020-12/schema"
DOCUMENT = document()
OPERATIONS = [
    (method, path, operation)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
]


def test_every_endpoint_is_in_one_table() -> None:
    routes = [(o.method, o.path) for table in TABLES for o in table.operations]
    assert len(routes) == len(set(routes)) == len(OPERATIONS)


@pytest.fixture
async def context(bus: Bus) -> AppContext:
    return AppContext(bus, parse_config(CONFIG, {}, "test"), Metrics("gateway", "test"), "test")


@pytest.fixture(scope="module")
def keyed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that requires a key."""
    keys = [{"name": "one", "sha256": hashlib.sha256(b"pm-secret").hexdigest()}]
    running = start_gateway(cluster, tmp_path_factory.mktemp("keyed"), api_keys=keys)
    yield running
    running.stop()


def check(openapi: dict[str, Any]) -> None:
    import schemathesis  # It takes half a second, in each process that collects tests.

    schemathesis.openapi.from_dict(openapi).validate()


def test_it_is_valid() -> None:
    check(DOCUMENT)
    for name, schema in DOCUMENT["components"]["schemas"].items():
        assert jsonschema_rs.meta.is_valid({**schema, "$schema": DIALECT}), name


@pytest.mark.parametrize("broken", [{"info": {}}, {"paths": {"/x": {"get": {"responses": 1}}}}])
def test_the_validation_finds_errors(broken: dict[str, Any]) -> None:
    with pytest.raises(jsonschema_rs.ValidationError):
        check(DOCUMENT | broken)


def test_all_references_resolve() -> None:
    referred = set(re.findall(r"'\$ref': '#/components/schemas/([^']+)'", repr(DOCUMENT)))
    assert referred
    assert referred <= set(DOCUMENT["components"]["schemas"])


def test_operation_ids_are_unique() -> None:
    names = [operation["operationId"] for _, _, operation in OPERATIONS]
    assert len(set(names)) == len(names)


async def test_it_has_every_route_and_no_other(context: AppContext) -> None:
    of_page = {route.path_format for route in page.routes(context)}
    there = {
        (method.lower(), route.path_format)
        for route in worker.all_routes(context)
        for method in (route.methods or set()) - {"HEAD"}
        if route.path_format not in of_page
    }
    assert {(method, path) for method, path, _ in OPERATIONS} == there


async def test_it_is_served(http: httpx.AsyncClient) -> None:
    answer = await http.get("/openapi.json")
    assert answer.json() == DOCUMENT


@pytest.mark.parametrize("path", [path for method, path, _ in OPERATIONS if method == "get"])
async def test_a_key_is_required_where_the_document_says(path: str, keyed: Gateway) -> None:
    needs_key = DOCUMENT["paths"][path]["get"].get("security") != []
    async with httpx.AsyncClient(base_url=keyed.url, trust_env=False) as http:
        answer = await http.get(re.sub(r"{\w+}", "x", path))
    assert (answer.status_code == 401) == needs_key
