"""Sentences that explain decisions, by the rule that has decided."""

import pytest

from shared.scaling.explain import explain
from shared.scaling.memory import GivenUp, Learned, Peak, PoolMemory
from shared.scaling.policy import decide
from shared.scaling.pools import (
    PoolFigures,
    PoolSettings,
    PromptFigures,
    ScalingSettings,
    WorkFigures,
)

POOL = PoolSettings(max=4, per_engine=2)
COLD = Learned(10.0)


@pytest.mark.parametrize(
    ("pool", "figures", "memory", "sentence"),
    [
        (
            POOL,
            PoolFigures(3, 1, 0.0, 0),
            PoolMemory(),
            "2 workers for 4 tasks, at most 2 for each worker",
        ),
        (
            POOL,
            PoolFigures(
                3, 0, 0.0, 1, work=WorkFigures(0.0, 0.1, 0, PromptFigures(3000.0, 400.0, 500.0))
            ),
            PoolMemory(1, learned=COLD),
            "3 workers for 3000 waiting prompt tokens and 400 more each second: a worker computes"
            " 500 in a second, a start takes 10.0 s, and ttft_target_s is 2 s",
        ),
        (
            POOL,
            PoolFigures(1, 1, 2.5, 1),
            PoolMemory(1),
            "2 workers for 2 tasks: the oldest waits for 2.5 s, and ttft_target_s is 2 s",
        ),
        (
            POOL,
            PoolFigures(0, 0, 0.0, 0, num_arrived=1),
            PoolMemory(),
            "1 worker for a request that is on its way to this pool",
        ),
        (
            POOL,
            PoolFigures(0, 0, 0.0, 3),
            PoolMemory(3, (Peak(0.0, 3),), learned=Learned(25.0, (80.0,))),
            "3 workers for 0 tasks: the pool keeps the workers that it needed in the last 100 s,"
            " because a start takes 25.0 s, and stopped workers were last needed again after 80 s",
        ),
        (
            PoolSettings(max=4, idle_s=20.0),
            PoolFigures(0, 0, 0.0, 3),
            PoolMemory(3, (Peak(0.0, 3),), learned=COLD),
            "3 workers for 0 tasks: the pool keeps the workers that it needed in the last 20 s",
        ),
        (
            POOL,
            PoolFigures(0, 0, 0.0, 3, num_pinned=1),
            PoolMemory(3, (Peak(-500.0, 3),)),
            "1 worker for 0 tasks: 1 have payloads that others still fetch",
        ),
        (
            PoolSettings(min=1, max=4),
            PoolFigures(0, 0, 0.0, 0),
            PoolMemory(),
            "1 worker for 0 tasks: min is 1",
        ),
        (
            POOL,
            PoolFigures(10, 0, 0.0, 0, num_others=1),
            PoolMemory(),
            "3 workers and 1 that others have started for 10 tasks: max is 4",
        ),
        (
            PoolSettings(min=2, max=2),
            PoolFigures(0, 0, 0.0, 0),
            PoolMemory(),
            "2 workers: the size is fixed at 2",
        ),
        (
            POOL,
            PoolFigures(4, 0, 0.0, 0),
            PoolMemory(0, given_up=(GivenUp("1", 0.0),)),
            "0 workers for 4 tasks: a start took longer than start_timeout_s, 300 s, and the pool"
            " starts none for 60 s",
        ),
    ],
)
def test_a_decision_is_explained_in_one_sentence(
    pool: PoolSettings, figures: PoolFigures, memory: PoolMemory, sentence: str
) -> None:
    scaling = ScalingSettings({"engine": pool})
    decisions, after = decide(scaling, {"engine": figures}, {"engine": memory}, 10.0)
    assert explain(pool, figures, decisions["engine"], after["engine"].learned) == sentence


def test_a_budget_is_the_reason_of_a_smaller_pool() -> None:
    scaling = ScalingSettings({"engine": POOL}, budget=1)
    figures = PoolFigures(4, 0, 0.0, 0)
    decisions, _ = decide(scaling, {"engine": figures}, {}, 0.0)
    sentence = explain(POOL, figures, decisions["engine"], Learned())
    assert sentence == "1 worker for 4 tasks: scale.budget leaves no more to this pool"
