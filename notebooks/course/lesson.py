"""What cells call: an exercise's judge, the panel of faults, the cases, failures on purpose."""

from tplab import lazy

_HOMES = {name: home for home, names in {
    "course.judge.answers": "ask default_question greedy", "tplab.checkpoint.prompts": "default_prompt",
    "course.exercises": "judge all_exercises", "course.judge.altered": "fused_copy changed_config",
    "course.judge.bits": "bits num_different read_again", "course.fable.recall": "recall",
    "course.judge.incidents": "shown_error Incidents caught error_text", "course.judge.fault_panel": "panel",
    "course.exercises.nb09": "with_cures", "course.lab.progress": "progress",
    "course.judge.progress_file": "clear_progress",
    "course.exercises.own_engine": "own_pieces your_engine written", "course.cases.sealed": "open_case",
    "course.contiguous_cache": "ContiguousKVCache",
}.items() for name in names.split()}
__all__ = list(_HOMES)
__getattr__ = lazy(__name__, _HOMES)
