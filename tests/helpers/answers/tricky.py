"""Answers that look right: what an example hides that is a square, lies on one rank, or has one mask for all."""

from helpers.answers import Right, Wrong

ANSWERS = {
    "mask_scores": [
        Wrong("def mask_scores(scores, mask): return scores.masked_fill(mask[0], float('-inf'))",
              "Each sequence has a mask of its own"),
        Wrong("def mask_scores(scores, mask): return scores.masked_fill(mask[:1], float('-inf'))",
              "none of sequence 0's, and those of sequence 1"),
        Wrong("def mask_scores(scores, mask): return scores.masked_fill(mask, -10.0)", "their scores are low, -10 for "
              "example, and exp(-10) is 5e-05 and not 0"),
        Wrong("def mask_scores(scores, mask): return scores - 10 * mask", "What is low enough for every model?"),
        Wrong("def mask_scores(scores, mask): return scores.masked_fill(mask, float('-inf')).softmax(-1)",
              "each row adds up to 1: that is what comes out of a softmax"),
        Wrong("def mask_scores(scores, mask): return scores.softmax(-1).masked_fill(mask, 0)", "hidden keys still get"),
    ],
    "my_assert_no_nan": [
        Wrong("def my_assert_no_nan(tensor, name):\n    share = round(tensor.isnan().double().mean().item(), 2)\n"
              "    assert share == 0, f'{name}: {share} of {list(tensor.shape)} is NaN'", "is it rounded away?"),
        Wrong("def my_assert_no_nan(tensor, name):\n    share = tensor.isnan().double().mean().item()\n"
              "    assert not tensor.sum().isnan(), f'{name}: {share} of {list(tensor.shape)} is NaN'",
              "there are inf and -inf in them and no NaN; their sum, or mean, is one"),
    ],
}
