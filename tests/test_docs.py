"""What the documentation says is what the code does."""

from ops.write_messages_doc import FILE, document


def test_the_message_reference_is_up_to_date() -> None:
    assert FILE.read_text(encoding="utf-8") == document(), "run `make docs`"
