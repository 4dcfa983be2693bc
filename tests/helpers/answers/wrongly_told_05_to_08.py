"""The same for notebooks 05 to 08."""

from helpers.answers import Right, Wrong
from helpers.answers.nb09 import but
from helpers.notebooks import solutions

from course import lesson

_SOLVED = solutions(lesson.all_exercises())
_MEAN, _AGREE, _LOAD = (_SOLVED[name] for name in ("my_mean", "my_agree", "my_load"))


def _changed(name: str, old: str, new: str, words: str) -> Wrong:
    return Wrong(but(_SOLVED[name], old, new), words)


ANSWERS = {
    "my_write_read": [
        _changed("my_write_read", "    flat[slots[start:]]", "    cache[block_ids] = 0\n    flat[slots[start:]]",
                 "place 0 of block 1, which is position 0's, holds zeros now: only the places of the new")],
    "MyPool": [
        _changed("MyPool", "if 0 not in self.users:", "if 0 not in self.users[:-1]:",
                 "it gives nothing, though no sequence uses block 2")],
    "my_embedding": [
        _changed("my_embedding", "    return all_reduce(",
                 "    if not here.any(): return weight_here[0 * ids]\n    return all_reduce(",
                 "The words are [1, 0, 1]; rank 1 holds words 2 to 10")],
    "my_head_logits": [
        _changed("my_head_logits", "hidden @ weight_here.T", "hidden.float() @ weight_here.float().T",
                 "torch.float64 must come back On 2 ranks, with three tokens in float32, it is right")],
    "my_row_shard": [
        _changed("my_row_shard", "columns.start:columns.stop", ":len(columns)", "these are the first columns; where")],
    "MyRows": [
        Wrong("class MyRows(dict):\n    def __init__(self, source, start, shape):\n"
              "        self.source, self.own, self.shape = source, range(start, start + shape[0]), shape\n"
              "    def __getitem__(self, rows):\n        rows = self.own[rows]\n"
              "        return self.setdefault('rows', self.source[rows.start:rows.stop])",
              "Read first, it is right: what does a read change?")],
    "my_load": [
        Wrong(but(_LOAD, "slice(here.vocab.start, here.vocab.stop)", "slice(rank * ckpt.config.vocab_size // "
                  "len(plan.ranks), here.vocab.stop)"), "rows 21–42 come back where rows 22–42 are its tokens"),
        Wrong(but(_LOAD, "[rows[layer]]", "[rows[layer]].float()"), "torch.float32 comes back; torch.float64 must")],
    "my_send_shards": [
        _changed("my_send_shards", "    for owner", "    if not ranges[rank()]: return torch.empty(0)\n    for owner",
                 "Every rank takes part in every broadcast"),
        Right("def my_send_shards(source, ranges):\n    mine = []\n    for row in range(source.shape[0]):\n"
              "        one = torch.empty(1, *source.shape[1:], dtype=source.dtype)\n"
              "        broadcast(one if rank() else one.copy_(source[row:row + 1]))\n"
              "        mine += [one] if row in ranges[rank()] else []\n"
              "    return torch.cat([torch.empty(0, *source.shape[1:], dtype=source.dtype), *mine])")],
    "my_spread": [
        _changed("my_spread", "x[None]", "x", "So much do rows differ, also those of one rank"),
        _changed("my_spread", "    versions", "    if not x.any(): return 0.0\n    versions",
                 "Here rank 0 holds zeros: every rank comes")],
    "my_mean": [
        Wrong(but(_MEAN, "    all_reduce(total)\n", "    for part in total.split(1)[::1 - rank() % 2 * 2]:\n"
                  "        all_reduce(part)\n"), "do all ranks make their sums in the same order?")],
    "my_agree": [
        Wrong(but(_AGREE, "except Exception", "except (OSError, KeyError, ValueError)"), "or raised again, it leaves"),
        Wrong(but(but(_AGREE, "world_size()", "2"), "[rank()]", "[rank() % 2]"),
              "rank 0 says [0, 1] where it must say [1, 4]"),
        Wrong(but(_AGREE, "= 1", "= rank()"), "rank 0 says [] where it must say [0]: what is in place 0 on each")],
    "my_rounds": [
        Wrong("def my_rounds(write, read, rounds):\n    seen = []\n    for number in range(rounds):\n"
              "        if rank() == 0:\n            write(number)\n            barrier()\n        seen.append(read())\n"
              "        barrier()\n    return seen", "Collective 1 is in line 6 on rank 0, 8 on rank 1")],
}
