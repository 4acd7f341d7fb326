"""Render through a real gateway, with the demo model."""

import asyncio

import httpx

from tests.gateway.routes.test_generate import GENERATE, RENDER, chat, ok, refused


async def test_render_refuses_an_invalid_image(
    http: httpx.AsyncClient,
) -> None:
    body = chat()
    url = {"url": "data:image/png;base64,AAAA"}
    body["messages"][0]["content"] = [{"type": "image_url", "image_url": url}]
    status, error = await refused(http, RENDER, body)
    assert (status, error["code"], error["type"]) == (400, "invalid_media", "BadRequestError")


async def test_render_refuses_more_tokens_than_fit(
    http: httpx.AsyncClient,
) -> None:
    status, error = await refused(http, RENDER, chat(max_tokens=5000))
    assert (status, error["code"]) == (400, "context_length_exceeded")
    body = chat()
    del body["max_tokens"]
    assert (await ok(http, RENDER, body))["sampling_params"]["max_tokens"] == 64


async def test_render_refuses_what_generate_would_refuse(
    http: httpx.AsyncClient,
) -> None:
    status, error = await refused(http, RENDER, chat(n=2, temperature=0))
    assert (status, error["code"], error["param"]) == (400, "invalid_request", "n")
    await ok(http, GENERATE, await ok(http, RENDER, chat(n=2, temperature=1)))


async def test_a_completion_is_rendered_with_its_own_tokens(
    http: httpx.AsyncClient,
) -> None:
    for fields, max_tokens in (({}, 16), ({"max_tokens": None}, 16), ({"max_tokens": 3}, 3)):
        body = {"model": "demo", "prompt": "a cat"} | fields
        (rendered,) = await ok(http, "/v1/completions/render", body)
        assert rendered["sampling_params"]["max_tokens"] == max_tokens


async def test_each_prompt_is_rendered_as_a_request(http: httpx.AsyncClient) -> None:
    batch = {"model": "demo", "prompt": ["a cat", "a dog and"], "max_tokens": 3, "temperature": 0}
    rendered = await ok(http, "/v1/completions/render", batch)
    whole = await ok(http, "/v1/completions", batch)
    bodies = [request | {"output_mode": "text"} for request in rendered]
    generated = await asyncio.gather(*(ok(http, GENERATE, body) for body in bodies))
    texts = [choice["text"] for choice in whole["choices"]]
    assert [answer["choices"][0]["text"] for answer in generated] == texts
    assert [request["request_id"].rsplit("-", 1)[1] for request in rendered] == ["0", "1"]
    assert sum(answer["usage"]["prompt_tokens"] for answer in generated) == 7
