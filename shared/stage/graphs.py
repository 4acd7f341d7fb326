"""Built-in graphs: the stages of models that speak, after the engine of the text, and of models
that paint, which have no text.

All stages of a graph load parts of the model's folder.
"""

from collections.abc import Mapping
from typing import Any

from shared.config.schema import Graph
from shared.models.image_registry import list_image_families
from shared.protocol.chunks import MAX_FRAMES, ChunkSpec
from shared.protocol.pipeline import (
    ANSWER,
    AUDIO,
    CODES,
    IMAGE_KIND,
    REQUEST,
    TEXT,
    Edge,
    OutputSpec,
    StageSpec,
)

TALKER, CODE2WAV, DIT = "talker", "code2wav", "dit"


def graph_of(model_config: Mapping[str, Any]) -> Graph | None:
    """Return the graph of a model by the parts in its `config.json`; None if it does not speak."""
    # The folder may lack the talker.
    if not model_config.get("talker_config") or model_config.get("enable_audio_output") is False:
        return None
    return next((graph for part, graph in _GRAPHS.items() if model_config.get(part)), None)


def stages_of(graph: Graph | None, writer: str) -> list[tuple[StageSpec, list[Edge]]]:
    """Return the stages of a graph with their input edges; the stage `writer` writes the text."""
    if graph is None or graph not in _TALKERS:
        return []
    return [
        (_TALKERS[graph], [Edge(writer, TALKER, TEXT, ANSWER, "stream")]),
        (_VOCODERS[graph], [Edge(TALKER, CODE2WAV, CODES, "follow", "stream")]),
    ]


def painter_of(graph: Graph | None) -> tuple[StageSpec, Edge] | None:
    """Return the only stage of a model that paints, and its input; None for other graphs."""
    family = next((family for family in list_image_families() if family.name == graph), None)
    if family is None:
        return None
    stage = StageSpec(
        DIT,
        "generator",
        sampling_defaults={"steps": family.steps, "guidance": family.guidance},
        output=OutputSpec(IMAGE_KIND, IMAGE_KIND),
        sizes=list(family.sizes),
    )
    return stage, Edge(REQUEST, DIT, "prompt", "paint")


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
}
_VOCODERS = {
    # 12.5 frames a second. The first chunk has 4 frames, and 0.4 seconds of sound.
    "qwen3-omni": _vocoder(ChunkSpec(first=(4, 10), size=25, left=25, right=1)),
    # 50 frames a second. Frames depend on each other, so each chunk is made from the whole.
    "qwen2.5-omni": _vocoder(
        ChunkSpec(size=500, left=MAX_FRAMES, right=MAX_FRAMES, max_ahead=2 * MAX_FRAMES)
    ),
}
