"""The gateways of a run: where they are, their first requests, and their names of requests."""

import asyncio
import itertools
from collections.abc import Iterable, Mapping
from typing import TypeVar

import httpx

from ops.chaos.clients.http_clients import AGAIN_S
from ops.chaos.clients.http_exchange import PATH
from ops.chaos.history import now
from ops.chaos.plan import MODEL, Planned
from ops.chaos.processes.pool import Slot
from shared.bus.embedded_server import free_port
from workers.gateway.core.ids import named_request_id

NUM_WARM_UPS = 8
TIMEOUT_S = 30.0

T = TypeVar("T")


class Gateways:
    """Each has a port of its own, whichever process serves there."""

    def __init__(self, count: int) -> None:
        self._ports = [free_port() for _ in range(count)]
        self._num_asked = 0

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self._ports]

    @property
    def arguments(self) -> list[str]:
        """Of the clients' process."""
        return [word for url in self.urls for word in ("--gateway", url)]

    def with_port(self, slot: Slot, command: list[str]) -> list[str]:
        return [*command, "--port", str(self._ports[slot.number])]

    @property
    def warm_up_ids(self) -> set[str]:
        return {named_request_id("chat", "", f"warm-{n}") for n in range(self._num_asked)}

    async def warm_up(self) -> None:
        """What comes with the first requests belongs to a gateway from then on."""
        for url in self.urls:
            asked = range(self._num_asked, self._num_asked + NUM_WARM_UPS)
            self._num_asked += NUM_WARM_UPS
            await asyncio.gather(*(ask(url, f"warm-{n}") for n in asked))

    async def probe(self, name: str, patience_s: float) -> float:
        """Seconds until the first event of an answer, for a client who tries them in turn.

        Raises TimeoutError.
        """
        began = now()
        async with asyncio.timeout(TIMEOUT_S):
            for url in itertools.cycle(self.urls):
                try:
                    before = now() - began
                    return before + await ask(url, name, timeout_s=patience_s)
                except httpx.HTTPError:
                    await asyncio.sleep(AGAIN_S)
        raise AssertionError("a cycle has no end")


async def ask(url: str, name: str, max_tokens: int = 4, timeout_s: float = TIMEOUT_S) -> float:
    """Seconds until the first event of an answer, which is then read to its end.

    Raises httpx.HTTPError.
    """
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": name}],
        "max_tokens": max_tokens,
        "seed": 1,
        "stream": True,
    }
    began, first = now(), 0.0
    async with (
        httpx.AsyncClient(base_url=url, timeout=timeout_s, trust_env=False) as client,
        client.stream("POST", PATH, json=body, headers={"x-request-id": name}) as answer,
    ):
        answer.raise_for_status()
        async for _ in answer.aiter_raw():
            first = first or now() - began
    return first


def names_of(planned: Iterable[Planned], bus_ids: Iterable[str]) -> list[str]:
    """That the plan has for requests, where it knows them."""
    names = {one.bus_id: one.id for one in planned}
    return [names.get(id, id) for id in bus_ids]


def to_plan(planned: Iterable[Planned], by_bus_id: Mapping[str, T]) -> dict[str, T]:
    """By these names."""
    return dict(zip(names_of(planned, by_bus_id), by_bus_id.values(), strict=True))
