"""The events and the answer of generate, compared with a recording of vLLM."""

from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from shared.protocol.records import (
    ChoiceDelta,
    ErrorInfo,
    Failure,
    Finish,
    LogRecord,
    TokenChunk,
    TokenLogprobs,
    Usage,
)
from workers.gateway.core.assembler import Answering
from workers.gateway.schemas.generate import GenerateChunk, GenerateResponse, PlaceholderInfo
from workers.gateway.vllm.generate_assembler import GenerateAssembler, GenerateShape

RECORDED = Path(__file__).parent / "recorded"
PROMPT_TOKENS = 40


def recorded(name: str) -> Any:
    return msgspec.json.decode((RECORDED / f"{name}.json").read_bytes())


def shape(name: str, **changed: Any) -> GenerateShape:
    whole = recorded(name)
    fields = {
        "wire_id": whole["request_id"],
        "num_prompt_tokens": PROMPT_TOKENS,
        "output_mode": whole["output_mode"],
        "logprobs": 2,
        "prompt_token_ids": whole["prompt_token_ids"],
        "return_token_ids": True,
        "placeholders": {
            modality: [PlaceholderInfo(**place) for place in places]
            for modality, places in whole["mm_placeholders"].items()
        },
        "include_usage": True,
    }
    return GenerateShape(**fields | changed)


def log_of(name: str) -> list[LogRecord]:
    """Return the recorded answer as a log with one token per record, and the stream's texts."""
    choice = recorded("generate_image_sp")["choices"][0]
    texts = [event["choices"][0]["text"] for event in events("stream_text")[:8]]
    records: list[LogRecord] = []
    for i, (token_id, entry) in enumerate(
        zip(choice["token_ids"], choice["logprobs"]["content"], strict=True)
    ):
        top = entry["top_logprobs"]
        logprobs = TokenLogprobs(
            entry["logprob"],
            entry["rank"],
            [t["token_id"] for t in top],
            [t["logprob"] for t in top],
        )
        reason: Literal["length"] | None = "length" if i == 7 else None
        delta = ChoiceDelta(0, i, [token_id], texts[i], reason, None, [logprobs])
        records.append(TokenChunk(i, 1, [delta]))
    return [*records, Finish(8, 1, Usage(PROMPT_TOKENS, 8), 1, [])]


def events(name: str) -> list[Any]:
    lines = (RECORDED / f"{name}.txt").read_text().splitlines()
    return [msgspec.json.decode(line[6:]) for line in lines if line.startswith("data: {")]


def token_bytes() -> dict[int, bytes]:
    """Return the bytes of the recorded tokens. 113 begins a character that never ends."""
    tokens = recorded("generate_image_sp")["choices"][0]["logprobs"]["content"]
    texts = recorded("generate_image_text")["choices"][0]["logprobs"]["content"]
    spelt = {
        top["token_id"]: text["token"].encode()
        for token, entry in zip(tokens, texts, strict=True)
        for top, text in zip(token["top_logprobs"], entry["top_logprobs"], strict=True)
    }
    return spelt | {113: b"\xe4"}


def assembled(
    fields: GenerateShape, log: list[LogRecord], created_s: int = 0
) -> tuple[list[GenerateChunk], GenerateResponse]:
    assembler = GenerateAssembler(Answering("", "m", created_s, fields, token_bytes()))
    chunks: list[GenerateChunk] = []
    for record in log:
        is_failure = isinstance(record, Failure)
        chunks += assembler.abort() if is_failure else assembler.add(0, record)
    return chunks, assembler.answer()


@pytest.mark.parametrize(
    ("name", "stream"),
    [("generate_image_sp", "stream_tokens"), ("generate_image_text", "stream_text")],
)
def test_events_equal_the_recording_byte_for_byte(name: str, stream: str) -> None:
    chunks, _ = assembled(shape(name), log_of(name))
    written = b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks)
    assert (written + b"data: [DONE]\n\n").decode() == (RECORDED / f"{stream}.txt").read_text()


@pytest.mark.parametrize("name", ["generate_image_sp", "generate_image_text"])
def test_the_answer_equals_the_recording_byte_for_byte(name: str) -> None:
    whole = recorded(name)
    _, answer = assembled(shape(name), log_of(name), whole["created"])
    assert msgspec.json.encode(answer) == msgspec.json.encode(whole)


def test_continuous_usage_counts_the_tokens_so_far() -> None:
    fields = shape("generate_image_sp", continuous_usage=True)
    chunks, _ = assembled(fields, log_of("generate_image_sp"))
    usages = [msgspec.to_builtins(chunk.usage) for chunk in chunks]
    assert usages[2] == {
        "prompt_tokens": 40,
        "total_tokens": 43,
        "completion_tokens": 3,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }
    assert usages[-1] == {"prompt_tokens": 40, "total_tokens": 48, "completion_tokens": 8}


def test_an_event_has_one_choice() -> None:
    plain = GenerateShape(wire_id="w", num_prompt_tokens=3, n=2)
    both = [ChoiceDelta(0, 0, [1], "a"), ChoiceDelta(1, 0, [2, 3], "b", "stop", 3)]
    chunks, _ = assembled(plain, [TokenChunk(0, 1, both)])
    assert [[c.index for c in chunk.choices] for chunk in chunks] == [[0], [1]]
    (ended,) = chunks[1].choices
    assert (ended.finish_reason, ended.stop_reason, ended.token_ids) == ("stop", 3, [2, 3])


def test_held_back_text_makes_no_event_in_tokens_mode() -> None:
    late = TokenChunk(0, 1, [ChoiceDelta(0, 4, [], "late")])
    plain = GenerateShape(wire_id="w", num_prompt_tokens=3)
    assert assembled(plain, [late])[0] == []
    text = msgspec.structs.replace(plain, output_mode="text")
    (chunk,), _ = assembled(text, [late])
    assert chunk.choices[0].text == "late"


def test_an_aborted_request_ends_with_its_tokens_so_far() -> None:
    plain = GenerateShape(wire_id="w", num_prompt_tokens=3, n=2, include_usage=True)
    first = [ChoiceDelta(0, 0, [1], "a"), ChoiceDelta(1, 0, [2], "b", "stop")]
    gone = ErrorInfo("cancelled", "cancelled by the client", None, "client", False)
    log: list[LogRecord] = [TokenChunk(0, 1, first), Failure(1, 1, gone, [])]
    (_, _, aborted, usage), whole = assembled(plain, log)
    assert [(c.index, c.finish_reason, c.token_ids) for c in aborted.choices] == [(0, "abort", [])]
    assert msgspec.to_builtins(usage.usage) == {
        "prompt_tokens": 3,
        "total_tokens": 5,
        "completion_tokens": 2,
    }
    assert [(c.finish_reason, c.token_ids) for c in whole.choices] == [
        ("abort", [1]),
        ("stop", [2]),
    ]


def test_prompt_logprobs_list_the_prompt_token_first() -> None:
    fields = GenerateShape(wire_id="w", num_prompt_tokens=3, prompt_token_ids=[5, 6, 7])
    logprobs = [TokenLogprobs(-3.0, 9, [1], [-0.5]), TokenLogprobs(-0.5, 1, [7], [-0.5])]
    record = TokenChunk(0, 1, [ChoiceDelta(0, 0, [1], "a", "length")], logprobs)
    spelling = {1: b"a", 5: b"e", 6: b"f", 7: b"g"}
    assembler = GenerateAssembler(Answering("", "m", 0, fields, spelling))
    assembler.add(0, record)
    assembler.add(0, Finish(1, 1, Usage(3, 1), 1, []))
    whole = msgspec.json.decode(msgspec.json.encode(assembler.answer()))
    assert whole["prompt_logprobs"] == [
        None,
        {
            "6": {"logprob": -3.0, "rank": 9, "decoded_token": "f"},
            "1": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        },
        {"7": {"logprob": -0.5, "rank": 1, "decoded_token": "g"}},
    ]
    assert whole["prompt_token_ids"] is None
