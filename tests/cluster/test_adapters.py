"""A request that names an adapter, from its publication to its last token."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import PreTrainedModel, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from ops.demo import IMAGES
from shared import client
from shared.bus.bus import Bus
from shared.protocol.records import Finish
from shared.protocol.requests import GenerateRequest
from tests import preloaded
from tests.adapters import ATTENTION, MLP, merged, write_adapter
from tests.cluster.conftest import (
    CONFIG,
    FORKED_PAGEMILL,
    Cluster,
    answer,
    start_cluster,
    stop_cluster,
)
from tests.cluster.streams import assert_gapless, tokens_of
from workers.cli.ask import build_request
from workers.settings import DEMO_MODEL

WITH_ADAPTER = CONFIG.replace(
    "max_model_len: 1024", "max_model_len: 1024\n    adapters: {tuned: adapters/tuned}"
)
MAX_TOKENS = 16
QUESTIONS: list[tuple[str, list[Path]]] = [
    ("What can you do?", []),
    ("What color is this image?", [IMAGES / "red.png"]),
]


@dataclass(frozen=True)
class Tuned:
    cluster: Cluster
    references: dict[str | None, PreTrainedModel]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tuned]:
    folder = tmp_path_factory.mktemp("adapters")
    model = Qwen2VLForConditionalGeneration.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    path = folder / "adapters" / "tuned"
    adapter = write_adapter(path, model, [*ATTENTION, *MLP], 4, 8, 1, spread=1.0)
    references = {None: model, "tuned": merged(model, adapter)}
    cluster = start_cluster(folder, WITH_ADAPTER)
    yield Tuned(cluster, references)
    stop_cluster(cluster)


@pytest.fixture
async def bus(tuned: Tuned) -> AsyncIterator[Bus]:
    connected = await Bus.connect(tuned.cluster.url, "test")
    yield connected
    await connected.close()


def ask(text: str, images: list[Path], adapter: str | None) -> GenerateRequest:
    sampling = {"max_tokens": MAX_TOKENS, "temperature": 0.0}
    return build_request("demo", text, images, sampling, adapter=adapter)


def reference_answer(
    model: PreTrainedModel, prompt_token_ids: list[int], images: list[Path]
) -> list[int]:
    token_ids = torch.tensor([prompt_token_ids])
    inputs: dict[str, Any] = {}
    if images:
        processor = Qwen2VLImageProcessorPil.from_pretrained(DEMO_MODEL)
        opened: list[Image.Image] = [Image.open(path) for path in images]
        inputs = dict(processor(opened, return_tensors="pt"))
        inputs["mm_token_type_ids"] = (token_ids == model.config.image_token_id).int()
    answer = model.generate(  # type: ignore[operator]
        input_ids=token_ids,
        attention_mask=torch.ones_like(token_ids),
        **inputs,
        do_sample=False,
        max_new_tokens=MAX_TOKENS,
    )
    tokens: list[int] = answer[0, token_ids.shape[1] :].tolist()
    return tokens


async def test_each_request_is_answered_by_its_own_adapter(tuned: Tuned, bus: Bus) -> None:
    requests = [(*question, adapter) for question in QUESTIONS for adapter in tuned.references]
    # Twice: the second time with what the first has left in the prefix cache.
    for _ in range(2):
        logs = await asyncio.gather(*(answer(bus, ask(*request)) for request in requests))
        answers = []
        for (text, images, adapter), records in zip(requests, logs, strict=True):
            assert_gapless(records)
            assert isinstance(records[-1], Finish)
            rendered, _ = await client.render(bus, ask(text, images, adapter))
            reference = tuned.references[adapter]
            answers.append(tokens_of(records))
            assert answers[-1] == reference_answer(reference, rendered.prompt_token_ids, images)
        assert len({tuple(tokens) for tokens in answers}) == len(requests)


def test_an_adapter_that_is_not_there_is_refused(tuned: Tuned) -> None:
    command = [*FORKED_PAGEMILL, "ask", "--adapter", "other", "--nats", tuned.cluster.url, "hello"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    for part in ("unknown_adapter", "(adapter)", "available: tuned"):
        assert part in done.stderr


def test_up_gives_up_on_an_adapter_that_cannot_be_served(tuned: Tuned, tmp_path: Path) -> None:
    model = tuned.references[None]
    write_adapter(tmp_path / "adapters" / "tuned", model, ["q_proj"], 4, 8, 1, use_dora=True)
    config = tmp_path / "pagemill.yaml"
    config.write_text(WITH_ADAPTER + "\nnats: {port: 0}\ngateway: {port: 0}")
    done = preloaded.run("up", "--config", str(config), cwd=tmp_path)
    assert done.returncode == 78
    assert "models.adapters.tuned" in done.stderr
    assert "use_dora" in done.stderr
