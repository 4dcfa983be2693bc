"""What an exercise needs: a check that says PASS or NOT YET, a caught error, two pieces of code side by side."""

import ast
import inspect
import os
import tokenize
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import SequenceMatcher
from html import escape
from io import StringIO
from textwrap import dedent, indent

from tplab.show.phrases import say

SENTENCE = "The old lighthouse keeper climbed the stairs every evening, because the ships at sea"


def default_prompt(model) -> str:
    """The prompt a notebook uses when its reader gives none: a held-out story's opening for fable, else a sentence.

        >>> prompt = prompt or lesson.default_prompt(model)
    """
    from tplab import fable

    name = os.fspath(getattr(model, "name", model))
    return fable.default_prompt() if name == "fable" else SENTENCE


def check(name: str, condition, hint: str | Callable[[], str] = "") -> None:
    """Print ``PASS name``, or ``NOT YET name`` and a hint in the learner's terms.

    ``hint``: what to look at; a function is called only when it is needed.

        >>> lesson.check("no NaN", not out.isnan().any(), "is something multiplying 0 by -inf?")
        NOT YET  no NaN: is something multiplying 0 by -inf?
    """
    if condition:
        print(f"PASS  {name}")
    else:
        hint = hint() if callable(hint) else hint
        print(f"NOT YET  {name}" + (f": {hint}" if hint else ""))


@contextmanager
def shown_error(brief: bool = False) -> Iterator[None]:
    """Run a block that is expected to fail and print its error, so that *Run All* and papermill go on.

    ``brief``: at most three lines, with the line of the cell, as a verdict has them.

        >>> with lesson.shown_error():
        ...     pool.run(broken)
    """
    try:
        yield
    except Exception as error:
        from tplab.lesson.mine import in_words

        say(in_words(error) if brief else f"{type(error).__name__}: {error}")
    else:
        print("No error was raised.")


class SideBySide:
    """Two pieces of code next to each other, the lines that differ marked. ``str()`` gives them one below the other."""

    def __init__(self, titles: tuple[str, str], sources: tuple[str, str], folded: str = ""):
        self.titles, self.sources, self.folded = titles, sources, folded

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        return {"text/plain": str(self), "text/html": self._html()}

    def __str__(self) -> str:
        return "\n\n".join(f"{title}:\n{indent(source, '    ')}" for title, source in zip(self.titles, self.sources))

    def _html(self) -> str:
        columns = zip(self.titles, self._marked(), ("#fbe3d6", "#d9f0e8"), ("✗", "✓"))
        # Two columns in a window of 1400 pixels, in a narrow one below each other; a longer line goes on below itself.
        longest = min(48, max(len(line) for source in self.sources for line in source.splitlines()))
        cells = "".join(
            f'<div style="flex: 1 1 {8 * longest + 40}px; min-width: 0">'
            f'<div style="font-weight: bold; margin-bottom: .3em">{mark} '
            f'{escape(title)}</div><pre style="margin: 0; padding: .6em; color: #222; background: #f7f7f7; '
            'white-space: pre-wrap; word-break: normal; overflow-wrap: anywhere; font: 13px/1.5 monospace">'
            f'{"".join(self._line(line, differs, tint, mark) for line, differs in lines)}</pre></div>'
            for title, lines, tint, mark in columns)
        both = f'<div style="display: flex; flex-wrap: wrap; gap: 1em">{cells}</div>'
        return f"<details><summary>{escape(self.folded)}</summary>{both}</details>" if self.folded else both

    @staticmethod
    def _line(line, differs, tint, mark) -> str:
        deep = 8 * (len(line) - len(line.lstrip()) + 6)
        look = f"display: block; padding-left: {deep}px; text-indent: -{deep}px" + f"; background: {tint}" * differs
        return f'<span style="{look}">{mark if differs else " "} {escape(line)}\n</span>'

    def _marked(self):
        """For both sources: their lines, and whether the other one lacks what they do."""
        left, right = (_compared(source) for source in self.sources)
        same = SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks()
        in_left = {block.a + i for block in same for i in range(block.size)}
        in_right = {block.b + i for block in same for i in range(block.size)}
        return [[(line, bool(code) and i not in matched)
                 for i, (line, code) in enumerate(zip(source.splitlines(), lines))]
                for source, lines, matched in zip(self.sources, (left, right), (in_left, in_right))]


def _compared(source: str) -> list[str]:
    """Of each line the code: nothing of a comment, a docstring, or a header, since broken code has another name."""
    lines = source.splitlines()
    try:
        for token in tokenize.generate_tokens(StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                lines[token.start[0] - 1] = lines[token.start[0] - 1][:token.start[1]]
        blocks = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    except (SyntaxError, tokenize.TokenError):  # a piece of code
        return lines
    for node in blocks:
        first, *_ = node.body
        spoken = first.end_lineno if ast.get_docstring(node) is not None else first.lineno - 1
        lines[node.lineno - 1:spoken] = [""] * (spoken - node.lineno + 1)
    return [line.rstrip() for line in lines]


def side_by_side(broken, right, titles: tuple[str, str] = ("broken", "right"), folded: str = "") -> SideBySide:
    """Broken code beside right code, with the lines that differ marked by ✗ and ✓ as well as by colour.

    Both are source text, or functions and classes whose source can be read. ``titles`` stand above them.
    ``folded``: what stands on the page until a click opens it, where the right code is what a learner is to write.

        >>> lesson.side_by_side(fault("nan_mask").broken, fault("nan_mask").right)
    """
    sources = [dedent(code if isinstance(code, str) else inspect.getsource(code)).strip("\n")
               for code in (broken, right)]
    return SideBySide(titles, tuple(sources), folded)
