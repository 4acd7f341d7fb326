"""A LLaVA 1.5 with random weights, small enough to be made on the spot, and an image for it."""

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, normalizers, processors
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

IMAGE_SIZE, PATCH_SIZE = 42, 14
# As LLaVA 1.5's: it looks at parts only, writes images before texts, and no BOS.
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role != 'system' %}{{ m.role.upper() + ': ' }}{% endif %}"
    "{% for part in m.content if part.type == 'image' %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in m.content if part.type == 'text' %}{{ part.text + ' ' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
TEXT = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "projection_dim": 16,
    "image_size": IMAGE_SIZE,
    "patch_size": PATCH_SIZE,
}
PREPROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": IMAGE_SIZE},
    "crop_size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
}

Strategy = Literal["default", "full"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """In Llama's manner: single characters, bytes for all others, a BOS, and `▁` before words."""
    special = ["<unk>", "<s>", "</s>"]
    characters = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", *map(chr, range(33, 127))]
    vocabulary = {token: i for i, token in enumerate([*special, *characters])}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    tokenizer.add_special_tokens([AddedToken(s, normalized=False) for s in [*special, "<image>"]])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def make_config(
    *, layer: int | list[int] = -2, strategy: Strategy = "default", **special: Any
) -> LlavaConfig:
    """`special`: `image_token_id` and, of the text model, `vocab_size` and its special tokens."""
    image_token_id = special.pop("image_token_id")
    return LlavaConfig(
        text_config=TEXT | special,
        vision_config=VISION,
        image_token_index=image_token_id,
        vision_feature_layer=layer,
        vision_feature_select_strategy=strategy,
    )


def widen(model: PreTrainedModel) -> None:
    """Random weights large enough for the answers to vary; the usual ones repeat one token."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            spread = 2.0 * parameter[0].numel() ** -0.5
            parameter.data.normal_(0, spread, generator=generator)
        elif name.endswith("bias"):
            parameter.data.normal_(0, 0.3, generator=generator)


def write_processor(
    folder: Path,
    *,
    layer: int | list[int] = -2,
    strategy: Strategy = "default",
    template: str = CHAT_TEMPLATE,
    **preprocessor: Any,
) -> LlavaConfig:
    """A model folder without weights."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    settings = {
        "processor_class": "LlavaProcessor",
        "image_token": "<image>",
        "patch_size": PATCH_SIZE,
        "vision_feature_select_strategy": strategy,
        "num_additional_image_tokens": 1,
    }
    (folder / "processor_config.json").write_text(json.dumps(settings))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR | preprocessor))
    config = make_config(
        layer=layer,
        strategy=strategy,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    config.save_pretrained(folder)
    return config


def write_model(folder: Path, **settings: Any) -> LlavaForConditionalGeneration:
    """A model folder with random weights, and the model in it; `settings` of `write_processor`."""
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(write_processor(folder, **settings))
    model.eval()
    widen(model)
    model.save_pretrained(folder)
    model.requires_grad_(False)
    return model


def draw_image(seed: int, width: int, height: int) -> Image.Image:
    """Noise on a gradient, so that resizing leaves something to see."""
    rng = np.random.default_rng(seed)
    rows, columns = np.indices((height, width))
    ramp = np.stack([255 * rows / height, 255 * columns / width, 0 * rows], axis=-1)
    noise = rng.integers(0, 256, (height, width, 3)) * rng.random(3)
    return Image.fromarray(((ramp + noise) % 256).astype(np.uint8))
