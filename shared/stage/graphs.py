"""Built-in graphs: the stages of models that speak or paint.

An omni model speaks the answers of its engine, and all stages load parts of its folder. A model of
speech, such as Orpheus, speaks the texts of requests, and its vocoder has a separate folder. Models
that paint have one stage, and two more if the configuration names them: the encoder of texts and
the decoder of latents.
"""

import json
from collections.abc import Collection
from pathlib import Path

import msgspec

from shared.config.added_tokens import read_token_ids
from shared.config.schema import Graph
from shared.models.image_folder import find_family_of
from shared.models.image_registry import list_image_families
from shared.protocol.chunks import MAX_FRAMES, ChunkSpec
from shared.protocol.code_tokens import ORPHEUS_VOICES, is_orpheus
from shared.protocol.pipeline import (
    ANSWER,
    AUDIO,
    CODES,
    IMAGE_KIND,
    LATENTS,
    REQUEST,
    TEXT,
    TEXTS,
    VIDEO_KIND,
    Edge,
    OutputSpec,
    StageSpec,
)

TALKER, CODE2WAV, DIT = "talker", "code2wav", "dit"
PARTS = {"text_encoder": TEXTS, "vae": LATENTS}
"""Stages that take work from a stage that paints, and what they get of it."""
ORPHEUS: Graph = "orpheus"
ORPHEUS_CODEC = "hubertsiuzdak/snac_24khz"
"""Name on the hub of the codec that Orpheus was trained with."""


def graph_of_folder(folder: Path) -> Graph | None:
    """Return the graph of the model in a folder.

    Returns None for a model that only writes text, and if the folder cannot be read here.
    """
    if (family := find_family_of(folder)) is not None:
        graph: Graph = msgspec.convert(family.name, Graph)
        return graph
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    # The folder may lack the talker.
    if config.get("talker_config") and config.get("enable_audio_output") is not False:
        return next((graph for part, graph in _GRAPHS.items() if config.get(part)), None)
    return ORPHEUS if is_orpheus(read_token_ids(folder)) else None


def writes_text(graph: Graph | None) -> bool:
    """Return whether a model with this graph writes texts. Others only speak or paint."""
    return graph != ORPHEUS and _find_painter(graph) is None


def stages_of(
    graph: Graph | None, writer: str, named: Collection[str]
) -> list[tuple[StageSpec, list[Edge]]]:
    """Return the stages of a graph with their input edges.

    The stage `writer` writes the text. `named` are the stages that the configuration names.
    """
    if (painter := _find_painter(graph)) is not None:
        parts = [
            (StageSpec(name, painter.role), [Edge(DIT, name, carries, "item", "fan_out")])
            for name, carries in PARTS.items()
            if name in named
        ]
        return [(painter, [Edge(REQUEST, DIT, "prompt", "paint")]), *parts]
    if graph is None or graph not in _TALKERS:
        return []
    text = Edge(writer, TALKER, TEXT, ANSWER, "stream")
    if not writes_text(graph):
        text = Edge(REQUEST, TALKER, TEXT, "speech")
    return [
        (_TALKERS[graph], [text]),
        (_VOCODERS[graph], [Edge(TALKER, CODE2WAV, CODES, "follow", "stream")]),
    ]


def _find_painter(graph: Graph | None) -> StageSpec | None:
    family = next((family for family in list_image_families() if family.name == graph), None)
    if family is None:
        return None
    kind = IMAGE_KIND if family.video is None else VIDEO_KIND
    return StageSpec(
        DIT,
        "generator",
        sampling_defaults={"steps": family.steps, "guidance": family.guidance},
        output=OutputSpec(kind, kind),
        sizes=list(family.sizes),
        size_rule=family.size_rule,
        video=family.video,
        input_images=family.input_images,
    )


def _talker(voices: list[str], **sampling: float) -> StageSpec:
    return StageSpec(
        TALKER,
        "engine",
        sampling_defaults={"temperature": 0.9, "repetition_penalty": 1.05, **sampling},
        output=OutputSpec(CODES, CODES),
        voices=voices,
    )


def _vocoder(chunks: ChunkSpec) -> StageSpec:
    sound = OutputSpec(AUDIO, AUDIO, timed=True)
    return StageSpec(CODE2WAV, "generator", output=sound, chunks=chunks)


# The key is the name of the vocoder in `config.json`.
_GRAPHS: dict[str, Graph] = {"code2wav_config": "qwen3-omni", "token2wav_config": "qwen2.5-omni"}
# The sampling parameters are the defaults of `generate` in transformers.
_TALKERS = {
    "qwen3-omni": _talker(["Ethan", "Chelsie", "Aiden"], top_k=50, max_tokens=4096),
    "qwen2.5-omni": _talker(["Chelsie", "Ethan"], top_k=40, top_p=0.8, max_tokens=4096),
    # The defaults of its package, with seven tokens a frame.
    ORPHEUS: _talker(
        [*ORPHEUS_VOICES], temperature=0.6, top_p=0.8, repetition_penalty=1.3, max_tokens=3500
    ),
}
_VOCODERS = {
    # 12.5 frames a second. The first chunk has 4 frames, and 0.4 seconds of sound.
    "qwen3-omni": _vocoder(ChunkSpec(first=(4, 10), size=25, left=25, right=1)),
    # 50 frames a second. Frames depend on each other, so each chunk is made from the whole.
    "qwen2.5-omni": _vocoder(
        ChunkSpec(size=500, left=MAX_FRAMES, right=MAX_FRAMES, max_ahead=2 * MAX_FRAMES)
    ),
    # 11.7 frames a second. The first chunk has 3 frames, and 0.26 seconds of sound.
    ORPHEUS: _vocoder(ChunkSpec(first=(3, 9), size=24, left=3, right=3)),
}
