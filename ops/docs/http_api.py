"""Tables of docs/reference/http-api.md: endpoints, errors, fields of bodies and answers.

The causes of errors come from docs/operate/troubleshooting.md.
"""

import inspect
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

from msgspec import Struct

from ops.docs.tables import (
    REFERENCE,
    code,
    escaped,
    field_docs,
    structs_in,
    table,
    type_words,
    with_blocks,
)
from shared.protocol.sampling import SamplingParams
from workers.gateway.http import errors
from workers.gateway.openapi.document import OPERATIONS, document, types_of
from workers.gateway.schemas.sampling_fields import SAME_FORM, SamplingFields

FILE = REFERENCE / "http-api.md"
TROUBLESHOOTING = REFERENCE.parent / "operate" / "troubleshooting.md"
_CAUSE = re.compile(r"^\| `(\w+)` \| (\d+|-) \| (?:yes|no) \| ([^|]+) \|", re.MULTILINE)


def pages() -> dict[Path, str]:
    """Return the page with its tables written again."""
    structs = structs_in(types_of(OPERATIONS))
    makers: dict[str, Callable[[list[str], set[str]], str]] = {
        "endpoints": lambda names, named: _endpoints(),
        "errors": lambda names, named: _errors(),
        "types": lambda names, named: _types(structs, named),
        "fields": lambda names, named: _fields(names[0], structs[names[0]]),
    }
    return {FILE: with_blocks(FILE.read_text(encoding="utf-8"), makers)}


def _endpoints() -> str:
    rows = [
        [
            f"`{operation.method} {operation.path}`",
            operation.summary,
            _name(operation.body)
            + ("" if operation.json_body is None else f", or {_name(operation.json_body)}"),
            _name(operation.answer)
            + ("" if operation.chunk is None else f", or SSE of {_name(operation.chunk)}"),
            "yes" if operation.counted else "-",
        ]
        for operation in OPERATIONS
    ]
    return table(["", "", "body", "answer", "counted"], rows)


def bodies() -> str:
    """Return the names of all types of bodies."""
    return " ".join(_name(body) for o in OPERATIONS for body in (o.body, o.json_body))


def _name(body: Any) -> str:
    if body is None or isinstance(body, str):
        return body or "-"
    if inspect.isclass(body) and not get_args(body):
        return f"`{body.__name__}`"
    kind = "list of " if get_origin(body) is list else ""
    return kind + " or ".join(_name(part) for part in get_args(body))


def _errors() -> str:
    used = {errors.UnknownRoute.code, errors.WrongMethod.code, errors.UnknownCoding.code}
    for operation in OPERATIONS:
        used.update(*operation.refusals.values())
    causes = _CAUSE.findall(TROUBLESHOOTING.read_text(encoding="utf-8"))
    rows = [[status, f"`{code}`", cause] for code, status, cause in causes if code in used]
    return table(["status", "code", ""], sorted(rows))


@cache
def _schemas() -> dict[str, Any]:
    return dict(document()["components"]["schemas"])


def _types(structs: dict[str, Any], named: set[str]) -> str:
    """Return a table of each type that has no block."""
    rest = sorted(structs.keys() - named)
    return "\n".join(f"`{name}`\n\n{_fields(name, structs[name])}" for name in rest)


def _fields(name: str, cls: type[Struct]) -> str:
    schema = _schemas()[name]
    docs = field_docs(cls)
    if issubclass(cls, SamplingFields):
        shared = field_docs(SamplingParams)
        docs = {key: shared[key] for key in (*SAME_FORM, "seed") if key in shared} | docs
    required = set(schema.get("required", ()))
    rows = []
    for key, field in schema["properties"].items():
        default = field.get("default")
        default_words = "required" if key in required else "-" if default is None else code(default)
        about = escaped(docs.get(key, ""))
        rows.append([f"`{key}`", type_words(field, "`{}`".format), default_words, about])
    return table(["field", "type", "default", ""], rows)
