"""The table of model families in docs/guide/models.md, from the registry."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from transformers import AutoConfig

from ops.docs.tables import table, with_blocks
from shared.models import registry
from shared.models.family import ModelFamily
from shared.protocol.multimodal import AUDIO, IMAGE

FILE = Path(__file__).parents[2] / "docs" / "guide" / "models.md"
HEAD = ["family", "`model_type`", "in", "out", "how", "quantized", "parity", "trained weights"]
PARITY = {
    "native": "tokens in float32, any schedule",
    "generic": "tokens in float64, any schedule; logits at each start",
    "generic, untested": "logits at each start",
}
TRAINED = {
    "Llama": "SmolLM2-135M-Instruct",
    "Qwen2-VL": "[ops/demo_model](../../ops/demo_model/README.md)",
    "Qwen2.5-Omni": "[ops/demo_hearing](../../ops/demo_hearing/README.md)",
}
"""Checkpoints with trained weights that answered in tests, by family."""


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
        _quantizations(model_types),
        PARITY[family.source],
        TRAINED.get(name, "-"),
    ]


def _quantizations(model_types: Iterable[str]) -> str:
    """Return the quantizations of a row; `int8` needs linear layers, which experts are not."""
    with_experts = {"expert" in AutoConfig.for_model(t).to_json_string() for t in model_types}
    if with_experts == {False}:
        return "stored, int8"
    return "stored" if with_experts == {True} else "stored; int8 without experts"
