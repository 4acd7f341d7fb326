"""Structured outputs: grammars compiled by llguidance, and their masks over the model's tokens.

Grammars are compiled in separate threads, outside the step thread and the event loop, and equal
grammars only once. Tenants take turns at the compilation slots. A mask is a function of the grammar
and the tokens so far, so a resumed request continues with the mask that the previous engine had.
"""

import asyncio
import json
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from shared.errors import InvalidGrammar, WorkerFailure
from shared.helpers.closed_schemas import closed
from shared.helpers.lru import ByteLRU
from shared.protocol.multimodal import content_hash
from shared.protocol.sampling import StructuredOutputs
from shared.tenants.fair_turns import FairTurns
from workers.engine.sampling.grammar_sandbox import compile_grammar, error_of
from workers.engine.sampling.grammar_trial import FIELD, check_grammar

MAX_GRAMMARS = 64
MAX_REFUSAL_BYTES = 256 << 10
MAX_COMPILING = 2
MAX_COMPILING_BATCH, BATCH_NICENESS = 1, 15
"""Compilations for requests of the batch lane have separate slots: at this niceness they would
occupy the slots of interactive requests for a long time."""
PROGRESS_S = 0.5
# More than the stack of the sandbox process, so a grammar that passed there also passes here.
STACK_BYTES = 64 << 20
# White space between the parts of a JSON text: a space, or a new line with its indentation. If any
# amount were allowed, a model reluctant to write JSON could emit blanks until its token limit.
SPACING = r"( |\n[ \t]{0,16})?"


_Key = tuple[str, str, str]
"""Tenant, lane and definition of a compilation."""


class GrammarMask:
    """Token mask of one choice; implements `workers.engine.core.sequence.TokenMask`."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._words: NDArray[np.int32] | None = None

    def allowed(self) -> NDArray[np.int32]:
        """Return the bitmask of allowed tokens, [ceil(vocab_size / 32)] int32.

        Raises InvalidGrammar if the grammar reaches a limit in the middle of an output, and
        WorkerFailure if the tokens so far do not follow the grammar.
        """
        if self._words is None:
            self._words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
            if self._matcher.is_error():
                self._words = None
                raise self._error()
        return self._words

    def advance(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)
        self._words = None

    def _error(self) -> InvalidGrammar | WorkerFailure:
        if "doesn't satisfy the grammar" in self._matcher.get_error():
            return WorkerFailure("the output tokens so far do not follow the grammar")
        return _invalid_grammar(error_of(self._matcher))


class Grammar:
    """A compiled grammar. Its masks share the lexer states that they discover."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def new_mask(self) -> GrammarMask:
        """Return a mask for the start of an output."""
        return GrammarMask(self._matcher.deep_copy())


class GrammarCompiler:
    """Compiles and caches the grammars of one model. Belongs to one event loop."""

    def __init__(self, tokenizer: LLTokenizer, max_held: int) -> None:
        self._tokenizer = tokenizer
        self._max_held = max_held
        complaint = "grammars wait for this engine"
        self._slots = FairTurns(MAX_COMPILING, complaint)
        self._batch_slots = FairTurns(MAX_COMPILING_BATCH, complaint)
        self._waiting: Counter[_Key] = Counter()
        """Number of requests that wait for each of `_pending`."""
        self._pending: dict[_Key, asyncio.Task[Grammar]] = {}
        """Compilations by tenant, lane and definition. They are not shared between tenants or
        lanes, because another tenant's compilation may be at the end of a long queue."""
        self._compiled: OrderedDict[str, Grammar] = OrderedDict()
        """Grammars of all tenants by definition, least recently used first."""
        self._refused: ByteLRU[str, str] = ByteLRU(MAX_REFUSAL_BYTES)
        """Reasons of refusals by hash of the definition: a definition may have 128 KiB."""

    async def compile(
        self,
        outputs: StructuredOutputs,
        tenant: str,
        progress: Callable[[], Awaitable[None]],
        lane: str = "interactive",
    ) -> Grammar:
        """Return the compiled grammar. `progress` is called repeatedly while the caller waits.

        Raises InvalidGrammar, also if compiling takes too much CPU time or memory, GrammarNotTried
        if the machine is too busy to check it, Overloaded if too many grammars wait, and any
        exception of `progress`.
        """
        definition = to_llguidance(outputs)
        if (grammar := self._find(definition)) is not None:
            return grammar
        key = (tenant, lane, definition)
        task = self._pending.get(key)
        if task is None or task.cancelling():
            task = asyncio.create_task(self._compile(*key))
            self._pending[key] = task
            task.add_done_callback(lambda task: self._forget(key, task))
        self._waiting[key] += 1
        try:
            while not (await asyncio.wait([task], timeout=PROGRESS_S))[0]:
                await progress()
            return task.result()
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]
                # No caller waits any more. Cancelling frees the slot of the compilation.
                task.cancel()

    def _find(self, definition: str) -> Grammar | None:
        """Return the cached grammar, if there is one. Raises InvalidGrammar for a refused one."""
        if (reason := self._refused.get(content_hash(definition))) is not None:
            raise _invalid_grammar(reason)
        if (grammar := self._compiled.get(definition)) is not None:
            self._compiled.move_to_end(definition)
        return grammar

    def _forget(self, key: _Key, task: asyncio.Task[Grammar]) -> None:
        if self._pending.get(key) is task:
            del self._pending[key]
        if not task.cancelled():
            # Retrieved, because all callers may have left before they saw the error.
            task.exception()

    async def _compile(self, tenant: str, lane: str, definition: str) -> Grammar:
        is_batch = lane == "batch"
        slots = self._batch_slots if is_batch else self._slots
        niceness = BATCH_NICENESS if is_batch else 0
        async with slots.turn(tenant, self._max_held):
            # Another tenant may have had the same definition compiled meanwhile.
            if (cached := self._find(definition)) is not None:
                return cached
            is_wanted = partial(slots.is_wanted, tenant)
            reason = await check_grammar(definition, is_wanted, niceness)
            if not reason:
                matcher = await _run_in_thread(partial(self._warm, definition), niceness)
                reason = error_of(matcher)
        if reason:
            key = content_hash(definition)
            self._refused.put(key, reason, len(key) + len(reason.encode()))
            raise _invalid_grammar(reason)
        grammar = self._compiled[definition] = Grammar(matcher)
        if len(self._compiled) > MAX_GRAMMARS:
            self._compiled.popitem(last=False)
        return grammar

    def _warm(self, definition: str) -> LLMatcher:
        """Compile the grammar and compute its first mask, which takes the longest."""
        matcher = compile_grammar(self._tokenizer, definition)
        matcher.deep_copy().compute_bitmask()
        return matcher


def to_llguidance(outputs: StructuredOutputs) -> str:
    """Return the grammar in llguidance's own format, which is not validated here."""
    if outputs.regex is not None:
        return LLMatcher.grammar_from_regex(outputs.regex)
    if outputs.grammar is not None:
        return LLMatcher.grammar_from_lark(outputs.grammar)
    if outputs.choice is not None:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(_quote, outputs.choice)))
    schema = {"type": "object"} if outputs.json_object else closed(outputs.json_schema or {})
    text = msgspec.json.encode(schema).decode()
    # A default would override the schema's own setting of white space.
    has_own_options = "x-guidance" in schema
    return LLMatcher.grammar_from_json_schema(
        text, defaults=None if has_own_options else {"whitespace_pattern": SPACING}
    )


def _quote(text: str) -> str:
    """Return a Lark string literal, which is a JSON string without control characters."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def _invalid_grammar(reason: str) -> InvalidGrammar:
    return InvalidGrammar(f"this grammar cannot be used: {reason}", field=FIELD)


async def _run_in_thread(work: Callable[[], LLMatcher], niceness: int) -> LLMatcher:
    """Run `work` in a thread with a stack of `STACK_BYTES`, which thread pools do not offer.

    On Linux the niceness applies only to the thread.
    """
    done: Future[LLMatcher] = Future()
    done.set_running_or_notify_cancel()  # A caller that leaves does not stop the thread.

    def run() -> None:
        os.nice(niceness)
        try:
            done.set_result(work())
        except BaseException:  # A panic in Rust is not an Exception.
            done.set_exception(WorkerFailure("a grammar could not be compiled"))

    previous_size = threading.stack_size(STACK_BYTES)
    try:
        threading.Thread(target=run, name="grammar", daemon=True).start()
    finally:
        threading.stack_size(previous_size)
    return await asyncio.wrap_future(done)
