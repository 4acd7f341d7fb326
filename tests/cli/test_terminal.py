"""Signals of commands that run until they are stopped."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from workers.cli.terminal import call_on_signals


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


async def test_the_end_of_a_terminal_may_do_less_than_ctrl_c() -> None:
    interrupted, hung_up = asyncio.Event(), asyncio.Event()
    call_on_signals(interrupted.set, on_hangup=hung_up.set)
    os.kill(os.getpid(), signal.SIGHUP)
    await hung_up.wait()
    assert not interrupted.is_set()
    os.kill(os.getpid(), signal.SIGTERM)
    await interrupted.wait()


async def test_the_end_of_a_terminal_is_like_ctrl_c_by_default() -> None:
    stopped = asyncio.Event()
    call_on_signals(stopped.set)
    os.kill(os.getpid(), signal.SIGHUP)
    await stopped.wait()


async def test_under_nohup_the_end_of_the_terminal_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    call_on_signals(lambda: None)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
