"""Models with more than a Llama has: every point of each, alone and as real models combine them, equals Hugging Face's,
point by point, in one pass and along the decode path.
"""

import pytest
from helpers.faults import prompts
from helpers.trait_models import TRAITS, make_model

from tplab.align import align, align_decode
from tplab.align.points import point_names
from tplab.checkpoint import open_checkpoint


@pytest.fixture(scope="module", params=list(enumerate(TRAITS)), ids=lambda one: one[1])
def case(request, tmp_path_factory):
    """A model, on how many ranks, and in which dtype: by turns. The sweep of traits has float32."""
    at, name = request.param
    ckpt = open_checkpoint(make_model(tmp_path_factory.mktemp("trait") / "m", **TRAITS[name]))
    return ckpt, 2 + at % 3, ("bfloat16", "float64")[at % 2]


def test_a_healthy_engine_is_clean_at_every_point(case):
    ckpt, tp, dtype = case
    for dealt_out in [False, True][:1 + (ckpt.config.experts is not None)]:
        options = {"tensor_parallel_size": tp, "dtype": dtype, "logical": True, "enable_expert_parallel": dealt_out}
        whole, steps = (align(ckpt, prompts(71), **options), align_decode(ckpt, prompts(71), new_tokens=5, **options))
        for report in (whole, steps):
            assert report.ok and not report.diagnoses, report.diagnosis_lines()
            assert [point.name for point in report.points] == point_names(ckpt.config)
