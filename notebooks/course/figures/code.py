"""Two pieces of code side by side, what differs marked."""

import ast
import inspect
import tokenize
from difflib import SequenceMatcher
from html import escape
from io import StringIO
from textwrap import dedent, indent

_TITLES = "broken", "right"


class SideBySide:
    """Two pieces of code next to each other, the lines that differ marked. ``str()`` gives them one below the other."""

    def __init__(self, broken: str, right: str, folded: str = ""):
        self.sources, self.folded = (broken, right), folded

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        return {"text/plain": str(self), "text/html": self._html()}

    def __str__(self) -> str:
        return "\n\n".join(f"{title}:\n{indent(source, '    ')}" for title, source in zip(_TITLES, self.sources))

    def _html(self) -> str:
        columns = zip(_TITLES, self._marked(), ("#fbe3d6", "#d9f0e8"), ("✗", "✓"))
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


def side_by_side(broken, right, folded: str = "") -> SideBySide:
    """Broken code beside right code, with the lines that differ marked by ✗ and ✓ as well as by colour.

    Both are source text, or functions and classes whose source can be read. ``folded``: a
    line that hides both until a click opens it, if the learner must write the right code first.

        >>> lesson.side_by_side(fault("nan_mask").broken, fault("nan_mask").right)
    """
    sources = [dedent(code if isinstance(code, str) else inspect.getsource(code)).strip("\n")
               for code in (broken, right)]
    return SideBySide(*sources, folded)
