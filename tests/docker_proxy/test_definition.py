"""A further container has the rights of the one that it is made from, and no others."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError
from tests.docker_proxy.fake_engine import BUS, DOOR, inspected
from workers.docker_proxy.definition import NUMBER, define

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
NAMES = st.text("abcXYZ", min_size=1, max_size=8)


def test_only_what_names_the_container_differs() -> None:
    source = inspected(1)
    made = define(source, 4)
    assert made.name == "shop_engine_4"
    assert made.networks == {}
    body, config = made.body, source["Config"]
    assert body.pop("NetworkingConfig") == {
        "EndpointsConfig": {"shop_bus": {"Aliases": ["engine"], "DriverOpts": None}}
    }
    assert body.pop("HostConfig") == source["HostConfig"]
    assert body.pop("Labels") == config["Labels"] | {NUMBER: "4"}
    # Its own, and not the one that has the name now.
    assert body.pop("Image") == source["Image"]
    assert body == {key: config[key] for key in ("User", "Env", "Cmd", "StopTimeout")}


@given(st.dictionaries(NAMES, JSON), st.dictionaries(NAMES, JSON), st.integers(1, 10_000))
def test_rights_of_any_kind_are_neither_added_nor_lost(
    config: dict[str, Any], host: dict[str, Any], number: int
) -> None:
    source = inspected(1)
    source["Config"] |= config
    source["HostConfig"] |= host
    body = define(source, number).body
    assert body["HostConfig"] == source["HostConfig"]
    same = source["Config"].keys() - {"Hostname", "Image", "Labels"}
    assert {key: body[key] for key in same} == {key: source["Config"][key] for key in same}
    assert body.keys() - source["Config"].keys() == {"HostConfig", "NetworkingConfig"}


def test_names_of_both_generations_of_compose() -> None:
    source = inspected(1)
    assert define(source | {"Name": "/shop-engine-1"}, 2).name == "shop-engine-2"
    # While compose replaces a container, the old one has another prefix.
    assert define(source | {"Name": "/0a1b2c_shop_engine_1"}, 2).name == "shop_engine_2"
    with pytest.raises(ConfigError, match="'my-engine'; a service with `container_name`"):
        define(source | {"Name": "/my-engine"}, 2)


def test_a_host_name_of_the_compose_file_is_kept() -> None:
    source = inspected(1)
    source["Config"]["Hostname"] = "engines"
    assert define(source, 2).body["Hostname"] == "engines"


def test_the_network_of_its_mode_comes_first_and_others_are_joined() -> None:
    source = inspected(1)
    bus = source["NetworkSettings"]["Networks"]
    door = {"Aliases": None, "NetworkID": DOOR, "DriverOpts": {"a": "b"}}
    source["NetworkSettings"]["Networks"] = {"shop_door": door} | bus
    made = define(source, 2)
    assert list(made.body["NetworkingConfig"]["EndpointsConfig"]) == ["shop_bus"]
    assert made.networks == {DOOR: {"Aliases": [], "DriverOpts": {"a": "b"}}}
    assert BUS not in made.networks


def test_networks_of_the_engine_itself_take_no_settings() -> None:
    source = inspected(1)
    for mode in ("host", "none", "bridge"):
        source["HostConfig"]["NetworkMode"] = mode
        source["NetworkSettings"]["Networks"] = {mode: {"Aliases": None, "NetworkID": "1"}}
        made = define(source, 2)
        assert "NetworkingConfig" not in made.body
        assert made.networks == {}
