"""A batch with the calls of LiteLLM: python litellm_batch.py URL FILE."""

import json
import sys
import time
from pathlib import Path

import litellm  # type: ignore[import-not-found]

URL, FILE = sys.argv[1], Path(sys.argv[2])
SERVER = {"custom_llm_provider": "openai", "api_base": URL, "api_key": "none"}
CHAT = "/v1/chat/completions"
NUM_LINES = 5


def main() -> None:
    with FILE.open("rb") as content:
        file = litellm.create_file(file=content, purpose="batch", **SERVER)
    order = {"completion_window": "24h", "endpoint": CHAT, "metadata": {"job": "1"}}
    batch = litellm.create_batch(input_file_id=file.id, **order, **SERVER)
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.1)
        batch = litellm.retrieve_batch(batch_id=batch.id, **SERVER)
    assert batch.status == "completed", batch
    assert batch.request_counts.completed == NUM_LINES, batch
    content = litellm.file_content(file_id=batch.output_file_id, **SERVER)
    answers = [json.loads(line) for line in content.text.splitlines()]
    assert {answer["custom_id"] for answer in answers} == {f"line-{n}" for n in range(NUM_LINES)}
    listed = litellm.list_batches(limit=1, **SERVER)
    assert [item.id for item in listed.data] == [batch.id], listed
    assert litellm.file_retrieve(file_id=file.id, **SERVER).id == file.id
    assert litellm.cancel_batch(batch_id=batch.id, **SERVER).status == "completed"
    assert litellm.file_delete(file_id=file.id, **SERVER).deleted


if __name__ == "__main__":
    main()
