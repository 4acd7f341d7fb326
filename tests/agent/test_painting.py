"""Responses with painted images, by real agents and a scripted model."""

import base64
import hashlib
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from shared import client
from shared.bus.bus import Bus
from shared.protocol import subjects
from tests.agent.conftest import EDITOR, AgentRig, call
from tests.agent.test_mcp import mcp, respond

PAINT: Any = {"type": "image_generation", "partial_images": 1}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def painted(prompt: str) -> str:
    return base64.b64encode(prompt.encode()).decode()


async def test_the_model_has_an_image_painted_and_learns_of_it(
    rig: AgentRig, openai_client: AsyncOpenAI, agent_bus: Bus
) -> None:
    rig.scripts["Paint a star."] = [call("image_generation", prompt="a star"), "Here it is."]
    events = await respond(openai_client, "Paint a star.", PAINT, stream=True)
    stream = [event async for event in events]
    kinds = [event.type.removeprefix("response.") for event in stream]
    assert kinds[2:9] == [
        "output_item.added",
        "image_generation_call.in_progress",
        "image_generation_call.generating",
        "image_generation_call.partial_image",
        "image_generation_call.completed",
        "output_item.done",
        "output_item.added",
    ]
    for event in stream:
        EVENT.validate_json(event.model_dump_json(exclude_unset=True))
    preview: Any = stream[5]
    assert (preview.partial_image_b64, preview.partial_image_index) == (
        painted("preview of a star"),
        0,
    )
    whole: Response = stream[-1].response
    image, text = whole.output
    assert image.type == "image_generation_call"
    assert (image.status, image.result, image.revised_prompt, image.size) == (
        "completed",
        painted("a star"),
        "a star",
        "16x16",
    )
    assert text.type == "message"
    # Stored, and the same at any time.
    assert await openai_client.responses.retrieve(whole.id) == whole
    again = await openai_client.responses.retrieve(whole.id, stream=True, starting_after=4)
    assert [event async for event in again] == stream[5:]
    # The model gets words, and never the image.
    second = rig.model.requests[f"{whole.id}~t1"].messages or []
    assert [message.role for message in second] == ["user", "assistant", "tool"]
    assert second[2].content == "The image is painted, and the user is shown it."
    assert rig.model.answered[f"{whole.id}~i1-0"] == 1
    # The item is an input item as well.
    followed = await respond(
        openai_client,
        [
            {"role": "user", "content": "Paint."},
            image.model_dump(),
            {"role": "user", "content": "?"},
        ],
    )
    messages = rig.model.requests[f"{followed.id}~t0"].messages or []
    assert [message.role for message in messages] == ["user", "assistant", "tool", "user"]
    await openai_client.responses.delete(whole.id)
    left = await agent_bus.figures.subjects_of(subjects.TOKENS_STREAM, "pm.>")
    assert not [subject for subject in left if whole.id in subject]


async def test_images_count_as_calls_next_to_calls_of_servers(
    rig: AgentRig, openai_client: AsyncOpenAI
) -> None:
    both = call("image_generation", prompt="a cat") + call("free__add", a=1, b=2)
    rig.scripts["Do both."] = [both + call("image_generation", prompt="a dog"), "Done."]
    response = await respond(openai_client, "Do both.", PAINT, mcp(), max_tool_calls=2)
    first, added, second = response.output[1:4]
    assert (first.result, added.output) == (painted("a cat"), "3")
    assert (second.status, second.result) == ("failed", None)
    assert "max_tool_calls" in second.error.message
    assert f"{response.id}~i1-2" not in rig.model.answered

    rig.scripts["Paint nothing."] = [call("image_generation", size="big"), "Done."]
    response = await respond(openai_client, "Paint nothing.", PAINT)
    assert (response.status, response.output[0].status) == ("completed", "failed")
    assert "no prompt" in response.output[0].error.message


@pytest.mark.parametrize("choice", [True, False])
async def test_only_the_tool_that_paints_may_be_called(
    rig: AgentRig, openai_client: AsyncOpenAI, *, choice: bool
) -> None:
    rig.scripts["Choose."] = [call("image_generation", prompt="a fox"), "Done."]
    paint: Any = {"type": "image_generation"}
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [paint]}
    function: Any = {"type": "function", "name": "add", "parameters": {}, "strict": False}
    response = await openai_client.responses.create(
        model="scripted",
        input="Choose.",
        tools=[function, paint],
        tool_choice=paint if choice else allowed,
    )
    assert response.output[0].type == "image_generation_call"
    sampling = rig.model.requests[f"{response.id}~t0"].sampling_params
    assert "image_generation" in str(sampling)
    assert '"add"' not in str(sampling)


@pytest.mark.parametrize(
    ("changes", "code", "field"),
    [
        ({"tools": [PAINT, PAINT]}, "invalid_request", "tools[1].type"),
        ({"tools": [PAINT | {"size": "1x1"}]}, "invalid_request", "tools[0].size"),
        ({"tools": [PAINT | {"model": "none"}]}, "unsupported_parameter", "tools[0].model"),
        (
            {"tools": [PAINT | {"output_format": "webp"}]},
            "invalid_request",
            "tools[0].output_format",
        ),
        (
            {"tools": [PAINT, {"type": "function", "name": "image_generation"}]},
            "invalid_request",
            "tools[1].name",
        ),
        (
            {
                "tools": [{"type": "function", "name": "add"}],
                "tool_choice": {"type": "image_generation"},
            },
            "invalid_request",
            "tool_choice.type",
        ),
    ],
)
async def test_what_cannot_be_painted_is_refused(
    openai_client: AsyncOpenAI, changes: Any, code: str, field: str
) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        await openai_client.responses.create(model="scripted", input="Paint.", **changes)
    assert (refused.value.code, refused.value.param) == (code, field)


# -- edits -----------------------------------------------------------------------------------------

EDIT: Any = {"type": "image_generation", "model": EDITOR}
CAT = b"the file of a cat"


def image_of(data: bytes) -> dict[str, str]:
    return {
        "type": "input_image",
        "image_url": f"data:image/png;base64,{base64.b64encode(data).decode()}",
        "detail": "auto",
    }


def question(text: str, *files: bytes) -> Any:
    parts: list[Any] = [{"type": "input_text", "text": text}]
    return {"role": "user", "content": [*parts, *map(image_of, files)]}


def url_of(data: bytes) -> str:
    return f"media:{hashlib.sha256(data).hexdigest()}"


async def test_the_model_edits_the_last_image_of_the_conversation(
    rig: AgentRig, openai_client: AsyncOpenAI, agent_bus: Bus
) -> None:
    """An image of the input, then the result of the turn before, then of the response before."""
    edits = [call("image_generation", prompt=prompt) for prompt in ("red", "round")]
    rig.scripts["Edit it."] = [*edits, "Here it is."]
    rig.scripts["Again."] = [call("image_generation", prompt="large"), "Here it is."]
    first = await respond(openai_client, [question("Edit it.", CAT)], EDIT | {"action": "edit"})
    red, rounded, _ = first.output
    assert (red.result, rounded.result) == (painted("red"), painted("round"))
    assert (red.action, red.size) == ("edit", "16x16")
    sent = [rig.model.requests[f"{first.id}~i{turn}-0"] for turn in (1, 2)]
    assert [request.image and request.image.input_images for request in sent] == [
        (url_of(CAT),),
        (url_of(b"red"),),
    ]
    assert {(request.model, request.image and request.image.size) for request in sent} == {
        (EDITOR, None)
    }
    assert await client.find_media(agent_bus, url_of(CAT)) == CAT
    (tool,) = rig.model.requests[f"{first.id}~t0"].tools
    assert tool.function.description == (
        "Change the last image of the conversation. The user is shown the new image."
    )
    second = await respond(openai_client, "Again.", EDIT, previous_response_id=first.id)
    request = rig.model.requests[f"{second.id}~i1-0"]
    assert request.image is not None
    assert request.image.input_images == (url_of(b"round"),)


async def test_a_model_that_only_edits_responds_with_an_edited_image(
    rig: AgentRig, openai_client: AsyncOpenAI
) -> None:
    form: Any = {"model": EDITOR, "tools": [{"type": "image_generation"}]}
    first = await openai_client.responses.create(**form, input=[question("blue", CAT)])
    (image,) = first.output
    assert image.type == "image_generation_call"
    assert image.result == painted("blue")
    named: Any = {"type": "image_generation_call", "id": image.id}
    follow_ups: list[Any] = [
        {"input": "large", "previous_response_id": first.id},
        {"input": [image.model_dump(), question("large")]},
        {"input": [question("large"), named], "previous_response_id": first.id},
    ]
    for fields in follow_ups:
        second = await openai_client.responses.create(**form, **fields)
        request = rig.model.requests[f"{second.id}~i0-0"]
        assert request.prompt == "large"
        assert request.image is not None
        assert request.image.input_images == (url_of(b"blue"),)
        items = await openai_client.responses.input_items.list(second.id)
        assert not any(getattr(item, "result", None) for item in items.data)


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        (
            {"model": "scripted", "tools": [PAINT | {"action": "edit"}]},
            "tools[0].action",
            "scripted edits no images",
        ),
        (
            {"tools": [EDIT | {"action": "generate"}]},
            "tools[0].action",
            "editor only edits images",
        ),
        ({"input": "a cat"}, "input", "edits one image, not 0"),
        ({"input": [question("a", CAT, b"dog")]}, "input[0].content[1]", "one image, not 2"),
        (
            {
                "input": [
                    question("a"),
                    {"type": "image_generation_call", "id": "ig_1", "result": None},
                ]
            },
            "input[1]",
            "send its result in the item",
        ),
        (
            {
                "input": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_image", "image_url": "https://a.example/cat.png"},
                            {"type": "input_text", "text": "a"},
                        ],
                    }
                ]
            },
            "input[0].content[0]",
            "not a stored file or a data: URL",
        ),
    ],
)
async def test_what_cannot_be_edited_is_refused(
    openai_client: AsyncOpenAI, changes: Any, field: str, words: str
) -> None:
    form: Any = {"model": EDITOR, "input": [question("a", CAT)], "tools": [EDIT]}
    with pytest.raises(openai.APIStatusError) as refused:
        await openai_client.responses.create(**form | changes)
    assert refused.value.param == field
    assert words in refused.value.message
