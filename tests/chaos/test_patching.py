"""The chaos harness replaces product attributes by name; none of these names is out of date."""

import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ops.chaos.fake_model import FakeProcessor
from ops.chaos.patching import check_signature, replace_attribute, wrap
from tests import preloaded

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    "role",
    [
        "coordinator",
        "renderer",
        "engine",
        "talker",
        "code2wav",
        "dit",
        "gateway",
        "batcher",
        "autoscaler",
        "actuator",
        "agent",
    ],
)
def test_every_bug_and_alteration_can_be_planted(role: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [*preloaded.PYTHON, "-m", "tests.chaos.plant_all", role],
        cwd=ROOT,
        env=os.environ | {"CHAOS_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_fake_processor_has_the_methods_of_the_real_one() -> None:
    from workers.renderer.processing.processor import Processor

    for name, member in vars(FakeProcessor).items():
        if name.startswith("_"):
            continue
        real = getattr(Processor, name)
        if inspect.isfunction(member):
            check_signature(real, member)


class Product:
    def method(self, number: int) -> int:
        return number

    async def coroutine(self, number: int) -> int:
        return number


def test_a_name_that_does_not_exist_is_refused() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        replace_attribute(Product, "no_such_name", lambda self, number: 0)
    with pytest.raises(AttributeError, match="no_such_name"):
        wrap(Product, "no_such_name")


@pytest.mark.parametrize("replacement", [lambda self: 0, lambda self, number, more: 0, lambda: 0])
def test_another_signature_is_refused(replacement: Any) -> None:
    with pytest.raises(TypeError, match="called otherwise"):
        replace_attribute(Product, "method", replacement)


def test_a_function_in_place_of_a_coroutine_function_is_refused() -> None:
    with pytest.raises(TypeError, match="is a coroutine function"):
        replace_attribute(Product, "coroutine", lambda self, number: 0)


def test_a_function_that_other_modules_have_imported_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner, user = ModuleType("shared.owner"), ModuleType("shared.user")

    def function() -> None:
        pass

    function.__module__ = owner.__name__
    vars(owner)["function"] = vars(user)["function"] = function
    monkeypatch.setitem(sys.modules, owner.__name__, owner)
    monkeypatch.setitem(sys.modules, user.__name__, user)
    with pytest.raises(TypeError, match=r"shared\.user has imported function"):
        replace_attribute(owner, "function", lambda: None)
    replace_attribute(user, "function", lambda: None)


async def test_a_wrapper_gets_the_original_and_the_arguments() -> None:
    class Wrapped(Product):
        pass

    @wrap(Wrapped, "coroutine")
    async def coroutine(original: Any, self: Wrapped, number: int) -> int:
        result: int = await original(self, number)
        return result + 1

    assert await Wrapped().coroutine(1) == 2
