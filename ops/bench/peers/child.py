"""The process of a peer: loads the peer once, then runs requests until its stdin ends."""

import json
import os
import sys
import time
import traceback
from typing import Any, Protocol

from ops.bench.peers import protocol
from ops.bench.peers.protocol import Answer, Failed, Request, Result, Setup


class Peer(Protocol):
    def load(self, setup: Setup) -> None:
        """Load and compile everything that the first request needs."""

    def prepare(self, requests: list[Request]) -> Any:
        """Return the input of `run`; this is not timed, and reads images from their files."""

    def run(self, work: Any, began_s: float) -> list[Answer]:
        """Run all requests at once, and return their answers in order.

        `began_s` is a time of time.perf_counter.
        """

    def phases(self) -> dict[str, float]:
        """Return seconds by phase of the last run, if the setup requires them."""


def serve(peer: Peer) -> None:
    # Libraries may print to stdout, so the protocol uses a duplicate of it.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        peer.load(Setup(**json.loads(sys.stdin.readline())))
        _send(out, {})
        for line in sys.stdin:
            _send(out, _measure(peer, protocol.read_requests(line)))
    except Exception:
        _send(out, Failed(traceback.format_exc()))


def _measure(peer: Peer, requests: list[Request]) -> Result:
    work = peer.prepare(requests)
    began_s = time.perf_counter()
    answers = peer.run(work, began_s)
    wall_s = time.perf_counter() - began_s
    for request, answer in zip(requests, answers, strict=True):
        if len(answer.token_ids) != request.max_tokens:
            raise ValueError(f"{len(answer.token_ids)} tokens instead of {request.max_tokens}")
    return Result(wall_s, answers, peer.phases())


def _send(out: Any, value: Any) -> None:
    out.write(protocol.write(value))
    out.flush()
