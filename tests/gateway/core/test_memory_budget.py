"""Memory limits for answers that are not streamed."""

import array
import base64
import gc
import random
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.config.schema import GatewayConfig
from shared.errors import Overloaded
from shared.protocol.encoding import to_json
from shared.protocol.messages import RequestRecord
from shared.protocol.records import ChoiceDelta, Finish, TokenChunk, TokenLogprobs, Usage
from shared.protocol.requests import GenerateRequest
from shared.state.log_records import decode_record
from workers.gateway.core.assembler import Answering, AnswerOptions, Assembler, TokenBytes
from workers.gateway.core.kinds import AnswerKind, Budget
from workers.gateway.core.memory_budget import (
    MAX_LARGEST,
    AnswerBudget,
    AnswerSize,
    answer_size_of,
    read_answer_size,
    stored_options,
)
from workers.gateway.core.plan import SubmitPlan
from workers.gateway.http.errors import AnswerTooLarge
from workers.gateway.openai.chat import ChatOptions, plan_chat
from workers.gateway.openai.chat_assembler import ChatAssembler
from workers.gateway.openai.completions import (
    CompletionAssembler,
    CompletionOptions,
    Echo,
    plan_completion,
)
from workers.gateway.openai.embeddings import EMBEDDING, EmbeddingAssembler, plan_embedding
from workers.gateway.openai.scores import RERANK, SCORE
from workers.gateway.schemas.embeddings import EmbeddingRequest
from workers.gateway.schemas.openai_request import ChatRequest, CompletionRequest
from workers.gateway.vllm.generate_assembler import GENERATE, GenerateAssembler, GenerateShape

LARGE = Budget().tokens
PATH = "/v1/chat/completions"
NUM_TOKENS = 300
TOKEN_BYTES = {i: f" t{i:05d}".encode() for i in range(10_000)}
PROMPT = list(range(400, 400 + NUM_TOKENS + 1))


def chat(**fields: Any) -> SubmitPlan[ChatOptions]:
    message = {"role": "user", "content": "Hi"}
    body = {"model": "demo", "messages": [message]} | fields
    return plan_chat(msgspec.convert(body, ChatRequest))


def completion(**fields: Any) -> SubmitPlan[CompletionOptions]:
    body = {"model": "demo", "prompt": "Hi"} | fields
    return plan_completion(msgspec.convert(body, CompletionRequest))


def test_an_answer_without_log_probabilities_has_no_limit() -> None:
    budget = AnswerBudget(GatewayConfig(max_answer_mib=1))
    plans: list[SubmitPlan[Any]] = [
        chat(n=8),
        completion(prompt=["Hi"] * 64, n=8),
        SubmitPlan([GenerateRequest("demo", prompt_token_ids=PROMPT)], {"n": 8}, AnswerOptions()),
    ]
    for plan in plans:
        size = answer_size_of(plan, {"logprobs": 20})
        assert not size.needs_max_model_len
        assert size.max_bytes(10**6) == 0
        assert stored_options(plan.options, size) == msgspec.to_builtins(plan.options)
        budget.reserve({}, size.max_bytes(10**6), LARGE)


def test_the_size_counts_choices_tokens_and_prompts() -> None:
    num_bytes = answer_size_of(chat(logprobs=True, max_tokens=10), {}).max_bytes()
    assert num_bytes > 0
    assert answer_size_of(chat(logprobs=True, max_tokens=10, n=4), {}).max_bytes() == 4 * num_bytes
    assert answer_size_of(chat(logprobs=True, max_tokens=20), {}).max_bytes() == 2 * num_bytes
    assert answer_size_of(chat(logprobs=True), {"max_tokens": 10}).max_bytes() == num_bytes
    assert answer_size_of(chat(logprobs=True), {}).max_bytes(10) == num_bytes
    assert (
        answer_size_of(chat(logprobs=True, top_logprobs=20, max_tokens=10), {}).max_bytes()
        == 11 * num_bytes
    )
    several = completion(logprobs=0, prompt=["a", "b", "c"], n=2, max_tokens=10)
    assert answer_size_of(several, {}).max_bytes() == 6 * num_bytes

    # With an echo, each choice has its own copy of the prompt.
    echoed = completion(logprobs=0, echo=True, prompt=PROMPT[:10], n=2, max_tokens=10)
    echoed = msgspec.structs.replace(
        echoed, options=msgspec.structs.replace(echoed.options, echo=[Echo("x")])
    )
    assert answer_size_of(echoed, {}).max_bytes() == 4 * num_bytes
    request = GenerateRequest("demo", prompt_token_ids=PROMPT[:10])
    sampling = {"n": 2, "max_tokens": 1, "logprobs": None, "prompt_logprobs": 0}
    scored = answer_size_of(SubmitPlan([request], sampling, AnswerOptions()), {})
    assert scored.max_bytes() == num_bytes
    assert scored.refusal(num_bytes, GENERATE.budget).field == "prompt_logprobs"


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        (EMBEDDING, "fewer dimensions"),
        (SCORE, "send fewer texts"),
        (RERANK, "send fewer documents"),
    ],
)
def test_large_embeddings_are_refused_with_advice(kind: AnswerKind[Any], advice: str) -> None:
    budget, size = AnswerBudget(GatewayConfig(max_answer_mib=1)), AnswerSize(of_embeddings=2**20)
    num_bytes = size.max_bytes()
    refusal = size.refusal(num_bytes, kind.budget)
    with pytest.raises(AnswerTooLarge, match=f"embeddings of this answer .*{advice}$"):
        budget.reserve({}, num_bytes, refusal)


@given(
    st.builds(
        AnswerSize,
        per_token=st.integers(1, 22),
        of_prompt=st.integers(0, 10**6),
        choices=st.integers(1, 512),
        max_tokens=st.none() | st.integers(1, 10**6),
    )
)
def test_the_size_survives_the_request_record(size: AnswerSize) -> None:
    record = RequestRecord(
        "chat", "demo", "", 0, False, stored_options(ChatOptions(logprobs=True), size)
    )
    assert read_answer_size(msgspec.json.decode(to_json(record), type=RequestRecord)) == size


def test_one_answer_and_all_together_have_a_limit() -> None:
    budget = AnswerBudget(GatewayConfig(max_answer_mib=1))
    with pytest.raises(AnswerTooLarge) as refused:
        budget.reserve({}, 2**20 + 1, LARGE)
    assert refused.value.field == "max_tokens"
    held: list[dict[str, Any]] = [{} for _ in range(MAX_LARGEST)]
    for scope in held:
        budget.reserve(scope, 2**20, LARGE)
    budget.reserve(held[0], 2**20, LARGE)  # replaces the earlier reservation
    with pytest.raises(Overloaded):
        budget.reserve({}, 1, LARGE)
    budget.release(held[0])
    budget.release(held[0])
    budget.reserve({}, 2**20, LARGE)
    with pytest.raises(Overloaded):
        budget.reserve({}, 1, LARGE)


def assembler(kind: str, token_bytes: TokenBytes, num_others: int) -> Assembler[Any]:
    if kind == "chat":
        return ChatAssembler(Answering("c", "demo", 0, ChatOptions(logprobs=True), token_bytes))
    if kind == "completion":
        return CompletionAssembler(
            Answering("c", "demo", 0, CompletionOptions(logprobs=True), token_bytes)
        )
    if kind == "echo":
        echo = [Echo("x" * 6 * NUM_TOKENS, PROMPT)]
        options = CompletionOptions(logprobs=True, echo=echo)
        return CompletionAssembler(Answering("c", "demo", 0, options, token_bytes))
    shape = GenerateShape(
        wire_id="g",
        num_prompt_tokens=1,
        output_mode="text" if kind == "text" else "tokens",
        logprobs=num_others,
        prompt_token_ids=PROMPT if kind == "prompt" else [],
    )
    return GenerateAssembler(Answering("g", "demo", 0, shape, token_bytes))


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
def test_no_embeddings_take_more_memory_than_estimated(encoding_format: Any) -> None:
    prompts, dimensions = 8, 4096
    body = EmbeddingRequest(model="demo", input=["Hi"] * prompts, encoding_format=encoding_format)
    plan = plan_embedding(body)
    size = answer_size_of(plan, {}, dimensions)
    shorter = plan_embedding(msgspec.structs.replace(body, dimensions=dimensions // 2))
    assert answer_size_of(shorter, {}, dimensions).max_bytes() == size.max_bytes() / 2
    longer = plan_embedding(msgspec.structs.replace(body, dimensions=10**12))
    assert answer_size_of(longer, {}, dimensions) == size
    record = RequestRecord("embedding", "demo", "", 0, False, stored_options(plan.options, size))
    assert read_answer_size(record) == size
    values = random.Random(0)
    logs = [
        to_json(TokenChunk(0, 1, [], embedding=base64.b64encode(packed).decode()))
        for packed in (
            array.array("f", (values.gauss(0, 1e-5) for _ in range(dimensions))).tobytes()
            for _ in range(prompts)
        )
    ]
    gc.collect()
    tracemalloc.start()
    try:
        assembling = EmbeddingAssembler(Answering("e", "demo", 0, plan.options))
        for part, data in enumerate(logs):
            chunk = decode_record(data)
            assert isinstance(chunk, TokenChunk)
            assembling.add(part, chunk)
        msgspec.json.encode(assembling.answer())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size.max_bytes() == size.num_bytes(0)


@pytest.mark.parametrize("num_others", [0, 1, 20])
@pytest.mark.parametrize("kind", ["chat", "completion", "echo", "tokens", "text", "prompt"])
def test_no_answer_takes_more_memory_than_estimated(kind: str, num_others: int) -> None:
    others = list(range(1000, 1000 + num_others))
    logprobs = [
        TokenLogprobs(-i / 7, 1, [i + other for other in others], [-i / 9 - j for j in others])
        for i in range(NUM_TOKENS)
    ]
    token_ids = [1000 + i for i in range(NUM_TOKENS)]
    if kind in ("echo", "prompt"):
        delta = ChoiceDelta(0, 0, [1], "a", "stop", logprobs=logprobs[:1])
        logs = [to_json(TokenChunk(0, 1, [delta], prompt_logprobs=logprobs))]
    else:
        logs = [
            to_json(
                TokenChunk(
                    i, 1, [ChoiceDelta(0, i, [token_ids[i]], "word ", None, logprobs=[logprobs[i]])]
                )
            )
            for i in range(NUM_TOKENS)
        ]

    def answer() -> None:
        assembling = assembler(kind, TOKEN_BYTES, num_others)
        for data in logs:
            record = decode_record(data)
            assert isinstance(record, TokenChunk)
            assembling.add(0, record)
        assembling.add(0, Finish(NUM_TOKENS, 1, Usage(1, NUM_TOKENS), 1, []))
        msgspec.json.encode(assembling.answer())

    # A measurement of coverage changes the code when it runs for the first time.
    answer()
    gc.collect()
    tracemalloc.start()
    try:
        answer()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < AnswerSize(per_token=2 + num_others).num_bytes(NUM_TOKENS)
