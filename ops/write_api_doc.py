"""Write the tables of docs/reference/http-api.md: endpoints, errors, fields of bodies and answers.

A table stands between `<!-- NAME -->` and `<!-- end -->`. The prose around the tables is left
unchanged. The causes of errors are those of docs/operate/troubleshooting.md. A test checks that the
file is up to date.
"""

import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

from msgspec import Struct

from ops.struct_tables import code, escaped, field_docs, structs_in, table, type_words
from shared.protocol.sampling import SamplingParams
from workers.gateway.http import errors
from workers.gateway.openapi.document import OPERATIONS, document, types_of
from workers.gateway.schemas.sampling_fields import SAME_FORM, SamplingFields

DOCS = Path(__file__).parent.parent / "docs"
FILE = DOCS / "reference" / "http-api.md"
TROUBLESHOOTING = DOCS / "operate" / "troubleshooting.md"
BLOCK = re.compile(r"(<!-- (\w+)(?: (\w+))? -->\n).*?(<!-- end -->)", re.DOTALL)
_CAUSE = re.compile(r"^\| `(\w+)` \| (\d+|-) \| (?:yes|no) \| ([^|]+) \|", re.MULTILINE)


def main() -> None:
    FILE.write_text(rewritten(FILE.read_text(encoding="utf-8")), encoding="utf-8")


def rewritten(text: str) -> str:
    structs = structs_in([*types_of(OPERATIONS), errors.ErrorAnswer])
    above = {name for _, kind, name, _ in BLOCK.findall(text) if kind == "fields"}

    def block(match: re.Match[str]) -> str:
        begin, kind, name, end = match.groups()
        match kind:
            case "endpoints":
                made = _endpoints()
            case "errors":
                made = _errors()
            case "types":
                made = _types(structs, above)
            case _:
                made = _fields(name, structs[name])
        return f"{begin}\n{made}\n{end}"

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
    return table(["", "", "body", "answer", "counted"], rows)


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
    causes = _CAUSE.findall(TROUBLESHOOTING.read_text(encoding="utf-8"))
    rows = [[status, f"`{code}`", cause] for code, status, cause in causes if code in used]
    return table(["status", "code", ""], sorted(rows))


@cache
def _schemas() -> dict[str, Any]:
    return dict(document()["components"]["schemas"])


def _types(structs: dict[str, Any], above: set[str]) -> str:
    """Return a table of each type that has none above."""
    rest = sorted(structs.keys() - above)
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
        shown = "required" if key in required else "-" if default is None else code(default)
        about = escaped(docs.get(key, ""))
        rows.append([f"`{key}`", type_words(field, "`{}`".format), shown, about])
    return table(["field", "type", "default", ""], rows)


if __name__ == "__main__":
    main()
