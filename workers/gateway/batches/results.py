"""Results of lines: the lines of output and error files, and the decision to try again. Pure."""

from dataclasses import dataclass

import msgspec
from msgspec import Raw, Struct

from shared.batches.line_errors import code_in_body
from shared.batches.state import FinishedLine
from shared.errors import DiskFull, Unavailable
from shared.protocol.encoding import UNDECODABLE, to_json
from shared.protocol.messages import MediaHead
from shared.protocol.records import Usage

# Statuses of a busy or unreachable cluster. Such a line waits for as long as its batch may.
BUSY = frozenset({429, 503, 507})
# Statuses of a fault in the cluster, which may be the line's own.
FAULTY = frozenset({500, 504})
NOT_RETRYABLE = frozenset({"poison", "internal_error", "tool_failure"})
MAX_FAULTS = 3
"""Attempts that may end with a fault before the fault is the result of the line."""
# Characters that JSON may contain, and at which `str.splitlines` and others end a line.
_LINE_BREAKS = {name.encode(): b"\\u%04x" % ord(name) for name in ("\x85", "\u2028", "\u2029")}
FIRST_DELAY_S = 1.0
MAX_DELAY_S = 60.0


class _PromptDetails(Struct, frozen=True):
    cached_tokens: int = 0


class _Usage(Struct, frozen=True):
    """Usage under the names of completions, or under the names of all other answers."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _PromptDetails | None = None


class _WithUsage(Struct, frozen=True):
    usage: _Usage | None = None


@dataclass(frozen=True, slots=True)
class AnswerFile:
    """Content of a response that is not JSON. It is stored, and not yet available."""

    media_type: str
    name: str
    """SHA-256 of the content."""
    head: MediaHead


@dataclass(frozen=True, slots=True)
class Answer:
    """Response of an endpoint."""

    status: int
    body: bytes
    """JSON; empty if the content is in `file`."""
    request_id: str
    file: AnswerFile | None = None


class LineResponse(Struct, frozen=True):
    status_code: int
    request_id: str
    body: Raw
    """Body of the response, as the endpoint has sent it. A text is a string, and a sound is the
    object of the file that has it."""


class ResultError(Struct, frozen=True):
    code: str
    message: str


class ResultLine(Struct, frozen=True):
    """Line of an output file or an error file."""

    id: str
    custom_id: str
    response: LineResponse | None = None
    error: ResultError | None = None


_read_usage = msgspec.json.Decoder(_WithUsage).decode


@dataclass(slots=True)
class Attempts:
    """Attempts at one line."""

    number: int = 0
    """Number of the request for the line. A request that has ended is never answered again."""
    num_faults: int = 0
    _delay_s: float = FIRST_DELAY_S
    _has_asked_again: bool = False

    def delay_after(self, status: int, body: bytes, jitter: float = 0.0) -> float | None:
        """Return the pause before the next attempt; None if this answer is the result.

        `jitter` in [0, 1) spreads the attempts at many lines over half of the pause.
        """
        if status not in BUSY | FAULTY:
            return None
        code = code_in_body(body)
        if code in NOT_RETRYABLE:
            return None
        if status in FAULTY:
            self.num_faults += 1
            if self.num_faults >= MAX_FAULTS:
                return None
        # The first time, the request may still be in progress, and only its reader has failed; or
        # the gateway has refused it, which is not its end as a refusal by a coordinator is.
        is_open = code in (Unavailable.code, DiskFull.code)
        self._has_asked_again = is_open and not self._has_asked_again
        self.number += not self._has_asked_again
        delay_s, self._delay_s = self._delay_s, min(2 * self._delay_s, MAX_DELAY_S)
        return delay_s * (1 - jitter / 2)


def answered(batch_id: str, line: int, custom_id: str, answer: Answer) -> FinishedLine:
    """Return the result of a line after the answer of its endpoint, which may be an error."""
    response = LineResponse(answer.status, answer.request_id, Raw(answer.body))
    content = _line_of(ResultLine(_result_id(batch_id, line), custom_id, response))
    if answer.status >= 400:
        return FinishedLine(line, content, code_in_body(answer.body))
    return FinishedLine(line, content, usage=_usage_of(answer.body))


def refused(batch_id: str, line: int, custom_id: str, code: str, message: str) -> FinishedLine:
    """Return the result of a line without an answer."""
    error = ResultError(code, message)
    content = _line_of(ResultLine(_result_id(batch_id, line), custom_id, None, error))
    return FinishedLine(line, content, code)


def _line_of(result: ResultLine) -> bytes:
    """Return a result as JSON that is one line for all readers."""
    content = to_json(result)
    if content.isascii():
        return content
    for character, escape in _LINE_BREAKS.items():
        content = content.replace(character, escape)
    return content


def _result_id(batch_id: str, line: int) -> str:
    return f"batch_req_{batch_id.removeprefix('batch_')}_{line}"


def _usage_of(body: bytes) -> Usage:
    try:
        usage = _read_usage(body).usage or _Usage()
    except UNDECODABLE:
        return Usage(0, 0)
    details = usage.prompt_tokens_details or usage.input_tokens_details or _PromptDetails()
    return Usage(
        usage.prompt_tokens or usage.input_tokens,
        usage.completion_tokens or usage.output_tokens,
        details.cached_tokens,
    )
