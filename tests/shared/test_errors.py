"""Errors about any client input fit into a record and reveal no internals."""

import inspect
import json
import secrets
from pathlib import Path

import msgspec
import pytest

from shared import client, errors
from shared.bus.bus import Bus
from shared.errors import (
    Fault,
    InvalidRequest,
    PagemillError,
    QuotaExceeded,
    RequestError,
    ServerError,
    TokenRateExceeded,
    TooManyBatches,
)
from shared.protocol.encoding import to_json
from shared.protocol.records import ErrorInfo, error_info, named_error
from shared.protocol.renderer_rpc import (
    DetokenizeRequest,
    ErrorReply,
    FeaturesRequest,
    TokenizeRequest,
)
from shared.protocol.requests import GenerateRequest
from shared.protocol.subjects import RENDERER_CALLS, renderer

RECORDED = Path(__file__).parents[1] / "recorded"

LEAVES = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, PagemillError)
]


def test_a_long_message_is_truncated() -> None:
    error = InvalidRequest("x" * 5_000_000, field="y" * 5_000_000)
    assert len(to_json(error_info(error))) < 2000


@pytest.mark.parametrize("kind", LEAVES)
def test_a_clients_fault_may_be_retried_only_where_time_mends_it(
    kind: type[PagemillError],
) -> None:
    mended_by_time = (QuotaExceeded, TokenRateExceeded, TooManyBatches)
    assert kind.fault == "server" or kind.retryable == (kind in mended_by_time)


def test_codes_are_unique() -> None:
    codes = [kind.code for kind in LEAVES if not kind.__subclasses__()]
    # InvalidRequest covers all cases without a separate class.
    assert len(codes) == len(set(codes))


REPLIES = [
    msgspec.convert(reply, ErrorReply)
    for reply in json.loads((RECORDED / "error_replies.json").read_text())
]


@pytest.mark.parametrize("reply", REPLIES, ids=lambda reply: reply.error.code)
def test_a_recorded_error_is_raised_as_the_class_of_its_code(reply: ErrorReply) -> None:
    error = named_error(reply.error)
    assert error_info(error) == reply.error
    assert type(error).code == reply.error.code
    assert error.reported


def test_all_codes_are_recorded() -> None:
    assert {reply.error.code for reply in REPLIES} == {kind.code for kind in LEAVES}


@pytest.mark.parametrize(("fault", "kind"), [("client", RequestError), ("server", ServerError)])
def test_an_unknown_code_is_raised_by_its_fault(fault: Fault, kind: type[PagemillError]) -> None:
    info = ErrorInfo("of_a_newer_version", "no", "messages", fault, fault == "server", 3.0)
    error = named_error(info)
    assert type(error) is kind
    assert error_info(error) == info


async def test_every_call_of_renderers_raises_the_error_of_the_reply(bus: Bus) -> None:
    model = f"m-{secrets.token_hex(4)}"
    info = error_info(TokenRateExceeded("too many tokens", 7.0))
    for name in RENDERER_CALLS:
        await bus.add_responder(renderer(name, model), lambda _: to_json(ErrorReply(info)))
    request = GenerateRequest(model, prompt="?")
    for call in (
        client.render(bus, request),
        client.render_features(bus, FeaturesRequest(request)),
        client.tokenize(bus, model, TokenizeRequest(prompt="?")),
        client.detokenize(bus, model, DetokenizeRequest([1])),
        client.split_sound(bus, model, "media:" + "0" * 64),
        client.model_card(bus, model),
    ):
        with pytest.raises(TokenRateExceeded) as raised:
            await call
        assert raised.value.reported
        assert error_info(raised.value) == info
