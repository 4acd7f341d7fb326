"""Stages of one model on different devices: places, settings of workers, and lines of check."""

import pytest

from shared.config.parsing import parse_config
from shared.config.schema import Config
from shared.errors import ConfigError
from shared.gpu.devices import DeviceNeeds
from workers.roles import WorkerSpec, check_stage_devices, device_needs
from workers.settings import of_stage

STAGES = """
text_encoder: {role: generator, inputs: {texts: {from: dit, function: item, mode: fan_out}}},
vae: {device: cuda, devices: [1], gpu_memory: 8 GiB, role: generator,
      inputs: {latents: {from: dit, function: item, mode: fan_out}}},
dit: {role: generator, inputs: {prompt: {from: request, function: paint}},
      output: {name: image, kind: image}, sizes: [8x8]}
"""


def configure(stages: str, generator: str = "device: cuda, max_images: 3") -> Config:
    model = f"{{path: ., stages: {{{stages}, engine: {{enabled: false}}}}}}"
    return parse_config(f"{{models: {{a: {model}}}, generator: {{{generator}}}}}", {}, "test")


def test_each_stage_has_a_place_on_its_device() -> None:
    config = configure(STAGES.replace("text_encoder: {", "text_encoder: {device: cpu, "))
    needs = {
        stage: device_needs(config, WorkerSpec("generator", "a", stage))
        for stage in ("text_encoder", "dit", "vae")
    }
    assert needs == {
        "text_encoder": None,
        "dit": DeviceNeeds("generator", (), 0.9),
        "vae": DeviceNeeds("models.a.stages.vae", (1,), "8 GiB"),
    }


def test_a_worker_of_a_stage_has_its_device_in_the_section_of_its_role() -> None:
    config = configure(STAGES.replace("text_encoder: {", "text_encoder: {device: cpu, "))
    # `pagemill worker` may omit the only model.
    generator = of_stage(config, WorkerSpec("generator", None, "text_encoder")).generator
    assert (generator.device, generator.max_images) == ("cpu", 3)
    generator = of_stage(config, WorkerSpec("generator", "a", "vae")).generator
    assert (generator.device, generator.devices, generator.gpu_memory) == ("cuda", [1], "8 GiB")
    assert of_stage(config, WorkerSpec("generator", "a", "dit")).generator == config.generator
    assert of_stage(config, WorkerSpec("coordinator")) is config


def test_a_device_of_a_role_that_computes_on_the_processor_is_refused() -> None:
    check_stage_devices(configure(STAGES))
    key = "models.a.stages.renderer.device"
    with pytest.raises(ConfigError, match=f"^{key}: workers of the role renderer"):
        check_stage_devices(configure(f"{STAGES}, renderer: {{device: cuda}}"))
