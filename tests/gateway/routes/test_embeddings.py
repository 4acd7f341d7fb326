"""`/v1/embeddings` against a gateway: both formats, batches, refusals, repeated ids."""

import base64
import json
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from openai import AsyncOpenAI
from transformers import AutoModelForImageTextToText, AutoTokenizer

from shared.errors import WorkerFailure
from shared.protocol.encoding import to_json
from shared.protocol.records import Finish, TokenChunk, Usage
from tests.gateway.conftest import Gateway
from tests.gateway.routes.test_chat import ROOT
from workers.gateway.core.assembler import Answering
from workers.gateway.openai.embeddings import EmbeddingAssembler, EmbeddingOptions

MODEL = ROOT / "ops" / "demo_model"
TEXTS = ["Hello there", "A star", "Hello there, you"]


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoModelForImageTextToText.from_pretrained(MODEL, dtype=torch.float32).eval()


def expected(reference: Any, token_ids: list[int]) -> Any:
    with torch.no_grad():
        states = reference.model(torch.tensor([token_ids])).last_hidden_state[0]
    last = states[-1].double().numpy()
    return last / np.linalg.norm(last)


def client_of(gateway: Gateway) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("encoding_format", ["float", "base64", None])
async def test_the_client_reads_embeddings(
    gateway: Gateway, reference: Any, encoding_format: Any
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
    token_ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    right = [expected(reference, ids) for ids in token_ids]
    form = {} if encoding_format is None else {"encoding_format": encoding_format}
    async with client_of(gateway) as client:
        for texts in (TEXTS, token_ids, TEXTS[1], token_ids[1]):
            answer = await client.embeddings.create(model="demo", input=texts, **form)
            vectors = right if texts in (TEXTS, token_ids) else right[1:2]
            assert [entry.index for entry in answer.data] == list(range(len(vectors)))
            for entry, vector in zip(answer.data, vectors, strict=True):
                embedding: Any = entry.embedding
                if isinstance(embedding, str):
                    embedding = np.frombuffer(base64.b64decode(embedding), "<f4")
                assert np.linalg.norm(np.array(embedding) - vector) <= 1e-5
            num_tokens = sum(map(len, token_ids if len(vectors) > 1 else token_ids[1:2]))
            assert answer.usage.prompt_tokens == answer.usage.total_tokens == num_tokens


async def test_many_inputs_are_embedded_in_turns(gateway: Gateway) -> None:
    texts = [f"{number % 7}" for number in range(150)]
    async with client_of(gateway) as client:
        answer = await client.embeddings.create(model="demo", input=texts)
        few = await client.embeddings.create(model="demo", input=texts[:7])
    assert [entry.index for entry in answer.data] == list(range(150))
    for entry in answer.data:
        assert np.allclose(entry.embedding, few.data[entry.index % 7].embedding, atol=1e-5)


async def test_dimensions_are_cut_and_normalized_again(gateway: Gateway) -> None:
    async with client_of(gateway) as client:
        whole = (await client.embeddings.create(model="demo", input="Hello")).data[0].embedding
        cut = await client.embeddings.create(model="demo", input="Hello", dimensions=8)
        right = np.array(whole[:8]) / np.linalg.norm(whole[:8])
        assert np.allclose(cut.data[0].embedding, right, atol=1e-6)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.embeddings.create(model="demo", input="Hello", dimensions=len(whole) + 1)
    assert refused.value.param == "dimensions"
    assert str(len(whole)) in refused.value.message


async def test_a_prompt_may_fill_the_context(gateway: Gateway, http: httpx.AsyncClient) -> None:
    (model,) = (await http.get("/v1/models")).json()["data"]
    length = model["max_model_len"]
    for num_tokens, status in ((length, 200), (length + 1, 400)):
        body = {"model": "demo", "input": [65] * num_tokens}
        got = await http.post("/v1/embeddings", json=body)
        assert got.status_code == status, got.text
    assert got.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": ["x"] * 65, "durable": True}, "durable"),
        ({"input": 5}, "input"),
        ({"input": [999_999]}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"model": "nosuch"}, "model"),
    ],
)
async def test_refusals_name_the_field(
    gateway: Gateway, changed: dict[str, Any], param: str
) -> None:
    body = {"model": "demo", "input": "Hello"} | changed
    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as http:
        answer = await http.post("/v1/embeddings", json=body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


async def test_one_wrong_input_refuses_the_batch(gateway: Gateway) -> None:
    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as http:
        answer = await http.post(
            "/v1/embeddings", json={"model": "demo", "input": [[1, 2], [999_999]]}
        )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input"


def test_an_answer_has_an_embedding_of_each_input() -> None:
    assembler = EmbeddingAssembler(Answering("", "demo", 0, EmbeddingOptions(parts=2)))
    for part, embedding in enumerate(["AACAPw==", None]):
        assembler.add(part, TokenChunk(0, 1, [], embedding=embedding))
        assembler.add(part, Finish(1, 1, Usage(1, 0), 0, []))
    with pytest.raises(WorkerFailure, match="1 of 2 inputs have an embedding"):
        assembler.answer()
    assembler.add(1, TokenChunk(1, 1, [], embedding="AAAAQA=="))
    entries = json.loads(to_json(assembler.answer()))["data"]
    assert [entry["embedding"] for entry in entries] == [[1.0], [2.0]]


async def test_a_repeated_id_has_the_same_embedding(gateway: Gateway) -> None:
    headers = {"x-request-id": "embedded-twice"}
    body = {"model": "demo", "input": TEXTS}
    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False, headers=headers) as http:
        answers = [(await http.post("/v1/embeddings", json=body)).json() for _ in range(2)]
        other = await http.post("/v1/embeddings", json=body | {"dimensions": 4})
    assert answers[0] == answers[1]
    assert other.status_code == 422


async def test_models_show_that_they_embed(gateway: Gateway) -> None:
    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as http:
        answer = await http.get("/v1/models/demo")
    assert answer.json()["embeddings"] is True
    assert answer.json()["scores"] is True
