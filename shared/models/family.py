"""Model family: one declaration of everything that the workers know about a kind of model.

Each module in `shared.models.families` declares its families in `FAMILIES`. The renderer takes the
media layouts and the tool format from a declaration, encoders and engines the tower, and engines
the positions and the traits of the decoder.
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
"""A property of a decoder that the engine cannot read from its config.

llama_like  Pre-norm layers with RMSNorm and a gated SiLU; biases, norms of heads and windows may
            differ. The C++ kernels and the fused CUDA layers compute such decoders.
one_window  `sliding_window` holds for every layer, although there are no `layer_types`.
"""

ToolFormat = Literal["hermes", "llama3_json", "mistral"]
"""A syntax of tool calls that the gateway parses."""

TalkerKind = Literal["code_predictor", "thinker_states"]
"""A talker by what is special about it: a decoder for further codebooks, or the thinker's hidden
states as its input."""
VocoderKind = Literal["code2wav", "token2wav"]
"""A vocoder with a neural network, by the name of its weights in a model's folder."""


@dataclass(frozen=True, slots=True)
class MediaInput:
    """One modality that a family reads."""

    open_layout: Callable[[Path, Any], MediaLayout | None]
    """Makes the layout of a model folder and its config; None if the folder has none for this
    modality. Raises ConfigError."""
    placeholder: str
    """Name of the placeholder token's id in the config."""

    def placeholder_id(self, config: Any) -> int:
        """The placeholder token of a model; an omni model's is in the config of its thinker."""
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
    """None for a family that reads text only."""
    language: type[LanguageAdapter] = LanguageAdapter
    """Positions of the prompt, and the model's forward pass."""
    model_class: str | None = None
    """Name of the class in transformers, where its auto classes do not tell it."""
    vocoder: VocoderKind | None = None
    """The vocoder in the folders of models that speak."""
    talker: TalkerKind | None = None
    """The talker in these folders."""
    tool_format: ToolFormat | None = None
    """Format of tool calls for chat templates that show no mark of one."""
