"""Answers that are wrong, or unusual, in one corner: notebooks 04 to 10 (see ``rare.py``)."""

from helpers.answers import Right, Wrong
from helpers.answers.nb04 import _JOIN, cache
from helpers.answers.nb07 import LOAD
from helpers.answers.nb07_ranks import send
from helpers.answers.nb09 import GENERATE, SHARE, but
from helpers.answers.nb10 import counted, seconds

_TWO = (2,)  # ranks, where other numbers of them bring nothing new
_PAGES = """
def my_write_read(cache, block_ids, start, new):
    flat, size = cache.flatten(0, 1), cache.shape[1]
    slots = [block_ids[p // size] * size + p % size for p in range(start + len(new))]
    flat[slots[start:]] = new
"""
_ROWS = """
class MyRows:
    def __init__(self, source, start, shape):
        self.source, self.start, self.shape = source, start, shape
    def __getitem__(self, rows):
        first, last, _ = rows.indices(self.shape[0])
"""
_OFFERS = """
def my_best_offer(offer_here):
    offers = all_gather(offer_here, dim=-1).unflatten(-1, (-1, 2))
    best = offers[range(len(offers)), offers[:, :, 0].argmax(-1), 1].long()
"""
_WORDS = """
def my_embedding(ids, weight_here, rows):
    here = (ids >= rows.start) & (ids < rows.stop)
    found = weight_here[(ids - rows.start).where(here, 0)] * here[:, None]
"""
_NEXT = """
def my_generate(step, ids, count):
    new = [step(ids, range(len(ids)))]
    for position in range(len(ids), len(ids) + count - 1):
        new.append(step(new[-1:], [position]))
"""
_SPREAD = """
def my_spread(x):
    versions = all_gather(x[None], dim=0)
    gap = (versions.amax(0) - versions.amin(0)).max()
"""
_AGREE = """
def my_agree(work):
    failed = torch.zeros({flags})
    try:
        work()
    except Exception:
        failed[rank()] = 1
    failed = all_reduce(failed).nonzero().flatten().tolist()
    return {failed}
"""
_TOTAL = """
def my_mean(shares):
    total = torch.tensor([sum(shares[rank()]), len(shares[rank()])], dtype=torch.float64)
    mean = (all_reduce(total)[0] / total[1]).item()
"""
_ROUNDS = """
def my_rounds(write, read, rounds):
    seen = []
    for number in range(rounds):
        {before}
        if rank() == 0:
            write(number)
        barrier()
        seen.append(read())
        barrier()
    return {seen}
"""
_POOL = """
class MyPool:
    def __init__(self, num_blocks):
        self.users = [0] * num_blocks
    def allocate(self):
        block = {free}
        if block is not None: self.users[block] += 1
        return {block}
    def share(self, block): {share}
    def release(self, block):
        if not self.users[block]: raise ValueError(block)
        self.users[block] -= 1
"""


def pool(free="self.users.index(0) if 0 in self.users else None", block="block", share="self.users[block] += 1"):
    return _POOL.format(free=free, block=block, share=share)


ANSWERS = {
    "MyCache": [
        Wrong(cache([*_JOIN[:3], "self.new += [k.clone(), v.clone()]", _JOIN[3]],
                    init="self.k, self.v, self.new = [None] * num_layers, [None] * num_layers, []"),
              "it holds 3,360 bytes; 2 · 3 layers · 7 tokens · 2 heads · 5 · 4 bytes = 1,680 are needed: what "
              "else is kept?"),
        Wrong(cache(["old_k, old_v = self.k[-1], self.v[-1]", *_JOIN[1:]]),
              "1 more, append to layer 0: what another layer has stored is given out"),
        Wrong(cache([*_JOIN[:3], "self.steps += 1", "exact = self.steps < 16",
                     "return tuple(x if exact else x.bfloat16().float() for x in (self.k[layer], self.v[layer]))"],
                    init="self.k, self.v, self.steps = [None] * num_layers, [None] * num_layers, 0"),
              "in an engine, in steps, the last layer's output is ", _TWO),
        Wrong(cache([*_JOIN[:3], "self.more = torch.zeros(max(0, len(self.k[layer]) - 12))", _JOIN[3]]),
              "needed: what else is kept?", _TWO),
        Wrong(cache([*_JOIN[:3], "return self.k[layer], self.v[layer] + 1"]),
              "after 0 tokens and 4 more, append to layer 0: v is not what was given"),
        Wrong(cache([*_JOIN[:3], "return self.k[layer], self.v[layer], k"]),
              "returns a tuple of 3; the pair k, v of all tokens so far must come back"),
        Right(cache([line.replace("self.k[layer]", "self.held[layer].k").replace("self.v[layer]", "self.held[layer].v")
                     for line in _JOIN],
                    init="self.held = tuple(type('Layer', (), {'k': None, 'v': None})() for _ in "
                         "range(num_layers))")),
        Right(cache(_JOIN, head="class MyCache(torch.nn.Module):",
                    init="super().__init__(); self.k, self.v = [None] * num_layers, [None] * num_layers"))],
    "my_slot_mapping": [
        Right("def my_slot_mapping(t, positions, size): return tuple(t[p // size] * size + p % size for p in "
              "positions)")],
    "my_write_read": [
        Wrong(_PAGES + "    return flat[slots] * 2", "yours is something that is not in the cache"),
        Wrong(_PAGES + "    flat[slots[-1]] += 1\n    return flat[slots]",
              "and 4 new: place 0 of block 3, which is position 8's, holds other numbers"),
        Right(_PAGES + "    return flat[torch.tensor(slots)].clone()")],
    "my_key": [Wrong("def my_key(parent, ids): return hash((parent[-1:] if isinstance(parent, tuple) else 0, "
                     "*ids)), *ids",
                     "get the same key")],
    "MyPool": [
        Wrong(pool(share="pass"), "share(2): users is [1, 1, 0], and must be [1, 1, 1]"),
        Wrong(pool(block="block if block is None else float(block)"),
              "gives 0.0 (float); the number of a block must come back, 0 to 2, or None"),
        Wrong(pool().replace("self.users =", "self.all =").replace("self.users", "self.all")
              + "    @property\n    def users(self): return tuple(self.all)", "users is (0, 0, 0), and must be [0, "),
        Wrong(pool(free="next((b for b, count in enumerate(self.users) if count < 1 + (len(self.users) == 9)), None)"),
              "in the engine", _TWO),
        Wrong(pool(free="self.users.index(0) if sum(self.users) < 2 else 1 // 0"),
              "allocate() while no block is free: ZeroDivisionError")],
    "my_generate": [
        Wrong(_NEXT + "    return [token % 50 for token in new]", "in the engine, the text is not Hugging Face's, "
              "though "
              "the toy's was right", _TWO),
        Wrong(_NEXT.replace("step(ids,", "step(ids[::-1],") + "    return new", "call 1 is given [62, 61, 60, 59, "
              "58, 57] at "
              "position 0, and the prompt has [20, 21, 22, 23, 24, 25] there"),
        Wrong(_NEXT + "    return []", "0 ids came back; 24 new ones must"),
        Wrong(_NEXT + "    return [float(token) for token in new]",
              "10.0 (float) among them; whole numbers must come back, the new ids"),
        Wrong(_NEXT.replace("step(ids,", "step([*ids[:-1], 0],") + "    return new",
              "call 1 is given [0] at position 42, and the prompt has [62] there"),
        Wrong(_NEXT.replace("step(new[-1:], [position])", "step([new[-1], 0], [position, position + 1])") +
              "    return new",
              "is given ")],
    "my_embedding": [
        Wrong(_WORDS + "    return all_reduce(found * (rank() == 0))", "rank 0 of 2 gets for word 10, which lives "
              "on rank 1, "
              "zeros: does its owner add its row to the sum?")],
    "my_head_logits": [
        Wrong("def my_head_logits(hidden, w, sizes): return all_gather(hidden @ w.T, dim=-1, sizes=sizes)[:, :-1]",
              "it returns [3, 766]; [tokens, words] = [3, 767] must come back"),
        Wrong("def my_head_logits(hidden, w, sizes): return all_gather((hidden @ w.T).tanh(), dim=-1, sizes=sizes)",
              "See what follows in line 1 or after it")],
    "my_best_offer": [
        Wrong(_OFFERS + "    return best.roll(1)", "s [-8.0, -2.0, -7.0] The numbers are right, and stand in another"),
        Wrong(_OFFERS + "    return best % 128", "the text of sequence 0 is not Hugging Face's", _TWO),
        Wrong(_OFFERS + "    return best.int()", "it returns torch.int32; torch.int64 must come back")],
    "my_row_shard": [
        Wrong("def my_row_shard(source, columns): return source[:, columns.start:columns.stop] * 2",
              "columns 0–1 of yours stand nowhere in the file"),
        Wrong("def my_row_shard(source, columns):\n    room = torch.zeros(5, 8)[:, :len(columns)]\n"
              "    return room.copy_(source[:, columns.start:columns.stop])",
              "and with it all 160 bytes of what it was cut from, for 40 of its own")],
    "MyRows": [
        Wrong(_ROWS + "        source = self.source\n        while hasattr(source, 'source'): source = source.source\n"
              "        return source[self.start + first:self.start + last]",
              "4–10, a slice of a slice: rows 3–4 come back where rows 7–8 are meant"),
        Wrong(_ROWS + "        at = min(self.start + first, 99)\n        return self.source[at:at + last - first]",
              "of the model's file: rows 99–108 come back where rows 266–275 are meant", _TWO),
        Right(_ROWS.replace("start, shape\n", "start, list(shape)\n")
              + "        return self.source[self.start + first:self.start + last]")],
    "my_load": [
        Wrong(LOAD.replace("return kept", "return {name: kept[name] for name in [*kept][3:]}"),
              "KV heads, rank 1 of 2: 3 of 33 tensors are missing, lm_head.weight first"),
        Wrong(LOAD.replace("files[name][:, columns[layer]]", "files[name][:, columns[layer]][:, :-1].clone()"),
              "columns 13–23 come back where columns 13–24 are its MLP columns")],
    "my_send_shards": [
        Wrong(send("broadcast(part)", "broadcast(part)\n        if rank(): source[:1]"), "rank 1 reads 16 bytes "
              "itself; only "
              "rank 0 has the files")],
    "my_spread": [
        Wrong(_SPREAD + "    return gap.half().item()", "says 4.101562; the largest difference between two ranks is ",
              _TWO),
        Wrong(_SPREAD + "    return gap.item() > 0", "on rank 0 it returns False (bool); a number must come back"),
        Right(_SPREAD + "    return gap.nan_to_num(float('inf'))")],
    "my_mean": [
        Wrong(_TOTAL + "    return mean if shares[rank()] else 1 + mean",
              "[[3, 5], []]: on rank 1 it says 5; the mean of all requests is 8 / 2 = 4"),
        Wrong(_TOTAL + "    return mean > 4", "it returns True (bool); a number, on every rank, must come back")],
    "my_agree": [
        Wrong(_AGREE.format(flags=2, failed="failed"), "IndexError"),
        Wrong(_AGREE.format(flags="world_size()", failed="failed[:1] if len(failed) > 1 and rank() == 2 else failed"),
              "rank 2 says [1] where it must say [1, 4]"),
        Wrong(_AGREE.format(flags="world_size()", failed="failed[::-1]"),
              "rank 0 says [4, 1] where it must say [1, 4]"),
        Right(_AGREE.format(flags="world_size()", failed="tuple(failed)"))],
    "my_rounds": [
        Wrong(_ROUNDS.format(before="pass", seen="seen[:-1]"), "2 ranks: rank 0 returns [0, 1]; what it read must come "
              "back, [0, 1, 2]"),
        Wrong(_ROUNDS.format(before="pass", seen="tuple(seen)"), "2 ranks: rank 0 returns a tuple of 3; what it "
              "read must")],
    "my_decode_bytes": [
        Wrong(counted(back="numbers > 0"), "turns True (bool); bytes must come back Your code never reads itemsize"),
        Wrong(counted(cache="2 * kv * d * (context - 1)"), "8,448 bytes too few, and what grows with the")],
    "my_step_seconds": [
        Wrong(seconds("max(rank_bytes) / bandwidth + (2 * num_layers + 2) * latency * (len(rank_bytes) - 1)"),
              "as for 126 collectives: there are 42, two in a layer, behind attention and beh")],
    "apply_rope": [
        Wrong("def apply_rope(rotary_emb, position_ids, q, k): return [attention.apply_rotary_pos_emb(q, k, "
              "*rotary_emb(q, position_ids))[0]]", "it returns a list of 1; the pair q, k must come back"),
        Wrong("def apply_rope(rotary_emb, position_ids, q, k):\n    q, k = attention.apply_rotary_pos_emb(q, k, "
              "*rotary_emb(q, position_ids))\n    return q, k * 1.01",
                    "Every number is 1.01 times what it must be")],
    "generate": [
        Wrong(but(GENERATE, "for step in range(max_new_tokens):", "for at, one in enumerate(input_ids[:-1]):\n"
                  "        _, held = self(torch.tensor([[one]]), torch.tensor([[at]]), held)\n"
                  "    tokens, positions = tokens[:, -1:], positions[:, -1:]\n    for step in range(max_new_tokens):"),
              "8 calls; 8 in 4 are enough: the prompt can be read at once"),
        Wrong(but(GENERATE, "return new", "return new if len(input_ids) > 1 else new[:-1]"),
              "prompt of 1, 30 new: 29 ids came back; 30 new ones must"),
        Wrong(but(GENERATE, "return new", "return [str(one) for one in new]"),
              "it returns ['30', '47', '31', '19']; whole numbers must come back, the new ids")],
    "kv_share": [
        Right(but(SHARE, "return low, held, each", "return [low, held, each]"))],
}
