"""The exercise of notebook 01: is this a causal mask?"""

from collections.abc import Callable

from tplab.lesson.judging import judge

TARGET = "tplab.model.attention.mask_scores"


def check_mask(mask_scores: Callable, model, prompt, *, tensor_parallel_size: int = 2, dtype: str = "float32"):
    """Judge a learner's ``mask_scores(scores, mask)``: on a 4 × 4 example, then on the ranks against Hugging Face.

    Prints one line, ``PASS`` or ``NOT YET`` with what to look at. Returns what :func:`tplab.lesson.judging.judge` does.

        >>> mine = lesson.check_mask(mask_scores, ckpt, prompt)
        NOT YET  mask_scores: 62% NaN in a 4 × 4 example: is something multiplying 0 by -inf?
    """
    return judge(mask_scores, TARGET, model, prompt, problem=problem, tensor_parallel_size=tensor_parallel_size,
                 dtype=dtype)


def problem(mask_scores: Callable) -> str:
    """What is wrong with it, seen on two heads of 4 queries and 4 keys; the empty string if nothing is."""
    import torch

    scores = torch.arange(32.0).sin().view(1, 2, 4, 4)
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).triu(1)
    masked = mask_scores(scores.clone(), mask)
    if not isinstance(masked, torch.Tensor):
        return f"it returns {'nothing' if masked is None else type(masked).__name__}; the masked scores must come back"
    if masked.shape != scores.shape or masked.dtype != scores.dtype:
        return (f"scores of {list(scores.shape)} and {scores.dtype} go in, {list(masked.shape)} and {masked.dtype} "
                "come out; both must stay as they are")
    if masked.isnan().any():
        return f"{masked.isnan().double().mean():.0%} NaN in a 4 × 4 example: is something multiplying 0 by -inf?"
    weights = masked.softmax(-1)
    if weights.isnan().any():
        rows = int(weights.isnan().any(-1)[0, 0].sum())
        return (f"softmax makes NaN in {rows} of 4 rows, those in which every key is hidden: is the mask the wrong way "
                "round? True means: must not look")
    seen = int((weights[:, :, mask[0, 0]] > 0).sum())
    if seen:
        return f"{seen} of 12 hidden keys still get some weight: which line hides the keys where the mask is True?"
    if not masked[:, :, ~mask[0, 0]].equal(scores[:, :, ~mask[0, 0]]):
        return "scores of keys that may be seen have changed; only the hidden ones may"
    return ""
