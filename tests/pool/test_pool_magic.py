"""``%%ranks``: whole cells on every rank, with variables that stay."""

import re

import pytest

from tplab.pool import RankPool, shared_pool
from tplab.pool.pool import latest_pool
from tplab.ranks import RankError


@pytest.fixture(scope="module")
def shell():
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    shell.run_line_magic("load_ext", "tplab")
    yield shell
    InteractiveShell.clear_instance()


@pytest.fixture
def cell(shell, capsys):
    def run(source, store=False):
        result = shell.run_cell(source, store_history=store)
        return capsys.readouterr().out, result.error_in_exec

    with RankPool(2):
        yield run


def test_the_last_expression_is_shown_per_rank(cell):
    out, error = cell("%%ranks\nx = torch.tensor([rank() + 1.0])\nprint('before')\nall_reduce(x)")
    assert error is None
    assert out.splitlines() == [f"[rank {r}] {line}" for r in (0, 1) for line in ("before", "tensor([3.])")]
    assert cell("%%ranks\nNone") == ("", None)
    assert cell("%%ranks\nx = 1") == ("", None) == cell("%%ranks\n# nothing but words")
    assert cell("%%ranks\n__name__, ''")[0] == "[rank 0] ('__main__', '')\n[rank 1] ('__main__', '')\n"


def test_variables_and_functions_stay_on_their_rank(cell):
    cell("%%ranks\nimport math\ny = rank() * 10\ndef double():\n    return 2 * y + math.floor(0.5)")
    assert cell("%%ranks\ndouble()")[0] == "[rank 0] 0\n[rank 1] 20\n"
    assert cell("%%ranks\ny += 1\nclass A:\n    z = y\nA.z")[0] == "[rank 0] 1\n[rank 1] 11\n"


def test_an_error_names_rank_and_line_of_the_cell(cell):
    out, error = cell("%%ranks\n\nif rank() == 1:\n    1 / 0\nbarrier()", store=True)
    assert "rank 1 raised ZeroDivisionError" in str(error)
    assert re.search(r"\n  cell In\[\d\], line 4, in <module>\n    1 / 0\n", str(error))
    assert re.search(r"\nrank 0 waits in barrier at cell In\[\d\], line 5 \(a consequence\)\n", str(error))


@pytest.mark.parametrize("store", [True, False])
def test_errors_carry_the_number_of_their_cell(cell, shell, store):
    """Newer IPython has counted on before the cell runs, older has not; what it calls the cell itself is right."""
    cell("'one cell more'", store=True)
    number = shell.execution_count
    _, error = cell("%%ranks\n1 / 0", store=store)
    assert f"\n  cell In[{number}], line 2, in <module>\n    1 / 0\n" in str(error)
    _, error = cell("%%ranks\nx = = 1", store=store)
    assert str(error) == f"cell In[{number + store}], line 2: invalid syntax: x = = 1"


def test_size_and_timeout(cell):
    assert cell("%%ranks 3\nworld_size()")[0] == "[rank 0] 3\n[rank 1] 3\n[rank 2] 3\n"
    shared_pool(3).close()
    _, error = cell("%%ranks --timeout 0.3\nwhile True:\n    pass")
    # On a busy machine a rank may not have begun by then, and cannot say where it runs.
    assert str(error).startswith("not finished after 0.3 s: rank 0 is still running")
    _, error = cell("%%ranks --speed 3\n1")
    assert "usage: %%ranks [SIZE] [--timeout SECONDS]" in str(error)
    _, error = cell('%%ranks "3\n1')
    assert str(error) == "%%ranks: '\"3': No closing quotation; usage: %%ranks [SIZE] [--timeout SECONDS]"
    for nonsense in ("0", "--timeout 0", "--timeout nan", "-1", "65"):
        _, error = cell(f"%%ranks {nonsense}\n1")
        assert isinstance(error, RankError) and nonsense.split()[-1].lstrip("-") in str(error), nonsense


def test_the_pool_made_last_is_taken():
    with RankPool(2) as first:
        with RankPool(1) as second:
            assert latest_pool() is second
        assert latest_pool() is first


def test_names_of_the_notebook_are_at_hand(cell, shell):
    shell.run_cell("limit = 5\ndef triple(x):\n    return 3 * x + limit")
    assert cell("%%ranks\ntriple(rank())")[0] == "[rank 0] 5\n[rank 1] 8\n"
    assert cell("%%ranks\ndef read():\n    return limit\nread()")[0] == "[rank 0] 5\n[rank 1] 5\n"
    shell.run_cell("limit = 6")
    assert cell("%%ranks\ntriple(rank())")[0] == "[rank 0] 6\n[rank 1] 9\n"
    assert cell("%%ranks\nlimit = 100 + rank()\nlimit")[0] == "[rank 0] 100\n[rank 1] 101\n"
    assert cell("%%ranks\nlimit")[0] == "[rank 0] 100\n[rank 1] 101\n"
    assert shell.user_ns["limit"] == 6
    shell.run_cell("5 + 5")
    _, error = cell("%%ranks\nOut")  # IPython's own, as _ and In are
    assert "name 'Out' is not defined" in str(error)
    cell("%%ranks\nfrom os import sep as limit_of_path")
    shell.run_cell("limit_of_path = 7")
    assert cell("%%ranks\nlimit_of_path")[0] == "[rank 0] '/'\n[rank 1] '/'\n"  # what a cell imported is its own too
