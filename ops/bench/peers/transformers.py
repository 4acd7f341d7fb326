"""transformers as a peer: `generate` on a padded batch, or its continuous batching.

python -m ops.bench.peers.transformers padded|continuous
"""

import sys
import time
from collections import defaultdict
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteriaList,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from ops.bench.peers.child import serve
from ops.bench.peers.protocol import Answer, Request, Setup

BLOCK_SIZE = 32


class Padded:
    def load(self, setup: Setup) -> None:
        self.model = load_model(setup)
        self._pad = self.model.generation_config.pad_token_id or 0
        if getattr(self.model.config, "vision_config", None) is not None:
            self._tokenizer = AutoTokenizer.from_pretrained(setup.model)
            self._images = Qwen2VLImageProcessorPil.from_pretrained(setup.model)

    def prepare(self, requests: list[Request]) -> list[tuple[Request, Any]]:
        return [(r, r.image and Image.open(r.image).convert("RGB")) for r in requests]

    @torch.inference_mode()
    def run(self, work: list[tuple[Request, Any]], began_s: float) -> list[Answer]:
        times_s: list[float] = []

        def note_time(token_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
            times_s.append(time.perf_counter() - began_s)
            return torch.zeros(len(token_ids), dtype=torch.bool)

        prompts, more = self._prompts(work)
        longest = max(map(len, prompts))
        padded = [[self._pad] * (longest - len(prompt)) + prompt for prompt in prompts]
        token_ids = torch.tensor(padded)
        if "image_grid_thw" in more:
            more["mm_token_type_ids"] = (token_ids == self.model.config.image_token_id).int()
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        sequences = self.model.generate(
            input_ids=token_ids,
            attention_mask=torch.tensor(mask),
            max_new_tokens=work[0][0].max_tokens,
            do_sample=False,
            pad_token_id=self._pad,
            stopping_criteria=StoppingCriteriaList([note_time]),
            **more,
        )
        return [
            Answer(sequence[longest:].tolist(), times_s[0], times_s[-1], len(prompt))
            for sequence, prompt in zip(sequences, prompts, strict=True)
        ]

    def phases(self) -> dict[str, float]:
        return {}

    def _prompts(self, work: list[tuple[Request, Any]]) -> tuple[list[list[int]], dict[str, Any]]:
        if work[0][1] is None:
            return [request.token_ids for request, _ in work], {}
        # Its processor of text and images together needs torchvision, for videos.
        images = self._images([image for _, image in work], return_tensors="pt")
        merged = self._images.merge_size**2
        token = self.model.config.image_token_id
        prompts = []
        for (request, _), grid in zip(work, images["image_grid_thw"], strict=True):
            ids: Any = self._tokenizer.apply_chat_template(
                request.messages, add_generation_prompt=True, return_dict=False
            )
            place = ids.index(token)
            num_tokens = int(grid.prod()) // merged
            prompts.append(ids[:place] + [token] * num_tokens + ids[place + 1 :])
        pixels = images["pixel_values"].to(torch.bfloat16)
        grids = images["image_grid_thw"]
        return prompts, {
            "pixel_values": pixels,
            "image_grid_thw": grids,
        }


class Continuous:
    def load(self, setup: Setup) -> None:
        self._model = load_model(setup)
        self._config = ContinuousBatchingConfig(
            page_size=BLOCK_SIZE,
            num_blocks=setup.max_num_seqs * setup.max_model_len // (4 * BLOCK_SIZE),
            max_batch_tokens=setup.max_num_batched_tokens,
            use_cuda_graph=False,
            use_async_batching=False,
        )

    def prepare(self, requests: list[Request]) -> list[Request]:
        return requests

    def run(self, work: list[Request], began_s: float) -> list[Answer]:
        outputs = self._model.generate_batch(
            [request.token_ids for request in work],
            generation_config=GenerationConfig(
                max_new_tokens=work[0].max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=self._config,
            record_timestamps=True,
            persistent_manager=True,
            warmup=False,
        )
        by_prompt = defaultdict(list)
        for output in outputs.values():
            by_prompt[tuple(output.prompt_ids)].append(output)
        return [
            _answer(by_prompt[tuple(request.token_ids)].pop(), request, began_s) for request in work
        ]

    def phases(self) -> dict[str, float]:
        return {}


def _answer(output: Any, request: Request, began_s: float) -> Answer:
    times_s = [stamp - began_s for stamp in output.timestamps]
    return Answer(list(output.generated_tokens), times_s[0], times_s[-1], len(request.token_ids))


def load_model(setup: Setup) -> Any:
    torch.set_num_threads(setup.threads)
    config = AutoConfig.from_pretrained(setup.model)
    sees = getattr(config, "vision_config", None) is not None
    auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model: Any = auto.from_pretrained(setup.model, dtype=torch.bfloat16).eval()
    # Only the length ends an answer.
    model.generation_config.eos_token_id = None
    return model


if __name__ == "__main__":
    serve(Continuous() if sys.argv[1] == "continuous" else Padded())
