"""Records of token logs and of the logs of other outputs."""

from typing import Literal

import msgspec
from msgspec import Struct

from shared import errors
from shared.errors import PagemillError, RequestError, ServerError
from shared.protocol.pipeline import AUDIO, CODES, IMAGE_KIND


class StageSpan(Struct, frozen=True, array_like=True):
    """One stage of a request's path. Times are Unix milliseconds of the broker's clock.

    The span of a fan-out stage is written by the stage that gathers its results: from when that
    stage began to wait until it had all of them.
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
    """As many of the most probable tokens as were asked for, best first."""
    top_logprobs: list[float]


class ChoiceDelta(Struct, frozen=True, omit_defaults=True):
    """New tokens of one choice. `position` is the index of the first of them in the answer."""

    index: int
    position: int
    token_ids: list[int]
    text: str
    """May lag behind the tokens: text that may yet turn out to be a stop string is held back."""
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token that ended the choice; null for the model's own end."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `token_ids`, if the request asks for them."""


class TokenChunk(Struct, frozen=True, omit_defaults=True, tag="tokens"):
    """`index` counts the records of one log from 0 without a gap."""

    index: int
    attempt: int
    choices: list[ChoiceDelta]
    prompt_logprobs: list[TokenLogprobs] | None = None
    """In the first record, if the request asks for them: one for each token of the prompt but the
    first, which nothing comes before."""
    embedding: str | None = None
    """The prompt's embedding, in the only record of a request for one, which has no choices: base64
    of 32-bit floats, least significant byte first."""


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache and not computed."""


class ErrorInfo(Struct, frozen=True):
    code: str
    message: str
    field: str | None
    fault: Literal["client", "server"]
    retryable: bool
    """Whether the same request may succeed if it is sent again, under another id."""
    retry_after_s: float | None = None


class OutputSummary(Struct, frozen=True, omit_defaults=True):
    """What is known of an output at its end."""

    usage: Usage | None = None
    """Tokens, for the output of an engine: those of text, or frames of codes."""
    kv_blocks: int = 0
    """The most KV blocks that the stage held for the request at one time."""
    units: dict[str, float] = {}
    """Amounts by name, such as `samples` or `steps`."""
    path: list[StageSpan] = []
    """The stages that led to the output, its own last."""
    finish_reason: Literal["stop", "length"] | None = None
    """Why an output of codes has ended; `length` for a speech that is cut at its stage's limit."""
    error: ErrorInfo | None = None
    """Why the output was cut, if the request ended without it; see `on_late`."""


class Finish(Struct, frozen=True, tag="finish", omit_defaults=True):
    """Last record of a request that ended well; each choice's reason came with its last tokens."""

    index: int
    attempt: int
    usage: Usage
    kv_blocks: int
    """The most KV blocks that the request held at one time."""
    path: list[StageSpan]
    outputs: dict[str, OutputSummary] = {}
    """By name, where the request has other outputs than its text."""


class Failure(Struct, frozen=True, tag="error"):
    """Last record of a log that did not end well."""

    index: int
    attempt: int
    error: ErrorInfo
    path: list[StageSpan]


LogRecord = TokenChunk | Finish | Failure
"""Records of a request's own log, which is also the log of its text."""


class MediaChunk(Struct, frozen=True, tag="media", omit_defaults=True):
    """A piece of an output that is not text."""

    index: int
    attempt: int
    mime: str
    offset: int
    """Where the piece begins, in the output's own unit: bytes, samples, or images."""
    data: str = ""
    """Base64, for small pieces."""
    media: str = ""
    """`media:<sha256>` of a stored file, for large ones."""


class CodeChunk(Struct, frozen=True, tag=CODES, omit_defaults=True):
    """Codec frames of speech, of which a later stage makes sound."""

    index: int
    attempt: int
    position: int
    """Index of the first frame in the speech. The next record continues behind the last one."""
    frames: list[list[int]]
    """The codes of each frame, one for each codebook of the codec."""
    end_token: int | None = None
    """Tokens of the text that are spoken by the end of these frames, where the stage knows it."""


class AudioChunk(Struct, frozen=True, tag=AUDIO, omit_defaults=True):
    """Consecutive samples of sound, of one channel."""

    index: int
    attempt: int
    first_sample: int
    """Index of the first sample in the sound. The next record continues behind the last one."""
    num_samples: int
    sample_rate: int
    """Samples a second, the same in all records of a log."""
    pcm: str
    """Base64 of 16-bit signed integers, least significant byte first."""
    end_token: int | None = None
    """Tokens of the text that are spoken by the end of these samples, where the stage knows it."""


class StepState(Struct, frozen=True, tag="step", omit_defaults=True):
    """How far an image is. For each image, only the last record with `state` counts."""

    index: int
    attempt: int
    number: int
    """Number of the image in the request, from 0."""
    step: int
    """Steps that are done."""
    steps: int
    state: str = ""
    """`media:<sha256>` of the latents after this step, from which another worker goes on."""
    preview: str = ""
    """`media:<sha256>` of a PNG of what the image will be, as far as that is known."""


class ImageRecord(Struct, frozen=True, tag=IMAGE_KIND):
    """An image that is finished."""

    index: int
    attempt: int
    number: int
    """Number of the image in the request, from 0. Images may end in any order."""
    media: str
    """`media:<sha256>` of the PNG file."""
    width: int
    height: int
    seed: int
    """The seed that the noise is made of, with the number."""


class OutputEnd(Struct, frozen=True, tag="end", omit_defaults=True):
    """Last record of an output that has a log of its own."""

    index: int
    attempt: int
    summary: OutputSummary
    cut: bool = False
    """The request was ended before the output was complete."""


OutputRecord = MediaChunk | CodeChunk | AudioChunk | StepState | ImageRecord | OutputEnd
"""Records of the log of an output that is not text."""


AnyRecord = LogRecord | OutputRecord


class OutputEnds(Struct, frozen=True, tag="ends"):
    """Which outputs of a request have ended. The stage that completes the list ends the request."""

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
