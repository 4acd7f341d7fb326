"""Completions: the plan of a request, and the assembler of its answer. Pure.

Each prompt is a separate request on the bus. The choices of the i-th prompt begin at index i * n.
"""

from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from shared.errors import InvalidRequest
from shared.protocol.records import ChoiceDelta, Finish, TokenChunk, TokenLogprobs
from shared.protocol.requests import GenerateRequest
from workers.gateway.core.assembler import PROMPT_FIELDS, Answering, or_unset
from workers.gateway.core.field_names import ClientFields
from workers.gateway.core.kinds import AnswerKind
from workers.gateway.core.logprobs import MAX_CONTEXT_TOKENS, openai_logprobs, token_text
from workers.gateway.core.plan import (
    MAX_PROMPTS,
    SubmitPlan,
    UsageOptions,
    client_fields_of,
    generate_request,
    plan_of,
    prompts_of,
    sampling_of,
    usage_options,
)
from workers.gateway.openai.assembler import ChoiceState, OpenAIAssembler
from workers.gateway.schemas.openai_request import CompletionRequest
from workers.gateway.schemas.openai_response import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    TokenLogprob,
)

# The default of OpenAI's API. Unlike the answer of a chat, the text after a prompt may never end.
DEFAULT_MAX_TOKENS = 16


class Echo(Struct, frozen=True):
    """A prompt at the beginning of the answer."""

    text: str
    token_ids: list[int] = []
    """Token ids of the prompt, needed for its log probabilities."""


class CompletionOptions(UsageOptions, frozen=True, kw_only=True):
    parts: int = 1
    n: int = 1
    logprobs: bool = False
    echo_only: bool = False
    """Whether the answer has the prompts alone."""
    fields: dict[str, str] = msgspec.field(default_factory=dict)
    echo: list[Echo] | UnsetType = UNSET
    prompt_tokens: int | UnsetType = UNSET


def plan_completion(request: CompletionRequest) -> SubmitPlan[CompletionOptions]:
    """Return the plan of a request. Raises a RequestError naming the field.

    The texts and token ids of an echo are not in it: the route adds them to the options.
    """
    prompts = prompts_of(request.prompt, "prompt", MAX_PROMPTS)
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
    options = CompletionOptions(
        **usage_options(request),
        parts=len(prompts),
        n=sampling.get("n", 1),
        logprobs=request.logprobs is not None,
        echo_only=echo_only,
        fields=client_fields_of(request),
    )
    requests = [_generate(request, prompt) for prompt in prompts]
    return plan_of(request, requests, sampling, options)


def _generate(request: CompletionRequest, prompt: str | list[int]) -> GenerateRequest:
    if isinstance(prompt, str):
        return generate_request(request, prompt=prompt)
    return generate_request(request, prompt_token_ids=prompt, add_special_tokens=None)


@dataclass(slots=True)
class _Choice(ChoiceState):
    text: str = ""
    offset: int = 0
    """Offset of the next token, in characters."""
    context: list[bytes] = field(default_factory=list)
    """Bytes of the last tokens. Several tokens may make one character."""
    logprobs: CompletionLogprobs = field(default_factory=lambda: CompletionLogprobs([], [], [], []))

    def add_token(
        self, logprobs: CompletionLogprobs, token: bytes, entry: TokenLogprob | None
    ) -> None:
        """Add a token to `logprobs`. `entry` is None for the first token of a prompt."""
        text, logprob, tops = token.decode("utf-8", "replace"), None, None
        if entry is not None:
            logprob = entry.logprob
            tops = {top.token: top.logprob for top in (*entry.top_logprobs, entry)}
        logprobs.extend(CompletionLogprobs([self.offset], [logprob], [text], [tops]))
        self.offset += len(token_text(token, self.context))
        self.context = [*self.context, token][-MAX_CONTEXT_TOKENS:]


class CompletionAssembler(OpenAIAssembler[CompletionOptions, _Choice]):
    """Assembler of completions."""

    chunk_type, answer_type = Completion, Completion

    def __init__(self, request: Answering[CompletionOptions]) -> None:
        super().__init__(request)
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        """Log probabilities of the prompts, by part."""

    def _add_tokens(self, part: int, record: TokenChunk) -> list[Completion]:
        if record.prompt_logprobs is not None:
            self.prompt_logprobs[part] = record.prompt_logprobs
        if self.options.echo_only:
            record = replace(record, choices=[_without_tokens(delta) for delta in record.choices])
        return super()._add_tokens(part, record)

    def _finish(self, record: Finish) -> list[Completion]:
        if self.options.echo_only:
            record = replace(record, usage=replace(record.usage, completion_tokens=0))
        return super()._finish(record)

    def _whole(self, index: int, choice: _Choice) -> CompletionChoice:
        return CompletionChoice(
            index,
            choice.text,
            choice.logprobs if self.options.logprobs else None,
            choice.finish_reason,
            or_unset(choice.stop_reason),
        )

    def _advance(self, part: int, delta: ChoiceDelta) -> CompletionChoice | None:
        index = part * self.options.n + delta.index
        choice = self.choices.setdefault(index, _Choice())
        text, logprobs = delta.text, CompletionLogprobs([], [], [], [])
        if not choice.has_begun and self.options.echo:
            text = self.options.echo[part].text + text
            self._echo(part, choice, logprobs)
        if self.options.logprobs and delta.logprobs:
            for entry in openai_logprobs(delta.token_ids, delta.logprobs, self.request.token_bytes):
                choice.add_token(logprobs, bytes(entry.bytes), entry)
        choice.text += text
        if self.collects_answer:
            choice.logprobs.extend(logprobs)
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        if choice.has_begun and not (text or logprobs.tokens or delta.finish_reason):
            return None
        choice.has_begun = True
        return CompletionChoice(
            index,
            text,
            logprobs if self.options.logprobs else None,
            choice.finish_reason if delta.finish_reason is not None else None,
            or_unset(choice.stop_reason),
        )

    def _echo(self, part: int, choice: _Choice, logprobs: CompletionLogprobs) -> None:
        """Add the prompt to `logprobs`. Its first token has no log probability."""
        assert self.options.echo
        echo, prompt_logprobs = self.options.echo[part], self.prompt_logprobs.get(part)
        if prompt_logprobs is None or not echo.token_ids:
            choice.offset = len(echo.text)
            return
        choice.add_token(logprobs, self.request.token_bytes[echo.token_ids[0]], None)
        for entry in openai_logprobs(echo.token_ids[1:], prompt_logprobs, self.request.token_bytes):
            choice.add_token(logprobs, bytes(entry.bytes), entry)


def _without_tokens(delta: ChoiceDelta) -> ChoiceDelta:
    return ChoiceDelta(delta.index, 0, [], "", None if delta.finish_reason is None else "length")


COMPLETION = AnswerKind(
    name="completion",
    id_prefix="cmpl",
    options=CompletionOptions,
    assembler=CompletionAssembler,
    client_fields=ClientFields(
        {
            **dict.fromkeys((*PROMPT_FIELDS, "items"), "prompt"),
            "sampling_params.prompt_logprobs": "logprobs",
        }
    ),
)
