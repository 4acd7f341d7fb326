"""The `openai` package of Python."""

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import openai

from ops.interop.clients.common import CASES, call_tool, failure_of, report, write_object

DEMO: dict[str, Any] = {"model": "demo"}
ASK: dict[str, Any] = DEMO | {"messages": CASES["messages"], "temperature": 0}
LONG: dict[str, Any] = ASK | {"model": "endless"}
SPEECH: dict[str, Any] = {"voice": "alloy", "input": CASES["text"], "response_format": "wav"}
SOUND: dict[str, Any] = {"model": "hearing", "file": Path(CASES["recording"])}
BATCH: dict[str, Any] = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
client: Any = openai.OpenAI(max_retries=0)
create = client.chat.completions.create


def text_of(**fields: Any) -> Any:
    return create(**ASK | fields).choices[0].message.content


def streamed_tools() -> Any:
    offer: Any = [{"type": "function", "function": CASES["tool"]}]
    fields: Any = ASK | {"tools": offer, "tool_choice": "required"}
    with client.chat.completions.stream(**fields) as events:
        message = events.get_final_completion().choices[0].message
    return json.loads(message.tool_calls[0].function.arguments)


def embeddings() -> Any:
    data = client.embeddings.create(**DEMO, input=CASES["inputs"]).data
    return [len(data), data[-1].embedding]


def responses() -> Any:
    fields: dict[str, Any] = DEMO | {"input": CASES["text"]}
    first = client.responses.create(**fields)
    with client.responses.stream(**fields) as events:
        streamed = events.get_final_response().output_text
    second = client.responses.create(**fields, previous_response_id=first.id)
    return [first.output_text, streamed, second.output_text]


def batch() -> Any:
    file = client.files.create(file=CASES["lines"].encode(), purpose="batch")
    job = client.batches.create(input_file_id=file.id, **BATCH)
    while job.status not in ("completed", "failed"):
        time.sleep(0.1)
        job = client.batches.retrieve(job.id)
    return client.files.content(job.output_file_id).text.count('"status_code":200')


def cancel() -> None:
    with create(**LONG, stream=True, extra_headers=CASES["cancel"]) as chunks:
        next(iter(chunks))


report(
    chat=text_of,
    stream=lambda: "".join(c.choices[0].delta.content or "" for c in create(**ASK, stream=True)),
    tools=partial(call_tool, partial(create, **DEMO)),
    streamed_tools=streamed_tools,
    structured=partial(write_object, partial(create, **DEMO)),
    embeddings=embeddings,
    speech=lambda: len(client.audio.speech.create(**DEMO, **SPEECH).content),
    transcription=lambda: client.audio.transcriptions.create(**SOUND).text,
    image=lambda: client.images.generate(**DEMO, prompt=CASES["prompt"]).data[0].b64_json[:32],
    responses=responses,
    batch=batch,
    failures=lambda: [failure_of(text_of, model="other"), failure_of(text_of, temperature=9)],
    timeout=lambda: failure_of(create, **LONG, timeout=0.5, extra_headers=CASES["timeout"]),
    cancel=cancel,
)
