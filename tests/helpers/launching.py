"""``launch`` as a module."""

import importlib.machinery
import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def load_launch():
    """``launch`` as a module of its own (it has no suffix, and must leave no compiled file beside it)."""
    loader = importlib.machinery.SourceFileLoader("launch", str(ROOT / "launch"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("launch", loader))
    exec(loader.source_to_code((ROOT / "launch").read_bytes(), "launch"), module.__dict__)
    return module
