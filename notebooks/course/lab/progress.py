"""The table of notebook 00: every exercise and every case of the series, and when it was solved."""

from course.cases import CASES
from course.exercises import all_exercises
from course.judge.progress_file import load
from tplab.show.tables import Table, table


def progress() -> Table:
    """Every exercise and every case of the series with the day on which it was solved, as a table folded away."""
    kept = load()
    named = {name: exercise.notebook for name, exercise in all_exercises().items()} | dict.fromkeys(CASES, "11")
    rows = [{"notebook": notebook, "exercise": name, "solved": kept.get(name, {}).get("solved", "")}
            for name, notebook in sorted(named.items(), key=lambda pair: pair[1])]
    return table(rows, "notebook", f"{sum(bool(row['solved']) for row in rows)} of {len(rows)} are solved")
