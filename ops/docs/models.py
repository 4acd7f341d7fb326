"""The table of model families in docs/guide/models.md, from the registry."""

from dataclasses import replace
from pathlib import Path

from ops.docs.tables import table, with_blocks
from shared.models import registry
from shared.models.family import ModelFamily
from shared.protocol.multimodal import AUDIO, IMAGE

FILE = Path(__file__).parents[2] / "docs" / "guide" / "models.md"
HEAD = ["family", "`model_type`", "in", "out", "how", "parity"]
PARITY = {
    "native": "tokens in float32, any schedule",
    "generic": "tokens in float64, any schedule; logits at each start",
    "generic, untested": "logits at each start",
}


def pages() -> dict[Path, str]:
    text = FILE.read_text(encoding="utf-8")
    return {FILE: with_blocks(text, {"families": lambda *_: table(HEAD, _rows())})}


def _rows() -> list[list[str]]:
    families = registry.list_families()
    rows = [_row(f.name, f.model_types, f) for f in families if f.source == "native"]
    for kind in ("text", IMAGE, AUDIO):
        generic = [f for f in families if f.source != "native" and (*f.media, "text")[0] == kind]
        model_types = frozenset().union(*(family.model_types for family in generic))
        rows.append(_row(f"further {kind} models", model_types, generic[0]))
        untested = replace(generic[0], source="generic, untested")
        rows.append(_row(f"other {kind} models", frozenset(), untested))
    return rows


def _row(name: str, model_types: frozenset[str], family: ModelFamily) -> list[str]:
    types = ", ".join(f"`{model_type}`" for model_type in sorted(model_types))
    outputs = "text, speech" if family.talker else "text"
    return [
        name,
        types or "any that the start accepts",
        ", ".join(["text", *family.media]),
        outputs,
        family.source.partition(",")[0],
        PARITY[family.source],
    ]
