"""Commands about one request: `pagemill ask`, `follow`, `cancel` and `where`."""

from typing import Annotated

import uvloop
from cyclopts import Parameter

from shared.client import new_request_id
from workers.cli import operate
from workers.cli.ask import ask_and_print, build_request, follow_and_print
from workers.cli.options import (
    ConfigFile,
    Images,
    ModelName,
    NatsUrl,
    find_url,
    find_url_and_model,
)


def ask(
    question: str,
    /,
    *,
    image: Images = None,
    model: ModelName = None,
    adapter: str | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    timeout: float | None = None,
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
    timeout
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
    request = build_request(model, question, image or [], sampling, timeout, adapter)
    request_id = request_id or new_request_id()
    return uvloop.run(ask_and_print(request, request_id, url, as_json=json, durable=durable))


def follow(
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
    url = find_url(config, nats)
    return uvloop.run(follow_and_print(request_id, start, url, as_json=json))


def cancel(request_id: str, /, *, config: ConfigFile = None, nats: NatsUrl = None) -> int:
    """Cancel a request in any stage; its answer ends with the error `cancelled`."""
    return uvloop.run(operate.cancel_request(request_id, find_url(config, nats)))


def where(
    request_id: str, /, *, json: bool = False, config: ConfigFile = None, nats: NatsUrl = None
) -> int:
    """Print the status of a request: stage, worker, attempt, waiting time, and its cause."""
    return uvloop.run(operate.print_where(request_id, find_url(config, nats), as_json=json))
