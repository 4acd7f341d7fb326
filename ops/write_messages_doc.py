"""Writes docs/reference/messages.md: every subject and message, an example and its JSON schema.

The schemas are msgspec's own, derived from the Structs; the examples are encoded by the very
encoders that the workers use. A test holds the file equal to what this prints.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from shared.protocol import messages, subjects
from shared.protocol.messages import (
    AttemptRecord,
    ChoiceDelta,
    DeadLetter,
    EngineTask,
    ErrorInfo,
    Failure,
    Finish,
    GenerateRequest,
    Heartbeat,
    ImagePart,
    ImageURL,
    MediaHead,
    MediaPin,
    Message,
    MetricSeries,
    PinnedPart,
    Prompt,
    RenderTask,
    RequestRecord,
    RequestTicket,
    StageSpan,
    TextPart,
    TokenChunk,
    TokenLogprobs,
    Usage,
    WorkerMetrics,
)
from shared.protocol.multimodal import MultiModalKwargsItem, PlaceholderRange
from shared.protocol.renderer_rpc import (
    Detokenized,
    DetokenizeRequest,
    ErrorReply,
    FeaturesRequest,
    ModelCard,
    RenderedFeature,
    RenderedFeatures,
    RenderedPrompt,
    Tokenized,
    TokenizeRequest,
)
from shared.protocol.sampling import SamplingParams

FILE = Path(__file__).parent.parent / "docs" / "reference" / "messages.md"

ID = "req-3f2a9c51d0b84e67"
CONVERSATION = [
    Message(
        "user",
        [
            ImagePart(ImageURL("data:image/png;base64,iVBORw0KGgo…")),
            TextPart("What color is this image? Answer in one word."),
        ],
    )
]
SAMPLING = SamplingParams(max_tokens=16, temperature=0.0)
ACCEPTED = RequestTicket(
    accepted_ms=1795238126999.0,
    deadline_ms=1795238726999.0,
    sequence=41,
    receipt="$JS.ACK.REQUESTS.coordinator.1.41.41.1795238126999000000.0",
)
PATH = [
    StageSpan("coordinator", "coordinator-1f0c22d4", 1, 1795238127000.0, 1795238127001.2),
    StageSpan("renderer", "renderer-77a01b9e", 1, 1795238127002.0, 1795238127019.5),
]
ITEM = MultiModalKwargsItem(
    "image",
    "9c0f6a51…",
    PlaceholderRange(3, 4),
    {"pixel_patches": 0, "pixel_table": 1, "image_grid_thw": 2},
)
ATTEMPT = AttemptRecord("engine", "engine-5b1e9f42", 1, 1795238127020.4, 0)
ENGINE_HOP = StageSpan("engine", "engine-c3d85a10", 1, 1795238127020.4, 1795238127101.7)

METRIC_LABELS = {"model": "demo", "role": "engine", "worker": "engine-c3d85a10"}

# Subject, direction, explanation, and a message; none for a subject whose messages are empty.
EXAMPLES: list[tuple[str, str, str, Any]] = [
    (
        subjects.request("<model>"),
        "client → coordinator, JSON or msgpack",
        "A request. Publish it to JetStream with its id as `Nats-Msg-Id` header: the publish"
        " acknowledgement means that it is on disk and will be answered by its deadline. The same"
        " id again is the same request: read its log. When the queue is full the publish is"
        " refused at once (error code 10077): try again a second later. Parameters left out take"
        " the model's configured defaults; unknown fields are refused. A gateway that knows whom a"
        f" request is for says so in the header `{messages.TENANT_HEADER}`: nothing that is cached"
        " for one tenant is found for another.",
        GenerateRequest("demo", CONVERSATION, SAMPLING),
    ),
    (
        subjects.stage("renderer", "<model>", "<lane>", "<request_id>"),
        "coordinator → renderer, msgpack (shown as JSON)",
        "A validated request with all sampling parameters resolved.",
        RenderTask(ID, "demo", "interactive", Prompt(CONVERSATION), SAMPLING, ACCEPTED, PATH[:1]),
    ),
    (
        subjects.stage("engine", "<model>", "<lane>", "<request_id>"),
        "renderer → engine, envelope (its head shown as JSON)",
        "Expanded token ids and one item for each picture. The tensors travel behind the head;"
        " `fields` gives their places in the envelope's tensor table.",
        EngineTask(
            ID,
            "demo",
            "interactive",
            [401, 17, 402, 405, 405, 405, 405, 403, 88, 12],
            [ITEM],
            SAMPLING,
            ACCEPTED,
            PATH,
        ),
    ),
    (
        subjects.tokens("<request_id>"),
        "token log → client, JSON",
        "New tokens. `index` counts the records of a log from 0 without a gap, `position` the"
        " tokens of a choice. Text that may yet turn out to be a stop string is held back."
        " `logprobs` has for each token its log probability, its rank, and the most probable tokens"
        " with theirs, here one as with `logprobs: 1`.",
        TokenChunk(
            0,
            1,
            [
                ChoiceDelta(
                    0,
                    0,
                    [93, 402],
                    "red",
                    "stop",
                    logprobs=[
                        TokenLogprobs(-0.105361, 1, [93], [-0.105361]),
                        TokenLogprobs(-1.203973, 2, [17], [-0.400478]),
                    ],
                )
            ],
        ),
    ),
    (
        subjects.tokens("<request_id>"),
        "token log → client, JSON",
        "The last record of a log that ended well.",
        Finish(1, 1, Usage(10, 2), 1, [*PATH, ENGINE_HOP]),
    ),
    (
        subjects.tokens("<request_id>"),
        "token log → client, JSON",
        "The last record of a log that did not. `fault` says whose it is; a `retryable` error may"
        " pass when the request is sent again under a new id.",
        Failure(
            0,
            1,
            ErrorInfo(
                "invalid_request",
                "sampling_params.temperature: Expected `float` >= 0.0",
                "sampling_params.temperature",
                "client",
                False,
            ),
            PATH[:1],
        ),
    ),
    (
        subjects.cancel("<request_id>"),
        "anyone → coordinator, empty",
        "End a request, wherever it is. Publish it to JetStream; the acknowledgement means that it"
        " cannot be lost. The log of the request then ends with the error `cancelled`, unless it"
        " has ended before.",
        None,
    ),
    (
        subjects.ended("<request_id>"),
        "coordinator → whoever has the request in hand, empty, core NATS",
        "A hint that the log has got its final record from a coordinator: drop the request.",
        None,
    ),
    (
        subjects.attempts("<request_id>"),
        "worker → anyone, JSON",
        "A worker has taken a request in hand. A second record with another `outcome` follows if it"
        " gives the request back or fails at it; one that ends well, or dies, leaves none.",
        ATTEMPT,
    ),
    (
        subjects.render("<model>"),
        "client → renderer → client: GenerateRequest in JSON or msgpack, answered with an envelope"
        " (its head shown as JSON)",
        "What an engine would be given, without asking one: a request on core NATS, answered by one"
        " of the renderers. The tensors that the items name are in the envelope. An answer that"
        " begins with `{` is a Refusal; one that does not fit into a message is refused with"
        " `payload_too_large`. Nothing is stored, and the caches of engine-bound work are neither"
        " used nor changed.",
        RenderedPrompt([401, 17, 402, 405, 405, 405, 405, 403, 88, 12], [ITEM]),
    ),
    (
        subjects.tokenize("<model>"),
        "client → renderer, JSON or msgpack",
        "How many tokens a prompt has. Either `messages`, as in a request, or a `prompt` that is"
        " taken as it is. A request on core NATS, like all that renderers answer at once; the"
        f" header `{messages.TENANT_HEADER}` says whose stored pictures it may name.",
        TokenizeRequest(prompt="What color is it?"),
    ),
    (
        "the answer to `pm.tokenize.<model>`",
        "renderer → client, JSON",
        "Pictures count with all the tokens that they fill. A prompt that is too long for the model"
        " is counted all the same.",
        Tokenized(5, 32_768, [88, 12, 31, 7, 64], ["What", "Ġcolor", "Ġis", "Ġit", "?"]),
    ),
    (
        subjects.detokenize("<model>"),
        "client → renderer, JSON or msgpack",
        "The text of tokens.",
        DetokenizeRequest([88, 12]),
    ),
    (
        "the answer to `pm.detokenize.<model>`",
        "renderer → client, JSON",
        "The text of all of them, and the bytes of each in base64: a character may lie in several.",
        Detokenized("What color", [b"What", b" color"]),
    ),
    (
        subjects.features("<model>"),
        "client → renderer, JSON or msgpack",
        "A request to be rendered for another server.",
        FeaturesRequest(GenerateRequest("demo", CONVERSATION)),
    ),
    (
        "the answer to `pm.features.<model>`",
        "renderer → client, msgpack (shown as JSON)",
        "Expanded token ids, and the pictures in the form in which vLLM's render and generate"
        " endpoints exchange them, before it is put into base64.",
        RenderedFeatures(
            [401, 17, 402, 405, 405, 405, 405, 403, 88, 12],
            [RenderedFeature("image", "26fb6b12…", PlaceholderRange(3, 4), b"\x82", b"\x81")],
        ),
    ),
    (
        "the answer to `pm.card.<model>`",
        "renderer → client, JSON",
        "What can be asked of a model. The question is empty.",
        ModelCard("demo", 32_768, 4096, True, True, "hermes"),
    ),
    (
        subjects.job("<request_id>"),
        "gateway → gateways, JSON",
        "What a gateway must know of a request, besides its log, to answer for it.",
        RequestRecord("chat", "demo", "", 1_795_238_127, False, {"include_usage": True}),
    ),
    (
        "the answer to any question to a renderer",
        "renderer → client, JSON",
        "A question that gets no other answer. With `overloaded`, ask again a little later.",
        ErrorReply(
            ErrorInfo(
                "media_not_found",
                "no picture of this name is stored here",
                "messages[0].content[0].image_url.url",
                "client",
                False,
            )
        ),
    ),
    (
        subjects.media("<sha256>"),
        "client or renderer → renderers, JSON",
        "A picture that is there. Publish its bytes to `pm.media.<sha256>.<number>`, from 0 on and"
        " in pieces well below 1 MB, and then this: from its acknowledgement on any request may"
        " name the picture by the URL `media:<sha256>`, the SHA-256 of its bytes in lower-case"
        " hexadecimal. It is kept for at least as long as the longest request may take, and each"
        " request that names it keeps it for that time again. Readers compute the hash anew; a"
        " name of which not everything is there gets the error `media_not_found`. What is for one"
        " tenant has the SHA-256 of `<tenant>:<sha256>` in its subjects instead; the URL stays, and"
        " others do not find it.",
        MediaHead(1_204_233, 3),
    ),
    (
        subjects.pin("<request_id>", 41),
        "renderer → renderer, msgpack (shown as JSON)",
        "What was fetched for a request from http and https URLs, in the order of its parts, by"
        " SHA-256 of URL and bytes. The number is that of the request in its queue. Written before"
        " the request is handed on, on the condition that there is none: later attempts see the"
        " same pictures.",
        MediaPin([PinnedPart("f1d2d2f9…", "9c0f6a51…")]),
    ),
    (
        subjects.dead("<role>", "<request_id>"),
        "worker → operator, msgpack (shown as JSON)",
        "A message that was given up: what it was, how often it was tried, and why it failed.",
        DeadLetter(
            role="engine",
            worker="engine-c3d85a10",
            version="0.1.0",
            subject=f"pm.stage.engine.demo.interactive.{ID}",
            request_id=ID,
            attempts=5,
            error=ErrorInfo("worker_failure", "a worker failed", None, "server", True),
            traceback="Traceback (most recent call last): …",
            history=[ATTEMPT],
            request=b'{"model":"demo","messages":[]}',
            input=b"PMM1",
            input_len=61_440,
            failed_ms=1795238187000.0,
        ),
    ),
    (
        "bucket `pm_workers`, key `<worker>`",
        "worker → anyone, JSON",
        "Proof of life, every second; it lapses a few seconds after the worker's death.",
        Heartbeat(
            "engine",
            "engine-c3d85a10",
            "0.1.0",
            4711,
            ["demo"],
            {
                "held": 3,
                "running": 3,
                "waiting": 0,
                "free_blocks": 2010,
                "blocks": 2048,
                "prefix_query_tokens": 4096,
                "prefix_hit_tokens": 1024,
                "prefix_evictions": 0,
                "preemptions": 0,
                "kv_waste": 0.018,
                "encoded_items": 2,
            },
            metrics=("127.0.0.1", 9401),
        ),
    ),
    (
        subjects.METRICS,
        "anyone → every worker → anyone: an empty request on core NATS, answered with JSON",
        "What a worker has counted since its start. One request, as many answers as there are"
        " workers. docs/metrics.md has the meaning of each name.",
        WorkerMetrics(
            "engine",
            "engine-c3d85a10",
            [
                MetricSeries("generation_tokens_total", METRIC_LABELS, 1200),
                MetricSeries(
                    "inter_token_latency_seconds", METRIC_LABELS, 7.4, [0.005, 0.01], [310, 880, 4]
                ),
            ],
        ),
    ),
]

INTRODUCTION = f"""\
# Subjects and messages

Written by `make docs` from the types in `shared/protocol/messages.py` and
`shared/protocol/renderer_rpc.py`; do not edit by hand.

| subject | stream | who writes | who reads |
|---|---|---|---|
| `pm.request.<model>` | {subjects.REQUESTS_STREAM}, work queue | clients | coordinators |
| `pm.cancel.<request_id>` | {subjects.CANCELS_STREAM}, work queue | anyone | coordinators |
| `pm.stage.<role>.<model>.<lane>.<request_id>` | {subjects.STAGES_STREAM}, work queue | \
the stage before | workers of the role |
| `pm.append.<request_id>` | {subjects.TOKENS_STREAM}, stored as `pm.tokens.<request_id>` | \
whoever holds or ends the request | nobody |
| `pm.tokens.<request_id>` | {subjects.TOKENS_STREAM} | the server, from `pm.append` | clients |
| `pm.ended.<request_id>` | none | coordinators | whoever has the request in hand |
| `pm.attempt.<request_id>` | {subjects.ATTEMPTS_STREAM}, in memory | workers | workers, operators |
| `pm.render.<model>`, `pm.features.<model>`, `pm.tokenize.<model>`, `pm.detokenize.<model>`, \
`pm.card.<model>` | none | clients, who get an answer | renderers |
| `pm.media.<sha256>`, `pm.media.<sha256>.<number>` | {subjects.MEDIA_STREAM} | \
clients, renderers | renderers |
| `pm.pin.<request_id>.<sequence>` | {subjects.MEDIA_STREAM} | renderers | renderers |
| `pm.item.<key>` | {subjects.MEDIA_STREAM} | renderers | renderers |
| `pm.kv.<engine>` | {subjects.KV_STREAM}, in memory | engines with `kv_events` | routers |
| `pm.job.<request_id>` | {subjects.JOBS_STREAM} | gateways | gateways |
| `pm.dead.<role>.<request_id>` | {subjects.DEAD_STREAM} | workers | operators |
| `pm.metrics` | none | anyone, who gets answers | every worker |
| `$KV.pm_workers.<worker>` | {subjects.WORKERS_STREAM}, a key-value bucket | workers | anyone |

A request stays in {subjects.REQUESTS_STREAM} until it has ended: a coordinator hands it on and puts
it off to its deadline, and whoever writes the final record of its log acknowledges it there. The
length of that queue is the number of requests in flight.

Names in subjects (models, request ids) are 1 to {subjects.MAX_NAME_LEN} letters, digits, `-` or
`_`; a request's id does not begin with `encode_`, as the tasks of encoders do. Lanes are
{" and ".join(f"`{lane}`" for lane in subjects.LANES)}.

A record of the token log is published to `pm.append.<request_id>` with the header
`Nats-Expected-Last-Subject-Sequence`, so that two workers can never both extend a log. The server
stores it as `pm.tokens.<request_id>` and republishes what it has stored there: a plain
subscription on `pm.tokens.<request_id>`, made before the request is published, sees every
accepted record live, and never one that was refused. Late readers find the log in the stream.

A message of `pm.kv.<engine>` (the engine's worker id) is the number of a payload, eight bytes with
the highest first, and the payload: MessagePack, as vLLM publishes KV events, `[seconds, [event, …],
data_parallel_rank]`. Events are maps: `BlockStored` with `block_hashes` (the last 64 bits of each),
`parent_block_hash`, `token_ids`, `block_size`, `lora_id`, `medium`, `lora_name`, `extra_keys`;
`BlockRemoved` with `block_hashes`, `medium`; and `AllBlocksCleared`, which an engine sends first.
The stream keeps the last {subjects.MAX_KV_BATCHES} of each engine: whoever comes late, or misses a
number, finds them there.

The engine's message is an *envelope*: `PMM1`, version, a msgpack head, and the tensors' bytes,
each at a multiple of 64 bytes; `shared/codec/envelope.py` has the layout.
"""


def document() -> str:
    parts = [INTRODUCTION]
    for subject, direction, text, example in EXAMPLES:
        kind = type(example)
        title = f"`{subject}`" if subject.startswith("pm.") else subject
        if example is None:
            parts.append(f"## {title}\n\n{direction}\n\n{text}\n")
            continue
        body = msgspec.json.format(messages.to_json(example), indent=2).decode()
        schema = json.dumps(msgspec.json.schema(kind), indent=2)
        parts.append(
            f"## {title}: {kind.__name__}\n\n{direction}\n\n{text}\n\n"
            f"```json\n{body}\n```\n\n"
            f"<details><summary>JSON schema</summary>\n\n```json\n{schema}\n```\n\n</details>\n"
        )
    return "\n".join(parts)


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(document(), encoding="utf-8")
