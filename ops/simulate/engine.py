"""One simulated engine: continuous batching, chunked prefill, a prefix cache with LRU, a KV limit.

An engine knows neither the clock's events nor other engines. `plan` returns when its next step
ends, `settle` ends it. Decode steps between two changes of a batch are one leap, so a run costs
what its requests cost and not what their tokens cost.
"""

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from shared.bus.priorities import load_of

Key = tuple[int, ...]
"""Name of a beginning that can be cached."""
Link = tuple[Key, int]
"""A beginning, and the number of tokens up to its end."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Times and limits of an engine; by default about a GPU with a model of 8 B weights."""

    step_s: float = 6e-3
    token_s: float = 3e-5
    context_s: float = 2.5e-8
    """For each step and each token of context that it reads."""
    max_seqs: int = 64
    step_tokens: int = 2048
    kv_tokens: int = 300_000


class Request:
    """A request, its times, and the beginnings of its prompt, the shortest first.

    The last link is the prompt with its answer, which the next turn of a chat begins with.
    """

    __slots__ = (
        "answer",
        "arrived_s",
        "chain",
        "given_s",
        "hit",
        "image_s",
        "num_image_tokens",
        "prompt",
    )

    def __init__(
        self,
        arrived_s: float,
        prompt: int,
        answer: int,
        chain: tuple[Link, ...],
        image_s: float = 0.0,
        num_image_tokens: int = 0,
    ) -> None:
        self.arrived_s, self.prompt, self.answer = arrived_s, prompt, answer
        self.chain, self.image_s, self.num_image_tokens = chain, image_s, num_image_tokens
        self.hit = 0
        self.given_s = 0.0
        """Time at which an engine has claimed it."""

    def at(self, arrived_s: float) -> "Request":
        """Return the same request at another time."""
        return Request(
            arrived_s, self.prompt, self.answer, self.chain, self.image_s, self.num_image_tokens
        )


class _Prefill:
    """A prompt that is not computed yet: tokens to go, and seconds of its images."""

    __slots__ = ("image_s", "request", "tokens")

    def __init__(self, request: Request) -> None:
        self.request, self.tokens = request, request.prompt - request.hit
        self.image_s = request.image_s if 2 * request.hit < request.prompt else 0.0


class Engine:
    """One engine. Counts of tokens hold between two steps."""

    __slots__ = (
        "cache",
        "cached",
        "context",
        "cost",
        "finish",
        "first",
        "is_draining",
        "num_begun",
        "num_decoding",
        "num_hit_tokens",
        "num_prefilled",
        "num_prompt_tokens",
        "number",
        "order",
        "prefill_s",
        "prefills",
        "queued",
        "since_s",
        "started_s",
        "steps",
        "steps_ahead",
        "todo",
        "version",
        "waiting",
    )

    def __init__(self, number: int, since_s: float, cost: Cost) -> None:
        self.number, self.since_s, self.cost = number, since_s, cost
        self.is_draining = False
        self.waiting: deque[Request] = deque()
        self.queued = 0
        """Tokens of the waiting requests."""
        self.prefills: deque[_Prefill] = deque()
        self.todo = 0
        """Tokens of the prefills."""
        self.first: list[Request] = []
        """Requests that have their first token at the end of the step."""
        self.finish: list[tuple[int, int, Request]] = []
        self.num_decoding = self.context = self.steps = self.order = self.version = 0
        self.steps_ahead = 0
        """Steps until the end of the leap; 0 for an idle engine."""
        self.started_s = 0.0
        self.cache: OrderedDict[Key, int] = OrderedDict()
        self.cached = 0
        self.num_begun = self.num_prompt_tokens = self.num_hit_tokens = 0
        self.num_prefilled = 0
        """Prompt tokens that were computed."""
        self.prefill_s = 0.0
        """Time of the steps that computed them."""

    @property
    def num_held(self) -> int:
        return self.num_decoding + len(self.prefills) + len(self.first) + len(self.waiting)

    @property
    def num_running(self) -> int:
        return self.num_decoding + len(self.prefills)

    @property
    def load(self) -> float:
        """Prefill tokens over two steps' budget, or sequences over their limit."""
        tokens = (self.todo + self.queued) / (2 * self.cost.step_tokens)
        return max(tokens, self.num_held / self.cost.max_seqs)

    @property
    def pull_load(self) -> float:
        """Load by which pulls from slots have their priority."""
        hit_rate = self.num_hit_tokens / max(1, self.num_prompt_tokens)
        num_ahead = self.todo + self.queued * (1 - hit_rate)
        num_ahead += sum(request.prompt - request.hit for request in self.first)
        # As if one request had found a whole step's tokens before.
        num_saved = (self.num_hit_tokens + self.cost.step_tokens) / (1 + self.num_begun)
        return load_of(self.num_held / self.cost.max_seqs, num_ahead, num_saved)

    def has_room(self) -> bool:
        """Return whether another request could begin within two steps."""
        return self.load < 1.0

    def add(self, request: Request) -> None:
        self.waiting.append(request)
        self.queued += request.prompt

    def begin(self, request: Request) -> None:
        request.hit = self._match(request)
        self.num_begun += 1
        self.num_prompt_tokens += request.prompt
        self.num_hit_tokens += request.hit
        self.prefills.append(_Prefill(request))
        self.todo += request.prompt - request.hit

    def admit(self, max_todo: float) -> None:
        """Begin waiting requests, as far as sequences, KV and `max_todo` tokens allow."""
        while self.waiting and self.num_running < self.cost.max_seqs and self.todo < max_todo:
            request = self.waiting[0]
            if self.context + request.prompt > self.cost.kv_tokens and self.num_decoding:
                return
            self.queued -= request.prompt
            self.begin(self.waiting.popleft())

    def plan(self, now_s: float) -> float | None:
        """Start the next step or leap; return when it ends, None for an idle engine."""
        cost, num_decoding = self.cost, self.num_decoding
        tokens, image_s = num_decoding, 0.0
        budget = max(1, cost.step_tokens - num_decoding)
        while self.prefills and budget:
            prefill = self.prefills[0]
            part = min(budget, prefill.tokens)
            budget, tokens, image_s = budget - part, tokens + part, image_s + prefill.image_s
            prefill.tokens, prefill.image_s = prefill.tokens - part, 0.0
            self.todo -= part
            if prefill.tokens:
                break
            self.first.append(self.prefills.popleft().request)
        self.started_s, self.steps_ahead = now_s, 1
        if tokens > num_decoding or self.first:
            step_s = cost.step_s + cost.token_s * tokens + cost.context_s * self.context
            self.num_prefilled += tokens - num_decoding
            self.prefill_s += step_s + image_s
            return now_s + step_s + image_s
        if not num_decoding:
            self.steps_ahead = 0
            return None
        self.steps_ahead = max(1, self.finish[0][0] - self.steps)
        return now_s + self._leap_s(self.steps_ahead)

    def cut(self, now_s: float) -> float | None:
        """End a leap with the step that is under way; return when, None if it ends there anyway."""
        if self.prefills or self.first or self.steps_ahead <= 1:
            return None
        passed_s = now_s - self.started_s
        step_s = self._leap_s(1)
        steps = max(1, min(self.steps_ahead, math.ceil(passed_s / step_s)))
        while steps > 1 and self._leap_s(steps - 1) >= passed_s:
            steps -= 1
        if steps == self.steps_ahead:
            return None
        self.steps_ahead = steps
        return self.started_s + self._leap_s(steps)

    def settle(self) -> tuple[list[Request], list[Request]]:
        """End the step; return the requests with a first token, and those with their last."""
        self.steps += self.steps_ahead
        self.context += self.num_decoding * self.steps_ahead
        first, self.first, last = self.first, [], []
        for request in first:
            self._store(request.chain[:-1], 0)
            self.num_decoding += 1
            self.context += request.prompt
            self.order += 1
            heapq.heappush(self.finish, (self.steps + request.answer - 1, self.order, request))
        while self.finish and self.finish[0][0] <= self.steps:
            request = heapq.heappop(self.finish)[2]
            self.num_decoding -= 1
            self.context -= request.prompt + request.answer - 1
            before = request.chain[-2][1] if len(request.chain) > 1 else 0
            self._store(request.chain[-1:], before)
            last.append(request)
        return first, last

    def _leap_s(self, steps: int) -> float:
        cost, num_decoding = self.cost, self.num_decoding
        step_s = cost.step_s + cost.token_s * num_decoding + cost.context_s * self.context
        return steps * step_s + cost.context_s * num_decoding * steps * (steps - 1) / 2

    def _match(self, request: Request) -> int:
        """Return the tokens of the longest cached beginning, but never the whole prompt."""
        hit = 0
        for key, tokens in reversed(request.chain[:-1]):
            if key in self.cache:
                hit = hit or tokens
                self.cache.move_to_end(key)
        return min(hit, request.prompt - 1)

    def _store(self, chain: Iterable[Link], before: int) -> None:
        for key, tokens in chain:
            if key not in self.cache:
                self.cache[key] = tokens - before
                self.cached += tokens - before
            before = tokens
        room = max(0, self.cost.kv_tokens - self.context)
        while self.cached > room and self.cache:
            _, size = self.cache.popitem(last=False)
            self.cached -= size
