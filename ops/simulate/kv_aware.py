"""Routers that know which engine has cached what: they push, or engines steal as well."""

from collections import deque

from ops.simulate.engine import Engine, Key, Request
from ops.simulate.routers import Push
from ops.simulate.simulation import Simulation

NEWS_LAG_S = 0.05
NUM_SAMPLED = 4
NUM_HOLDERS = 8
"""A decision looks at so many random engines, and at so many holders of each beginning."""
ANSWER_TOKENS = 100
"""Tokens of a typical answer, with which the cost of one more request is estimated."""


class _View:
    """An engine's last heartbeat, and the requests that each router has sent there since."""

    __slots__ = ("at_s", "context", "num_decoding", "num_held", "sent", "todo")

    def __init__(self, engine: Engine, at_s: float) -> None:
        self.at_s, self.todo, self.context = at_s, engine.todo + engine.queued, engine.context
        self.num_decoding, self.num_held = engine.num_decoding, engine.num_held
        self.sent: dict[int, tuple[int, int]] = {}


class _Holders:
    """A set of engines of which any number can be chosen at random in no time."""

    __slots__ = ("engines", "places")

    def __init__(self) -> None:
        self.engines: list[Engine] = []
        self.places: dict[int, int] = {}

    def add(self, engine: Engine) -> None:
        if engine.number not in self.places:
            self.places[engine.number] = len(self.engines)
            self.engines.append(engine)

    def discard(self, engine: Engine) -> None:
        place = self.places.pop(engine.number, None)
        if place is not None:
            last = self.engines.pop()
            if last is not engine:
                self.engines[place] = last
                self.places[last.number] = place


class KVAware(Push):
    """The engine with the least work ahead and of its own, as far as heartbeats and news tell."""

    needs_news = True

    def __init__(self, num_routers: int = 1, stale_s: float = 0.0, steals: bool = False) -> None:
        self._num_routers, self._stale_s, self._steals = num_routers, stale_s, steals
        self._index: dict[Key, _Holders] = {}
        self._news: deque[tuple[float, Key, Engine, bool]] = deque()
        self._views: dict[int, _View] = {}

    def route(self, simulation: Simulation, request: Request) -> None:
        self._read_news(simulation.now_s)
        router = simulation.random.randrange(self._num_routers)
        engine = self._choose(simulation, request, router)
        if self._steals and not (engine.todo < simulation.max_todo and engine.has_room()):
            engine = self._overflow(simulation, engine, request)
        simulation.give(engine, request)

    def hear(self, at_s: float, key: Key, engine: Engine, is_stored: bool) -> None:
        self._news.append((at_s + NEWS_LAG_S, key, engine, is_stored))

    def idle(self, simulation: Simulation, engine: Engine) -> None:
        if not self._steals or engine.num_decoding >= engine.cost.max_seqs:
            return
        for _, victim in zip(range(NUM_SAMPLED), simulation.busy, strict=False):
            if victim is not engine and victim.waiting:
                request = victim.waiting[0]
                if _is_sooner(request, victim, engine):
                    victim.queued -= victim.waiting.popleft().prompt
                    simulation.begin(engine, request)
                    return

    def _read_news(self, now_s: float) -> None:
        while self._news and self._news[0][0] <= now_s:
            _, key, engine, is_stored = self._news.popleft()
            if is_stored:
                self._index.setdefault(key, _Holders()).add(engine)
            elif holders := self._index.get(key):
                holders.discard(engine)
                if not holders.engines:
                    del self._index[key]

    def _choose(self, simulation: Simulation, request: Request, router: int) -> Engine:
        """Return the engine with the least price: the work ahead, its own, and what it slows."""
        cost, now_s = simulation.cost, simulation.now_s
        live = simulation.live
        hits = dict.fromkeys(simulation.random.sample(live, min(NUM_SAMPLED, len(live))), 0)
        for key, tokens in request.chain[:-1]:  # deeper ones overwrite
            holders = self._index[key].engines if key in self._index else []
            if len(holders) > NUM_HOLDERS:
                holders = simulation.random.sample(holders, NUM_HOLDERS)
            for engine in holders:
                if not engine.is_draining:
                    hits[engine] = tokens
        best, least = live[0], float("inf")
        for engine, hit in hits.items():
            view = self._views.get(engine.number)
            if view is None or now_s - view.at_s >= self._stale_s:
                view = self._views[engine.number] = _View(engine, now_s)
            sent_tokens, num_sent = view.sent.get(router, (0, 0))
            own_s = (request.prompt - hit) * cost.token_s
            own_s += request.image_s if 2 * hit < request.prompt else 0.0
            slows_s = cost.context_s * view.context + cost.token_s * (view.num_decoding + num_sent)
            excess = max(0, view.num_held + num_sent + 1 - cost.max_seqs)
            price = own_s + (view.todo + sent_tokens) * cost.token_s
            price += ANSWER_TOKENS * slows_s + 0.1 * excess
            if price < least:
                best, least = engine, price
        sent = self._views[best.number].sent
        sent_tokens, num_sent = sent.get(router, (0, 0))
        sent[router] = (sent_tokens + request.prompt - hits.get(best, 0), num_sent + 1)
        return best

    def _overflow(self, simulation: Simulation, owner: Engine, request: Request) -> Engine:
        """Return an idle engine whose pull stands behind the owner's, if that is sooner."""
        live = simulation.live
        for thief in simulation.random.sample(live, min(NUM_SAMPLED, len(live))):
            is_free = not thief.todo and not thief.waiting and thief.has_room()
            if is_free and _is_sooner(request, owner, thief):
                simulation.figures.num_stolen += 1
                return thief
        return owner


def _is_sooner(request: Request, owner: Engine, thief: Engine) -> bool:
    """Return whether a thief that has cached nothing begins the answer before the owner."""
    token_s = owner.cost.token_s
    ahead_s = (owner.todo + owner.queued) * token_s
    return ahead_s > (thief.todo + request.prompt) * token_s + request.image_s
