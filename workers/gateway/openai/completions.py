"""Completions: the plan of a request, and the assembler of its answer. Pure.

Each prompt is a request of its own on the bus. The choices of the i-th prompt begin at i * n.
"""

from dataclasses import dataclass, field

from msgspec import UNSET, Struct
from msgspec.structs import replace

from shared.errors import InvalidRequest
from shared.protocol.records import ChoiceDelta, TokenChunk, TokenLogprobs, Usage
from shared.protocol.requests import GenerateRequest
from workers.gateway.core.assembler import TokenBytes, or_unset
from workers.gateway.core.logprobs import MAX_CONTEXT_TOKENS, openai_logprobs, token_text
from workers.gateway.core.plan import (
    SubmitPlan,
    client_fields_of,
    lane_of,
    prompts_of,
    sampling_of,
    usage_options,
)
from workers.gateway.schemas.openai_request import CompletionRequest
from workers.gateway.schemas.openai_response import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    FinishReason,
    MaybeUsage,
    TokenLogprob,
    usage_of,
)

# The default of OpenAI's API. A chat answer ends by itself; a prompt may continue for ever.
DEFAULT_MAX_TOKENS = 16


class Echo(Struct, frozen=True):
    """A prompt with which the answer begins."""

    text: str
    token_ids: list[int] = []
    """Token ids of the prompt, needed for its log probabilities."""


class CompletionOptions(Struct, frozen=True):
    """Options of the answer, stored in the RequestRecord."""

    parts: int = 1
    n: int = 1
    include_usage: bool = False
    continuous_usage: bool = False
    prompt_tokens: int = 0
    logprobs: bool = False
    echo: list[Echo] = []
    echo_only: bool = False
    """The answer is the prompts alone."""


def plan_completion(request: CompletionRequest) -> SubmitPlan:
    """Return the plan of a request. Raises a RequestError with the field.

    The texts and token ids of an echo are not in it: the route adds them to the options.
    """
    prompts = prompts_of(request)
    sampling = {"max_tokens": DEFAULT_MAX_TOKENS} | sampling_of(request)
    echo_only = request.max_tokens == 0
    if echo_only and not request.echo:
        raise InvalidRequest("max_tokens: 0 requires echo", field="max_tokens")
    if echo_only:
        # The log probabilities of a prompt come with the first token after it.
        sampling["max_tokens"] = 1
    if request.logprobs is not None:
        sampling["logprobs"] = request.logprobs
        if request.echo:
            sampling["prompt_logprobs"] = request.logprobs
    common = GenerateRequest(
        model=request.model,
        add_special_tokens=request.add_special_tokens,
        cache_salt=request.cache_salt,
        lane=lane_of(request),
        timeout_s=request.timeout_s,
        adapter=request.adapter,
    )
    options = usage_options(request) | {
        "parts": len(prompts),
        "n": sampling.get("n", 1),
        "logprobs": request.logprobs is not None,
        "echo_only": echo_only,
        "fields": client_fields_of(request),
    }
    return SubmitPlan([_with_prompt(common, prompt) for prompt in prompts], sampling, options)


def _with_prompt(common: GenerateRequest, prompt: str | list[int]) -> GenerateRequest:
    if isinstance(prompt, str):
        return replace(common, prompt=prompt)
    return replace(common, prompt_token_ids=prompt, add_special_tokens=None)


@dataclass(slots=True)
class _Choice:
    """One choice so far."""

    begun: bool = False
    text: str = ""
    offset: int = 0
    """Offset of the next token, in characters."""
    context: list[bytes] = field(default_factory=list)
    """Tokens before the next one, because a character may need several."""
    logprobs: CompletionLogprobs = field(default_factory=lambda: CompletionLogprobs([], [], [], []))
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class CompletionAssembler:
    """Assembler of completions."""

    def __init__(
        self,
        request_id: str,
        model: str,
        created_s: int,
        options: CompletionOptions,
        token_bytes: TokenBytes,
    ) -> None:
        self.collects_answer = True
        self._id = request_id
        self._model = model
        self._created_s = created_s
        self._options = options
        self._token_bytes = token_bytes
        self._choices: dict[int, _Choice] = {}
        self._num_tokens = 0
        self._usages: list[Usage] = []
        self._prompt_logprobs: dict[int, list[TokenLogprobs]] = {}

    def add(self, part: int, record: TokenChunk) -> Completion | None:
        if record.prompt_logprobs is not None:
            self._prompt_logprobs[part] = record.prompt_logprobs
        deltas = record.choices
        if self._options.echo_only:
            deltas = [_without_tokens(delta) for delta in deltas]
        self._num_tokens += sum(len(delta.token_ids) for delta in deltas)
        advanced = (self._advance(part, delta) for delta in deltas)
        shown = [choice for choice in advanced if choice is not None]
        if not shown:
            return None
        usage: MaybeUsage = UNSET
        if self._options.continuous_usage:
            usage = usage_of([Usage(self._options.prompt_tokens, self._num_tokens)])
        elif self._options.include_usage:
            usage = None
        return Completion(self._id, self._created_s, self._model, shown, usage)

    def finish(self, part: int, usage: Usage) -> Completion | None:
        if self._options.echo_only:
            usage = replace(usage, completion_tokens=0)
        self._usages.append(usage)
        wanted = self._options.include_usage or self._options.continuous_usage
        if not wanted or len(self._usages) < self._options.parts:
            return None
        return Completion(self._id, self._created_s, self._model, [], usage_of(self._usages))

    def answer(self) -> Completion:
        choices = [
            CompletionChoice(
                index,
                choice.text,
                choice.logprobs if self._options.logprobs else None,
                choice.finish_reason,
                or_unset(choice.stop_reason),
            )
            for index, choice in sorted(self._choices.items())
        ]
        usage = usage_of(self._usages)
        return Completion(self._id, self._created_s, self._model, choices, usage)

    def _advance(self, part: int, delta: ChoiceDelta) -> CompletionChoice | None:
        index = part * self._options.n + delta.index
        choice = self._choices.setdefault(index, _Choice())
        text, logprobs = "", CompletionLogprobs([], [], [], [])
        if not choice.begun and self._options.echo:
            echo = self._options.echo[part]
            text = echo.text
            self._echo(choice, echo, self._prompt_logprobs.get(part), logprobs)
        text += delta.text
        if self._options.logprobs and delta.logprobs:
            for entry in openai_logprobs(delta.token_ids, delta.logprobs, self._token_bytes):
                _append(choice, entry, logprobs)
        choice.text += text
        if self.collects_answer:
            _extend(choice.logprobs, logprobs)
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        if choice.begun and not (text or logprobs.tokens or delta.finish_reason):
            return None
        choice.begun = True
        return CompletionChoice(
            index,
            text,
            logprobs if self._options.logprobs else None,
            choice.finish_reason if delta.finish_reason is not None else None,
            or_unset(choice.stop_reason),
        )

    def _echo(
        self,
        choice: _Choice,
        echo: Echo,
        prompt_logprobs: list[TokenLogprobs] | None,
        logprobs: CompletionLogprobs,
    ) -> None:
        """Add the prompt to `logprobs`. Its first token has no log probability."""
        if prompt_logprobs is None or not echo.token_ids:
            choice.offset = len(echo.text)
            return
        first = self._token_bytes[echo.token_ids[0]]
        logprobs.tokens.append(first.decode("utf-8", "replace"))
        logprobs.token_logprobs.append(None)
        logprobs.top_logprobs.append(None)
        logprobs.text_offset.append(0)
        _advance_offset(choice, first)
        for entry in openai_logprobs(echo.token_ids[1:], prompt_logprobs, self._token_bytes):
            _append(choice, entry, logprobs)


def _without_tokens(delta: ChoiceDelta) -> ChoiceDelta:
    return ChoiceDelta(delta.index, 0, [], "", None if delta.finish_reason is None else "length")


def _append(choice: _Choice, entry: TokenLogprob, logprobs: CompletionLogprobs) -> None:
    logprobs.tokens.append(entry.token)
    logprobs.token_logprobs.append(entry.logprob)
    tops = {top.token: top.logprob for top in entry.top_logprobs}
    logprobs.top_logprobs.append(tops | {entry.token: entry.logprob})
    logprobs.text_offset.append(choice.offset)
    _advance_offset(choice, bytes(entry.bytes))


def _advance_offset(choice: _Choice, token: bytes) -> None:
    choice.offset += len(token_text(token, choice.context))
    choice.context = [*choice.context, token][-MAX_CONTEXT_TOKENS:]


def _extend(whole: CompletionLogprobs, more: CompletionLogprobs) -> None:
    whole.tokens.extend(more.tokens)
    whole.token_logprobs.extend(more.token_logprobs)
    whole.top_logprobs.extend(more.top_logprobs)
    whole.text_offset.extend(more.text_offset)
