"""What a request wants its answer to be a text of, as masks over the model's tokens.

Compiling happens neither in the step thread nor in the event loop, and once for equal grammars. A
mask is a function of the grammar and of the tokens so far, so a resume finds the one that an engine
had before it died.
"""

import asyncio
import contextlib
import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from shared.errors import InvalidGrammar, WorkerFailure
from shared.protocol.sampling import StructuredOutputs
from workers.engine.sampling.grammar_sandbox import compile_grammar, reason_of, try_out

MAX_GRAMMARS = 64
MAX_COMPILING = 2
PROGRESS_S = 0.5
# More than the process has in which the grammar was tried, so what has passed there passes here.
STACK_BYTES = 64 << 20
# Between the parts of a JSON text: a space, or a new line and its indentation. With any number of
# them a model that does not want to write JSON goes on with blanks until it may write no more.
SPACING = r"( |\n[ \t]{0,16})?"
FIELD = "sampling_params.structured_outputs"


class GrammarMask:
    """Of one choice; see `workers.engine.core.sequence.TokenMask`."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._words: NDArray[np.int32] | None = None

    def allowed(self) -> NDArray[np.int32]:
        """Raises InvalidGrammar where a limit is reached in the middle of an answer, and
        WorkerFailure when the answer so far is none of the grammar's."""
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
            return WorkerFailure("the answer's tokens so far do not follow its grammar")
        return _refusal(reason_of(self._matcher))


class Grammar:
    """Compiled; what it learns of itself in use is shared by all masks."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def new_mask(self) -> GrammarMask:
        return GrammarMask(self._matcher.deep_copy())


class Grammars:
    """Of one model. Belongs to one event loop."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._slots = asyncio.Semaphore(MAX_COMPILING)
        self._waiting: Counter[str] = Counter()
        """How many requests wait for a definition."""
        self._compiled: OrderedDict[str, asyncio.Task[Grammar]] = OrderedDict()
        """By definition, those that were refused among them; the least recently used first."""

    async def compile(
        self, wanted: StructuredOutputs, progress: Callable[[], Awaitable[None]]
    ) -> Grammar:
        """`progress` is called again and again meanwhile; what it raises ends the waiting.

        Raises InvalidGrammar, also for what takes too much time or memory.
        """
        definition = define(wanted)
        task = self._compiled.get(definition)
        if task is None:
            task = asyncio.create_task(self._compile(definition))
            self._compiled[definition] = task
            task.add_done_callback(lambda task: self._forget_failed(definition, task))
            if len(self._compiled) > MAX_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(definition)
        self._waiting[definition] += 1
        try:
            while not (await asyncio.wait([task], timeout=PROGRESS_S))[0]:
                await progress()
            return task.result()
        finally:
            self._leave(definition, task)

    def _leave(self, definition: str, task: asyncio.Task[Grammar]) -> None:
        """What nobody waits for any more does not keep others waiting for a slot."""
        self._waiting[definition] -= 1
        if self._waiting[definition] > 0:
            return
        del self._waiting[definition]
        if not task.done():
            task.cancel()
            self._forget(definition, task)

    def _forget(self, definition: str, task: asyncio.Task[Grammar]) -> None:
        if self._compiled.get(definition) is task:
            del self._compiled[definition]

    def _forget_failed(self, definition: str, task: asyncio.Task[Grammar]) -> None:
        """But not what was refused."""
        if task.cancelled() or not isinstance(task.exception(), InvalidGrammar | None):
            self._forget(definition, task)

    async def _compile(self, definition: str) -> Grammar:
        async with self._slots:
            if reason := await try_out(definition):
                raise _refusal(reason)
            matcher = await _in_thread(lambda: self._warm(definition))
        if reason := reason_of(matcher):
            raise _refusal(reason)
        return Grammar(matcher)

    def _warm(self, definition: str) -> LLMatcher:
        """The first mask of all takes longest."""
        matcher = compile_grammar(self._tokenizer, definition)
        matcher.deep_copy().compute_bitmask()
        return matcher


def define(wanted: StructuredOutputs) -> str:
    """As llguidance has it. That does not tell whether it is valid."""
    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.grammar is not None:
        return LLMatcher.grammar_from_lark(wanted.grammar)
    if wanted.choice is not None:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(_quote, wanted.choice)))
    schema = {"type": "object"} if wanted.json_object else wanted.json_schema or {}
    text = msgspec.json.encode(schema).decode()
    # The default would win over what the schema itself says of white space.
    own = "x-guidance" in schema
    return LLMatcher.grammar_from_json_schema(
        text, defaults=None if own else {"whitespace_pattern": SPACING}
    )


def _quote(text: str) -> str:
    """A string of Lark is one of JSON without any control character."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def _refusal(reason: str) -> InvalidGrammar:
    return InvalidGrammar(f"the answer cannot be held to this grammar: {reason}", field=FIELD)


async def _in_thread(work: Callable[[], LLMatcher]) -> LLMatcher:
    """In a thread with a stack of `STACK_BYTES`, which no pool has."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(result: LLMatcher | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(WorkerFailure("a grammar could not be compiled"))
        else:
            done.set_result(result)

    def run() -> None:
        try:
            told: tuple[LLMatcher | None, BaseException | None] = (work(), None)
        except BaseException as error:  # a panic of Rust's is no Exception
            told = (None, error)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, *told)

    before = threading.stack_size(STACK_BYTES)
    try:
        threading.Thread(target=run, name="grammar", daemon=True).start()
    finally:
        threading.stack_size(before)
    matcher: LLMatcher = await done
    return matcher
