"""The process of a peer: loads it once, then runs what it is sent until its stdin ends."""

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
        """To where the first request meets nothing that is still to be loaded or compiled."""

    def prepare(self, requests: list[Request]) -> Any:
        """What `run` takes. This is off the clock: pictures are read from their files."""

    def run(self, work: Any, began_s: float) -> list[Answer]:
        """All at once, one answer for each in their order; `began_s` is of time.perf_counter."""

    def phases(self) -> dict[str, float]:
        """Of the last run, if its setup asked for them."""


def serve(peer: Peer) -> None:
    # Libraries print what they like to stdout; the benchmark's end of it is ours alone.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        peer.load(Setup(**json.loads(sys.stdin.readline())))
        _tell(out, {})
        for line in sys.stdin:
            _tell(out, _measure(peer, protocol.read_requests(line)))
    except Exception:
        _tell(out, Failed(traceback.format_exc()))


def _measure(peer: Peer, requests: list[Request]) -> Result:
    work = peer.prepare(requests)
    began_s = time.perf_counter()
    answers = peer.run(work, began_s)
    wall_s = time.perf_counter() - began_s
    for request, answer in zip(requests, answers, strict=True):
        if len(answer.token_ids) != request.max_tokens:
            raise ValueError(f"{len(answer.token_ids)} tokens instead of {request.max_tokens}")
    return Result(wall_s, answers, peer.phases())


def _tell(out: Any, value: Any) -> None:
    out.write(protocol.write(value))
    out.flush()
