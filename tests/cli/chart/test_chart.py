"""The Helm chart holds against the strict schemas of Kubernetes and KEDA, and the product."""

import json
import multiprocessing
import os
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

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
from tests.cli.chart import rendering
from workers.cli.chart_values import make_values
from workers.cli.commands.kubernetes import CHART
from workers.pools import MAX_NAME_LEN, deployment_name, pools_of
from workers.roles import WorkerSpec
from workers.settings import login_of

ROOT = Path(__file__).parent.parent.parent.parent
Manifest = dict[str, Any]
Scaling = Literal["keda", "pagemill", "none"]
HELM = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
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


@pytest.fixture(autouse=True, scope="module")
def helm() -> Iterator[None]:
    yield
    HELM.shutdown()


def values_of(text: str = CONFIG + POOLS, **values: Any) -> dict[str, Any]:
    return make_values(parse(text), text, "test") | {"models": {"claim": "models"}} | values


def make(
    scaling: Scaling, text: str = CONFIG + POOLS, *, is_install: bool = True, **values: Any
) -> list[Manifest]:
    return rendered(values_of(text, scaling=scaling, **values), is_install=is_install)


def rendered(values: dict[str, Any], *, is_install: bool = True) -> list[Manifest]:
    text, error = HELM.submit(rendering.try_render, values, is_install=is_install).result()
    assert error == ""
    return list(yaml.load_all(text, yaml.CSafeLoader))


def refusal(**values: Any) -> str:
    """Return the error of the chart for these values."""
    _, error = HELM.submit(rendering.try_render, values_of() | values).result()
    return error


def test_an_engine_has_a_gpu_for_each_rank() -> None:
    text = CONFIG.replace("{device: cuda}", "{device: cuda, tensor_parallel: 4}") + POOLS
    limits = {
        manifest["metadata"]["name"]: container.get("resources")
        for manifest in make("none", text)
        if manifest["kind"] == "Deployment"
        for container in manifest["spec"]["template"]["spec"]["containers"]
    }
    assert limits["engine-qwen2-vl"] == {"limits": {"nvidia.com/gpu": 4}}
    assert {"name": "shm", "mountPath": "/dev/shm"} in containers(make("none", text))[
        "engine-qwen2-vl"
    ]["volumeMounts"]
    assert limits["renderer"] is None


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {item["metadata"]["name"]: item for item in manifests if item["kind"] == kind}


def containers(manifests: list[Manifest]) -> dict[str, Any]:
    return {
        name: item["spec"]["template"]["spec"]["containers"][0]
        for name, item in of_kind(manifests, "Deployment").items()
    }


# Kinds of the operator of Prometheus, of which there is no schema here.
UNCHECKED = {"PodMonitor", "ServiceMonitor", "PrometheusRule"}
VERSIONS = ("kubernetes-1.36", "kubernetes-1.37")


@cache
def validator(file: str, kind: str) -> jsonschema_rs.Validator:
    schemas = json.loads((SCHEMAS / f"{file}.json").read_text())
    return jsonschema_rs.validator_for(schemas[kind] | {"$defs": schemas.get("$defs", {})})


def check_against_schemas(manifest: Manifest, schemas: str) -> None:
    file = "keda" if manifest["apiVersion"].startswith("keda") else schemas
    validator(file, manifest["kind"]).validate(manifest)


def check_all(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        for schemas in VERSIONS if manifest["kind"] not in UNCHECKED else ():
            check_against_schemas(manifest, schemas)
    names = [(item["kind"], item["metadata"]["name"]) for item in manifests]
    assert len(set(names)) == len(names)


RULE = {"whenUnsatisfiable": "DoNotSchedule", "maxSkew": 1, "topologyKey": "zone"}
TOLERATION = {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}
PEER = {"namespaceSelector": {"matchLabels": {"team": "web"}}}
PLACED = {
    "resources": {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"memory": "8Gi"}},
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [TOLERATION],
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [RULE],
    "priorityClassName": "high",
    "runtimeClassName": "nvidia",
    "serviceAccountName": "mine",
    "podAnnotations": {"a": "b"},
    "podLabels": {"team": "ml"},
    "env": [{"name": "HTTPS_PROXY", "value": "http://proxy"}],
    "envFrom": [{"secretRef": {"name": "tokens"}}],
    "volumes": [{"name": "more", "emptyDir": {}}],
    "volumeMounts": [{"name": "more", "mountPath": "/more"}],
    "startSeconds": 1801,
    "strategy": {"rollingUpdate": {"maxUnavailable": "50%"}},
}
MATRIX: dict[str, dict[str, Any]] = {
    "keda": {"scaling": "keda"},
    "autoscaler": {"scaling": "pagemill", "autoscaler": {"replicas": 1}},
    "fixed": {"scaling": "none", "createNamespace": True},
    "placed": {"worker": PLACED, "imagePullSecrets": [{"name": "registry"}]},
    "models": {"models": {"size": "200Gi", "storageClass": "fast"}},
    "volume": {"models": {"volume": {"csi": {"driver": "store.example", "readOnly": True}}}},
    "own brokers": {
        "nats": {"enabled": False, "url": "nats://a:4222", "monitoring": "a:8222"},
        "keys": {"create": False},
        "scaling": "keda",
    },
    "five brokers": {
        "nats": {
            "replicas": 5,
            "storageClass": "fast",
            "tolerations": [TOLERATION],
            "affinity": {"nodeAffinity": {}},
            "priorityClassName": "high",
        },
        "keys": {"tenants": ["acme", "Other_1"]},
    },
    "door": {
        "gateway": {
            "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
            "ingress": {
                "enabled": True,
                "className": "nginx",
                "hosts": ["a.example", "b.example"],
                "tls": [{"secretName": "tls", "hosts": ["a.example"]}],
            },
        }
    },
    "monitoring": {
        "monitoring": {
            "labels": {"release": "prometheus"},
            "serviceMonitor": True,
            "podMonitor": True,
            "rules": True,
            "dashboard": True,
        }
    },
    "network": {
        "networkPolicy": {"enabled": True, "gatewayFrom": [PEER], "metricsFrom": [PEER]},
    },
    "open network": {
        "networkPolicy": {"enabled": True, "open": []},
        "podDisruptionBudgets": False,
    },
}


@pytest.mark.parametrize("is_install", [True, False])
@pytest.mark.parametrize("name", MATRIX)
def test_manifests_hold_against_strict_schemas(name: str, is_install: bool) -> None:
    check_all(rendered(values_of(**MATRIX[name]), is_install=is_install))


def test_fields_that_kubernetes_does_not_know_are_noticed() -> None:
    for manifest in make("keda"):
        if manifest["kind"] in ("Deployment", "ScaledObject", "StatefulSet"):
            manifest["spec"]["replica"] = 1
            with pytest.raises(jsonschema_rs.ValidationError):
                check_against_schemas(manifest, "kubernetes-1.37")


@pytest.mark.parametrize("name", MATRIX)
def test_helm_has_nothing_to_say_about_the_chart(name: str) -> None:
    findings = HELM.submit(rendering.lint, values_of(**MATRIX[name])).result()
    assert [finding for finding in findings if finding["severity"] > 1] == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"imagee": {}}, "imagee"),
        ({"worker": {"resource": {}}}, "resource"),
        ({"worker": {"env": [{"nam": "A"}]}}, "nam"),
        ({"nats": {"replicas": 2}}, "replicas"),
        ({"nats": {"enabled": False, "url": "nats://me:secret@a:4222"}}, "url"),
        ({"nats": {"enabled": False}}, "nats.url: the URL of your NATS servers"),
        ({"scaling": "hpa"}, "scaling"),
        ({"keys": {"tenants": ["a/b"]}}, "tenants"),
        ({"models": {"size": "much"}}, "size"),
        ({"models": {}}, "is in /models: name a claim, a size or a volume"),
        ({"gateway": {"ingress": {"enabled": True}}}, "gateway.ingress.hosts: at least one name"),
        ({"workers": {}}, "workers: missing for config"),
        ({"workers": {"engine": {"min": 1, "max": 1}}}, "role"),
        (
            {"workers": {"engine-a": {"role": "engine", "model": "a", "min": 1, "max": 1}}},
            'workers: none serves model "Org/Other.Model" of config',
        ),
        (
            {"nats": {"enabled": False, "url": "nats://a"}, "scaling": "keda"},
            "nats.monitoring: KEDA needs the address",
        ),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    assert message in refusal(**values)


def test_a_schedule_is_refused_where_keda_would_drop_it() -> None:
    values = values_of(scaling="keda")
    values["workers"]["engine-qwen2-vl"]["scheduled"] = True
    _, error = HELM.submit(rendering.try_render, values).result()
    assert "workers.engine-qwen2-vl: scaling keda does not know the schedule" in error
    assert rendered(values | {"scaling": "pagemill"})


def test_an_autoscaler_without_pools_is_refused() -> None:
    """A Role without names would permit all Deployments."""
    _, error = HELM.submit(rendering.try_render, values_of(CONFIG, scaling="pagemill")).result()
    assert "scaling: pagemill needs pools in scale.pools" in error


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
    assert {data["account"] for data in named.values()} == {ACCOUNT}


def test_each_stage_of_a_speech_is_a_pool_with_separate_queues() -> None:
    manifests = make("keda", SPEECH)
    check_all(manifests)
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
    assert pods["generator-demo-code2wav"]["args"][-1] == "--stage=code2wav"
    assert pods["engine-demo-talker"]["args"][-1] == "--stage=talker"
    assert "--stage" not in str(pods["engine-demo"]["args"])
    # Prefill workers and talkers have the engines' device, and generators compute without one.
    on_gpus = {name for name, container in pods.items() if "resources" in container}
    assert on_gpus == stages.keys() - {"generator-demo-code2wav"}
    names = of_kind(make("pagemill", SPEECH), "Role")["pagemill-autoscaler"]["rules"][0]
    assert set(names["resourceNames"]) == stages.keys()


def test_a_pool_is_scaled_by_the_sum_of_its_queues() -> None:
    text = CONFIG.replace("tower: encoder", "tower: encoder, slots: 3") + POOLS
    manifests = make("keda", text)
    check_all(manifests)
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


def test_a_scaled_pool_begins_with_its_min_and_keeps_its_number() -> None:
    manifests = make("keda")
    scaled = of_kind(manifests, "ScaledObject")
    assert set(scaled) == SCALED
    first = {
        name: item["spec"]["replicas"] for name, item in of_kind(manifests, "Deployment").items()
    }
    assert {name: first[name] for name in SCALED} == {
        name: 2 * (name == "renderer") for name in SCALED
    }
    for name, deployment in of_kind(make("keda", is_install=False), "Deployment").items():
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
        "metrics": 1,
    }


def test_the_autoscaler_may_change_the_sizes_of_the_pools_alone() -> None:
    manifests = make("pagemill", is_install=False)
    rule, costs = of_kind(manifests, "Role")["pagemill-autoscaler"]["rules"]
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
    for name, item in of_kind(make(scaling, text), "Deployment").items():
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
    for name, deployment in of_kind(make("keda"), "Deployment").items():
        pod = deployment["spec"]["template"]["spec"]
        # A gateway leaves its Service before it drains.
        assert pod["terminationGracePeriodSeconds"] == 60 if name == "gateway" else 55
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
            "/srv/demo is not below /models, where pods have the volume of models",
        ),
        (
            "models: {demo: {path: /models/../demo}}\ngateway: {allow_anonymous: true}",
            "models.demo.path",
            "/models/../demo is not below /models, where pods have the volume of models",
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
    with pytest.raises(ConfigError) as raised:
        values_of(text)
    assert str(raised.value) == f"{field}: {message}"
    assert raised.value.field == field


def test_braces_of_a_configuration_are_not_the_chart_s() -> None:
    text = CONFIG + "# {{ messages }}\n# image: pagemill\n"
    config = of_kind(make("none", text), "ConfigMap")["pagemill"]
    assert config["data"] == {"pagemill.yaml": text}


def test_the_command_writes_what_kubectl_applies(tmp_path: Path) -> None:
    file, mine = tmp_path / "pagemill.yaml", tmp_path / "mine.yaml"
    file.write_text(CONFIG)
    mine.write_text(
        "image: {repository: here/pagemill, tag: '1'}\nnats: {size: 50Gi}\n"
        "workers: {renderer: {priorityClassName: high}}\nmodels: {claim: mine}\n"
    )
    options = ("--config", str(file), "--values", str(mine), "--namespace", "there")
    done = preloaded.run("manifests", *options, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    documents = list(yaml.safe_load_all(done.stdout))
    assert (documents[0]["kind"], documents[0]["metadata"]["name"]) == ("Namespace", "there")
    assert of_kind(documents, "ConfigMap")["pagemill"]["data"] == {"pagemill.yaml": CONFIG}
    assert {pod["image"] for pod in containers(documents).values()} == {"here/pagemill:1"}
    assert "nats.replicas is 1" in done.stderr
    renderer = of_kind(documents, "Deployment")["renderer"]["spec"]
    assert renderer["template"]["spec"]["priorityClassName"] == "high"
    assert renderer["replicas"] == 2
    (claim,) = of_kind(documents, "StatefulSet")["nats"]["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"] == {"storage": "50Gi"}


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    done = preloaded.run("manifests", cwd=tmp_path)
    assert done.returncode != 0
    assert "no pagemill.yaml here" in done.stderr
    (tmp_path / "pagemill.yaml").write_text(CONFIG)
    (tmp_path / "mine.yaml").write_text("image: {name: a}\n")
    done = preloaded.run("manifests", "--values", "mine.yaml", cwd=tmp_path)
    assert done.returncode != 0
    assert "--values: " in done.stderr
    assert "name" in done.stderr


def test_the_demo_of_the_chart_is_the_values_of_its_configuration(tmp_path: Path) -> None:
    file = CHART / "files" / "demo.yaml"
    demo = yaml.safe_load(file.read_text())
    (tmp_path / "pagemill.yaml").write_text(demo["config"])
    done = preloaded.run("manifests", "--for-helm", cwd=tmp_path)
    assert done.stdout == file.read_text()
    assert containers(rendered({})).keys() == {*demo["workers"], "metrics"}
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == version("pagemill")
    notes = HELM.submit(rendering.notes, {}).result()
    assert "It serves the demo model" in notes


# -- placement and upgrades -----------------------------------------------------------------------


def test_a_pool_has_the_values_of_all_workers_and_may_replace_them() -> None:
    values = values_of(worker=PLACED, image={"repository": "r", "tag": "1", "gpu": "r-gpu:1"})
    values["workers"]["renderer"] |= {"resources": {"limits": {"memory": "1Gi"}}, "image": "own"}
    deployments = of_kind(rendered(values), "Deployment")
    engine, renderer = (
        deployments[name]["spec"]["template"]["spec"] for name in ("engine-qwen2-vl", "renderer")
    )
    for pod in (engine, renderer):
        for key in ("nodeSelector", "tolerations", "affinity", "topologySpreadConstraints"):
            assert pod[key] == PLACED[key]
        assert pod["priorityClassName"] == "high"
        assert pod["runtimeClassName"] == "nvidia"
        (container,) = pod["containers"]
        assert container["startupProbe"]["failureThreshold"] == 361
        assert container["env"][-1] == {"name": "HTTPS_PROXY", "value": "http://proxy"}
        assert container["envFrom"] == PLACED["envFrom"]
    limits = [pod["containers"][0]["resources"]["limits"] for pod in (engine, renderer)]
    assert limits == [{"memory": "8Gi", "nvidia.com/gpu": 1}, {"memory": "1Gi"}]
    assert [pod["containers"][0]["image"] for pod in (engine, renderer)] == ["r-gpu:1", "own"]


def test_a_new_pod_waits_for_the_device_of_an_old_one_alone() -> None:
    for name, item in of_kind(make("none"), "Deployment").items():
        strategy = item["spec"]["strategy"]["rollingUpdate"]
        has_device = "engine" in name
        assert strategy == {"maxUnavailable": int(has_device), "maxSurge": int(not has_device)}


def test_settings_of_brokers_are_the_files_of_the_product() -> None:
    manifests = make("none")
    files = of_kind(manifests, "ConfigMap")["nats"]["data"]
    for name in ("nats.conf", "nats-member.conf"):
        assert files[name].strip() == (ROOT / "compose" / name).read_text().strip()
    pod = of_kind(manifests, "StatefulSet")["nats"]["spec"]["template"]["spec"]
    places = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    accounts = Path(places["nats"], "../..", places["accounts"].lstrip("/"), "accounts.conf")
    (include,) = re.findall(
        r"^include (\S+accounts.conf)$", files["nats-member.conf"], re.MULTILINE
    )
    assert os.path.normpath(Path(places["nats"], include)) == os.path.normpath(accounts)


def test_alerts_and_dashboard_are_those_of_the_product() -> None:
    manifests = rendered(values_of(**MATRIX["monitoring"]))
    rules = of_kind(manifests, "PrometheusRule")["pagemill"]["spec"]
    assert rules == yaml.safe_load((ROOT / "ops/monitoring/alerts.yml").read_text())
    dashboard = of_kind(manifests, "ConfigMap")["pagemill-dashboard"]["data"]["pagemill.json"]
    assert json.loads(dashboard) == json.loads((ROOT / "ops/monitoring/dashboard.json").read_text())
    # Workers are targets of their own, so their series are taken from there.
    (endpoint,) = of_kind(manifests, "ServiceMonitor")["pagemill"]["spec"]["endpoints"]
    (rule,) = endpoint["metricRelabelings"]
    kept = [
        labels
        for labels in (";pagemill_broker_up", "a;pagemill_info", "a;pagemill_up")
        if re.fullmatch(rule["regex"], labels)
    ]
    assert kept == [";pagemill_broker_up", "a;pagemill_up"]


def test_the_documented_values_are_values_of_the_chart() -> None:
    page = (ROOT / "docs" / "operate" / "kubernetes.md").read_text()
    (block,) = re.findall(r"```text\n# mine.yaml\n(.*?)```", page, re.DOTALL)
    mine, values = yaml.safe_load(block), values_of()
    pool = mine.pop("workers")["engine-qwen2-vl"]
    values["workers"]["engine-qwen2-vl"] |= pool
    manifests = rendered(values | mine)
    check_all(manifests)
    engine = of_kind(manifests, "Deployment")["engine-qwen2-vl"]["spec"]["template"]["spec"]
    assert engine["tolerations"] == pool["tolerations"]
    assert engine["containers"][0]["image"] == mine["image"]["gpu"]
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    assert defaults.keys() == schema.keys() - {"global"}
    for name in defaults:
        assert f"`{name}`" in page or f"`{name}." in page, name
    for name in defaults["worker"]:
        assert f"`{name}`" in page, name


def test_the_job_of_keys_has_the_settings_of_the_accounts() -> None:
    text = CONFIG + "nats: {url: 'nats://hub:4222', domain: hub, tenant_connections: 7}\n"
    manifests = rendered(values_of(text, keys={"tenants": ["acme"]}))
    (job,) = of_kind(manifests, "Job").values()
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["keys", "secrets", "--tenant=acme"]
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    nats = parse_config("models: {any: {path: any}}", env, "test").nats
    assert (nats.url, nats.domain, nats.tenant_connections) == ("nats://hub:4222", "hub", 7)
