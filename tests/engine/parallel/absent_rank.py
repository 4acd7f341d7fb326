"""A process that says that its part of a model is loaded, and does not meet rank 0."""

import sys

import msgspec

from workers.engine.parallel import messages

messages.receive(sys.stdin.buffer)
messages.send(sys.stdout.buffer, msgspec.msgpack.encode(messages.Loaded()))
sys.stdin.buffer.read()
