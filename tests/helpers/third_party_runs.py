"""Third-party engines recorded on logical ranks, and their recordings compared with Hugging Face."""

import torch
from helpers.third_party_parts import Share, Weights, planned

from tplab.align.reference import hf_model, hf_trace
from tplab.checkpoint import Checkpoint
from tplab.ranks import logical_ranks, rank
from tplab.record import record

TEXTS = [[3, 14, 15, 9, 26, 5, 35, 8, 30], [7, 40, 2, 11, 60, 33, 1, 50, 12]]


def texts(count, length, vocab=67):
    """Drawn ones, the same every time."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(vocab, (length,), generator=generator).tolist() for _ in range(count)]


def run(folder, ckpt: Checkpoint, engine, calls, *, size: int = 2, shares: list[Share] | None = None,
        dtype: torch.dtype = torch.float32, change=lambda model, weights: None, ranks=None, said=None,
        unrecorded: int = 0, parameters: bool = False, **options) -> None:
    """Record ``engine`` on logical ranks.

    Args:
        calls: of ``(ids, positions)``; ids ``[tokens]`` with positions that begin at 0 for each sequence, or
            ``[batch, tokens]``. Third: sequence numbers of the rows.
        change: called with the model and its weights before the first call.
        ranks: those that record; all if not given.
        said: what the recorder is told of a call, ``said(rec, ids, positions, sequences)``; all of it if not given.
        unrecorded: so many calls run before the recorder is there.
        parameters: record the weights too.
        options: of ``record``.
    """
    shares = shares or planned(ckpt, size)

    def on_rank():
        with torch.inference_mode():
            weights = Weights(ckpt, shares, dtype)
            model = engine(weights)
            change(model, weights)
            if ranks is not None and rank() not in ranks:
                return [model.call(*map(torch.tensor, call[:2]), call[2]) for call in calls] and None
            for ids, positions, sequences in calls[:unrecorded]:
                model.call(torch.tensor(ids), torch.tensor(positions), sequences)
            with record(folder, rank=rank(), world_size=size, **options) as rec:
                rec.watch(model)
                if parameters:
                    rec.parameters(model)
                for ids, positions, sequences in calls[unrecorded:]:
                    ids, positions = torch.tensor(ids), torch.tensor(positions)
                    (said or type(rec).inputs)(rec, ids, positions, torch.tensor(sequences))
                    model.call(ids, positions, sequences)

    logical_ranks(size, on_rank)


def wrong_points(recording, ckpt: Checkpoint, tolerance: float = 1e-4) -> dict[str, float]:
    """Points of a recording that are not Hugging Face's on the same texts, with the largest relative difference."""
    traces = [hf_trace(hf_model(ckpt, torch.float32), ids) for ids in recording.ids]
    wrong = {}
    for name, shards in recording.points.items():
        if name.rpartition(".")[2] in ("gate", "up"):
            continue
        places = recording.logit_places if name == "logits" else recording.places
        true = torch.stack([traces[number][name][position] for number, position in places])
        if name.endswith(".attn"):
            true = true.view(len(true), -1, ckpt.config.head_dim)
        held = [shard for shard in shards if shard is not None]
        if held[0].kind == "partial":
            pairs = [(sum(shard.tensor.float() for shard in held), true)]
        else:
            pairs = [(shard.tensor.float(), true[:, list(shard.indices)] if shard.indices else true) for shard in held]
        off = max(((a - b).abs().max() / true.abs().max()).item() if a.shape == b.shape else float("inf")
                  for a, b in pairs)
        if not off <= tolerance:
            wrong[name] = off
    return wrong


def flat_calls(texts: list[list[int]], decoded: int = 0) -> list:
    """Calls of flat tokens: all texts but their last ``decoded`` tokens at once, then one token of each after another.
    """
    whole = [(number, position) for number, text in enumerate(texts) for position in range(len(text) - decoded)]
    steps = [[(number, len(text) - decoded + step) for number, text in enumerate(texts)] for step in range(decoded)]
    return [([texts[n][p] for n, p in rows], [p for _, p in rows], [n for n, _ in rows]) for rows in [whole, *steps]]


def batch_calls(texts: list[list[int]], decoded: int = 0) -> list:
    """The same for texts of one length as ``[batch, tokens]``."""
    length, spans = len(texts[0]) - decoded, []
    spans.append(range(length))
    spans += [range(at, at + 1) for at in range(length, length + decoded)]
    return [([[text[p] for p in span] for text in texts], [list(span) for _ in texts],
             [number for number in range(len(texts)) for _ in span]) for span in spans]
