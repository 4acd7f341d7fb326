"""Pagemill's engine, called in its process."""

import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from ops.bench.peers.child import serve
from ops.bench.peers.protocol import Answer, Request, Setup
from ops.bench.peers.stopwatch import Stopwatch
from ops.rendering import render
from shared.client import new_request_id
from shared.codec.tensors import to_torch
from shared.config.schema import EngineConfig, ModelConfig
from shared.models.media import DecodedImage
from shared.protocol.requests import ImagePart, ImageURL, Message, TextPart
from shared.protocol.sampling import SamplingParams
from workers.engine.core.engine import EngineCore
from workers.engine.core.sequence import EngineRequest, Item
from workers.engine.loader import load
from workers.engine.main import build_core
from workers.renderer.media.image_decoder import hash_source
from workers.renderer.processing.processor import Processor, Rendered


class Pagemill:
    def load(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        model = model_config(setup)
        engine = engine_config(setup)
        self._core = build_core(load(model, engine), engine)
        self._processor = Processor(model)
        self._stopwatch = Stopwatch()
        if setup.profile:
            watch(self._core, self._stopwatch)

    def prepare(self, requests: list[Request]) -> list[tuple[Request, DecodedImage | None]]:
        self._stopwatch.total_s.clear()
        return [(request, _load(request.image) if request.image else None) for request in requests]

    def run(self, work: list[tuple[Request, DecodedImage | None]], began_s: float) -> list[Answer]:
        answers = {}
        for request, image in work:
            rendered = self._render(request, image)
            engine_request = _engine_request(request, rendered)
            self._core.add(engine_request)
            answers[engine_request.request_id] = Tally(len(rendered.prompt_token_ids))
        while self._core.has_work:
            outputs = self._core.step()
            now_s = time.perf_counter() - began_s
            for output in outputs:
                if output.error is not None:
                    raise output.error
                for choice in output.choices:
                    answers[output.request_id].take(choice.token_ids, now_s)
        return [tally.answer() for tally in answers.values()]

    def phases(self) -> dict[str, float]:
        return dict(self._stopwatch.total_s)

    def _render(self, request: Request, image: DecodedImage | None) -> Rendered:
        if image is None:
            return Rendered(request.token_ids, [], [])
        # The image is loaded already, so its URL does not matter.
        return render(self._processor, [message(request, "data:")], [image])


class Tally:
    """The tokens of a request, with their times."""

    def __init__(self, num_prompt_tokens: int | None = None) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self._token_ids: list[int] = []
        self._times_s: list[float] = []

    def take(self, token_ids: list[int], now_s: float) -> None:
        if token_ids:
            self._token_ids += token_ids
            self._times_s.append(now_s)

    def answer(self) -> Answer:
        return Answer(self._token_ids, self._times_s[0], self._times_s[-1], self.num_prompt_tokens)


def model_config(setup: Setup) -> ModelConfig:
    return ModelConfig(path=setup.model, dtype="bfloat16", max_model_len=setup.max_model_len)


def engine_config(setup: Setup) -> EngineConfig:
    return EngineConfig(
        threads=setup.threads,
        kv_cache_mib=1024 * setup.kv_cache_gib,
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.max_num_batched_tokens,
    )


def sampling(request: Request) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True)


def message(request: Request, url: str) -> Message:
    return Message("user", [ImagePart(ImageURL(url)), TextPart(request.text)])


def watch(core: EngineCore, stopwatch: Stopwatch) -> None:
    """Time the phases of steps from outside; a phase has the name of its method."""
    inside: Any = core
    for owner, name, phase in (
        (inside, "step", "rest of the step"),
        (inside._scheduler, "schedule", "schedule"),
        (inside._preparation, "prepare", "prepare"),
        (inside, "_process_sampled", "process sampled"),
        (inside, "_take_outputs", "process sampled"),
        (inside._factory, "decode", "detokenize"),
        (inside._runner, "encode", "encode images"),
        (inside._runner, "launch", "rest of the run"),
        (inside._runner, "_embed", "embed"),
        (inside._runner._model, "plan", "plan"),
        (inside._runner._model, "forward", "forward"),
        (inside._runner._model, "draw", "sample"),
    ):
        stopwatch.watch(owner, name, phase)


def _load(path: str) -> DecodedImage:
    image = Image.open(path).convert("RGB")
    return DecodedImage(image, hash_source(Path(path).read_bytes()))


def _engine_request(request: Request, rendered: Rendered) -> EngineRequest:
    items = [
        Item(
            item.modality,
            item.mm_hash,
            item.placeholder,
            {name: to_torch(rendered.tensors[index]) for name, index in item.fields.items()},
        )
        for item in rendered.items
    ]
    return EngineRequest(new_request_id(), rendered.prompt_token_ids, items, sampling(request))


if __name__ == "__main__":
    serve(Pagemill())
