"""Notebook 14: rounding or bug, a sum that no number of ranks changes, guesses and what stays of them."""

from helpers.answers import Right, Wrong


def verdict(place="next((i for i, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), None)",
            margin="(exact[place, one[place]] - exact[place, other[place]]).abs()",
            moved="(logits[place] - exact[place]).abs().max()", rounding="margin <= 2 * moved",
            none='"same"', back='"rounding" if {} else "bug"'):
    """The solution, line by line."""
    return (f"def my_verdict(one, other, logits, exact):\n    place = {place}\n"
            f"    if place is None:\n        return {none}\n    margin = {margin}\n"
            f"    moved = {moved}\n    return {back.format(rounding)}\n")


def tree(body, gather="all_gather(own, dim=0, sizes=[len(s) for s in shares])"):
    return f"def my_tree_sum(own, shares):\n    leaves = {gather}\n    {body}\n"


def propose(lengths="(3, 2, 1)", starts="range(size - length - 1, -1, -1)", follows="start + length",
            last="start + length + count", nothing="[]", asked="count and "):
    """The solution, line by line."""
    return (f"def my_propose(token_ids, count):\n    size = len(token_ids)\n    for length in {lengths}:\n"
            f"        for start in {starts}:\n"
            f"            if {asked}token_ids[start:start + length] == token_ids[size - length:]:\n"
            f"                return token_ids[{follows}:{last}]\n    return {nothing}\n")


def speculate(draft="propose(text)",
              kept="while kept < len(draft) and draft[kept] == chosen[kept]:\n            kept += 1",
              more="draft[:kept] + [chosen[kept]]", have="len(text) - 1", back="text[len(ids):len(ids) + count]",
              begin="have", offset="len(text) - 1 - have"):
    """The solution, line by line."""
    return (f"def my_speculate(step, propose, ids, count):\n    text, have = list(ids), 0\n"
            f"    while len(text) < len(ids) + count:\n        draft = {draft}\n        new = text[have:] + draft\n"
            f"        chosen = step(new, list(range({begin}, {begin} + len(new))))[{offset}:]\n        kept = 0\n"
            f"        {kept}\n        text += {more}\n        have = {have}\n    return {back}\n")


ANSWERS = {
    "my_verdict": [
        Wrong(verdict(margin="exact[place].max() - exact[place, other[place]]"),
              "the margin to the largest logit is taken: it is that of the two tokens"),
        Wrong(verdict(back='"rounding"'), "it says 'rounding' of all texts that part, however far apart the"),
        Wrong(verdict(back='"bug"'), "it says 'bug' of all texts that part"),
        Wrong(verdict(rounding="margin < 0.2"), "it goes by the margin alone: how far does rounding"),
        Wrong(verdict(rounding="margin <= 3 * moved"), "by yours, rounding explains up to 3 times the"),
        Wrong(verdict(margin="exact[place].topk(2).values.diff().abs()[0]"),
              "the margin of the two largest logits is taken: which tokens did the two runs choose?"),
        Wrong(verdict(moved="(logits - exact).abs().max()"),
              "rounding is measured in other rows, too: the one where the texts part counts"),
        Wrong(verdict(none="True"), "two equal texts: it returns True (bool); one of 'same', 'rounding', 'bug' must"),
        Wrong(verdict(back="{}"), "it returns"),
        Right(verdict(moved="(logits[place] - exact[place]).abs().amax()", rounding="margin < 2 * moved")),
        Right("""
def my_verdict(one, other, logits, exact):
    for row, (a, b) in enumerate(zip(one, other)):
        if a != b:
            off = (logits[row].double() - exact[row].double()).abs()
            return "rounding" if float(exact[row, a] - exact[row, b]) < float(off.max()) * 2 else "bug"
    return "same"
"""),
    ],
    "my_tree_sum": [
        Wrong("def my_tree_sum(own, shares):\n    whole = (own.double() * 2**20).round().long().sum(0)\n"
              "    return (all_reduce(whole).double() / 2**20).float()", "13 leaves on 1 rank: on rank 0 that is"),
        Wrong(tree("return leaves.sum(0)", "all_reduce(torch.zeros(9, *own.shape[1:]).index_copy_(0, torch.tensor("
                   "list(shares[rank()])), own))"), "index 9 is out of bounds"),
        Wrong("def my_tree_sum(own, shares):\n    return all_reduce(own.sum(0))",
              "its last bits are not the same on 1, 2, 3 and 4 ranks"),
        Wrong("def my_tree_sum(own, shares):\n    return own.sum(0)",
              "each rank returns its own part: where are the parts added up?"),
        Wrong(tree("return leaves.mean(0)"), "this is the mean of the leaves"),
        Wrong(tree("return leaves[1:].sum(0)"), "leaf 0 counts 0 times (right: 1)"),
        Wrong(tree("leaves = leaves.roll(-shares[rank()].start, 0)\n    total = leaves[0]\n"
                   "    for leaf in leaves[1:]:\n        total = total + leaf\n    return total"),
              "the ranks' results differ in their last bits: each adds in an order of its own"),
        Wrong("def my_tree_sum(own, shares):\n    return all_reduce(own.double().sum(0)).float()",
              "Wider numbers round less, and the order still depends on the ranks"),
        Wrong(tree("return leaves.sum(0)", "all_gather(own, dim=0)"), "sizes=[…] has a number for each rank: h"),
        Wrong(tree("return leaves"), "it returns [9, 3, 4]; [tokens, hidden] = [3, 4] must come back"),
        Wrong(tree("return leaves.double().sum(0)"), "it returns torch.float64; torch.float32 must come back"),
        Wrong("def my_tree_sum(own, shares):\n    return all_reduce(all_reduce(own.sum(0)))", "times the sum"),
        Wrong("def my_tree_sum(own, shares):\n    if rank() == 0:\n        return all_reduce(own.sum(0))\n"
              "    return own.sum(0)", "Does every rank come to the collective?"),
        Wrong("""
def my_tree_sum(own, shares):
    total, mine = 0, shares[rank()]
    for leaf in range(shares[-1].stop):
        total = total + all_reduce(own[leaf - mine.start] if leaf in mine else torch.zeros_like(own[0]))
    return total
""", "must be enough"),
        Right(tree("total = leaves[0]\n    for leaf in leaves[1:]:\n        total = total + leaf\n    return total")),
        Right(tree("return leaves.flip(0).cumsum(0)[-1]")),
        Right("""
def my_tree_sum(own, shares):
    whole = torch.zeros(shares[-1].stop, *own.shape[1:])
    whole[shares[rank()].start:shares[rank()].stop] = own
    return all_reduce(whole).double().sum(0).float()
"""),
    ],
    "my_propose": [
        Wrong("""
def my_propose(token_ids, count):
    text = " ".join(map(str, token_ids))
    for length in range(min(3, len(token_ids) - 1), 0, -1):
        at = text.rfind(" ".join(map(str, token_ids[-length:])), 0, -1)
        if count and at >= 0:
            return token_ids[text[:at].count(" ") + length:][:count]
    return []
""", "nothing of its ending stood there before: there is no guess, []"),
        Wrong(propose(lengths="(3,)"), "where the last three tokens are not found, two and one are tried"),
        Wrong(propose(lengths="(3, 2)"), "a single token is an ending, too"),
        Wrong(propose(lengths="(1, 2, 3)"), "say more than the last one: the longest ending comes first"),
        Wrong(propose(starts="range(size - length)"), "of several places, the last counts"),
        Wrong(propose(starts="range(size - length, -1, -1)"), "the ending itself is no earlier place"),
        Wrong(propose(starts="range(size - 2 * length, -1, -1)"),
              "a place may overlap the ending: it only has to begin before it"),
        Wrong(propose(follows="start"), "it begins with the ending itself; only what followed is asked for"),
        Wrong(propose(last="start + count", follows="start"), "that is the ending itself"),
        Wrong(propose(last="size"), "that is more than `count`"),
        Wrong(propose(nothing="token_ids[:1]"), "nothing of its ending stood there before: there is no guess, []"),
        Wrong(propose(nothing="None"), "it returns nothing (is a return missing?)"),
        Right(propose(nothing="()")),
        Right(propose(asked="", last="min(size, start + length + count)")),
    ],
    "my_speculate": [
        Wrong("""
def my_speculate(step, propose, ids, count):
    new = [step(ids, list(range(len(ids))))[-1]]
    while len(new) < count:
        text = ids + new
        guess = propose(text)
        own = step(new[-1:] + guess, list(range(len(text) - 1, len(text) + len(guess))))
        for drafted, chosen in zip(guess + [None], own):
            new.append(chosen)
            if drafted != chosen:
                break
    return new[:count]
""", "it is asked before every call, also before the first"),
        Wrong(speculate(more="draft + chosen[-1:] if kept == len(draft) else chosen[:1]"),
              "before call 3 your text has 11 tokens, where 13 are known: call 2 gives the guesses up to"),
        Wrong(speculate(draft="[]"), "propose is asked 0 times: it is asked before every call, also before the first"),
        Wrong(speculate(kept="kept = len(draft)"), "before call 3, your text has 1 at position 12"),
        Wrong(speculate(have="have + len(new)"), "holds a guess that was rejected: its key has to be computed"),
        Wrong(speculate(more="draft[:kept] + [chosen[-1]]"),
              "on; the text has "),
        Wrong(speculate(more="draft[:kept] or [chosen[0]]"), "9 tokens, where 10 are known"),
        Wrong(speculate(back="text[len(ids):]"), "an accepted guess can be one too many"),
        Wrong(speculate(back="text[:len(ids) + count]"), "the prompt comes back too; only the new ids are asked for"),
        Wrong(speculate(have="0"), "call 2 begins at position 0, and the cache holds 9 tokens of the text"),
        Wrong(speculate(begin="len(text)"), "begins at position"),
        Wrong(speculate(back="None"), "it returns nothing (is a return missing?)"),
        Wrong("def my_speculate(step, propose, ids, count):\n    return list(propose(ids))[:count]",
              "step is never called"),
        Right(speculate(draft="list(propose(text))[:len(ids) + count - len(text) - 1]")),
        Right("""
def my_speculate(step, propose, ids, count):
    new, todo = [], list(ids)
    while len(new) < count:
        guess, start = propose(ids + new), len(ids + new) - len(todo)
        own = step(todo + guess, [start + i for i in range(len(todo) + len(guess))])[len(todo) - 1:]
        for drafted, chosen in zip(guess + [None], own):
            new.append(chosen)
            if drafted != chosen:
                break
        todo = new[-1:]
    return new[:count]
"""),
    ],
}
