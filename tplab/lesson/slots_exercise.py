"""The exercise of notebook 05: is this a slot mapping?"""

from collections.abc import Callable

from tplab.lesson.judging import verdict

TARGET = "tplab.cache.paged.slot_mapping"
TABLE, SIZE, TOKENS = [4, 1, 3], 4, 10


def check_slots(slot_mapping: Callable, model, prompts, *, tensor_parallel_size: int = 2, dtype: str = "float32"):
    """Judge a learner's ``slot_mapping(block_ids, positions, block_size)``: on one table, then in the engine.

    Prints one line, ``PASS`` or ``NOT YET`` with what to look at. ``prompts``: at least two, so that no sequence lies
    in one piece. Returns the ``AlignReport`` of the decode path; None if it did not run.

        >>> lesson.check_slots(slot_mapping, ckpt, prompts)
        NOT YET  slot_mapping: block table [4, 1, 3], block size 4: position 4 goes to slot 20 …
    """
    from tplab.align import align_decode

    def examine(patch):
        if hint := problem(slot_mapping):
            return None, hint
        return align_decode(model, prompts, tensor_parallel_size=tensor_parallel_size, dtype=dtype, patches=[patch]), ""

    return verdict(slot_mapping, TARGET, examine, "every position that was computed agrees with Hugging Face")


def problem(slot_mapping: Callable) -> str:
    """What is wrong with it, seen on one block table; the empty string if nothing is."""
    head = f"block table {TABLE}, block size {SIZE}: "
    for positions in (range(TOKENS), range(7, 8)):
        slots = slot_mapping(TABLE, positions, SIZE)
        if not isinstance(slots, list) or not all(type(slot) is int for slot in slots):
            return f"it returns {type(slots).__name__}; a list of whole numbers must come back, one slot per position"
        if len(slots) != len(positions):
            return f"{head}{len(positions)} positions go in, {len(slots)} slots come out; it must be one per position"
        for position, slot in zip(positions, slots):
            block, place = divmod(slot, SIZE)
            index, right = divmod(position, SIZE)
            if block not in TABLE:
                return (f"{head}position {position} goes to slot {slot}, which is in block {block} and belongs to "
                        "somebody else; which entry of the table is the position in?")
            if block != TABLE[index]:
                return (f"{head}position {position} goes to slot {slot} in block {block}, but it is the table's entry "
                        f"{index} that holds positions {index * SIZE} to {index * SIZE + SIZE - 1}")
            if place != right:
                return (f"{head}position {position} goes to slot {slot}, place {place} of the right block; it is the "
                        f"block's {right + 1}. token, and places count from 0")
    return ""
