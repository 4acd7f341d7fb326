"""Sandbox process that compiles a grammar before the engine compiles it.

llguidance limits its own resources, but not all of them: rules nested thousands of levels deep
overflow its stack, and an intersection of twenty expressions takes seconds and gigabytes. Only a
separate process contains such failures. `workers.engine.sampling.grammar_trial` starts a fork
server, which imports little besides llguidance, and has it fork a process for each grammar.
"""

import os
import re
import socket

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from shared.helpers import sandbox
from shared.helpers.forking import ForkServer
from workers.engine.sampling.grammar_errors import reason_of

MAX_MEMORY_BYTES = 1 << 30
NUM_TOKENS = 16
"""Tokens generated in the trial: some grammars exceed the limits only when tokens are generated."""
BLANKS = sum(1 << byte for byte in b" \t\r\n")
"""Bitmask of white space, which JSON allows in any amount and which makes no progress."""
BEGUN = b"begun\n"
"""Line written before the grammar is compiled: an end before it is not the grammar's fault."""

LIMITS = LLParserLimits(
    step_max_items=20_000,
    # Each state takes 1 to 2 KiB for as long as the grammar is cached.
    max_lexer_states=20_000,
    # Errors are returned to clients and must not contain dumps of the parser.
    verbose_errors=False,
)


def compile_grammar(tokenizer: LLTokenizer, definition: str) -> LLMatcher:
    """Compile a definition made by `LLMatcher.grammar_from_*`. Never raises; see `error_of`."""
    return LLMatcher(tokenizer, definition, log_level=0, limits=LIMITS)


def error_of(matcher: LLMatcher) -> str:
    """Return the error in the grammar, worded for its author; empty if there is none."""
    return reason_of(matcher.get_error()) if matcher.is_error() else ""


def main(descriptor: int) -> None:
    """Fork a sandbox for each message on a socket, until it is closed."""
    with socket.socket(fileno=descriptor) as channel:
        server = ForkServer(channel, 1, _try)
        sandbox.isolate()
        server.serve()


def _try(message: bytes, descriptors: list[int]) -> None:
    """Compile the definition read from a socket, try it, and write the error to the socket.

    The message has the limit on CPU seconds and the niceness. This process ends here.
    """
    os.dup2(1, 2)  # A panic would be logged with a part of the grammar.
    max_cpu_s, niceness = map(int, message.split())
    channel = socket.socket(fileno=descriptors[0])
    sandbox.confine(max_cpu_s, MAX_MEMORY_BYTES, niceness)
    # The tokens are single bytes, so the trial does not depend on the size of the vocabulary. Any
    # token can stand for one that the grammar names by its id.
    with channel.makefile("rb") as file:
        definition = re.sub(r"<\[\d+\]>", "<[0]>", file.read().decode())
    tokenizer = LLTokenizer("byte")
    channel.sendall(BEGUN)
    matcher = compile_grammar(tokenizer, definition)
    for _ in range(NUM_TOKENS):
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_stopped() or not allowed:
            break
        chosen = allowed & ~BLANKS or allowed
        matcher.consume_token((chosen & -chosen).bit_length() - 1)
    channel.sendall(error_of(matcher).encode())
    os._exit(0)
