"""The paged cache drawn: the slots of a sequence's tokens, and all blocks of an engine step by step."""

from collections.abc import Sequence

from tplab.cache import BlockPool, slot_mapping
from tplab.errors import TplabError
from tplab.show.drawings.svg import GREY, LINE, Drawing, Svg, box, cell, colour, write
from tplab.show.steps import EngineSteps, Moment

CELL, HIGH, GAP, LEFT = 36.0, 18.0, 10.0, 8.0
EMPTY, SHARED, FREE_INK, MARK = "#ffffff", "#e6e6e6", "#8a8a8a", "#D55E00"


def tint(number: int, white: float = 0.72) -> str:
    """A sequence's colour, light enough for dark letters."""
    fill = colour(number)[0]
    parts = (int(fill[i:i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)


def short(text: str, most: int = 6) -> str:
    """A token's text that fits into a cell; spaces at its edge are drawn as ``·``."""
    text = "".join("⏎" if c == "\n" else c if c.isprintable() else "□" for c in text)
    body = text.strip(" ")
    text = "·" * (len(text) - len(text.lstrip(" "))) + body + "·" * bool(body and text.endswith(" "))
    return text if len(text) <= most else text[:most - 1] + "…"


def slots_figure(block_ids: Sequence[int], tokens: Sequence[str], block_size: int = 4, num_blocks: int = 6) -> Drawing:
    """One sequence: its tokens by position above, their slots below.

    ``block_ids``: its block table. ``tokens``: their texts, in order. ``block_size``, ``num_blocks``: of the cache.

        >>> show.slots_figure([4, 1, 3], ["Once", " upon", " a", " time", ",", " a", " fox"])
    """
    if len(tokens) > len(block_ids) * block_size:
        raise TplabError(f"{len(tokens)} tokens do not fit into {len(block_ids)} blocks of {block_size}")
    BlockPool(num_blocks, block_size)
    slots = slot_mapping(block_ids, range(len(tokens)), block_size)
    wide, top, table, below = block_size * CELL + GAP, 40.0, 76.0, 176.0
    body = write(LEFT, 12, "the sequence: tokens by position", bold=True)
    body += write(LEFT, below - 30, "the cache: slots in blocks", bold=True)
    standing, middle = dict(zip(slots, range(len(tokens)))), block_size * CELL / 2
    for index, block in enumerate(block_ids):
        x, to = LEFT + index * wide, LEFT + block * wide
        fill, ink = colour(index)
        body += (f'<path d="M{x + middle:g} {top + HIGH} V{table + 18} C{x + middle:g} {table + 56} {to + middle:g} '
                 f'{below - 60} {to + middle:g} {below - 16}" fill="none" stroke="{fill}" stroke-width="2.5"/>')
        body += cell(x + middle - 62, table, 124, 18, fill, f"block_ids[{index}] = {block}", size=11, ink=ink)
        for place in range(block_size):
            position = index * block_size + place
            if position < len(tokens):
                body += write(x + (place + 0.5) * CELL, top - 9, str(position), size=10, anchor="middle")
                body += _place(x + place * CELL, top, tokens[position], tint(index))
    for block in range(num_blocks):
        x = LEFT + block * wide
        owner = list(block_ids).index(block) if block in block_ids else None
        fill, ink = (GREY, FREE_INK) if owner is None else colour(owner)
        body += cell(x, below - 16, block_size * CELL, 16, fill, f"block {block}", size=10.5, ink=ink)
        for place in range(block_size):
            slot = block * block_size + place
            text = tokens[standing[slot]] if slot in standing else ""
            body += _place(x + place * CELL, below, text, tint(owner) if text else EMPTY)
            body += write(x + (place + 0.5) * CELL, below + HIGH + 9, str(slot), size=10, anchor="middle",
                          ink="#222" if text else FREE_INK)
    details = "; ".join(f"positions {i * block_size}–{min((i + 1) * block_size, len(tokens)) - 1} in block {b}, slots "
                        f"from {b * block_size}" for i, b in enumerate(block_ids))
    return Drawing(Svg(max(num_blocks * wide + LEFT, 560), below + 44, body).text(),
                   f"Figure: a sequence of {len(tokens)} tokens in blocks of {block_size}. {details}.")


def _place(x: float, y: float, text: str, fill: str, ink: str = "#222", fresh: bool = False) -> str:
    text = short(text)
    body = cell(x, y, CELL, HIGH, fill, text, stroke=LINE, size=9.5 if len(text) < 6 else 8.5, ink=ink)
    return body + (box(x + 1, y + 1, CELL - 2, HIGH - 2, "none", "#222") if fresh else "")


def moment_drawing(run: EngineSteps, moment: Moment) -> Svg:
    """Block tables above, all blocks of the pool below, after one step."""
    size, wide = run.block_size, run.block_size * CELL + GAP
    across = max(1, int(944 // wide))  # blocks in a line
    used = sum(count > 0 for count in moment.ref_counts)
    body = write(LEFT, 12, f"after step {moment.step}", bold=True, size=13)
    body += write(LEFT + 110, 12, f"{used} of {run.num_blocks} blocks used", size=11.5)
    y = 38.0
    for number, table in moment.tables.items():
        fill, ink = colour(number)
        body += cell(LEFT, y - 9, 46, 18, fill, f"seq {number}", size=11, ink=ink)
        body += write(LEFT + 54, y, f"{moment.status[number]}, {moment.computed[number]} tokens", size=11)
        for i, block in enumerate(table):
            body += cell(196 + 27 * i, y - 9, 27, 18, tint(number), str(block), size=10.5)
        y += 23
    for block in range(run.num_blocks):
        x, at = LEFT + block % across * wide, y + block // across * (HIGH + 26)
        body += _block(x, at, block, moment, size)
    y += -(-run.num_blocks // across) * (HIGH + 26) + 4
    return Svg(max(min(across, run.num_blocks) * wide + LEFT, 640), y, body)


def _block(x: float, y: float, block: int, moment: Moment, size: int) -> str:
    users = moment.users(block)
    body, long = "", size * CELL / max(len(users), 1)
    for i, number in enumerate(users):
        fill, ink = colour(number)
        name = str(block) if size == 1 else f"seq {number}" if i else f"{block}: seq {number}"
        body += cell(x + i * long, y, long, 16, fill, name, size=10.5, ink=ink)
    if moment.leaked(block):
        body += cell(x, y, long, 16, MARK, f"{block}: leaked", size=10.5, ink="#000")
    elif not users:
        what = "" if size == 1 else ": free, kept" if moment.findable[block] else ": free"
        body += cell(x, y, long, 16, GREY, f"{block}{what}", size=10.5, ink=FREE_INK)
    for place in range(size):
        text = moment.contents[block][place]
        known = text and (users or moment.ref_counts[block] or moment.findable[block])
        fill = EMPTY if not users or not text else tint(users[0]) if len(users) == 1 else SHARED
        body += _place(x + place * CELL, y + 16, text if known else "", fill, "#222" if users else FREE_INK,
                       (block, place) in moment.fresh)
        if users and not text:
            body += (f'<path d="M{x + place * CELL:g} {y + 16 + HIGH:g} l{CELL:g} {-HIGH:g}" stroke="{LINE}" '
                     'stroke-width="1"/>')
    return body


def describe_moment(run: EngineSteps, moment: Moment) -> str:
    """One step of a run as text."""
    shared = [block for block, count in enumerate(moment.ref_counts) if count > 1]
    tables = "; ".join(f"sequence {n} ({moment.status[n]}, {moment.computed[n]} tokens): blocks {list(table)}"
                       for n, table in moment.tables.items()) or "no sequence is left"
    leaked = [block for block in range(run.num_blocks) if moment.leaked(block)]
    return (f"After step {moment.step}: {tables}" + (f"; shared blocks {shared}" if shared else "")
            + (f"; leaked blocks {leaked}" if leaked else ""))


def blocks_figure(run: EngineSteps, steps: Sequence[int] | None = None) -> Drawing:
    """Block tables and pool after some steps, below each other.

    A thick frame marks what the step wrote; a stroke through an empty place, what is reserved but not used; grey, a
    block with several users; *kept*, a free block that can still be found by its contents; *leaked*, one that counts as
    used but is in no table. ``steps``: their numbers, from 1; the last one if not given.

        >>> show.blocks_figure(run, steps=[1, 6])
    """
    moments = [run.moment(step) for step in steps or [len(run.moments)]]
    body, y, width = "", 0.0, 0.0
    for moment in moments:
        drawing = moment_drawing(run, moment)
        body, y, width = body + drawing.at(0, y), y + drawing.height + 14, max(width, drawing.width)
    details = ". ".join(describe_moment(run, moment) for moment in moments)
    return Drawing(Svg(width, y - 10, body).text(), f"Figure: block tables and pool. {details}.")
