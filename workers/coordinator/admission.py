"""Admission: decodes and validates a client's request, and fills in the model's defaults."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from shared.config.schema import DeliveryConfig, ModelConfig
from shared.errors import InvalidRequest, UnknownAdapter, UnknownModel, UnsupportedContent
from shared.helpers.validation import complaint_of, invalid_request
from shared.protocol import subjects
from shared.protocol.encoding import UNDECODABLE, ClientDecoder, or_none
from shared.protocol.images import PaintParams, resolve_image
from shared.protocol.names import split_id
from shared.protocol.pipeline import REQUEST, TEXT, Pipeline, has_embeddings
from shared.protocol.prompts import prompt_of
from shared.protocol.requests import GenerateRequest, Prompt, decode_request
from shared.protocol.sampling import SamplingParams
from shared.protocol.videos import resolve_video

# Content parts of the OpenAI API that no stage accepts yet. Their error differs from that for an
# unknown type, because the request is valid for other servers.
UNSUPPORTED_PARTS = ("input_audio", "file", "image_embeds")


class _GivenSampling(msgspec.Struct, frozen=True):
    sampling_params: dict[str, Any] = {}


class _OnlyTimeout(msgspec.Struct, frozen=True):
    timeout_s: Annotated[float, Meta(gt=0)] | None = None


_SAMPLING_FIELDS = frozenset(SamplingParams.__struct_fields__)

# Decoders of single fields of a request. They skip the other fields.
_decode_sampling = ClientDecoder(_GivenSampling, checked=True)
_decode_timeout = or_none(ClientDecoder(_OnlyTimeout, checked=True))


class Admitted(NamedTuple):
    """A valid request, with all defaults resolved."""

    request: GenerateRequest
    sampling: SamplingParams
    prompt: Prompt
    outputs: list[str]
    """Empty if the text is the only output."""
    voice: str | None
    """Voice of the stage that speaks, if there is one."""
    image: PaintParams | None
    """Parameters of the stage that paints or makes a video, if there is one."""


def admit(
    subject: str,
    request_id: str,
    data: bytes,
    models: Mapping[str, ModelConfig],
    pipelines: Mapping[str, Pipeline],
) -> Admitted:
    """Decode and validate a request. Sampling parameters that it omits take the model's defaults.

    Raises a RequestError that names the field and what is allowed.
    """
    try:
        request = decode_request(data)
        params = _decode_sampling(data).sampling_params
    except UNDECODABLE as error:
        raise _refusal(error) from error
    used, right = subjects.without_key(subject), subjects.request(request.model, request_id)
    if used != right:
        _, tenant = split_id(request_id)
        right, used = (subjects.as_published(place, tenant) for place in (right, used))
        raise InvalidRequest(
            f"the subject of model {request.model!r} is {right}, not {used}", field="model"
        )
    if request.model not in models:
        raise UnknownModel(
            f"no model {request.model!r}; available: {', '.join(sorted(models))}", field="model"
        )
    model = models[request.model]
    if request.adapter is not None and request.adapter not in model.adapters:
        there_is = ", ".join(sorted(model.adapters)) or "none"
        raise UnknownAdapter(
            f"{request.model} has no adapter {request.adapter!r}; available: {there_is}",
            field="adapter",
        )
    pipeline = pipelines[request.model]
    # Defaults of the model override the defaults of the stage that writes its text.
    writer = pipeline.outputs.get(TEXT)
    merged = (writer.sampling_defaults if writer else {}) | model.sampling_defaults | params
    # In JSON the token ids of `logit_bias` are strings, like all keys.
    resolved = msgspec.convert(merged, SamplingParams, str_keys=True)
    if request.embedding is not None:
        resolved = _sampling_of_embedding(request, params, pipeline)
    part = _part_of(request, pipeline)
    outputs = [] if list(part.outputs) == [TEXT] else list(part.outputs)
    voice = _voice_of(request, part, resolved)
    image = _image_of(request, part, params)
    return Admitted(request, resolved, prompt_of(request), outputs, voice, image)


def _sampling_of_embedding(
    request: GenerateRequest, params: Mapping[str, Any], pipeline: Pipeline
) -> SamplingParams:
    """Return the parameters of an embedding request, which takes no defaults of the model."""
    if params:
        raise InvalidRequest(
            "sampling_params: an embedding has no sampled tokens", field="sampling_params"
        )
    if request.outputs:
        raise InvalidRequest("outputs: an embedding is the only output", field="outputs")
    if not has_embeddings(pipeline):
        raise UnsupportedContent(f"{request.model} has no embeddings", field="embedding")
    return SamplingParams()


def _part_of(request: GenerateRequest, pipeline: Pipeline) -> Pipeline:
    """Return the part of the pipeline that runs for a request.

    Raises InvalidRequest for an output that the model does not have, or cannot make from a given
    text.
    """
    is_given = request.given_text is not None
    available = pipeline.with_text_given.outputs if is_given else pipeline.outputs
    if is_given and not available:
        raise InvalidRequest(
            f"given_text: {request.model} makes no output from a text", field="given_text"
        )
    for number, name in enumerate(request.outputs):
        if name not in available:
            there_are = ", ".join(available)
            source = " that is made from a given text" if is_given else ""
            raise InvalidRequest(
                f"{request.model} has no output {name!r}{source}; available: {there_are}",
                field=f"outputs[{number}]",
            )
    part = pipeline.part_for(request.outputs, text_given=is_given)
    if part.speaks_given_texts and not is_given:
        raise InvalidRequest(
            f"{request.model} answers no prompts: it speaks a given_text", field="model"
        )
    if request.on_late == "text" and (TEXT not in part.outputs or len(part.outputs) == 1):
        raise InvalidRequest(
            "on_late: 'text' requires the text and another output in outputs", field="on_late"
        )
    return part


def _voice_of(request: GenerateRequest, part: Pipeline, sampling: SamplingParams) -> str | None:
    """Return the voice of a request. Raises InvalidRequest if its stages do not have this voice."""
    voices = part.voices
    if request.voice is not None and request.voice not in voices:
        there_are = ", ".join(voices) or "none for these outputs"
        raise InvalidRequest(
            f"{request.model} has no voice {request.voice!r}; available: {there_are}", field="voice"
        )
    if voices and sampling.n > 1:
        raise InvalidRequest(
            f"n: {sampling.n} answers cannot be spoken at once, the limit is 1",
            field="sampling_params.n",
        )
    return request.voice or next(iter(voices), None)


def _image_of(
    request: GenerateRequest, part: Pipeline, params: Mapping[str, Any]
) -> PaintParams | None:
    """Return the parameters of a request's images or of its video.

    Raises InvalidRequest for a field without effect, a value that the model does not support, or
    images that it does not edit.
    """
    if request.image is not None and part.painter is None:
        raise InvalidRequest("image: these outputs have no images", field="image")
    if request.video is not None and part.video_maker is None:
        raise InvalidRequest("video: these outputs have no video", field="video")
    painter = part.painter or part.video_maker
    if painter is None:
        return None
    noun = "an image" if painter.video is None else "a video"
    takes_prompt = any(edge.source == REQUEST for edge in part.edges_into(painter.name))
    if takes_prompt and request.messages and TEXT not in part.outputs:
        message = f"{request.model} answers no messages: it generates images from a prompt"
        raise InvalidRequest(message, field="model")
    if takes_prompt and not (request.prompt or "").strip():
        raise InvalidRequest(f"prompt: {noun} needs a prompt with a text", field="prompt")
    if params and TEXT not in part.outputs:
        raise InvalidRequest(f"sampling_params: {noun} has no tokens", field="sampling_params")
    if painter.video is not None:
        return resolve_video(
            request.video,
            painter.sampling_defaults,
            painter.sizes,
            painter.video,
            painter.size_rule,
        )
    return resolve_image(
        request.image,
        painter.sampling_defaults,
        painter.sizes,
        painter.input_images,
        painter.size_rule,
    )


def most_tokens(admitted: Admitted) -> int:
    """Return the maximum number of tokens that a request may write.

    It is 0 for a given text, an embedding, an image, and a video.
    """
    request = admitted.request
    if request.embedding is not None or request.given_text is not None or admitted.image:
        return 0
    return (admitted.sampling.max_tokens or 0) * admitted.sampling.n


def deadline_ms(accepted_ms: float, timeout_s: float | None, policy: DeliveryConfig) -> float:
    """Return the deadline of a request. Raises InvalidRequest for a timeout over the limit."""
    if timeout_s is None:
        timeout_s = policy.default_timeout_s
    elif timeout_s > policy.max_timeout_s:
        raise InvalidRequest(
            f"timeout_s: {timeout_s:g} is over the limit of {policy.max_timeout_s:g}",
            field="timeout_s",
        )
    return accepted_ms + 1000 * timeout_s


def latest_deadline_ms(data: bytes, accepted_ms: float, policy: DeliveryConfig) -> float:
    """Return the deadline of a request whose other fields cannot be decoded."""
    fields = _decode_timeout(data)
    timeout_s = None if fields is None else fields.timeout_s
    return accepted_ms + 1000 * min(timeout_s or policy.default_timeout_s, policy.max_timeout_s)


def _refusal(error: Exception) -> InvalidRequest | UnsupportedContent:
    if isinstance(error, msgspec.ValidationError):
        complaint = complaint_of(error)
        path = complaint.path
        if complaint.tag in UNSUPPORTED_PARTS:
            message = f"{path}: {complaint.tag} is not supported by this model"
            return UnsupportedContent(message, field=path)
        if complaint.kind == "unknown" and path in _SAMPLING_FIELDS:
            # Requests over HTTP have the sampling parameters next to the messages.
            message = f"{path}: unknown field; did you mean sampling_params.{path}?"
            return InvalidRequest(message, field=path)
    return invalid_request(error, GenerateRequest)
