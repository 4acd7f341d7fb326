"""Documents over HTTP with the official client: the demo model reads the letters on their pages."""

import base64
from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.gateway.conftest import Gateway
from tests.support.documents import document, letters, reported, scans, stream
from tests.support.media import data_url, png

QUESTION = "Which letter is this?"
PDF = "application/pdf"


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def read(client: AsyncOpenAI, file: dict[str, Any], question: str = QUESTION) -> str:
    content: Any = [{"type": "file", "file": file}, {"type": "text", "text": question}]
    answer = await client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": content}], temperature=0
    )
    return (answer.choices[0].message.content or "").lower()


async def respond(client: AsyncOpenAI, file: dict[str, Any], **options: Any) -> Any:
    content: Any = [{"type": "input_file", **file}, {"type": "input_text", "text": QUESTION}]
    return await client.responses.create(
        model="demo", input=[{"role": "user", "content": content}], temperature=0, **options
    )


@pytest.mark.parametrize("make", [letters, reported, scans])
async def test_the_letter_of_a_page_is_read(
    client: AsyncOpenAI, make: Callable[[str], bytes]
) -> None:
    data = make("KTE")
    stored = await client.files.create(file=("letters.pdf", data), purpose="user_data")
    files: list[dict[str, Any]] = [
        {"file_data": data_url(data, PDF), "filename": "letters.pdf", "pages": "1"},
        {"file_data": base64.b64encode(data).decode(), "pages": "2", "dpi": 72},
        {"file_id": stored.id, "pages": "3"},
    ]
    answers = [await read(client, file) for file in files]
    found = [letter in answer for letter, answer in zip("kte", answers, strict=True)]
    assert all(found), answers


async def test_responses_read_documents(client: AsyncOpenAI) -> None:
    data = letters("KT")
    stored = await client.files.create(file=("letters.pdf", data), purpose="user_data")
    files: list[dict[str, Any]] = [
        {"file_id": stored.id},
        {"file_data": data_url(data, PDF), "filename": "letters.pdf"},
        {"file_url": f"media:{stored.id}"},
    ]
    for file in files:
        response = await respond(client, file | {"pages": "1"})
        assert "k" in response.output_text.lower()
    counted = await client.responses.input_tokens.count(
        model="demo",
        input=[{"role": "user", "content": [{"type": "input_file", **files[0]}]}],
    )
    assert counted.input_tokens > 2


async def test_a_large_document_is_stored_outside_of_requests_and_responses(
    client: AsyncOpenAI,
) -> None:
    data = letters("K") + bytes(9 * 2**20)
    file = {"file_data": data_url(data, PDF), "filename": "k.pdf"}
    assert "k" in await read(client, file)
    first = await respond(client, file)
    assert "k" in first.output_text.lower()
    again = await client.responses.create(
        model="demo", input=QUESTION, previous_response_id=first.id
    )
    assert again.status == "completed"
    items: Any = await client.responses.input_items.list(first.id)
    part = items.data[0].content[0]
    assert (part.type, part.filename, part.file_data) == ("input_file", "k.pdf", None)


async def test_faults_name_the_field_of_the_client(client: AsyncOpenAI) -> None:
    document_of_nine = data_url(document([stream(b"")] * 9), PDF)
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({}, "invalid_request", "file"),
        ({"file_id": f"file-{'0' * 64}", "file_url": "https://a.example/b"}, "", "file"),
        ({"file_id": f"file-{'0' * 64}"}, "media_not_found", "file"),
        ({"file_data": data_url(png(1)), "filename": "a.pdf"}, "invalid_media", "file"),
        ({"file_data": data_url(letters("A"), PDF), "pages": "2-1"}, "invalid_request", "file"),
        ({"file_data": data_url(letters("A"), PDF), "pages": "0"}, "", "file.pages"),
        ({"file_data": data_url(letters("A"), PDF), "dpi": 601}, "", "file.dpi"),
        ({"file_data": document_of_nine}, "media_too_large", "file"),
        ({"file_url": "https://a.example/b.pdf"}, "media_url_blocked", "file"),
    ]
    for file, code, field in cases:
        with pytest.raises(openai.APIStatusError) as refused:
            await read(client, file)
        assert refused.value.code == (code or "invalid_request")
        assert refused.value.param == f"messages[0].content[0].{field}"
    with pytest.raises(openai.BadRequestError) as refused:
        await respond(client, {"filename": "a.pdf"})
    assert refused.value.param == "input[0].content[0]"
