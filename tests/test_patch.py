"""Patches: found by dotted name, checked, undone; safe when several logical ranks apply the same one."""

import sys
import threading
from importlib import import_module

import pytest

from tplab import faults, patch
from tplab.errors import TplabError
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
        raise ZeroDivisionError
    assert attention.mask_scores is right


def test_an_inherited_method_leaves_nothing_behind():
    """Undoing by setattr would leave a copy on the subclass, and hide a later patch of the base class."""
    with applied(INHERITED):
        assert "load" in vars(linear.QKVParallelLinear)
    assert "load" not in vars(linear.QKVParallelLinear)


def test_the_last_patch_of_a_name_wins_and_both_go():
    right = attention.mask_scores
    with applied(Patch(TARGET, no_mask)):
        with applied(Patch(TARGET, lambda scores, mask: scores * 0)):
            assert attention.mask_scores is not no_mask
        assert attention.mask_scores is no_mask
    assert attention.mask_scores is right


def test_in_a_clean_block_the_patches_around_it_rest():
    right = attention.mask_scores
    with applied(Patch(TARGET, no_mask), INHERITED):
        with applied(softmax := Patch("tplab.model.attention.softmax", lambda scores: scores), clean=True):
            assert attention.mask_scores is right and attention.softmax is softmax.replacement
            assert linear.QKVParallelLinear.load is linear.MergedColumnParallelLinear.load
        assert attention.mask_scores is no_mask and attention.softmax is not softmax.replacement
    assert attention.mask_scores is right and "load" not in vars(linear.QKVParallelLinear)


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


INHERITED = Patch("tplab.shard.linear.QKVParallelLinear.load", lambda self, parameter, *sources: None)


def test_an_interrupt_of_the_block_leaves_nothing_behind():
    right = attention.mask_scores
    with pytest.raises(KeyboardInterrupt), applied(Patch(TARGET, no_mask)):
        raise KeyboardInterrupt
    assert patch.in_force() == () and attention.mask_scores is right


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


@pytest.mark.parametrize("patches, says", [("nan_mask", "must be a list of faults or Patch objects, not 'nan_mask'"),
                                           (3, "not 3"), ([3], "patches holds 3, which is no fault"),
                                           (["no_such_bug"], "there is no fault 'no_such_bug'")])
def test_what_is_no_list_of_faults_is_refused(patches, says):
    with pytest.raises(TplabError, match=says):
        faults.as_patches(patches)


def test_faults_by_their_names_through_the_museum():
    pair = faults.fault("nan_mask"), faults.fault("shard_dim1")
    assert faults.as_patches(["nan_mask", pair[1]]) == patch.as_patches(pair) == (*pair[0].patches, *pair[1].patches)


def test_every_name_that_is_patched_is_in_force_with_its_last_patch():
    first, last = Patch(TARGET, lambda scores, mask: mask), Patch(TARGET, no_mask)
    with applied(first, INHERITED), applied(last):
        assert patch.in_force() == (last, INHERITED)
    assert patch.in_force() == ()


def test_what_is_called_by_keyword_only_is_no_positional_parameter():
    target = "tplab.align.run.align"

    def alike(model, prompts, *, tensor_parallel_size=2, **rest):
        return "another"

    with applied(Patch(target, alike)):
        assert import_module("tplab.align.run").align("m", [], dtype="float64") == "another"
    with pytest.raises(PatchError, match=r"is called with \(model, prompts\), but the replacement takes \(model\)"):
        with applied(Patch(target, lambda model: model)):
            pass


@pytest.mark.parametrize("target, replacement, call, of", [
    ("tplab.pool.control_block.ControlBlock.bytes_needed", lambda size: size, "bytes_needed", (5,)),
    ("tplab.pool.control_block.ControlBlock.close", lambda self: (type(self), 5), "close", ()),
    ("tplab.checkpoint.config.ModelConfig.from_hf", lambda cls, hf, eos=None: (cls, hf), "from_hf", (5,)),
])
def test_a_method_of_any_kind_stays_of_its_kind(target, replacement, call, of):
    owner = getattr(import_module(target.rsplit(".", 2)[0]), target.split(".")[-2])
    before = vars(owner)[call]
    with applied(Patch(target, replacement)):
        found = getattr(object.__new__(owner), call)(*of)
        assert found in (5, (owner, 5)) and callable(original(target))
        with pytest.raises(PatchError, match="but the replacement takes"), applied(Patch(target, lambda: None)):
            pass
    assert vars(owner)[call] is before


def test_a_module_that_lacks_another_one_says_which(monkeypatch, tmp_path):
    (tmp_path / "broken_room.py").write_text("import no_such_library.of_somebody\n")
    monkeypatch.setattr("tplab.__path__", [*sys.modules["tplab"].__path__, str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_library'"):
        original("tplab.broken_room.function")


def stands_there():
    from tplab.model import attention

    return attention.mask_scores("scores", None) == "scores", attention.mask_scores is original(TARGET)


def test_what_is_in_force_here_is_in_force_on_the_ranks_of_a_run_and_no_longer(pool):
    from tplab.ranks import RankError

    with applied(Patch(TARGET, lambda scores, mask: "another")), applied(Patch(TARGET, no_mask)):
        assert pool.run(stands_there) == [(True, False)] * 2, "of two patches of a name the last one counts"
        with pytest.raises(RankError, match="ZeroDivisionError"):
            pool.run(lambda: 1 / 0)
    assert pool.run(lambda: original(TARGET) is attention.mask_scores) == [True] * 2
    lock = threading.Lock()
    with applied(Patch(TARGET, lambda scores, mask: lock)):
        with pytest.raises(RankError, match=rf"^the replacement for {TARGET}.*cannot be sent.*No rank"):
            pool.run(stands_there)
