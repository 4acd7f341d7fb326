"""Completions: what goes on the bus for a request, and the answers of its token logs. Pure.

Each prompt is a request of its own. The choices of the i-th are those from i * n on.
"""

from dataclasses import dataclass, field

from msgspec import UNSET, Struct
from msgspec.structs import replace

from shared.errors import InvalidRequest
from shared.protocol.messages import ChoiceDelta, GenerateRequest, TokenChunk, TokenLogprobs, Usage
from workers.gateway.core.assembler import TokenBytes, openai_logprobs, or_unset
from workers.gateway.core.logprobs import MAX_CONTEXT_TOKENS, token_text
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

# As OpenAI's API has it: an answer to a chat ends by itself, and a prompt may go on for ever.
DEFAULT_MAX_TOKENS = 16


class Echo(Struct, frozen=True):
    """A prompt that the answer begins with."""

    text: str
    token_ids: list[int] = []
    """Needed for their log probabilities."""


class CompletionOptions(Struct, frozen=True):
    """As a JobRecord keeps them."""

    parts: int = 1
    n: int = 1
    include_usage: bool = False
    continuous_usage: bool = False
    prompt_tokens: int = 0
    logprobs: bool = False
    echo: list[Echo] = []
    echo_only: bool = False
    """What comes after the prompts is left out."""


def plan_completion(request: CompletionRequest) -> SubmitPlan:
    """Raises a RequestError with the field. An echo is yet to be looked up: see `echoed`."""
    prompts = prompts_of(request)
    sampling = {"max_tokens": DEFAULT_MAX_TOKENS} | sampling_of(request)
    echo_only = request.max_tokens == 0
    if echo_only and not request.echo:
        raise InvalidRequest("max_tokens: 0 is for an echo alone", field="max_tokens")
    if echo_only:
        # Log probabilities of a prompt come with the first token after it.
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
    begun: bool = False
    text: str = ""
    offset: int = 0
    """In characters, of the next token."""
    context: list[bytes] = field(default_factory=list)
    """The tokens before it, for a character may need several."""
    logprobs: CompletionLogprobs = field(default_factory=lambda: CompletionLogprobs([], [], [], []))
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class CompletionAssembler:
    def __init__(
        self,
        request_id: str,
        model: str,
        created_s: int,
        options: CompletionOptions,
        spelling: TokenBytes,
    ) -> None:
        self.collects_answer = True
        self._id = request_id
        self._model = model
        self._created_s = created_s
        self._options = options
        self._spelling = spelling
        self._choices: dict[int, _Choice] = {}
        self._num_tokens = 0
        self._usages: list[Usage] = []
        self._prompt_logprobs: dict[int, list[TokenLogprobs]] = {}

    def add(self, part: int, record: TokenChunk) -> Completion | None:
        if record.prompt_logprobs is not None:
            self._prompt_logprobs[part] = record.prompt_logprobs
        deltas = record.choices
        if self._options.echo_only:
            deltas = [_nothing_of(delta) for delta in deltas]
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
            spelt = openai_logprobs(delta.token_ids, delta.logprobs, self._spelling)
            for token in spelt:
                _append(choice, token, logprobs)
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
        known: list[TokenLogprobs] | None,
        logprobs: CompletionLogprobs,
    ) -> None:
        """Nothing comes before the first token, so nothing is known of it."""
        if known is None or not echo.token_ids:
            choice.offset = len(echo.text)
            return
        first = self._spelling[echo.token_ids[0]].decode("utf-8", "replace")
        logprobs.tokens.append(first)
        logprobs.token_logprobs.append(None)
        logprobs.top_logprobs.append(None)
        logprobs.text_offset.append(0)
        _advance_offset(choice, self._spelling[echo.token_ids[0]])
        for token in openai_logprobs(echo.token_ids[1:], known, self._spelling):
            _append(choice, token, logprobs)


def _nothing_of(delta: ChoiceDelta) -> ChoiceDelta:
    return ChoiceDelta(delta.index, 0, [], "", None if delta.finish_reason is None else "length")


def _append(choice: _Choice, token: TokenLogprob, logprobs: CompletionLogprobs) -> None:
    logprobs.tokens.append(token.token)
    logprobs.token_logprobs.append(token.logprob)
    tops = {top.token: top.logprob for top in token.top_logprobs}
    logprobs.top_logprobs.append(tops | {token.token: token.logprob})
    logprobs.text_offset.append(choice.offset)
    _advance_offset(choice, bytes(token.bytes))


def _advance_offset(choice: _Choice, token: bytes) -> None:
    choice.offset += len(token_text(token, choice.context))
    choice.context = [*choice.context, token][-MAX_CONTEXT_TOKENS:]


def _extend(whole: CompletionLogprobs, more: CompletionLogprobs) -> None:
    whole.tokens.extend(more.tokens)
    whole.token_logprobs.extend(more.token_logprobs)
    whole.top_logprobs.extend(more.top_logprobs)
    whole.text_offset.extend(more.text_offset)
