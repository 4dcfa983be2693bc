"""What crosses between the parent and its ranks: functions, arguments, results, prints; large, odd and impossible ones.
"""

import ctypes
import os
import subprocess
import sys
import threading

import pytest
import torch

from tplab.pool.transfer import dumps, loads
from tplab.ranks import RankError, rank, state


@pytest.mark.parametrize("dtype, shape", [
    (torch.float32, (2, 3, 4)), (torch.bfloat16, (3,)), (torch.float64, ()), (torch.int64, (2, 0, 4)),
    (torch.bool, (0,)), (torch.complex64, (2, 3))])
def test_tensors_keep_shape_dtype_and_bits(dtype, shape):
    t = (torch.randn(shape) * 3).to(dtype)
    back = loads(dumps({"t": t}))["t"]
    assert back.dtype == dtype and back.shape == t.shape and torch.equal(back, t)
    if t.ndim > 1:
        assert torch.equal(loads(dumps(t.transpose(0, 1))), t.transpose(0, 1))
    back.fill_(1)  # its memory is its own and can be written


def test_a_view_ships_its_own_elements_only():
    table = torch.zeros(1_000_000)
    assert len(dumps(table[:10])) < 1000


def test_a_function_keeps_its_file_and_so_do_those_inside():
    """An error on a rank is shown with its line, which is looked up by the file's name."""
    scope = {}
    exec(compile("def outer():\n    def inner():\n        pass\n    return inner", "cell 7", "exec"), scope)
    back = loads(dumps(scope["outer"]))
    assert back.__code__.co_filename == back().__code__.co_filename == "cell 7"
    assert back().__qualname__ == "outer.<locals>.inner" and back().__code__.co_firstlineno == 2


def test_functions_and_classes_of_a_cell(pool):
    scope = {}
    exec(
        "import torch\nfrom tplab.ranks import rank, state\nlimit = 3\n"
        "class Box:\n    def __init__(self, x):\n        self.x = x\n"
        "def helper(x):\n    return Box(x + limit)\n"
        "def fn(x):\n    state['x'] = x\n    return helper(x + rank())\n",
        scope,
    )
    scope["__name__"] = "__main__"
    assert [box.x for box in pool.run(scope["fn"], 10)] == [13, 14]
    assert pool.run(lambda: state["x"]) == [10, 10]


def test_state_in_a_shipped_function_is_the_ranks_own(pool):
    state["mine"] = "the parent's"
    pool.run(lambda: state.update(mine=rank()))
    assert pool.run(lambda: state["mine"]) == [0, 1]
    assert state["mine"] == "the parent's"
    del state["mine"]


def test_modules_beside_the_notebook_are_found(pool, tmp_path, monkeypatch):
    (tmp_path / "beside_the_notebook.py").write_text("def answer():\n    return 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    import beside_the_notebook

    assert pool.run(beside_the_notebook.answer) == [42, 42]
    assert pool.run(lambda: open("beside_the_notebook.py").read(3)) == ["def", "def"]
    with pytest.raises(RankError, match="rank 1 died"):
        pool.run(lambda: os._exit(3) if rank() else os.chdir("/"))
    assert pool.run(beside_the_notebook.answer) == [42, 42]  # by the fresh rank and by the one that had gone elsewhere
    assert pool.run(lambda: open("beside_the_notebook.py").read(3)) == ["def", "def"]
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "added_later.py").write_text("def answer():\n    return 43\n")
    monkeypatch.syspath_prepend(tmp_path / "later")  # the same list as before, with one more folder
    import added_later

    assert pool.run(added_later.answer) == [43, 43]


# What cannot cross.


@pytest.mark.parametrize(
    "call, told",
    [
        (lambda pool, lock: pool.run(print, lock), r"^argument 0 \(lock\) cannot be sent to the ranks: .*lock"),
        (lambda pool, lock: pool.run(print, 1, {"a": [1, lock]}), r"^argument 1\['a'\]\[1\] \(lock\) cannot be sent"),
        (lambda pool, lock: pool.run(dict, model=lock), r"^argument model \(lock\) cannot be sent"),
        (lambda pool, lock: pool.run(lambda: lock), r"^function .*<lambda> uses lock \(lock\) cannot be sent"),
        (lambda pool, lock: pool.run(print, (i for i in "ab")), r"^argument 0 \(generator\) cannot be sent"),
        (lambda pool, lock: pool.run("not a function"), r"^run takes a function, not str"),
    ],
)
def test_what_cannot_be_sent_is_named_before_any_rank_is_touched(pool, call, told):
    number = pool.number_of_runs
    with pytest.raises(RankError, match=told):
        call(pool, threading.Lock())
    assert pool.number_of_runs == number


def test_a_result_that_cannot_be_sent_is_named(pool):
    with pytest.raises(RankError, match=r"result\['lock'\] \(lock\) of rank 0 cannot be sent back"):
        pool.run(lambda: {"lock": threading.Lock()})


def test_a_call_that_cannot_be_read_on_the_ranks(pool):
    class Refuses:
        def __reduce__(self):
            return __import__, ("no_such_module",)

    with pytest.raises(RankError, match="(?s)raised ModuleNotFoundError.*could not be read on the rank"):
        pool.run(print, Refuses())


def test_a_result_that_cannot_be_read_here(pool):
    def fn():
        class Refuses:
            def __reduce__(self):
                return __import__, ("no_such_module",)

        return Refuses()

    with pytest.raises(RankError, match="the result of rank 0 cannot be read here: No module named"):
        pool.run(fn)
    assert pool.run(rank) == [0, 1]


# Prints.


def test_everything_that_is_printed_comes_back_in_order(pool, capsys):
    def fn():
        print("python")
        print("error", file=sys.stderr)
        ctypes.CDLL(None).puts(b"from C")
        ctypes.CDLL(None).fflush(None)
        subprocess.run(["echo", "from a command"], check=True)
        print("no newline", end="")

    pool.run(fn)
    words = ["python", "error", "from C", "from a command", "no newline"]
    assert capsys.readouterr().out.splitlines() == [f"[rank {r}] {word}" for r in (0, 1) for word in words]


def test_50_mb_of_prints_are_cut_with_their_size(pool, capsys):
    pool.run(lambda: print("x" * 50_000_000))
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "cut here" in line] == [
        f"[rank {r}] … cut here: 49,934,465 bytes more were printed" for r in (0, 1)
    ]


def test_an_endless_print_is_bounded_too(pool, capsys):
    def fn():
        while True:
            print("z" * 1000)

    with pytest.raises(RankError, match="not finished after 2 s"):
        pool.run(fn, timeout=2)
    text = capsys.readouterr().out
    assert len(text) < 200_000 and text.count("cut here") == 2


def test_50_mb_from_c_do_not_block_or_pile_up(pool, capsys):
    def fn():
        import os

        line = b"y" * 9_999 + b"\n"
        for _ in range(5000):
            os.write(1, line)

    pool.run(fn)
    text = capsys.readouterr().out
    assert len(text) < 200_000 and text.count("cut here") == 2
    pool.run(lambda: print("short"))
    assert capsys.readouterr().out == "[rank 0] short\n[rank 1] short\n"  # nothing of it was cut


def test_a_progress_bar_shows_its_last_state(pool, capsys):
    pool.run(lambda: (print("\r  0%", end=""), print("\r100%\r\n\nend\n")))
    assert capsys.readouterr().out.splitlines()[:4] == ["[rank 0] 100%", "[rank 0] ", "[rank 0] end", "[rank 0] "]
