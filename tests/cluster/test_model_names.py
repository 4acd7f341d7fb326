"""A model with a hyphen, a slash, a dot and brackets in its name, from every client's side."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from openai import AsyncOpenAI, NotFoundError

from shared.bus.bus import Bus
from shared.client import follow, new_request_id
from shared.protocol.encoding import to_json
from shared.protocol.records import Failure, Finish, LogRecord
from shared.protocol.requests import GenerateRequest, Message
from tests.cluster.conftest import CONFIG, ROOT, Cluster, run, start_cluster, stop_cluster
from workers.cli.ask import data_url

NAME = "-org/Demo-2.5 [x]"
TOKEN = "-org=2FDemo-2=2E5=20=5Bx=5D"
RED = ROOT / "ops" / "demo_images" / "red.png"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("names")


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Cluster]:
    text = CONFIG.replace("  demo:\n", f'  "{NAME}":\n    tower: encoder\n')
    assert NAME in text
    store = folder / "embeddings"
    running = start_cluster(folder, f"{text}embeddings: {{storage: directory, path: {store}}}\n")
    yield running
    stop_cluster(running)


@pytest.fixture
async def url(client: Bus) -> str:
    """URL of the gateway."""
    return next(beat.url for beat in await client.heartbeats.read() if beat.url is not None)


@pytest.fixture
async def openai(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as official:
        yield official


async def publish(bus: Bus, token: str) -> tuple[str, LogRecord]:
    """Publish a request as a client in another language would; return its id and last record."""
    request, request_id = GenerateRequest(NAME, [Message("user", "hello")]), new_request_id()
    await bus.publish_without_id(f"pm.request.{token}.{request_id}", to_json(request))
    return request_id, [record async for record in follow(bus, request_id, timeout_s=30)][-1]


async def test_openais_client_lists_and_finds_the_model(openai: AsyncOpenAI) -> None:
    assert [model.id async for model in openai.models.list()] == [NAME]
    assert (await openai.models.retrieve(NAME)).id == NAME
    with pytest.raises(NotFoundError, match="no model 'org/other'"):
        await openai.models.retrieve("org/other")


@pytest.mark.parametrize("safe", ["", "/"])
async def test_the_slash_of_a_url_may_be_encoded_or_not(url: str, safe: str) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await http.get(f"{url}/v1/models/{quote(NAME, safe=safe)}")
        assert answer.json()["id"] == NAME
        assert (await http.get(f"{url}/v1/models/org")).json()["error"]["code"] == "unknown_model"
        assert (await http.get(f"{url}/v1/other/org")).json()["error"]["code"] == "unknown_url"


async def test_it_answers_about_an_image_under_its_name(
    openai: AsyncOpenAI, url: str, folder: Path
) -> None:
    image = {"type": "image_url", "image_url": {"url": data_url(RED)}}
    text = {"type": "text", "text": "What color is this image? Answer in one word."}
    answer = await openai.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": [image, text]}],  # type: ignore[list-item, misc]
    )
    assert answer.model == NAME
    assert "red" in (answer.choices[0].message.content or "").lower()
    assert [file.name for file in (folder / "embeddings").iterdir()] == [TOKEN]
    async with httpx.AsyncClient(trust_env=False) as http:
        assert (await http.get(f"{url}/v1/requests/{answer.id}")).json()["model"] == NAME


async def test_publishers_encode_the_name_in_the_subject(client: Bus) -> None:
    _, last = await publish(client, TOKEN)
    assert isinstance(last, Finish)


async def test_the_error_of_an_unencoded_name_shows_the_subject(client: Bus) -> None:
    request_id, last = await publish(client, "-org/Demo-2=2E5")
    assert isinstance(last, Failure)
    assert (last.error.code, last.error.field) == ("invalid_request", "model")
    right = f"pm.request.{TOKEN}.{request_id}"
    assert f"the subject of model {NAME!r} is {right}, not" in last.error.message


async def test_commands_and_metrics_show_the_name_as_it_is(client: Bus, cluster: Cluster) -> None:
    assert run(cluster, "ask", f"--model={NAME}", "What can you do?").strip()
    assert "tokens" in run(cluster, "tokenize", f"--model={NAME}", "hello")
    frame = json.loads(run(cluster, "top", "--once", "--json"))
    assert [model["model"] for model in frame["models"]] == [NAME]
    assert {queue["model"] for queue in frame["queues"]} == {"", NAME}
    table = run(cluster, "top", "--once")
    assert NAME in table
    text = run(cluster, "metrics")
    assert f'model="{NAME}"' in text
    assert TOKEN not in table + text
    assert all(beat.models == [NAME] for beat in await client.heartbeats.read() if beat.models)
