"""What becomes of the answers that are kept, as a table: ``python tests/lesson/verdict_table.py [EXERCISE …]``.

``told``: wrong, and the sentence is the one that was meant for it. ``otherwise``: wrong, and told something else.
"""

import io
import sys
import time
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers.answers import Right, answers, defined  # noqa: E402

from tplab import lesson  # noqa: E402

COLUMNS = "right", "refused though right", "wrong", "told", "otherwise", "accepted", "over 20 s"
IDS = list(range(5, 24))


def became(name: str, answer) -> list[str]:
    """The columns in which an answer counts, on two ranks."""
    printed, begin = io.StringIO(), time.monotonic()
    prompt = [IDS[:17], IDS[3:9]] if lesson.all_exercises()[name].notebook == "05" else IDS
    with redirect_stdout(printed):
        verdict = lesson.judge(defined(answer.code, name), "fable", prompt, tensor_parallel_size=2, name=name)
    late = ["over 20 s"] * (time.monotonic() - begin > 20)
    if isinstance(answer, Right):
        return ["right", *["refused though right"] * (not verdict.passed), *late]
    is_told = " ".join(answer.words.split()) in " ".join(printed.getvalue().split())
    return ["wrong", "accepted" if verdict.passed else "told" if is_told else "otherwise", *late]


if __name__ == "__main__":
    kept, total = answers(), Counter()
    print("exercise", *COLUMNS, sep=" | ")
    for name in sys.argv[1:] or lesson.all_exercises():
        counts = Counter(column for answer in kept[name] for column in became(name, answer))
        total += counts
        print(name, *(counts[column] for column in COLUMNS), sep=" | ", flush=True)
    print("all", *(total[column] for column in COLUMNS), sep=" | ")
