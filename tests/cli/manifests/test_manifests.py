"""Manifests hold against the strict schemas of Kubernetes and KEDA, and against the product."""

import json
import os
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from shared.config.parsing import parse_config
from shared.config.schema import Config
from shared.errors import ConfigError
from shared.protocol import subjects
from shared.protocol.permissions import ACCOUNT
from shared.stage.pipelines import pipelines_of
from tests import preloaded
from workers.cli.manifests.cluster import make_manifests, sizes_of
from workers.cli.manifests.output import to_chart, to_yaml
from workers.cli.manifests.target import Manifest, Scaling, Target, key_secret
from workers.pools import MAX_NAME_LEN, deployment_name, pools_of
from workers.roles import WorkerSpec
from workers.settings import login_of

ROOT = Path(__file__).parent.parent.parent.parent
SCHEMAS = Path(__file__).parent / "schemas"
CONFIG = """
models:
  qwen2-vl: {path: /models/qwen2-vl, dtype: bfloat16, tower: encoder}
  Org/Other.Model: {path: /models/other}
gateway: {allow_anonymous: true}
engine: {device: cuda}
delivery: {drain_s: 45}
"""
POOLS = """
scale:
  pools:
    - {role: renderer, min: 2, max: 4}
    - {role: encoder, model: qwen2-vl, max: 4}
    - {role: engine, model: qwen2-vl, max: 8}
    - {role: engine, model: Org/Other.Model, min: 1, max: 1}
"""
SCALED = {"renderer", "encoder-qwen2-vl", "engine-qwen2-vl"}
SPEECH = """
models:
  demo:
    path: /models/demo
    prefill: prefill
    stages:
      talker:
        role: engine
        path: /models/voice/talker
        inputs: {text: {from: engine, function: speech, mode: stream}}
        output: {name: codes, kind: codes}
      code2wav:
        role: generator
        path: /models/voice
        inputs: {codes: {from: talker, function: follow, mode: stream}}
        output: {name: audio, kind: audio}
gateway: {allow_anonymous: true}
engine: {device: cuda}
scale:
  pools:
    - {role: prefill, max: 2}
    - {role: engine, max: 4}
    - {role: engine, stage: talker, max: 2}
    - {role: generator, stage: code2wav, max: 3}
"""


def parse(text: str = CONFIG + POOLS) -> Config:
    return parse_config(text, {}, "test")


def make(scaling: Scaling, text: str = CONFIG + POOLS) -> list[Manifest]:
    config = parse(text)
    return make_manifests(config, text, sizes_of(config, "test"), Target(scaling=scaling))


def test_an_engine_has_a_gpu_for_each_rank() -> None:
    text = CONFIG.replace("{device: cuda}", "{device: cuda, tensor_parallel: 4}") + POOLS
    limits = {
        manifest["metadata"]["name"]: container.get("resources")
        for manifest in make("none", text)
        if manifest["kind"] == "Deployment"
        for container in manifest["spec"]["template"]["spec"]["containers"]
    }
    assert limits["engine-qwen2-vl"] == {"limits": {"nvidia.com/gpu": 4}}
    assert limits["renderer"] is None


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {item["metadata"]["name"]: item for item in manifests if item["kind"] == kind}


def containers(manifests: list[Manifest]) -> dict[str, Any]:
    return {
        name: item["spec"]["template"]["spec"]["containers"][0]
        for name, item in of_kind(manifests, "Deployment").items()
    }


def check_against_schemas(manifest: Manifest, version: str) -> None:
    file = "keda" if manifest["apiVersion"].startswith("keda") else version
    schemas = json.loads((SCHEMAS / f"{file}.json").read_text())
    schema = schemas[manifest["kind"]] | {"$defs": schemas.get("$defs", {})}
    jsonschema_rs.validate(schema, manifest)


@pytest.mark.parametrize("version", ["kubernetes-1.36", "kubernetes-1.37"])
@pytest.mark.parametrize("scaling", ["keda", "pagemill", "none"])
def test_manifests_hold_against_strict_schemas(scaling: Scaling, version: str) -> None:
    for manifest in yaml.safe_load_all(to_yaml(make(scaling))):
        check_against_schemas(manifest, version)


def test_the_schemas_refuse_a_misspelt_field() -> None:
    for manifest in make("keda"):
        if manifest["kind"] in ("Deployment", "ScaledObject"):
            manifest["spec"]["replica"] = 1
            with pytest.raises(jsonschema_rs.ValidationError):
                check_against_schemas(manifest, "kubernetes-1.37")


def test_triggers_name_the_consumers_that_workers_pull_from() -> None:
    served = {
        subjects.stage_consumer(stage.name, model, lane)
        for model, pipeline in pipelines_of(parse()).items()
        for stage in pipeline.stages
        for lane in subjects.LANES
    }
    named = {
        trigger["metadata"]["consumer"]: trigger["metadata"]
        for item in of_kind(make("keda"), "ScaledObject").values()
        for trigger in item["spec"]["triggers"]
    }
    unscaled = {
        subjects.stage_consumer("engine", "Org/Other.Model", lane) for lane in subjects.LANES
    }
    assert set(named) == served - unscaled
    assert {data["stream"] for data in named.values()} == {subjects.STAGES_STREAM}
    interactive, batch = [
        int(named[subjects.stage_consumer("engine", "qwen2-vl", lane)]["lagThreshold"])
        for lane in subjects.LANES
    ]
    assert (interactive, batch) == (16, 64)


@pytest.mark.parametrize("version", ["kubernetes-1.36", "kubernetes-1.37"])
def test_each_stage_of_a_speech_is_a_pool_with_separate_queues(version: str) -> None:
    manifests = make("keda", SPEECH)
    for manifest in manifests:
        check_against_schemas(manifest, version)
    stages = {
        "prefill-demo": "prefill",
        "engine-demo": "engine",
        "engine-demo-talker": "talker",
        "generator-demo-code2wav": "code2wav",
    }
    scaled = of_kind(manifests, "ScaledObject")
    assert {
        name: [trigger["metadata"]["consumer"] for trigger in item["spec"]["triggers"]]
        for name, item in scaled.items()
    } == {
        name: [subjects.stage_consumer(stage, "demo", lane) for lane in subjects.LANES]
        for name, stage in stages.items()
    }
    pods = containers(manifests)
    assert stages.keys() <= pods.keys()
    assert pods["generator-demo-code2wav"]["args"][:2] == ["worker", "generator"]
    assert pods["generator-demo-code2wav"]["args"][-2:] == ["--stage", "code2wav"]
    assert pods["engine-demo-talker"]["args"][-2:] == ["--stage", "talker"]
    assert "--stage" not in pods["engine-demo"]["args"]
    # Prefill workers and talkers have the engines' device, and generators compute without one.
    on_gpus = {name for name, container in pods.items() if "resources" in container}
    assert on_gpus == stages.keys() - {"generator-demo-code2wav"}
    names = of_kind(make("pagemill", SPEECH), "Role")["pagemill-autoscaler"]["rules"][0]
    assert set(names["resourceNames"]) == stages.keys()


@pytest.mark.parametrize("version", ["kubernetes-1.36", "kubernetes-1.37"])
def test_a_pool_with_slots_is_scaled_by_the_sum_of_its_queues(version: str) -> None:
    text = CONFIG.replace("tower: encoder", "tower: encoder, slots: 3") + POOLS
    manifests = make("keda", text)
    for manifest in manifests:
        check_against_schemas(manifest, version)
    spec = of_kind(manifests, "ScaledObject")["engine-qwen2-vl"]["spec"]
    consumers = [trigger["metadata"]["consumer"] for trigger in spec["triggers"]]
    assert consumers == [
        subjects.stage_consumer("engine", "qwen2-vl", lane, slot)
        for lane in subjects.LANES
        for slot in (None, 0, 1, 2)
    ]
    names = {trigger["name"]: 8.0 for trigger in spec["triggers"]}
    modifiers = spec["advanced"]["scalingModifiers"]
    assert (modifiers["target"], modifiers["metricType"]) == ("16", "AverageValue")
    # Four queues of 8 tasks, and four of the batch lane, where four tasks count as one.
    assert eval(modifiers["formula"], names) == 4 * 8 + 4 * 8 / 4
    others = of_kind(manifests, "ScaledObject")["renderer"]["spec"]
    assert "scalingModifiers" not in others["advanced"]


def test_what_is_scaled_has_no_replicas() -> None:
    manifests = make("keda")
    scaled = of_kind(manifests, "ScaledObject")
    assert set(scaled) == SCALED
    for name, deployment in of_kind(manifests, "Deployment").items():
        assert ("replicas" in deployment["spec"]) != (name in scaled), name
    engine = scaled["engine-qwen2-vl"]["spec"]
    assert (engine["minReplicaCount"], engine["maxReplicaCount"]) == (0, 8)


def test_without_scaling_a_pool_has_its_min_and_at_least_one() -> None:
    deployments = of_kind(make("none"), "Deployment")
    sizes = {name: item["spec"]["replicas"] for name, item in deployments.items()}
    other = deployment_name(WorkerSpec("engine", "Org/Other.Model"))
    assert sizes == {
        "coordinator": 2,
        "renderer": 2,
        "encoder-qwen2-vl": 1,
        "engine-qwen2-vl": 1,
        other: 1,
        "gateway": 2,
        "agent": 2,
        "batcher": 2,
    }


def test_the_autoscaler_may_change_the_sizes_of_the_pools_alone() -> None:
    manifests = make("pagemill")
    (role,) = of_kind(manifests, "Role").values()
    rule, costs = role["rules"]
    assert costs == {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "patch"]}
    deployments = of_kind(manifests, "Deployment")
    pools = {deployment_name(pool.spec) for pool in pools_of(parse()).by_name.values()}
    assert set(rule.pop("resourceNames")) == pools
    assert {name for name, item in deployments.items() if "replicas" not in item["spec"]} == pools
    assert rule == {
        "apiGroups": ["apps"],
        "resources": ["deployments/scale"],
        "verbs": ["get", "patch"],
    }
    for name, item in deployments.items():
        pod = item["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] == (name == "autoscaler"), name
    env = {
        entry["name"]: entry.get("value") for entry in containers(manifests)["autoscaler"]["env"]
    }
    assert (
        parse_config(CONFIG, {k: v or "a" for k, v in env.items()}, "").scale.actuator
        == "kubernetes"
    )


@pytest.mark.parametrize("scaling", ["keda", "pagemill"])
@pytest.mark.parametrize("text", [CONFIG + POOLS, SPEECH])
def test_each_pod_has_the_key_of_its_role_alone(scaling: Scaling, text: str) -> None:
    manifests = make(scaling, text)
    chart = to_chart(manifests, Target(), "1.2.3")["templates/pagemill.yaml"]
    for documents in (manifests, list(yaml.safe_load_all(chart))):
        for name, item in of_kind(documents, "Deployment").items():
            pod = item["spec"]["template"]["spec"]
            role = item["metadata"]["labels"]["app.kubernetes.io/component"]
            (volume,) = [v for v in pod["volumes"] if "secret" in v]
            file = {"key": f"{role}.nk", "path": f"{role}.nk"}
            secret = {"secretName": f"pagemill-key-{role}", "items": [file], "defaultMode": 0o440}
            assert volume["secret"] == secret, name
            # The files have the group of the worker.
            assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
            (container,) = pod["containers"]
            (mount,) = [m for m in container["volumeMounts"] if m["name"] == volume["name"]]
            env = {entry["name"]: entry.get("value", "10.0.0.1") for entry in container["env"]}
            assert mount == {"name": "keys", "mountPath": "/keys", "readOnly": True}
            config = parse_config(text, env, "test")
            login = login_of(config, role)
            assert (login.seed_file, login.url) == (Path("/keys", file["path"]), config.nats.url)
            assert "Secret" not in str(container["env"])


def test_pods_get_no_rights_and_time_to_drain() -> None:
    for deployment in of_kind(make("keda"), "Deployment").values():
        pod = deployment["spec"]["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] == 55
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["enableServiceLinks"] is False
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_only_workers_on_a_gpu_ask_for_one() -> None:
    with_gpu = {name for name, pod in containers(make("keda")).items() if "resources" in pod}
    assert with_gpu == {deployment_name(WorkerSpec("engine", name)) for name in parse().models}


@pytest.mark.parametrize(
    ("devices", "resource"),
    [("[0, 1]", "nvidia.com/gpu"), ("[mig-1g.10gb+me]", "nvidia.com/mig-1g.10gb.me")],
)
def test_pods_ask_for_the_profile_of_their_devices(devices: str, resource: str) -> None:
    text = CONFIG.replace("device: cuda", f"device: cuda, devices: {devices}")
    assert containers(make("keda", text))["engine-qwen2-vl"]["resources"]["limits"] == {resource: 1}


def test_pods_with_devices_of_several_kinds_are_refused() -> None:
    text = CONFIG.replace("device: cuda", "device: cuda, devices: [mig-1g.10gb, 0]")
    with pytest.raises(ConfigError, match=r"engine.devices: all pods of a Deployment"):
        make("keda", text)


def test_the_settings_of_pods_are_settings_of_the_configuration() -> None:
    for container in containers(make("keda")).values():
        env = {entry["name"]: entry.get("value", "10.0.0.1") for entry in container["env"]}
        config = parse_config(CONFIG, env, "test")
        assert config.blobs.advertise == "10.0.0.1"
        assert config.nats.url == "nats://nats.pagemill:4222"
        assert config.gateway.listen == config.metrics.listen == config.blobs.listen == "0.0.0.0"
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["metrics"] == config.metrics.port
        assert ports["blobs"] == config.blobs.port
        assert ports.get("http", config.gateway.port) == config.gateway.port


PARTS = st.text(
    st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=80
)


@given(PARTS, PARTS)
def test_names_are_labels_and_differ(a: str, b: str) -> None:
    first, second = [deployment_name(WorkerSpec("engine", model)) for model in (a, b)]
    assert (first == second) == (a == b)
    for name in (first, second):
        assert len(name) <= MAX_NAME_LEN
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
        assert name[0].isalpha()
        assert name[-1].isalnum()


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        (
            "models: {demo: {path: /srv/demo}}\ngateway: {allow_anonymous: true}",
            "models.demo.path",
            "/srv/demo is not below /models, where pods have the claim of the models",
        ),
        (
            "models: {demo: {path: /models/../demo}}\ngateway: {allow_anonymous: true}",
            "models.demo.path",
            "/models/../demo is not below /models, where pods have the claim of the models",
        ),
        (
            "models: {demo: {path: /models/demo}}\n"
            "nats: {url: 'nats://me:secret@a:4222'}\ngateway: {allow_anonymous: true}",
            "nats.url",
            "it contains a user or a password, which would be in a ConfigMap: remove them, because"
            " pods log in with the key of their role",
        ),
        (
            "models: {demo: {path: /models/demo}}\n"
            "nats: {url: 'nats://a:4222,nats://me:secret@b:4222'}\n"
            "gateway: {allow_anonymous: true}",
            "nats.url",
            "it contains a user or a password, which would be in a ConfigMap: remove them, because"
            " pods log in with the key of their role",
        ),
        (
            "models: {demo: {path: /models/demo}}\n"
            "nats: {url: 'nats://a:4222', password_file: /run/password}\n"
            "gateway: {allow_anonymous: true}",
            "nats.password_file",
            "pods have no file /run/password: remove the setting, because pods log in with the key"
            " of their role, from a Secret",
        ),
        (
            "models: {demo: {path: /models/demo}}",
            "gateway.api_keys",
            "a gateway that others can reach needs at least one key: create it with `pagemill key`"
            " (or set gateway.allow_anonymous)",
        ),
    ],
)
def test_settings_that_cannot_hold_in_a_pod(text: str, field: str, message: str) -> None:
    config = parse(text)
    with pytest.raises(ConfigError) as raised:
        make_manifests(config, text, sizes_of(config, "test"), Target())
    assert str(raised.value) == f"{field}: {message}"
    assert raised.value.field == field


def test_braces_of_a_configuration_are_not_the_chart_s() -> None:
    text = CONFIG + "# {{ messages }}\n# image: pagemill\n"
    config = parse(text)
    files = to_chart(
        make_manifests(config, text, sizes_of(config, "test"), Target()), Target(), "1.2.3"
    )
    template = files["templates/pagemill.yaml"]
    assert '# {{ "{{" }} messages }}\n' in template
    assert "# image: pagemill\n" in template
    images = {pod["image"] for pod in containers(list(yaml.safe_load_all(template))).values()}
    assert images == {"{{ .Values.image }}"}
    assert yaml.safe_load(files["values.yaml"]) == {"image": "pagemill"}
    assert yaml.safe_load(files["Chart.yaml"])["appVersion"] == "1.2.3"


def test_the_command_writes_what_kubectl_applies(tmp_path: Path) -> None:
    file = tmp_path / "pagemill.yaml"
    file.write_text(CONFIG)
    env = dict(os.environ)
    done = preloaded.run("manifests", "--config", str(file), "--image", "here/pagemill:1", env=env)
    assert done.returncode == 0, done.stderr
    documents = list(yaml.safe_load_all(done.stdout))
    assert of_kind(documents, "ConfigMap")["pagemill"]["data"] == {"pagemill.yaml": CONFIG}
    assert {pod["image"] for pod in containers(documents).values()} == {"here/pagemill:1"}
    assert "nats.replicas is 1" in done.stderr
    chart = tmp_path / "chart"
    done = preloaded.run("manifests", "--config", str(file), "--chart", str(chart), env=env)
    assert (done.returncode, done.stdout) == (0, "")
    assert sorted(path.name for path in chart.rglob("*.yaml")) == [
        "Chart.yaml",
        "pagemill.yaml",
        "values.yaml",
    ]


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    done = preloaded.run("manifests", cwd=tmp_path)
    assert done.returncode != 0
    assert "no pagemill.yaml here" in done.stderr


def test_the_documented_brokers_have_the_settings_of_ours() -> None:
    page = (ROOT / "docs" / "operate" / "kubernetes.md").read_text()
    block = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert block is not None
    whole = yaml.safe_load(block[1])
    values = whole["config"]
    ours = (ROOT / "compose" / "nats.conf").read_text()
    merged, jetstream = values["merge"], values["jetstream"]
    for key, text in {
        **{key: merged[key] for key in ("max_payload", "max_pending", "ping_interval", "ping_max")},
        "sync_interval": jetstream["merge"]["sync_interval"],
        "max_file_store": jetstream["fileStore"]["maxSize"],
        "max_memory_store": jetstream["memoryStore"]["maxSize"],
    }.items():
        match = re.search(rf'^ *{key}: "?(.*?)"?$', ours, re.MULTILINE)
        assert match is not None, key
        assert str(text).strip("<> ") == match[1], key
    service = Target().nats_service
    assert service == "nats-headless"
    assert Target().nats_account == ACCOUNT
    assert merged["00$include"] == "../pagemill-accounts/accounts.conf"
    (mount,) = (patch["value"] for patch in whole["container"]["patch"])
    (volume,) = (patch["value"] for patch in whole["podTemplate"]["patch"])
    assert mount == {"name": volume["name"], "mountPath": "/etc/pagemill-accounts"}
    assert f"create configmap {volume['configMap']['name']} --from-file=keys/accounts.conf" in page
    assert f"create secret generic {key_secret('$role')} --from-file=keys/$role.nk" in page
