"""Faults at the two ends of the model, and of loading."""

import torch

from tplab.faults.fault import bug, only_if, two_ranks
from tplab.patch import Patch
from tplab.ranks import rank


def head_random(self, parameter: str, source) -> None:
    random = torch.Generator().manual_seed(rank())                     # the checkpoint's head is not read:
    self.weight.data.normal_(std=0.02, generator=random)               # the weight stays random


def head_random_untied(self, embedding):
    head_random(self, "weight", embedding)                             # and it is not tied either
    return self


def tie_ignored(self, embedding):
    self.weight.data.zero_()                                           # initialised, never tied, never filled
    return self


def vocab_offset(input_ids: torch.Tensor, rows: range) -> tuple[torch.Tensor, torch.Tensor]:
    elsewhere = (input_ids < rows.start) | (input_ids >= rows.stop)
    return input_ids.masked_fill(elsewhere, 0).clamp(max=len(rows) - 1), elsewhere   # rows.start is not subtracted


def full_copy_on_every_rank(source, rows: range) -> torch.Tensor:
    return source[:][rows.start:rows.stop]                             # read all of it, then cut


def full_copy_of_columns(source, columns: range) -> torch.Tensor:
    return source[:][:, columns.start:columns.stop]


_tied = only_if(lambda c: c.tie_word_embeddings, "this model's head is not tied to its embedding")
_HEAD = "tplab.shard.embedding.ParallelLMHead"

FAULTS = (
    bug(f"{_HEAD}.load", head_random, "the LM head is random",
        "One meaningless token for ever, or a few in turn, for any prompt.",
        ("Ministral 3 wrote gibberish in transformers: the outer config did not say that the head is tied, so it was "
         "initialised at random.", "https://github.com/huggingface/transformers/pull/43429"),
        ("picotron always initialises a new head, tied or not, before it trains.",
         "https://github.com/huggingface/picotron/blob/main/picotron/checkpoint.py"),
        first_point="logits", notebook="06_full_tp_generate",
        more=(Patch(f"{_HEAD}.tie_weights", head_random_untied),)),
    bug(f"{_HEAD}.tie_weights", tie_ignored, "the head of a tied model is never filled",
        "All logits are equal, so the first token of the vocabulary is repeated for ever.",
        ("transformers under tensor parallelism: a tied head needs the embedding cut along the vocabulary, too.",
         "https://github.com/huggingface/transformers/pull/47503"),
        ("foundation-model-stack and axolotl refuse tensor parallelism for tied models.",
         "https://github.com/foundation-model-stack/foundation-model-stack/pull/331"),
        first_point="logits", notebook="06_full_tp_generate", needs=_tied),
    bug("tplab.shard.embedding.local_ids", vocab_offset, "the shard's first row is not subtracted from the token id",
        "Tokens of the vocabulary's first part are read correctly, and all others are read as one other token.",
        ("In the logits: Megatron-Bridge used positions in a rank's shard of the logits as token ids.",
         "https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/4780"),
        ("exllamav3 wrote one device's logits to the beginning of the gathered row, whatever their offset.",
         "https://github.com/turboderp-org/exllamav3/issues/233"),
        first_point="embed", notebook="06_full_tp_generate", needs=two_ranks),
    bug("tplab.shard.linear.column_shard", full_copy_on_every_rank,
        "every rank reads whole tensors and cuts afterwards",
        "The text is right; each rank reads the whole checkpoint.",
        ("A change to nano-vllm that reads slices was withdrawn: memory-mapped reading had hidden the difference in "
         "peak RSS. Count bytes instead.", "https://github.com/GeeeekExplorer/nano-vllm/pull/262"),
        ("mini-sglang took nearly ten minutes to load a 30B model, because every rank read full tensors.",
         "https://github.com/sgl-project/mini-sglang/pull/101"),
        first_point="load", notebook="07_sharded_loading", needs=two_ranks,
        more=(Patch("tplab.shard.embedding.column_shard", full_copy_on_every_rank),
              Patch("tplab.shard.linear.row_shard", full_copy_of_columns))),
)
