"""Answers that were written to be told, and at first were not: accepted, misled, or told nothing that helps."""

from helpers.answers import Wrong
from helpers.answers.nb09 import but
from helpers.notebooks import solutions

from course import lesson

_SOLVED = solutions(lesson.all_exercises())
_POOL, _CACHE, _ROPE, _LAYER = (_SOLVED[name] for name in ("MyPool", "MyCache", "my_rope", "MyLayer"))
_APPLY = """
def my_apply_rope(self, q, k, cos, sin):
    try:
        q, k = self.rotate(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
        return q[0].transpose(0, 1), k[0].transpose(0, 1)
    except RuntimeError:
        return q, k
"""


def _changed(name: str, old: str, new: str, words: str) -> Wrong:
    return Wrong(but(_SOLVED[name], old, new), words)


ANSWERS = {
    "mask_scores": [
        Wrong("def mask_scores(scores, mask): return scores.masked_fill(mask, float('-inf')).log_softmax(-1)",
              "exp of each row adds up to 1: that is what comes out of a softmax")],
    "my_additive_mask": [
        Wrong("def my_additive_mask(tokens): return torch.zeros(tokens, tokens).masked_fill(torch.eye(tokens).bool(), "
              "float('-inf'))", "the first, query 0, key 0, is hidden, and not hidden is right")],
    "my_key": [
        Wrong("import zlib\ndef my_key(parent, ids): return zlib.crc32(repr(parent).encode()) % 100, tuple(ids)",
              "how many different keys can yours have?")],
    "my_slot_mapping": [
        Wrong("def my_slot_mapping(t, positions, n): return [t[-1 - p // n] * n + p % n for p in positions]",
              "position 0 goes to slot 12, place 0 of block 3")],
    "my_spread": [
        Wrong("def my_spread(x): return (x - broadcast(x.clone())).abs().max().item()",
              "on rank 0 it says 0; the largest difference between two ranks is 1.75")],
    "my_agree": [
        Wrong("def my_agree(work):\n    ok = torch.ones(world_size())\n    try:\n        work()\n    except "
              "Exception:\n        ok[rank()] = 0\n    return (all_reduce(ok) == 0).nonzero().flatten().tolist()",
              "what is in place 1 on each rank")],
    "my_linears": [
        _changed("my_linears", "// world_size()", "// 2", "its share is 40: which rank has less?")],
    "my_rope": [
        Wrong(but(_ROPE, "other * angles.sin()", "other * angles.cos()"), "not found: their sines")],
    "my_apply_rope": [Wrong(_APPLY, "a rotation that fails must stop the engine")],
    "my_positions": [
        Wrong("def my_positions(starts, counts): return torch.arange(starts[0], starts[0] + sum(counts))",
              "yours are [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14], and")],
    "my_attend": [_changed("my_attend", "* scaling", "* scaling ** 0.5", "not found: the scaled scores")],
    "MyCache": [
        Wrong(but(_CACHE, "torch.cat([old_k, k]), torch.cat([old_v, v])",
                  "torch.cat([old_k, k])[-8:], torch.cat([old_v, v])[-8:]"),
              "= [20, 3, 4] must come back")],
    "MyPool": [
        Wrong(but(_POOL, "self.users[block] = 1", "self.users[block] = 1\n        self.users.append(0)"),
              "users is [1, 0, 0, 0], and must be [1, 0, 0]")],
    "my_generate": [
        _changed("my_generate", "[position]))", "[position]))\n        if new[-1] < 3:\n            break",
                 "prompt of 1, 8 new: 2 ids came back; 8 new ones must, whichever are drawn")],
    "my_embedding": [_changed("my_embedding", "all_reduce(found", "all_reduce(-found", "It is right but for its sign")],
    "MyLayer": [
        Wrong(but(_LAYER, "torch.cat([self.k, k]), torch", "torch.cat([self.k, heads[:, len(self.here.q_heads):][:, "
                  ":len(self.here.kv_heads)]]), torch"), "are there, but not rotated: which keys does the cache keep?"),
        Wrong(but(_LAYER, 'q, k = point("q_rope"', 'return hidden\n        q, k = point("q_rope"'),
              "right up to 'v', your line 39; what it returns: hidden comes back as it went in"),
        Wrong(but(but(_LAYER, 'q, k = point("q_rope"', 'return hidden\n        q, k = point("q_rope"'),
                  "+ self.bias)", ")"),
              "the bias was left out. Right up to 'input_norm', your line 36"),
        Wrong(but(_LAYER, " + self.eps)", ")"), "the checkpoint says 0.01. It is the first point")],
    "my_assert_no_nan": [
        Wrong("def my_assert_no_nan(tensor, name):\n    lost = tensor.isnan().double().mean()\n"
              "    assert lost == 0, f'NaN in {name}: {lost:.2f} % of {list(tensor.shape)}'",
              "Here 30 % of the numbers")],
    "my_mean": [
        Wrong("def my_mean(shares):\n    mean = torch.tensor(shares[rank()], dtype=torch.float64).mean()\n"
              "    return all_reduce(mean.nan_to_num()).item()", "Those are the ranks' means, added up")],
    "shard_weight": [
        Wrong("def shard_weight(loaded, start, size, hidden_size):\n"
              "    return loaded.view(-1, hidden_size)[start:start + size]",
              "a bias [20], 4 from 12 on: [0, 20] comes back; [4] must")],
    "apply_rope": [
        _changed("apply_rope", "rotary_pos_emb(q, k,", "rotary_pos_emb(k, q,", "it returns k, q; q comes first")],
    "my_decode_bytes": [
        _changed("my_decode_bytes", "* columns", "* config.intermediate_size", "and yours adds nothing")],
    "my_step_seconds": [
        _changed("my_step_seconds", "/ bandwidth", "/ bandwidth / len(rank_bytes)", "they are divided already")],
    "my_overlapped_row_parallel": [
        Wrong(but(but(_SOLVED["my_overlapped_row_parallel"], "rows in x.chunk(parts)",
                      "rows, columns in zip(x.chunk(parts, 1), weight.chunk(parts, 1))"), "rows @ weight.T",
                  "rows @ columns.T").replace("torch.cat(sums)", "sum(sums)"),
              "60 numbers are summed up where 30 are enough: of each token once")],
    "my_two_buffers": [
        _changed("my_two_buffers", "sums.append(buffers[i % 2]", "sums.append(buffers[(i + 1) % 2]",
                 "stands what part 1 makes: that is in buffer 1, and the sum of part 0 in buffer 0")],
    "my_reduce_scatter": [
        Wrong(but(but(_SOLVED["my_reduce_scatter"], "pass_on(summed) + rows[at % len(sizes)]", "pass_on(summed)"),
                  "return summed", "return summed + rows[rank()]"),
              "On 2 ranks, where each row travels once, it is right")],
    "my_moe": [
        Wrong(but(_SOLVED["my_moe"], "    return all_reduce(summand)",
                  "        summand = all_reduce(summand)\n    return summand"),
              "4 × all_reduce, one for each expert: a sum over the ranks is summed again")],
    "my_speculate": [
        _changed("my_speculate", "        text += draft[:kept]", "        kept = sum(map(int.__eq__, draft, chosen))\n"
                 "        text += draft[:kept]", "2 at position 24, where the model chose 3"),
        _changed("my_speculate", "draft[kept] == chosen[kept]:", "draft[kept] == chosen[kept + 1]:",
                 "3 at position 13, where the model chose 2"),
        Wrong(but(but(_SOLVED["my_speculate"], "        have = len(text) - 1\n", ""), "        text += draft",
                  "        have = len(text)\n        text += draft"),
              "and the cache holds 9 tokens of the text: they stay")],
    "my_verdict": [
        _changed("my_verdict", "moved = (logits[place] - exact[place])", "moved = (logits - exact)[place, "
                 "[one[place], other[place]]]", "the larger change of the two tokens is measured")],
}
