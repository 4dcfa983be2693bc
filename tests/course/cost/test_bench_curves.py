"""Curves: which sizes, batches and contexts are measured, what stands beside them, and what is drawn of it."""

import json
from contextlib import nullcontext

import pytest
from test_bench_parts import Pool

from course import figures
from course.cost import curves
from course.cost.machine import Machine
from tplab import show
from tplab.checkpoint import open_checkpoint


@pytest.mark.parametrize("longest, contexts", [(151, []), (152, [128]), (536, [128, 512]), (9000, curves.CONTEXTS)])
def test_a_context_is_measured_where_the_answer_has_room_behind_it(longest, contexts, monkeypatch):
    sizes, asked, made = [], [], []
    monkeypatch.setattr(curves, "longest_sequence", lambda config: longest)
    monkeypatch.setattr(curves, "measure_machines", lambda config, asked, dtype: sizes.extend(asked)
                        or dict.fromkeys(asked, Machine("one", 2, {1: 1e-3})))
    monkeypatch.setattr(curves, "decode_seconds", lambda llm, *given: asked.append(given) or len(asked))
    monkeypatch.setattr(curves, "RankPool", Pool)
    monkeypatch.setattr(curves, "LLM", lambda *given, **options: made.append(options) or nullcontext())
    found = curves.bench_curves(open_checkpoint("fable"), "fable", 4, "float32", lambda line: None)
    assert [(one["max_num_seqs"], one["enable_prefix_caching"], one["pool"].size) for one in made] == [
        (64, False, size) for size in (1, 2, 4)], "all 64 at once"
    assert list(found["context"][1]) == list(contexts) and sizes == [1, 2, 4]
    points = [(n, 64) for n in (1, 4, 16, 64)] + [(1, n) for n in contexts]
    assert asked == [point for point in points for _ in "12"] * 3, "once to warm up"
    assert found["sequences"][1][4][0] == 4 / 4, "the second time counts"


def test_curves_are_measured_beside_their_limit(monkeypatch):
    machine = Machine("one", 2, {1: 1e-3}, kv_byte=1e-6, reduce_latency=1.0, reduce_byte=1.0, sequence=1.0, step=1.0)
    monkeypatch.setattr(curves, "measure_machines", lambda config, sizes, dtype: dict.fromkeys(sizes, machine))
    monkeypatch.setattr(curves, "decode_seconds", lambda llm, sequences, context: 0.5)
    monkeypatch.setattr(curves, "RankPool", Pool)
    monkeypatch.setattr(curves, "LLM", lambda *given, **options: nullcontext())
    lines = []
    found = curves.bench_curves(open_checkpoint("fable"), "fable", 3, "float32", lines.append)
    assert list(found["sequences"]) == list(found["context"]) == [1, 2, 3] and len(lines) == 1 + 3 * (4 + 1)
    assert list(found["context"][1]) == [128], "a context that the model does not reach is left out"
    assert {n: pair[0] for n, pair in found["sequences"][2].items()} == {1: 2, 4: 8, 16: 32, 64: 128}
    assert found["sequences"][1][1][1] == pytest.approx(
        1 / (1e-3 * (6 * 188416 + 128 * 768) + 1e-6 * 6 * (64 + 12 + 1) * 2 * 2 * 16 * 4)), "products and attention"
    figure = figures.curves_figure(json.loads(json.dumps(found)))
    assert "for 1, 2, 3 ranks" in figure.alt_text and len(figure.axes) == 2
    assert figure.axes[0].get_lines()[0].get_xydata().tolist()[-1] == [64, 128]
    with pytest.raises(show.ShowError, match="curves_figure takes"):
        figures.curves_figure({"sequences": {1: {}}})
    with pytest.raises(show.ShowError, match="curves_figure takes"):
        figures.curves_figure({"sequences": {}})
