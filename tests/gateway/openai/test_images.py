"""Plans and answers of `/v1/images/generations`, and the events of its streams."""

from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from shared.errors import InvalidRequest
from shared.protocol.images import ImageParams
from shared.protocol.pipeline import OutputSpec, StageSpec
from shared.protocol.records import (
    AudioChunk,
    ChoiceDelta,
    Finish,
    ImageRecord,
    OutputEnd,
    OutputSummary,
    StepState,
    TokenChunk,
    Usage,
)
from workers.gateway.core.assembler import Answering
from workers.gateway.core.plan import Delivery
from workers.gateway.openai.images import IMAGES, ImageAssembler, ImageOptions, plan_images
from workers.gateway.schemas.images import ImagesRequest, usage_of

BASE = "https://gateway.example/v1/images/"
PAINTER = StageSpec(
    "dit", "generator", sizes=["16x16", "12x8"], output=OutputSpec("picture", "image")
)


def images_request(**changes: Any) -> ImagesRequest:
    return msgspec.convert({"model": "m", "prompt": "a star"} | changes, ImagesRequest)


def image_assembler(**changes: Any) -> ImageAssembler:
    """The assembler of a request, made from what is stored of its plan."""
    plan = plan_images(images_request(**changes), PAINTER, BASE)
    options = msgspec.json.decode(msgspec.json.encode(plan.options), type=ImageOptions)
    return ImageAssembler(Answering("images-1", "m", 7, options))


def painted(number: int) -> ImageRecord:
    return ImageRecord(number, 1, number, f"media:{number}", 16, 16, 5)


def end_of_images(*, cut: bool = False) -> OutputEnd:
    return OutputEnd(9, 1, OutputSummary(units={"prompt_tokens": 6.0}), cut)


EDITOR = msgspec.structs.replace(PAINTER, input_images=2)
URLS = ["media:" + "a" * 64, "media:" + "b" * 64]


def test_edits_have_the_size_and_the_events_of_their_images() -> None:
    plan = plan_images(images_request(stream=True, size="auto"), EDITOR, BASE, URLS)
    assert plan.requests[0].image == ImageParams(n=1, input_images=tuple(URLS))
    assembler = ImageAssembler(Answering("images-1", "m", 7, plan.options))
    assembler.collects_answer = False
    records = (StepState(0, 1, 0, 2, 4, preview="media:p"), painted(0), end_of_images())
    events = [event for record in records for event in assembler.add(0, record, "file")]
    assert [(event.type, event.size) for event in events] == [
        ("image_edit.partial_image", "auto"),
        ("image_edit.completed", "16x16"),
    ]
    sized = plan_images(images_request(size="12x8"), EDITOR, BASE, URLS).options.images
    assert (sized.size, sized.event) == ("12x8", "image_edit")


@pytest.mark.parametrize(
    ("painter", "urls", "field", "message"),
    [
        (PAINTER, URLS, "images", "images: the model edits no images"),
        (EDITOR, [*URLS, *URLS], "images", "images: the model edits 1 to 2 images, not 4"),
        (EDITOR, [], "model", "m only edits images: send them to /v1/images/edits"),
    ],
)
def test_a_model_gets_as_many_images_as_it_edits(
    painter: StageSpec, urls: list[str], field: str, message: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        plan_images(images_request(), painter, BASE, urls, "images")
    assert (refused.value.field, refused.value.message) == (field, message)


# -- plans -----------------------------------------------------------------------------------------


def test_a_plan_asks_for_the_output_of_the_stage_that_paints() -> None:
    plan = plan_images(
        images_request(
            n=2,
            size="12x8",
            seed=3,
            num_inference_steps=4,
            guidance_scale=1.5,
            negative_prompt="a moon",
            timeout_s=8,
            durable=True,
        ),
        PAINTER,
        BASE,
    )
    (request,) = plan.requests
    assert (request.prompt, request.outputs, request.timeout_s) == ("a star", ["picture"], 8)
    assert request.image == ImageParams("12x8", 2, 4, 1.5, "a moon", 3)
    assert (plan.delivery, plan.durable, plan.sampling) == (Delivery.WHOLE, True, {})
    assert msgspec.to_builtins(plan.options) == {
        "images": {"output": "picture", "format": "b64_json", "size": "12x8", "base_url": BASE}
    }


@pytest.mark.parametrize("size", [None, "auto"])
def test_the_size_is_the_configured_one_or_the_first(size: str | None) -> None:
    plan = plan_images(images_request(size=size), PAINTER, BASE)
    # Omitted parameters are left to the stage.
    assert plan.requests[0].image == ImageParams()
    assert plan.options.images.size == "16x16"
    configured = msgspec.structs.replace(PAINTER, sampling_defaults={"size": "12x8"})
    plan = plan_images(images_request(size=size), configured, BASE)
    assert plan.options.images.size == "12x8"


def test_a_stream_has_images_and_their_previews() -> None:
    plan = plan_images(images_request(stream=True, partial_images=3, n=2), PAINTER, BASE)
    assert plan.requests[0].image == ImageParams(n=2, partial_images=3)
    assert plan.delivery == Delivery.EVENTS


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"size": "99x99"}, "size"),
        ({"output_format": "webp"}, "output_format"),
        ({"response_format": "file"}, "response_format"),
        ({"response_format": "url", "stream": True}, "response_format"),
        ({"partial_images": 1}, "partial_images"),
    ],
)
def test_what_is_not_painted_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        plan_images(images_request(**changes), PAINTER, BASE)
    assert refused.value.field == field
    assert refused.value.message.startswith(f"{field}: ")


def test_the_names_of_diffusers_are_read() -> None:
    """The call of the first version of the design, as it stands there."""
    body = {
        "model": "qwen-image",
        "prompt": "...",
        "seed": 42,
        "cfg_scale": 4.0,
        "num_images_per_prompt": 1,
        "num_inference_steps": 50,
        "height": 1024,
        "width": 1024,
    }
    painter = msgspec.structs.replace(PAINTER, sizes=["1328x1328", "1024x1024"])
    plan = plan_images(msgspec.convert(body, ImagesRequest), painter, BASE)
    assert plan.requests[0].image == ImageParams("1024x1024", 1, 50, 4.0, None, 42)
    assert plan.options.images.size == "1024x1024"
    assert plan.options.fields == {
        "image.size": "width",
        "image.n": "num_images_per_prompt",
        "image.guidance": "cfg_scale",
    }


def test_names_of_one_value_may_repeat_it() -> None:
    values = {"guidance_scale": 2, "true_cfg_scale": 2.0, "cfg_scale": 2}
    again = {"n": 3, "num_images_per_prompt": 3, "size": "12x8", "width": 12, "height": 8}
    plan = plan_images(images_request(**values, **again), PAINTER, BASE)
    assert plan.requests[0].image == ImageParams("12x8", 3, None, 2.0)
    assert plan.options.names is UNSET
    plan = plan_images(images_request(size="auto", width=12, height=8), PAINTER, BASE)
    assert plan.requests[0].image == ImageParams("12x8")


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        (
            {"guidance_scale": 2, "cfg_scale": 3},
            "cfg_scale",
            "cfg_scale: 3.0 contradicts guidance_scale, 2.0: send one of them",
        ),
        ({"true_cfg_scale": 2, "cfg_scale": 3}, "cfg_scale", "contradicts true_cfg_scale, 2.0"),
        ({"n": 1, "num_images_per_prompt": 2}, "num_images_per_prompt", "contradicts n, 1"),
        ({"size": "16x16", "width": 12, "height": 8}, "width", "12x8 contradicts size, 16x16"),
        ({"width": 12}, "height", "height: required with width"),
        ({"height": 12}, "width", "width: required with height"),
        ({"height": 99, "width": 99}, "width", "width: '99x99' is not available; available: 16x16"),
    ],
)
def test_names_that_contradict_each_other_are_refused(
    changes: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        plan_images(images_request(**changes), PAINTER, BASE)
    assert refused.value.field == field
    assert message in refused.value.message


@pytest.mark.parametrize("stage", [None, msgspec.structs.replace(PAINTER, output=None)])
def test_a_model_without_a_painter_is_refused(stage: StageSpec | None) -> None:
    with pytest.raises(InvalidRequest, match="m paints no images") as refused:
        plan_images(images_request(), stage, BASE)
    assert refused.value.field == "model"


# -- answers ---------------------------------------------------------------------------------------


def test_images_are_answered_by_number_in_any_order_of_their_ends() -> None:
    assembler = image_assembler(n=2)
    for number in (1, 0):
        record = painted(number)
        assert assembler.file_of(record) == record.media
        assert assembler.add(1, record, f"file {number}") == []
    assembler.add(1, end_of_images())
    answer = assembler.answer()
    assert [entry.b64_json for entry in answer.data] == ["file 0", "file 1"]
    assert (answer.created, answer.size, answer.usage) == (7, "16x16", usage_of(6))
    assert msgspec.to_builtins(answer)["data"][0] == {"b64_json": "file 0"}
    assert answer.usage.total_tokens == 6


def test_urls_are_answered_without_reading_the_files() -> None:
    assembler = image_assembler(response_format="url")
    assert assembler.file_of(painted(0)) == ""
    assembler.add(1, painted(0), "")
    assert assembler.add(1, end_of_images()) == []
    assert msgspec.to_builtins(assembler.answer())["data"] == [{"url": f"{BASE}0"}]


def test_a_stream_shows_numbered_previews_and_then_the_image() -> None:
    assembler = image_assembler(stream=True, partial_images=2, size="12x8")
    assembler.collects_answer = False
    events = []
    for step, preview in enumerate(["", "media:a", "", "media:b"]):
        record = StepState(step, 1, 0, step, 4, "media:state", preview)
        assert assembler.file_of(record) == preview
        events += assembler.add(1, record, f"file of {preview}")
    assert assembler.add(1, painted(0), "file") == []
    events += assembler.add(1, end_of_images())
    assert [
        (IMAGES.event_name(event), event.b64_json, event.created_at, event.size) for event in events
    ] == [
        ("image_generation.partial_image", "file of media:a", 7, "12x8"),
        ("image_generation.partial_image", "file of media:b", 7, "12x8"),
        ("image_generation.completed", "file", 7, "12x8"),
    ]
    assert [event.partial_image_index for event in events[:2]] == [0, 1]
    assert events[2].usage == usage_of(6)
    assert "usage" not in msgspec.to_builtins(events[0])


def test_a_stream_sends_each_image_with_its_number() -> None:
    assembler = image_assembler(stream=True, partial_images=1, n=2)
    assembler.collects_answer = False
    records = (
        StepState(0, 1, 1, 2, 4, preview="media:p"),
        StepState(1, 1, 0, 2, 4, preview="media:p"),
        painted(1),
        painted(0),
        end_of_images(),
    )
    events = [assembler.add(1, record, "file") for record in records]
    assert [len(new) for new in events] == [1, 1, 0, 1, 1]
    flat = [event for new in events for event in new]
    assert [event.image_index for event in flat] == [1, 0, 1, 0]
    assert [event.partial_image_index for event in flat[:2]] == [0, 0]
    assert [event.usage for event in flat[2:]] == [usage_of(0), usage_of(6)]


def test_an_answer_reads_no_previews() -> None:
    step = StepState(0, 1, 0, 1, 4, preview="media:a")
    assert image_assembler().file_of(step) == ""


def test_records_of_other_kinds_show_nothing() -> None:
    assembler = image_assembler()
    assembler.add(1, painted(0), "file")
    assert assembler.add(0, TokenChunk(0, 1, [ChoiceDelta(0, 0, [5], "x")])) == []
    assert assembler.add(1, AudioChunk(0, 1, 0, 1, 24_000, "AAA=")) == []
    # An output that is cut has no event: the request has ended otherwise.
    assert assembler.add(1, end_of_images(cut=True)) == []
    assert assembler.add(0, Finish(1, 1, Usage(0, 0), 0, [])) == []
    assert assembler.answer().usage == usage_of(0)
