"""A small random Orpheus with its codec, and its speech by transformers and the package `snac`."""

import json
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from snac import SNAC
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PLACES, NUM_CODES = 7, 4096
SAMPLES_PER_FRAME = 2048
CONTROLS = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
CUSTOM = [f"<custom_token_{number}>" for number in range(10 + PLACES * NUM_CODES)]
PENALTY = 1.3
SNAC_CONFIG = {
    "sampling_rate": 24000,
    "encoder_dim": 4,
    "encoder_rates": [2, 4, 8, 8],
    "decoder_dim": 64,
    "decoder_rates": [8, 8, 4, 2],
    "attn_window_size": None,
    "codebook_size": NUM_CODES,
    "codebook_dim": 8,
    "vq_strides": [4, 2, 1],
    "noise": True,
    "depthwise": True,
}


def write_tokenizer(folder: Path) -> int:
    """Write a tokenizer with a token for each byte and those of Orpheus; return its size."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, normalized=False) for token in CONTROLS])
    core.add_tokens([AddedToken(token, normalized=False) for token in CUSTOM])
    special = {"bos_token": CONTROLS[0], "eos_token": CONTROLS[1], "pad_token": CUSTOM[7]}
    PreTrainedTokenizerFast(tokenizer_object=core, **special).save_pretrained(folder)
    return core.get_vocab_size()


def write(folder: Path, context: int = 512, seed: int = 5) -> None:
    """Write a model. As in the hub's folders, its files name the ends of texts alone."""
    vocab_size = write_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=context,
        bos_token_id=256,
        eos_token_id=[257, 258],
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=2 * weight.shape[1] ** -0.5)
    # Speeches of a few tens of frames end by themselves.
    end = CUSTOM_IDS[2]
    model.lm_head.weight.data[end] *= 1.7
    model.generation_config = GenerationConfig(eos_token_id=[257, 258])
    model.save_pretrained(folder)


def write_snac(folder: Path) -> None:
    """Write a codec in the format of the hub: tensors in a file of torch, without a type."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(3)
    model = SNAC(**SNAC_CONFIG)
    for name, weight in model.named_parameters():
        if "original1" in name or "codebook" in name:
            weight.data.normal_(0, 0.5)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(SNAC_CONFIG))


CUSTOM_IDS = range(256 + len(CONTROLS), 256 + len(CONTROLS) + len(CUSTOM))


class PlainOrpheus:
    """The same model in transformers, and the same codec in its own package, in float64."""

    def __init__(self, folder: Path, codec: Path | None = None) -> None:
        model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
        self._model = model.eval()
        self._tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
        self._codec = None if codec is None else load_snac(codec)
        self.speak = cache(self._speak)

    def prompt(self, text: str, voice: str) -> list[int]:
        """Return the prompt of the package `orpheus-speech`."""
        inner = self._tokenizer.encode(f"{voice}: {text}", add_special_tokens=False)
        after = [258, CUSTOM_IDS[4], CUSTOM_IDS[5], CUSTOM_IDS[1]]
        return [CUSTOM_IDS[3], 256, *inner, *after]

    @torch.no_grad()
    def _speak(self, text: str, max_tokens: int, voice: str = "tara") -> tuple[list[int], str]:
        """Return the greedy tokens of a text, and why they end: codes of each place in turn."""
        prompt = self.prompt(text, voice)
        end = CUSTOM_IDS[2]

        def allowed(_: int, token_ids: torch.Tensor) -> list[int]:
            place = (len(token_ids) - len(prompt)) % PLACES
            codes = CUSTOM_IDS[10 + place * NUM_CODES : 10 + (place + 1) * NUM_CODES]
            return [*codes, *([] if place else [end])]

        tokens = self._model.generate(
            torch.tensor([prompt]),
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=max_tokens,
                repetition_penalty=PENALTY,
                eos_token_id=end,
                pad_token_id=end,
            ),
            prefix_allowed_tokens_fn=allowed,
        )[0, len(prompt) :].tolist()
        return (tokens[:-1], "stop") if tokens[-1] == end else (tokens, "length")

    def frames(self, tokens: list[int]) -> list[list[int]]:
        codes = [token - CUSTOM_IDS[10] - i % PLACES * NUM_CODES for i, token in enumerate(tokens)]
        whole = len(codes) // PLACES * PLACES
        return [codes[i : i + PLACES] for i in range(0, whole, PLACES)]

    def sound(self, frames: list[list[int]], seed: int) -> NDArray[np.int16]:
        """Return the samples of a whole speech."""
        assert self._codec is not None
        sound = decode(self._codec, frames, seed)
        return np.clip(np.rint(sound * 32767), -32768, 32767).astype(np.int16)


def load_snac(folder: Path) -> Any:
    codec: Any = SNAC(**json.loads((folder / "config.json").read_text()))
    codec.load_state_dict(torch.load(folder / "pytorch_model.bin", weights_only=True))
    return codec.double().eval()


@torch.inference_mode()
def decode(codec: Any, frames: list[list[int]], seed: int) -> NDArray[np.float64]:
    """Decode a whole speech by SNAC itself. Its noise is the product's: each frame has its own."""
    blocks = count()

    def randn(size: tuple[int, ...], device: Any, dtype: Any) -> torch.Tensor:
        block, length = next(blocks), size[-1] // len(frames)
        rows = [
            np.random.Generator(
                np.random.Philox(key=[seed, block], counter=[0, 0, 0, frame])
            ).standard_normal(length)
            for frame in range(len(frames))
        ]
        return torch.from_numpy(np.concatenate(rows)).view(size)

    first = [f[0] for f in frames]
    second = [code for f in frames for code in (f[1], f[4])]
    third = [code for f in frames for code in (f[2], f[3], f[5], f[6])]
    with patch.object(torch, "randn", randn):
        sound = codec.decode([torch.tensor([codes]) for codes in (first, second, third)])
    samples: NDArray[np.float64] = sound[0, 0].numpy()
    return samples
