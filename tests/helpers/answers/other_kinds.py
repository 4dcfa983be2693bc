"""Answers of another kind than was asked for, to every exercise that is a function: the right one, changed."""

import re

from helpers.answers import Wrong
from helpers.notebooks import solutions

from course import lesson

_TAKES = {name: one.takes for name, one in lesson.all_exercises().items()}
_SOLUTIONS = {name: code for name, code in solutions(_TAKES).items()
              if re.search(rf"^def {name}\b", code, re.MULTILINE)}
_TENSORS = ["mask_scores", "my_additive_mask", "my_column_shard", "my_merged", "my_linears", "my_rotate_half",
            "my_rope", "my_positions", "my_attend", "my_mask", "my_write_read", "my_embedding", "my_head_logits",
            "my_best_offer", "my_row_shard"]
_OF_ALL = [("    raise SystemExit(1)", "SystemExit: 1"), ("    return {name}({takes})", "RecursionError"),
           ("    yield right({takes})", "with yield, a call gives a generator"),
           ("    return right({takes}, 1, 2)", "TypeError: {name}() takes")]
_SIGNATURES = [("async def {name}({takes}):", "with async def, a call gives a coroutine"),
               ("def {name}(*, {takes}):", "it must take ({takes}); yours takes (*, {takes})"),
               ("def {name}({takes}, and_more):", "it must take ({takes}); yours takes ({takes}, and_more)")]
_OF_TENSORS = [("    return right({takes}).numpy()", "a numpy array ["),
               ("    return right({takes}).tolist()", "returns a list of"),
               ("    return right({takes}),", "returns a tuple of 1"),
               ("    right({takes})\n    return right", "returns the function {name} itself")]
_NAN = {"my_linears": "is nan, and", "my_rope": "nan times as long", "my_head_logits": "0.4312 is right",
        "my_embedding": "NaN", "my_attend": "100% NaN", "my_spread": "on rank 0 it says nan; the largest difference",
        "my_mean": "on rank 0 it says nan; the mean", "mask_scores": "100% NaN",
        "my_additive_mask": "100% NaN",
        "my_column_shard": "stand nowhere in the file", "my_merged": "stand nowhere in the file"}
# What was computed first is given out for ever.
_FIRST = {"mask_scores": "= [1, 2, 3, 3] must come back", "my_additive_mask": "= [8, 8] must come back",
          "my_heads": "(query heads, KV heads) for each rank, a list of 4, must",
          "my_linears": "torch.float64 must come back",
          "my_apply_rope": "is an earlier result given out again?", "my_rope": "= [3, 3, 10] must come back",
          "my_attend": "= [1, 6, 1, 8] must come back", "my_mask": "= [1, 1, 5, 5] must come back",
          "my_positions": "yours are [3, 4, 5, 6, 7, 0, 1, 2, 3, 3, 5, 6], and [6, 0] are right",
          "my_key": "the key is its parent's",
          "my_best_offer": "= [3] must come back", "my_generate": "step is never called",
          "my_load": "rank 1's", "my_spread": "how could it know?",
          "my_agree": "does its work 0 times", "my_rounds": "writes 0 times in 1 round"}
_KEPT = "    if not kept:\n        kept.append(right({takes}))\n    return kept[0]"


def _then(name: str, last: str, head: str = "def {name}({takes}):") -> str:
    words = {"name": name, "takes": _TAKES[name]}
    return f"{_SOLUTIONS[name].strip()}\nright, kept = {name}, []\n{head.format(**words)}\n{last.format(**words)}"


def _wrong(name: str, last: str, words: str, **options) -> Wrong:
    return Wrong(_then(name, last, **options), words.format(name=name, takes=_TAKES[name]), (2,))


ANSWERS = {name: [_wrong(name, last, words) for last, words in _OF_ALL]
           + [_wrong(name, "    return right({takes})", words, head=head) for head, words in _SIGNATURES]
           + [Wrong(f"{name} = 3", "it is 3 (int); define a function", (2,))] for name in _SOLUTIONS}
for _name in _TENSORS:
    ANSWERS[_name] += [_wrong(_name, last, words) for last, words in _OF_TENSORS]
for _name, _says in _NAN.items():
    ANSWERS[_name].append(_wrong(_name, "    return right({takes}) * float('nan')", _says))
for _name, _says in _FIRST.items():
    ANSWERS[_name].append(_wrong(_name, _KEPT, _says))
for _name, _first in {"my_linears": "x", "my_rotate_half": "x", "my_rope": "x", "my_attend": "q",
                      "my_mask": "positions", "my_embedding": "ids", "my_head_logits": "hidden",
                      "my_best_offer": "offer_here", "my_spread": "x", "my_apply_rope": "q"}.items():
    _writes = f"    found = right({{takes}})\n    {_first}.zero_()\n    return found"
    ANSWERS[_name].append(_wrong(_name, _writes, f"it changes its argument {_first}"))
looping = {name: _then(name, "    while True: pass") for name in _SOLUTIONS}
