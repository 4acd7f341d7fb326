"""What messages tell of a broker's URL."""

import pytest

from shared.bus.connection import without_credentials


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://a:4222", "nats://a:4222"),
        ("nats://me:secret@a:4222", "nats://a:4222"),
        ("nats://token@a", "nats://a"),
        ("nats://me:sec@ret@a:4222", "nats://a:4222"),
        ("me:secret@a:4222", "a:4222"),
        ("nats://me:one@a:4222, me:two@b:4222", "nats://a:4222,b:4222"),
    ],
)
def test_no_credentials_are_shown(url: str, shown: str) -> None:
    assert without_credentials(url) == shown
