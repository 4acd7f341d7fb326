"""Codes in the lines of error files."""

import pytest

from shared.batches.line_errors import UNKNOWN, error_code_of


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (
            b'{"response": null, "error": {"code": "batch_expired", "message": "m"}}',
            "batch_expired",
        ),
        (
            b'{"response": {"status_code": 400, "body": {"error": {"code": "invalid_request"}}},'
            b' "error": null}',
            "invalid_request",
        ),
        (b'{"response": {"status_code": 500, "body": {}}, "error": null}', UNKNOWN),
        (b'{"response": {"status_code": 500, "body": []}}', UNKNOWN),
        (b'{"response": {"status_code": 500, "body": {"error": {"code": ""}}}}', UNKNOWN),
        (b"{}", UNKNOWN),
        (b"", UNKNOWN),
    ],
)
def test_the_code_of_a_line(content: bytes, code: str) -> None:
    assert error_code_of(content) == code
