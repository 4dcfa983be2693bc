"""Answers that a check met for the first time when all of them stood: each shows a kind that none of the others is."""

from helpers.answers import Right, Wrong
from helpers.answers.nb07_ranks import send
from helpers.answers.nb09 import GENERATE, but
from helpers.answers.tricky import layer
from helpers.notebooks import solutions

from course import lesson

_SOLVED = solutions(lesson.all_exercises())
_AGREE = _SOLVED["my_agree"]
_META = "an ordinary one, with numbers in this computer's memory, must come back"
_JOIN = "torch.cat([self.k, k]), torch.cat([self.v, v])"
_HIDDEN = 'scores.masked_fill(future, float("-inf"))'
_OFFERS = but(_SOLVED["my_best_offer"], "offers[:, :, 0].argmax", "offers[:, :, 0].abs().argmax")
_SHARE = "def share(total):\n    t, n, r = total, linear.tp_size(), linear.tp_rank()\n    return "

ANSWERS = {
    "mask_scores": [
        Wrong("def mask_scores(scores, mask): return scores.masked_fill(mask & (scores.dtype == torch.float32), "
              "float('-inf'))", "in bfloat16, 6 of 6 hidden keys can still"),
        Wrong("def mask_scores(scores, mask): return torch.zeros_like(scores, device='meta')", _META),
        Wrong("def mask_scores(scores, mask): return scores.masked_fill(mask, torch.finfo(scores.dtype).max)",
              "yours makes their scores 3.4e+38 to 3.4e+38"),
        Right("def mask_scores(scores, mask): return scores.masked_fill(mask, float('-inf')).nan_to_num()")],
    "my_additive_mask": [
        Wrong("def my_additive_mask(tokens): return -1e-5 * torch.ones(tokens, tokens).triu(1)",
              "exp of it must be 0 (exp of 0 is 1): as low as there is")],
    "my_assert_no_nan": [
        Wrong("def my_assert_no_nan(tensor, name):\n    for row in tensor:\n"
              "        lost = row.isnan().double().mean()\n"
              "        assert lost == 0, f'{name} {list(tensor.shape)}: {lost:.0%}'", "Here 30 % of the numbers"),
        Wrong("def my_assert_no_nan(tensor, name):\n    assert 'nan' not in str(tensor), f'NaN in {name}: "
              "{tensor.isnan().float().mean():.0%} of {list(tensor.shape)}'", "Now 1 of 36000 is"),
        Wrong("def my_assert_no_nan(tensor, name):\n    assert not tensor[-1].isnan().any(), f'{name} "
              "{list(tensor.shape)}: {tensor.isnan().double().mean():.0%}'", "Now it is in the first of the first")],
    "my_column_shard": [
        Wrong("def my_column_shard(source, rows): return source[rows.start:rows.stop].to('meta')",
              "a tensor of meta comes back; cpu must"),
        Wrong("def my_column_shard(source, rows): return source[rows.start:rows.stop].T", "right numbers, in another")],
    "my_heads": [
        Wrong("def my_heads(H, K, T): return [((r * H // T, (r + 1) * H // T), (0, K)) for r in range(T)]",
              "rank 0 gets (0, 4), which are two; range(0, 4) is all")],
    "my_linears": [
        Wrong(but(_SOLVED["my_linears"], "x @ up[first:end].T @", "torch.relu(x @ up[first:end].T) @"),
              "not found: their product with the same columns")],
    "my_rotate_half": [
        Wrong("def my_rotate_half(x): return x.roll(1, -1)", "it makes [36 1 4 9 16 25], and [-16 -25 -36 1 4 9] is")],
    "my_apply_rope": [Right("def my_apply_rope(self, q, k, cos, sin): return self.rotate(q, k, cos[0], sin[0])")],
    "my_positions": [
        Wrong(but(_SOLVED["my_positions"], "zip(starts, counts)])", "zip(starts, counts)]).to('meta')"), _META)],
    "MyCache": [
        Wrong(but(_SOLVED["MyCache"], "torch.cat([old_v, v])", "torch.cat([old_k, v])"),
              "v is not what was given wrong for tokens 0–3 of 5")],
    "my_attend": [
        Wrong(but(_SOLVED["my_attend"], 'mask, float("-inf")', "mask, -3"), "count 0.00667 times (right: 0)")],
    "my_write_read": [
        Wrong(but(_SOLVED["my_write_read"], "= new\n", "= new.flip(0)\n"), "is position 8's, holds position 5")],
    "my_head_logits": [
        Wrong(but(_SOLVED["my_head_logits"], "hidden @ weight_here.T", "(hidden @ weight_here.T).softmax(-1)"),
              "Right in yours: the logits of this rank's words")],
    "my_best_offer": [Wrong(_OFFERS, "with scores [-8.0, -2.0, -7.0]")],
    "my_embedding": [
        Wrong(but(_SOLVED["my_embedding"], "return all_reduce(found.masked_fill(~here[:, None], 0))",
                  "return all_reduce(all_reduce(found.masked_fill(~here[:, None], 0)))"), "not its row, after 2 coll")],
    "MyLayer": [
        Wrong(layer("self.norm(hidden, self.norm2)", "self.norm(x, self.norm2)"), "norm of the first norm's result"),
        Wrong(layer('return point("output"', 'point("output"'), "comes as nothing (is a return missing?)"),
        Right(layer("x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * weight",
                    "F.rms_norm(x, (x.shape[-1],), weight, self.eps)")),
        Right(layer('point("q", q), point("k", k), point("v", v)', "pass"))],
    "my_send_shards": [Wrong(send("mine = part", "mine = part[:1]"), "rows 0 come back where rows 0–1 are its own")],
    "my_spread": [
        Wrong("def my_spread(x): return all_gather(x[None], dim=0).diff(dim=0).abs().max().item()",
              "not found: their maxima", (2,))],
    "my_agree": [
        Wrong(but(_AGREE, "return failed.", "return (failed == 0)."), "on those it worked")],
    "share": [
        Wrong(_SHARE + "r * t // n, (r + 1) * t // n", "rank 1 holds head 11, and they are 0 to 7"),
        Wrong(_SHARE + "(r + 1) * t // n - r * t // n, r * t // n", "heads 0–3 on no rank")],
    "generate": [
        Wrong(but(GENERATE, "        tokens =", "        input_ids.append(new[-1])\n        tokens ="),
              "it changes its argument input_ids")],
    "my_step_seconds": [
        Wrong("def my_step_seconds(rank_bytes, bandwidth, num_layers, latency):\n    meetings = 2 * num_layers + 2\n"
              "    return rank_bytes[0] / bandwidth + meetings * latency * (len(rank_bytes) > 1)",
              "it says 1.5 where 3.5 are right: a sum waits for the slowest rank")],
    "my_key": [
        Wrong("def my_key(parent, ids): return hash((parent, tuple(i % 1000 for i in ids)))", "token ids 1000 apart")],
    "my_overlapped_row_parallel": [
        Wrong(but(_SOLVED["my_overlapped_row_parallel"], "x.chunk(parts)", "x.chunk(parts + 1)"),
              "with 3 sums where 2 parts are asked for")],
    "my_verdict": [
        Wrong(but(_SOLVED["my_verdict"], "logits[place] - exact[place]", "logits[place, :2] - exact[place, :2]"),
              "it says 'bug', and 'rounding' is right"),
        Wrong(but(_SOLVED["my_verdict"], "<= 2 * moved", "<= moved"), "by yours, rounding explains up to 1 times"),
        Wrong(but(_SOLVED["my_verdict"], "- exact[place, other[place]]", "- logits[place, other[place]]"),
              "a logit of `exact` and one of `logits` make the margin: both are of `exact`")],
    "my_propose": [
        Wrong(but(_SOLVED["my_propose"], "length - 1, -1, -1)", "length - 1, 0, -1)"), "a place can be the first"),
        Wrong(but(_SOLVED["my_propose"], "(3, 2, 1)", "(4, 3, 2, 1)"), "three tokens are the most")],
    "my_speculate": [
        Wrong(but(_SOLVED["my_speculate"], "== chosen[kept]", "== chosen[0]"), "has 8 tokens, where 10 are known"),
        Wrong(but(_SOLVED["my_speculate"], "propose(text)", "propose(ids)"), "where the text so far must be given")],
    "my_two_buffers": [
        Wrong(but(_SOLVED["my_two_buffers"], "return sums", "return sums[::-1]"), "parts 3, 2, 1, 0 come back")],
    "my_sequence_parallel_layer": [
        Wrong(but(_SOLVED["my_sequence_parallel_layer"], "mlp(all_gather", "2 * mlp(all_gather"),
              "the MLP's sum counts 2 times (right: 1)")],
    "my_moe": [
        Wrong(but(_SOLVED["my_moe"], "F.silu(gate) * up", "F.silu(gate * up)"), "not found: silu(gate) · up")],
}
