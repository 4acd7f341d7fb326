"""What the documentation says is what the code does."""

from ops import write_messages_doc, write_metrics_doc


def test_the_message_reference_is_up_to_date() -> None:
    written = write_messages_doc.FILE.read_text(encoding="utf-8")
    assert written == write_messages_doc.document(), "run `make docs`"


def test_the_metrics_reference_is_up_to_date() -> None:
    written = write_metrics_doc.FILE.read_text(encoding="utf-8")
    assert written == write_metrics_doc.document(), "run `make docs`"
