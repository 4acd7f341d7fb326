"""The compose cluster keeps its promises, checked on its files without containers."""

import functools
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ops.cluster import compose as containers
from ops.cluster.checks import BLOB_PORT, ENGINE_GRACE_S, connections
from ops.cluster.compose import KEYS, ONCE, PROXY, Container
from shared.bus.bus import Bus
from shared.bus.embedded_server import find_binary, free_port
from shared.bus.login import Login, seed_file
from shared.config.parsing import parse_config
from shared.config.schema import Config, DeviceConfig
from shared.errors import Unavailable
from shared.protocol.permissions import METRICS, OPERATOR
from shared.stage.pipelines import default_stage, pipelines_of
from workers.keyring import Keyring
from workers.pools import pools_of
from workers.roles import POOL, all_roles, section_of
from workers.supervisor.supervisor import STOP_GRACE_S

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "compose"
BROKERS = ("nats-0", "nats-1", "nats-2")
TALKER = "talker"
"""An engine for a second stage of its model."""
POOL_ROLES = "${POOL_ROLES:-engine}"
COMMANDS = {TALKER: ["engine", "--stage", TALKER], POOL: [POOL, "--roles", POOL_ROLES]}
"""Arguments of workers in services with other names than their role."""
POOL_GRACE_S = 40.0
# Time between the end of the drain and of the process, such as transfers of payloads.
AFTER_DRAIN_S = 5.0


@functools.cache
def read(name: str) -> dict[str, Any]:
    loaded = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def services() -> dict[str, dict[str, Any]]:
    base: dict[str, dict[str, Any]] = read("docker-compose.yml")["services"]
    return base | {name: base.get(name, {}) | s for name, s in scaling_services().items()}


def scaling_services() -> dict[str, dict[str, Any]]:
    scaling: dict[str, dict[str, Any]] = read("docker-compose.autoscale.yml")["services"]
    return scaling


def workers() -> dict[str, dict[str, Any]]:
    others = (*BROKERS, *ONCE, METRICS, PROXY)
    return {name: s for name, s in services().items() if name not in others}


def config() -> Config:
    return parse_config((FOLDER / "pagemill.yaml").read_text(encoding="utf-8"), {}, "pagemill.yaml")


# -- the compose file -----------------------------------------------------------------------------


def test_every_container_has_no_more_rights_than_it_needs() -> None:
    for name, service in services().items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["init"] is True, name
        assert "privileged" not in service, name
        assert "user" not in service, name
    assert re.search(r"^USER 10001:10001$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)


def test_the_proxy_is_the_only_door() -> None:
    networks = read("docker-compose.yml")["networks"]
    assert networks == {"bus": {"internal": True}, "front": {"internal": True}, "door": {}}
    special = {"agent": ["bus", "door"], "gateway": ["bus", "front"], PROXY: ["front", "door"]}
    for name, service in services().items():
        assert ("ports" in service) == (name == PROXY), name
        if name not in ONCE:
            assert service["networks"] == special.get(name, ["bus"]), name
    (port,) = services()[PROXY]["ports"]
    assert port.startswith("127.0.0.1:")
    proxy = (FOLDER / "haproxy.cfg").read_text(encoding="utf-8")
    assert f"bind :{port.rpartition(':')[2]}\n" in proxy
    # A server for each gateway, in both backends.
    assert proxy.count(f"server-template gateway 8 gateway:{config().gateway.port}\n") == 2


def test_the_proxy_does_not_end_a_silent_stream() -> None:
    proxy = (FOLDER / "haproxy.cfg").read_text(encoding="utf-8")
    for side in ("client", "server"):
        (hours,) = re.findall(rf"^  timeout {side} (\d+)h$", proxy, re.MULTILINE)
        assert int(hours) * 3600 > config().delivery.max_timeout_s


def test_no_container_fills_the_machine() -> None:
    """Neither with its log, nor with its memory or a file system in it, nor with its volumes."""
    for name, service in services().items():
        assert service["logging"]["options"] == {"max-size": "20m", "max-file": "5"}, name
        assert "mem_limit" in service, name
        for mount in service.get("tmpfs", []):
            assert "size=" in mount, name
        # The image has a volume at /data.
        places = [*service.get("tmpfs", []), *(v.partition(":")[2] for v in service["volumes"])]
        assert any(place.startswith("/data") for place in places) == (name != PROXY), name
    for service in read("docker-compose.gpu.yml")["services"].values():
        assert all("size=" in mount for mount in service["tmpfs"])


def test_images_have_the_version_as_tag() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [file.read_text(encoding="utf-8") for file in FOLDER.glob("docker-compose*.yml")]
    texts.append((FOLDER / ".env").read_text(encoding="utf-8"))
    tags = re.findall(r"IMAGE(?::-|=)[a-z-]+:?([^}\s]*)", "".join(texts))
    assert len(tags) == 5
    assert set(tags) == {project["version"]}


def test_every_role_has_separate_containers() -> None:
    assert {role.name for role in all_roles()} <= workers().keys()
    for name, service in workers().items():
        assert service["command"] == ["worker", *COMMANDS.get(name, [name])]
    assert {name: s.get("scale", 1) for name, s in workers().items()}.items() >= {
        ("coordinator", 2),
        ("renderer", 2),
        ("gateway", 2),
        # The pool has the engines.
        ("engine", 0),
    }
    assert "scale" not in read("docker-compose.yml")["services"]["engine"]
    assert services()["encoder"]["profiles"] == ["encoder"]


def test_each_stage_of_a_speech_has_a_service_that_serves_it() -> None:
    text = (ROOT / "ops" / "demo_voice" / "pagemill.yaml").read_text(encoding="utf-8")
    pools = """
scale:
  pools:
  - {role: engine, max: 1}
  - {role: engine, stage: talker, max: 1}
  - {role: generator, stage: code2wav, max: 1}
"""
    speaking = parse_config(text + pools, {}, "pagemill.yaml")
    pipelines = pipelines_of(speaking)
    served: dict[str, str] = {}
    for name, service in workers().items():
        _, role, *rest = service["command"]
        if role == POOL:
            continue
        served[name] = rest[-1] if rest else default_stage(pipelines, role, "demo")
    for stage in pipelines["demo"].stages:
        assert stage.name in served.values()
    for pool in pools_of(speaking).by_name.values():
        assert pool.stage in served.values()
    assert services()[TALKER]["profiles"] == ["speech"]
    assert "speech" in services()["generator"]["profiles"]


def test_a_stopped_worker_has_the_time_to_drain() -> None:
    """Compose kills after ten seconds by default, in the middle of a drain."""
    assert config().delivery.drain_s + AFTER_DRAIN_S <= ENGINE_GRACE_S
    assert config().delivery.drain_s + STOP_GRACE_S + AFTER_DRAIN_S <= POOL_GRACE_S
    # A gateway that stops finishes its answers.
    gateway_s = float(services()["gateway"]["environment"]["PAGEMILL_DELIVERY__DRAIN_S"])
    assert gateway_s >= config().delivery.default_timeout_s
    graces = {POOL: POOL_GRACE_S, "gateway": gateway_s + 10}
    for name, service in workers().items():
        grace_s = graces.get(name, ENGINE_GRACE_S)
        assert service["stop_grace_period"] == f"{grace_s:.0f}s", name
        assert "stop_signal" not in service, name
    for name in BROKERS:
        assert services()[name]["stop_signal"] == "SIGUSR2"
        lame_duck = re.search(r'lame_duck_duration: "(\d+)s"', member_config())
        assert lame_duck is not None
        assert int(services()[name]["stop_grace_period"].rstrip("s")) > int(lame_duck[1])


def test_health_checks_ask_the_configured_port() -> None:
    address = config().metrics
    assert address.listen == "0.0.0.0"
    for name, service in workers().items():
        assert f"127.0.0.1:{address.port}/ready'" in service["healthcheck"]["test"][-1], name
    for name in BROKERS:
        assert "127.0.0.1:8222/healthz" in services()[name]["healthcheck"]["test"][-1]


def test_servers_and_configuration_name_one_another() -> None:
    nats = config().nats
    assert nats.url == ",".join(f"nats://{name}:4222" for name in BROKERS)
    assert nats.replicas == len(BROKERS)
    for name in BROKERS:
        assert services()[name]["environment"]["NATS_NAME"] == name
        assert f"@{name}:6222" in services()[name]["entrypoint"][-1]
        assert f"{name}:/data" in services()[name]["volumes"]
    assert read("docker-compose.yml")["volumes"].keys() >= {*BROKERS, "secrets"}
    assert config().blobs.port == BLOB_PORT


def test_no_file_has_a_secret() -> None:
    """The keys and the brokers' own password are in files, which the first start makes."""
    assert config().nats.keys == KEYS
    assert f"include ../..{KEYS}/accounts.conf" in member_config()
    for name, service in services().items():
        for variable in service.get("environment", {}):
            assert "PASSWORD" not in variable, name
    assert set(re.findall(r"password: (\S+?)[, }]", member_config())) == {"$NATS_PASSWORD"}


def test_each_container_has_the_key_of_its_role_alone() -> None:
    def keys_of(service: dict[str, Any]) -> list[str]:
        return [mount for mount in service.get("volumes", []) if re.match("keys-|secrets:", mount)]

    for name, service in workers().items():
        _, role, *_ = service["command"]
        assert keys_of(service) == [f"keys-{role}:{KEYS}:ro"], name
    for name in BROKERS:
        assert keys_of(services()[name]) == [f"keys-brokers:{KEYS}:ro"]
    own = {name: [f"keys-{name}:{KEYS}:ro"] for name in (OPERATOR, METRICS)}
    for name, expected in (own | {"pull": []}).items():
        assert keys_of(services()[name]) == expected, name


def test_a_pool_has_the_keys_of_the_roles_that_it_starts() -> None:
    secrets = services()["secrets"]
    assert secrets["environment"]["POOL_ROLES"] == POOL_ROLES
    default = POOL_ROLES.removeprefix("${POOL_ROLES:-").removesuffix("}")
    assert {pool.spec.role for pool in pools_of(config()).by_name.values()} == {default}
    assert config().scale.actuator == "supervisor"
    assert services()[POOL]["environment"] == {"PAGEMILL_BLOBS__PORT": "0"}


def test_the_keys_of_all_roles_are_in_separate_volumes() -> None:
    identities = [*(role.name for role in all_roles()), OPERATOR, METRICS]
    volumes = {f"keys-{name}" for name in (*identities, "brokers")}
    mounts = {f"{volume}:/run/keys/{volume.removeprefix('keys-')}" for volume in volumes}
    assert {*services()["secrets"]["volumes"]} == {
        *(mount for mount in workers()["engine"]["volumes"] if "pagemill.yaml" in mount),
        "secrets:/run/secrets",
        *mounts,
    }
    assert read("docker-compose.yml")["volumes"].keys() == {*BROKERS, "secrets", *volumes}
    # A volume whose mount point the image does not have would belong to root.
    (roles,) = re.findall(r'^ARG KEYS="(.*)"$', (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    assert {f"keys-{name}" for name in roles.split()} == volumes


def test_every_role_with_devices_has_an_image_and_a_card_for_gpus() -> None:
    override, text = read("docker-compose.gpu.yml")["services"], "models: {demo: {path: demo}}"
    dockerfile = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    sections = {role.name: getattr(config(), section_of(role.name), None) for role in all_roles()}
    roles = {name for name, section in sections.items() if isinstance(section, DeviceConfig)}
    assert set(override) == roles | {TALKER}
    for name, service in override.items():
        arguments = service["build"]["args"]
        assert all(f"ARG {argument}=" in dockerfile for argument in arguments)
        assert set(arguments["EXTRA"].split()) <= project["optional-dependencies"].keys()
        section = section_of(services()[name]["command"][1])
        settings = parse_config(text, service["environment"], "pagemill.yaml")
        assert getattr(settings, section).device == "cuda"
        # Docker gives every container with a `count` the same first cards.
        (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert "count" not in devices
        assert re.fullmatch(rf"\$\{{{name.upper()}_GPU:-[01]}}", *devices["device_ids"])


@pytest.mark.parametrize(
    ("offline", "backend", "extras", "options"),
    [
        ("0", "cpu", "", "--extra otel --torch-backend cpu"),
        ("0", "", "gpu diffusers", "--extra otel --extra gpu --extra diffusers"),
        ("1", "cpu", "gpu", "--extra otel --extra gpu"),
    ],
)
def test_an_image_has_the_chosen_extras_and_build_of_torch(
    offline: str, backend: str, extras: str, options: str
) -> None:
    """uv would look for a backend in an index of PyTorch, and takes no empty one."""
    lines = (FOLDER / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    (line,) = (line for line in lines if "--requirement pyproject.toml" in line)
    command = line.removeprefix("RUN ").replace("/uv/bin/uv", "echo")
    variables = {"UV_OFFLINE": offline, "TORCH_BACKEND": backend, "EXTRA": extras}
    done = subprocess.run(
        ["sh", "-c", command], env=variables, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().endswith(f"--requirement pyproject.toml {options}")
    # uv itself would read a variable of this name, also where it is empty.
    assert not any("ARG UV_TORCH_BACKEND" in line for line in lines)


def test_no_container_has_the_socket_of_the_docker_engine() -> None:
    """It is root of the machine."""
    assert "docker.sock" not in (FOLDER / "docker-compose.yml").read_text(encoding="utf-8")
    assert "docker.sock" not in str(scaling_services())


@pytest.mark.parametrize("overlay", ["docker-compose.gpu.yml", "docker-compose.autoscale.yml"])
def test_compose_accepts_the_files(overlay: str) -> None:
    try:
        words = containers.find_compose()
    except containers.NotPossible:
        pytest.skip("needs docker compose")
    done = subprocess.run(
        [*words, "--file", "docker-compose.yml", "--file", overlay, "config", "--quiet"],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# -- the broker's configuration -------------------------------------------------------------------


def member_config() -> str:
    return (FOLDER / "nats-member.conf").read_text(encoding="utf-8")


@pytest.fixture
def member(tmp_path: Path) -> Iterator[int]:
    """The port of a started server of a cluster, whose clients need keys."""
    port = free_port()
    keyring = Keyring(tmp_path / "keys")
    keyring.complete()
    text = member_config().replace("0.0.0.0:8222", f"127.0.0.1:{free_port()}")
    text = text.replace("port: 6222", f"port: {free_port()}").replace("0.0.0.0", "127.0.0.1")
    text = text.replace("../../run/secrets/keys", "keys")
    file = tmp_path / "nats-member.conf"
    file.write_text(text)
    shutil.copy(FOLDER / "nats.conf", tmp_path)
    env = os.environ | {
        "NATS_NAME": "nats-0",
        "NATS_PORT": str(port),
        "NATS_STORE_DIR": f'"{tmp_path}/store"',
        "NATS_PASSWORD": "pm12e45",
        "NATS_ROUTES": "['nats://pagemill:pm12e45@127.0.0.1:1']",
    }
    log = (tmp_path / "log").open("wb")
    server = subprocess.Popen([find_binary(), "-c", str(file)], env=env, stdout=log, stderr=log)
    try:
        # A probe of an unused port may get this port as its own, and would connect to itself.
        while "Server is ready" not in (tmp_path / "log").read_text():
            assert server.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.01)
        yield port
    finally:
        server.kill()
        server.wait()
        log.close()


async def test_a_member_asks_for_a_key(member: int, tmp_path: Path) -> None:
    url = f"nats://127.0.0.1:{member}"
    bus = await Bus.connect(Login(url, "engine", seed_file(tmp_path / "keys", "engine")), "test")
    await bus.close()
    for login in (url, url.replace("//", "//pagemill:pm12e45@")):
        with pytest.raises(Unavailable, match="refuses this login"):
            await Bus.connect(Login(login), "test", 0.3)


# -- the acceptance test --------------------------------------------------------------------------


def test_without_a_container_engine_the_acceptance_test_is_skipped(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ops.cluster"],
        env={"PATH": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "cluster: skipped: there is no command `docker`\n"
    assert done.returncode == 0, done.stderr


def test_open_connections_to_a_port_are_counted() -> None:
    table = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid
   0: 050012AC:23F0 060012AC:9C40 01 00000000:00000000 00:00000000 00000000 10001
   1: 050012AC:9C42 060012AC:23F0 01 00000000:00000000 00:00000000 00000000 10001
   2: 050012AC:9C44 070012AC:23F0 06 00000000:00000000 00:00000000 00000000 10001
   3: 050012AC:9C46 070012AC:107E 01 00000000:00000000 00:00000000 00000000 10001
"""
    assert connections(table, 0x23F0) == 1


def test_superfluous_rights_of_a_container_are_reported() -> None:
    host = {
        "ReadonlyRootfs": True,
        "CapDrop": ["ALL"],
        "CapAdd": None,
        "SecurityOpt": ["no-new-privileges:true"],
        "Init": True,
    }
    right = {"HostConfig": host, "Config": {"User": "10001:10001"}}
    assert Container("1", "engine", right).faults() == []
    wrong = {
        "HostConfig": {**host, "ReadonlyRootfs": False, "CapAdd": ["NET_ADMIN"]},
        "Config": {"User": ""},
    }
    assert len(Container("1", "engine", wrong).faults()) == 3
    assert containers.FILE.is_file()


def test_the_image_has_all_files_of_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    copied = re.findall("^COPY (.+) ", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    sources = [Path(source) for line in copied for source in line.split()]
    names = re.findall("^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    for name in [*wheel["packages"], *wheel["force-include"]]:
        assert any(Path(name).is_relative_to(source) for source in sources), name
        assert name in names
