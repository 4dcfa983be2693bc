"""Notebook 06: both ends of the model, one decision, one token a step."""

from helpers.answers import Right, Wrong

ANSWERS = {
    "my_embedding": [
        Wrong("def my_embedding(ids, weight_here, rows): return weight_here[ids]",
              "rank 1 holds words 2 to 10, in rows 0 to 8"),
        Wrong("""
              def my_embedding(ids, weight_here, rows):
                  return all_reduce(weight_here[(ids - rows.start).clamp(0, len(rows) - 1)])
              """, "row, of rank 0, counts 1 times (right: 0)"),
        Wrong("""
              def my_embedding(ids, weight_here, rows):
                  here = (ids >= rows.start) & (ids < rows.stop)
                  return weight_here[(ids - rows.start).where(here, 0)] * here[:, None]
              """, " rank 1, zeros: where does it get what the other ranks have looked up?"),
        Wrong("""
              def my_embedding(ids, weight_here, rows):
                  first = rank() * len(rows)
                  here = (ids >= first) & (ids < first + len(rows))
                  return all_reduce(weight_here[(ids - first).where(here, 0)] * here[:, None])
              """, "word 3's row, of rank 1, counts 1 times (right: 0), word 10's row, of rank 1, counts 0"),
        Wrong("""
              def my_embedding(ids, weight_here, rows):
                  here = (ids >= rows.start) & (ids < rows.stop)
                  found = weight_here[(ids - rows.start).where(here, 0)] * here[:, None]
                  return all_gather(found[None], dim=0).sum(0)
              """, "calls all_gather; 1 all_reduce must be enough"),
        Wrong("""
              def my_embedding(ids, weight_here, rows):
                  here = (ids >= rows.start) & (ids < rows.stop)
                  found = weight_here[(ids - rows.start).where(here, 0)] * here[:, None]
                  all_reduce(found)
              """, "nothing (is a return missing?)"),
        Wrong("""
              def my_embedding(ids, weight_here, rows):
                  ids -= rows.start
                  here = (ids >= 0) & (ids < len(rows))
                  return all_reduce(weight_here[ids.where(here, 0)] * here[:, None])
              """, "it changes its argument ids"),
        Wrong("""
              def my_embedding(ids, weight_here, rows):
                  here = (ids >= rows.start) & (ids < rows.stop)
                  if not here.all() and rank() == 1:
                      return torch.zeros(len(ids), weight_here.shape[1])
                  return all_reduce(weight_here[(ids - rows.start).where(here, 0)] * here[:, None])
              """, "Every rank comes to the sum, also one that has none of the words"),
        Wrong("""
              def my_embedding(ids, weight_here, rows):
                  here = (ids >= rows.start) & (ids < rows.stop)
                  return all_reduce(weight_here[ids[here] - rows.start])
              """, "ranks meet in different collectives"),
        Right("""
              def my_embedding(ids, weight_here, rows):
                  found = torch.zeros(len(ids), weight_here.shape[1], dtype=weight_here.dtype)
                  for i, word in enumerate(ids.tolist()):
                      if word in rows:
                          found[i] = weight_here[word - rows.start]
                  return all_reduce(found)
              """),
    ],
    "my_head_logits": [
        Wrong("def my_head_logits(hidden, weight_here, sizes): return hidden @ weight_here.T",
              "0 of 2: it returns [3, 191]; [tokens, words] = [3, 767] must come back"),
        Wrong("""
              def my_head_logits(hidden, weight_here, sizes):
                  whole = all_gather(hidden @ weight_here.T, dim=-1, sizes=sizes)
                  whole[:, [3, 500]] += 1
                  return whole
              """, "and 1.54 is right Your line 2 makes the right result: what becomes of it?"),
        Wrong("def my_head_logits(hidden, weight_here, sizes): return all_gather(hidden @ weight_here.T, dim=-1)",
              "dim=-1) [191, 576] words: how does a rank hear how many the others send?"),
        Wrong("""
              def my_head_logits(hidden, weight_here, sizes):
                  here = hidden @ weight_here.T
                  here = F.pad(here, (0, max(sizes) - here.shape[1]))
                  return all_gather(here, dim=-1)
              """, "it returns [3, 1152]; [tokens, words] = [3, 767] must"),
        Wrong("""
              def my_head_logits(hidden, weight_here, sizes):
                  whole = all_gather(weight_here, dim=0, sizes=sizes)
                  return hidden @ whole.T
              """, "what is smaller in a real model, the weights or the logits of a few tokens?"),
        Wrong("""
              def my_head_logits(hidden, weight_here, sizes):
                  whole = all_gather(hidden @ weight_here.T, dim=-1, sizes=sizes)
                  return torch.cat(whole.split(sizes, dim=-1)[::-1], dim=-1)
              """, " another order Your line 2 makes the right result: what becomes of it?"),
        Wrong("def my_head_logits(hidden, weight_here, sizes): return hidden @ weight_here",
              "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        Wrong("""
              def my_head_logits(hidden, weight_here, sizes):
                  here = F.pad(hidden @ weight_here.T, (384 * rank(), 383 * (1 - rank())))
                  return all_reduce(here)
              """, "these are different words' logits. What puts them side by side?"),
        Wrong("""
              def my_head_logits(hidden, weight_here, sizes):
                  return all_gather((hidden @ weight_here.T).T, dim=0, sizes=sizes)
              """, "(yours is [words, tokens])"),
        Wrong("""
              def my_head_logits(hidden, weight_here, sizes):
                  return all_gather(hidden @ weight_here.T, dim=-1, sizes=[191, 576])
              """, "on "),
        Wrong("""
              def my_head_logits(hidden, weight_here, sizes):
                  all_gather(hidden @ weight_here.T, dim=-1, sizes=sizes)
              """, "nothing (is a return missing?)"),
        Wrong("""
              def my_head_logits(hidden, weight_here, sizes):
                  return all_gather((hidden @ weight_here.T).softmax(-1), dim=-1, sizes=sizes)
              """, "Right in yours: the logits of this rank's words"),
        Right("""
              def my_head_logits(hidden, weight_here, sizes):
                  here = F.linear(hidden, weight_here)
                  return all_gather(here.T.contiguous(), dim=0, sizes=sizes).T
              """),
        Right("def my_head_logits(hidden, w, sizes): return all_gather(F.linear(hidden, w), dim=1, sizes=sizes)"),
    ],
    "my_best_offer": [
        Wrong("""
              def my_best_offer(offer_here):
                  offers = all_gather(offer_here, dim=-1).unflatten(-1, (-1, 2))
                  return offers[:, 0, 1].long()
              """, "0's token comes back for every sequence: which rank is best for each of them?"),
        Wrong("def my_best_offer(offer_here): return offer_here[:, 1].long()",
              "they would go on with different texts"),
        Wrong("""
              def my_best_offer(offer_here):
                  offers = all_gather(offer_here, dim=-1).unflatten(-1, (-1, 2))
                  return offers[:, offers[0, :, 0].argmax(), 1].long()
              """, "Rank 1's token comes back for every sequence: which rank is best for each of them?"),
        Wrong("""
              def my_best_offer(offer_here):
                  offers = all_gather(offer_here, dim=-1).unflatten(-1, (-1, 2))
                  return offers[0, offers[0, :, 0].argmax(), 1].long()
              """, "it returns []; [sequences] = [4] must come back"),
        Wrong("""
              def my_best_offer(offer_here):
                  offers = all_gather(offer_here, dim=-1).unflatten(-1, (-1, 2))
                  return offers[:, :, 0].argmax(-1)
              """, "That is the number of the rank with the best score; which token does it offer?"),
        Wrong("""
              def my_best_offer(offer_here):
                  offers = all_gather(offer_here, dim=-1).unflatten(-1, (-1, 2))
                  a, b = offers[:, 0], offers[:, 1]
                  return a[:, 1].where(a[:, 0] >= b[:, 0], b[:, 1]).long()
              """, "Yours is rank 0's"),
        Wrong("""
              def my_best_offer(offer_here):
                  offers = all_gather(offer_here, dim=-1).unflatten(-1, (-1, 2)).flip(1)
                  return offers[range(len(offers)), offers[:, :, 0].argmax(-1), 1].long()
              """, "takes the lowest id"),
        Wrong("""
              def my_best_offer(offer_here):
                  offers = all_gather(offer_here.float(), dim=-1).unflatten(-1, (-1, 2))
                  return offers[range(len(offers)), offers[:, :, 0].argmax(-1), 1].long()
              """, "have they lost digits on the way?"),
        Wrong("""
              def my_best_offer(offer_here):
                  offers = all_gather(offer_here, dim=-1).unflatten(-1, (-1, 2))
                  return offers[range(len(offers)), offers[:, :, 0].nan_to_num(-9).argmax(-1), 1].long()
              """, "NaN counts as the largest"),
        Wrong("""
              def my_best_offer(offer_here):
                  offers = all_gather(offer_here, dim=-1).unflatten(-1, (-1, 2))
                  return offers[range(len(offers)), offers[:, :, 0].argmax(-1), 1]
              """, "torch.float64; torch.int64 must come back"),
        Wrong("""
              def my_best_offer(offer_here):
                  scores, tokens = all_gather(offer_here[:, :1], dim=-1), all_gather(offer_here[:, 1:], dim=-1)
                  return tokens.gather(1, scores.argmax(-1, keepdim=True))[:, 0].long()
              """, "calls all_gather, all_gather; 1 all_gather must be enough"),
        Wrong("""
              def my_best_offer(offer_here):
                  offers = all_gather(offer_here, dim=-1).unflatten(-1, (-1, 2))
                  best = torch.zeros(len(offers), dtype=torch.long)
                  for row, ranks in enumerate(offers):
                      top = 0
                      for score, token in ranks:
                          if score > top:
                              top, best[row] = score, token
                  return best
              """, "It is no rank's; the ranks offered tokens [10, 50, 90] with scores [-8.0, -2.0, -7.0]"),
        Wrong("""
              def my_best_offer(offer_here):
                  offers = all_gather(offer_here, dim=-1).unflatten(-1, (-1, 2))
                  if len(offers) == 3 and offers[0, 0, 1] > 40:
                      raise ValueError("never seen")
                  return offers[range(len(offers)), offers[:, :, 0].argmax(-1), 1].long()
              """, "ValueError: never seen\n         at your line 4"),
        Right("""
              def my_best_offer(offer_here):
                  offers = all_gather(offer_here, dim=0).view(-1, *offer_here.shape)
                  return offers[offers[..., 0].argmax(0), range(len(offer_here)), 1].long()
              """),
    ],
    "my_generate": [
        Wrong("""
              def my_generate(step, ids, count):
                  text = list(ids)
                  for _ in range(count):
                      text.append(step(text, range(len(text))))
                  return text[len(ids):]
              """, "1,308 were computed for them in 24 calls; 66 in 24 are enough"),
        Wrong("def my_generate(step, ids, count): return [step(ids, [0])]", "step was given 43 tokens and 1 positions"),
        Wrong("def my_generate(step, ids, count): return [step(ids, [0] * len(ids))]",
              "call 1 computes positions [0, 0, 0, 0, 0, 0], and nothing is in the cache: which come next?"),
        Wrong("""
              def my_generate(step, ids, count):
                  new = [step(ids, range(len(ids)))]
                  for at in range(len(ids), len(ids) + count - 1):
                      new.append(step(new[-1:], [at]))
                  return new[::-1]
              """, "49, 49, 49, 49] come back, and [10, 5, 31, 35, 13, 49] have been drawn"),
        Wrong("""
              def my_generate(step, ids, count):
                  new = [step(ids, range(len(ids)))]
                  while len(new) < count:
                      new.append(step(new[-1:], [len(ids) + len(new)]))
                  return new
              """, "computes positions [44], and 43 tokens are in the cache, at 0 to 42"),
        Wrong("""
              def my_generate(step, ids, count):
                  new, token = [], step(ids, range(len(ids)))
                  for i in range(count):
                      token = step([token], [len(ids) + i])
                      new.append(token)
                  return new
              """, "the first new token is missing"),
        Wrong("""
              def my_generate(step, ids, count):
                  new, token = [], step(ids, range(len(ids)))
                  for i in range(count):
                      new.append(token)
                      token = step([token], [len(ids) + i])
                  return new
              """, "67 were computed for them in 25 calls"),
        Wrong("""
              def my_generate(step, ids, count):
                  for i, token in enumerate(ids):
                      next_token = step([token], [i])
                  new = [next_token]
                  while len(new) < count:
                      new.append(step(new[-1:], [len(ids) + len(new) - 1]))
                  return new
              """, "66 calls; 66 in 24 are enough: the prompt can be read at once"),
        Wrong("""
              def my_generate(step, ids, count):
                  text = list(ids)
                  text.append(step(text, range(len(text))))
                  while len(text) < len(ids) + count:
                      text.append(step(text[-1:], [len(text) - 1]))
                  return text
              """, "the prompt comes back too"),
        Wrong("""
              def my_generate(step, ids, count):
                  new = [step(ids, range(len(ids)))]
                  while len(new) < count:
                      new.append(step(ids[-1:], [len(ids) + len(new) - 1]))
                  return new
              """, "is given [62] at position 43, and the token that was drawn for it is"),
        Wrong("""
              def my_generate(step, ids, count):
                  new = [step(ids, range(1, len(ids) + 1))]
                  return new
              """, "call 1 computes positions [1, 2, 3, 4, 5, 6], and nothing is in the cache: which come"),
        Wrong("""
              def my_generate(step, ids, count):
                  return [step(ids, range(len(ids)))]
              """, "1 id came back; 24 new ones must"),
        Wrong("""
              def my_generate(step, ids, count):
                  new = [step(ids, range(len(ids)))]
                  while len(new) < count:
                      step(new[-1:], [len(ids)])
                  return new
              """, "300 calls, and it goes on: what ends the loop?"),
        Wrong("""
              def my_generate(step, ids, count):
                  return step(ids, range(len(ids)))
              """, "a list of whole numbers must come back"),
        Wrong("""
              def my_generate(step, ids, count):
                  token = step(ids, range(len(ids)))
                  token = step(token, len(ids))
              """, "ValueError: step takes two lists, new_ids is int\n         at your line 3"),
        Wrong("""
              def my_generate(step, ids, count):
                  ids.append(step(ids, range(len(ids))))
                  while len(ids) < 43 + count:
                      ids.append(step(ids[-1:], [len(ids) - 1]))
                  return ids[-count:]
              """, "it changes its argument ids"),
        Wrong("def my_generate(step, ids, count): return []", "step is never called"),
        Wrong("""
              def my_generate(step, ids, count):
                  new = [step(ids, range(len(ids)))]
                  while len(new) < count:
                      if len(ids) == 19: raise IndexError("out of it")
                      new.append(step(new[-1:], [len(ids) + len(new) - 1]))
                  return new
              """, "IndexError: out of it"),
        Right("""
              def my_generate(step, ids, count):
                  new = [step(ids, list(range(len(ids))))]
                  for position in range(len(ids), len(ids) + count - 1):
                      new.append(step([new[-1]], [position]))
                  return new
              """),
    ],
}
