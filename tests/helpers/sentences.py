"""What findings say, word for word, test by test: ``tests/align/sentences.txt``. A test that finds other words is red;
``TPLAB_SENTENCES=write pytest -n0 tests/align`` takes them over, for a diff to be read."""

import os
from collections import Counter
from functools import cache
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "align" / "sentences.txt"
_told: Counter = Counter()  # how many sentences a test has held so far


@cache
def _known() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in FILE.read_text(encoding="utf-8").splitlines() if FILE.exists() else ():
        if line.startswith("  "):
            found[next(reversed(found))].append(line[2:])
        else:
            found[line] = []
    return found


def hold(found):
    """``found``, a diagnosis or None; its sentence must be the one that is written down for this test. What was looked
    for and not found is left out: it grows with the table."""
    file, _, name = os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")[0].partition("::")
    test = f"{Path(file).stem}: {name}"
    if found is not None:
        said, sentences, at = found.sentence.partition(" Looked for")[0], _known().setdefault(test, []), _told[test]
        _told[test] += 1
        if os.environ.get("TPLAB_SENTENCES") == "write":
            sentences[at:at + 1] = [said]
            FILE.write_text("".join(f"{one}\n" + "".join(f"  {line}\n" for line in lines)
                                    for one, lines in sorted(_known().items())), encoding="utf-8")
        assert sentences[at:at + 1] == [said], (f"{said!r} is not in {FILE.name}; if these words are right: "
                                                f"TPLAB_SENTENCES=write pytest -n0 {file}")
    return found
