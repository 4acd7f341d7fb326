"""What the documentation says is what the code does."""

import re

from ops import write_api_doc, write_messages_doc, write_metrics_doc
from workers.gateway.http.errors import STATUSES
from workers.gateway.openapi.document import document


def test_the_message_reference_is_up_to_date() -> None:
    written = write_messages_doc.FILE.read_text(encoding="utf-8")
    assert written == write_messages_doc.document(), "run `make docs`"


def test_the_metrics_reference_is_up_to_date() -> None:
    written = write_metrics_doc.FILE.read_text(encoding="utf-8")
    assert written == write_metrics_doc.document(), "run `make docs`"


def test_the_api_reference_is_up_to_date() -> None:
    written = write_api_doc.FILE.read_text(encoding="utf-8")
    assert written == write_api_doc.rewritten(written), "run `make docs`"


def test_the_api_reference_has_the_fields_of_every_body() -> None:
    written = write_api_doc.FILE.read_text(encoding="utf-8")
    bodies = set(re.findall(r"`(\w+)`", write_api_doc.bodies()))
    assert "ChatRequest" in bodies
    assert bodies <= set(re.findall(r"<!-- fields (\w+) -->", written))


def test_the_api_reference_has_every_type_and_every_error() -> None:
    written = write_api_doc.FILE.read_text(encoding="utf-8")
    told = re.findall(r"^(?:<!-- fields (\w+) -->|`(\w+)`)$", written, re.MULTILINE)
    assert document()["components"]["schemas"].keys() == {"".join(pair) for pair in told}
    codes = set(re.findall(r"^\| \d+ \| `(\w+)` ", written, re.MULTILINE))
    assert STATUSES.keys() <= codes
