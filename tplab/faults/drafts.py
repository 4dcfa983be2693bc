"""Faults of speculative decoding: what stays of a draft that the model rejects."""

from tplab.faults.fault import bug
from tplab.patch import original

_UPDATE = "tplab.engine.scheduler.Scheduler.update_from_output"


def rejected_draft_kept(draft, chosen) -> int:
    return sum(guess == choice for guess, choice in zip(draft, chosen))    # as many as agree, in any place


def rejected_draft_findable(self, scheduler_output, runner_output):
    for request in scheduler_output.requests:                # other requests can find it ...
        sequence, segment = self.requests[request.request_id], request.segment
        sequence.block_table.cache_blocks([*sequence.token_ids, *request.draft], segment.start + segment.count)
    return original(_UPDATE)(self, scheduler_output, runner_output)    # ... and only now the draft is checked


_NOTEBOOK = "15_guess_and_verify"

FAULTS = (
    bug("tplab.engine.runner.num_accepted", rejected_draft_kept, "drafted tokens after the first wrong one are kept",
        "The text is good English, but it differs from the text without drafts.",
        ("vLLM's sampler counted True, False, True, True as three accepted tokens in its metrics; one is right.",
         "https://github.com/vllm-project/vllm/pull/2658"),
        ("lattice never compared the first token of a draft with the model's choice, so n-gram drafts changed texts.",
         "https://github.com/ohdearquant/lattice/issues/243"),
        first_point="embed", notebook=_NOTEBOOK, shows_in="decode"),
    bug(_UPDATE, rejected_draft_findable, "blocks of a rejected draft are found in the prefix cache",
        "This answer is right; a later prompt that contains the guessed tokens gets a wrong one.",
        ("vLLM first removed the keys of blocks when drafted tokens were rejected.",
         "https://github.com/vllm-project/vllm/pull/12333"),
        ("vLLM a day later: other requests may already use such a block, so a block gets its key only when its tokens "
         "are accepted.", "https://github.com/vllm-project/vllm/pull/12415"),
        first_point="layers.0.attn", notebook=_NOTEBOOK, shows_in="decode"),
)
