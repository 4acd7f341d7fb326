"""Markdown tables of Struct fields: key, type in words, default, and the field's docstring.

They stand between `<!-- KIND NAMES -->` and `<!-- end -->` of a page.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
from msgspec import Struct

Link = Callable[[str], str]

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
HEAD = ["field", "type", "default", "meaning"]


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_blocks(text: str, makers: Mapping[str, Callable[[list[str], set[str]], str]]) -> str:
    """Return a page with the content of its blocks written again, by the kind of the block.

    A maker gets the names of its block, and the names of all blocks.
    """
    kinds = "|".join(makers)
    block = re.compile(rf"(<!-- ({kinds})((?: \w+)*) -->\n).*?(<!-- end -->)", re.DOTALL)
    named = {name for match in block.finditer(text) for name in match[3].split()}

    def write(match: re.Match[str]) -> str:
        begin, kind, names, end = match.groups()
        return f"{begin}\n{makers[kind](names.split(), named)}\n{end}"

    return block.sub(write, text)


def structs_in(kinds: Iterable[Any]) -> dict[str, type[Struct]]:
    """Return all Structs that `kinds` consist of, by name, in the order in which they are met."""
    structs: dict[str, type[Struct]] = {}
    pending = list(kinds)
    while pending:
        kind = pending.pop(0)
        pending += get_args(kind)
        if not inspect.isclass(kind) or not issubclass(kind, Struct) or kind.__name__ in structs:
            continue
        structs[kind.__name__] = kind
        pending += get_type_hints(kind, include_extras=True).values()
    return structs


@cache
def field_docs(cls: type[Struct]) -> dict[str, str]:
    """Return the string that follows each field in the source, by field, in one line."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not issubclass(base, Struct) or base is Struct:
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                assert isinstance(field.target, ast.Name)
                assert isinstance(text.value, ast.Constant)
                docs[field.target.id] = one_line(str(text.value.value))
    return docs


def class_doc(cls: type[Struct]) -> str:
    """Return the docstring of a Struct, without the one that msgspec adds."""
    return inspect.cleandoc(cls.__dict__.get("__doc__") or "")


def field_table(cls: type[Struct], schema: dict[str, Any], link: Link) -> str:
    """Return the table of `cls` with JSON schema `schema`; `link` writes the name of a type."""
    return table(HEAD, field_rows(cls, schema, link))


def field_rows(cls: type[Struct], schema: dict[str, Any], link: Link) -> list[list[str]]:
    docs = field_docs(cls)
    fields = msgspec.structs.fields(cls)
    if "prefixItems" in schema:
        schemas = dict(zip([f.name for f in fields], schema["prefixItems"], strict=True))
    else:
        schemas = schema["properties"]
    names = {field.encode_name: field for field in fields}
    rows = []
    for key, described in schemas.items():
        # The tag of a union has no field.
        field = names.get(key)
        about = docs.get(field.name, "") if field else ""
        rows.append([f"`{key}`", type_words(described, link), default_of(field), escaped(about)])
    return rows


def default_of(field: Any) -> str:
    """Return the default of a field in words; a field that does not exist has none."""
    if field is None or field.required:
        return "required" if field else "-"
    if field.default_factory is not msgspec.NODEFAULT:
        return code(field.default_factory())
    if field.default is None or field.default is msgspec.UNSET:
        return "-"
    return code(field.default)


def type_words(schema: dict[str, Any], link: Link) -> str:
    """Return a JSON schema in a few words."""
    if "$ref" in schema:
        return link(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        kinds = [type_words(kind, link) for kind in schema["anyOf"] if kind.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(code(value) for value in values if value is not None)
    kind = schema.get("type", "anything")
    if kind == "null":
        return "only `null`"
    if kind == "array" and "prefixItems" in schema:
        return "[" + ", ".join(type_words(item, link) for item in schema["prefixItems"]) + "]"
    if kind == "array":
        return "list of " + type_words(schema.get("items") or {}, link) + _size(schema, "Items")
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return "object of " + type_words(schema["additionalProperties"], link)
    if schema.get("contentEncoding") == "base64":
        return "bytes"
    pattern = f", `{schema['pattern']}`".replace("|", "\\|") if "pattern" in schema else ""
    return str(kind) + _size(schema, "Length") + _bounds(schema) + pattern


def _size(schema: dict[str, Any], unit: str) -> str:
    least, most = schema.get(f"min{unit}"), schema.get(f"max{unit}")
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


def code(value: Any) -> str:
    return f"`{msgspec.json.encode(value).decode()}`"


def escaped(text: str) -> str:
    return text.replace("|", "\\|")


def one_line(text: str) -> str:
    return " ".join(inspect.cleandoc(text).split())
