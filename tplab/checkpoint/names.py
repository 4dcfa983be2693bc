"""From what a user types to a folder on disk."""

import atexit
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from tplab.checks import did_you_mean, quoted

from .errors import CheckpointError, words_of

_HERE = Path(__file__).resolve().parent
EMBEDDED = {"fable": _HERE / "fable", "fable-moe": _HERE / "fable_moe"}  # in the package
HUB_FILES = ["config.json", "generation_config.json", "model.safetensors", "model-*-of-*.safetensors",
             "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
             "chat_template.jinja"]
KNOWN = "'fable', 'fable-moe', 'smollm2', a folder, or a hub id such as 'Qwen/Qwen2.5-0.5B-Instruct'"


def cache_dir() -> Path:
    """The folder for fetched models and compiled code; it may not exist yet.

    ``$TPLAB_CACHE`` if set, else ``$XDG_CACHE_HOME/tplab``, else ``~/.cache/tplab``. A user without a home folder gets
    a temporary one, which ends with this process; a line on stderr says so.
    """
    if folder := os.environ.get("TPLAB_CACHE"):
        return Path(os.path.expanduser(folder))
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "tplab"
    home = Path(os.path.expanduser("~"))  # "/" if $HOME is empty, "~" for a user who is in no list of users
    return home / ".cache" / "tplab" if home.is_dir() and home != home.parent else _temporary_cache()


def _temporary_cache() -> Path:
    folder = tempfile.mkdtemp(prefix=f"tplab-{os.getpid()}-cache-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["TPLAB_CACHE"] = folder  # also for this process's ranks and commands
    print(f"tplab: there is no home folder for a cache, so {folder} is used until this process ends; $TPLAB_CACHE "
          "names a lasting one", file=sys.stderr)
    return Path(folder)


def resolve(name: str | os.PathLike) -> Path:
    """The checkpoint folder that ``name`` stands for.

    ``name`` is ``"fable"`` or ``"fable-moe"`` (in the package), ``"smollm2"`` (in :func:`cache_dir`, put there by
    ``python -m tplab fetch smollm2``), a local folder, or a hub id, which is downloaded once by
    ``huggingface_hub``. The built-in names win over folders of that name: write ``./fable`` for a folder.
    Raises ``CheckpointError`` when there is nothing of that name.
    """
    if not isinstance(name, str | bytes | os.PathLike):
        raise CheckpointError(f"a model is {KNOWN}, not {quoted(name)}")
    text = os.fsdecode(name)
    if text in EMBEDDED:
        return EMBEDDED[text]
    if text == "smollm2":
        return _existing_folder(cache_dir() / "smollm2",
                                "'smollm2' is not on this machine yet; run: python -m tplab fetch smollm2")
    if not text:
        raise CheckpointError(f"the model name is empty; it can be {KNOWN}")
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", text, re.ASCII) and not os.path.lexists(text):
        return _from_hub(text)
    known = did_you_mean(text, (*EMBEDDED, "smollm2")) or f"; a model is {KNOWN}"
    return _existing_folder(Path(os.path.expanduser(text)), f"there is no folder {quoted(text)}{known}")


def _existing_folder(path: Path, if_missing: str) -> Path:
    if os.path.isfile(path):
        raise CheckpointError(f"{path} is a file; a checkpoint is the folder that holds config.json")
    if not os.path.isdir(path):  # nor can it be one whose name is too long
        raise CheckpointError(if_missing)
    return path


def _from_hub(repo_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo_id, allow_patterns=HUB_FILES))
    except LocalEntryNotFoundError as error:
        raise CheckpointError(f"hub model {repo_id!r} is not in the local hub cache and the hub cannot be reached; go "
                              "online, give a local folder, or use 'fable' or 'smollm2'") from error
    except Exception as error:  # httpx, OSError, a disk that fills up: the library's own words, with the name
        raise CheckpointError(f"hub model {repo_id!r} could not be downloaded: {words_of(error)}") from error
