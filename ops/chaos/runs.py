"""The runs of docs/contribute/reliability.md, and the short ones of CI."""

from msgspec.structs import replace

from ops.chaos.plan import SHIPPED, Batches, Mix, Scaled, Settings
from ops.chaos.processes.nemesis import KILLS, MIXED

# Answers are long enough to be interrupted by a fault; half of the requests have images.
DEMO = Settings(
    engine="demo",
    requests=2000,
    rate=5.0,
    timeout_s=120.0,
    max_tokens=(32, 256),
    # About half of the images are larger.
    inline_kib=28,
    mix=Mix(images=0.5),
)

# Kills of every process that serves speeches or images.
OMNI_KILLS = {
    "kill:engine": 2.0,
    "kill:talker": 3.0,
    "kill:code2wav": 3.0,
    "kill:dit": 2.0,
    "kill:coordinator": 1.0,
    "kill:broker": 1.0,
    "kill:gateway": 1.5,
    "kill:renderer": 0.3,
    "kill:load": 0.2,
}

# Kills of every process that serves a batch. Stopped batchers wake up when others have taken over.
BATCH_FAULTS = {
    "kill:batcher": 3.0,
    "stop:batcher": 1.0,
    "kill:gateway": 1.0,
    "kill:coordinator": 1.0,
    "kill:renderer": 0.5,
    "kill:engine": 2.0,
    "kill:broker": 0.7,
}

RUNS: dict[str, Settings] = {
    # A SIGKILL hits any process every 2 s.
    "kills": Settings(
        requests=10_000,
        rate=30.0,
        gateways=2,
        fault_every_s=2.0,
        faults=KILLS | {"kill:gateway": 1.5},
        mix=Mix(http=0.25, whole=0.3, images=0.1, clips=0.5),
    ),
    # A third of the media are sounds, alone or in a clip. Separate decoders decode them.
    "sounds": Settings(
        engine="demo",
        requests=1000,
        rate=5.0,
        gateways=2,
        timeout_s=120.0,
        max_tokens=(32, 128),
        inline_kib=28,
        fault_every_s=4.0,
        faults=KILLS | {"kill:renderer": 3.0, "kill:gateway": 1.0},
        mix=Mix(http=0.25, whole=0.3, images=0.7, sounds=0.6, clips=0.4),
    ),
    "model": replace(
        DEMO,
        mix=Mix(images=0.5, clips=0.3, sounds=0.2),
        fault_every_s=6.0,
        faults={"kill:engine": 5, "kill:renderer": 1, "kill:coordinator": 2, "kill:broker": 2},
    ),
    # The broker is killed every 3 s on average: most requests lose their tasks, some several times.
    "broker": Settings(
        requests=1000,
        rate=10.0,
        gateways=1,
        timeout_s=120.0,
        max_tokens=(32, 256),
        fault_every_s=3.0,
        faults={"kill:broker": 4, "kill:renderer": 1, "kill:engine": 1, "kill:coordinator": 1},
        mix=Mix(http=0.25, images=0.5, clips=0.2),
    ),
    # Half of the answers are spoken, and a tenth are images.
    "omni": Settings(
        engine="demo",
        requests=2000,
        rate=4.0,
        concurrency=32,
        engines=2,
        renderers=1,
        talkers=2,
        vocoders=2,
        painters=2,
        painter="qwen-image",
        painter_parts=1,
        gateways=2,
        timeout_s=120.0,
        max_tokens=(8, 48),
        max_choices=2,
        fault_every_s=4.0,
        faults=OMNI_KILLS | {"kill:text_encoder": 1.0, "kill:vae": 1.0},
        mix=Mix(http=0.4, whole=0.3, speech=0.5, paints=0.2),
    ),
    "leaders": Settings(
        requests=10_000,
        rate=16.0,
        fault_every_s=11.0,
        brokers=3,
        timeout_s=120.0,
        engines=2,
        renderers=1,
    ),
    "rolling": Settings(requests=4000, rate=20.0, rolling_rounds=20, max_tokens=(16, 200)),
    # With the limits, keys and tenants of a real deployment. Kills are rare enough that hardly any
    # request is in flight at two of them.
    "shipped": Settings(
        requests=400,
        rate=6.0,
        gateways=2,
        tenants=("acme", "globex"),
        fault_every_s=4.0,
        faults=KILLS | {"kill:gateway": 1.5},
        mix=Mix(http=0.5, whole=0.3, images=0.1),
        **SHIPPED,
    ),
    # Five batches of three tenants, half of the lines with images. One is cancelled, and one cannot
    # end in its window of a minute.
    "batch": Settings(
        requests=300,
        rate=1.0,
        concurrency=16,
        gateways=2,
        batchers=2,
        tenants=("acme", "globex", "initech"),
        fault_every_s=4.0,
        faults=BATCH_FAULTS,
        num_blocks=1024,
        step_ms=10.0,
        max_tokens=(4, 32),
        timeout_s=120.0,
        mix=Mix(http=0.5, whole=0.3, images=0.1),
        batches=Batches(num=5, lines=2000, questions=300, cancelled=1, expired=1, patience_s=570.0),
    ),
    # All requests at once to a pool at zero, which has to grow to four engines and return to zero.
    "scale": Settings(
        requests=500,
        rate=5000.0,
        concurrency=500,
        renderer="fake",
        step_ms=60.0,
        max_tokens=(16, 96),
        max_choices=1,
        mix=Mix(cancel=0.0, deadline=0.0),
        scaled=Scaled(
            max=4,
            idle_s=15.0,
            faults=((0, "kill:autoscaler"), (3, "kill:engine"), (3, "kill:broker")),
            max_engine_s=1.3,
        ),
    ),
}

# The scenarios of CI run one at a time, in this order.
QUICK: dict[str, Settings] = {
    # Half of the images go through encoders, which are killed most often. The engines encode the
    # others in their tower threads.
    "demo model with encoders, kills": replace(
        DEMO,
        requests=60,
        rate=4.0,
        # On a machine that cannot serve this rate, a backlog would hide how long recoveries take.
        concurrency=12,
        fault_every_s=4.0,
        engines=2,
        encoders=2,
        steps_ahead=1,
        local_tokens=9,
        max_tokens=(16, 96),
        mix=Mix(images=0.7),
        faults={
            "kill:encoder": 3.0,
            "kill:engine": 1.5,
            "kill:renderer": 1.0,
            "kill:coordinator": 0.5,
            "kill:broker": 0.5,
        },
    ),
    # Clients of a gateway that fails resume through the other one.
    "fake engine, mixed faults": Settings(
        requests=200,
        rate=14.0,
        gateways=2,
        steps_ahead=1,
        fault_every_s=1.2,
        faults=MIXED | {"kill:gateway": 1.5, "stop:gateway": 0.7, "drain:gateway": 0.7},
        timeout_s=60.0,
        mix=Mix(http=0.3),
    ),
    # Renderers die before their payloads are read, engines while they read, and other workers too.
    "fake engine, large payloads": Settings(
        requests=80,
        rate=12.0,
        renderer="fake",
        fault_every_s=1.5,
        faults={
            "kill:renderer": 3.0,
            "kill:engine": 2.0,
            "kill:coordinator": 0.5,
            "kill:broker": 0.5,
            "stop:renderer": 0.7,
            "stop:engine": 0.3,
            "drain:renderer": 1.0,
            "drain:engine": 0.5,
        },
        crash="renderer/after_publish_before_ack=0.03,mid_read=0.02",
        timeout_s=60.0,
        mix=Mix(images=0.7),
    ),
    "batches, kills": Settings(
        requests=20,
        rate=2.0,
        concurrency=8,
        renderers=1,
        engines=2,
        coordinators=1,
        gateways=2,
        batchers=2,
        renderer="fake",
        tenants=("acme", "globex", "initech"),
        fault_every_s=2.0,
        faults=BATCH_FAULTS,
        num_blocks=1024,
        max_tokens=(4, 24),
        timeout_s=60.0,
        step_ms=20.0,
        mix=Mix(http=0.5, images=0.1),
        batches=Batches(num=3, lines=100, questions=40, cancelled=1, patience_s=90.0),
    ),
    "speech and images, kills": Settings(
        requests=60,
        rate=9.0,
        concurrency=24,
        renderers=1,
        engines=1,
        coordinators=1,
        talkers=2,
        vocoders=2,
        painters=2,
        gateways=2,
        renderer="fake",
        fault_every_s=1.2,
        faults=OMNI_KILLS,
        timeout_s=60.0,
        step_ms=10.0,
        max_tokens=(4, 24),
        max_codes=48,
        mix=Mix(http=0.4, speech=0.6, given_text=0.6, paints=0.4),
    ),
}
