"""Generic families with sounds: model types without a declaration that hear.

Their sounds go through transformers' processor and `get_audio_features`, and their text through the
generic path of text models. A type qualifies by the sources of its model and of its processor.
"""

from functools import cache

from transformers.models.auto import feature_extraction_auto
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from shared.models import generic, generic_vision
from shared.models.family import MediaInput, ModelFamily
from shared.models.generic_image import PROCESSORS
from shared.models.generic_sound import open_sounds
from shared.models.generic_tower import GenericLanguage, GenericSoundTower, UntestedSoundTower
from shared.protocol.multimodal import AUDIO

_CLASSES = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES | MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
# transformers does not declare this table as public.
_EXTRACTORS: dict[str, str] = vars(feature_extraction_auto)["FEATURE_EXTRACTOR_MAPPING_NAMES"]

TESTED_SOUND_TYPES = frozenset(
    {"audioflamingo3", "glmasr", "moss_transcribe_diarize", "musicflamingo", "qwen3_asr"}
)
"""Model types whose answers about sounds a test compares with transformers'."""

_GETTER = "def get_audio_features("
_MODEL_OBSTACLES = {
    "create_masks_for_generate": "it has a mask of its own",
    "def get_rope_index(": "the positions of sounds are not indexes of tokens",
    "per_layer_inputs": "its layers use the ids of tokens besides the embeddings",
    "randn": "its sounds are encoded with random numbers",
}
"""Reasons against a type by a string in the source of its model."""


def sound_family(model_type: str) -> ModelFamily | None:
    """Return the family of a type without a declared one; None if its sounds cannot be served."""
    if not _hears(model_type) or find_obstacle(model_type) is not None:
        return None
    is_tested = model_type in TESTED_SOUND_TYPES
    return ModelFamily(
        model_type,
        frozenset({model_type}),
        media={AUDIO: MediaInput(open_sounds, placeholder="audio_token_id")},
        tower=GenericSoundTower if is_tested else UntestedSoundTower,
        language=GenericLanguage,
        model_class=_CLASSES[model_type],
        source="generic" if is_tested else "generic, untested",
    )


def _hears(model_type: str) -> bool:
    """Return whether a model class for sounds exists that does not see, too."""
    class_name = _CLASSES.get(model_type)
    if class_name is None or model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return False
    return _GETTER in generic.read_source(class_name)


@cache
def find_obstacle(model_type: str) -> str | None:
    """Return the reason why no generic family serves a model type; None if one does."""
    if not _hears(model_type):
        return generic_vision.find_obstacle(model_type)
    source = generic.read_source(_CLASSES[model_type])
    if generic.EXCHANGEABLE not in source:
        return generic.FIXED_ATTENTION
    for mark, obstacle in _MODEL_OBSTACLES.items():
        if mark in source:
            return obstacle
    extractor = _EXTRACTORS.get(model_type)
    if extractor is not None and "torchaudio" in generic.read_source(extractor):
        return "transformers' feature extractor of this type needs torchaudio"
    processor = PROCESSORS.get(model_type)
    processing = "" if processor is None else generic.read_source(processor)
    if "def replace_audio_token(" not in processing:
        return "transformers has no processor of this type that expands the tokens of a sound"
    if "audio_duration" in processing:
        return "its prompts have the seconds of a sound as text"
    if "logits_to_keep" not in source:
        return "transformers' model of this type computes the logits of all tokens"
    return None
