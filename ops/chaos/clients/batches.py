"""Clients of batches, which know OpenAI's Batch API and nothing else of the product."""

import asyncio
import itertools
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
from nats.aio.client import Client
from nats.errors import Error as NatsError

from ops.chaos.batch_files import BatchFolder, Part
from ops.chaos.batch_plan import SINGLE, Body, PlannedBatch, key_of, make_batches, make_bodies
from ops.chaos.broker_contents import queued_subjects
from ops.chaos.gateway_api import PATH, RETRY_PAUSE_S, authorization
from ops.chaos.history import BatchCancelSent, BatchCreated, BatchDrained, BatchEnded, Journal, now
from ops.chaos.plan import Batches, Settings

FILES, BATCHES = "/v1/files", "/v1/batches"
ENDED = ("completed", "failed", "expired", "cancelled")
POLL_S = 0.3
TIMEOUT = httpx.Timeout(30.0, connect=2.0)
# The broker or a gateway is down, or has no room. A file may be incomplete when a gateway dies.
TRANSIENT_STATUSES = (429, 503, 507)
FINAL_STATUSES = (200, 400)
MAX_BROKEN_DOWNLOADS = 8
SINGLES_AT_ONCE = 3
# Clients cancel a batch when this share of its lines has ended.
CANCEL_AFTER = 0.1
DRAIN_S = 30.0


class BatchClients:
    """One client for each batch of a run, and clients that send the bodies of its lines alone."""

    def __init__(
        self,
        gateways: list[str],
        settings: Settings,
        batches: Batches,
        folder: BatchFolder,
        journal: Journal,
    ) -> None:
        http = (httpx.AsyncClient(base_url=u, timeout=TIMEOUT, trust_env=False) for u in gateways)
        self._gateways = [*http]
        self._turns = itertools.cycle(self._gateways)
        self._settings = settings
        self._batches = batches
        self._folder = folder
        self._journal = journal

    async def close(self) -> None:
        for gateway in self._gateways:
            await gateway.aclose()

    async def run(self, nc: Client) -> None:
        """Run all clients. `nc` is a connection of the operator, which may look at the queues."""
        self._nc = nc
        short, long = make_bodies(self._settings, self._batches)
        bodies = iter([*long, *short])
        async with asyncio.TaskGroup() as group:
            for planned in make_batches(self._settings, self._batches):
                group.create_task(self._run_in_time(planned))
            for _ in range(SINGLES_AT_ONCE):
                group.create_task(self._send_singles(bodies))

    # -- batches ----------------------------------------------------------------------------

    async def _run_in_time(self, planned: PlannedBatch) -> None:
        try:
            async with asyncio.timeout(self._batches.patience_s):
                await self._run_batch(planned)
        except TimeoutError:
            return  # The checks report a batch that has not ended.

    async def _run_batch(self, planned: PlannedBatch) -> None:
        headers = authorization(planned.tenant)
        form = {"purpose": "batch"}
        content = {"file": ("lines.jsonl", planned.content)}
        upload = await self._call("POST", FILES, headers, files=content, data=form)
        order = {
            "input_file_id": upload.json()["id"],
            "endpoint": PATH,
            "completion_window": planned.window,
        }
        named = headers | {"idempotency-key": f"{self._settings.seed}-{planned.name}"}
        body = (await self._call("POST", BATCHES, named, json=order)).json()
        self._journal.write(BatchCreated(now(), planned.name))
        body = await self._follow(planned, body)
        self._journal.write(BatchEnded(now(), planned.name))
        if body["status"] == "cancelled":
            await self._await_empty_queues(planned, body["id"])
        files: dict[Part, str | None] = {
            "input": body["input_file_id"],
            "output": body.get("output_file_id"),
            "errors": body.get("error_file_id"),
        }
        for part, file_id in files.items():
            if file_id is not None:
                await self._download(planned, part, file_id)

    async def _follow(self, planned: PlannedBatch, body: dict[str, Any]) -> dict[str, Any]:
        """Poll a batch and read its results to its end, and return its last description."""
        headers, path = authorization(planned.tenant), f"{BATCHES}/{body['id']}"
        results, after = b"", "0"
        is_cancelled = planned.purpose != "cancel"
        while True:
            answer = await self._call("GET", path, headers)
            body = answer.json()
            self._folder.write_body(planned.name, answer.content)
            if not is_cancelled and _share_done(body) >= CANCEL_AFTER:
                await self._call("POST", f"{path}/cancel", headers)
                self._journal.write(BatchCancelSent(now(), planned.name))
                is_cancelled = True
            page = await self._call("GET", f"{path}/results?after={after}", headers)
            results, after = results + page.content, page.headers["x-next-after"]
            self._folder.write_part(planned.name, "results", results)
            if body["status"] in ENDED and not page.content:
                return body
            await asyncio.sleep(0 if page.content else POLL_S)

    async def _await_empty_queues(self, planned: PlannedBatch, batch_id: str) -> None:
        give_up = now() + DRAIN_S
        while now() < give_up:
            try:
                if not await queued_subjects(self._nc, batch_id):
                    self._journal.write(BatchDrained(now(), planned.name))
                    return
            except NatsError:
                pass  # The broker is down.
            await asyncio.sleep(POLL_S)

    async def _download(self, planned: PlannedBatch, part: Part, file_id: str) -> None:
        """Store a file, or as much of it as arrives in some attempts."""
        received = b""
        for _ in range(MAX_BROKEN_DOWNLOADS):
            content = b""
            gateway, headers = next(self._turns), authorization(planned.tenant)
            try:
                async with gateway.stream(
                    "GET", f"{FILES}/{file_id}/content", headers=headers
                ) as answer:
                    answer.raise_for_status()
                    async for piece in answer.aiter_raw():
                        content += piece
                        received = max(received, content, key=len)
            except (httpx.HTTPError, OSError):
                await asyncio.sleep(RETRY_PAUSE_S)
            else:
                received = content
                break
        self._folder.write_part(planned.name, part, received)

    # -- the same requests alone --------------------------------------------------------------

    async def _send_singles(self, bodies: Iterator[Body]) -> None:
        sent = self._folder.singles()
        headers = authorization(next(iter(self._settings.tenants), ""))
        for body in bodies:
            key, answer = key_of(body), None
            # A request whose gateway has died may count as cancelled, so each has another id.
            while key not in sent and (answer is None or answer.status_code not in FINAL_STATUSES):
                name = {"x-request-id": f"{SINGLE}{secrets.token_hex(8)}"}
                answer = await self._call("POST", PATH, headers | name, json=body)
            if answer is not None:
                self._folder.add_single(key, answer.status_code, answer.content)

    # -- HTTP ---------------------------------------------------------------------------------

    async def _call(
        self, method: str, path: str, headers: Mapping[str, str], **content: Any
    ) -> httpx.Response:
        """Send a request to one gateway after the other until one answers it."""
        while True:
            try:
                answer = await next(self._turns).request(
                    method, path, headers=dict(headers), **content
                )
            except (httpx.HTTPError, OSError):
                pass
            else:
                if answer.status_code not in TRANSIENT_STATUSES:
                    return answer
            await asyncio.sleep(RETRY_PAUSE_S)


def _share_done(body: Mapping[str, Any]) -> float:
    counts = body["request_counts"]
    return float(counts["completed"] + counts["failed"]) / (counts["total"] or 1)
