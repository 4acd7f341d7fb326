"""Generic families with images: model types with images and without a declaration.

Their images go through transformers' processor and `get_image_features`, and their text through the
generic path of text models. A type qualifies by the sources of its model and of its processor.
"""

from functools import cache

from transformers.models.auto import image_processing_auto
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from shared.models import generic
from shared.models.family import MediaInput, ModelFamily
from shared.models.generic_image import PROCESSORS, GenericImageLayout
from shared.models.generic_tower import (
    GenericLanguage,
    GenericTower,
    PrefixLanguage,
    SpanLanguage,
    UntestedTower,
    WindowSpanLanguage,
)
from shared.protocol.multimodal import IMAGE

# transformers does not declare this table as public.
_IMAGE_PROCESSORS: dict[str, dict[str, str]] = vars(image_processing_auto)[
    "IMAGE_PROCESSOR_MAPPING_NAMES"
]

TESTED_IMAGE_TYPES = frozenset(
    {
        "aria",
        "aya_vision",
        "exaone4_5",
        "gemma3",
        "gemma4",
        "glm46v",
        "glm4v",
        "glm4v_moe",
        "got_ocr2",
        "hyperclovax_vision_v2",
        "idefics3",
        "internvl",
        "lighton_ocr",
        "llava_next",
        "llava_onevision",
        "mistral3",
        "paddleocr_vl",
        "paligemma",
        "qianfan_ocr",
        "qwen3_5",
        "qwen3_5_moe",
        "smolvlm",
        "vipllava",
    }
)
"""Model types whose answers about images a test compares with transformers'."""

_LANGUAGES: dict[str, type[GenericLanguage]] = {
    "gemma3": SpanLanguage,
    "gemma4": WindowSpanLanguage,
    "paligemma": PrefixLanguage,
}
"""Language adapters of types for which the obstacles do not hold."""

_PALIGEMMA_TEMPLATE = """
{%- set prompt = namespace(images='', text='') -%}
{%- for message in messages -%}
{%- if message.role != 'user' -%}
{{- raise_exception('this model answers one message of a user') -}}
{%- endif -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{%- set prompt.images = prompt.images + '<image>' -%}
{%- else -%}{%- set prompt.text = prompt.text + part.text -%}{%- endif -%}
{%- endfor -%}
{%- endfor -%}
{{- prompt.images + bos_token + prompt.text + '\n' -}}
"""
_TEMPLATES = {"paligemma": _PALIGEMMA_TEMPLATE}
"""Chat templates of types without one. They write what the processors of transformers do."""

_OBSTACLES = {
    "def create_masks_for_generate(": (
        "it has a mask of its own, such as for images whose tokens attend to later ones"
    ),
    "deepstack": "features of images are added in later layers (DeepStack)",
    "per_layer_inputs": "its layers use the ids of tokens besides the embeddings",
    "visual_indicator": "embeddings replace more tokens than the placeholders of an image",
    "moe_mm_token_type_ids": "its experts depend on the modality of a token",
    "num_mrope_axes": "its images have placeholders for the ends of rows",
    "vqmodel": "its images are tokens of a codebook",
}
"""Reasons against a type by a string in the source of its model."""


def image_family(model_type: str) -> ModelFamily | None:
    """Return the family of a type without a declared one; None if its images cannot be served."""
    if find_obstacle(model_type) is not None:
        return None
    is_tested = model_type in TESTED_IMAGE_TYPES
    template = _TEMPLATES.get(model_type)
    return ModelFamily(
        model_type,
        frozenset({model_type}),
        media={IMAGE: MediaInput(GenericImageLayout, placeholder="image_token_id")},
        tower=GenericTower if is_tested else UntestedTower,
        language=_LANGUAGES.get(model_type, GenericLanguage),
        chat_template=None if template is None else lambda folder: template,
        source="generic" if is_tested else "generic, untested",
    )


@cache
def find_obstacle(model_type: str) -> str | None:
    """Return the reason why no generic family serves a type with images; None if one does.

    For a type without images, it is the reason against its texts.
    """
    class_name = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type)
    if class_name is None:
        return generic.find_obstacle(model_type) or "it accepts only text"
    source = generic.read_source(class_name)
    if not generic.is_exchangeable(source):
        return generic.FIXED_ATTENTION
    if "def get_image_features(" not in source:
        return "transformers' model of this type does not encode images separately"
    if missing := generic.find_missing_package(model_type):
        return missing
    for mark, obstacle in _OBSTACLES.items():
        if mark in source and model_type not in _LANGUAGES:
            return obstacle
    processor = PROCESSORS.get(model_type)
    if processor is None or "def replace_image_token(" not in generic.read_source(processor):
        return "transformers has no processor of this type that expands the tokens of an image"
    sharing = [name for name, other in PROCESSORS.items() if other == processor]
    if not any(_IMAGE_PROCESSORS.get(name, {}).get("pil") for name in sharing):
        return "transformers' image processor of this type needs torchvision"
    if "logits_to_keep" not in source:
        return "transformers' model of this type computes the logits of all tokens"
    return None
