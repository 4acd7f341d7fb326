"""Talker: an ordinary Qwen2 that is prompted with a text and answers with codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from ops.training.folders import SEEING
from ops.training.folders import VOICE as VOICE_FOLDER
from ops.training.trainer import init_normal
from ops.training.voice.codec import NUM_CODES

CODE_OFFSET = 768
VOICE = "<|voice_alloy|>"
END = "<|end_of_speech|>"
VOICE_ID = CODE_OFFSET + NUM_CODES
END_ID = VOICE_ID + 1
PAD_ID = 754
CONTEXT = 1024
MOST_CODES = 400
CHAT_TEMPLATE = VOICE_FOLDER / "talker" / "chat_template.jinja"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The demo model's tokenizer with tokens for codes, the voice and the end of speech."""
    core = Tokenizer.from_file(str(SEEING / "tokenizer.json"))
    core.add_tokens([AddedToken(f"<|code_{n}|>", normalized=False) for n in range(NUM_CODES)])
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (VOICE, END)])
    assert core.token_to_id("<|code_0|>") == CODE_OFFSET
    assert core.token_to_id(END) == END_ID
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token="<|endoftext|>",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE.read_text(encoding="utf-8")
    return tokenizer


def build_model(width: int, layers: int) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=END_ID + 1,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )
    config.update({"code_offset": CODE_OFFSET, "num_codes": NUM_CODES})
    model = Qwen2ForCausalLM(config)
    init_normal(model, residual=("o_proj.weight", "down_proj.weight"))
    model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=MOST_CODES, eos_token_id=END_ID, pad_token_id=PAD_ID
    )
    return model


def prompt_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return [*ids, VOICE_ID]


@torch.no_grad()
def speak(model: Qwen2ForCausalLM, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the greedy codes of each prompt. Prompts of one length share a batch."""
    groups: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        groups.setdefault(len(prompt), []).append(number)
    spoken: list[list[int]] = [[] for _ in prompts]
    for length, numbers in groups.items():
        ids = torch.tensor([prompts[number] for number in numbers])
        generator: Any = model
        rows = generator.generate(ids, attention_mask=torch.ones_like(ids)).tolist()
        for number, row in zip(numbers, rows, strict=True):
            spoken[number] = codes_in(row[length:])
    return spoken


def codes_in(tokens: Sequence[int]) -> list[int]:
    """Return the codes before the first other token."""
    codes = []
    for token in tokens:
        if not CODE_OFFSET <= token < CODE_OFFSET + NUM_CODES:
            break
        codes.append(token - CODE_OFFSET)
    return codes
