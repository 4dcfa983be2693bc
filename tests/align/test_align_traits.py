"""Models with more than a Llama has: every point of them, alone and as real models combine them, equals Hugging Face's,
in one pass or along the decode path, by turns.
"""

import pytest
from helpers import turns
from helpers.faults import prompts
from helpers.trait_models import TRAITS, make_model

from tplab.align import align, align_decode
from tplab.align.points import point_names
from tplab.checkpoint import open_checkpoint


@pytest.mark.parametrize(("at", "name"), list(enumerate(TRAITS))[:: 2 - turns.ALL])
def test_a_healthy_engine_is_clean_at_every_point(tmp_path, at, name):
    """Ranks and dtypes by turns. The sweep of traits has float32, tests/faults/test_faults_wing.py the other models."""
    ckpt = open_checkpoint(make_model(tmp_path / "m", **TRAITS[name]))
    tp, dtype, decodes = 2 + at % 3, ("bfloat16", "float64")[at // 2 % 2], at // 4 % 2
    for dealt_out in [False, True][:1 + (ckpt.config.experts is not None)]:
        options = {"tensor_parallel_size": tp, "dtype": dtype, "logical": True, "enable_expert_parallel": dealt_out}
        report = align_decode(ckpt, prompts(71), new_tokens=3, **options) if decodes else align(
            ckpt, prompts(71), **options)
        assert report.ok and not report.diagnoses, report.diagnosis_lines()
        assert [point.name for point in report.points] == point_names(ckpt.config)
