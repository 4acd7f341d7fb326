"""State of a running request and of its choices, updated token by token. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

from msgspec.structs import asdict

from shared.protocol.detokenizer import Detokenizer
from shared.protocol.records import ChoiceDelta, TokenLogprobs, Usage
from shared.protocol.sampling import SamplingParams, seed_of
from workers.engine.core.sequence import (
    LAST_TOKEN,
    Drafter,
    EngineRequest,
    FrameDelta,
    LoggedChoice,
    MakeText,
    Pooling,
    SampledToken,
    Sequence,
    Span,
    TokenMask,
)
from workers.engine.core.validation import (
    check_logged,
    check_placeholders,
    check_prompt,
    check_sampling,
    resolve_max_tokens,
    tokenize_bad_words,
)


class Decode(Protocol):
    """Converts token ids to text."""

    def __call__(self, token_ids: list[int], /, *, skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class StopEvent:
    """Reason for which a choice has ended."""

    reason: Literal["stop", "length"]
    stop_reason: str | int | None = None
    """Stop string or stop token id; None for the model's end token and for `length`."""


class DeferredText:
    """Makes the text of tokens after their step.

    Outputs hold it when their request has ended, so it does not refer to the request, which holds
    the memory of its items.
    """

    def __init__(self, detokenizer: Detokenizer, has_end: bool) -> None:
        """`has_end` is whether the token that ends an answer is a part of its text."""
        self._detokenizer = detokenizer
        self._has_end = has_end

    def make(self, token_ids: list[int], finish_reason: str | None) -> str:
        """Return the text of sampled tokens that had none; see `RequestOutput.texts`."""
        text = self.read(token_ids, is_stopped=finish_reason == "stop")
        return text if finish_reason is None else text + self._detokenizer.finish()

    def read(self, token_ids: list[int], *, is_stopped: bool) -> str:
        is_cut = is_stopped and not self._has_end
        return self._detokenizer.read(token_ids[:-1] if is_cut else token_ids)


class ChoiceState:
    """One choice of a request: its tokens, its text and whether it has ended."""

    def __init__(
        self, sequence: Sequence, detokenizer: Detokenizer, eos_token_ids: frozenset[int]
    ) -> None:
        self.sequence = sequence
        self.finished = False
        self.detokenizer = detokenizer
        self._eos_token_ids = eos_token_ids
        self._sampling = sequence.request.sampling
        self._max_len = sequence.num_prompt_tokens + sequence.max_tokens
        self._searches_text = self._sampling.detokenize and bool(self._sampling.stop)
        self.deferred_text: DeferredText | None = None
        """Set if the text of tokens is made later, because it does not decide on the end."""
        if self._sampling.detokenize and not self._sampling.stop:
            has_end = self._sampling.include_stop_str_in_output
            self.deferred_text = DeferredText(detokenizer, has_end)

    def append_token(self, token_id: int) -> tuple[str, StopEvent | None]:
        """Append a token; return the new text, and the stop event if the choice ends with it.

        There is no text if the request has none, or if it is made later.
        """
        sequence = self.sequence
        token_ids = sequence.token_ids
        token_ids.append(token_id)
        if sequence.token_mask is not None:
            sequence.token_mask.advance(token_id)
        stop_event = None
        if token_id in self._eos_token_ids and not self._sampling.ignore_eos:
            stop_event = StopEvent("stop")
        elif token_id in self._sampling.stop_token_ids:
            stop_event = StopEvent("stop", token_id)
        text = ""
        if self._searches_text and (
            stop_event is None or self._sampling.include_stop_str_in_output
        ):
            may_stop = sequence.num_output_tokens > self._sampling.min_tokens
            text, matched = self.detokenizer.push(token_id, may_stop)
            if stop_event is None and matched is not None:
                stop_event = StopEvent("stop", matched)
        if stop_event is None and len(token_ids) == self._max_len:
            stop_event = StopEvent("length")
        return text, stop_event

    def replay(self, logged: LoggedChoice) -> StopEvent | None:
        """Append logged tokens; return the stop event if the choice ends with the last of them."""
        stop_event = None
        self.sequence.residuals += logged.residuals
        for token_id in logged.token_ids:
            _, stop_event = self.append_token(token_id)
        if self.deferred_text is not None:
            is_stopped = stop_event is not None and stop_event.reason == "stop"
            self.deferred_text.read(logged.token_ids, is_stopped=is_stopped)
        return stop_event

    def append_sampled(self, tokens: list[SampledToken]) -> ChoiceDelta:
        """Append sampled tokens and return their delta; tokens after a stop event are dropped."""
        position = len(self.sequence.token_ids) - self.sequence.num_prompt_tokens
        if len(tokens) > 1:
            return self._append_several(position, tokens)
        (token,) = tokens
        if token.residual:
            self.sequence.residuals.append([*token.residual])
        text, stop_event = self.append_token(token.token_id)
        if stop_event is not None or token.logprobs is not None or self.sequence.speech is not None:
            return self._delta(position, tokens, text, stop_event)
        return ChoiceDelta(self.sequence.choice, position, [token.token_id], text)

    def _append_several(self, position: int, tokens: list[SampledToken]) -> ChoiceDelta:
        kept_tokens, text, stop_event = [], "", None
        for token in tokens:
            kept_tokens.append(token)
            new_text, stop_event = self.append_token(token.token_id)
            text += new_text
            if stop_event is not None:
                break
        return self._delta(position, kept_tokens, text, stop_event)

    def finish_replayed(self, stop_event: StopEvent) -> ChoiceDelta:
        """End the choice by the event that `replay` returned; the delta has no tokens."""
        return self._delta(self.sequence.num_output_tokens, [], "", stop_event)

    def _delta(
        self, position: int, tokens: list[SampledToken], text: str, stop_event: StopEvent | None
    ) -> ChoiceDelta:
        if stop_event is not None:
            self.finished = True
            if self._searches_text:
                text += self.detokenizer.finish()
        delta = ChoiceDelta(
            index=self.sequence.choice,
            position=position,
            token_ids=[token.token_id for token in tokens],
            text=text,
            finish_reason=stop_event.reason if stop_event else None,
            stop_reason=stop_event.stop_reason if stop_event else None,
            logprobs=[t.logprobs for t in tokens if t.logprobs is not None] or None,
        )
        if self.sequence.request.speech is None:
            return delta
        residuals = [[*token.residual] for token in tokens]
        return FrameDelta(**asdict(delta), residuals=residuals)


@dataclass(slots=True)
class RequestState:
    """A request that the engine has accepted and not finished."""

    request: EngineRequest
    choices: list[ChoiceState]
    prepared: bool = False
    encoded: set[int] = field(default_factory=set)
    """Indexes of the items that the runner holds embeddings of. Items in cached prefixes need none.
    """
    awaited: set[int] = field(default_factory=set)
    """See `Sequence.awaited_items`."""
    texts: list[MakeText] = field(init=False)
    """See `RequestOutput.texts`."""
    kv_blocks: int = 0
    """Peak number of KV blocks held, where several choices share them."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Log probabilities of the prompt's tokens, from when they are complete until returned."""

    def __post_init__(self) -> None:
        deferred = (choice.deferred_text for choice in self.choices)
        self.texts = [text.make for text in deferred if text is not None]

    @property
    def finished(self) -> bool:
        return not [choice for choice in self.choices if not choice.finished]

    @property
    def usage(self) -> Usage:
        # Cached tokens are counted in the first admitted choice; the others find its prompt.
        num_cached = (choice.sequence.num_cached_tokens for choice in self.choices)
        return Usage(
            prompt_tokens=len(self.request.prompt_token_ids),
            completion_tokens=sum(c.sequence.num_output_tokens for c in self.choices),
            cached_tokens=next((count for count in num_cached if count is not None), 0),
        )

    @property
    def blocks(self) -> set[int]:
        """Ids of all KV blocks that the choices hold."""
        return {block for choice in self.choices for block in choice.sequence.block_table}


@dataclass
class RequestFactory:
    """Validates requests and creates their state."""

    decode: Decode
    encode: Callable[[str], list[int]]
    """Tokenizes text without adding special tokens."""
    eos_token_ids: frozenset[int]
    vocab_size: int
    max_model_len: int
    new_drafter: Callable[[], Drafter | None]
    """Creates the drafter of each choice that may have drafts; see `_may_draft`."""
    check: Callable[[EngineRequest], int]
    """The runner's check, which returns the number of positions after the prompt."""
    find_spans: Callable[[EngineRequest], list[Span]]
    """The runner's spans of the prompt."""
    pooling: Pooling = LAST_TOKEN
    new_rules: Callable[[EngineRequest], TokenMask | None] = lambda request: None
    """Creates the mask of the model's own rules for a choice; None if it has no rules."""

    def create(self, request: EngineRequest) -> RequestState:
        """Return the state of a new request. Raises a PagemillError if it cannot run here."""
        check_prompt(request, self.vocab_size)
        check_logged(request, self.vocab_size)
        check_placeholders(request)
        max_tokens = resolve_max_tokens(request, self.max_model_len, self.check(request))
        check_sampling(request, self.vocab_size, max_tokens)
        return RequestState(request, self._new_choices(request, max_tokens))

    def _new_choices(self, request: EngineRequest, max_tokens: int) -> list[ChoiceState]:
        params, new_token_mask = request.sampling, request.new_token_mask
        bad_words = tokenize_bad_words(params.bad_words, self.encode, self.vocab_size)
        # They are in the first log record, so a resumed request has already returned them.
        wants_prompt_logprobs = params.prompt_logprobs is not None and not request.logged
        spans = self.find_spans(request)
        choices = []
        for index in range(params.n):
            rules = self.new_rules(request)
            sequence = Sequence(
                request=request,
                choice=index,
                seed=_derive_seed(request),
                token_ids=list(request.prompt_token_ids),
                max_tokens=max_tokens,
                end_token_ids=(*self.eos_token_ids, *params.stop_token_ids),
                bad_words=bad_words,
                token_mask=rules if new_token_mask is None else new_token_mask(),
                drafter=self.new_drafter() if rules is None and _may_draft(request) else None,
                prompt_logprobs={} if wants_prompt_logprobs and index == 0 else None,
                speech=request.speech,
                pooling=self.pooling,
                spans=spans,
            )
            detokenizer = self._new_detokenizer(params)
            choices.append(ChoiceState(sequence, detokenizer, self.eos_token_ids))
        return choices

    def _new_detokenizer(self, params: SamplingParams) -> Detokenizer:
        decode: Callable[[list[int]], str] = self.decode
        if not params.skip_special_tokens:
            decode = partial(self.decode, skip_special_tokens=False)
        return Detokenizer(decode, params.stop, params.include_stop_str_in_output)


def _may_draft(request: EngineRequest) -> bool:
    """Return whether drafts may follow the tokens of a request.

    A token mask is defined only after accepted tokens, and so cannot be applied to drafts. An
    embedding is computed from the hidden states up to the last token of the step, which must be the
    prompt's last token and not a draft. A talker's rows are made of frames, and a draft has only
    the first code of a frame.
    """
    is_plain = request.new_token_mask is None and request.embedding is None
    return is_plain and request.speech is None


def _derive_seed(request: EngineRequest) -> int:
    return seed_of(request.sampling.seed, request.request_id)
