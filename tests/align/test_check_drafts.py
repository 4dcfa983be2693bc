"""What the check sees of speculative decoding: a guess that stays is no wrong tensor; a rejected block that another
text finds is one, if ``rec.inputs`` tells the text."""

import pytest
import torch

from course import fable
from tplab import LLM, SamplingParams
from tplab.align import check
from tplab.checkpoint import open_checkpoint
from tplab.engine.runner import token_positions
from tplab.faults import fault
from tplab.patch import Patch, original
from tplab.record import record

STEP = "tplab.engine.runner.ModelRunner.execute_model"


@pytest.fixture(scope="module")
def ckpt():
    return open_checkpoint("fable")


@pytest.fixture(scope="module")
def prompts(ckpt):
    """A story that begins again, so that the next four tokens are drafted and rejected; then the same with these four
    tokens."""
    ids = ckpt.tokenizer()(fable.stories("held-out", 1)[0].text).input_ids[:40]
    return [ids + ids[:12], ids + ids[:16] + ids[20:25]]


def recorded(folder, ckpt, prompts, *faults):
    """Record the engine with drafts. The texts that it writes, and the second prompt's tokens found in the cache."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with record(folder, rank=0, world_size=1) as rec:
        watched, texts = [], {}

        def execute_model(runner, scheduler_output):
            if not watched:
                rec.watch(runner.model)
                watched.append(runner)
            rows = [(place, request.request_id) for request in scheduler_output.requests
                    for place in token_positions(request.segment)]
            new = runner.new_tokens(scheduler_output.requests)
            (request,) = scheduler_output.requests
            if request.request_id not in texts:
                texts[request.request_id] = prompts[len(texts)]
            whole = texts[request.request_id][:request.segment.start] + list(new)
            texts[request.request_id] = whole + prompts[len(texts) - 1][len(whole):]
            rec.inputs(torch.tensor(new), *map(torch.tensor, zip(*rows)), {request.request_id: whole})
            return original(STEP)(runner, scheduler_output)

        with LLM(ckpt, 1, logical=True, block_size=4, num_speculative_tokens=4,
                 patches=[Patch(STEP, execute_model), *map(fault, faults)]) as llm:
            outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
    return [list(one.outputs[0].token_ids) for one in outputs], outputs[1].metrics.prefix_hit_tokens


def test_what_is_seen_of_drafts_that_were_rejected(tmp_path, ckpt, prompts):
    texts, found = recorded(tmp_path / "right", ckpt, prompts)
    kept, _ = recorded(tmp_path / "kept", ckpt, prompts, "rejected_draft_kept")
    findable, more = recorded(tmp_path / "findable", ckpt, prompts, "rejected_draft_findable")
    assert kept[0] != texts[0], "a guess stays behind a rejected one"
    assert findable[0] == texts[0] and findable[1] != texts[1] and more == found + 4, "a rejected block is found"
    verdicts = {name: check(tmp_path / name, ckpt).verdict for name in ("right", "kept", "findable")}
    assert verdicts == {"right": "clean", "kept": "clean", "findable": "bug"}
