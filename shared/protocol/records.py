"""Records of token logs and of the logs of other outputs."""

from typing import Literal

import msgspec
from msgspec import Struct

from shared import errors
from shared.errors import PagemillError, RequestError, ServerError
from shared.protocol.pipeline import AUDIO, CODES, IMAGE_KIND, VIDEO_KIND


class StageSpan(Struct, frozen=True, array_like=True):
    """One stage of a request's path. Times are Unix milliseconds of the broker's clock.

    The span of a fan-out stage is written by the stage that gathers its results, and covers the
    time in which that stage waited for them.
    """

    stage: str
    worker: str
    """Empty for a fan-out stage, whose items may have been processed by several workers."""
    attempt: int
    received_ms: float
    sent_ms: float


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Log probability of one token under the model's own distribution, before any sampling
    parameter changes it: natural logarithms to six decimals, -9999 for none."""

    logprob: float
    rank: int
    """1 for the most probable token."""
    top_token_ids: list[int]
    """The requested number of most probable tokens, best first."""
    top_logprobs: list[float]


class ChoiceDelta(Struct, frozen=True, omit_defaults=True):
    """New tokens of one choice. `position` is the index of the first one in the answer."""

    index: int
    position: int
    token_ids: list[int]
    text: str
    """Text of these and earlier tokens. Text that may become a stop string is held back."""
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None
    """Stop string or stop token that ended the choice; null for the model's end token."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `token_ids`, if the request has `logprobs`."""


class TokenChunk(Struct, frozen=True, omit_defaults=True, tag="tokens"):
    """Tokens of an answer. `index` counts the records of one log from 0 without a gap."""

    index: int
    attempt: int
    choices: list[ChoiceDelta]
    prompt_logprobs: list[TokenLogprobs] | None = None
    """One for each token of the prompt except the first, if the request has `prompt_logprobs`; only
    in the first record."""
    embedding: str | None = None
    """Embedding of the prompt, as base64 of 32-bit floats, least significant byte first. It is in
    the only record of a request for an embedding, which has no choices."""


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Number of prompt tokens from the prefix cache, which were not computed."""


class ErrorInfo(Struct, frozen=True):
    code: str
    message: str
    field: str | None
    fault: Literal["client", "server"]
    retryable: bool
    """Whether the same request may succeed when it is sent again, with another id."""
    retry_after_s: float | None = None


class OutputSummary(Struct, frozen=True, omit_defaults=True):
    """Summary of an output at its end."""

    usage: Usage | None = None
    """Tokens of the output of an engine. For codes these are frames."""
    kv_blocks: int = 0
    """Maximum number of KV blocks that the stage held for the request at one time."""
    units: dict[str, float] = {}
    """Amounts by name, such as `samples` or `steps`."""
    path: list[StageSpan] = []
    """Stages that led to the output, its own stage last."""
    finish_reason: Literal["stop", "length"] | None = None
    """Reason for the end of codes; `length` for a speech that is cut at its stage's limit."""
    error: ErrorInfo | None = None
    """Reason why the output was cut, if the request ended without it; see `on_late`."""


class Finish(Struct, frozen=True, tag="finish", omit_defaults=True):
    """Last record of a successful request. Each choice has its reason in its last token record."""

    index: int
    attempt: int
    usage: Usage
    kv_blocks: int
    """Maximum number of KV blocks that the request held at one time."""
    path: list[StageSpan]
    outputs: dict[str, OutputSummary] = {}
    """Summaries by name, if the request has outputs other than its text."""


class Failure(Struct, frozen=True, tag="error"):
    """Last record of a log that ended with an error."""

    index: int
    attempt: int
    error: ErrorInfo
    path: list[StageSpan]


LogRecord = TokenChunk | Finish | Failure
"""Records of a request's own log, which is also the log of its text."""


class MediaChunk(Struct, frozen=True, tag="media", omit_defaults=True):
    """Piece of an output that is not text."""

    index: int
    attempt: int
    mime: str
    offset: int
    """Position of the piece, in the unit of the output: bytes, samples, or images."""
    data: str = ""
    """Base64 of a small piece."""
    media: str = ""
    """`media:<sha256>` of a stored file with a large piece."""


class CodeChunk(Struct, frozen=True, tag=CODES, omit_defaults=True):
    """Codec frames of speech, which a later stage turns into sound."""

    index: int
    attempt: int
    position: int
    """Index of the first frame in the speech. The next record continues after the last frame."""
    frames: list[list[int]]
    """Codes of each frame, one for each codebook of the codec."""
    end_token: int | None = None
    """Number of tokens of the text that are spoken at the end of these frames, if it is known."""
    end_character: int | None = None
    """Number of characters of the text that are spoken at the end of these frames: only in the last
    record of each piece of a long text, except the last piece."""


class AudioChunk(Struct, frozen=True, tag=AUDIO, omit_defaults=True):
    """Consecutive samples of sound, of one channel."""

    index: int
    attempt: int
    first_sample: int
    """Index of the first sample in the sound. The next record continues after the last sample."""
    num_samples: int
    sample_rate: int
    """Samples per second, the same in all records of a log."""
    pcm: str
    """Base64 of 16-bit signed integers, least significant byte first."""
    end_token: int | None = None
    """Number of tokens of the text that are spoken at the end of these samples, if it is known."""


class StepState(Struct, frozen=True, tag="step", omit_defaults=True):
    """Progress of an image or a video. For each, only the last record with `state` counts."""

    index: int
    attempt: int
    number: int
    """Number of the image in the request, from 0; 0 for a video."""
    step: int
    """Number of completed steps."""
    steps: int
    state: str = ""
    """`media:<sha256>` of an envelope with the latents after this step, so that another worker can
    continue."""
    preview: str = ""
    """`media:<sha256>` of a PNG with a preview of the image."""


class ImageRecord(Struct, frozen=True, tag=IMAGE_KIND):
    """Finished image."""

    index: int
    attempt: int
    number: int
    """Number of the image in the request, from 0. Images may end in any order."""
    media: str
    """`media:<sha256>` of the PNG file."""
    width: int
    height: int
    seed: int
    """Seed of the noise, together with the number."""


class VideoRecord(Struct, frozen=True, tag=VIDEO_KIND):
    """Finished video."""

    index: int
    attempt: int
    media: str
    """`media:<sha256>` of the MP4 file."""
    width: int
    height: int
    frames: int
    fps: int
    seed: int
    """Seed of the noise."""


class OutputEnd(Struct, frozen=True, tag="end", omit_defaults=True):
    """Last record in the separate log of an output."""

    index: int
    attempt: int
    summary: OutputSummary
    cut: bool = False
    """Whether the request ended before the output was complete."""


OutputRecord = (
    MediaChunk | CodeChunk | AudioChunk | StepState | ImageRecord | VideoRecord | OutputEnd
)
"""Records of the log of an output that is not text."""


AnyRecord = LogRecord | OutputRecord


class OutputEnds(Struct, frozen=True, tag="ends"):
    """Ended outputs of a request. The stage that completes the list ends the request."""

    expected: list[str]
    ended: dict[str, OutputSummary]


def error_info(error: PagemillError) -> ErrorInfo:
    return msgspec.convert(error, ErrorInfo, from_attributes=True)


# A class that inherits its code has its base here.
_KINDS: dict[str, type[PagemillError]] = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, PagemillError) and "code" in vars(kind)
}


def named_error(info: ErrorInfo) -> PagemillError:
    """Return the error that another process has reported, as an exception of the class of its code.

    It has the fault and the retryability of the report. A code of a newer version is a RequestError
    or a ServerError, by its fault.
    """
    by_fault = RequestError if info.fault == "client" else ServerError
    kind = _KINDS.get(info.code, by_fault)
    error = kind.__new__(kind)
    # Some classes have constructors with other arguments.
    PagemillError.__init__(error, info.message, field=info.field)
    error.reported = True
    error.code, error.fault = info.code, info.fault
    error.retryable, error.retry_after_s = info.retryable, info.retry_after_s
    return error
