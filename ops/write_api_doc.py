"""Writes the tables of docs/api.md: endpoints, errors, and the fields of each body and response.

A table stands between `<!-- NAME -->` and `<!-- end -->`. The prose around the tables is left
unchanged. A test checks that the file is up to date.
"""

import ast
import inspect
import re
import textwrap
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from shared.errors import PagemillError
from workers.gateway.http import errors
from workers.gateway.openapi.document import OPERATIONS, document, types_of

FILE = Path(__file__).parent.parent / "docs" / "api.md"
BLOCK = re.compile(r"(<!-- (\w+)(?: (\w+))? -->\n).*?(<!-- end -->)", re.DOTALL)


ABOUT = {
    "answer_too_large": "log probabilities over `gateway.max_answer_mib`; streams have no limit",
    "body_too_large": "the body is over `gateway.max_body_mib`, or has too many chunks",
    "cancelled": "the request was cancelled",
    "context_length_exceeded": "the prompt and the answer do not fit into the model's context",
    "deadline_exceeded": "the request did not end within `timeout_s`, or the configured time",
    "headers_too_large": "the headers are over `gateway.max_header_kib`, or more than 128",
    "internal_error": "an error of the server; the request may be sent again",
    "interrupted": "the gateway is being stopped; the request continues, and can be read by its id",
    "invalid_api_key": "the key is missing or unknown",
    "invalid_grammar": "a schema, expression or grammar that cannot be enforced",
    "invalid_media": "an image that cannot be read, fetched or decoded",
    "invalid_request": "a field is missing, of a wrong type or out of range; `param` names it",
    "log_truncated": "the beginning of the answer has been removed",
    "media_not_found": "a `media:` URL of a file that the tenant has not stored",
    "media_too_large": "images over the limit on bytes, pixels or number",
    "media_url_blocked": "a URL from which this server does not fetch images",
    "method_not_allowed": "the URL does not have this method; `Allow` lists those it has",
    "mm_cache_miss": "features by hash alone that the tenant has not sent before",
    "not_found": "the tenant has no such request, or it has been removed",
    "overloaded": "too many requests wait; `Retry-After` says for how long",
    "payload_too_large": "a request that does not fit into a message, even without its images",
    "poison": "the request was given up after several workers died while they had it in flight",
    "rate_limit_exceeded": "over a limit of the key; `Retry-After` says for how long",
    "request_id_reused": "this `X-Request-Id` belongs to a request with other content",
    "request_timeout": "the headers or the body did not arrive in time",
    "unavailable": "no broker or no worker replies",
    "unknown_adapter": "the model has no adapter of this name",
    "unknown_model": "the server has no such model",
    "unknown_parameter": "the API has no such field",
    "unsupported_content": "a part of a message that the model does not support",
    "unsupported_content_type": "the body is not `application/json`",
    "unsupported_parameter": "a known field, or a value of one, that this server does not support",
    "unknown_url": "the API has no such URL",
    "worker_failure": "a worker failed on the request",
}
"""The cause of each error, by its code."""


def main() -> None:
    FILE.write_text(rewritten(FILE.read_text(encoding="utf-8")), encoding="utf-8")


def rewritten(text: str) -> str:
    structs = _structs()
    above = {name for _, kind, name, _ in BLOCK.findall(text) if kind == "fields"}

    def block(match: re.Match[str]) -> str:
        begin, kind, name, end = match.groups()
        match kind:
            case "endpoints":
                table = _endpoints()
            case "errors":
                table = _errors()
            case "types":
                table = _types(structs, above)
            case _:
                table = _fields(name, structs[name])
        return f"{begin}\n{table}\n{end}"

    return BLOCK.sub(block, text)


def _endpoints() -> str:
    rows = [
        [
            f"`{operation.method} {operation.path}`",
            operation.summary,
            _name(operation.body),
            _name(operation.answer)
            + ("" if operation.chunk is None else f", or SSE of {_name(operation.chunk)}"),
            "yes" if operation.counted else "-",
        ]
        for operation in OPERATIONS
    ]
    return _table(["", "", "body", "answer", "counted"], rows)


def bodies() -> str:
    """Return the names of all types of bodies."""
    return " ".join(_name(operation.body) for operation in OPERATIONS)


def _name(one: Any) -> str:
    if one is None or isinstance(one, str):
        return one or "-"
    if inspect.isclass(one) and not get_args(one):
        return f"`{one.__name__}`"
    kind = "list of " if get_origin(one) is list else ""
    return kind + " or ".join(_name(part) for part in get_args(one))


def _errors() -> str:
    used = {errors.UnknownRoute.code, errors.WrongMethod.code}
    for operation in OPERATIONS:
        used.update(*operation.refusals.values())
    by_code = {error.code: error for error in _subclasses(PagemillError)}
    rows = [[str(errors.status_of(by_code[code])), f"`{code}`", ABOUT[code]] for code in used]
    return _table(["status", "code", ""], sorted(rows))


def _subclasses(cls: type[PagemillError]) -> list[type[PagemillError]]:
    return [cls, *(found for below in cls.__subclasses__() for found in _subclasses(below))]


def _structs() -> dict[str, Any]:
    """Return every Struct that the document has a schema of, by name."""
    found: dict[str, Any] = {}
    pending = [*types_of(OPERATIONS), errors.ErrorAnswer]
    while pending:
        one = pending.pop(0)
        pending += get_args(one)
        if not inspect.isclass(one) or not issubclass(one, msgspec.Struct):
            continue
        if (name := one.__name__) not in found:
            found[name] = one
            pending += get_type_hints(one, include_extras=True).values()
    return found


@cache
def _schemas() -> dict[str, Any]:
    return dict(document()["components"]["schemas"])


def _types(structs: dict[str, Any], above: set[str]) -> str:
    """Return a table of each type that has none above."""
    rest = sorted(structs.keys() - above)
    return "\n".join(f"`{name}`\n\n{_fields(name, structs[name])}" for name in rest)


def _fields(name: str, cls: Any) -> str:
    schema = _schemas()[name]
    about = _docstrings(cls)
    required = set(schema.get("required", ()))
    rows = []
    for key, field in schema["properties"].items():
        default = field.get("default")
        shown = "required" if key in required else "-" if default is None else _code(default)
        rows.append([f"`{key}`", _spelled(field), shown, about.get(key, "")])
    return _table(["field", "type", "default", ""], rows)


def _docstrings(cls: Any) -> dict[str, str]:
    """Return the string that follows a field in the source, by field."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not issubclass(base, msgspec.Struct) or base is msgspec.Struct:
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                assert isinstance(field.target, ast.Name)
                assert isinstance(text.value, ast.Constant)
                found[field.target.id] = inspect.cleandoc(str(text.value.value))
    return {name: " ".join(text.split()) for name, text in found.items()}


def _spelled(schema: dict[str, Any]) -> str:
    """Return a short text for a JSON schema."""
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    if "anyOf" in schema:
        kinds = [_spelled(kind) for kind in schema["anyOf"] if kind.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(_code(value) for value in values if value is not None)
    kind = schema.get("type", "anything")
    if kind == "null":
        return "only `null`"
    if kind == "array":
        return "list of " + _spelled(schema.get("items") or {}) + _range(schema, "Items")
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return "object of " + _spelled(schema["additionalProperties"])
    pattern = f", `{schema['pattern']}`".replace("|", "\\|") if "pattern" in schema else ""
    return str(kind) + _range(schema, "Length") + _bounds(schema) + pattern


def _range(schema: dict[str, Any], what: str) -> str:
    least, most = schema.get(f"min{what}"), schema.get(f"max{what}")
    if least is not None and most is not None:
        return f" ({least} to {most})"
    return f" (up to {most})" if most else f" (at least {least})" if least else ""


def _bounds(schema: dict[str, Any]) -> str:
    least, most = schema.get("minimum"), schema.get("maximum")
    above = schema.get("exclusiveMinimum")
    parts = [
        f"above {above}" if above is not None else "",
        f"from {least}" if least is not None else "",
        f"to {most}" if most is not None else "",
    ]
    words = " ".join(part for part in parts if part)
    return f", {words}" if words else ""


def _code(value: Any) -> str:
    return f"`{msgspec.json.encode(value).decode()}`"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()
