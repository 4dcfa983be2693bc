"""``launch`` for its tests: as it is, and over a repository that is an empty folder."""

import sys

import pytest
from helpers.launching import load_launch

launch = pytest.fixture(load_launch, name="launch")


@pytest.fixture
def fresh(launch, tmp_path, monkeypatch):
    """A launch whose repository is an empty folder, with a ready-made .venv that is this Python."""
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    monkeypatch.setattr(launch, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\ndependencies = ["torch==1.2.3", "torchother"]\n')
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to(sys.executable)
    return launch
