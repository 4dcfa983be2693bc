"""Answers to notebooks 09 to 14 that their checks at first accepted or misled, and right ones that they refused;
and what the second round from outside and a newcomer wrote for 06 to 08."""

from helpers.answers import Right, Wrong
from helpers.answers.nb09 import EXTEND, GENERATE, ROPE, SHARE, but
from helpers.answers.wrongly_told import _SOLVED, _changed

_MASK = "def apply_causal_mask(scores):\n    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)\n"

ANSWERS = {
    "apply_causal_mask": [
        Wrong(_MASK + "    scores.masked_fill_(future, float('-inf'))",
              "it returns nothing, and changes its argument scores, which its caller still needs"),
        Wrong("MASK = torch.ones(64, 64, dtype=torch.bool).triu(1)\ndef apply_causal_mask(scores):\n"
              "    n = scores.shape[-1]\n    return scores.masked_fill(MASK[:n, :n], float('-inf'))", "RuntimeError"),
        Wrong("def apply_causal_mask(scores):\n    kept = scores.tril()\n"
              "    return kept.masked_fill(kept == 0, float('-inf'))", "a score of 0 is taken for a hidden one")],
    "shard_weight": [
        Wrong("def shard_weight(loaded, start, size, hidden_size): return loaded.split(size)[start // size]",
              "these are the first rows; where do the rows of this rank begin?"),
        Wrong("def shard_weight(loaded, start, size, hidden_size): return loaded[start * size:(start + 1) * size]",
              "[0, 6] comes back; [8, 6] must")],
    "extend_cache": [
        Wrong(EXTEND.replace("(num_repeats,", "(int(torch.as_tensor(num_repeats).flatten()[0]),"),
              "0 tokens in the cache, 3 new, num_repeats tensor([1, 2]): k for attention")],
    "apply_rope": [
        Wrong(but(ROPE, "(q, position_ids)\n", "(position_ids, q)\n"), "rotary_emb takes (x, position_ids), and as"),
        Wrong(but(ROPE, "position_ids)\n", "position_ids[:, :1] + torch.arange(q.shape[2]))\n"),
              "it is turned as at positions [[5, 6, 7, 8, 9, 10], [0, 1, 2, 3, 4, 5]]")],
    "generate": [
        Wrong(GENERATE.replace("range(max_new_tokens)", "range(max(max_new_tokens, 1))"),
              "prompt of 2, 0 new: 1 id came back; 0 new ones must"),
        Wrong(GENERATE.replace("max_new_tokens):", "max_new_tokens, kept=[None]):", 1).replace("held, new = torch",
              "new = torch").replace(", None, []", ", []").replace("held = self", "kept[0] = self").replace(
              "positions, held)", "positions, kept[0])"), "call 1 is given a cache of 8 tokens, and a new text beg")],
    "kv_share": [
        Wrong(but(SHARE, "return low, held", "return held, low"), "(1, 0, tensor([4])) repeats KV heads to []")],
    "my_decode_bytes": [
        _changed("my_decode_bytes", "config.head_dim", "config.hidden_size // config.num_heads",
                 "With twice the head_dim, 68,428,800 bytes are added, and yours adds nothing"),
        Wrong("""
            def my_decode_bytes(config, shard, context, itemsize):
                h, d = config.hidden_size, config.head_dim
                q, kv = shard.q_heads.stop, shard.kv_heads.stop
                layer = h * (2 * q + 2 * kv) * d + 3 * h * shard.mlp.stop + 2 * context * kv * d
                return (config.num_layers * layer + h * shard.vocab.stop) * itemsize""",
              "With ranges of the same lengths that begin at 0 it is right")],
    "my_step_seconds": [
        _changed("my_step_seconds", "max(rank_bytes) / bandwidth + collectives * latency",
                 "(max(rank_bytes) + collectives * latency) / bandwidth", "The latency adds 2.1e-09 seconds, as for")],
    "my_router": [Right("""
def my_router(logits, top_k, renormalize):
    p = logits.float().softmax(-1)
    ids = p.argsort(-1, descending=True)[:, :top_k]
    w = p.gather(-1, ids)
    return (w / w.sum(-1, keepdim=True) if renormalize else w), ids
""")],
    "my_expert_share": [Wrong("""
def my_expert_share(num_experts, intermediate_size, tensor_parallel_size, enable_expert_parallel):
    total = num_experts if enable_expert_parallel else intermediate_size
    size, rest = divmod(total, tensor_parallel_size)
    size, rest = (size, rest) if size else (1, 0)
    ends = [r * size + min(r, rest) for r in range(tensor_parallel_size + 1)]
    parts = [range(a, b) for a, b in zip(ends, ends[1:])]
    return [(p, range(intermediate_size)) if enable_expert_parallel else (range(num_experts), p) for p in parts]
""", "2 experts of 8 columns, 3 ranks, enable_expert_parallel=True: rank 2 holds expert 2, and they are 0 to 1")],
    "my_full_width_norm": [
        _changed("my_full_width_norm", "not any(head in other for other in earlier)", "head not in heads[rank() - 1]",
                 "2 ranks with heads 0 and 0: a head that several ranks hold counts on none of them")],
    "my_reduce_scatter": [
        _changed("my_reduce_scatter", "x.split(sizes)", "x.chunk(len(sizes))",
                 "5 tokens, of which the ranks keep 2/3: on rank 0 it returns [3, 5]"),
        _changed("my_reduce_scatter", "    rows, at", "    if not sizes[rank()]: return x[:0]\n    rows, at",
                 "1 token, of which the ranks keep 1/0: rank 1 returned")],
    "my_overlapped_row_parallel": [
        _changed("my_overlapped_row_parallel", "weight.T", "(weight * (1 + rank())).T",
                 "None of your lines makes rank 1's product of part 0"),
        Wrong("def my_overlapped_row_parallel(x, weight, parts):\n    chunks, sums, work = x.chunk(parts), [], None\n"
              "    buffer = x.new_empty(len(chunks[0]), len(weight))\n    for rows in (*chunks, None):\n        if "
              "rows is not None: buffer[:len(rows)].copy_(rows @ weight.T)\n        if work: work.wait(); sums.append("
              "buffer[:size].clone())\n        if rows is not None: work, size = all_reduce(buffer[:len(rows)], "
              "async_op=True), len(rows)\n    return torch.cat(sums)",
              "part 0's sum stands nowhere, and in its place stands what part 1 makes")],
    "my_two_buffers": [
        _changed("my_two_buffers", "    works, sums = [], []\n", "    works, sums, one = [], [], parts[0]\n",
                 "0 parts of no rows, 2 ranks: on every rank: IndexError"),
        _changed("my_two_buffers", ".clone())", ".clone() / world_size())",
                 "the sum of part 0 is wrong Every number is 0.5 times what it must be")],
    "my_verdict": [
        _changed("my_verdict", "if place is None", "if not place", "it says 'same', and 'rounding' is right"),
        Wrong(_SOLVED["my_verdict"].replace("[place, ", "[place - 1, ").replace("s[place]", "s[place - 1]").replace(
              "t[place]", "t[place - 1]"), "the row before is read: each row has the logits from which its own token"),
        _changed("my_verdict", ".abs().max()", ".abs().mean()", "the mean of the changes is measured"),
        Wrong(_SOLVED["my_verdict"].replace("    margin", "    row = min(place + 1, len(exact) - 1)\n    margin")
              .replace("[place, ", "[row, ").replace("s[place]", "s[row]").replace("t[place]", "t[row]")
              .replace(".max", ".mean"), "rounding can move a logit by the largest the row after is read"),
        _changed("my_verdict", "    margin", "    exact = exact.to(logits.dtype)\n    margin",
                 "`exact` is rounded to bfloat16 first"),
        _changed("my_verdict", "- exact[place])", "- exact[place].to(logits.dtype))", "`exact` is rounded to bfloat16"),
        Wrong(but(_SOLVED["my_verdict"], "<=", ">"), "'rounding' and 'bug' are exchanged"),
        _changed("my_verdict", "next((i for", "next((one.index(a) for", "the place is looked up by its token"),
        Wrong(but(but(_SOLVED["my_verdict"], ".max()", ".sum()"), "2 * ", ""), "the changes of all logits are added")],
    "my_tree_sum": [
        _changed("my_tree_sum", "    leaves = all", "    if len(shares) == 1: return own.sum(0)\n    leaves = all",
                 "On 2, 3 and 4 ranks they are, and one rank has others"),
        Wrong("def my_tree_sum(own, shares):\n    leaves = all_gather(own, dim=1, sizes=[own.shape[1]] * len(shares))\n"
              "    return leaves.sum(0)", "The leaves are dim 0, the tokens dim 1 and the hidden numbers dim 2"),
        Wrong("def my_tree_sum(own, shares): return all_reduce(own.sum(0)).round(decimals=4)",
              "is 0, and 6.732e-06 is right"),
        _changed("my_tree_sum", "    leaves = all", "    one = own[0]\n    leaves = all", "3 leaves on 4 ranks:")],
    "my_propose": [
        _changed("my_propose", "    size = len", "    last = token_ids[-1]\n    size = len", "tokens [], count 3:"),
        _changed("my_propose", "return []\n    for", "return token_ids[:1]\n    for", "count is 0: no guess is asked")],
    "my_speculate": [
        Wrong(but(but(_SOLVED["my_speculate"], "while len(text) < len(ids) + count:", "while True:"),
                  "        have = len(text) - 1\n", "        have = len(text) - 1\n        if len(text) >= len(ids) + "
                  "count:\n            break\n"), "took 1 call, where 0 are enough. No token is asked for")],
    "my_generate": [
        Wrong("""
            def my_generate(step, ids, count):
                new = [step(ids, list(range(len(ids))))]
                while True:
                    new.append(step([new[-1]], [len(ids) + len(new) - 1]))
                    if len(new) == count:
                        return new""", "prompt of 2, 1 new: 300 calls, and it goes on")],
    "my_embedding": [
        Wrong("""
            def my_embedding(ids, weight_here, rows):
                out = weight_here.new_zeros(len(ids), weight_here.shape[1])
                for i, token in enumerate(ids.tolist()):
                    if token in rows:
                        out[i] = weight_here[token - rows.start]
                    all_reduce(out)
                return out""", "not its row, after 10 collectives: is what is a sum already added up again?")],
    "MyLayer": [
        _changed("MyLayer", "F.silu(x @ self.gate.T) * (x @ self.up.T)", "F.silu(x @ self.up.T) * (x @ self.gate.T)",
                 "mlp_act is act(up) × gate: gate and up were taken for each other"),
        _changed("MyLayer", "self.k[:, self.here.kv_for_q], self.v[:, self.here.kv_for_q]", "self.k, self.v",
                 "here.q_heads range(0, 8), here.kv_heads range(0, 2), here.kv_for_q (0, 0, 0, 0, 1, 1, 1, 1)")],
    "MyRows": [
        Wrong("""
            class MyRows:
                def __init__(self, source, start, shape):
                    self.source, self.start, self.shape = source, start, shape
                def __getitem__(self, rows):
                    first, last, _ = rows.indices(self.shape[0])
                    self.start += first
                    return self.source[self.start:self.start + last - first]""",
              "Read first, it is right: what does a read change?")],
    "my_agree": [
        _changed("my_agree", "nonzero().flatten().tolist()", "nonzero().tolist()",
                 "it returns [[1], [4]]; whole numbers must come back, the failed ranks, which are [1, 4]")],
    "my_rounds": [
        Wrong("""
            def my_rounds(write, read, rounds):
                seen = []
                for number in range(rounds):
                    if rank() == 0:
                        write(number)
                    while read() != number + rank():  # rank 1 waits for a number that is never written
                        pass
                    seen.append(number)
                return seen""", "What ends it if the number that it waits for is not there yet, or not any more?")],
    "my_moe": [
        _changed("my_moe", "    summand = t", "    one = experts[0]\n    summand = t",
                 "and 0 experts: on rank 2: IndexError"),
        _changed("my_moe", "torch.zeros_like(x)", "torch.zeros(x.shape)", "in bfloat16 ")],
}
