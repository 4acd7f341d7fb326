"""Tables of docs/reference/messages.md, and schemas.json in the same folder.

Tests also decode the examples of the page.
"""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ops.docs.tables import (
    HEAD,
    REFERENCE,
    class_doc,
    escaped,
    field_rows,
    field_table,
    one_line,
    structs_in,
    table,
    with_blocks,
)
from shared.protocol import (
    audit,
    batch_log,
    batch_orders,
    exceeded_shares,
    full_stores,
    messages,
    reading,
    records,
    renderer_rpc,
    requests,
    steps,
    task_messages,
)

MODULES = (
    audit,
    batch_log,
    batch_orders,
    exceeded_shares,
    full_stores,
    messages,
    reading,
    records,
    renderer_rpc,
    requests,
    steps,
    task_messages,
)
FILE, SCHEMAS = REFERENCE / "messages.md", REFERENCE / "schemas.json"

_EXAMPLE = re.compile(r"<!-- example (\w+) -->\n\n```json\n(.*?)```", re.DOTALL)


def pages() -> dict[Path, str]:
    """Return the page with its tables written again, and the schemas."""
    kinds = structs()
    makers: dict[str, Callable[[list[str], set[str]], str]] = {
        "fields": lambda names, named: "\n".join(_section(kinds[name]) for name in names),
        "types": lambda names, named: _types([kinds[n] for n in sorted(kinds.keys() - named)]),
    }
    text = with_blocks(FILE.read_text(encoding="utf-8"), makers)
    return {FILE: text, SCHEMAS: schemas()}


def schemas() -> str:
    tree = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Messages of Pagemill",
        "$defs": _components(),
    }
    return json.dumps(tree, indent=1, ensure_ascii=False) + "\n"


def examples(text: str) -> list[tuple[type[Struct], str]]:
    """Return the examples of a page: the type of each, and its JSON."""
    kinds = structs()
    return [(kinds[name], example) for name, example in _EXAMPLE.findall(text)]


@cache
def structs() -> dict[str, type[Struct]]:
    """Return every Struct that the modules of messages define, or that one of theirs holds."""
    return structs_in(
        kind
        for module in MODULES
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Struct) and kind is not Struct
    )


@cache
def _components() -> dict[str, Any]:
    _, components = msgspec.json.schema_components(list(structs().values()))
    return dict(sorted(components.items()))


def _section(kind: type[Struct]) -> str:
    """Return heading, docstring and table of a message of clients."""
    about = class_doc(kind)
    fields = field_table(kind, _components()[kind.__name__], _link)
    return f"#### {kind.__name__}\n\n{about}" + "\n\n" * bool(about) + fields


def _types(kinds: list[type[Struct]]) -> str:
    """Return one table of all `kinds`, with a row for the type itself before its fields."""
    rows = []
    for kind in kinds:
        name, schema = kind.__name__, _components()[kind.__name__]
        layout = "*array*" if "prefixItems" in schema else ""
        title = f'<a id="{name.lower()}"></a>**{name}**'
        rows.append([title, layout, "", escaped(one_line(class_doc(kind)))])
        rows += field_rows(kind, schema, _link)
    return table(HEAD, rows)


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})"
