"""``launch`` as a module."""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]


def load_launch():
    """``launch`` as a module of its own (it has no suffix, and must leave no compiled file beside it)."""
    loader = importlib.machinery.SourceFileLoader("launch", str(ROOT / "launch"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("launch", loader))
    exec(loader.source_to_code((ROOT / "launch").read_bytes(), "launch"), module.__dict__)
    return module


def command_of_launch(root=ROOT):
    """The arguments that ``./launch --no-browser`` hands to Python in a repository at ``root``."""
    launch, handed = load_launch(), []
    launch.ROOT = root
    launch.ready_environment = lambda: Path(sys.executable)
    launch.offer_smollm2 = lambda python: None
    launch.subprocess = SimpleNamespace(call=lambda command: 1)  # no copies of the notebooks
    launch.become = lambda python, *command: handed.extend(command)
    launch.lab(["--no-browser"])
    return handed
