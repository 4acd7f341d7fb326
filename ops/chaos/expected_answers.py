"""Expected answers to the requests of a plan, computed by an undisturbed engine core.

There is no broker, worker or log that could fail. The answers of the demo model take long, so they
are cached in a file that is named by a digest of all inputs.
"""

import asyncio
import atexit
import functools
import hashlib
import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ops.chaos import fake_model
from ops.chaos.plan import ROOT, Planned, Settings
from shared.config.schema import Config, ModelConfig
from shared.models.lazy_module import hide_torch
from shared.protocol import subjects
from shared.protocol.records import ChoiceDelta, Finish, LogRecord, TokenChunk
from shared.protocol.sampling import SamplingParams
from shared.stage.pipelines import pipelines_of
from workers.coordinator.admission import admit
from workers.engine.core.engine import EngineCore
from workers.engine.core.sequence import EngineRequest, Item
from workers.engine.log_records import merge_deltas
from workers.renderer.processing import prompt

CACHE = Path(tempfile.gettempdir()) / "pagemill-chaos-expected"
# Requests in flight at once. Answers must not depend on this number, as every run shows.
AT_ONCE = 64
NUM_BLOCKS = 4096
# Shortened answers have a multiple of this many tokens, so that runs with similar logs share files
# of the cache.
LENGTH_STEP = 64

T = TypeVar("T")


class ExpectedChoice(Struct):
    """One choice of an expected answer."""

    token_ids: list[int] = []
    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Expected(Struct):
    """An expected answer."""

    prompt_tokens: int
    choices: list[ExpectedChoice]


def shortened(planned: Planned, log: Sequence[LogRecord]) -> Planned:
    """Return the request for as many tokens as its log is compared with.

    A client that cancels, or has a short deadline, requests far more tokens than there is time for.
    If an answer has not ended, the checks compare the tokens that are in the log.
    """
    if planned.behaviour not in ("cancel", "deadline") or not planned.writes:
        return planned
    deltas = [d for record in log if isinstance(record, TokenChunk) for d in record.choices]
    if any(delta.finish_reason for delta in deltas) or any(isinstance(r, Finish) for r in log):
        return planned
    lengths = Counter[int]()
    for delta in deltas:
        lengths[delta.index] += len(delta.token_ids)
    max_tokens = LENGTH_STEP * (1 + max(lengths.values(), default=0) // LENGTH_STEP)
    sampling = planned.request.sampling_params
    assert isinstance(sampling, SamplingParams)
    sampling = replace(sampling, max_tokens=min(sampling.max_tokens or max_tokens, max_tokens))
    return replace(planned, request=replace(planned.request, sampling_params=sampling))


def expect(settings: Settings, config: Config, planned: Sequence[Planned]) -> dict[str, Expected]:
    """Return the expected answers by request id, cached if the engine is a real one."""
    model = config.models[next(iter(config.models))]
    files = sorted(Path(model.path).iterdir())
    for package in ("workers/engine", "shared/models"):
        files += sorted((ROOT / package).rglob("*.py"))
    return cached(
        settings,
        [settings.renderer, model.dtype, planned],
        files,
        dict[str, Expected],
        lambda: _compute(settings, config, model, planned),
    )


def cached(
    settings: Settings,
    inputs: object,
    files: Iterable[Path],
    kind: type[T],
    compute: Callable[[], T],
) -> T:
    """Return the result of `compute`, from a file if the engine is a real one.

    The file is named by a digest of all inputs and of the content of `files`.
    """
    if settings.engine != "demo":
        return compute()
    digest = hashlib.sha256(msgspec.json.encode(inputs))
    for path in files:
        digest.update(path.read_bytes())
    file = CACHE / f"{digest.hexdigest()[:24]}.msgpack"
    if file.exists():
        return msgspec.msgpack.decode(file.read_bytes(), type=kind)
    result = compute()
    CACHE.mkdir(exist_ok=True)
    file.write_bytes(msgspec.msgpack.encode(result))
    return result


def _compute(
    settings: Settings, config: Config, model: ModelConfig, planned: Sequence[Planned]
) -> dict[str, Expected]:
    render: Any
    if settings.renderer == "fake":
        render = functools.partial(fake_model.render, fake_model.FakeProcessor(model))
    else:
        if settings.engine == "fake" and "torch" not in sys.modules:
            # Renderers that are forked from this process start without torch.
            hide_torch()
        from ops import rendering
        from workers.renderer.processing.processor import Processor

        render = functools.partial(rendering.render, Processor(model))
    if settings.engine == "fake":
        core = fake_model.build_core(fake_model.FakeRunner(), NUM_BLOCKS, AT_ONCE)
    else:
        import torch

        from workers.engine.loader import load
        from workers.engine.main import build_core

        # Large batches on one thread take a third of the time of small ones on two.
        torch.set_num_threads(1)
        changes = {"max_num_seqs": AT_ONCE, "num_blocks": NUM_BLOCKS, "tensor_parallel": 1}
        engine = replace(config.engine, **changes)
        # The answer must be the same wherever the embeddings are computed.
        core = build_core(load(replace(model, tower="engine"), engine), engine)
    written = [entry for entry in planned if entry.request.given_text is None and not entry.paints]
    requests = (_rendered(entry, render, config, settings.engine) for entry in written)
    by_bus_id = run_alone(core, requests)
    return {entry.id: by_bus_id.get(entry.bus_id, Expected(0, [])) for entry in planned}


def run_alone(core: EngineCore, requests: Iterable[EngineRequest]) -> dict[str, Expected]:
    """Run all requests on one core, and return their answers by request id."""
    answers: dict[str, Expected] = {}
    waiting = iter(requests)
    num_in_flight = 0
    while True:
        for request in itertools.islice(waiting, AT_ONCE - num_in_flight):
            core.add(request)
            num_in_flight += 1
            choices = [ExpectedChoice() for _ in range(request.sampling.n)]
            answers[request.request_id] = Expected(len(request.prompt_token_ids), choices)
        if not num_in_flight:
            return answers
        for output in core.step():
            if output.error is not None:
                raise output.error
            for delta in merge_deltas([output]):
                _extend(answers[output.request_id].choices[delta.index], delta)
            num_in_flight -= output.usage is not None


def _extend(choice: ExpectedChoice, delta: ChoiceDelta) -> None:
    choice.token_ids += delta.token_ids
    choice.text += delta.text
    if delta.finish_reason is not None:
        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason


def _as_it_is(tensor: Any) -> Any:
    return tensor


def _rendered(planned: Planned, render: Any, config: Config, engine: str) -> EngineRequest:
    """Return the request as an engine receives it from coordinator and renderer."""
    request = planned.request
    data = msgspec.json.encode(request)
    pipelines = pipelines_of(config)
    subject = subjects.request(request.model, planned.bus_id)
    sampling = admit(subject, planned.bus_id, data, config.models, pipelines).sampling
    images = _images(request, config)
    rendered = render(request.messages, images)
    if engine == "fake":
        restore: Any = _as_it_is
    elif rendered.items:
        from shared.codec.tensors import to_torch as restore
    items = [
        Item(
            item.modality,
            item.mm_hash,
            item.placeholder,
            {name: restore(rendered.tensors[i]) for name, i in item.fields.items()},
        )
        for item in rendered.items
    ]
    return EngineRequest(planned.bus_id, rendered.prompt_token_ids, items, sampling)


def _images(request: Any, config: Config) -> Iterator[Any]:
    parts = list(prompt.media_parts(request.messages))
    if parts:
        decoders = _open_decoders()
        for part, data in zip(parts, asyncio.run(_read(parts, config)), strict=True):
            with decoders.open(part.modality, data, part.field, "", part.sampling) as medium:
                yield medium


async def _read(parts: list[prompt.MediaPart], config: Config) -> list[bytes]:
    from workers.renderer.media.loader import MediaLoader

    in_thread: Any = asyncio.to_thread
    media = MediaLoader(config.renderer, in_thread)
    try:
        return [await media.read(part.url, part.field, "", part.modality) for part in parts]
    finally:
        await media.close()


@functools.cache
def _open_decoders() -> Any:
    from shared.config.schema import RendererConfig
    from workers.renderer.media.decoders import MediaDecoders

    in_thread: Any = None  # media are decoded in the calling thread
    decoders = MediaDecoders(RendererConfig(), in_thread)
    atexit.register(decoders.close)
    return decoders
