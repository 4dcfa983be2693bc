"""The learner's own copies of the notebooks, which ``launch`` opens: without outputs, so that no question is answered
before it is asked.

JupyterLab saves what it opens within seconds, without being asked. It saves the copies, and the files that git tracks
stay as they are.

A copy in which no cell was edited follows its original; an edited one is never written to again.
"""

import hashlib
import json
import sys
from pathlib import Path

from tplab.errors import TplabError

ROOT = Path(__file__).resolve().parents[3]
ORIGINALS, COPIES = ROOT / "notebooks", ROOT / "my_notebooks"
SEEN = ".originals.json"  # {name: hash of what a learner can edit} of each original when it was copied
NOT_COPIED = {".ipynb_checkpoints", "__pycache__", "course", "pyproject.toml", "conftest.py", "tplab_course.egg-info"}


def refresh(originals: Path, copies: Path) -> list[str]:
    """Bring ``copies`` up to date with the folder ``originals``; returns the edited ones whose original is newer.

    Raises OSError if the copies cannot be written, `TplabError` if what was recorded cannot be read.
    """
    record, newer = copies / SEEN, []
    seen = _read(record) if record.exists() else {}
    for original in sorted(path for path in originals.rglob("*") if path.is_file()):
        parts = original.relative_to(originals)
        if NOT_COPIED & set(parts.parts):
            continue
        name, copy, now = parts.as_posix(), copies / parts, _edited(original)
        if copy.exists() and seen.get(name) == now:
            continue
        if copy.exists() and _edited(copy) not in (seen.get(name), now):
            newer.append(name)
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        _write(copy, without_outputs(original))
        seen[name] = now
    _write(record, json.dumps(seen, indent=1).encode())
    return newer


def _write(path: Path, content: bytes) -> None:
    """A half-written copy would look like a learner's work: the file is renamed when it is whole."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_bytes(content)
    draft.replace(path)


def without_outputs(path: Path) -> bytes:
    """A file's content; of a notebook without outputs and execution counts."""
    content = path.read_bytes()
    if path.suffix != ".ipynb":
        return content
    notebook = json.loads(content)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell.update(outputs=[], execution_count=None)
    return (json.dumps(notebook, indent=1, ensure_ascii=False) + "\n").encode()


def _read(record: Path) -> dict[str, str]:
    try:
        seen = json.loads(record.read_text(encoding="utf-8"))
        return {name: cells for name, cells in seen.items() if isinstance(cells, str)}
    except (ValueError, AttributeError):
        raise TplabError(f"{record} is damaged; delete it (copies that differ from their originals are kept as yours)"
                         ) from None


def _edited(path: Path) -> str:
    """A hash of what a person edits: of a notebook its cells' text, whatever has run since; else of all of the file."""
    content = path.read_bytes()
    try:
        cells = json.loads(content)["cells"] if path.suffix == ".ipynb" else None
        content = repr([(cell["cell_type"], "".join(cell["source"])) for cell in cells]).encode()
    except (ValueError, KeyError, TypeError):
        pass  # no notebook: all of it
    return hashlib.sha256(content).hexdigest()[:16]


def main() -> str | None:
    """Refresh, and say what was kept; a sentence if the copies cannot be written."""
    try:
        newer = refresh(ORIGINALS, COPIES)
    except (OSError, TplabError) as error:
        return f"{COPIES.name}/ cannot be kept up to date: {error}"
    print(f"Your notebooks are in {COPIES.name}/; those in {ORIGINALS.name}/ stay as they are.")
    for name in newer:
        print(f"{COPIES.name}/{name} is kept as you edited it, though its original is newer; "
              "delete it to get the new one at the next start.")
    return None


if __name__ == "__main__":
    sys.exit(main())
