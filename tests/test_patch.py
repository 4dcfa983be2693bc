"""Patches: found by dotted name, checked, undone; safe when several logical ranks apply the same one."""

import threading

import pytest

from tplab.model import attention
from tplab.patch import Patch, PatchError, applied, original
from tplab.shard import linear

TARGET = "tplab.model.attention.mask_scores"


def no_mask(scores, mask):
    return scores


def test_applied_and_undone():
    right = attention.mask_scores
    with applied(Patch(TARGET, no_mask)):
        assert attention.mask_scores is no_mask
        assert original(TARGET) is right
    assert attention.mask_scores is right


def test_undone_when_the_block_raises():
    right = attention.mask_scores
    with pytest.raises(ZeroDivisionError), applied(Patch(TARGET, no_mask)):
        1 / 0
    assert attention.mask_scores is right


def test_an_inherited_method_leaves_nothing_behind():
    """Undoing by setattr would leave a copy on the subclass, and hide a later patch of the base class."""
    with applied(Patch("tplab.shard.linear.QKVParallelLinear.load", lambda self, parameter, sources: None)):
        assert "load" in vars(linear.QKVParallelLinear)
    assert "load" not in vars(linear.QKVParallelLinear)


def test_the_last_patch_of_a_name_wins_and_both_go():
    right = attention.mask_scores
    with applied(Patch(TARGET, no_mask)):
        with applied(Patch(TARGET, lambda scores, mask: scores * 0)):
            assert attention.mask_scores is not no_mask
        assert attention.mask_scores is no_mask
    assert attention.mask_scores is right


def test_the_first_thread_to_leave_does_not_unpatch_the_others():
    """Saving and restoring per thread would leave the broken function behind, or take it away too early."""
    right = attention.mask_scores
    first_out, seen = threading.Event(), []

    def early():
        with applied(Patch(TARGET, no_mask)):
            inside.wait()
        first_out.set()

    def late():
        with applied(Patch(TARGET, no_mask)):
            inside.wait()
            first_out.wait()
            seen.append(attention.mask_scores)

    inside = threading.Barrier(2)
    threads = [threading.Thread(target=early), threading.Thread(target=late)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [no_mask]
    assert attention.mask_scores is right


@pytest.mark.parametrize("target, says", [
    ("tplab.model.attention.no_such", "has NoCache|has "),
    ("tplab.no_such_room.f", "no function|no module"),
    ("torch.nn.functional.linear", "only names below 'tplab'"),
    ("tplab.model.attention.Nobody.forward", "there is no function"),
])
def test_a_name_that_leads_nowhere_is_refused(target, says):
    with pytest.raises(PatchError, match=says), applied(Patch(target, no_mask)):
        pass


def test_a_replacement_that_cannot_be_called_alike_is_refused_and_nothing_stays():
    right = attention.mask_scores
    with pytest.raises(PatchError, match=r"\(scores, mask\)"):
        with applied(Patch(TARGET, no_mask), Patch(TARGET, lambda scores: scores)):
            pass
    assert attention.mask_scores is right
    with pytest.raises(PatchError, match="cannot be called"), applied(Patch(TARGET, 3)):
        pass
