"""Batches by real processes: endpoints, files that lines name, and what lines have in common."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from openai.types import Batch
from prometheus_client.parser import text_string_to_metric_families

from ops import demo_batch
from ops.demo import IMAGES
from shared.bus.bus import Bus
from tests.cluster.conftest import CONFIG, IMAGE_HOST, Cluster, run, start_cluster, stop_cluster
from tests.gateway.batches.conftest import CHAT, begin, ended, lines_of, results_of
from tests.renderer.canary import Canary, send
from tests.support.documents import letters
from tests.support.media import data_url
from tests.support.waiting import until
from workers.settings import load_config

# A prefix cache that does not have room for the prompts of many lines.
BLOCKS = "engine: {max_num_seqs: 4, num_blocks: 256}\n"
TOWER = "max_model_len: 1024\n    tower: encoder"
NUM_SYSTEMS, LINES_OF_EACH = 24, 8
COLOR = "What color is this image?"


@pytest.fixture(scope="module")
def batching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    text = CONFIG.replace("max_model_len: 1024", TOWER) + BLOCKS
    running = start_cluster(tmp_path_factory.mktemp("batches"), text)
    yield running
    stop_cluster(running)


@pytest.fixture
async def api(batching: Cluster) -> AsyncIterator[AsyncOpenAI]:
    url = f"{batching.http_url}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


async def run_batch(
    api: AsyncOpenAI, path: str, bodies: list[dict[str, Any]]
) -> tuple[Batch, list[Any]]:
    """Return a batch that has ended, and the answers of its lines."""
    batch = await begin(api, lines_of(path, bodies), endpoint=path)

    async def has_ended() -> bool:
        return (await api.batches.retrieve(batch.id)).status == "completed"

    await until(has_ended, 300)
    batch = await ended(api, batch.id)
    results = await results_of(api, batch.output_file_id)
    assert batch.error_file_id is None, await results_of(api, batch.error_file_id)
    return batch, [results[f"line-{n}"]["response"]["body"] for n in range(len(bodies))]


def question(*parts: dict[str, Any], text: str = COLOR, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    return {"model": "demo", "messages": messages, "max_tokens": 8} | fields


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text.lower()


async def counters(cluster: Cluster) -> Counter[str]:
    """Return the counters of all workers, by the names of the metric and of the role."""
    text = await asyncio.to_thread(run, cluster, "metrics")
    sums: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "le" not in sample.labels:
                name = f"{sample.labels.get('role', '')}.{sample.name.removeprefix('pagemill_')}"
                sums[name] += sample.value  # type: ignore[assignment]
    return sums


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "demo", "prompt": "What can", "max_tokens": 4}),
        ("/v1/embeddings", {"model": "demo", "input": ["Hello", "you"]}),
        ("/v1/score", {"model": "demo", "text_1": "a cat", "text_2": ["a dog", "a cat"]}),
        ("/v1/rerank", {"model": "demo", "query": "cat", "documents": ["dog", "cat"]}),
        ("/v1/responses", {"model": "demo", "input": "What can you do?", "store": False}),
    ],
)
async def test_a_line_has_the_answer_of_its_endpoint(
    api: AsyncOpenAI, path: str, body: dict[str, Any]
) -> None:
    direct: Any = await api.post(path.removeprefix("/v1"), cast_to=object, body=body)
    batch, (answer,) = await run_batch(api, path, [body])
    assert same(answer) == same(direct)
    assert batch.usage is not None
    assert batch.usage.input_tokens > 0


def same(answer: Any) -> Any:
    """Return an answer without the fields that differ between two equal requests."""
    if isinstance(answer, list):
        return [same(item) for item in answer]
    if not isinstance(answer, dict):
        return answer
    others = {"id", "created", "created_at", "completed_at", "cached_tokens", "service_tier"}
    return {name: same(value) for name, value in answer.items() if name not in others}


async def test_an_image_of_many_lines_is_fetched_and_encoded_once(
    batching: Cluster, api: AsyncOpenAI
) -> None:
    content = (IMAGES / "red.png").read_bytes()
    stored = await api.files.create(file=("red.png", content), purpose="vision")
    canary = Canary(IMAGE_HOST)
    canary.answers["/blue.png"] = send((IMAGES / "blue.png").read_bytes())
    urls = [f"media:{stored.id}", canary.url("/blue.png", IMAGE_HOST)]
    urls.append(data_url((IMAGES / "green_circle.png").read_bytes()))
    bodies = [
        question(image(url), text=f"{COLOR} {number}") for number in range(30) for url in urls
    ]
    before = await counters(batching)
    try:
        _, answers = await run_batch(api, CHAT, bodies)
    finally:
        canary.close()
    texts = [text_of(answer) for answer in answers]
    assert "red" in texts[0]
    assert "blue" in texts[1]
    assert canary.paths == ["/blue.png"]

    encoded = "encoder.encoded_items_total"

    async def are_counted() -> bool:
        now = await counters(batching)
        return now[encoded] - before[encoded] >= len(urls)

    await until(are_counted, 60)
    now = await counters(batching)
    assert now[encoded] - before[encoded] == len(urls)


async def test_files_with_the_purpose_batch_are_stored_as_long_as_batches(
    api: AsyncOpenAI,
) -> None:
    async def upload(name: str, content: bytes) -> str:
        file = await api.files.create(file=(name, content), purpose="batch")
        assert file.expires_at is not None
        assert file.expires_at > file.created_at + 2_500_000
        return file.id

    star = await upload("star.jpg", (IMAGES / "yellow_star.jpg").read_bytes())
    page = await upload("k.pdf", letters("K"))
    document = {"type": "file", "file": {"file_id": page}}
    bodies = [
        question(image(f"media:{star}")),
        question(document, text="Which letter is this?"),
    ]
    _, answers = await run_batch(api, CHAT, bodies)
    assert "yellow" in text_of(answers[0])
    assert "k" in text_of(answers[1])
    content = [
        {"type": "input_image", "file_id": star},
        {"type": "input_text", "text": COLOR},
    ]
    body = {"model": "demo", "input": [{"role": "user", "content": content}]}
    _, (response,) = await run_batch(api, "/v1/responses", [body])
    assert "yellow" in str(response["output"]).lower()


async def test_documents_are_named_by_their_ids(api: AsyncOpenAI) -> None:
    file = await api.files.create(file=("kte.pdf", letters("KTE")), purpose="user_data")
    text = "Which letter is this?"
    bodies = [
        question({"type": "file", "file": {"file_id": file.id, "pages": page}}, text=text)
        for page in ("1", "2", "3")
    ]
    _, answers = await run_batch(api, CHAT, bodies)
    texts = [text_of(answer) for answer in answers]
    assert all(letter in text for letter, text in zip("kte", texts, strict=True)), texts


async def test_a_file_of_another_tenant_is_not_found(api: AsyncOpenAI) -> None:
    part = {"type": "file", "file": {"file_id": f"file-{'0' * 64}"}}
    bodies = [question(image(f"media:file-{'0' * 64}")), question(part)]
    batch = await ended(api, (await begin(api, lines_of(CHAT, bodies))).id)
    errors = await results_of(api, batch.error_file_id)
    assert {line["response"]["body"]["error"]["code"] for line in errors.values()} == {
        "media_not_found"
    }
    assert len(errors) == 2


async def test_lines_with_a_common_beginning_find_it_in_the_prefix_cache(
    batching: Cluster, api: AsyncOpenAI
) -> None:
    """The cache has room for a fifth of the system messages, and their lines are far apart."""
    bodies = []
    for number in range(LINES_OF_EACH):
        for system in range(NUM_SYSTEMS):
            rules = " ".join(f"rule {system} says {rule * 7 + system}" for rule in range(24))
            body = question(text=f"{number}?", max_tokens=1)
            body["messages"].insert(0, {"role": "system", "content": rules})
            bodies.append(body)
    hits = "engine.prefix_cache_hits_total"
    before = (await counters(batching))[hits]
    batch, _ = await run_batch(api, CHAT, bodies)
    assert batch.usage is not None
    cached = batch.usage.input_tokens_details.cached_tokens
    print(f"{cached} of {batch.usage.input_tokens} tokens")  # noqa: T201
    assert cached > 0.7 * batch.usage.input_tokens
    assert (await counters(batching))[hits] - before >= cached


async def test_the_demo_reads_the_answers_of_its_batch(batching: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    demo_batch.write_questions(file, [(COLOR, IMAGES / f"{name}.png") for name in ("red", "blue")])
    bus = await Bus.connect(batching.url, "test")
    try:
        answers = await demo_batch.run_batch(bus, load_config(batching.config), file)
    finally:
        await bus.close()
    assert answers.status == "completed"
    assert "red" in answers.texts[0].lower()
    assert "blue" in answers.texts[1].lower()
