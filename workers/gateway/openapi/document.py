"""`/openapi.json`: the declared endpoints and their types as an OpenAPI 3.1 document."""

import re
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from shared.protocol.encoding import to_json
from shared.stage.runtime import VERSION
from workers.gateway.app import AppContext
from workers.gateway.http.auth import Caller
from workers.gateway.openapi.json_schema import JsonSchema, Schemas
from workers.gateway.route_table import SCALE_OUT, ApiOperation, RouteTable
from workers.gateway.routes import (
    answers,
    batches,
    files,
    generate,
    health,
    images,
    messages,
    models,
    render,
    requests,
    responses,
    speech,
    tokenize,
    transcription,
    videos,
)

JSON = "application/json"
FORM = "multipart/form-data"

ROUTES = RouteTable("Server")


@ROUTES.endpoint("GET", "/openapi.json", "This document", answer=JSON, public=True)
async def send(context: AppContext, _: Request, __: Caller) -> Response:
    return Response(_encoded(context.limits.scale_out), media_type=JSON)


TABLES = (
    answers.ROUTES,
    messages.ROUTES,
    speech.ROUTES,
    transcription.ROUTES,
    files.ROUTES,
    batches.ROUTES,
    images.ROUTES,
    videos.ROUTES,
    responses.ROUTES,
    requests.ROUTES,
    render.ROUTES,
    generate.ROUTES,
    tokenize.ROUTES,
    models.ROUTES,
    health.ROUTES,
    ROUTES,
)
"""Tables of all endpoints except for the web page, in the order of the document."""

KINDS = [kind for table in TABLES for kind in table.kinds]

OPERATIONS = [operation for table in TABLES for operation in table.operations]


@cache
def _encoded(scale_out: bool) -> bytes:
    return to_json(document(scale_out=scale_out))


def document(*, scale_out: bool = True) -> dict[str, Any]:
    operations = [o for o in OPERATIONS if scale_out or o.tag != SCALE_OUT]
    schemas = Schemas(types_of(operations))
    paths: dict[str, dict[str, object]] = defaultdict(dict)
    for operation in operations:
        paths[operation.path][operation.method.lower()] = _operation(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Pagemill",
            "version": VERSION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        # The empty entry is for servers without configured keys.
        "security": [{"key": []}, {"header": []}, {}],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def types_of(operations: Iterable[ApiOperation]) -> list[Any]:
    """Return every type that has a schema, each once."""
    types = [
        type_
        for operation in operations
        for type_ in (
            operation.body,
            operation.json_body,
            operation.answer,
            operation.chunk,
            operation.error,
        )
        if _has_schema(type_)
    ]
    return list({repr(type_): type_ for type_ in types}.values())


def _has_schema(answer: Any) -> bool:
    """Return whether an answer is a type; else it is a media type, or None for an empty answer."""
    return answer is not None and not isinstance(answer, str)


def _operation(operation: ApiOperation, schemas: Schemas) -> dict[str, object]:
    """Return the Operation Object of an endpoint."""
    described: dict[str, object] = {
        "operationId": _name(operation),
        "tags": [operation.tag],
        "summary": operation.summary,
        "responses": _answers(operation, schemas) | _refusals(operation, schemas),
    }
    if parameters := _parameters(operation):
        described["parameters"] = parameters
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _contents(operation, schemas)}
    if operation.public:
        described["security"] = []
    return described


def _contents(operation: ApiOperation, schemas: Schemas) -> dict[str, object]:
    """Return the schema of each media type that the body may have."""
    schema = schemas.of(operation.body)
    if not operation.file:
        return {JSON: {"schema": schema}}
    contents: dict[str, object] = {FORM: {"schema": _form(schema, operation.file)}}
    if operation.json_body is not None:
        contents[JSON] = {"schema": schemas.of(operation.json_body)}
    return contents


def _form(fields: JsonSchema, file: str) -> JsonSchema:
    """Return the schema of a form with these fields and a file."""
    file_schema = {"type": "string", "contentMediaType": "application/octet-stream"}
    return {"allOf": [fields], "properties": {file: file_schema}, "required": [file]}


def _name(operation: ApiOperation) -> str:
    words = re.findall(r"\w+", operation.path)
    return operation.name or "_".join([operation.method.lower(), *words]).replace("v1_", "")


def _parameters(operation: ApiOperation) -> list[dict[str, object]]:
    in_path: list[dict[str, object]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", operation.path)
    ]
    others: list[dict[str, object]] = [
        {
            "name": parameter.name,
            "in": parameter.place,
            "description": parameter.description,
            "schema": msgspec.json.schema(parameter.type),
        }
        for parameter in operation.parameters
    ]
    return in_path + others


def _answers(operation: ApiOperation, schemas: Schemas) -> dict[str, object]:
    answer = operation.answer
    content: dict[str, object] = {}
    if _has_schema(answer):
        content[JSON] = {"schema": schemas.of(answer)}
    elif answer is not None:
        content[answer] = {}
    if operation.chunk is not None:
        # OpenAPI 3.1 has no schema for events.
        content["text/event-stream"] = {"x-event-data": schemas.of(operation.chunk)}
    described: dict[str, object] = {"description": operation.summary}
    if content:
        described["content"] = content
    return {str(status): described for status in operation.statuses}


def _refusals(operation: ApiOperation, schemas: Schemas) -> dict[str, object]:
    content = {JSON: {"schema": schemas.of(operation.error)}}
    return {
        str(status): {"description": ", ".join(codes), "content": content}
        for status, codes in operation.refusals.items()
        if status not in operation.statuses
    }
