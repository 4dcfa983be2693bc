"""Notebook 01: the mask, its spellings, an assert."""

from helpers.answers import Right, Wrong

ANSWERS = {
    "mask_scores": [
        Wrong("def mask_scores(scores, mask): return scores + mask.to(scores.dtype) * float('-inf')",
              "is something multiplying 0 by -inf?"),
        Wrong("def mask_scores(scores, mask): return scores.masked_fill(~mask, float('-inf'))",
              "what may be seen is hidden, and the rest is not"),
        Wrong("def mask_scores(scores, mask): return scores.masked_fill(mask | True, float('-inf'))",
              "NaN in 4 of 4 rows, those in which every key is hidden"),
        Wrong("def mask_scores(scores, mask): return (2 * scores).masked_fill(mask, float('-inf'))", "have changed"),
        Wrong("def mask_scores(scores, mask): scores.masked_fill(mask, float('-inf'))",
              "nothing (is a return missing?)"),
        Wrong("def mask_scores(scores, mask): return scores[0]",
              "[batch, heads, queries, keys] = [2, 3, 4, 6]"),
        Wrong("def mask_scores(scores, mask): return scores.double().masked_fill(mask, float('-inf'))",
              "torch.float64; torch.float32 must come back"),
        Wrong("def mask_scores(scores, mask): return scores", "48 of 48 hidden keys can still be seen"),
        Wrong("def mask_scores(scores, mask): return scores - mask * 5.0", "48 of 48 hidden keys can still be seen"),
        Wrong("def mask_scores(scores, mask): return scores.masked_fill(mask.triu(4), float('-inf'))",
              "hidden keys can still be seen: wrong for keys 0, 3–5 of 6"),
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
    "my_additive_mask": [
        Wrong("def my_additive_mask(tokens): return torch.triu(torch.ones(tokens, tokens), 1) * float('-inf')",
              "multiplying 0 by -inf? Choose the entries first, and write -inf there"),
        Wrong("def my_additive_mask(tokens): return torch.ones(tokens, tokens) * float('-inf')",
              "5 of 5 rows, those in which every key is hidden: wrong for every sequence"),
        Wrong("def my_additive_mask(tokens): return torch.ones(tokens, tokens, dtype=torch.bool).triu(1)",
              "Added to scores, True is 1 and False 0"),
        Wrong("def my_additive_mask(tokens): return torch.full((tokens, tokens), float('-inf')).tril(-1)",
              "be seen: it hides the past: have queries and keys changed places?"),
        Wrong("def my_additive_mask(tokens): return torch.full((tokens, tokens), float('-inf')).tril()",
              "it is the wrong way round: what may be seen is hidden"),
        Wrong("def my_additive_mask(tokens): return torch.full((tokens, tokens), float('-inf')).triu(0)",
              "the first, query 0, key 0, is hidden, and not hidden is right"),
        Wrong("def my_additive_mask(tokens): return torch.full((tokens, tokens), float('-inf')).triu(2)",
              "the first, query 0, key 1, is not hidden, and hidden is right"),
        Wrong("def my_additive_mask(tokens): return torch.full((tokens, tokens), -5.0).triu(1)",
              "yours makes their scores -13.9 to 1.68. Beside the scores of any model, exp of it must be 0"),
        Wrong("def my_additive_mask(tokens): return torch.full((5, 5), float('-inf')).triu(1)",
              "it returns [5, 5]; [queries, keys] = [8, 8] must come back"),
        Wrong("def my_additive_mask(tokens): return torch.ones(tokens, tokens).tril() + torch.full((tokens, tokens), "
              "float('-inf')).triu(1)", "scores of keys that may be seen have changed; only the hidden ones may"),
        Wrong("def my_additive_mask(tokens): return torch.ones(tokens, tokens, dtype=torch.long).triu(1)",
              "torch.int64, which has no -inf"),
        Wrong("def my_additive_mask(tokens): return torch.full((tokens, tokens), float('-inf'))[None].triu(1)",
              "it returns [1, 5, 5]"),
        Wrong("""
              def my_additive_mask(tokens):
                  mask = torch.zeros(tokens)
                  mask[torch.ones(tokens, tokens).triu(1)] = float('-inf')
                  return mask
              """, "at your line 3: mask[torch.ones"),
        Wrong("""
              def my_additive_mask(tokens):
                  return torch.full((tokens, tokens), float('-inf')).triu(2 if 8 < tokens < 60 else 1)
              """, "in the engine: "),
        Right("def my_additive_mask(tokens): return torch.zeros(tokens, tokens).masked_fill("
              "torch.ones(tokens, tokens).triu(1) == 1, float('-inf'))"),
        Right("def my_additive_mask(tokens): return torch.triu(torch.ones(tokens, tokens) * float('-inf'), 1)"),
        Wrong("def my_additive_mask(tokens): return torch.full((tokens, tokens), torch.finfo(torch.float32).min)"
              ".triu(1)", "the first, query 0, key 1, is -3.403e+38, and -inf is right"),
    ],
    "my_assert_no_nan": [
        Wrong("def my_assert_no_nan(tensor, name): assert not tensor.isnan().all(), f'NaN in {name}'",
              "it fires only where every number is NaN"),
        Wrong("def my_assert_no_nan(tensor, name): assert not (tensor == float('nan')).any()",
              "finds none: NaN is equal to nothing"),
        Wrong("def my_assert_no_nan(tensor, name): assert tensor.isfinite().all(), f'NaN in {name}'",
              "there are -inf in them, which is how a mask hides keys, and no NaN. Is -inf a NaN?"),
        Wrong("def my_assert_no_nan(tensor, name): assert not tensor.isnan().any, f'NaN in {name}'",
              "Is a pair of () missing?"),
        Wrong("def my_assert_no_nan(tensor, name): assert not tensor.isnan()", "ambiguous"),
        Wrong("def my_assert_no_nan(tensor, name): return not tensor.isnan().any()", " it must raise an AssertionErro"),
        Wrong("""
              def my_assert_no_nan(tensor, name):
                  if tensor.isnan().any():
                      raise ValueError(f"NaN in {name}")
              """, "ValueError: NaN in weights. Where a NaN is, an AssertionError is asked for"),
        Wrong("def my_assert_no_nan(tensor, name): assert not tensor.isnan().any()",
              "which tensor? Its name, 'weights', is missing"),
        Wrong("def my_assert_no_nan(tensor, name): assert not tensor.isnan().any(), f'NaN in {name}'",
              "of what shape? [4, 5] is missing"),
        Wrong("def my_assert_no_nan(tensor, name): assert not tensor.isnan().any(), f'NaN in {name}: 51 % of "
              "{list(tensor.shape)}'", "how much is lost? Here 30 % of the numbers are NaN"),
        Wrong("""
              def my_assert_no_nan(tensor, name):
                  lost = tensor.isnan().float().mean()
                  assert lost < 0.05, f"NaN in {name}: {lost:.0%} of {list(tensor.shape)}"
              """, "Now 1 of 36000 is, in the last head of the last text, and nothing is raised"),
        Wrong("""
              def my_assert_no_nan(tensor, name):
                  tensor.nan_to_num_(0)
                  assert not tensor.isnan().any()
              """, "changes its argument tensor"),
        Right("""
              def my_assert_no_nan(tensor, name):
                  lost = torch.isnan(tensor)
                  if lost.any():
                      raise AssertionError(f"{lost.sum()} of {tensor.numel()} NaN in {name} {tuple(tensor.shape)}")
              """),
        Right("""
              def my_assert_no_nan(tensor, name):
                  share = (tensor != tensor).double().mean().item()
                  assert not share, f"NaN in {name}: {share} of {tensor.shape}"
              """),
    ],
}
