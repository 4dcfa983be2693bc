"""The exercises of the notebooks: one file a theme, each registers its checks; a new file needs no change elsewhere."""

from importlib import import_module
from pkgutil import iter_modules

for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")
