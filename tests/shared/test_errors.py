"""Errors about any client input fit into a record and reveal no internals."""

import inspect

import pytest

from shared import errors
from shared.errors import InvalidRequest, PagemillError, QuotaExceeded, TokenRateExceeded
from shared.protocol.encoding import to_json
from shared.protocol.records import error_info

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
    assert kind.fault == "server" or kind.retryable == (kind in (QuotaExceeded, TokenRateExceeded))


def test_codes_are_unique() -> None:
    codes = [kind.code for kind in LEAVES if not kind.__subclasses__()]
    # InvalidRequest covers all cases without a class of their own.
    assert len(codes) == len(set(codes))
