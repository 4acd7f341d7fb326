"""Compare the engine with `generate` of transformers for a model of each kind, in one process.

Both have the same dtype and threads, and take turns. Each model has random weights and layers of
512 numbers, 8 for text and 4 for images. An answer has 64 tokens, after a prompt of 64 tokens, an
image, or a sound. `generate` computes eight answers as one batch without padding. Tokens per second
include the prompt and the encoder, and are the best of several turns. `of transformers` is the
ratio to `generate`.

    python -m ops.bench.kinds [--only KIND ...] [--dtype bfloat16]
"""

import argparse
import copy
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from ops.bench.models import randomize
from ops.harness.tables import print_table
from ops.rendering import render
from shared.client import new_request_id
from shared.config.schema import EngineConfig, ModelConfig
from shared.models.media import DecodedImage
from shared.native.choices import KernelSetting
from tests import llava, whisper
from tests.engine.model.test_parity import draw_image
from tests.engine.model.test_parity import make_case as text_case
from tests.models import (
    rig,
    test_generic,
    test_generic_images,
    test_hybrids,
    test_whisper,
    vision_specs,
)
from tests.sounds import draw_sound, extract, transformers
from workers.engine.core.engine import EngineCore
from workers.engine.core.sequence import EngineRequest
from workers.engine.loader import load
from workers.engine.main import build_core
from workers.renderer.processing.processor import Processor

NUM_STREAMS = (1, 8)
NUM_TOKENS = 64
NUM_TURNS = 2
TEXT = "Describe what you see, in the words of a sailor, please."
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
TEXT_SIZES = SIZES | {
    "vocab_size": 8192,
    "num_hidden_layers": 8,
    "sliding_window": 128,
    "max_position_embeddings": 1024,
}
EXPERTS = {
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "intermediate_size": 704,
    "moe_intermediate_size": 704,
}
LATENTS = {
    "num_key_value_heads": 8,
    "q_lora_rank": 192,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "head_dim": 32,
    "v_head_dim": 64,
}
DELTAS = {"linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
WHISPER_SIZES = {
    "d_model": 512,
    "encoder_layers": 8,
    "encoder_attention_heads": 8,
    "encoder_ffn_dim": 2048,
    "decoder_layers": 8,
    "decoder_attention_heads": 8,
    "decoder_ffn_dim": 2048,
    "max_target_positions": 448,
}


@dataclass(frozen=True)
class Work:
    """A model of transformers with its questions, each for both sides."""

    model: Any
    requests: list[EngineRequest]
    inputs: list[dict[str, Any]]
    """Arguments of `generate`; tensors have a first dimension of one question."""


Write = Callable[[Path, torch.dtype], Work]


@dataclass(frozen=True)
class Kind:
    write: Write
    kernels: KernelSetting = "measured"


def text(model_type: str, **settings: Any) -> Write:
    def write(folder: Path, dtype: torch.dtype) -> Work:
        llava.make_tokenizer().save_pretrained(folder)
        specs = test_generic.SPECS | test_hybrids.SPECS
        sizes = {**specs.get(model_type, {}), **TEXT_SIZES, **settings}
        config = test_generic.make_config(model_type)
        sizes = {key: value for key, value in sizes.items() if hasattr(config, key)}
        config = test_generic.make_config(model_type, **sizes)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        save(model, folder)
        cases = [text_case(str(i), [], 64, NUM_TOKENS) for i in range(max(NUM_STREAMS))]
        requests = [case.request for case in cases]
        prompts = [torch.tensor([request.prompt_token_ids]) for request in requests]
        return Work(model, requests, [{"input_ids": p} for p in prompts])

    return write


def images(model_type: str) -> Write:
    def write(folder: Path, dtype: torch.dtype) -> Work:
        sizes = SIZES | {"out_hidden_size": 512, "sliding_window": 128}
        config = vision_specs.write_files(folder, model_type, sizes=sizes)
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype)
        save(model, folder)
        processor = Processor(ModelConfig(str(folder)))
        requests, inputs = [], []
        for number in range(max(NUM_STREAMS)):
            image = draw_image(number, 90, 60)
            messages = test_generic_images.messages(TEXT, [image])
            rendered = render(processor, messages, [DecodedImage(image, str(number))])
            case = rig.make_case(str(number), rendered, [image], NUM_TOKENS)
            requests.append(case.request)
            inputs.append(test_generic_images.processor_inputs(folder, model, TEXT, [image]))
        return Work(model, requests, inputs)

    return write


def sounds(folder: Path, dtype: torch.dtype) -> Work:
    end = whisper.IDS["<|endoftext|>"]
    model = whisper.write_whisper(
        folder,
        sizes=WHISPER_SIZES,
        max_length=NUM_TOKENS + 4,
        suppress_tokens=[*whisper.SUPPRESSED, end],
    ).to(dtype)
    save(model, folder)
    processor = Processor(ModelConfig(str(folder)))
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(folder)
    requests, inputs = [], []
    options = {"language": "en", "task": "transcribe"}
    for number in range(max(NUM_STREAMS)):
        sound = draw_sound(number, 30_000)
        request = test_whisper.request_of(processor, str(number), sound, options).request
        sampling = msgspec.structs.replace(request.sampling, max_tokens=NUM_TOKENS)
        requests.append(replace(request, sampling=sampling))
        features, _ = extract(extractor, sound)
        inputs.append(options | {"input_features": torch.from_numpy(features)[None].to(dtype)})
    return Work(model, requests, inputs)


def save(model: Any, folder: Path) -> None:
    randomize(model)
    model.eval().requires_grad_(False)
    model.save_pretrained(folder)


KINDS = {
    "qwen2": Kind(text("qwen2")),
    "qwen2 on torch": Kind(text("qwen2"), kernels="torch"),
    "glm4 (generic)": Kind(text("glm4")),
    "qwen3_5_text (states)": Kind(text("qwen3_5_text", **DELTAS)),
    "lfm2 (states)": Kind(text("lfm2", layer_types=["conv", "full_attention"] * 4)),
    "gpt_oss (sinks)": Kind(text("gpt_oss", **EXPERTS)),
    "deepseek_v3 (latents)": Kind(text("deepseek_v3", **EXPERTS, **LATENTS)),
    "aya_vision (images)": Kind(images("aya_vision")),
    "gemma3 (spans)": Kind(images("gemma3")),
    "whisper (cross attention)": Kind(sounds),
}


def run_engine(core: EngineCore, requests: list[EngineRequest]) -> int:
    for request in requests:
        core.add(replace(request, request_id=new_request_id()))
    num_tokens = 0
    while core.has_work:
        for output in core.step():
            if output.error is not None:
                raise output.error
            num_tokens += sum(len(choice.token_ids) for choice in output.choices)
    return num_tokens


@torch.inference_mode()
def run_transformers(model: Any, inputs: list[dict[str, Any]]) -> int:
    batch = {
        name: torch.cat([each[name] for each in inputs]) if isinstance(value, Tensor) else value
        for name, value in inputs[0].items()
    }
    options: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "do_sample": False}
    if (token_ids := batch.get("input_ids")) is not None:
        options |= {"eos_token_id": None, "pad_token_id": 0}
        options["attention_mask"] = torch.ones_like(token_ids)
        num_prompt_tokens = token_ids.shape[1]
    else:
        # Without it, Whisper's `generate` looks for segments in the answer.
        options["force_unique_generate_call"] = True
        options["generation_config"] = copy.deepcopy(model.generation_config)
        num_prompt_tokens = 4
    answers = model.generate(**(batch | options))
    num_answers, length = answers.shape
    return int(num_answers * (length - num_prompt_tokens))


def measure(kind: Kind, dtype: Any) -> Iterator[str]:
    """Yield the tokens per second of the engine and of transformers, and their ratio."""
    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as folder:
        work = kind.write(Path(folder), getattr(torch, dtype))
        engine = EngineConfig(
            kv_cache_mib=256, kernels=kind.kernels, prefix_caching=False, embedding_cache_mib=0
        )
        core = build_core(load(ModelConfig(folder, dtype=dtype), engine), engine)
        for num_streams in NUM_STREAMS:
            sides = (
                partial(run_engine, core, work.requests[:num_streams]),
                partial(run_transformers, work.model, work.inputs[:num_streams]),
            )
            # The first turn is a warm-up.
            turns = [[rate(side) for side in sides] for _ in range(NUM_TURNS + 1)][1:]
            ours, theirs = map(max, zip(*turns, strict=True))
            yield from (f"{ours:,.0f}", f"{theirs:,.0f}", f"{ours / theirs:.2f}")


def rate(run: Callable[[], int]) -> float:
    start_s = time.perf_counter()
    return run() / (time.perf_counter() - start_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), help="these kinds")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, help="threads of both, by default one per core")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    rows = [(name, *measure(KINDS[name], options.dtype)) for name in options.only]
    columns = ["model"]
    for num_streams in NUM_STREAMS:
        columns += [f"{num_streams} at once", "generate", "of transformers"]
    title = f"tokens per second, {options.dtype}, {torch.get_num_threads()} threads"
    print_table(title, columns, rows)


if __name__ == "__main__":
    main()
