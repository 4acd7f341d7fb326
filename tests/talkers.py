"""Small random talkers: a Qwen2 that answers a text with a voice by codes."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from tests.generator.voices import NUM_CODES

DEMO_MODEL = Path(__file__).resolve().parents[1] / "ops" / "demo_model"
CODE_OFFSET = 768
VOICES = ("alloy", "echo")
END_ID = CODE_OFFSET + NUM_CODES + len(VOICES)
CONTEXT = 256


def write(folder: Path, seed: int = 4) -> None:
    """Write a talker that ends most speeches after some tens of codes."""
    core = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    core.add_tokens([AddedToken(f"<|code_{n}|>", normalized=False) for n in range(NUM_CODES)])
    special = [*(f"<|voice_{voice}|>" for voice in VOICES), "<|end_of_speech|>"]
    core.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    assert core.token_to_id("<|end_of_speech|>") == END_ID
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end_of_speech|>")
    config = Qwen2Config(
        vocab_size=END_ID + 1,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        eos_token_id=END_ID,
    )
    config.update({"code_offset": CODE_OFFSET, "num_codes": NUM_CODES})
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=2 * weight.shape[1] ** -0.5)
    model.generation_config = GenerationConfig(eos_token_id=END_ID)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class PlainTalker:
    """The same talker in transformers alone, in float64."""

    def __init__(self, folder: Path) -> None:
        model: Any = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float64)
        self._model = model.eval()
        self._tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
        self.speak = cache(self._speak)

    @torch.no_grad()
    def _speak(self, text: str, max_codes: int, voice: str = VOICES[0]) -> tuple[list[int], str]:
        """The greedy codes of a text, and why they end. No other tokens are allowed."""
        prompt = self._tokenizer.encode(text, add_special_tokens=False)
        token_ids = [*prompt, self._tokenizer.convert_tokens_to_ids(f"<|voice_{voice}|>")]
        codes: list[int] = []
        while len(codes) < max_codes:
            logits = self._model(torch.tensor([token_ids])).logits[0, -1]
            allowed = [*range(CODE_OFFSET, CODE_OFFSET + NUM_CODES), END_ID]
            token_id = allowed[int(logits[allowed].argmax())]
            if token_id == END_ID:
                return codes, "stop"
            token_ids.append(token_id)
            codes.append(token_id - CODE_OFFSET)
        return codes, "length"
