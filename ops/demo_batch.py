"""The batch of the demo: questions about images as one job, with one result for each."""

import json
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shared.bus.bus import Bus
from shared.config.schema import Config
from workers.cli import batches
from workers.cli.ask import data_url
from workers.cli.batch_lines import CHAT


class BatchAnswers(NamedTuple):
    status: str
    texts: dict[int, str]
    """By the number of the question."""
    took_s: float


def write_questions(file: Path, questions: Sequence[tuple[str, Path]]) -> None:
    """Write the input of a batch that asks each question about its image."""
    lines = [_line(number, *question) for number, question in enumerate(questions)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


async def run_batch(bus: Bus, config: Config, file: Path) -> BatchAnswers:
    """Run the batch of a file from `write_questions`, and return its answers."""
    began_s = time.perf_counter()
    batch_id = f"batch_{secrets.token_hex(16)}"
    batch = await batches.begin(bus, batch_id, file, CHAT, "1h", "", config)
    texts: dict[int, str] = {}
    async for latest, records in batches.follow(bus, batch):
        batch = latest
        for result in (json.loads(bytes(line)) for record in records for line in record.output):
            choice = result["response"]["body"]["choices"][0]
            texts[int(result["custom_id"])] = choice["message"]["content"]
    return BatchAnswers(batch.status, texts, time.perf_counter() - began_s)


def _line(number: int, question: str, image: Path) -> dict[str, Any]:
    content = [
        {"type": "image_url", "image_url": {"url": data_url(image)}},
        {"type": "text", "text": question},
    ]
    body = {"model": "demo", "messages": [{"role": "user", "content": content}]}
    return {"custom_id": str(number), "method": "POST", "url": CHAT, "body": body}
