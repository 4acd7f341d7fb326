"""Model family: one declaration of everything that is specific to a kind of model.

Each module in `shared.models.families` declares its families in `FAMILIES`. The renderer uses the
media layouts and the tool format of a declaration, encoders and engines the tower, and engines the
positions and the traits of the decoder.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shared.models.language import LanguageAdapter
from shared.models.layout import MediaLayout
from shared.models.tower_adapter import TowerAdapter
from shared.protocol.multimodal import Modality

DecoderTrait = Literal["llama_like", "one_window"]
"""Property of a decoder that the engine cannot read from its config.

llama_like  Pre-norm layers with RMSNorm and a gated SiLU; biases, norms of heads and windows may
            differ. The C++ kernels and the fused CUDA layers compute such decoders.
one_window  `sliding_window` holds for every layer, although there are no `layer_types`.
"""

ToolFormat = Literal["hermes", "llama3_json", "mistral"]
"""Syntax of tool calls that the gateway parses."""

TalkerKind = Literal["code_predictor", "thinker_states"]
"""Kind of a talker: with a decoder for further codebooks, or with the thinker's hidden states as
input."""
VocoderKind = Literal["code2wav", "token2wav"]
"""Kind of a vocoder with a neural network: the name of its weights in a model's folder."""

Source = Literal["native", "generic", "generic, untested"]
"""Origin of a family: a declaration, or the model's class in transformers, with or without a test
of its type."""


@dataclass(frozen=True, slots=True)
class MediaInput:
    """One modality that a family accepts."""

    open_layout: Callable[[Path, Any], MediaLayout | None]
    """Opens the layout of a model folder with its config; returns None if the folder has none for
    this modality. Raises ConfigError."""
    placeholder: str
    """Name of the config's key with the placeholder token."""

    def placeholder_id(self, config: Any) -> int:
        """Return the placeholder token of a model. Omni models have it in the thinker's config."""
        token_id: int = getattr(getattr(config, "thinker_config", config), self.placeholder)
        return token_id


@dataclass(frozen=True, slots=True)
class ModelFamily:
    name: str
    model_types: frozenset[str]
    """Values of `model_type` in config.json."""
    decoders: Mapping[str, frozenset[DecoderTrait]] = field(default_factory=dict)
    """Traits of the family's decoders by the `model_type` of their text config."""
    media: Mapping[Modality, MediaInput] = field(default_factory=dict)
    tower: type[TowerAdapter] | None = None
    """None for a family that accepts only text."""
    language: type[LanguageAdapter] = LanguageAdapter
    """Positions of the prompt, and the model's forward pass."""
    model_class: str | None = None
    """Name of the class in transformers, if the auto classes do not find it."""
    vocoder: VocoderKind | None = None
    """Vocoder in the model folders; None if they have none."""
    talker: TalkerKind | None = None
    """Talker in the model folders; None if they have none."""
    chat_template: Callable[[Path], str] | None = None
    """Returns the chat template of a model folder without one, or raises ConfigError; None if the
    folder must have one."""
    tool_format: ToolFormat | None = None
    """Format of tool calls for chat templates without the mark of a format."""
    source: Source = "native"
