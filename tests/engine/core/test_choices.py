"""Sampling parameters of choices: stop events, text, grammars and rejected requests."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shared.errors import InvalidRequest, WorkerFailure
from shared.protocol.detokenizer import Detokenizer
from shared.protocol.records import ChoiceDelta, TokenLogprobs
from shared.protocol.sampling import SamplingParams
from tests.fakes import FakeRunner
from tests.shared.protocol.test_detokenizer import decode as decode_bytes
from tests.support.engine import make_core
from workers.engine import log_records as outputs_module
from workers.engine.core.block_pool import BlockPool
from workers.engine.core.engine import EngineCore
from workers.engine.core.sequence import (
    EngineRequest,
    LoggedChoice,
    RequestOutput,
    SampledToken,
    ScheduledSequence,
    Sequence,
    TokenMask,
)
from workers.engine.core.validation import tokenize_bad_words
from workers.engine.log_records import merge_deltas, num_for_record

BLOCK_SIZE, VOCAB_SIZE, EOS, SPECIAL = 2, 16, 0, 1
LETTERS = "..abcdefghijklmn"


def decode(token_ids: list[int], /, *, skip_special_tokens: bool = True) -> str:
    special = {EOS: "<eos>", SPECIAL: "<s>"}
    return "".join(
        LETTERS[t] if t not in special else "" if skip_special_tokens else special[t]
        for t in token_ids
    )


class Script(FakeRunner):
    """Runner that samples the given tokens, `stride` of them a step.

    It skips tokens that a mask does not allow, and returns log probabilities for all tokens.
    """

    def __init__(self, answer: list[int], stride: int = 1) -> None:
        super().__init__(BLOCK_SIZE, VOCAB_SIZE)
        self._answer = answer
        self._stride = stride

    def sample(self, scheduled: list[ScheduledSequence]) -> list[list[SampledToken]]:
        return [
            tokens and self._tokens(s.sequence)
            for tokens, s in zip(super().sample(scheduled), scheduled, strict=True)
        ]

    def _tokens(self, sequence: Sequence) -> list[SampledToken]:
        start = sequence.num_output_tokens
        if sequence.token_mask is not None:
            return [SampledToken(_first_allowed(sequence.token_mask, self._answer[start]))]
        has_logprobs = sequence.request.sampling.logprobs is not None
        return [
            SampledToken(t, TokenLogprobs(-float(t), 1, [], []) if has_logprobs else None)
            for t in self._answer[start : start + self._stride]
        ]


def new_core(runner: FakeRunner, **options: Any) -> EngineCore:
    return make_core(
        runner,
        BlockPool(64, BLOCK_SIZE),
        VOCAB_SIZE,
        decode=decode,
        eos=[EOS],
        max_model_len=24,
        **options,
    )


def make_request(**params: Any) -> EngineRequest:
    return EngineRequest("r", [3, 4], [], SamplingParams(**params))


def finish(core: EngineCore, request: EngineRequest) -> list[ChoiceDelta]:
    core.add(request)
    deltas: list[ChoiceDelta] = []
    while core.has_work:
        for output in core.step():
            assert output.error is None
            deltas += output.choices
    assert core.stats().num_free_blocks == 64
    return deltas


def say(answer: list[int], **params: Any) -> ChoiceDelta:
    (delta,) = merge_deltas(
        [RequestOutput("r", finish(new_core(Script(answer)), make_request(**params)))]
    )
    return delta


# -- ends and text --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "text", "stop_reason"),
    [
        ({"stop": ["cd"]}, "ab", "cd"),
        ({"stop": ["cd"], "include_stop_str_in_output": True}, "abcd", "cd"),
        ({"stop": ["cd"], "min_tokens": 3}, "ab", "cd"),
        ({"stop": ["cd"], "min_tokens": 4}, "abcdab", "cd"),
        ({"stop": ["cd", "da"], "min_tokens": 4}, "abc", "da"),
        ({"stop": ["cd"], "min_tokens": 12}, "abcdabcdabcd", None),
        ({"stop_token_ids": [4]}, "ab", 4),
        ({"stop_token_ids": [4], "include_stop_str_in_output": True}, "abc", 4),
        ({"detokenize": False, "stop_token_ids": [5]}, "", 5),
    ],
)
def test_the_text_ends_at_a_stop(
    params: dict[str, Any], text: str, stop_reason: str | int | None
) -> None:
    delta = say([2, 3, 4, 5] * 3, max_tokens=12, **params)
    assert (delta.text, delta.stop_reason) == (text, stop_reason)


def test_special_tokens_are_written_on_demand() -> None:
    answer = [2, SPECIAL, 3, EOS]
    assert say(answer).text == "ab"
    delta = say(answer, skip_special_tokens=False, include_stop_str_in_output=True)
    assert (delta.text, delta.stop_reason, delta.token_ids) == ("a<s>b<eos>", None, answer)


@given(
    st.text("ab", max_size=16),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 16),
)
def test_no_stop_string_counts_that_ends_within_the_first_tokens(
    text: str, stop: list[str], min_tokens: int
) -> None:
    detokenizer, pieces = Detokenizer(decode_bytes, stop), []
    ended = None
    for num_tokens, token_id in enumerate(text.encode(), 1):
        piece, ended = detokenizer.push(token_id, num_tokens > min_tokens)
        pieces.append(piece)
        if ended is not None:
            break
    ends = [
        (place + len(s), place, s)
        for s in stop
        for place in range(len(text))
        if text.startswith(s, place) and place + len(s) > min_tokens
    ]
    _, place, matched = min(ends, default=(0, len(text), None))
    assert ("".join(pieces) + detokenizer.finish(), ended) == (text[:place], matched)


# -- several tokens a step ------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": 5},
        {"stop_token_ids": [6]},
        {"stop": ["de"]},
        {"max_tokens": 4, "n": 2},
        {"logprobs": 0, "max_tokens": 6},
    ],
)
def test_tokens_after_a_stop_event_are_dropped(stride: int, params: dict[str, Any]) -> None:
    answer = [2, 3, 4, 5, 6, 7, EOS, 8, 9]
    merged = merge_deltas(
        [RequestOutput("r", finish(new_core(Script(answer)), make_request(**params)))]
    )
    core = new_core(Script(answer, stride), prefix_caching=False)
    core.add(make_request(**params))
    deltas = []
    while core.has_work:
        for output in core.step():
            assert output.error is None
            deltas += output.choices
    assert merge_deltas([RequestOutput("r", deltas)]) == merged
    logprobs = merged[0].logprobs
    assert (logprobs is None) == ("logprobs" not in params)
    if logprobs is not None:
        assert [-entry.logprob for entry in logprobs] == merged[0].token_ids


# -- grammars -------------------------------------------------------------------------------------


class EvenThenOdd:
    """A grammar by hand: ids that are even and odd in turn, and the end after six."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    def allowed(self) -> NDArray[np.int32] | None:
        if len(self.token_ids) == 1:
            return None
        odd = 0xAAA8
        allowed = odd if len(self.token_ids) % 2 else odd >> 1
        return np.array([1 if len(self.token_ids) == 6 else allowed], dtype=np.int32)

    def advance(self, token_id: int) -> None:
        self.token_ids.append(token_id)


def _first_allowed(mask: TokenMask, token_id: int) -> int:
    words = mask.allowed()
    return next(
        t % VOCAB_SIZE
        for t in range(token_id, token_id + VOCAB_SIZE)
        if words is None or words[0] >> t % VOCAB_SIZE & 1
    )


def test_each_choice_has_a_mask_that_is_advanced_through_its_log() -> None:
    masks: list[EvenThenOdd] = []

    def new_mask() -> TokenMask:
        masks.append(EvenThenOdd())
        return masks[-1]

    answer = [5, 6, 7, 8, 9, 10, 11, 12]
    expected = [6, 6, 8, 9, 10, 11, 0]
    request = replace(make_request(n=2), new_token_mask=new_mask)
    whole = merge_deltas([RequestOutput("r", finish(new_core(Script(answer)), request))])
    assert [delta.token_ids for delta in whole] == [expected] * 2
    for cut in range(len(expected)):
        logged = [LoggedChoice(expected[:cut], False)]
        request = replace(make_request(), logged=logged, new_token_mask=new_mask)
        deltas = finish(new_core(Script(answer)), request)
        assert [t for d in deltas for t in d.token_ids] == expected[cut:]
    assert all(mask.token_ids == expected for mask in masks)


def test_a_failing_mask_fails_only_its_request() -> None:
    class Broken(EvenThenOdd):
        def allowed(self) -> NDArray[np.int32] | None:
            raise RuntimeError("a poisoned grammar")

    core = new_core(Script([2, 3, 4, EOS]))
    core.add(replace(make_request(), request_id="bad", new_token_mask=Broken))
    core.add(make_request())
    errors, token_ids = {}, []
    while core.has_work:
        for output in core.step():
            if output.error is not None:
                errors[output.request_id] = type(output.error)
            token_ids += [t for d in output.choices for t in d.token_ids]
    assert errors == {"bad": WorkerFailure}
    assert token_ids == [2, 3, 4, EOS]


def test_an_invalid_grammar_leaves_no_state() -> None:
    def new_mask() -> TokenMask:
        raise InvalidRequest("no such grammar", field="sampling_params.structured_outputs")

    core = new_core(Script([2, EOS]))
    with pytest.raises(InvalidRequest):
        core.add(replace(make_request(), new_token_mask=new_mask))
    assert not core.has_work


# -- refused before a batch -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"allowed_token_ids": [3, VOCAB_SIZE]}, "allowed_token_ids"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"min_tokens": 23}, "min_tokens"),
        ({"stop": ["x"], "detokenize": False}, "stop"),
        ({"bad_words": ["zzz"]}, "bad_words"),
    ],
)
def test_requests_that_the_model_does_not_support_are_rejected(
    params: dict[str, Any], field: str
) -> None:
    core = new_core(Script([EOS]), encode=lambda text: [LETTERS.find(c) for c in text if c != "z"])
    with pytest.raises(InvalidRequest) as raised:
        core.add(make_request(**params))
    assert raised.value.field == f"sampling_params.{field}"
    assert not core.has_work


def test_log_probabilities_of_a_prompt_have_to_fit_into_a_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.engine.core.validation.MAX_PROMPT_LOGPROBS", 7)
    core = new_core(Script([EOS]))
    core.add(replace(make_request(prompt_logprobs=2), request_id="fits"))
    with pytest.raises(InvalidRequest, match="limit of 7"):
        core.add(make_request(prompt_logprobs=3))


def test_bad_words_begin_a_text_or_follow_a_space() -> None:
    texts: list[str] = []

    def encode(text: str) -> list[int]:
        texts.append(text)
        return [ord(c) for c in text.strip()]

    assert tokenize_bad_words(["ab", " c"], encode, 128) == ((97, 98), (99,))
    assert texts == ["ab", " ab", "c", " c"]


# -- the prefix cache -----------------------------------------------------------------------------


def test_requests_can_skip_the_prefix_cache() -> None:
    core = new_core(FakeRunner(BLOCK_SIZE, VOCAB_SIZE))
    request = replace(make_request(max_tokens=1, ignore_eos=True), prompt_token_ids=[3] * 9)
    skips = replace(
        request,
        sampling=make_request(
            max_tokens=1, ignore_eos=True, skip_reading_prefix_cache=True
        ).sampling,
    )
    hits = []
    for variant in (request, skips, request):
        core.add(variant)
        (output,) = core.step()
        assert output.usage is not None
        hits.append(output.usage.cached_tokens)
    assert hits == [0, 0, 8]


# -- records --------------------------------------------------------------------------------------


def test_log_probabilities_join_on_and_a_record_stays_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outputs_module, "MAX_RECORD_VALUES", 12)
    entry = TokenLogprobs(-1.0, 1, [5, 6], [-1.0, -2.0])
    outputs = [
        RequestOutput("r", [ChoiceDelta(0, i, [5], "a", logprobs=[entry])]) for i in range(5)
    ]
    assert [num_for_record(outputs[i:]) for i in range(6)] == [3, 3, 3, 2, 1, 0]
    (delta,) = merge_deltas(outputs[:3])
    assert (delta.token_ids, delta.logprobs) == ([5] * 3, [entry] * 3)
    large = replace(outputs[0], prompt_logprobs=[entry] * 9)
    assert num_for_record([large, *outputs]) == 1
    assert merge_deltas([RequestOutput("r", [ChoiceDelta(0, 0, [5], "a")])])[0].logprobs is None
