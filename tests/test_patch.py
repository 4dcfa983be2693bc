"""Patches: found by dotted name, checked, undone; safe when several logical ranks apply the same one."""

import linecache
import random
import signal
import sys
import threading
from contextlib import ExitStack
from importlib import import_module

import pytest

from tplab import patch
from tplab.model import attention
from tplab.patch import Patch, PatchError, applied, as_patches, original
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
    with applied(Patch("tplab.shard.linear.QKVParallelLinear.load", lambda self, parameter, *sources: None)):
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


INHERITED = Patch("tplab.shard.linear.QKVParallelLinear.load", lambda self, parameter, *sources: None)


def block(patches):
    with applied(*patches):
        pass


def interrupted_at(number, patches):
    """Enter and leave a block, with an interrupt before instruction `number` of it or of patch.py; what was raised, or
    None: there are no so many.

    On the way out of a `with _lock` Python lets no signal handler run; only a trace function is called there.
    """
    left = number

    def trace(frame, event, _):
        nonlocal left
        code = frame.f_code
        if code.co_filename != patch.__file__ and code is not block.__code__:
            return None
        frame.f_trace_opcodes = True
        leaving = "with _lock" in linecache.getline(code.co_filename, frame.f_lineno or 0) and patch._lock._is_owned()
        if event == "opcode" and not leaving:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        block(patches)
    except KeyboardInterrupt as error:
        return error
    finally:
        sys.settrace(before)


@pytest.mark.parametrize(
    "under", [(), (Patch(TARGET, lambda scores, mask: scores * 0), INHERITED)], ids=["alone", "inside"])
def test_after_an_interrupt_at_any_instruction_what_is_in_force_is_what_living_blocks_say(under):
    right, number = attention.mask_scores, 1
    with applied(*under):
        before, inherited = attention.mask_scores, vars(linear.QKVParallelLinear).get("load")
        while kept := interrupted_at(number, [Patch(TARGET, no_mask), INHERITED]):  # as IPython keeps the last error
            assert not patch._lock._is_owned(), f"{number}: the next application would wait for ever"
            assert patch.in_force() == under, number
            assert attention.mask_scores is before, number
            assert vars(linear.QKVParallelLinear).get("load") is inherited, number
            number += 1
            del kept
    assert number > 500
    assert attention.mask_scores is right and "load" not in vars(linear.QKVParallelLinear) and not patch._places


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer that sends signals")
def test_real_interrupts_at_any_time_leave_no_fault_behind():
    """Ctrl-C after 0.02 to 0.8 ms, and a second one while the first is handled: 500 times, or until that occurs."""
    right, choose, seen = attention.mask_scores, random.Random(3), []
    faults = as_patches(["nan_mask", "rope_missing"])  # imported before, for Python ignores interrupts in some imports

    def busy():
        while True:
            with applied(*faults):
                pass

    def strike(number, frame):
        if seen:
            signal.setitimer(signal.ITIMER_REAL, 0)
        while frame is not None and frame.f_code is not busy.__code__:
            frame = frame.f_back
        if frame is not None:
            seen.append(number)
            raise KeyboardInterrupt

    twice, before = 0, signal.signal(signal.SIGALRM, strike)
    try:
        for tries in range(20_000):
            if tries >= 500 and twice:
                break
            seen.clear()
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, choose.uniform(2e-5, 8e-4), choose.uniform(2e-5, 2e-4))
                busy()
            signal.setitimer(signal.ITIMER_REAL, 0)
            twice += len(seen) > 1
            assert patch.in_force() == () and attention.mask_scores is right and not patch._lock._is_owned()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert twice


def test_a_block_that_an_exit_stack_holds_is_a_block():
    right, one = attention.mask_scores, applied(Patch(TARGET, no_mask))
    with ExitStack() as stack:
        stack.enter_context(one)
        with one:
            assert attention.mask_scores is no_mask
        assert attention.mask_scores is no_mask
    assert attention.mask_scores is right and not patch._places


def test_an_interrupt_while_a_refused_patch_is_undone_leaves_nothing_behind(monkeypatch):
    right, put, calls = attention.mask_scores, patch._Place.put, []

    def interrupted(self, one):
        calls.append(one)
        if len(calls) == 1:
            raise KeyboardInterrupt
        put(self, one)

    monkeypatch.setattr(patch._Place, "put", interrupted)
    with pytest.raises(KeyboardInterrupt), applied(Patch(TARGET, no_mask), Patch(TARGET, lambda scores: scores)):
        pass
    assert calls == [None, None] and attention.mask_scores is right and not patch._places


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


@pytest.mark.parametrize("given, says", [("nan_mask", "must be a list of faults, .*not 'nan_mask'"), (3, "not 3"),
                                         ([3], "patches holds 3, which is no fault")])
def test_what_is_no_list_of_faults_is_refused(given, says):
    with pytest.raises(PatchError, match=says):
        patch.as_patches(given)


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


def test_a_reader_of_the_places_holds_their_lock(monkeypatch):
    """Or a thread that applies a patch at this moment would change them under the reader."""
    class Guarded(dict):
        def look(self, *args):
            assert patch._lock._is_owned()
            return []

        values = get = __getitem__ = look

    monkeypatch.setattr(patch, "_places", Guarded())
    assert patch.in_force() == () and original(TARGET) is attention.mask_scores


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
