"""Kinds of errors: the code of the endpoint's error, of the line's own error, or the status."""

import pytest

from shared.batches.error_kinds import kind_of


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b'{"response":null,"error":{"code":"batch_expired","message":""}}', "batch_expired"),
        (
            b'{"error":null,"response":{"status_code":400,"body":{"error":{"code":"invalid_media"}}}}',
            "invalid_media",
        ),
        (b'{"response":{"status_code":502,"body":{"error":{"code":null}}}}', "status 502"),
        (b'{"response":{"status_code":502,"body":"<html>"}}', "status 502"),
        (b'{"n":4}', "unknown"),
        (b"[]", "unknown"),
    ],
)
def test_a_kind_is_the_most_exact_code(line: bytes, kind: str) -> None:
    assert kind_of(line) == kind
