"""A request in hand: its choices, and what becomes of each with every token. Pure."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

from shared.protocol.detokenizer import Detokenizer
from shared.protocol.messages import ChoiceDelta, TokenLogprobs, Usage
from shared.protocol.sampling import SamplingParams
from workers.engine.core.sequence import Drafter, EngineRequest, SampledToken, Sequence
from workers.engine.core.validation import (
    check_placeholders,
    check_prompt,
    check_sampling,
    resolve_max_tokens,
    tokenize_bad_words,
)


class Decode(Protocol):
    def __call__(self, token_ids: list[int], /, *, skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class StopEvent:
    reason: Literal["stop", "length"]
    stop_reason: str | int | None = None


@dataclass(slots=True)
class ChoiceState:
    sequence: Sequence
    detokenizer: Detokenizer
    eos_token_ids: frozenset[int]
    finished: bool = False

    def push(self, token_id: int) -> tuple[str, StopEvent | None]:
        """Append a token; the text that it yields, and how the choice ends by it, if it does."""
        sequence, sampling = self.sequence, self.sequence.request.sampling
        sequence.token_ids.append(token_id)
        if sequence.token_mask is not None:
            sequence.token_mask.advance(token_id)
        ending = self._ending_by(token_id, sampling)
        if ending is not None and not sampling.include_stop_str_in_output:
            return "", ending
        may_stop = sequence.num_output_tokens > sampling.min_tokens
        text, matched = self.detokenizer.push(token_id, may_stop)
        if ending is not None:
            return text, ending
        if matched is not None:
            return text, StopEvent("stop", matched)
        if sequence.num_output_tokens == sequence.max_tokens:
            return text, StopEvent("length")
        return text, None

    def _ending_by(self, token_id: int, sampling: SamplingParams) -> StopEvent | None:
        if token_id in self.eos_token_ids and not sampling.ignore_eos:
            return StopEvent("stop")
        return StopEvent("stop", token_id) if token_id in sampling.stop_token_ids else None

    def replay(self, token_ids: list[int]) -> StopEvent | None:
        """What is in the log, and how the choice has ended by it, if it has."""
        ending = None
        for token_id in token_ids:
            _, ending = self.push(token_id)
        return ending

    def extend(self, tokens: list[SampledToken]) -> ChoiceDelta:
        """What follows the token that ends the choice is dropped."""
        position = self.sequence.num_output_tokens
        taken, text, ending = [], "", None
        for token in tokens:
            taken.append(token)
            piece, ending = self.push(token.token_id)
            text += piece
            if ending is not None:
                break
        return self._delta(position, taken, text, ending)

    def end(self, ending: StopEvent) -> ChoiceDelta:
        """By what has been replayed."""
        return self._delta(self.sequence.num_output_tokens, [], "", ending)

    def _delta(
        self, position: int, tokens: list[SampledToken], text: str, ending: StopEvent | None
    ) -> ChoiceDelta:
        if ending is not None:
            self.finished = True
            text += self.detokenizer.finish()
        return ChoiceDelta(
            index=self.sequence.choice,
            position=position,
            token_ids=[token.token_id for token in tokens],
            text=text,
            finish_reason=ending.reason if ending else None,
            stop_reason=ending.stop_reason if ending else None,
            logprobs=[t.logprobs for t in tokens if t.logprobs is not None] or None,
        )


@dataclass(slots=True)
class RequestState:
    """A request in hand."""

    request: EngineRequest
    choices: list[ChoiceState]
    prepared: bool = False
    encoded: set[int] = field(default_factory=set)
    """Indexes of the items that have embeddings; one that the prefix cache covers needs none."""
    kv_blocks: int = 0
    """The most blocks held at one time so far."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Complete, and still to be told."""

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self.choices)

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.request.prompt_token_ids),
            completion_tokens=sum(c.sequence.num_output_tokens for c in self.choices),
            cached_tokens=self._cached_tokens,
        )

    @property
    def _cached_tokens(self) -> int:
        """Of the choice that was admitted first; the others find the prompt that it computed."""
        found = (choice.sequence.num_cached_tokens for choice in self.choices)
        return next((num_tokens for num_tokens in found if num_tokens is not None), 0)

    @property
    def blocks(self) -> set[int]:
        return {block for choice in self.choices for block in choice.sequence.block_table}


class RequestFactory:
    """Makes an entry of a request, or refuses it."""

    def __init__(
        self,
        decode: Decode,
        encode: Callable[[str], list[int]],
        eos_token_ids: frozenset[int],
        vocab_size: int,
        max_model_len: int,
        new_drafter: Callable[[], Drafter | None],
    ) -> None:
        """`encode` adds no special tokens. `new_drafter` is called for each choice without a mask,
        for a mask knows only what may follow the tokens that are certain."""
        self._decode = decode
        self._encode = encode
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._new_drafter = new_drafter

    def entry(self, request: EngineRequest) -> RequestState:
        """Raises a RequestError for what could never run."""
        check_prompt(request, self._vocab_size)
        check_placeholders(request)
        max_tokens = resolve_max_tokens(request, self._max_model_len)
        check_sampling(request, self._vocab_size, max_tokens)
        return RequestState(request, self._new_choices(request, max_tokens))

    def _new_choices(self, request: EngineRequest, max_tokens: int) -> list[ChoiceState]:
        params, new_token_mask = request.sampling, request.new_token_mask
        bad_words = tokenize_bad_words(params.bad_words, self._encode, self._vocab_size)
        # Whoever has logged something has told them with it.
        tells_prompt = params.prompt_logprobs is not None and not request.logged
        sequences = [
            Sequence(
                request=request,
                choice=index,
                seed=_seed(request),
                token_ids=list(request.prompt_token_ids),
                max_tokens=max_tokens,
                end_token_ids=(*self._eos_token_ids, *params.stop_token_ids),
                bad_words=bad_words,
                token_mask=None if new_token_mask is None else new_token_mask(),
                prompt_logprobs={} if tells_prompt and index == 0 else None,
            )
            for index in range(params.n)
        ]
        for sequence in sequences:
            if sequence.token_mask is None:
                sequence.drafter = self._new_drafter()
        return [
            ChoiceState(sequence, self._new_detokenizer(params), self._eos_token_ids)
            for sequence in sequences
        ]

    def _new_detokenizer(self, params: SamplingParams) -> Detokenizer:
        decode: Callable[[list[int]], str] = self._decode
        if not params.detokenize:
            decode = _no_text
        elif not params.skip_special_tokens:
            decode = partial(self._decode, skip_special_tokens=False)
        return Detokenizer(decode, params.stop, params.include_stop_str_in_output)


def _no_text(token_ids: list[int]) -> str:
    return ""


def _seed(request: EngineRequest) -> int:
    if request.sampling.seed is not None:
        return request.sampling.seed
    digest = hashlib.sha256(request.request_id.encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
