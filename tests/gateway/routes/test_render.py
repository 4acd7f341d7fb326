"""Render through a real gateway, with the demo model."""

import asyncio

import httpx

from tests.gateway.routes.test_generate import GENERATE, RENDER, chat, ok, refused


async def test_render_refuses_an_invalid_image(
    http: httpx.AsyncClient,
) -> None:
    asked = chat()
    url = {"url": "data:image/png;base64,AAAA"}
    asked["messages"][0]["content"] = [{"type": "image_url", "image_url": url}]
    status, error = await refused(http, RENDER, asked)
    assert (status, error["code"], error["type"]) == (400, "invalid_media", "BadRequestError")


async def test_render_refuses_more_tokens_than_fit(
    http: httpx.AsyncClient,
) -> None:
    status, error = await refused(http, RENDER, chat(max_tokens=5000))
    assert (status, error["code"]) == (400, "context_length_exceeded")
    asked = chat()
    del asked["max_tokens"]
    assert (await ok(http, RENDER, asked))["sampling_params"]["max_tokens"] == 64


async def test_render_refuses_what_generate_would_refuse(
    http: httpx.AsyncClient,
) -> None:
    status, error = await refused(http, RENDER, chat(n=2, temperature=0))
    assert (status, error["code"], error["param"]) == (400, "invalid_request", "n")
    await ok(http, GENERATE, await ok(http, RENDER, chat(n=2, temperature=1)))


async def test_a_completion_is_rendered_with_its_own_tokens(
    http: httpx.AsyncClient,
) -> None:
    for asked, wanted in (({}, 16), ({"max_tokens": None}, 16), ({"max_tokens": 3}, 3)):
        body = {"model": "demo", "prompt": "a cat"} | asked
        (rendered,) = await ok(http, "/v1/completions/render", body)
        assert rendered["sampling_params"]["max_tokens"] == wanted


async def test_each_prompt_is_rendered_as_a_request(http: httpx.AsyncClient) -> None:
    asked = {"model": "demo", "prompt": ["a cat", "a dog and"], "max_tokens": 3, "temperature": 0}
    rendered = await ok(http, "/v1/completions/render", asked)
    whole = await ok(http, "/v1/completions", asked)
    bodies = [one | {"output_mode": "text"} for one in rendered]
    generated = await asyncio.gather(*(ok(http, GENERATE, body) for body in bodies))
    texts = [choice["text"] for choice in whole["choices"]]
    assert [one["choices"][0]["text"] for one in generated] == texts
    assert [one["request_id"].rsplit("-", 1)[1] for one in rendered] == ["0", "1"]
    assert sum(one["usage"]["prompt_tokens"] for one in generated) == 7
