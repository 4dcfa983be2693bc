"""Bugs of engines that are not the lab's, each by its name: caches, fused weights, in-place norms, a head's order."""

import pytest
import torch
from helpers.checkpoints import make_checkpoint
from helpers.sentences import hold
from helpers.third_party import VllmLike
from helpers.third_party_parts import Core, Norm
from helpers.third_party_runs import flat_calls, run

from tplab.align import check
from tplab.checkpoint import open_checkpoint
from tplab.ranks import rank, world_size

TEXTS = [[3, 14, 15, 9, 26, 5, 35, 8, 30, 44], [7, 40, 2, 11, 60, 33, 1, 50, 12, 6]]
CALLS = flat_calls(TEXTS, 3)


@pytest.fixture(scope="module")
def ckpts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("named")
    llama = make_checkpoint(folder / "llama", "llama", heads=6, kv_heads=2, head_dim=8, hidden=36, layers=2, inter=48,
                            vocab=67)
    qwen2 = make_checkpoint(folder / "qwen2", "qwen2", heads=8, kv_heads=2, head_dim=8, hidden=64, layers=2, inter=48,
                            vocab=67)
    return {"llama": open_checkpoint(llama), "qwen2": open_checkpoint(qwen2)}


def core(kind):
    def change(model, weights):
        for one in model.modules():
            if isinstance(one, Core):
                one.__class__ = kind
    return change


class Unwritten(Core):
    """What decode steps compute is not written into the cache, or only a part of it."""

    lost = "kv"

    def forward(self, q, k, v):
        decodes = len(q) == len(set(self.call))
        k, v = (torch.full_like(x, fill) if decodes and part in self.lost else x
                for x, part, fill in ((k, "k", 1.5), (v, "v", -2.0)))
        return super().forward(q, k, v)


class NoKeys(Unwritten):
    lost = "k"


class NoValues(Unwritten):
    lost = "v"


class Hole(Core):
    """One slot of the prompt was never written."""

    fill = 0.7

    def forward(self, q, k, v):
        if len(q) > len(set(self.call)):
            k, v = k.clone(), v.clone()
            k[4], v[4] = self.fill, -self.fill
        return super().forward(q, k, v)


class Huge(Hole):
    fill = 1e4


class Unscaled(Core):
    """An fp8 cache whose scale is applied where it is written and not where it is read."""

    def forward(self, q, k, v):
        return super().forward(q, *((x / 0.25).to(torch.float8_e4m3fn).float() for x in (k, v)))


@pytest.mark.parametrize("kind", [NoKeys, NoValues, Hole, Huge])
def test_rows_of_a_cache_that_were_not_written(ckpts, tmp_path, kind):
    run(tmp_path / "run", ckpts["llama"], VllmLike, CALLS, change=core(kind))
    report = check(tmp_path / "run", ckpts["llama"])
    assert [one.names for one in report.diagnoses] == [("cache_row_stale",)], report.summary()
    assert hold(report.diagnoses[0]) and report.guilty == ["layers.0.attn", "layers.1.attn"]


def last(mask):
    return mask & ~mask.roll(-1, -1)


ODD = {  # what is no row of the table, and what no eight bits leave
    "a bias by distance": lambda s, mask: Core.weigh(None, s + 0.1 * mask.cumsum(-1), mask),
    "a sink": lambda s, mask: torch.softmax(torch.cat([
        s.masked_fill(~mask, float("-inf")), torch.zeros_like(s[..., :1])], -1), -1)[..., :-1],
    "capped scores": lambda s, mask: Core.weigh(None, 0.5 * torch.tanh(2 * s), mask),
    "more of the first key": lambda s, mask: Core.weigh(None, s + 0.7 * (torch.arange(s.shape[-1]) == 0), mask),
    "more of the own key": lambda s, mask: Core.weigh(None, s + 0.7 * last(mask), mask),
    "every third key dropped": lambda s, mask: Core.weigh(None, s, mask & (torch.arange(s.shape[-1]) % 3 != 1)),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_in_no_table_has_no_name_and_is_a_bug(ckpts, tmp_path, name):
    kind = type("Odd", (Core,), {"weigh": lambda self, scores, mask: ODD[name](scores, mask)})
    run(tmp_path / "run", ckpts["llama"], VllmLike, CALLS, change=core(kind))
    report = check(tmp_path / "run", ckpts["llama"])
    assert report.verdict == "bug" and [one.fault for one in report.diagnoses] == [None], report.summary()
    assert report.guilty == ["layers.0.attn", "layers.1.attn"]


def test_a_cache_whose_scale_is_ignored(ckpts, tmp_path):
    run(tmp_path / "run", ckpts["llama"], VllmLike, CALLS, change=core(Unscaled))
    found = hold(*check(tmp_path / "run", ckpts["llama"]).diagnoses)
    assert found.fault == "cache_scale_ignored" and found.numbers == {"scale": 0.25}


def one_block(model, weights):
    """A rank's rows of [q|k|v] cut out of the whole as one block."""
    for number, layer in enumerate(model.model.layers):
        name = f"model.layers.{number}.self_attn."
        for kind in ("weight", "bias"):
            own = getattr(layer.self_attn.qkv_proj, kind)
            if own is not None:
                whole = torch.cat([weights.get(f"{name}{part}_proj.{kind}") for part in "qkv"])
                own.data = whole.chunk(world_size())[rank()].clone()


@pytest.mark.parametrize("model", ["llama", "qwen2"])
def test_a_layout_that_cannot_be_is_the_bugs_that_deals_out_so(ckpts, tmp_path, model):
    """Of [q|k|v] with two KV heads one rank gets queries alone: that is one finding, by its name."""
    run(tmp_path / "run", ckpts[model], VllmLike, CALLS, change=one_block)
    report = check(tmp_path / "run", ckpts[model])
    assert [one.fault for one in report.diagnoses] == ["fused_one_block"], report.summary()


class InPlace(Norm):
    """float() of a float32 tensor is itself."""

    def forward(self, x, residual=None):
        x = x.float() if residual is None else x.float().add_(residual.float())
        kept = x
        x.mul_(torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))
        x.mul_(self.weight)
        return x if residual is None else (x, kept)


def test_a_norm_that_works_on_the_residual_in_place(ckpts, tmp_path):
    def change(model, weights):
        for one in model.modules():
            if isinstance(one, Norm):
                one.__class__ = InPlace
    run(tmp_path / "run", ckpts["llama"], VllmLike, CALLS, change=change)
    report = check(tmp_path / "run", ckpts["llama"])
    assert {one.fault for one in report.diagnoses} == {"norm_in_place"}, report.summary()
