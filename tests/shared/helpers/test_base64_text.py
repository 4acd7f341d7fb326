"""Base64 with white space takes no more memory than its text."""

import tracemalloc

from shared.helpers.base64_text import decode_base64


def test_white_space_between_all_letters_needs_no_object_for_each() -> None:
    text = "QU \n\tJD" * 10_000
    tracemalloc.start()
    assert decode_base64(text) == b"ABC" * 10_000
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 5 * len(text)
