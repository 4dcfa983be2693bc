"""Notebook 01: the mask."""

from helpers.answers import Right, Wrong

ANSWERS = {
    "mask_scores": [
        Wrong("def mask_scores(scores, mask): return scores + mask.to(scores.dtype) * float('-inf')",
              "is something multiplying 0 by -inf?"),
        Wrong("def mask_scores(scores, mask): return scores.masked_fill(~mask, float('-inf'))",
              "is the mask the wrong way round"),
        Wrong("def mask_scores(scores, mask): return scores.masked_fill(mask | True, float('-inf'))",
              "NaN in 4 of 4 rows, those in which every key is hidden"),
        Wrong("def mask_scores(scores, mask): return (2 * scores).masked_fill(mask, float('-inf'))", "have changed"),
        Wrong("def mask_scores(scores, mask): scores.masked_fill(mask, float('-inf'))",
              "nothing (is a return missing?)"),
        Wrong("def mask_scores(scores, mask): return scores[0]",
              "[batch, heads, queries, keys] = [2, 3, 4, 6]"),
        Wrong("def mask_scores(scores, mask): return scores.double().masked_fill(mask, float('-inf'))",
              "torch.float64; torch.float32 must come back"),
        Wrong("def mask_scores(scores, mask): return scores", "hidden keys still get some weight"),
        Wrong("def mask_scores(scores, mask): return scores - mask * 5.0", "hidden keys still get some weight"),
        Wrong("def mask_scores(scores, mask): return scores.masked_fill(mask.triu(4), float('-inf'))",
              "hidden keys still get"),
        Wrong("def mask_scores(scores): return scores", "it must take (scores, mask)"),
        Wrong("""
              def mask_scores(scores, mask):
                  scores = scores + 0
                  return scores.mask_fill(mask, float('-inf'))
              """, "at your line 3: return scores.mask_fill"),
        Wrong("""
              def mask_scores(scores, mask):
                  return scores if scores.shape[-1] > 6 else scores.masked_fill(mask, float('-inf'))
              """, "in the engine: Attention fits a softmax over all keys there are"),
        Wrong("""
              def mask_scores(scores, mask):
                  if scores.shape[-1] > 6:
                      raise ValueError("too many keys")
                  return scores.masked_fill(mask, float('-inf'))
              """, "ValueError: too many keys\n         at your line 3: raise ValueError"),
        Right("def mask_scores(scores, mask): return scores.masked_fill_(mask, float('-inf'))"),
        Right("def mask_scores(scores, mask): return torch.where(mask, torch.finfo(scores.dtype).min, scores)"),
        Right("""
              def mask_scores(scores, mask):
                  return scores + torch.zeros_like(scores).masked_fill(mask, float('-inf'))
              """),
    ],
}
