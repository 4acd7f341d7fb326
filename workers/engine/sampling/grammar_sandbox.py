"""A grammar is compiled in a process of its own before the engine compiles it.

llguidance counts what it spends, but not all of it: rules that go some thousands deep overflow its
stack, and an intersection of twenty expressions takes seconds and gigabytes. Of that only a process
can be cured, and it had better not be the engine's. This file is what that process runs, and
nothing else of ours is imported in it: it is there in some 50 ms.
"""

import asyncio
import contextlib
import re
import resource
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_S = 5
MAX_MEMORY_BYTES = 1 << 30
NUM_TOKENS = 16
"""Some grammars show only when they are used that they are too much."""
BLANKS = sum(1 << byte for byte in b" \t\r\n")
"""JSON allows any number of them, and they lead nowhere."""
MAX_REASON_LEN = 300
TOO_COMPLEX = "it is too complex"

LIMITS = LLParserLimits(
    step_max_items=20_000,
    # What has been reached is kept as long as the grammar is, at 1 to 2 KiB.
    max_lexer_states=20_000,
    # What failed is told to clients: no dumps.
    verbose_errors=False,
)


def compile_grammar(tokenizer: LLTokenizer, definition: str) -> LLMatcher:
    """`definition` as `LLMatcher.grammar_from_*` make it. Never raises: see `reason_of`."""
    return LLMatcher(tokenizer, definition, log_level=0, limits=LIMITS)


def reason_of(matcher: LLMatcher) -> str:
    """What is wrong with the grammar, for its author; empty if nothing is."""
    if not matcher.is_error():
        return ""
    text = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
    return TOO_COMPLEX if "panic" in text else text[:MAX_REASON_LEN]


async def try_out(definition: str) -> str:
    """Why the grammar cannot be used; empty if it can."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", str(Path(__file__)), stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    try:
        async with asyncio.timeout(MAX_S):
            reason, _ = await process.communicate(definition.encode())
    except TimeoutError:
        return TOO_COMPLEX
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    return reason.decode() if process.returncode == 0 else TOO_COMPLEX


def main() -> None:
    # Also of use when the engine dies meanwhile.
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_S, MAX_S))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    # Its tokens are the bytes, so the vocabulary's size costs nothing here; a token that a grammar
    # names by its id is one like any other.
    definition = re.sub(r"<\[\d+\]>", "<[0]>", sys.stdin.buffer.read().decode())
    matcher = compile_grammar(LLTokenizer("byte"), definition)
    for _ in range(NUM_TOKENS):
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_stopped() or not allowed:
            break
        chosen = allowed & ~BLANKS or allowed
        matcher.consume_token((chosen & -chosen).bit_length() - 1)
    sys.stdout.write(reason_of(matcher))


if __name__ == "__main__":
    main()
