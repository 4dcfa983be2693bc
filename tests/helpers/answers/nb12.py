"""Notebook 12: who chooses, who holds and who adds up experts, and a norm over all ranks' heads."""

from helpers.answers import Right, Wrong


def router(weights="p.gather(1, ids)", ids="logits.topk(top_k).indices",
           p="logits.float().softmax(-1)",
           back="weights / weights.sum(-1, keepdim=True) if renormalize else weights, ids"):
    """The solution in three lines, one of them changed."""
    return (f"def my_router(logits, top_k, renormalize):\n    p = {p}\n    ids = {ids}\n    weights = {weights}\n"
            f"    return {back}\n")


def share(whole="[(part, range(m)) for part in parts]", cut="[(range(n), part) for part in parts]",
          bounds="[r * total // size for r in range(size + 1)]"):
    """Both ways of dealing out; n, m, size, ep: what it is called with."""
    return ("def my_expert_share(n, m, size, ep):\n    total = n if ep else m\n"
            f"    bounds = {bounds}\n    parts = [range(a, b) for a, b in zip(bounds, bounds[1:])]\n"
            f"    return {whole} if ep else {cut}\n")


def moe(start="summand = torch.zeros_like(x)", chosen="rows, place = torch.where(ids == expert)",
        inner="gate, up = (x[rows] @ gate_up[local].T).chunk(2, dim=-1)",
        out="out = (F.silu(gate) * up) @ down[local].T",
        add="summand.index_add_(0, rows, out * weights[rows, place, None])", back="return all_reduce(summand)"):
    """The solution, line by line."""
    return (f"def my_moe(x, weights, ids, experts, gate_up, down):\n    {start}\n"
            f"    for local, expert in enumerate(experts):\n        {chosen}\n        {inner}\n        {out}\n"
            f"        {add}\n    {back}\n")


def norm(squares="all_reduce(own.pow(2).sum(-1)[:, first].sum(-1))", mean="squares / weight.numel()",
         scaled="(own * torch.rsqrt(mean + eps)[:, None, None]).to(x.dtype)",  # cast first, as OLMoE does
         weighed="weight.view(-1, x.shape[-1])[mine.start:mine.stop] * scaled",
         first="[not any(h in other for other in heads[:rank()]) for h in mine]"):
    """The solution, line by line."""
    return (f"def my_full_width_norm(x, weight, eps, heads):\n    mine, own = heads[rank()], x.float()\n"
            f"    first = {first}\n    squares = {squares}\n    mean = {mean}\n    scaled = {scaled}\n"
            f"    return {weighed}\n")


ANSWERS = {
    "my_router": [
        Wrong(router(p="logits.float().exp() / logits.float().exp().sum(-1, keepdim=True)"),
              "exp of a logit beyond 88 is more than float32 holds"),
        Wrong(router(back="(weights / weights.sum(-1, keepdim=True) if renormalize else weights).squeeze(), ids"),
              "it returns []; [tokens, top_k] = [1, 1] must come back"),
        Wrong(router(back="weights, ids"), "do not add up to 1, and renormalize asks for it"),
        Wrong(router(back="weights / weights.sum(-1, keepdim=True), ids"),
              "On renormalize=True it is right"),
        Wrong(router(weights="logits.gather(1, ids)", back="weights, ids"), "these are logits; a weight is a"),
        Wrong(router(weights="logits.gather(1, ids)"), "these are logits, divided by their sum"),
        Wrong(router(p="logits.sigmoid()"), "the weights are a sigmoid's"),
        Wrong(router(p="logits.softmax(0)"), "the softmax runs over the tokens: which numbers must add up to 1?"),
        Wrong(router(ids="logits.topk(top_k, largest=False).indices"), "which end of the row does topk take?"),
        Wrong(router(back="ids, weights"), "the pair is (weights, ids), and this one is turned round"),
        Wrong(router(back="weights"), "it returns a tensor [5, 2]; (weights, ids) must come back"),
        Wrong(router(weights="p.topk(2).values", ids="p.topk(2).indices"),
              "it returns [4, 2]; [tokens, top_k] = [4, 3] must come back"),
        Wrong(router(p="logits.softmax(-1).float()"), "in bfloat16, the weights have lost digits: in which dtype"),
        Wrong(router(back="weights / weights.amax(-1, keepdim=True) if renormalize else weights, ids"),
              "divided by the largest of them, where their sum is asked for"),
        Wrong(router(back="weights / weights.sum() if renormalize else weights, ids"),
              "of all tokens together add up to 1, where those of each token should"),
        Wrong(router(back="weights.flip(1) / weights.sum(-1, keepdim=True) if renormalize else weights.flip(1), ids"),
              "the right weights, in another order than the ids"),
        Wrong(router(back="torch.full_like(weights, 1 / top_k), ids"), "all experts of a token weigh the same"),
        Wrong(router(weights="p.gather(1, ids).softmax(-1)", back="weights, ids"), "the softmax is there twice"),
        Wrong(router(back="weights, ids.float()"), "ids are torch.float32; whole numbers must come back"),
        Right(router()),
        Wrong(router(back="(weights / weights.sum(-1, keepdim=True) if renormalize else weights).to(logits.dtype), "
                     "ids"), "in bfloat16, the weights are torch.bfloat16; torch.float32 must come back"),
        Right("""
              def my_router(logits, top_k, renormalize):
                  ids = logits.argsort(-1)[:, -top_k:]                  # the best one last
                  scores = torch.exp(logits.float() - logits.float().amax(-1, keepdim=True))
                  picked = scores.gather(1, ids)
                  return picked / (picked if renormalize else scores).sum(-1, keepdim=True), ids
              """),
        Right("""
              def my_router(logits, top_k, renormalize):
                  best = torch.topk(logits.float(), top_k, sorted=False)
                  if renormalize:
                      return best.values.softmax(-1), best.indices.int()
                  return (best.values - logits.float().logsumexp(-1, keepdim=True)).exp(), best.indices
              """),
    ],
    "my_expert_share": [
        Wrong(share(bounds="[r * (total // size) for r in range(size + 1)]"),
              "column 9 on no rank: which rank takes what is left over?"),
        Wrong(share(bounds="[r * (total // size) for r in range(size)] + [total]"),
              "8 experts of 10 columns, 3 ranks, enable_expert_parallel=True: 2/2/4 experts on the ranks"),
        Wrong(share(whole="[(range(len(part)), range(m)) for part in parts]"),
              "every rank begins with expert 0: they are counted in the whole model"),
        Wrong(share(whole="[(range(n), part) for part in parts]", cut="[(part, range(m)) for part in parts]"),
              "whole experts are dealt out, where a part of each expert is asked for"),
        Wrong("def my_expert_share(n, m, size, ep): return [(range(n), range(r * m // size, (r + 1) * m // size)) "
              "for r in range(size)]", "each expert is cut, where whole experts are to be dealt out"),
        Wrong("def my_expert_share(n, m, size, ep): return [(range(r * n // size, (r + 1) * n // size), "
              "range(r * m // size, (r + 1) * m // size)) for r in range(size)]", "both are dealt out, experts and"),
        Wrong(share(whole="[(range(m), part) for part in parts]", cut="[(part, range(n)) for part in parts]"),
              "the pair is (experts, columns), and this one is turned round"),
        Wrong(share(whole="[(range(r, n, size), range(m)) for r in range(size)]"),
              "rank 0 holds experts 0, 2, 4, 6: a rank reads one slice of the file"),
        Wrong(share(whole="[(len(part), m) for part in parts]"), "gets 4 (int) in its pair; which experts"),
        Wrong(share(cut="[range(n)] * size"), "a pair must come back for it, (experts, columns)"),
        Wrong(share(whole="[(parts[-1 - r], range(m)) for r in range(size)]"),
              "the ranks' experts are not in the order of the ranks"),
        Wrong(share(whole="[(range(part.start, min(part.stop + 1, n)), range(m)) for part in parts]"),
              "expert 4 is on ranks 0 and 1: what both compute is in the sum twice"),
        Wrong(share(cut="[(range(n), range(part.start, part.stop - 1)) for part in parts]"),
              "columns 2, 5 on no rank: where does each rank's part begin, and where does"),
        Wrong(share(whole="[(range(part.start + 1, part.stop + 1), range(m)) for part in parts]"),
              "rank 1 holds experts 5–8, and they are 0 to 7"),
        Wrong(share(whole="[(part, range(m - 1)) for part in parts]"), "holds an expert whole holds all its columns"),
        Wrong("""
              def my_expert_share(n, m, size, ep):
                  assert n % size == 0, "experts must divide"
                  return [(range(r * n // size, (r + 1) * n // size), range(m)) if ep else
                          (range(n), range(r * m // size, (r + 1) * m // size)) for r in range(size)]
              """, "AssertionError: experts must divide"),
        Right(share()),
        Right("""
              def my_expert_share(n, m, size, ep):
                  from tplab.shard import split_evenly
                  if ep:
                      return [(list(part), list(range(m))) for part in split_evenly(n, size)]
                  return tuple((tuple(range(n)), part) for part in split_evenly(m, size))
              """),
        Right("""
              def my_expert_share(num_experts, intermediate_size, tensor_parallel_size, enable_expert_parallel):
                  def parts(total):
                      return [t.tolist() for t in torch.arange(total).tensor_split(tensor_parallel_size)]
                  everything = [list(range(num_experts)), list(range(intermediate_size))]
                  if enable_expert_parallel:
                      return [[part, everything[1]] for part in parts(num_experts)]
                  return [[everything[0], part] for part in parts(intermediate_size)]
              """),
    ],
    "my_moe": [
        Wrong(moe(start="weights = weights / weights.sum(-1, keepdim=True)\n    summand = torch.zeros_like(x)"),
              "a token's weights are divided by their sum: they are as the router wants them"),
        Wrong(moe(chosen="rows, place = torch.where(ids == local)"),
              "ids are those of the model, and yours are taken for a rank's own"),
        Wrong(moe(back="return summand"), "each rank returns its own summand. Where are they added up?"),
        Wrong(moe(back="all_reduce(summand.clone())\n    return summand"), "is its result used?"),
        Wrong(moe(back="return all_reduce(all_reduce(summand))"), "Every number is 2 times what it must be"),
        Wrong(moe(add="summand.index_add_(0, rows, out)"), "no weight is in it: each expert's output"),
        Wrong(moe(add="summand.index_add_(0, rows, out * weights[rows, :1])"), "have the weight of its first one"),
        Wrong(moe(inner="gate, up = ((x[rows] * weights[rows, place, None]) @ gate_up[local].T).chunk(2, dim=-1)",
                  add="summand.index_add_(0, rows, out)"), "the weights stand before the expert"),
        Wrong(moe(inner="up, gate = (x[rows] @ gate_up[local].T).chunk(2, dim=-1)"), "gate and up are exchanged"),
        Wrong(moe(inner="inner = x[rows] @ gate_up[local].T\n        gate, up = inner[:, ::2], inner[:, 1::2]"),
              "and every second row is taken for gate's"),
        Wrong(moe(out="out = (gate * up) @ down[local].T"), "there is no activation"),
        Wrong(moe(out="out = (F.gelu(gate) * up) @ down[local].T"), "another activation than silu"),
        Wrong(moe(add="summand[rows] = out * weights[rows, place, None]"), "the second overwrites the first"),
        Wrong(moe(start="here = (ids >= experts.start) & (ids < experts.stop)\n    weights = weights * here\n"
                        "    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)\n"
                        "    summand = torch.zeros_like(x)"), "the weights are divided by their sum on each rank"),
        Wrong(moe(add="one = torch.zeros_like(x).index_add_(0, rows, out * weights[rows, place, None])\n"
                      "        summand += all_reduce(one)", back="return summand"),
              "the op log holds 4 × all_reduce. One sum is enough, after the loop"),
        Wrong(moe(add="summand.index_add_(0, rows, out * weights[rows, place, None])",
                  back="return all_reduce(summand) if summand.any() else summand"), "has a summand, too: zeros"),
        Wrong("""
              def my_moe(x, weights, ids, experts, gate_up, down):
                  summand = torch.zeros_like(x)
                  for local, expert in enumerate(experts):
                      gate, up = (x @ gate_up[local].T).chunk(2, dim=-1)
                      weight = (weights * (ids == expert)).sum(-1, keepdim=True)
                      summand += weight * ((F.silu(gate) * up) @ down[local].T)
                  return all_reduce(summand)
              """, "only the rows that have chosen an expert go through it"),
        Wrong(moe(out="out = (F.silu(gate) * up) @ down[local]"), "mat1 and mat2 shapes cannot be multiplied"),
        Wrong(moe(back="all_reduce(summand)"), "is a return missing?"),
        Wrong(moe(back="total = all_reduce(summand.clone())\n    return total if rank() == 0 else summand"),
              "counts 0 times (right: 0."),
        Wrong(moe(start="summand = torch.zeros(x.shape)"), "in bfloat16 on", (2, 3)),
        Wrong(moe(chosen="rows, place = torch.where(ids == rank() * len(experts) + local)"), " ranks it is right"),
        Wrong(moe(back="return all_reduce(summand) if len(experts) < 8 else summand"),
              "s all experts, but only some columns of each: where are they added up?"),
        Right(moe()),
        Right("""
              def my_moe(x, weights, ids, experts, gate_up, down):
                  token, place = torch.where((ids >= experts.start) & (ids < experts.stop))
                  local = ids[token, place] - experts.start
                  gate, up = torch.einsum("rh,rih->ri", x[token], gate_up[local]).chunk(2, dim=-1)
                  out = torch.einsum("ri,rhi->rh", F.silu(gate) * up, down[local])
                  mine = torch.zeros_like(x).index_add(0, token, out * weights[token, place][:, None])
                  return all_reduce(mine)
              """),
        Right("""
              def my_moe(x, weights, ids, experts, gate_up, down):
                  rows = []
                  for token, vector in enumerate(x):
                      row = torch.zeros_like(vector)
                      for weight, expert in zip(weights[token], ids[token].tolist()):
                          if expert in experts:
                              local = expert - experts[0]
                              gate, up = (gate_up[local] @ vector).tensor_split(2)
                              row = row + weight * (down[local] @ (F.silu(gate) * up))
                      rows.append(row)
                  return all_reduce(torch.stack(rows))
              """),
        Right(moe(chosen="rows, place = (ids == expert).nonzero(as_tuple=True)\n        if rows.numel() == 0: continue",
                  add="summand = summand.index_add(0, rows, weights[rows, place].unsqueeze(-1) * out)")),
    ],
    "my_full_width_norm": [
        Wrong(norm(squares="own.pow(2).sum((1, 2))", mean="squares / (len(mine) * x.shape[-1])"),
              "each rank takes the mean of its own heads: this norm has one mean"),
        Wrong(norm(squares="own.pow(2).mean(-1)", scaled="own * torch.rsqrt(squares + eps)[:, :, None]"),
              "each head is normalised by itself, as Qwen3 has it"),
        Wrong(norm(squares="own.pow(2).sum((1, 2))"), "own squares by the number of all: where are the sums added up?"),
        Wrong(norm(squares="all_reduce(own.pow(2).mean((1, 2)))", mean="squares / world_size()"),
              "the ranks' means are averaged, and a rank with more heads counts more"),
        Wrong(norm(squares="all_reduce(own.pow(2).mean((1, 2)))", mean="squares"), "a sum of means is no mean"),
        Wrong(norm(squares="all_reduce(own.pow(2).sum((1, 2)))"), "a head that two ranks hold counts twice"),
        Wrong(norm(weighed="x"), "these are the numbers that went in"),
        Wrong(norm(squares="all_reduce(own.pow(2).sum(-1)[:, first].sum())", mean="squares / weight.numel() / len(x)",
                   scaled="own * torch.rsqrt(mean + eps)"), "one mean is taken over all tokens; each has its own"),
        Wrong(norm(mean="squares"), "this is the sum of the squares, not their mean"),
        Wrong(norm(scaled="own * torch.rsqrt(mean)[:, None, None]"), "eps is not added to the mean"),
        Wrong(norm(scaled="own / (mean.sqrt() + eps)[:, None, None]"), "eps stands behind the root"),
        Wrong(norm(weighed="scaled"), "the weight is missing"),
        Wrong(norm(weighed="weight.view(-1, x.shape[-1])[:len(mine)] * scaled"), "every rank takes the first weights"),
        Wrong(norm(weighed="(1 + weight.view(-1, x.shape[-1])[mine.start:mine.stop]) * scaled"), "1 is added to the"),
        Wrong(norm(weighed="weight * scaled"), "The size of tensor a"),
        Wrong(norm(scaled="own / (mean + eps)[:, None, None]"), "the root is missing: this divides by the mean"),
        Wrong(norm(squares="own.pow(2).mean(0, keepdim=True)", scaled="own * torch.rsqrt(squares + eps)"),
              "the mean runs over the tokens"),
        Wrong(norm(squares="all_reduce(all_reduce(own.pow(2).sum(-1)[:, first].sum(-1))) / world_size()"),
              "the numbers are right, with 2 collectives; one is enough"),
        Wrong(norm(scaled="own * torch.rsqrt(mean + eps)[:, None, None]", weighed="weight.float().view(-1, x.shape[-1])"
                   "[mine.start:mine.stop] * scaled"), "it returns torch.float32; torch.float16 must come back"),
        Wrong(norm(squares="all_reduce(own.pow(2).sum((1, 2))) if rank() == 0 else own.pow(2).sum((1, 2))"),
              "rank 0 waits in all_reduce"),
        Wrong(norm(weighed="(weight.view(-1, x.shape[-1])[mine.start:mine.stop] * scaled).flatten(1)"),
              "[tokens, heads here, head_dim] = [4, 4, 6] must come back"),
        Wrong(norm(weighed="None"), "is a return missing?"),
        Wrong(norm(weighed="weight.view(-1, x.shape[-1])[rank() * len(mine):][:len(mine)] * scaled"),
              "2 ranks with heads 0–2 and 3–4: a rank's weights are taken from rank() * len(own heads) on"),
        Wrong(norm(squares="all_reduce(own.pow(2).sum(-1)[:, first].sum(-1) / weight.numel() + eps)",
                   mean="squares - eps"), "eps is added on each rank"),
        Wrong(norm(squares="all_reduce(x.pow(2).sum(-1)[:, first].sum(-1)).float()"),
              "in float16, there are only zeros: the squares do not fit"),
        Right(norm()),
        Right("""
              def my_full_width_norm(x, weight, eps, heads):
                  whole = all_gather(x, dim=1, sizes=[len(part) for part in heads])
                  order = [head for part in heads for head in part]
                  once = whole[:, [order.index(head) for head in range(max(order) + 1)]].flatten(1)
                  done = F.rms_norm(once.float(), once.shape[-1:], weight.float(), eps).to(x.dtype)
                  return done.unflatten(1, (-1, x.shape[-1]))[:, list(heads[rank()])]
              """),
        Right("""
              def my_full_width_norm(x, weight, eps, heads):
                  copies = torch.tensor([sum(head in part for part in heads) for head in heads[rank()]])
                  squares = (x.float() ** 2).sum(-1) / copies                 # each copy brings its share
                  total = all_reduce(squares.sum(-1, keepdim=True))
                  scale = (total / weight.numel() + eps) ** -0.5
                  own = weight.unflatten(0, (-1, x.shape[-1]))[heads[rank()].start:heads[rank()].stop]
                  return (x.float() * scale[..., None]).to(x.dtype) * own
              """),
        Right(norm(squares="all_reduce((own * torch.tensor(first)[:, None]).flatten(1).norm(dim=1) ** 2)")),
    ],
}
