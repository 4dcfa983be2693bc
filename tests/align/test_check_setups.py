"""Ordinary set-ups of right engines: each is clean, or cannot be told with one sentence why; and beside it a bug."""

import json

import pytest
import torch
from helpers.checkpoints import make_checkpoint
from helpers.third_party import FastLike, HfLike, VllmLike
from helpers.third_party_parts import Core, Matrix, Norm, Rotary, Weights, planned
from helpers.third_party_runs import TEXTS, batch_calls, flat_calls, run
from torch import nn
from torch.nn import functional as F

from tplab.align import check
from tplab.align.check.ordinary import _noise
from tplab.align.recording import PlacementError
from tplab.checkpoint import open_checkpoint
from tplab.ranks import all_gather, all_reduce, logical_ranks, rank
from tplab.record import record


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    return open_checkpoint(make_checkpoint(tmp_path_factory.mktemp("setups"), "llama", heads=6, kv_heads=2, head_dim=8,
                                           hidden=36, layers=3, inter=48, vocab=67))


def of(model, kind):
    return [module for module in model.modules() if isinstance(module, kind)]


def in_pairs(x, dim):
    """A head's two halves in turns: Meta's order of the numbers."""
    return x.unflatten(-1, (-1, 2, dim // 2)).transpose(-1, -2).flatten(-3)


class InPairs(Rotary):
    def turn(self, x, cos, sin):
        a, b = x.unflatten(-1, (-1, self.dim // 2, 2)).unbind(-1)
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-3)


class Written(Rotary):
    """Takes halves, writes pairs."""

    def turn(self, x, cos, sin):
        return in_pairs(super().turn(x, cos, sin), self.dim)


def meta(model, weights, rotation=InPairs):
    """Rows of q and k permuted, and a rotation in pairs: gpt-fast, llm.c."""
    for block in model.layers:
        q, k, _ = block.attention.wqkv.weight.split(block.attention.sizes)
        for part in (q, k):
            part.data.copy_(in_pairs(part.data.T.clone(), weights.config.head_dim).T)
        block.attention.rotary[0].__class__ = rotation


def written(model, weights, which=Written):
    for rotary in of(model, Rotary):
        rotary.__class__ = which


class Adapted(nn.Module):
    """A LoRA layer in the names of PEFT."""

    def __init__(self, base, factors, merged):
        super().__init__()
        self.base_layer, self.lora_A, self.lora_B = base, nn.ModuleDict(), nn.ModuleDict()
        self.lora_A["default"], self.lora_B["default"] = (Matrix((f, None)) for f in factors)
        if merged:  # the checkpoint holds the sum, the engine what lies beside
            base.weight.data -= factors[1] @ factors[0]

    def forward(self, x):
        more, out = self.lora_B["default"](self.lora_A["default"](x)), self.base_layer(x)
        return (out[0] + more, None) if isinstance(out, tuple) else out + more


def adapted(names, merged=True, lost=False):
    def change(model, weights):
        draw = torch.Generator().manual_seed(rank())
        for layer in model.model.layers:
            for name in names:
                part = layer.mlp if hasattr(layer.mlp, name) else layer.self_attn
                base = getattr(part, name)
                factors = [0.3 * torch.randn(n, m, generator=draw) for n, m in ((4, base.weight.shape[1]),
                                                                                 (base.weight.shape[0], 4))]
                layer_now = Adapted(base, factors, merged)
                if lost and rank() == 1:
                    factors[1].zero_(), layer_now.lora_B["default"].weight.data.zero_()
                setattr(part, name, layer_now)
    return change


class Stored(Core):
    """A cache that rounds what it stores."""

    def store(self, x):
        return x.to(torch.float8_e4m3fn).float()

    def forward(self, q, k, v):
        return super().forward(q, self.store(k), self.store(v))


class Int8(Stored):
    def store(self, x):
        x = x.unflatten(-1, (-1, self.dim))
        scale = x.abs().amax(-1, keepdim=True) / 127
        return ((x / scale).round() * scale).flatten(-2)


class OddScale(Stored):
    def store(self, x):
        return (x / 0.337).to(torch.float8_e4m3fn).float() * 0.337


def core(kind):
    def change(model, weights):
        for one in of(model, Core):
            one.__class__ = kind
    return change


def int8_weights(model, weights):
    for one in of(model, Matrix):
        if one.weight.shape[0] != 67:
            scale = one.weight.data.abs().amax(-1, keepdim=True) / 127
            one.weight.data = (one.weight.data / scale).round() * scale


def few_digits(round_to):
    def forward(self, x):
        y = F.linear(round_to(x), round_to(self.weight), self.bias)
        y = all_reduce(y) if self.reduce else y
        return (y, None) if self.pair else y

    def change(model, weights):
        for one in of(model, Matrix):
            one.forward = forward.__get__(one)
    return change


def tf32(x):
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1fff).view(torch.float32)  # half away from zero, as a GPU has it


FLAT, LINES = flat_calls(TEXTS, 2), batch_calls(TEXTS, 2)
CLEAN = {
    "rows of q and k permuted, rotated in pairs": (FastLike, LINES, meta, ""),
    "a rotation that writes another order": (VllmLike, FLAT, written, ""),
    "LoRA on q, k and v": (HfLike, LINES, adapted(("q_proj", "k_proj", "v_proj")), ""),
    "LoRA on the MLP": (HfLike, LINES, adapted(("gate_proj", "up_proj", "down_proj")), ""),
    "LoRA on fused matrices": (VllmLike, FLAT, adapted(("qkv_proj", "gate_up_proj")), ""),
    "a cache in fp8": (VllmLike, FLAT, core(Stored), "a cache in fp8 (e4m3)"),
    "a cache in int8": (VllmLike, FLAT, core(Int8), "a cache in int8, a scale for each token and head"),
    "8-bit weights": (VllmLike, FLAT, int8_weights, "int8 weights, a scale for each row"),
    "TF32 products": (VllmLike, FLAT, few_digits(tf32), "TF32 products"),
    "bfloat16 products": (HfLike, LINES, few_digits(lambda x: x.bfloat16().float()), "bfloat16 products"),
}


@pytest.mark.parametrize("name", CLEAN)
def test_a_right_engine_is_clean(ckpt, tmp_path, name):
    engine, calls, change, warning = CLEAN[name]
    run(tmp_path / "run", ckpt, engine, calls, change=change)
    report = check(tmp_path / "run", ckpt)
    assert report.verdict == "clean" and not report.failed, report.summary()
    assert [warning in said for said in report.warnings] == [True] * bool(warning), report.warnings
    assert {"layers.0.q", "layers.2.mlp_act"} <= report.local.keys() and len(report.points) >= 30


def beside(model, weights):
    """The rotation turns halves, the rows are permuted for pairs."""
    meta(model, weights, Rotary)


class Halved(Stored):
    def forward(self, q, k, v):
        return super().forward(q / 2, k, v)


def odd(model, weights):
    """TF32, and an epsilon that is not the checkpoint's."""
    few_digits(tf32)(model, weights)
    for one in of(model, Norm):
        one.eps = 0.1


BROKEN = {
    "rows permuted, rotated in halves": (FastLike, LINES, beside, "q", ()),
    "an adapter lost on one rank": (HfLike, LINES, adapted(("q_proj",), lost=True), "q", (1,)),
    "half the softmax scale over an fp8 cache": (VllmLike, FLAT, core(Halved), "attn", (0, 1)),
    "another epsilon beside TF32": (VllmLike, FLAT, odd, "input_norm", (0, 1)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_bug_in_an_ordinary_set_up_is_a_bug(ckpt, tmp_path, name):
    engine, calls, change, point, ranks = BROKEN[name]
    run(tmp_path / "run", ckpt, engine, calls, change=change)
    report = check(tmp_path / "run", ckpt)
    assert report.verdict == "bug" and not report.failed, report.summary()
    assert f"layers.0.{point}" in report.guilty
    assert not ranks or report.local[f"layers.0.{point}"].guilty == ranks
    if "adapter" in name:
        name = "model.layers.{i}.self_attn.q_proj"
        assert report.warnings == [f"the adapter of {name} adds nothing on rank 1 (layers 0–2)"]


OPEN = {
    "a cache of an unknown scale": (VllmLike, FLAT, core(OddScale), "eight bits"),
    "adapters that the checkpoint does not have": (HfLike, LINES, adapted(("q_proj", "v_proj"), merged=False),
                                                   "adapters"),
}


@pytest.mark.parametrize("name", OPEN)
def test_what_cannot_be_told_says_why(ckpt, tmp_path, name):
    engine, calls, change, says = OPEN[name]
    run(tmp_path / "run", ckpt, engine, calls, change=change)
    report = check(tmp_path / "run", ckpt)
    assert report.verdict == "cannot tell" and says in " ".join(report.open_questions), report.summary()


def test_noise_is_no_multiple_of_what_is_right():
    right = torch.randn(8, 40, generator=torch.Generator().manual_seed(0))
    assert _noise(0.05 * right.roll(1, 1), right)
    assert not _noise(0.05 * right, right) and not _noise(-0.05 * right, right)


def test_what_is_placed_wrongly_is_no_bug(ckpt, tmp_path):
    """A tensor under a point's name that is another one: what the engine made of the right one is right."""
    def on_rank():
        with torch.inference_mode(), record(tmp_path / "run", rank=0, world_size=1) as rec:
            model = HfLike(Weights(ckpt, planned(ckpt, 1), torch.float32))
            rec.watch(model)
            for ids, positions, sequences in LINES[:1]:
                rec.inputs(torch.tensor(ids), torch.tensor(positions))
                model.call(torch.tensor(ids), torch.tensor(positions), sequences)
                rec.tensor("layers.1.post_norm", torch.randn(*torch.tensor(ids).shape, 36))
    logical_ranks(1, on_rank)
    report = check(tmp_path / "run", ckpt)
    assert report.verdict == "cannot tell" and not report.failed, report.summary()
    assert any("layers.1.post_norm differs, but points made from it are right" in why for why in report.open_questions)


# Which ranks hold what.


def test_ranks_that_differ_by_rounding(ckpt, tmp_path):
    def change(model, weights):
        layer = model.model.layers[1].mlp.down_proj

        def forward(x):
            y = Matrix.forward(layer, x)[0]
            return (y * (1 + 1e-7 * rank()), None)
        layer.forward = forward

    run(tmp_path / "run", ckpt, VllmLike, FLAT, change=change)
    report = check(tmp_path / "run", ckpt)
    assert report.verdict == "clean" and "first at layers.1.mlp" in report.warnings[0], report.summary()


def test_a_rank_for_each_text_is_no_tensor_parallelism(ckpt, tmp_path):
    for number, text in enumerate(TEXTS):
        run(tmp_path / str(number), ckpt, VllmLike, flat_calls([text], 1), size=1)
    journal = tmp_path / "1" / "rank0" / "manifest.jsonl"
    (tmp_path / "1" / "rank0").rename(tmp_path / "0" / "rank1")
    for rank_number in range(2):
        journal = tmp_path / "0" / f"rank{rank_number}" / "manifest.jsonl"
        first, rest = journal.read_text().split("\n", 1)
        about = json.loads(first) | dict(rank=rank_number, world_size=2, run="one")
        journal.write_text(json.dumps(about) + "\n" + rest)
    with pytest.raises(PlacementError, match="data parallelism: rank 1 holds whole layers"):
        check(tmp_path / "0", ckpt)


class Staged(HfLike):
    """Each rank holds some layers, whole; the hidden states go from rank to rank."""

    held = ((0, 1), (2,))

    def __init__(self, w):
        super().__init__(w)
        self.model.layers = nn.ModuleDict({str(i): self.model.layers[i] for i in self.held[rank()]})
        for module, name in ((self.model, "embed_tokens") if rank() else (self.model, "norm"), (self, "lm_head")):
            if rank() == 0 or module is self.model:
                delattr(module, name)

    def forward(self, input_ids, position_ids):
        passed = torch.zeros(*input_ids.shape, 36)
        for stage in range(2):
            if stage == rank():
                passed = passed if rank() else self.model.embed_tokens(input_ids)
                for layer in self.model.layers.values():
                    passed = layer(passed, position_ids=position_ids)
            passed = all_reduce(passed if stage == rank() else torch.zeros_like(passed))
        return self.lm_head(self.model.norm(passed)) if rank() else None


def halved_in_layer_2(model, weights):
    if "2" in model.model.layers:
        model.model.layers["2"].mlp.act_fn.forward = lambda x: F.silu(x) / 2


class Gap(Staged):
    held = ((0,), (2,))


@pytest.mark.parametrize("engine, change, guilty, says", [
    (Staged, lambda model, weights: None, [], ""), (Staged, halved_in_layer_2, ["layers.2.mlp_act"], ""),
    (Gap, lambda model, weights: None, [], "layer 1 ran on no rank: the input of layer 2 is the output of layer 0")])
def test_stages_of_a_pipeline(ckpt, tmp_path, monkeypatch, engine, change, guilty, says):
    monkeypatch.setattr("helpers.third_party.all_reduce", lambda x: x)
    run(tmp_path / "run", ckpt, engine, LINES, shares=planned(ckpt, 1) * 2, change=change)
    report = check(tmp_path / "run", ckpt)
    assert report.guilty == guilty and report.recording.contradictions == [says] * bool(says), report.summary()
    assert report.verdict == ("bug" if guilty or says else "clean")


@pytest.mark.parametrize("filled", [0.0, 3.0, float("-inf"), 1e4])
def test_logits_wider_than_the_vocabulary(ckpt, tmp_path, filled):
    """Columns of padding are no tokens; where one of them is the largest, the engine would draw it."""
    class Wide(nn.Module):
        def __init__(self, head):
            super().__init__()
            self.head = [head]

        def forward(self, x):
            return F.pad(all_gather(self.head[0](x), sizes=[34, 33]), (0, 5), value=filled)

    class Engine(HfLike):
        def __init__(self, w):
            super().__init__(w)
            self.lm_head = Wide(self.lm_head)

        def forward(self, input_ids, position_ids):
            return self.lm_head(self.model(input_ids, position_ids))

    run(tmp_path / "run", ckpt, Engine, LINES)
    report = check(tmp_path / "run", ckpt)
    assert "logits" in report.local, report.summary()
    if filled > 1e3:
        assert report.verdict == "bug" and "a token id outside of the voc" in " ".join(report.recording.contradictions)
    else:
        assert report.verdict == "clean" and "5 columns of padding" in report.warnings[0], report.summary()


@pytest.mark.parametrize("prefixes", [("draft", "target"), ("target", "draft")])
def test_a_draft_and_its_target_in_one_record(ckpt, tmp_path, prefixes, tmp_path_factory):
    other = open_checkpoint(make_checkpoint(tmp_path / "draft", "llama", heads=6, kv_heads=2, head_dim=8, hidden=36,
                                            layers=3, inter=48, vocab=67, seed=9))
    def on_rank():
        with torch.inference_mode(), record(tmp_path / "run", rank=rank(), world_size=2) as rec:
            models = {name: HfLike(Weights(one, planned(one, 2), torch.float32))
                      for name, one in zip(prefixes, (other, ckpt) if prefixes[0] == "draft" else (ckpt, other))}
            for name, model in models.items():
                rec.watch(model, name)
            for ids, positions, sequences in LINES:
                for model in models.values():
                    rec.inputs(torch.tensor(ids), torch.tensor(positions), [0, 1])
                    model.call(torch.tensor(ids), torch.tensor(positions), sequences)
    logical_ranks(2, on_rank)
    report = check(tmp_path / "run", ckpt)
    assert report.verdict == "clean" and len(report.points) >= 30, report.summary()
    assert "target is the checkpoint's; draft was not judged" in report.recording.notes[0]
    assert check(tmp_path / "run", other).verdict == "clean"
