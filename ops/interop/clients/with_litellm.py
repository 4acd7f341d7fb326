"""LiteLLM."""

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import litellm

from ops.interop.clients.common import CASES, call_tool, failure_of, report, write_object

DEMO: dict[str, Any] = {"model": "openai/demo"}
ASK: dict[str, Any] = DEMO | {"messages": CASES["messages"], "temperature": 0, "max_retries": 0}
LONG: dict[str, Any] = ASK | {"model": "openai/endless"}
SPEECH: dict[str, Any] = {"voice": "alloy", "input": CASES["text"], "response_format": "wav"}
SOUND: dict[str, Any] = {"model": "openai/hearing", "response_format": "json"}
SOUND["file"] = ("seven.flac", Path(CASES["recording"]).read_bytes())
FAULTS: Any = ({"model": "openai/other"}, {"temperature": 9})
SERVER: dict[str, Any] = {"custom_llm_provider": "openai"}
BATCH: dict[str, Any] = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
litellm.suppress_debug_info = True
create = litellm.completion


def text_of(**fields: Any) -> Any:
    return create(**ASK | fields).choices[0].message.content


def streamed_tools() -> Any:
    offer = [{"type": "function", "function": CASES["tool"]}]
    chunks = list(create(**ASK, tools=offer, tool_choice="required", stream=True))
    [call] = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    return json.loads(call.function.arguments)


def embeddings() -> Any:
    data = litellm.embedding(**DEMO, input=CASES["inputs"]).data
    return [len(data), data[-1]["embedding"]]


def responses() -> Any:
    fields: dict[str, Any] = DEMO | {"input": CASES["text"]}
    first = litellm.responses(**fields)
    events = litellm.responses(**fields, stream=True)
    second = litellm.responses(**fields, previous_response_id=first.id)
    streamed = "".join(getattr(event, "delta", "") for event in events)
    return [first.output_text, streamed, second.output_text]


def batch() -> Any:
    lines = ("lines.jsonl", CASES["lines"].encode())
    file = litellm.create_file(file=lines, purpose="batch", **SERVER)
    job = litellm.create_batch(input_file_id=file.id, **BATCH, **SERVER)
    while job.status not in ("completed", "failed"):
        time.sleep(0.1)
        job = litellm.retrieve_batch(batch_id=job.id, **SERVER)
    content = litellm.file_content(file_id=job.output_file_id, **SERVER)
    return content.text.count('"status_code":200')


def cancel() -> None:
    chunks = create(**LONG, stream=True, extra_headers=CASES["cancel"])
    next(iter(chunks))
    chunks.close()


report(
    chat=text_of,
    stream=lambda: "".join(c.choices[0].delta.content or "" for c in create(**ASK, stream=True)),
    tools=partial(call_tool, partial(create, **DEMO)),
    streamed_tools=streamed_tools,
    structured=partial(write_object, partial(create, **DEMO)),
    embeddings=embeddings,
    speech=lambda: len(litellm.speech(**DEMO, **SPEECH).content),
    transcription=lambda: litellm.transcription(**SOUND).text,
    image=lambda: litellm.image_generation(**DEMO, prompt=CASES["prompt"]).data[0].b64_json[:32],
    responses=responses,
    batch=batch,
    failures=lambda: [failure_of(text_of, **fault) for fault in FAULTS],
    timeout=lambda: failure_of(create, **LONG, timeout=0.5, extra_headers=CASES["timeout"]),
    cancel=cancel,
)
