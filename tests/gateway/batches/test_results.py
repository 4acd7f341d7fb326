"""Results of lines, and the decision to try again."""

import json

import pytest

from shared.protocol.encoding import to_json
from shared.protocol.records import Usage
from workers.gateway.batches.results import MAX_FAULTS, Answer, Attempts, answered, refused


def error(code: str) -> bytes:
    return json.dumps({"error": {"code": code, "message": "m"}}).encode()


def test_an_answer_is_a_line_of_the_output_file() -> None:
    body = {"id": "x", "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}}
    body["usage"]["prompt_tokens_details"] = {"cached_tokens": 1}  # type: ignore[index]
    result = answered("batch_ab", 7, "mine", Answer(200, json.dumps(body).encode(), "r"))
    assert json.loads(result.content) == {
        "id": "batch_req_ab_7",
        "custom_id": "mine",
        "response": {"status_code": 200, "request_id": "r", "body": body},
        "error": None,
    }
    assert (result.line, result.code, result.usage) == (7, "", Usage(3, 2, 1))
    assert b"\n" not in result.content


def test_a_result_is_one_line_for_all_readers() -> None:
    text = "a\u2028b\u2029c\x85d\\e"
    body = to_json({"text": text})
    results = [
        answered("batch_ab", 7, text, Answer(200, body, "r")),
        refused("batch_ab", 7, text, "batch_expired", "late"),
    ]
    for result in results:
        (line,) = result.content.decode().splitlines()
        assert json.loads(line)["custom_id"] == text
    assert json.loads(results[0].content)["response"]["body"] == {"text": text}


def test_errors_are_lines_of_the_error_file() -> None:
    result = answered("batch_ab", 7, "mine", Answer(400, error("invalid_request"), "r"))
    line = json.loads(result.content)
    assert (line["response"]["status_code"], line["error"]) == (400, None)
    assert (result.code, result.usage) == ("invalid_request", Usage(0, 0))
    result = refused("batch_ab", 7, "mine", "batch_expired", "late")
    line = json.loads(result.content)
    assert line["response"] is None
    assert line["error"] == {"code": "batch_expired", "message": "late"}
    assert result.code == "batch_expired"


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (200, ""),
        (400, "invalid_request"),
        (404, "unknown_model"),
        (410, "log_truncated"),
        (413, "payload_too_large"),
        (422, "invalid_media"),
        (500, "internal_error"),
        (500, "poison"),
    ],
)
def test_other_answers_are_results(status: int, code: str) -> None:
    assert Attempts().delay_after(status, error(code)) is None


def test_a_busy_cluster_is_asked_for_as_long_as_the_batch_may_run() -> None:
    attempts = Attempts()
    delays = [attempts.delay_after(503, error("overloaded")) for _ in range(100)]
    assert None not in delays
    assert delays[:3] == [1.0, 2.0, 4.0]
    assert delays[-1] == 60.0
    # Each attempt is another request, because a request that has ended has its answer for good.
    assert attempts.number == 100
    assert attempts.delay_after(429, error("token_rate_exceeded"), jitter=1.0) == 30.0


def test_a_fault_is_the_result_after_some_attempts() -> None:
    attempts = Attempts()
    delays = [attempts.delay_after(500, error("worker_failure")) for _ in range(MAX_FAULTS)]
    assert [delay is None for delay in delays] == [False] * (MAX_FAULTS - 1) + [True]


@pytest.mark.parametrize(("status", "code"), [(503, "unavailable"), (507, "disk_full")])
def test_a_request_that_may_be_open_is_asked_for_again(status: int, code: str) -> None:
    attempts = Attempts()
    numbers = []
    for _ in range(4):
        attempts.delay_after(status, error(code))
        numbers.append(attempts.number)
    assert numbers == [0, 1, 1, 2]


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b'{"error": 1}', b'{"error": {"code": 1}}'])
def test_a_body_of_another_form_has_no_code(body: bytes) -> None:
    assert Attempts().delay_after(503, body) == 1.0
