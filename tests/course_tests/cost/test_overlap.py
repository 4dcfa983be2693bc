"""Notebook 13's instruments: a race that is decided beforehand, faults in layers of their own."""

import pytest
import torch.distributed as dist

from course.cost import overlap
from tplab.align import align, diagnose_all

pytestmark = pytest.mark.pool
IDS = list(range(5, 22))


def reads_early(self, partial):
    work = dist.all_reduce(partial, async_op=True)
    out = partial.clone()
    work.wait()
    return out


def waits(self, partial):
    work = dist.all_reduce(partial, async_op=True)
    work.wait()
    return partial.clone()


def does_not_start(self, partial):
    dist.all_reduce(partial)
    return partial


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_read_too_early_is_wrong_every_time_where_the_others_are_late_and_never_without(ranks):
    def begins(reduce, others_late):
        report = align("fable", IDS, patches=[overlap.decided(reduce, others_late)], tensor_parallel_size=ranks)
        return report.first_divergence and (report.first_divergence.name, diagnose_all(report)[0].fault)

    for _ in range(3):
        assert begins(reads_early, True) == ("layers.0.o_proj", "all_reduce_dropped")  # on rank 0
        assert begins(reads_early, False) is None
    for reduce in (waits, does_not_start):
        assert begins(reduce, True) is None


def test_each_fault_in_its_layer_is_found_with_the_others():
    names = {0: "read_before_wait", 3: "buffer_reused", 5: "wrong_rows_scattered"}
    for _ in range(2):  # the ranks count their calls on
        found = diagnose_all(align("fable", IDS, patches=[overlap.in_layers(names, 6)]))
        assert {one.fault: one.where for one in found} == {
            name: f"layer {layer}: o_proj, mlp" for layer, name in names.items()}
