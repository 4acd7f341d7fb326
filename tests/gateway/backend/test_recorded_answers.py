"""Answers, stored records and error replies, byte for byte as they were recorded.

Other gateways read the records, also of another version. A file that is removed is recorded again.
"""

import base64
import hashlib
import json
import re
import struct
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec import Struct

from shared import client
from shared.bus.bus import Bus
from shared.config.parsing import parse_config
from shared.errors import PagemillError
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import RequestRecord
from shared.protocol.records import (
    AnyRecord,
    AudioChunk,
    ChoiceDelta,
    ErrorInfo,
    Failure,
    Finish,
    ImageRecord,
    OutputEnd,
    OutputSummary,
    StepState,
    TokenChunk,
    TokenLogprobs,
    Usage,
)
from shared.protocol.renderer_rpc import (
    Detokenized,
    ErrorReply,
    ModelCard,
    SoundPieces,
    Tokenized,
    decode_detokenize_request,
)
from shared.telemetry.metrics import Metrics
from workers.gateway.app import AppContext, build_application
from workers.gateway.http import errors
from workers.gateway.openapi.document import KINDS
from workers.gateway.vllm import errors as vllm_errors
from workers.gateway.worker import all_routes

RECORDED = Path(__file__).parents[2] / "recorded"
CREATED_S = 4_000_000_000
VOICE = "stages: {talker: {role: engine, inputs: {text: {from: engine, function: speech, mode: \
stream}}, output: {name: codes, kind: codes}, voices: [alloy], frames_per_character: 3.4}, \
code2wav: {role: generator, inputs: {codes: {from: talker, function: follow, mode: stream}}, \
output: {name: audio, kind: audio, timed: true}, chunks: {first: [5], size: 50, left: 2}}}"
PAINTER = "stages: {renderer: {enabled: false}, engine: {enabled: false}, dit: {role: generator, \
inputs: {prompt: {from: request, function: paint}}, output: {name: image, kind: image}, sizes: \
[16x16, 12x8]}}"
CONFIG = f"""
gateway: {{max_answer_mib: 1, scale_out: true}}
models:
  demo: {{path: demo, sampling_defaults: {{temperature: 0.5}}}}
  wide: {{path: wide}}
  voice: {{path: voice, {VOICE}}}
  painter: {{path: painter, {PAINTER}}}
"""
ENDPOINTS = {
    "chat": "/v1/chat/completions",
    "completion": "/v1/completions",
    "demo": "/generate",
    "embedding": "/v1/embeddings",
    "generate": "/inference/v1/generate",
    "images": "/v1/images/generations",
    "message": "/v1/messages",
    "rerank": "/v1/rerank",
    "score": "/v1/score",
    "speech": "/v1/audio/speech",
    "transcription": "/v1/audio/transcriptions",
}
"""Path of the endpoint, by kind."""
PNG = b"\x89PNG\r\n\x1a\n"
PIECES = ["media:" + digit * 64 for digit in "ab"]
PCM = base64.b64encode(b"\1\0\2\0").decode()
FIELDS = (
    "messages[0].content[1].audio_url.url",
    "messages",
    "prompt",
    "prompt_token_ids[3]",
    "tokens",
    "items[1]",
    "given_text",
    "url",
    "voice",
    "outputs",
    "embedding",
    "embedding.dimensions",
    "image.size",
    "image.steps",
    "sampling_params",
    "sampling_params.max_tokens",
    "sampling_params.prompt_logprobs",
    "sampling_params.structured_outputs.regex",
    "template_kwargs.x",
)
"""Fields of requests on the bus."""

Logs = Sequence[Sequence[AnyRecord]]


def text_log(choices: int = 1, **first: Any) -> list[AnyRecord]:
    """The log of a text in three records; `first` are further fields of the first one."""
    scored = [TokenLogprobs(-0.5, 1, [6], [-0.5])]
    deltas = [
        [ChoiceDelta(i, 0, [5], "One ", logprobs=scored) for i in range(choices)],
        [ChoiceDelta(i, 1, [6], "two.", "stop", logprobs=scored) for i in range(choices)],
    ]
    return [
        TokenChunk(0, 1, deltas[0], **first),
        TokenChunk(1, 1, deltas[1]),
        Finish(2, 1, Usage(3, 2), 1, []),
    ]


def embedding_log(*values: float) -> list[AnyRecord]:
    data = base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
    return [TokenChunk(0, 1, [], embedding=data), Finish(1, 1, Usage(4, 0), 1, [])]


def spoken_logs(text: Sequence[AnyRecord] = ()) -> Logs:
    """The logs of a text and of its speech."""
    ends = {
        "codes": OutputSummary(Usage(3, 0), units={"frames": 5}, finish_reason="length"),
        "audio": OutputSummary(units={"samples": 4}),
    }
    end = Finish(len(text), 1, Usage(3, len(text)), 1, [], ends)
    sound = [AudioChunk(i, 1, 2 * i, 2, 24_000, PCM, i + 1) for i in range(2)]
    return [*text, end], [*sound, OutputEnd(2, 1, OutputSummary())]


def painted_logs(number: int = 1, *, previews: bool = False) -> Logs:
    media = f"media:{hashlib.sha256(PNG).hexdigest()}"
    steps: list[AnyRecord] = [StepState(0, 1, 0, 1, 4, preview=media)] * previews
    images = [ImageRecord(len(steps) + i, 1, i, media, 16, 16, 5) for i in range(number)]
    end = OutputEnd(len(steps) + number, 1, OutputSummary(units={"prompt_tokens": 6.0}))
    return [Finish(0, 1, Usage(0, 0), 0, [])], [*steps, *images, end]


class Case(Struct, kw_only=True):
    """A request, and the logs that answer it."""

    kind: str
    body: dict[str, Any]
    parts: int = 1
    output: str = ""
    logs: Logs = ()
    ordered: bool = True
    """Whether the events of several logs have one order."""


HI = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
SPOKEN = HI | {
    "model": "voice",
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy", "format": "pcm16"},
}
SOUND = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
STEADY = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
SAMPLING = {"seed": 7, "stop": ["x"], "temperature": 1.5, "top_p": 0.5, "user": "u"}
CONTENT = [{"type": "text", "text": "Hi"}, SOUND]

CANCELLED = Failure(1, 1, ErrorInfo("cancelled", "cancelled", None, "client", False), [])

CASES = {
    "chat": Case(kind="chat", body=HI, logs=[text_log()]),
    "chat with options": Case(
        kind="chat",
        body={
            "model": "demo",
            "messages": [{"role": "user", "content": CONTENT}],
            "logprobs": True,
            "top_logprobs": 1,
            "n": 2,
            "max_completion_tokens": 9,
            "guided_regex": "a+",
            "timeout_s": 9,
            "durable": True,
            **SAMPLING,
        },
        logs=[text_log(2)],
    ),
    "chat as a stream": Case(kind="chat", body=HI | USAGE | {"logprobs": True}, logs=[text_log()]),
    "chat with steady usage": Case(kind="chat", body=HI | STEADY, logs=[text_log()]),
    "chat with tools": Case(
        kind="chat",
        body=HI | {"tools": [TOOL], "parallel_tool_calls": False},
        logs=[text_log()],
    ),
    "chat with a required tool": Case(
        kind="chat", body=HI | {"tools": [TOOL], "tool_choice": "required"}, logs=[text_log()]
    ),
    "spoken chat": Case(
        kind="chat", body=SPOKEN, output="audio", logs=spoken_logs(text_log()[:-1])
    ),
    "spoken chat as a stream": Case(
        kind="chat",
        body=SPOKEN | USAGE,
        output="audio",
        logs=spoken_logs(text_log()[:-1]),
        ordered=False,
    ),
    "completion": Case(
        kind="completion", body={"model": "demo", "prompt": "Hi"}, logs=[text_log()]
    ),
    "completion with options": Case(
        kind="completion",
        body={
            "model": "demo",
            "prompt": ["Hi", "Ho"],
            "echo": True,
            "logprobs": 1,
            "n": 2,
            "max_tokens": 9,
            "structured_outputs": {"choice": ["a"]},
            **SAMPLING,
        },
        parts=2,
        logs=[text_log(2, prompt_logprobs=[TokenLogprobs(-1.0, 2, [6], [-0.5])] * 2)] * 2,
    ),
    "completion as a stream": Case(
        kind="completion",
        body={"model": "demo", "prompt": [[5, 6], [7]]} | USAGE,
        parts=2,
        logs=[text_log()] * 2,
        ordered=False,
    ),
    "completion with steady usage": Case(
        kind="completion", body={"model": "demo", "prompt": "Hi"} | STEADY, logs=[text_log()]
    ),
    "completion of its prompt": Case(
        kind="completion",
        body={"model": "demo", "prompt": [5, 6], "echo": True, "max_tokens": 0} | USAGE,
        logs=[text_log()],
    ),
    "demo": Case(kind="demo", body={"prompt": "Hi "}, logs=[text_log()]),
    "demo with options": Case(
        kind="demo",
        body={"model": "demo", "prompt": "Hi ", "n": 2, "max_tokens": 9, **SAMPLING},
        logs=[text_log(2)],
    ),
    "demo as a stream": Case(
        kind="demo", body={"prompt": "Hi ", "guided_regex": "a+"} | USAGE, logs=[text_log()]
    ),
    "embedding": Case(
        kind="embedding", body={"model": "demo", "input": "Hi"}, logs=[embedding_log(0.5, -1)]
    ),
    "embedding with options": Case(
        kind="embedding",
        body={
            "model": "demo",
            "input": ["Hi", "Ho"],
            "dimensions": 2,
            "encoding_format": "base64",
            "durable": True,
            "user": "u",
        },
        parts=2,
        logs=[embedding_log(0.5, -1), embedding_log(0.25, 2)],
    ),
    "embedding of tokens": Case(
        kind="embedding", body={"model": "demo", "input": [5, 6]}, logs=[embedding_log(0.5, -1)]
    ),
    "generate": Case(
        kind="generate",
        body={"token_ids": [5, 6, 7], "sampling_params": {}, "model": "demo"},
        logs=[text_log()],
    ),
    "generate with options": Case(
        kind="generate",
        body={
            "model": "demo",
            "token_ids": [5, 6, 7],
            "sampling_params": {"n": 2, "logprobs": 1, "prompt_logprobs": 1, "max_tokens": 9},
            "return_token_ids": True,
            "output_mode": "text",
            "cache_salt": "s",
        },
        logs=[text_log(2, prompt_logprobs=[TokenLogprobs(-1.0, 2, [6], [-0.5])] * 2)],
    ),
    "generate as a stream": Case(
        kind="generate",
        body={
            "model": "demo",
            "token_ids": [5, 6, 7],
            "sampling_params": {"logprobs": 0},
            "return_token_ids": True,
            **STEADY,
        },
        logs=[text_log()],
    ),
    "generate that is cancelled": Case(
        kind="generate",
        body={
            "model": "demo",
            "token_ids": [5, 6, 7],
            "sampling_params": {"n": 2},
            "output_mode": "text",
            **USAGE,
        },
        logs=[[text_log(2)[0], CANCELLED]],
    ),
    "images": Case(
        kind="images",
        body={"model": "painter", "prompt": "a star"},
        output="image",
        logs=painted_logs(),
    ),
    "images with options": Case(
        kind="images",
        body={
            "model": "painter",
            "prompt": "a star",
            "n": 2,
            "size": "12x8",
            "response_format": "url",
            "seed": 7,
            "num_inference_steps": 4,
            "guidance_scale": 2.0,
            "negative_prompt": "a moon",
            "durable": True,
        },
        output="image",
        logs=painted_logs(2),
    ),
    "images as a stream": Case(
        kind="images",
        body={"model": "painter", "prompt": "a star", "stream": True, "partial_images": 1},
        output="image",
        logs=painted_logs(previews=True),
    ),
    "rerank": Case(
        kind="rerank",
        body={"model": "demo", "query": "Hi", "documents": ["Ho", {"text": "Hi"}]},
        parts=2,
        logs=[embedding_log(1, 0), embedding_log(0.5, 0.5)],
    ),
    "rerank with options": Case(
        kind="rerank",
        body={
            "model": "demo",
            "query": "Hi",
            "documents": ["Ho", "Hey"],
            "top_n": 1,
            "return_documents": False,
            "durable": True,
        },
        parts=3,
        logs=[embedding_log(1, 0), embedding_log(0.5, 0.5), embedding_log(0, 1)],
    ),
    "score": Case(
        kind="score",
        body={"model": "demo", "text_1": "Hi", "text_2": "Ho"},
        parts=2,
        logs=[embedding_log(1, 0), embedding_log(0.5, 0.5)],
    ),
    "score with options": Case(
        kind="score",
        body={"model": "demo", "queries": ["Hi", "Ho"], "items": ["Hi", "Hey"], "durable": True},
        parts=3,
        logs=[embedding_log(1, 0), embedding_log(0.5, 0.5), embedding_log(0, 1)],
    ),
    "speech": Case(
        kind="speech",
        body={"model": "voice", "input": "One", "voice": "alloy"},
        output="audio",
        logs=spoken_logs(),
    ),
    "speech with options": Case(
        kind="speech",
        body={"model": "voice", "input": "One", "voice": "alloy", "response_format": "pcm"}
        | {"timeout_s": 9, "durable": True},
        output="audio",
        logs=spoken_logs(),
    ),
    "speech as a stream": Case(
        kind="speech",
        body={"model": "voice", "input": "One", "voice": "alloy", "stream_format": "sse"},
        output="audio",
        logs=spoken_logs(),
    ),
    "transcription": Case(
        kind="transcription", body={"model": "demo"}, parts=2, logs=[text_log()] * 2
    ),
    "transcription with options": Case(
        kind="transcription",
        body={
            "model": "demo",
            "language": "ja",
            "prompt": "Names: Jo",
            "response_format": "text",
            "temperature": 0.5,
            "durable": True,
        },
        parts=2,
        logs=[text_log()] * 2,
    ),
    "transcription as a stream": Case(
        kind="transcription",
        body={"model": "demo", "stream": True},
        parts=2,
        logs=[text_log()] * 2,
    ),
    "message": Case(
        kind="message",
        body=HI | {"max_tokens": 9, "tools": [{"name": "f", "input_schema": {}}], "system": "Ho"},
        logs=[text_log()],
    ),
    "message as a stream": Case(
        kind="message", body=HI | {"max_tokens": 9, "stream": True}, logs=[text_log()]
    ),
}

TOO_LARGE: dict[str, dict[str, Any]] = {
    "chat": HI | {"logprobs": True, "top_logprobs": 20},
    "completion": {"model": "demo", "prompt": [5] * 9000, "echo": True, "logprobs": 1}
    | {"max_tokens": 1},
    "embedding": {"model": "wide", "input": "Hi"},
    "generate": {
        "model": "demo",
        "token_ids": [5] * 9000,
        "sampling_params": {"prompt_logprobs": 1, "max_tokens": 1},
    },
    "rerank": {"model": "wide", "query": "Hi", "documents": ["Ho"]},
    "score": {"model": "wide", "queries": "Hi", "documents": "Ho"},
}
"""Requests for answers that take more memory than the limit, by kind."""

REFUSED: list[tuple[str, dict[str, Any]]] = [
    *((kind, {"model": "unknown"}) for kind in ("transcription", "demo", "generate")),
    ("chat", HI | {"model": "unknown"}),
    ("chat", HI | {"voice": "alloy"}),
    ("chat", SPOKEN | {"audio": {"voice": "nobody", "format": "pcm16"}}),
    ("chat", HI | {"guided_regex": "a", "guided_choice": ["b"]}),
    (
        "chat",
        HI | {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
    ),
    ("chat", HI | STEADY | {"model": "wide"}),
    ("completion", {"model": "demo", "prompt": []}),
    ("completion", {"model": "demo", "prompt": "Hi", "max_tokens": 0}),
    ("completion", {"model": "wide", "prompt": "Hi", "echo": True, "logprobs": 1}),
    ("completion", {"model": "wide", "prompt": [5], "echo": True}),
    ("completion", {"model": "wide", "prompt": "Hi"} | STEADY),
    ("demo", {"prompt": "Hi", "guided_regex": "a", "guided_choice": ["b"]}),
    ("embedding", {"model": "demo", "input": []}),
    ("generate", {"model": "demo", "token_ids": [], "sampling_params": {}}),
    ("generate", {"model": "demo", "token_ids": [300], "sampling_params": {}}),
    ("generate", {"model": "demo", "token_ids": [5], "sampling_params": {"max_tokens": 20_000}}),
    (
        "generate",
        {
            "model": "wide",
            "token_ids": [5],
            "sampling_params": {},
            "content_parts": [{"type": "image_url", "url": "data:,"}],
        },
    ),
    ("images", {"model": "demo", "prompt": "a star"}),
    ("images", {"model": "painter", "prompt": "a star", "size": "1x1"}),
    (
        "rerank",
        {"model": "demo", "query": "Hi", "documents": [*map(str, range(70))], "durable": True},
    ),
    ("score", {"model": "demo", "text_1": "Hi"}),
    ("score", {"model": "unknown", "text_1": "Hi"}),
    ("speech", {"model": "demo", "input": "One"}),
    ("speech", {"model": "voice", "input": "One", "voice": "nobody"}),
    ("transcription", {"model": "demo", "language": "xx"}),
    ("transcription", {"model": "wide", "prompt": "Jo"}),
]
"""Requests that are refused before they are published. Renderers refuse all calls for `wide`."""


class RecordedApp(AppContext):
    @property
    def now_s(self) -> int:
        return CREATED_S


async def start_renderer(bus: Bus) -> None:
    """Answer the calls to renderers of all models."""

    def detokenize(data: bytes) -> bytes:
        tokens = decode_detokenize_request(data).tokens
        return to_json(Detokenized("Hi", [b"t%d" % token for token in tokens]))

    for model in ("demo", "wide", "voice", "painter"):
        card = ModelCard(
            model, 20_000, 300, False, True, "hermes", hidden_size=10**5 if model == "wide" else 4
        )
        replies: dict[str, Callable[[bytes], bytes]] = {
            "card": lambda _, card=card: to_json(card),  # type: ignore[misc]
            "tokenize": lambda _: to_json(Tokenized(3, 20_000, [5, 6, 7])),
            "detokenize": detokenize,
            "split": lambda _: to_json(SoundPieces(PIECES)),
        }
        if model == "wide":
            fields = {
                "tokenize": "messages[0].content[1].audio_url.url",
                "detokenize": "tokens[3]",
                "split": "url",
                "features": "messages[0].content[0].image_url.url",
            }
            for call, field in fields.items():
                info = ErrorInfo("invalid_request", f"{field}: no", field, "client", False)
                replies[call] = lambda _, info=info: to_json(ErrorReply(info))  # type: ignore[misc]
        for call, reply in replies.items():
            await bus.add_responder(subjects.renderer(call, model), reply)


@pytest.fixture
async def http(bus: Bus) -> AsyncIterator[httpx.AsyncClient]:
    await start_renderer(bus)
    await client.pin_media(bus, PNG)
    config = parse_config(CONFIG, {}, "test")
    app = RecordedApp(bus, config, Metrics("gateway", "gateway-1"), "gateway-1", KINDS)
    transport = httpx.ASGITransport(build_application(app, all_routes(app)))
    accept = {"accept": "text/event-stream"}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", headers=accept, timeout=30
    ) as http:
        yield http
    await app.close()


async def put_logs(bus: Bus, case: Case, name: str, logs: Logs) -> None:
    ids = [f"{name}~{i}" for i in range(case.parts)] if case.parts > 1 else [name]
    outputs = [name] * bool(case.output)
    for i, (id, log) in enumerate(zip([*ids, *outputs], logs, strict=False)):
        subject = subjects.append(id, *[case.output] * (i == case.parts))
        for record in log:
            await bus.publish_without_id(subject, to_json(record))


async def send(http: httpx.AsyncClient, kind: str, body: dict[str, Any], name: str) -> Any:
    content: dict[str, Any] = {"json": body}
    if kind == "transcription":
        fields = {
            key: str(value).lower() if value is True else value for key, value in body.items()
        }
        content = {"data": fields, "files": {"file": ("a.wav", b"RIFF")}}
    return await http.post(ENDPOINTS[kind], headers={"x-request-id": name}, **content)


async def record_of(bus: Bus, request_id: str) -> str:
    """Return the stored record, without the names of connections."""
    stored = await bus.read_last(subjects.JOBS_STREAM, subjects.job(request_id))
    assert stored is not None
    return re.sub(r'"holders":\[[^]]*\]', '"holders":[]', stored.data.decode())


def answer_of(response: httpx.Response, case: Case) -> list[Any]:
    content = response.content
    if not case.ordered:
        events = re.sub(rb"(?m)^id: .*\n", b"", content).split(b"\n\n")
        content = b"\n\n".join(sorted(events))
    is_text = not content.startswith(b"RIFF") and b"\0" not in content
    body = content.decode() if is_text else base64.b64encode(content).decode()
    return [response.status_code, response.headers["content-type"], body]


def compare(file: str, now: Mapping[str, Any]) -> None:
    path = RECORDED / file
    if not path.exists():
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in now.items()]
        path.write_text("{" + ",\n".join(lines) + "}\n")
        pytest.fail(f"{file} is recorded")
    recorded = json.loads(path.read_text())
    assert list(now) == list(recorded)
    for name, value in now.items():
        assert value == recorded[name], name


async def test_answers_and_their_records_are_as_recorded(bus: Bus, http: httpx.AsyncClient) -> None:
    answers: dict[str, Any] = {}
    for name, case in CASES.items():
        key = name.replace(" ", "-")
        await put_logs(bus, case, key, case.logs)
        answer = answer_of(await send(http, case.kind, case.body, key), case)
        stored = await record_of(bus, key)
        status = await http.get(f"/v1/requests/{key}")
        result = status.json().get("result")
        answers[name] = {"record": stored, "answer": answer, "result": result}
    compare("answer_records.json", answers)


async def test_fields_and_refusals_are_as_recorded(bus: Bus, http: httpx.AsyncClient) -> None:
    errors: dict[str, Any] = {}
    for name, case in CASES.items():
        if case.body.get("stream") or case.body.get("stream_format"):
            continue
        for number, field in enumerate(FIELDS):
            key = f"{name.replace(' ', '-')}-{number}"
            info = ErrorInfo("invalid_request", f"{field}: no", field, "client", False)
            logs = [*case.logs[: case.parts - 1], [Failure(0, 1, info, [])]]
            await put_logs(bus, case, key, logs)
            response = await send(http, case.kind, case.body, key)
            error = response.json()["error"]
            errors[f"{name}: {field}"] = [error["param"], error["message"]]
    for kind, body in TOO_LARGE.items():
        response = await send(http, kind, body, "too-large")
        errors[f"too large: {kind}"] = [response.status_code, response.json()["error"]]
    for number, (kind, body) in enumerate(REFUSED):
        response = await send(http, kind, body, f"refused-{number}")
        errors[f"refused: {kind} {number}"] = [response.status_code, response.json()]
    compare("answer_refusals.json", errors)


def codes_of(error: type[PagemillError]) -> dict[str, type[PagemillError]]:
    """Return the error classes by their codes."""
    codes = {error.code: error}
    for other in error.__subclasses__():
        if other.__module__ in ("shared.errors", "workers.gateway.http.errors"):
            codes = codes_of(other) | codes
    return codes


def test_forms_of_errors_are_as_recorded() -> None:
    forms: dict[str, Any] = {}
    for code, error in sorted(codes_of(PagemillError).items()):
        info = ErrorInfo(
            code, "the message", "field", error.fault, error.retryable, error.retry_after_s
        )
        forms[code] = {
            "reply": to_json(ErrorReply(info)).decode(),
            "http": [errors.status_of(info), msgspec.to_builtins(errors.body_of(info))],
            "vllm": [vllm_errors.status_of(info), msgspec.to_builtins(vllm_errors.body_of(info))],
        }
    compare("error_forms.json", forms)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("hologram", {}), ("generate", {"wire_id": 5}), ("completion", {"n": "x"})],
)
async def test_a_record_of_a_newer_gateway_is_not_answered(
    bus: Bus, http: httpx.AsyncClient, kind: str, options: dict[str, Any]
) -> None:
    name = f"newer-{kind}"
    record = RequestRecord(kind, "demo", "", CREATED_S, True, options)
    await bus.append(subjects.job(name), to_json(record), 0)
    response = await send(http, "completion", {"model": "demo", "prompt": "Hi"}, name)
    assert response.status_code == 503
    assert response.json()["error"]["param"] == "X-Request-Id"
    assert (await http.get(f"/v1/requests/{name}")).status_code == 404
