"""`/openapi.json`: the table of operations in the form of OpenAPI 3.1, with the schemas of
the Structs."""

import re
from collections import defaultdict
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shared.stage.runtime import VERSION
from workers.gateway.app import AppContext, Json
from workers.gateway.http import errors
from workers.gateway.http.auth import Caller
from workers.gateway.openapi.json_schema import Schemas
from workers.gateway.openapi.operation import ApiOperation, is_type, types_of
from workers.gateway.openapi.operations import OPERATIONS, SCALE_OUT

JSON = "application/json"
EVENTS = "text/event-stream"


def routes(context: AppContext) -> list[Route]:
    written = Json(document(scale_out=context.limits.scale_out)).body

    async def send(_: Request, __: Caller) -> Response:
        return Response(written, media_type=JSON)

    return [context.route("/openapi.json", send, public=True)]


def document(*, scale_out: bool = True) -> dict[str, Any]:
    operations = [o for o in OPERATIONS if scale_out or o.tag != SCALE_OUT]
    schemas = Schemas([*types_of(operations), errors.ErrorAnswer])
    paths: dict[str, dict[str, Any]] = defaultdict(dict)
    for operation in operations:
        paths[operation.path][operation.method.lower()] = _described(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Pagemill",
            "version": VERSION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        # A server without keys wants none.
        "security": [{"key": []}, {}],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(operation: ApiOperation, schemas: Schemas) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": _name(operation),
        "tags": [operation.tag],
        "summary": operation.summary,
        "responses": _answers(operation, schemas) | _refusals(operation, schemas),
    }
    if parameters := _parameters(operation):
        described["parameters"] = parameters
    if operation.body is not None:
        content = {JSON: {"schema": schemas.of(operation.body)}}
        described["requestBody"] = {"required": True, "content": content}
    if operation.public:
        described["security"] = []
    return described


def _name(operation: ApiOperation) -> str:
    words = re.findall(r"\w+", operation.path)
    return "_".join([operation.method.lower(), *words]).replace("v1_", "")


def _parameters(operation: ApiOperation) -> list[dict[str, Any]]:
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", operation.path)
    ]
    others = [
        {
            "name": parameter.name,
            "in": parameter.place,
            "description": parameter.about,
            "schema": msgspec.json.schema(parameter.type),
        }
        for parameter in operation.parameters
    ]
    return in_path + others


def _answers(operation: ApiOperation, schemas: Schemas) -> dict[str, Any]:
    answer = operation.answer
    content: dict[str, Any] = {}
    if is_type(answer):
        content[JSON] = {"schema": schemas.of(answer)}
    elif answer is not None:
        content[answer] = {}
    if operation.chunk is not None:
        # Of events OpenAPI 3.1 has no schema.
        content[EVENTS] = {"x-event-data": schemas.of(operation.chunk)}
    described: dict[str, Any] = {"description": operation.summary}
    if content:
        described["content"] = content
    return {str(status): described for status in operation.statuses}


def _refusals(operation: ApiOperation, schemas: Schemas) -> dict[str, Any]:
    content = {JSON: {"schema": schemas.of(errors.ErrorAnswer)}}
    return {
        str(status): {"description": ", ".join(codes), "content": content}
        for status, codes in operation.refusals.items()
        if status not in operation.statuses
    }
