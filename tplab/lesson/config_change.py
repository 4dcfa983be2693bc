"""The same weights under another configuration: what would this model be with its RoPE scaled?"""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tplab.checkpoint import Checkpoint, open_checkpoint
from tplab.checkpoint.verify import SUMS


@contextmanager
def changed_config(ckpt: Checkpoint, **changed) -> Iterator[Checkpoint]:
    """A checkpoint with the weights of ``ckpt`` and with some fields of its ``config.json`` changed, for a while.

        >>> with lesson.changed_config(ckpt, rope_parameters={"rope_type": "yarn", "factor": 4.0, …}) as scaled:
    """
    with tempfile.TemporaryDirectory(prefix="tplab-") as name:
        folder = Path(name)
        for file in ckpt.folder.iterdir():
            if file.name not in ("config.json", SUMS):  # the sums are those of the unchanged files
                os.symlink(file.resolve(), folder / file.name)
        config = json.loads((ckpt.folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(config | changed), encoding="utf-8")
        yield open_checkpoint(folder)
