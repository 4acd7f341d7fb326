"""Commands about one request: `pagemill ask`, `follow`, `cancel` and `where`."""

import asyncio
from typing import Annotated

from cyclopts import Parameter

from shared import client
from shared.state import request_status
from shared.state.request_status import RequestStatus
from workers.cli.ask import EXIT_INTERRUPTED, build_request, print_records
from workers.cli.options import ConfigFile, Images, ModelName, NatsUrl, find_url, find_url_and_model
from workers.cli.terminal import connected, errors, format_time, print_json, print_line, print_rows


async def ask(
    question: str,
    /,
    *,
    image: Images = None,
    model: ModelName = None,
    adapter: str | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    timeout_s: Annotated[float | None, Parameter(name="--timeout")] = None,
    json: bool = False,
    durable: bool = False,
    request_id: str | None = None,
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Ask a running Pagemill, and stream the answer to the terminal. Ctrl-C cancels the request.

    Parameters
    ----------
    question
        The text of the question.
    adapter
        One of the model's LoRA adapters; by default none.
    max_tokens
        Maximum number of tokens in the answer.
    temperature
        0 is greedy; by default as configured for the model.
    seed
        Makes a sampled answer repeatable.
    timeout_s
        Seconds from acceptance to the end of the answer; by default as configured.
    json
        Print the records of the token log, one JSON object a line.
    durable
        Ctrl-C ends only this command; the request continues.
    request_id
        Id of the request; with the id of an earlier request, the command prints its answer.
    """
    url, model = find_url_and_model(config, nats, model)
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    request = build_request(model, question, image or [], sampling, timeout_s, adapter)
    request_id = request_id or client.new_request_id()
    async with connected(url, "ask") as bus:
        try:
            return await print_records(client.ask(bus, request, request_id), as_json=json)
        except asyncio.CancelledError:
            if not durable:
                await client.cancel(bus, request_id)
                errors.print("\ncancelled")
            else:
                errors.print(f"\nthe request continues: pagemill follow {request_id}")
            return EXIT_INTERRUPTED


async def follow(
    request_id: str,
    /,
    *,
    start: Annotated[int, Parameter(name=["--from"])] = 0,
    json: bool = False,
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Print the answer of an earlier request; wait for the part that is still to come.

    Parameters
    ----------
    start
        Index of the first record to print.
    json
        Print the records of the token log, one JSON object a line.
    """
    async with connected(find_url(config, nats), "follow") as bus:
        try:
            return await print_records(client.follow(bus, request_id, start), as_json=json)
        except asyncio.CancelledError:
            return EXIT_INTERRUPTED


async def cancel(request_id: str, /, *, config: ConfigFile = None, nats: NatsUrl = None) -> int:
    """Cancel a request in any stage; its answer ends with the error `cancelled`."""
    async with connected(find_url(config, nats), "cancel") as bus:
        await client.cancel(bus, request_id)
    return 0


async def where(
    request_id: str, /, *, json: bool = False, config: ConfigFile = None, nats: NatsUrl = None
) -> int:
    """Print the status of a request: stage, worker, attempt, waiting time, and its cause."""
    async with connected(find_url(config, nats), "where") as bus:
        found = await request_status.find(bus, request_id)
    print_json(found) if json else _print_status(found)
    return 0 if found.state != "unknown" else 1


def _print_status(found: RequestStatus) -> None:
    rows = {
        "state": found.state.replace("_", " "),
        "stage": found.stage,
        "worker": found.worker,
        "attempt": found.attempt,
        "waiting": None if found.waits_s is None else f"{found.waits_s:.1f} s in this stage",
        "records": found.records,
        "why": found.why,
    }
    print_rows(rows)
    for attempt in found.attempts:
        print_line(
            f"         {format_time(attempt.began_ms)} {attempt.worker} delivery {attempt.number}"
            f" {attempt.outcome.replace('_', ' ')}"
        )
