"""``Calls``: which rows of a recording were computed together, and in which slots of a cache their keys stand."""

from itertools import groupby
from typing import NamedTuple

from tplab.align.recording import Recording
from tplab.cache import Segment


class Blocks(NamedTuple):
    """The block tables with which a replay computes."""

    segments: list[list[Segment]]  # per call
    block_size: int
    num_blocks: int
    filled: bool  # whether the slots of absent keys are filled before the first call


class Calls:
    """The calls of a run, for a replay.

    Attributes:
        rows: per call, its rows of the recording.
        absent: ``(sequence, position)`` of keys that no recorded call computed (a prefix computed before).
        slots: per sequence, the slot of each key: its row; behind the rows come the absent keys.
        right: blocks of one slot, each key in its own; the last slot stays empty.
        recorded: the run's own block tables; ``right`` where they are not known, or rows were computed more than once.
    """

    def __init__(self, recording: Recording):
        self.recording = recording
        sequences = range(len(recording.ids))
        ordered = sorted(range(len(recording.places)), key=lambda row: recording.origins[row])
        self.rows = [list(rows) for _, rows in groupby(ordered, lambda row: recording.origins[row][0])]
        self.absent: list[tuple[int, int]] = []
        self.slots = [self._slots_of(s) for s in sequences]
        calls = [(call, s) for (call, _), (s, _) in zip(recording.origins, recording.places)]
        # How long each sequence's prompt was: the most keys of a call with several of its tokens.
        self._prompts = [max((keys for keys, key in zip(recording.num_keys, calls)
                              if key[1] == s and calls.count(key) > 1), default=1) for s in sequences]
        self.right = Blocks([self._segments(rows) for rows in self.rows], 1,
                            len(recording.places) + len(self.absent) + 1, True)
        self.recorded = self._recorded_blocks()

    def _slots_of(self, number: int) -> list[int]:
        """The slot of each key of a sequence: the row that computed it, or that of a text with the same beginning."""
        texts, row_of, slots = self.recording.ids, self.recording.row_of, []
        for position in range(max((p for s, p in row_of if s == number), default=-1) + 1):
            alike = (s for s, text in enumerate(texts) if text[:position + 1] == texts[number][:position + 1])
            row = next((row_of[s, position] for s in (number, *alike) if (s, position) in row_of), None)
            if row is None:
                row = len(row_of) + len(self.absent)
                self.absent.append((number, position))
            slots.append(row)
        return slots

    def _segments(self, rows: list[int]) -> list[Segment]:
        """The sequences of a call, each with its slots as blocks of one token."""
        segments: list[Segment] = []
        for row in rows:
            (s, position), before = self.recording.places[row], segments[-1] if segments else None
            if before and before.block_ids is self.slots[s] and position == before.start + before.count:
                segments[-1] = before._replace(count=before.count + 1)
            else:
                segments.append(Segment(position, 1, self.slots[s], self._prompts[s]))
        return segments

    def _recorded_blocks(self) -> Blocks:
        known, origins = self.recording.segments, self.recording.origins
        segments = [known[origins[rows[0]][0]] if known else [] for rows in self.rows]
        if any(sum(segment.count for segment in call) != len(rows) for call, rows in zip(segments, self.rows)):
            return self.right
        last = max(max(segment.block_ids) for call in segments for segment in call)
        return Blocks(segments, self.recording.block_size, last + 1, False)

    def with_row(self, sequence: int, position: int, slot: int) -> Blocks:
        """The right blocks, but the calls after the one that computes a key find ``slot`` in its place."""
        slots = [*self.slots[sequence]]
        slots[position] = slot
        return self.right._replace(segments=[[
            s._replace(block_ids=slots) if s.block_ids is self.slots[sequence] and s.start > position else s
            for s in segments] for segments in self.right.segments])
