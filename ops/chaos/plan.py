"""The plan of a run, drawn from one seed: settings, requests, and the behaviour of each client."""

import base64
import functools
import json
import random
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct
from msgspec.structs import replace

from ops.chaos import clips, fake_model
from shared.config.schema import DeliveryConfig
from shared.protocol.images import ImageParams
from shared.protocol.names import scoped_id
from shared.protocol.requests import (
    ContentPart,
    GenerateRequest,
    ImagePart,
    ImageURL,
    Message,
    TextPart,
)
from shared.protocol.sampling import SamplingParams

MODEL = "demo"
CODES, AUDIO = "codes", "audio"
"""The outputs of a speech: the talker's codes, and the sound that is made of them."""
TALKER, VOCODER = "talker", "code2wav"
"""The stages of a speech, which are also the roles of their workers in a run."""
PAINTED, PAINTER = "image", "dit"
"""The output and the stage of painted images."""
ROOT = Path(__file__).parent.parent.parent
PAINTER_FOLDER = ROOT / "ops" / "demo_painter"
IMAGES = ROOT / "ops" / "demo_images"

Behaviour = Literal[
    "plain", "cancel", "resubmit_during", "resubmit_after", "follow", "deadline", "harm"
]


def painted_sizes(settings: "Settings") -> list[str]:
    """Return small sizes of the painter of a run; the fake one paints any."""
    return _demo_sizes() if settings.painter == "demo" else ["48x48", "64x48"]


@functools.cache
def _demo_sizes() -> list[str]:
    config = json.loads((PAINTER_FOLDER / "config.json").read_bytes())
    unit = config["patch"] * config["scale"]
    return [f"{2 * unit}x{2 * unit}", f"{3 * unit}x{2 * unit}"]


class Mix(Struct, frozen=True):
    """Shares of the requests with a certain behaviour of the client, or of a certain kind."""

    cancel: float = 0.06
    resubmit_during: float = 0.05
    resubmit_after: float = 0.05
    follow: float = 0.04
    """A second reader joins at a record in the middle."""
    deadline: float = 0.04
    """Long answers with a deadline of a second or two."""
    kills: float = 0.0
    """Requests that kill the engine which runs them."""
    raises: float = 0.0
    """Requests at which a step raises."""
    hangs: float = 0.0
    """Requests at which a step hangs for a while, in the first engine that runs them."""
    images: float = 0.0
    """Share of all requests that have images, with any behaviour."""
    clips: float = 0.0
    """Share of `images` that have a clip instead; only with a real renderer."""
    sounds: float = 0.0
    """Share of `images` that have a sound, or a clip with a sound, instead. The model is then the
    demo model that hears, with a real engine: renderers load torch when they start."""
    http: float = 0.0
    """Share of all harmless requests that go through the gateways."""
    whole: float = 0.0
    """Share of the requests over HTTP that are answered with one JSON object."""
    speech: float = 0.0
    """Share of all harmless requests that are spoken."""
    paints: float = 0.0
    """Share of all harmless requests without a speech that are answered with images."""
    given_text: float = 0.5
    """Share of the speeches over NATS with a given text. Speeches over HTTP always have one."""


class Scaled(Struct, frozen=True):
    """A pool of engines that begins at zero and returns to zero, and its faults under load."""

    max: int = 4
    per_engine: int = 16
    idle_s: float = 10.0
    start_timeout_s: float = 60.0
    faults: tuple[tuple[int, str], ...] = ()
    """Faults in this order, by names as in `Settings.faults` or "lose:queue", each with the number
    of engines that must be ready; 0 stands for the start of the first engine."""
    stop_s: float = 14.0
    """Duration of a stop."""
    max_engine_s: float = 0.0
    """Bound of the engine-seconds, in multiples of the simulator's; 0 for none."""


class Batches(Struct, frozen=True):
    """Batches of lines for the gateways, and the same requests alone."""

    num: int = 2
    lines: int = 150
    questions: int = 60
    """Number of different bodies of lines. Each is also sent alone, as an interactive request."""
    images: float = 0.5
    """Share of the lines with an image."""
    cancelled: int = 0
    """Number of batches that their clients cancel when a tenth of their lines have ended."""
    expired: int = 0
    """Number of batches that last longer than their windows of a minute."""
    patience_s: float = 60.0
    """Clients give up batches that have not ended after this time."""


# A fake renderer does not decode images, so each file has many variants.
NUM_VARIANTS = 40


class Settings(Struct, frozen=True):
    """Everything that determines a run."""

    seed: int = 1
    requests: int = 200
    rate: float = 20.0
    """Requests per second; fewer while `concurrency` requests are in flight."""
    concurrency: int = 64
    coordinators: int = 2
    renderers: int = 2
    engines: int = 3
    ranks: int = 1
    """Processes of an engine."""
    slots: int = 1
    """Queues of a lane of the engines."""
    encoders: int = 0
    """Number of encoders; with 0, engines run the vision tower themselves."""
    brokers: int = 1
    gateways: int = 0
    talkers: int = 0
    """Engines that write the codes of speeches; with 0, no request may be spoken."""
    vocoders: int = 0
    """Generators that turn codes into sound."""
    painters: int = 0
    """Generators that paint; with 0, no request may be for images."""
    painter: Literal["demo", "qwen-image"] = "demo"
    """Model that paints if the engine is not a fake: the demo's, or a small one of diffusers."""
    painter_parts: int = 0
    """Generators that encode texts, and ones that decode latents; with 0, painters do both."""
    max_codes: int = 96
    """Most frames of a speech."""
    engine: Literal["fake", "demo"] = "fake"
    renderer: Literal["fake", "real"] = "real"
    fault_every_s: float = 0.0
    """Mean time between faults; 0 for none."""
    faults: dict[str, float] = {}
    """Weights of the faults, by names as "kill:engine"; see `nemesis`."""
    rolling_rounds: int = 0
    """Number of times that every worker is drained and replaced, one after the other."""
    crash: str = ""
    """Crash points of workers; see `crash_points`."""
    bug: str = ""
    """Name of a planted bug; see `bugs`."""
    step_ms: float = 5.0
    max_tokens: tuple[int, int] = (2, 48)
    stops: float = 0.3
    """Share of the requests with stop strings."""
    num_blocks: int = 256
    max_num_seqs: int = 16
    steps_ahead: Literal[0, 1] = 0
    """Steps that engines launch before the tokens of the step before them are known."""
    local_tokens: int = 0
    """With encoders, the largest items that engines encode, in a tower thread."""
    timeout_s: float = 240.0
    """Deadline of all requests that are expected to finish."""
    ack_wait_s: float = 2.0
    max_deliver: int = 50
    max_deaths: int = 50
    """Deaths until a request counts as poison; this and `max_deliver` are high where faults, and
    not requests, kill workers."""
    max_queued: int = 10_000
    inline_kib: int = 64
    """Largest total size of images that travel in the message; larger ones travel outside of it."""
    arena_mib: int = 64
    listen: bool = False
    """Workers also serve payloads over TCP, as they would to other machines."""
    drain_s: float = 8.0
    durable: float = 0.5
    """Share of the HTTP requests that continue when their clients disconnect."""
    max_choices: int = 3
    mix: Mix = Mix()
    batchers: int = 0
    batches: Batches | None = None
    """Batches that run during the load; only with gateways and batchers."""
    scaled: Scaled | None = None
    """Engines are a pool that an autoscaler scales, in place of `engines`."""
    tenants: tuple[str, ...] = ()
    """Clients are of these tenants in turn; the broker knows each worker and tenant by a key."""


SHIPPED: dict[str, Any] = {
    name: getattr(DeliveryConfig(), name)
    for name in ("ack_wait_s", "max_deliver", "max_deaths", "max_queued", "drain_s")
}
"""The product's default limits, which replace the defaults of `Settings`."""


class Planned(Struct, frozen=True):
    """One request and the behaviour of its client."""

    id: str
    request: GenerateRequest
    behaviour: Behaviour
    after_records: int
    """Number of the record at which the client acts."""
    timeout_s: float
    http: bool = False
    durable: bool = False
    """The HTTP request continues when its connection is closed."""
    streamed: bool = True
    tenant: str = ""

    @property
    def speaks(self) -> bool:
        return AUDIO in self.request.outputs

    @property
    def paints(self) -> bool:
        return PAINTED in self.request.outputs

    @property
    def writes(self) -> bool:
        """Whether the answer is text alone."""
        return not (self.speaks or self.paints)

    @property
    def bus_id(self) -> str:
        """Id of the request on the bus."""
        return scoped_id(self.id, self.tenant)


_VOCABULARY = (
    "red green blue circle square star heart triangle cross letter picture colour "
    "shape how many where what which is are the they same there kind of background "
    "left right top bottom"
)
WORDS = _VOCABULARY.split()
_COLORS, _SHAPES = ["red", "blue"], ["circle", "star"]
_STOPS = ["ea", "to", "n ", "he", "in", "rs", "o t", "lu"]


def make_request(settings: Settings, index: int) -> Planned:
    """Return request number `index`, which the settings determine in every process."""
    rng = random.Random(f"{settings.seed}:{index}")
    behaviour, harm = _pick_behaviour(rng, settings.mix)
    sampling = _sampling(rng, settings, behaviour, harm)
    timeout_s = rng.choice([1.0, 1.5, 2.0]) if behaviour == "deadline" else settings.timeout_s
    planned = Planned(
        id=f"c{settings.seed}-{index}",
        request=GenerateRequest(
            model=MODEL,
            messages=[Message("user", _content(rng, settings))],
            sampling_params=msgspec.convert(sampling, SamplingParams),
            lane="batch" if rng.random() < 0.2 else "interactive",
            timeout_s=timeout_s,
        ),
        behaviour=behaviour,
        after_records=rng.randint(0, 4),
        timeout_s=timeout_s,
        http=harm is None and rng.random() < settings.mix.http,
        durable=rng.random() < settings.durable,
        streamed=rng.random() >= settings.mix.whole,
        tenant=settings.tenants[index % len(settings.tenants)] if settings.tenants else "",
    )
    # Speeches use separate random numbers, so that runs without speeches keep their requests.
    rng = random.Random(f"speech:{settings.seed}:{index}")
    speaks = harm is None and rng.random() < settings.mix.speech
    if speaks:
        return _spoken(planned, rng, settings)
    rng = random.Random(f"image:{settings.seed}:{index}")
    paints = harm is None and rng.random() < settings.mix.paints
    return _painted(planned, rng, settings) if paints else planned


def _painted(planned: Planned, rng: random.Random, settings: Settings) -> Planned:
    """Turn a request for text into a request for images; some of these are equal."""
    is_long = planned.behaviour in ("cancel", "follow", "resubmit_during")
    params = ImageParams(
        rng.choice(painted_sizes(settings)),
        rng.choice([1, 1, 2]),
        30 if is_long else rng.choice([5, 9]),
        rng.choice([1.0, 2.5]),
        seed=rng.randrange(3),
    )
    prompt = f"a {rng.choice(_COLORS)} {rng.choice(_SHAPES)} on white"
    request = replace(
        planned.request,
        messages=None,
        sampling_params=UNSET,
        prompt=prompt,
        image=params,
        outputs=[PAINTED],
    )
    return replace(planned, request=request, http=False)


def _spoken(planned: Planned, rng: random.Random, settings: Settings) -> Planned:
    """Turn a request for text into a request for a speech."""
    request = planned.request
    if planned.http or rng.random() < settings.mix.given_text:
        text = " ".join(rng.choices(WORDS, k=rng.randint(2, 12)))
        request = replace(
            request, messages=None, sampling_params=UNSET, given_text=text, outputs=[AUDIO]
        )
    else:
        sampling = request.sampling_params
        assert isinstance(sampling, SamplingParams)
        low, high = settings.max_tokens
        sampling = replace(sampling, n=1, max_tokens=rng.randint(low, high))
        request = replace(request, sampling_params=sampling, outputs=["text", AUDIO])
    return replace(planned, request=request, streamed=True)


def make_requests(settings: Settings) -> list[Planned]:
    return [make_request(settings, index) for index in range(settings.requests)]


def _pick_behaviour(rng: random.Random, mix: Mix) -> tuple[Behaviour, int | None]:
    """Return a behaviour, and for a harmful request the seed by which it does harm."""
    at = rng.random()
    shares: list[tuple[float, Behaviour, int | None]] = [
        (mix.cancel, "cancel", None),
        (mix.resubmit_during, "resubmit_during", None),
        (mix.resubmit_after, "resubmit_after", None),
        (mix.follow, "follow", None),
        (mix.deadline, "deadline", None),
        (mix.kills, "harm", fake_model.KILLS_SEED),
        (mix.raises, "harm", fake_model.RAISES_SEED),
        (mix.hangs, "harm", fake_model.HANGS_SEED),
    ]
    for share, behaviour, harm in shares:
        if at < share:
            return behaviour, harm
        at -= share
    return "plain", None


def _sampling(
    rng: random.Random, settings: Settings, behaviour: Behaviour, harm: int | None
) -> dict[str, object]:
    low, high = settings.max_tokens
    max_tokens, num_choices = rng.randint(low, high), rng.choice([1, 1, 2, 3])
    params: dict[str, object] = {
        "max_tokens": max_tokens,
        "n": min(num_choices, settings.max_choices),
    }
    kind = rng.random()
    if kind < 0.4:
        params["temperature"] = 0.0
    else:
        params["temperature"] = rng.choice([0.7, 1.0])
        if kind < 0.8:
            params["seed"] = rng.randrange(2**31)
    if rng.random() < settings.stops:
        params["stop"] = rng.sample(_STOPS, rng.randint(1, 3))
    if behaviour in ("deadline", "cancel"):
        # These are far more tokens than there is time for.
        params |= {"max_tokens": 900, "ignore_eos": True, "stop": []}
    elif behaviour in ("resubmit_during", "follow"):
        params |= {"max_tokens": high, "ignore_eos": True, "stop": []}
    elif settings.engine == "demo" and rng.random() < 0.5:
        # The model ends its own answers after a few words.
        params["ignore_eos"] = True
    if harm is not None:
        params |= {"temperature": 1.0, "seed": harm}
    return params


def _content(rng: random.Random, settings: Settings) -> str | list[ContentPart]:
    text = " ".join(rng.choices(WORDS, k=rng.choice([3, 8, 20, 60])))
    if rng.random() >= settings.mix.images:
        return text
    if settings.mix.sounds and rng.random() < settings.mix.sounds:
        # Not at the top: PyAV encodes these clips, and few runs have any.
        from ops.chaos import sounds

        return [sounds.make_part(rng), TextPart(text)]
    if settings.mix.clips and rng.random() < settings.mix.clips:
        return [clips.make_part(rng), TextPart(text)]
    files = sorted(path for path in IMAGES.iterdir() if path.suffix != ".json")
    chosen = rng.sample(files, rng.choice([1, 1, 1, 2]))
    # Bytes after the end of an image file make another file of the same image.
    tails = [
        str(rng.randrange(NUM_VARIANTS)) if settings.renderer == "fake" else "" for _ in chosen
    ]
    urls = [data_url(path, tail) for path, tail in zip(chosen, tails, strict=True)]
    return [*(ImagePart(ImageURL(url)) for url in urls), TextPart(text)]


def data_url(path: Path, tail: str) -> str:
    data = base64.b64encode(path.read_bytes() + tail.encode()).decode()
    return f"data:image/{path.suffix[1:]};base64,{data}"
