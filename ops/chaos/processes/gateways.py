"""The gateways of a run: their ports, their warm-up requests, and probes."""

import asyncio
import itertools
import json
from functools import partial
from typing import Any

import httpx

from ops.chaos.gateway_api import PATH, RETRY_PAUSE_S, authorization
from ops.chaos.history import now
from ops.chaos.plan import MODEL
from ops.chaos.processes.pool import Slot
from shared.bus.embedded_server import free_port
from shared.protocol.names import scoped_id

NUM_WARM_UPS = 8
TIMEOUT_S = 30.0


class Gateways:
    """Ports of the gateways; a restarted gateway keeps its predecessor's port."""

    def __init__(self, count: int, tenant: str = "") -> None:
        """Warm-up requests and probes have the key of `tenant`, if any."""
        self._tenant = tenant
        self._ports = [free_port() for _ in range(count)]
        self.warm_up_ids: set[str] = set()

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self._ports]

    @property
    def arguments(self) -> list[str]:
        """Command line arguments for the clients' process."""
        return [word for url in self.urls for word in ("--gateway", url)]

    def with_port(self, slot: Slot, command: list[str]) -> list[str]:
        return [*command, "--port", str(self._ports[slot.number])]

    async def warm_up(self, num_batches: int = 0) -> None:
        """Send the first requests, after which the resources of a gateway are constant.

        So are the resources of a batcher after its first batch.
        """
        if num_batches:
            await asyncio.gather(*(self._run_batch(number) for number in range(num_batches)))
        for url in self.urls:
            names = [f"warm-{len(self.warm_up_ids) + n}" for n in range(NUM_WARM_UPS)]
            self.warm_up_ids |= {scoped_id(name, self._tenant) for name in names}
            first = partial(time_to_first_event, url, tenant=self._tenant)
            await asyncio.gather(*map(first, names))

    async def _run_batch(self, number: int) -> None:
        line = {"custom_id": "a", "method": "POST", "url": PATH, "body": _body(f"batch {number}")}
        files = {"file": ("a.jsonl", json.dumps(line).encode())}
        headers, form = authorization(self._tenant), {"purpose": "batch"}
        async with httpx.AsyncClient(
            base_url=self.urls[0], timeout=TIMEOUT_S, trust_env=False, headers=headers
        ) as client:
            file = (await client.post("/v1/files", files=files, data=form)).raise_for_status()
            order = {"input_file_id": file.json()["id"], "endpoint": PATH}
            order["completion_window"] = "1h"
            batch = (await client.post("/v1/batches", json=order)).raise_for_status().json()
            while batch["status"] in ("validating", "in_progress"):
                await asyncio.sleep(RETRY_PAUSE_S)
                batch = (await client.get(f"/v1/batches/{batch['id']}")).raise_for_status().json()

    async def probe(self, name: str, patience_s: float) -> float:
        """Return the seconds until the first event of an answer, trying the gateways in turn.

        Raises TimeoutError.
        """
        began = now()
        async with asyncio.timeout(TIMEOUT_S):
            for url in itertools.cycle(self.urls):
                try:
                    before = now() - began
                    return before + await time_to_first_event(
                        url, name, timeout_s=patience_s, tenant=self._tenant
                    )
                except httpx.HTTPError:
                    await asyncio.sleep(RETRY_PAUSE_S)
        raise AssertionError("a cycle has no end")


async def time_to_first_event(
    url: str, name: str, max_tokens: int = 4, timeout_s: float = TIMEOUT_S, tenant: str = ""
) -> float:
    """Return the seconds until the first event of an answer, and read it to its end.

    Raises httpx.HTTPError.
    """
    body = _body(name, max_tokens) | {"stream": True}
    headers = {"x-request-id": name} | authorization(tenant)
    began, first = now(), 0.0
    async with (
        httpx.AsyncClient(base_url=url, timeout=timeout_s, trust_env=False) as client,
        client.stream("POST", PATH, json=body, headers=headers) as answer,
    ):
        answer.raise_for_status()
        async for _ in answer.aiter_raw():
            first = first or now() - began
    return first


def _body(content: str, max_tokens: int = 4) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "seed": 1}
