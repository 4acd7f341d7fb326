"""Write the tables of docs/reference/messages.md, and schemas.json beside it.

The tables stand between `<!-- fields NAMES -->` or `<!-- types -->` and `<!-- end -->`; the prose
around them stays as it is. A test compares both files with the output, and decodes the examples.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ops.struct_tables import (
    HEAD,
    class_doc,
    escaped,
    field_rows,
    field_table,
    one_line,
    structs_in,
    table,
)
from shared.protocol import (
    audit,
    exceeded_shares,
    messages,
    records,
    renderer_rpc,
    requests,
    steps,
    task_messages,
)

MODULES = (audit, exceeded_shares, messages, records, renderer_rpc, requests, steps, task_messages)
FOLDER = Path(__file__).parent.parent / "docs" / "reference"
FILE = FOLDER / "messages.md"
SCHEMAS = FOLDER / "schemas.json"

_BLOCK = re.compile(r"(<!-- (?:fields ([\w ]+)|types) -->\n).*?(<!-- end -->)", re.DOTALL)
_EXAMPLE = re.compile(r"<!-- example (\w+) -->\n\n```json\n(.*?)```", re.DOTALL)


def rewritten(text: str) -> str:
    """Return the page with its tables replaced by those of the types."""
    kinds = structs()
    above = " ".join(names for _, names, _ in _BLOCK.findall(text)).split()

    def block(match: re.Match[str]) -> str:
        begin, names, end = match.groups()
        if names:
            tables = "\n".join(_section(kinds[name]) for name in names.split())
        else:
            tables = _types([kinds[name] for name in sorted(kinds.keys() - set(above))])
        return f"{begin}\n{tables}\n{end}"

    return _BLOCK.sub(block, text)


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


if __name__ == "__main__":
    FILE.write_text(rewritten(FILE.read_text(encoding="utf-8")), encoding="utf-8")
    SCHEMAS.write_text(schemas(), encoding="utf-8")
