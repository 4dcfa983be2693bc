"""What a call is about: padding, prefixes of other texts, drafts that were rejected. All of these engines are right."""

import pytest
import torch
from helpers.checkpoints import make_checkpoint
from helpers.third_party import VllmLike
from helpers.third_party_parts import Core, Weights, planned
from helpers.third_party_runs import TEXTS, flat_calls

from tplab.align import check
from tplab.checkpoint import open_checkpoint
from tplab.ranks import logical_ranks, rank
from tplab.record import record

FLAT = flat_calls(TEXTS, 2)


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    return open_checkpoint(make_checkpoint(tmp_path_factory.mktemp("calls"), "llama", heads=6, kv_heads=2, head_dim=8,
                                           hidden=36, layers=3, inter=48, vocab=67))


def recorded(folder, ckpt, calls, engine=VllmLike, size=2, said=lambda rec, *call: rec.inputs(*call), kind=Core
             ):
    """Record calls ``(ids, positions, sequences)`` of which ``said`` tells the recorder what it likes."""
    shares = planned(ckpt, size)

    def on_rank():
        with torch.inference_mode(), record(folder, rank=rank(), world_size=size) as rec:
            model = engine(Weights(ckpt, shares, torch.float32))
            for module in model.modules():
                module.__class__ = kind if isinstance(module, Core) else type(module)
            rec.watch(model)
            for ids, positions, sequences in calls:
                call = torch.tensor(ids), torch.tensor(positions), torch.tensor(sequences)
                said(rec, *call)
                model.call(*call[:2], sequences)
    logical_ranks(size, on_rank)
    return folder


class Padded(Core):
    """Rows of sequence -1 are padding: nothing is written for them, and what they hold is not looked at."""

    def forward(self, q, k, v):
        real = [row for row, sequence in enumerate(self.call) if sequence >= 0]
        out, whole, self.call = torch.zeros_like(q), self.call, [self.call[row] for row in real]
        out[real] = super().forward(q[real], k[real], v[real])
        self.call = whole
        return out


PADDED = [FLAT[0], *([[*call[0], 0, 0], [*call[1], 0, 0], [*call[2], -1, -1]] for call in FLAT[1:])]
SAYS = {
    "sequence -1": lambda rec, ids, positions, numbers: rec.inputs(ids, positions, numbers),
    "id -1": lambda rec, ids, positions, numbers: rec.inputs(ids.where(numbers >= 0, -1), positions, numbers.abs()),
    "position -1": lambda rec, ids, positions, numbers: rec.inputs(ids, positions.where(numbers >= 0, -1)),
    "sequences of their own": lambda rec, ids, positions, numbers: rec.inputs(
        ids, positions, torch.where(numbers < 0, 9 + torch.arange(len(ids)), numbers)),
    "not at all": lambda rec, *call: rec.inputs(*(x[call[2] >= 0] for x in call)),
}


@pytest.mark.parametrize("how", SAYS)
def test_a_decode_batch_padded_to_the_size_of_a_graph(ckpt, tmp_path, how):
    class Engine(VllmLike):
        def call(self, ids, positions, sequences):
            for module in self.modules():
                if isinstance(module, Core):
                    module.call = sequences
            last = {sequence: row for row, sequence in enumerate(sequences)}
            return self.logits_processor(self(ids, positions), list(last.values()))

    report = check(recorded(tmp_path / "run", ckpt, PADDED, Engine, said=SAYS[how],
                            kind=Padded), ckpt)
    assert report.verdict == "clean" and len(report.recording.places) == 18, report.summary()


def test_texts_padded_on_their_left_under_a_mask(ckpt, tmp_path):
    """Hugging Face's own generate on two texts of different lengths."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(ckpt.folder, dtype=torch.float32).eval()
    ids = torch.tensor([[0, 0, 0, 3, 14, 15], [7, 40, 2, 11, 60, 33]])
    with torch.inference_mode(), record(tmp_path / "run", rank=0, world_size=1) as rec:
        rec.watch(model)
        model.generate(ids, attention_mask=torch.tensor([[0, 0, 0, 1, 1, 1], [1] * 6]), max_new_tokens=4,
                       do_sample=False, pad_token_id=0, eos_token_id=None)
    report = check(tmp_path / "run", ckpt)
    assert report.verdict == "clean" and len(report.recording.places) == 9 + 6, report.summary()


class Shared(Core):
    """The second text finds six keys of the first in the cache, or keys that were not recorded."""

    more = 0

    def forward(self, q, k, v):
        if self.call[0] == 1 and 1 not in self.past:
            self.past[1] = tuple(x[:6] + self.more for x in self.past[0])
        return super().forward(q, k, v)


PREFIXED = [(TEXTS[0], list(range(9)), [0] * 9), ([44, 21, 9], [6, 7, 8], [1] * 3), ([5], [9], [1])]


def test_a_prefix_that_another_text_computed(ckpt, tmp_path):
    report = check(recorded(tmp_path / "run", ckpt, PREFIXED, kind=Shared), ckpt)
    assert report.verdict == "clean" and len(report.recording.places) == 13, report.summary()
    assert report.ids[1] == [*TEXTS[0][:6], 44, 21, 9, 5]


def test_a_prefix_that_nobody_recorded(ckpt, tmp_path):
    class Unknown(Shared):
        more = 1

    report = check(recorded(tmp_path / "run", ckpt, PREFIXED, kind=Unknown), ckpt)
    assert report.verdict == "cannot tell" and not report.guilty, report.summary()
    assert "the tokens before it were not recorded" in report.open_questions[0]


class Rewound(Core):
    """The rows of a call overwrite what its cache has from its first position on."""

    def forward(self, q, k, v):
        number = self.call[0]
        if number in self.past:
            self.past[number] = tuple(x[:STARTS[len(q)]] for x in self.past[number])
        return super().forward(q, k, v)


DRAFTS = [([3, 14, 15, 9, 26], 0), ([5, 35, 8, 30], 5), ([61, 2, 44], 7), ([12, 1], 8), ([50], 10)]
STARTS = {len(ids): start for ids, start in DRAFTS}


@pytest.mark.parametrize("says", ["sequences", "positions alone"])
def test_drafted_tokens_that_were_rejected_are_computed_anew(ckpt, tmp_path, says):
    calls = [(ids, list(range(start, start + len(ids))), [0] * len(ids)) for ids, start in DRAFTS]

    report = check(recorded(tmp_path / "run", ckpt, calls, kind=Rewound, said=lambda rec, ids, positions, numbers:
                            rec.inputs(ids, positions, *[numbers] * (says == "sequences"))), ckpt)
    assert report.verdict == "clean", report.summary()
    assert report.ids == [[3, 14, 15, 9, 26, 5, 35, 61, 12, 1, 50]]


@pytest.mark.parametrize("chunks", [[9], [4, 5]])
def test_a_wrong_position_is_no_rewound_text(ckpt, tmp_path, chunks):
    """Decode steps that count from the last token instead of behind it."""
    starts = [sum(chunks[:i]) for i in range(len(chunks))]
    calls = [(TEXTS[0][s:s + n], list(range(s, s + n)), [0] * n) for s, n in zip(starts, chunks)]
    calls += [([50], [8], [0]), ([12], [9], [0])]
    report = check(recorded(tmp_path / "run", ckpt, calls), ckpt)
    assert report.verdict == "bug" and report.guilty[:2] == ["layers.0.q_rope", "layers.0.k_rope"], report.summary()


