"""Registry of families that paint, which discovers the modules in `shared.models.diffusion`."""

import importlib
import pkgutil
from functools import cache

from shared.models import diffusion
from shared.models.image_family import ImageFamily


@cache
def list_image_families() -> tuple[ImageFamily, ...]:
    """Return all families, by the names of their modules."""
    names = sorted(module.name for module in pkgutil.iter_modules(diffusion.__path__))
    modules = {name: importlib.import_module(f"{diffusion.__name__}.{name}") for name in names}
    return tuple(
        module.FAMILY._replace(module=module.FAMILY.module or name)
        for name, module in modules.items()
    )
