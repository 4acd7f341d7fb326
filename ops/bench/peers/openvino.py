"""OpenVINO GenAI's continuous batching, on a model exported to its format."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from PIL import Image

from ops.bench.peers.child import serve
from ops.bench.peers.protocol import Answer, Request, Setup


class OpenVino:
    def load(self, setup: Setup) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = setup.kv_cache_gib
        scheduler.max_num_seqs = setup.max_num_seqs
        scheduler.max_num_batched_tokens = setup.max_num_batched_tokens
        scheduler.enable_prefix_caching = True
        properties = {
            "INFERENCE_PRECISION_HINT": "bf16",
            "INFERENCE_NUM_THREADS": setup.threads,
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            Path(setup.model), scheduler, "CPU", properties
        )

    def prepare(self, requests: list[Request]) -> list[tuple[Request, Any]]:
        return [(r, r.image and np.asarray(Image.open(r.image))) for r in requests]

    def run(self, work: list[tuple[Request, Any]], began_s: float) -> list[Answer]:
        handles = [
            self._add(number, request, image) for number, (request, image) in enumerate(work)
        ]
        token_ids: list[list[int]] = [[] for _ in work]
        times_s: list[list[float]] = [[] for _ in work]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now_s = time.perf_counter() - began_s
            for number, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        token_ids[number] += output.generated_ids
                        times_s[number].append(now_s)
        return [
            Answer(ids, times[0], times[-1]) for ids, times in zip(token_ids, times_s, strict=True)
        ]

    def phases(self) -> dict[str, float]:
        return {}

    def _add(self, number: int, request: Request, image: Any) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = request.max_tokens
        config.ignore_eos = True
        config.do_sample = False
        if image is None:
            prompt = openvino.Tensor(np.array([request.token_ids], dtype=np.int64))
            return self._pipeline.add_request(number, prompt, config)
        # The template and the encoding are applied here, before any step.
        images = [openvino.Tensor(image)]
        return self._pipeline.add_request(number, request.text, images, config)


if __name__ == "__main__":
    serve(OpenVino())
