"""Small scenarios that trigger planted bugs; without a bug, each of them must be clean."""

from msgspec.structs import replace

from ops.chaos.plan import SHIPPED, Batches, Mix, Scaled, Settings

CALM = Mix(cancel=0.0, resubmit_during=0.0, resubmit_after=0.0, follow=0.0, deadline=0.0)
BASE = Settings(
    requests=120,
    rate=20.0,
    renderers=1,
    renderer="fake",
    timeout_s=8.0,
    ack_wait_s=1.0,
    mix=CALM,
)
RESUMES = replace(
    BASE, crash="mid_tokens:4=0.1,mid_tokens:8=0.1", max_tokens=(16, 48), timeout_s=60.0
)
# Requests come all at once, and engines begin at zero. The fake engine's steps are long, so that
# they take little processor time.
SCALED = replace(
    BASE,
    requests=160,
    rate=1000.0,
    concurrency=160,
    step_ms=50.0,
    max_tokens=(16, 48),
    max_choices=1,
    max_num_seqs=8,
    timeout_s=120.0,
    mix=replace(CALM, resubmit_during=0.05, resubmit_after=0.05, follow=0.05),
)
# Every answer is spoken, and a third of them by gateways.
SPEECHES = replace(
    BASE,
    requests=45,
    engines=1,
    coordinators=1,
    talkers=1,
    vocoders=1,
    gateways=1,
    max_tokens=(4, 16),
    max_codes=64,
    mix=replace(CALM, speech=1.0, http=0.33),
)
# Every request is for images.
PAINTINGS = replace(
    BASE, requests=60, engines=1, coordinators=1, painters=2, mix=replace(CALM, paints=1.0)
)
# Few other requests run at the same time.
BATCHES = replace(
    BASE,
    requests=10,
    rate=2.0,
    engines=2,
    coordinators=1,
    gateways=1,
    batchers=1,
    step_ms=10.0,
    max_tokens=(4, 24),
    timeout_s=60.0,
    batches=Batches(),
)
AGENTS = "agents"
"""The scenario of agents, which `ops.chaos.agents.kills` runs."""
SCENARIOS = {
    "calm": BASE,
    # Many tasks wait when the broker dies. By then it has stored that their requests are put off.
    "broker deaths": replace(
        BASE,
        rate=40.0,
        concurrency=120,
        step_ms=40.0,
        max_num_seqs=8,
        max_tokens=(32, 64),
        fault_every_s=6.0,
        faults={"kill:broker": 1.0},
        timeout_s=30.0,
    ),
    # Engines die in the middle of answers.
    "resumes": RESUMES,
    # All requests have stop strings, so some engines die in the middle of one.
    "resumes with stops": replace(RESUMES, stops=1.0),
    "resumes with few deaths allowed": replace(RESUMES, max_deaths=SHIPPED["max_deaths"]),
    # Each tenant asks the gateway for the other's requests, and subscribes to all subjects it may.
    "tenants": replace(
        BASE, gateways=1, tenants=("acme", "globex"), requests=60, mix=replace(CALM, http=0.5)
    ),
    "stops": replace(BASE, fault_every_s=2.0, faults={"stop:engine": 1.0}, step_ms=20.0),
    "cancels": replace(BASE, mix=replace(CALM, cancel=0.3), requests=60, rate=10.0),
    "deadlines": replace(BASE, mix=replace(CALM, deadline=0.6), requests=120, rate=10.0),
    "killers": replace(
        # A death is detected after three seconds of silence. No task may be redelivered before.
        BASE,
        mix=replace(CALM, kills=0.02),
        max_deaths=2,
        requests=100,
        timeout_s=40.0,
        ack_wait_s=4.0,
    ),
    "raisers": replace(BASE, mix=replace(CALM, raises=0.05), max_deliver=1, requests=100),
    # A request that shares a batch with a raising one is likely to share another as well.
    "many raisers": replace(
        BASE, mix=replace(CALM, raises=0.25), max_deliver=2, requests=100, step_ms=20.0
    ),
    "hangs": replace(BASE, mix=replace(CALM, hangs=0.01), requests=100),
    # Some images travel in the message, others outside of it.
    "images": replace(BASE, mix=replace(CALM, images=0.7)),
    # A lost payload is rendered again, although another renderer may have done so before.
    "dying with unread payloads": replace(
        BASE,
        mix=replace(CALM, images=0.7),
        crash="renderer/after_publish_before_ack=0.06",
        renderers=2,
        timeout_s=30.0,
    ),
    # Other renderers repeat the tasks of a frozen one, and so does the frozen one when it resumes.
    "frozen renderers": replace(
        BASE,
        mix=replace(CALM, images=0.7),
        renderers=2,
        fault_every_s=2.5,
        faults={"stop:renderer": 1.0},
        # Requests have not ended yet when their renderer resumes.
        max_tokens=(80, 160),
        step_ms=30.0,
        timeout_s=60.0,
    ),
    # Payloads wait for engines while other requests need their slots.
    "small arena": replace(
        BASE,
        mix=replace(CALM, images=1.0),
        arena_mib=5,
        engines=1,
        max_num_seqs=4,
        max_tokens=(8, 24),
        step_ms=10.0,
        timeout_s=60.0,
    ),
    # Their clients resume through the other gateway, and some disconnect.
    "dying gateways": replace(
        BASE,
        gateways=2,
        durable=0.3,
        mix=replace(CALM, http=1.0, cancel=0.15, resubmit_after=0.1),
        fault_every_s=2.0,
        faults={"kill:gateway": 1.0},
        max_tokens=(16, 48),
        step_ms=20.0,
        timeout_s=60.0,
    ),
    # Gateways resume with the connections of clients that use another gateway by then.
    "frozen gateways": replace(
        BASE,
        gateways=2,
        durable=0.0,
        mix=replace(CALM, http=1.0),
        fault_every_s=4.0,
        faults={"stop:gateway": 1.0},
        requests=60,
        rate=6.0,
        max_tokens=(300, 400),
        step_ms=20.0,
        timeout_s=60.0,
    ),
    # Some requests sample other frames of the same clip. The fake engine's answers depend on each
    # of their bytes.
    "clips": replace(
        BASE,
        requests=60,
        rate=10.0,
        renderer="real",
        mix=replace(CALM, images=0.9, clips=1.0),
        timeout_s=60.0,
    ),
    # Engines of the model that hears die in the middle of answers.
    "hearing, resumes": replace(
        RESUMES,
        requests=40,
        rate=8.0,
        engine="demo",
        renderer="real",
        engines=2,
        mix=replace(CALM, images=1.0, sounds=1.0),
    ),
    "dying before publishing": replace(BASE, crash="before_publish=0.05", timeout_s=15.0),
    "dying before the end": replace(BASE, crash="before_final=0.05", timeout_s=10.0),
    "speeches": SPEECHES,
    # Vocoders resume with speeches that others have continued, or that were cancelled.
    "frozen vocoders": replace(
        SPEECHES,
        rate=5.0,
        vocoders=2,
        fault_every_s=2.0,
        faults={"stop:code2wav": 1.0},
        max_codes=120,
        step_ms=40.0,
        mix=replace(CALM, speech=1.0, cancel=0.4),
        timeout_s=60.0,
    ),
    "dying in speeches": replace(
        SPEECHES,
        rate=5.0,
        talkers=2,
        vocoders=2,
        fault_every_s=1.2,
        faults={"kill:talker": 1.0, "kill:code2wav": 1.0},
        max_codes=120,
        step_ms=30.0,
        mix=replace(CALM, speech=1.0),
        timeout_s=60.0,
    ),
    "images as answers": PAINTINGS,
    "dying painters": replace(
        PAINTINGS, fault_every_s=1.0, faults={"kill:dit": 1.0}, step_ms=40.0, timeout_s=60.0
    ),
    "batches": BATCHES,
    # Batchers die while lines are in flight, and between two blocks of results.
    "dying batchers": replace(
        BATCHES,
        fault_every_s=5.0,
        faults={"kill:batcher": 1.0},
        step_ms=30.0,
        batches=Batches(lines=200, patience_s=120.0),
    ),
    # Batchers resume when others have continued their batches, which have not ended.
    "stopped batchers": replace(
        BATCHES,
        batchers=2,
        fault_every_s=4.0,
        faults={"stop:batcher": 1.0},
        step_ms=60.0,
        batches=Batches(lines=600, patience_s=120.0),
    ),
    # The batch would last for much longer than its window of a minute.
    "expired batches": replace(
        BATCHES,
        step_ms=50.0,
        num_blocks=1024,
        batches=Batches(num=1, lines=500, expired=1, patience_s=150.0),
    ),
    # The lines in flight would last for much longer than the cancellation.
    "cancelled batches": replace(
        BATCHES, step_ms=20.0, num_blocks=1024, batches=Batches(cancelled=1, patience_s=120.0)
    ),
    "scaled to zero": replace(
        SCALED,
        scaled=Scaled(
            max=3,
            per_engine=8,
            idle_s=4.0,
            faults=((0, "kill:autoscaler"), (2, "kill:engine"), (2, "kill:broker")),
        ),
    ),
    # The pool has no figures for a while, although one lane has work.
    "scaled without a queue": replace(
        SCALED, scaled=Scaled(max=2, per_engine=8, idle_s=3.0, faults=((2, "lose:queue"),))
    ),
    # Its heartbeats stop, as if it were still starting.
    "scaled with a frozen engine": replace(
        SCALED,
        requests=240,
        concurrency=240,
        max_tokens=(32, 64),
        scaled=Scaled(
            max=2, per_engine=8, idle_s=4.0, start_timeout_s=5.0, faults=((2, "stop:engine"),)
        ),
    ),
}
