"""`/v1/images/generations` and `edits`: the plan of a request, and the assembler of its answer.

Pure.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from shared.errors import InvalidRequest
from shared.protocol.images import (
    AUTO,
    NAMES,
    ImageParams,
    agreed,
    agreed_size,
    check_input_images,
    check_size,
)
from shared.protocol.multimodal import IMAGE
from shared.protocol.pipeline import StageSpec
from shared.protocol.records import AnyRecord, ImageRecord, OutputEnd, StepState
from shared.protocol.requests import GenerateRequest
from workers.gateway.core.assembler import Answering, AnswerOptions, Assembler, OutputOptions
from workers.gateway.core.field_names import ClientFields
from workers.gateway.core.kinds import AnswerKind, Budget, Refusal
from workers.gateway.core.order import in_speech_order
from workers.gateway.core.plan import Delivery, SubmitPlan, check_choice
from workers.gateway.schemas.images import (
    B64_JSON,
    PNG,
    URL,
    ImageEntry,
    ImageEvent,
    ImagesAnswer,
    ImagesRequest,
    ImageUsage,
    usage_of,
)

_MEDIA = "media:"


class PaintedOptions(OutputOptions, frozen=True, kw_only=True):
    """Options of painted images."""

    size: str
    base_url: str
    """URL prefix of the files, with a slash at the end."""
    edits: bool | UnsetType = UNSET
    """Whether the images are edited ones."""

    @property
    def event(self) -> str:
        """Beginning of the names of events."""
        return "image_generation" if self.edits is UNSET else "image_edit"


class ImageOptions(AnswerOptions, frozen=True, kw_only=True):
    images: PaintedOptions
    names: dict[str, str] | UnsetType = UNSET
    """The client's name of each bus field for which it used another name than the usual one."""

    @property
    def fields(self) -> Mapping[str, str]:
        return {} if self.names is UNSET else self.names

    @property
    def output(self) -> PaintedOptions:
        return self.images


def plan_images(
    request: ImagesRequest,
    painter: StageSpec | None,
    base_url: str,
    input_images: Sequence[str] = (),
    image_field: str = IMAGE,
) -> SubmitPlan[ImageOptions]:
    """Return the plan of a request for images, or for edits of `input_images`, which are URLs.

    Raises InvalidRequest naming the field.
    """
    painter = _checked(painter, request.model, len(input_images), image_field)
    values = msgspec.structs.asdict(request)
    size_field, size = agreed_size(values)
    num_field, num_images = agreed(values, NAMES["n"])
    guidance_field, guidance = agreed(values, NAMES["guidance"][1:])
    fields = {
        "image.size": size_field,
        "image.n": num_field,
        "image.guidance": guidance_field,
        "image.input_images": image_field,
    }
    usual = IMAGES.client_fields.names
    names = {field: name for field, name in fields.items() if name != usual[field]}
    if size is not None:
        check_size(size, painter.sizes, painter.size_rule, size_field)
    _check(request)
    params = ImageParams(
        size,
        # Clients of OpenAI read one image of a stream, also if the default of the model is more.
        1 if request.stream and num_images is None else num_images,
        request.num_inference_steps,
        guidance,
        request.negative_prompt,
        request.seed,
        request.partial_images,
        tuple(input_images),
    )
    assert painter.output is not None
    outputs, timeout_s = [painter.output.name], request.timeout_s
    generate_request = GenerateRequest(
        request.model, prompt=request.prompt, image=params, outputs=outputs, timeout_s=timeout_s
    )
    first = AUTO if input_images else painter.sizes[0]
    options = PaintedOptions(
        output=painter.output.name,
        format=request.response_format,
        size=size or str(painter.sampling_defaults.get("size", first)),
        base_url=base_url,
        edits=bool(input_images) or UNSET,
    )
    return SubmitPlan(
        [generate_request],
        {},
        ImageOptions(images=options, names=names or UNSET),
        delivery=Delivery.EVENTS if request.stream else Delivery.WHOLE,
        durable=bool(request.durable),
    )


def _checked(
    painter: StageSpec | None, model: str, num_input_images: int, image_field: str
) -> StageSpec:
    """Return the stage that paints. Raises InvalidRequest unless it edits this number of images."""
    if painter is None or painter.output is None:
        raise InvalidRequest(f"{model} paints no images", field="model")
    if painter.input_images and not num_input_images:
        message = f"{model} only edits images: send them to /v1/images/edits"
        raise InvalidRequest(message, field="model")
    check_input_images(num_input_images, painter.input_images, image_field)
    return painter


def _check(request: ImagesRequest) -> None:
    """Raises InvalidRequest for values that this endpoint does not support."""
    check_choice("output_format", request.output_format, [PNG])
    check_choice("response_format", request.response_format, [B64_JSON, URL])
    if request.stream:
        check_choice("response_format", request.response_format, [B64_JSON])
    elif request.partial_images:
        raise InvalidRequest("partial_images: previews require stream", field="partial_images")


class ImageAssembler(Assembler[ImageOptions]):
    """Assembler of images, or of their events, with previews."""

    def __init__(self, request: Answering[ImageOptions]) -> None:
        super().__init__(request)
        self.created_s = request.created_s
        self.images = self.options.images
        self.size = self.images.size
        self.entries: dict[int, ImageEntry] = {}
        self.num_previews: Counter[int] = Counter()
        """Number of previews of each image."""
        self.usage: ImageUsage = usage_of(0)

    def file_of(self, record: AnyRecord) -> str:
        match record:
            case ImageRecord():
                return record.media if self.images.format == B64_JSON else ""
            case StepState() if not self.collects_answer:
                return record.preview
            case _:
                return ""

    def add(self, part: int, record: AnyRecord, file: str = "") -> list[Any]:
        """Add a record. The end of the output has the usage, and so makes the last event.

        A stream sends the file of an image with the next one, so that only one is in memory.
        """
        match record:
            case ImageRecord():
                if self.size == AUTO:
                    self.size = f"{record.width}x{record.height}"
                events = [] if self.collects_answer else self._take_events()
                self.entries[record.number] = (
                    ImageEntry(b64_json=file)
                    if self.images.format == B64_JSON
                    else ImageEntry(url=self.images.base_url + record.media.removeprefix(_MEDIA))
                )
                return events
            case StepState(preview=preview) if preview:
                self.num_previews[record.number] += 1
                return [self._preview(record.number, file)]
            case OutputEnd(cut=False):
                self.usage = usage_of(record.summary.units.get("prompt_tokens", 0.0))
                return [] if self.collects_answer else self._take_events()
            case _:
                return []

    def _preview(self, number: int, file: str) -> ImageEvent:
        return ImageEvent(
            type=f"{self.images.event}.partial_image",
            b64_json=file,
            created_at=self.created_s,
            size=self.size,
            image_index=number,
            partial_image_index=self.num_previews[number] - 1,
        )

    def _take_events(self) -> list[ImageEvent]:
        entries, self.entries = self.entries, {}
        return [
            ImageEvent(
                type=f"{self.images.event}.completed",
                b64_json=entry.b64_json,
                created_at=self.created_s,
                size=self.size,
                image_index=number,
                usage=self.usage,
            )
            for number, entry in entries.items()
            if entry.b64_json
        ]

    def answer(self) -> ImagesAnswer:
        entries = [self.entries[number] for number in sorted(self.entries)]
        return ImagesAnswer(self.created_s, entries, self.size, self.usage)


IMAGES = AnswerKind(
    name="images",
    id_prefix="img",
    options=ImageOptions,
    assembler=ImageAssembler,
    client_fields=ClientFields(
        {
            "image.size": "size",
            "image.n": "n",
            "image.steps": "num_inference_steps",
            "image.guidance": "guidance_scale",
            "image.negative_prompt": "negative_prompt",
            "image.input_images": IMAGE,
            "outputs": "model",
        }
    ),
    order=lambda _, records: in_speech_order(records, timed=False),
    budget=Budget(output=Refusal("images", "response_format", "ask for their URLs")),
    event_name=lambda event: event.type,
)
