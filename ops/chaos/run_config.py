"""The product's configuration for a run, and the bounds that its checks apply."""

from collections.abc import Mapping
from pathlib import Path

from ops.chaos.checks.recorded_run import Bounds
from ops.chaos.fake_model import MAX_MODEL_LEN
from ops.chaos.gateway_api import api_key
from ops.chaos.plan import (
    AUDIO,
    CODES,
    MODEL,
    PAINTED,
    PAINTER,
    PAINTER_FOLDER,
    ROOT,
    TALKER,
    VOCODER,
    Scaled,
    Settings,
    painted_sizes,
)
from ops.harness.deployment import write_config
from shared.stage.graphs import PARTS
from workers.gateway.http import auth

EMBEDDINGS_TTL_S = 10.0
DEMO_MODEL = ROOT / "ops" / "demo_model"
HEARING_MODEL = ROOT / "ops" / "demo_hearing"
VOICE = ROOT / "ops" / "demo_voice"
RSS_MIB = {"coordinator": 128.0, "renderer": 900.0, "encoder": 1000.0, "engine": 1500.0}
FAKE_RSS_MIB = {"coordinator": 128.0, "gateway": 128.0, "renderer": 128.0, "engine": 256.0}
BATCHER_RSS_MIB = 150.0
VOCODER_RSS_MIB = 256.0


def write_run_config(settings: Settings, folder: Path, delivery: Mapping[str, int] = {}) -> Path:
    """Write the product's configuration for a run; return its path.

    `delivery` changes the section of this name.
    """
    limits = {
        "ack_wait_s": settings.ack_wait_s,
        "drain_s": settings.drain_s,
        "max_deliver": settings.max_deliver,
        "max_deaths": settings.max_deaths,
        "max_queued": settings.max_queued,
    }
    tree = {
        "models": {
            MODEL: {
                "path": str(_hearing_folder(folder) if settings.mix.sounds else DEMO_MODEL),
                # In float64, a sampled token depends on its own request alone.
                "dtype": "float64",
                "max_model_len": MAX_MODEL_LEN,
                "slots": settings.slots,
                "tower": "encoder" if settings.encoders else "engine",
                "local_tokens": settings.local_tokens,
                "sampling_defaults": {"temperature": 0.0, "max_tokens": 32},
                "stages": _speech_stages(settings) | _image_stages(settings, folder),
            }
        },
        "nats": {
            "replicas": 3 if settings.brokers >= 3 else 1,
            "keys": str(keys_folder(folder)) if settings.tenants else None,
        },
        "delivery": limits | dict(delivery),
        "batch": {"max_deaths": settings.max_deaths},
        "blobs": {
            "inline_kib": settings.inline_kib,
            "arena_mib": settings.arena_mib,
            "listen": "127.0.0.1" if settings.listen else None,
        },
        "embeddings": {"ttl_s": EMBEDDINGS_TTL_S},
        # Each step is stored, so that a death may fall between any two.
        "generator": {"threads": 1, "checkpoint_s": 0},
        "gateway": {
            "page": False,
            "api_keys": [
                {"name": tenant, "sha256": auth.digest(api_key(tenant))}
                for tenant in settings.tenants
            ],
        },
        "engine": {
            "tensor_parallel": settings.ranks,
            "threads": 1,
            "num_blocks": settings.num_blocks,
            "max_num_seqs": settings.max_num_seqs,
            "steps_ahead": settings.steps_ahead,
            # A rank that is stopped makes a step hang.
            "step_timeout_s": 5.0 if settings.ranks > 1 else 120.0,
            "tower_thread": settings.local_tokens > 0,
        },
        "scale": {"pools": [] if settings.scaled is None else [_pool_of(settings.scaled)]},
        "log_level": "warning",
    }
    return write_config(tree, folder)


def _hearing_folder(folder: Path) -> Path:
    """Make a folder of the demo model that hears, with a template that accepts images as well.

    Its vision tower is not trained, but it works.
    """
    model = folder / "hearing"
    model.mkdir()
    for file in HEARING_MODEL.iterdir():
        if file.is_file() and file.suffix != ".jinja":
            (model / file.name).symlink_to(file)
    template = (DEMO_MODEL / "chat_template.jinja").read_text()
    sound = "'<|audio_bos|><|AUDIO|><|audio_eos|>'"
    sound_branch = f"{{%- if part.type == 'audio' -%}}{{{{- {sound} -}}}}{{%- endif -%}}"
    begin = "{%- for part in content or [] -%}"
    assert begin in template
    (model / "chat_template.jinja").write_text(template.replace(begin, begin + sound_branch))
    return model


def keys_folder(folder: Path) -> Path:
    """Return the folder of the broker's keys, in the folder of a run."""
    return folder / "keys"


def is_fake(role: str, settings: Settings) -> bool:
    """Return whether the workers of a role run without a model."""
    if role == "renderer":
        return settings.renderer == "fake"
    return role in ("engine", TALKER, PAINTER) and settings.engine == "fake"


def _speech_stages(settings: Settings) -> dict[str, object]:
    """Return the stages of the demo voice, with short chunks, so that a speech has many."""
    if not settings.talkers:
        return {}
    return {
        TALKER: {
            "role": "engine",
            "path": str(VOICE / "talker"),
            "inputs": {"text": {"from": "engine", "function": "speech", "mode": "stream"}},
            "output": {"name": CODES, "kind": "codes"},
            # Without a seed the codes of the fake talker depend on the request's id.
            "sampling_defaults": {"temperature": 0.0, "max_tokens": settings.max_codes, "seed": 1},
            "voices": ["alloy"],
        },
        VOCODER: {
            "role": "generator",
            "path": str(VOICE),
            "inputs": {"codes": {"from": TALKER, "function": "follow", "mode": "stream"}},
            "output": {"name": AUDIO, "kind": "audio"},
            "chunks": {"first": [3, 5], "size": 8, "left": 2, "right": 2},
        },
    }


def _image_stages(settings: Settings, folder: Path) -> dict[str, object]:
    """Return the stages of a painter, with small images, which take little time."""
    if not settings.painters:
        return {}
    painter = PAINTER_FOLDER
    if settings.painter == "qwen-image":
        # It imports torch.
        from ops.harness.qwen_images import write

        painter = folder / settings.painter
        write(painter)
    parts: dict[str, object] = {
        part: {
            "role": "generator",
            "path": str(painter),
            "inputs": {carries: {"from": PAINTER, "function": "item", "mode": "fan_out"}},
        }
        for part, carries in PARTS.items()
        if settings.painter_parts
    }
    return parts | {
        PAINTER: {
            "role": "generator",
            "path": str(painter),
            "inputs": {"prompt": {"from": "request", "function": "paint"}},
            "output": {"name": PAINTED, "kind": "image"},
            "sizes": painted_sizes(settings),
        }
    }


def _pool_of(scaled: Scaled) -> dict[str, object]:
    fields = ("max", "per_engine", "idle_s", "start_timeout_s")
    return {"role": "engine", "min": 0, **{name: getattr(scaled, name) for name in fields}}


def bounds_of(settings: Settings) -> Bounds:
    """Return the bounds that the checks apply to a run."""
    fake = settings.engine == "fake"
    rss_mib = {
        "coordinator": FAKE_RSS_MIB["coordinator"],
        "renderer": (FAKE_RSS_MIB if settings.renderer == "fake" else RSS_MIB)["renderer"],
        "encoder": RSS_MIB["encoder"],
        "gateway": FAKE_RSS_MIB["gateway"],
        "batcher": BATCHER_RSS_MIB,
        "engine": (FAKE_RSS_MIB if fake else RSS_MIB)["engine"],
        TALKER: (FAKE_RSS_MIB if fake else RSS_MIB)["engine"],
        VOCODER: VOCODER_RSS_MIB,
        **dict.fromkeys((PAINTER, *PARTS), VOCODER_RSS_MIB if fake else RSS_MIB["engine"]),
    }
    # Readers map the arenas of owners, and have buffers of the same size to receive into.
    arenas_mib = settings.arena_mib * (settings.renderers + settings.encoders + 1)
    for role in ("renderer", "encoder", "engine", TALKER, PAINTER, *PARTS):
        rss_mib[role] += arenas_mib
    return Bounds(
        recovery_s=5.0 if fake else 15.0,
        broker_recovery_s=3.0 if settings.brokers == 1 else 10.0,
        rss_mib=rss_mib,
        foreign_peers=settings.ranks - 1,
    )
