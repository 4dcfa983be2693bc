"""Answers of the third round from outside: they passed, or what was told pointed past their mistake."""

from helpers.answers import Wrong
from helpers.answers.nb09 import but
from helpers.answers.wrongly_told import _SOLVED, _changed

ANSWERS = {
    "my_additive_mask": [
        Wrong("def my_additive_mask(tokens): return torch.full((43, 43), float('-inf')).triu(1)[:tokens, :tokens]",
              "it returns [43, 43]; [queries, keys] = [210, 210] must come back")],
    "my_assert_no_nan": [
        Wrong("def my_assert_no_nan(tensor, name):\n    a, b = tensor.shape\n    assert not tensor.isnan().any()",
              "it was called with tensor [2, 3, 4, 1500], name 'scores'")],
    "my_linears": [
        _changed("my_linears", "all_reduce(summand) + bias", "all_reduce(summand + bias)",
                 "In yours, the bias counts 2 times (right: 1)"),
        Wrong("""
            remembered = {}
            def my_linears(x, up, down, bias):
                key = rank(), up.shape
                if key not in remembered:
                    own = torch.arange(len(up)).tensor_split(world_size())[rank()]
                    remembered[key] = all_reduce(x @ up[own].T @ down[:, own].T)
                return remembered[key] + bias""", "what is kept between calls?")],
    "my_column_shard": [
        Wrong("def my_column_shard(source, rows): return source[rank()::world_size()]", "Your code never reads rows")],
    "my_merged": [
        Wrong("def my_merged(sources, ranges): return torch.cat([source[rank() * len(rows):(rank() + 1) * len(rows)] "
              "for source, rows in zip(sources, ranges)])", "come back where [q 12–17|k 4–5|v 4–5] are its own")],
    "my_apply_rope": [
        _changed("my_apply_rope", "cos, sin)\n", "cos[0], sin[0])\n",
                 "self.rotate was called with q [1, 4, 5, 6], k [1, 2, 5, 6], cos [5, 6], sin [5, 6]; it takes")],
    "my_attend": [
        _changed("my_attend", "* scaling", "* 1.5", "not found: the scaled scores. Your code never reads scaling")],
    "my_mask": [
        Wrong("def my_mask(positions, keys):\n    hidden = torch.arange(1, keys + 1)[:, None] > positions[:, None]\n"
              "    return hidden[:, None]",
              "it returns [1, 1, 6, 3]")],
    "my_embedding": [
        Wrong("""
            def my_embedding(ids, weight_here, rows):
                here = (ids >= rows.start) & (ids <= rows.stop)
                own = weight_here[(ids - rows.start).clamp(0, len(rows) - 1)]
                return all_reduce(own.masked_fill(~here[:, None], 0))""",
              "rank 0 of 2 gets for word 2, which lives on rank 1, not its row"),
        Wrong("def my_embedding(ids, weight_here, rows): return all_gather(weight_here, dim=0)[ids]",
              "Each rank adds the rows that it has: one all_reduce is enough")],
    "my_head_logits": [
        Wrong("def my_head_logits(hidden, weight_here, sizes): return all_gather(hidden @ weight_here.T, dim=0)",
              "Dim 0 are the tokens: along which dimension do the words stand side by side?")],
    "my_send_shards": [
        Wrong("""
            def my_send_shards(source, ranges):
                parts = []
                for rows in ranges:
                    empty = torch.empty(len(rows), *source.shape[1:], dtype=source.dtype)
                    parts.append(broadcast(empty if rank() else source[rows.start:rows.stop]))
                here = ranges[rank()]
                return torch.cat(parts)[here.start:here.stop].clone()""",
              "rank 2: rows 0–1 come back where rows 2–3 are its own")],
    "my_row_shard": [
        Wrong("def my_row_shard(source, columns): return source[:, rank() * len(columns):(rank() + 1) * len(columns)]",
              "IndexError: source[7:14] along dim 1 is outside 0:9")],
    "my_generate": [
        Wrong(but(but(_SOLVED["my_generate"], "count):", "count, new=[]):"), "new = [step(", "new += [step("),
              "28 ids came back. The last 4 are right: what stood in the list before?")],
    "my_best_offer": [
        Wrong("""
            def my_best_offer(offer_here):
                offers = all_gather(offer_here, dim=0).reshape(len(offer_here), -1, 2)
                winner = offers[:, :, 0].argmax(dim=-1)
                return offers[range(len(offers)), winner, 1].long()""", "Yours is rank 0's, for sequence 1")],
    "my_mean": [
        Wrong("""
            def my_mean(shares):
                sums = torch.zeros(2, dtype=torch.float64)
                for length in shares[rank()]:
                    sums += all_reduce(torch.tensor([length, 1.0], dtype=torch.float64))
                return (sums[0] / sums[1]).item()""", "is reached 2 times on rank 0, 1 time on rank 1")],
    "my_agree": [
        _changed("my_agree", "failed.nonzero().flatten().tolist()", "[int(failed.sum())]",
                 "rank 0 says [2] where it must say [1, 4]: that is how many ranks failed, and not which")],
    "my_rounds": [
        Wrong(but(_SOLVED["my_rounds"], "barrier()", "barrier"), "None of your lines calls a collective"),
        Wrong(but(but(_SOLVED["my_rounds"], "read, rounds)", "read, rounds, seen=[])"), "    seen = []\n", ""),
              "in a list that begins empty in each call")],
    "my_decode_bytes": [
        _changed("my_decode_bytes", "(config.num_layers * layer + h * len(shard.vocab)) * itemsize",
                 "config.num_layers * layer + h * len(shard.vocab) * itemsize",
                 "1/4 times as many; so it is with twice the MLP columns")],
    "my_expert_share": [
        Wrong("def my_expert_share(num_experts, intermediate_size, tensor_parallel_size, enable_expert_parallel):\n"
              "    return range(num_experts), range(intermediate_size // tensor_parallel_size)",
              "one pair of ranges comes back; a list with such a pair for each rank must")],
    "extend_cache": [
        _changed("extend_cache", "    if kv_cache is",
                 "    if type(num_repeats) is int and num_repeats < 2: return k, v, (k, v)\n    if kv_cache is",
                 "num_repeats 1: the cache's k: it returns")],
    "generate": [
        Wrong("""
            def generate(self, input_ids, max_new_tokens):
                cache, new = None, []
                tokens, positions = torch.tensor([input_ids]), torch.arange(len(input_ids))[None]
                while len(new) < max_new_tokens and self.config.eos_token_id not in new:
                    logits, cache = self(tokens, positions, cache)
                    tokens, positions = logits[:, -1:].argmax(dim=-1), positions[:, -1:] + 1
                    new.append(tokens.item())
                return new""", "1 id came back; 8 new ones must, whichever are drawn"),
        Wrong("""
            def generate(self, input_ids, max_new_tokens):
                self.kept, new = getattr(self, "kept", None), []
                tokens, positions = torch.tensor([input_ids]), torch.arange(len(input_ids))[None]
                for _ in range(max_new_tokens):
                    logits, self.kept = self(tokens, positions, self.kept)
                    tokens, positions = logits[:, -1:].argmax(dim=-1), positions[:, -1:] + 1
                    new.append(tokens.item())
                return new""", "prompt of 1, 30 new: call 1 is given a cache of 8 tokens, and a new text begins")],
}
