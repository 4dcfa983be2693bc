"""Which token each row of a recorded tensor belongs to: calls of any shape → rows by sequence and position."""

import math
from dataclasses import dataclass, field

import torch

from tplab.align.recording import PlacementError

_ID_NAMES = ("input_ids", "ids", "tokens", "token_ids", "idx", "input", "x", "0", "")


@dataclass
class CallRows:
    """The rows of one call, in the order in which the engine lays them out: ``batch`` times ``tokens`` of them.

    Attributes:
        rows: of the real tokens (not padding), numbers from 0 to ``batch * tokens - 1``.
        places: ``(sequence, position)`` of each of ``rows``.
        ends: for each text in the call, its last row.
        keys: for each text in the call, its tokens at the end of the call.
        declared: the position that the engine gave, of each of ``rows``; None if it gave none.
    """

    index: int
    batch: int
    tokens: int
    rows: list[int] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    declared: list[int] | None = None

    @property
    def size(self) -> int:
        """All rows, padding included."""
        return self.batch * self.tokens


class Texts:
    """The sequences as they grow from call to call."""

    def __init__(self):
        self.ids: list[list[int]] = []
        self.by_label: dict[int, int] = {}  # the engine's own number of a sequence → ours
        self.notes: list[str] = []
        self.again: dict[int, list[int]] = {}  # calls that computed known tokens once more, and how many

    def add_call(self, index: int, input_ids: torch.Tensor, positions: torch.Tensor | None,
                 sequences: list[int] | None) -> CallRows:
        """Say which token each row of a call is; the texts grow by the new ones.

        Args:
            input_ids: ``[tokens]`` of one or several texts, or ``[batch, tokens]``; negative ids are padding.
            positions: ``[tokens]`` or ``[batch, tokens]``, as the engine counts them; negative ones are padding.
            sequences: the engine's own number of the text of each row, or of each line of the batch.
        """
        if input_ids.dim() not in (1, 2):
            raise PlacementError(f"call {index}: token ids of shape {list(input_ids.shape)}; they are [tokens] or "
                                 "[batch, tokens]")
        batch, tokens = (1, len(input_ids)) if input_ids.dim() == 1 else input_ids.shape
        call = CallRows(index, batch, tokens)
        ids = input_ids.reshape(-1).tolist()
        said = _spread(positions, batch, tokens)
        if positions is not None and said is None:
            self.notes.append(f"call {index}: positions of shape {list(positions.shape)} do not belong to ids of shape "
                              f"{list(input_ids.shape)}; they were ignored")
        real = [row for row, token in enumerate(ids) if token >= 0 and (said is None or said[row] >= 0)]
        free = set(range(len(self.ids)))
        declared = []
        for label, run in self._runs(call, real, said, sequences, input_ids.dim() > 1):
            text = [ids[row] for row in run]
            begin = None if said is None else said[run[0]]
            number, start = self._find(text, begin, label, free, index)
            free.discard(number)
            known = self.ids[number]
            if start < len(known):
                self.again.setdefault(index, []).append(len(known) - start)
            known[start:start + len(text)] = text
            call.rows += run
            call.places += [(number, start + i) for i in range(len(run))]
            call.ends.append(run[-1])
            call.keys += [start + len(run)] * len(run)
            declared += [] if said is None else [said[row] for row in run]
        call.declared = None if said is None else declared
        return call

    def _runs(self, call: CallRows, real: list[int], said: list[int] | None, sequences: list[int] | None,
              lines: bool) -> list[tuple[int | None, list[int]]]:
        """The rows of each text in a call, with the engine's own number of it if it gave one."""
        if sequences is not None and len(sequences) == call.size:
            labels: dict[int, list[int]] = {}
            for row in real:
                labels.setdefault(sequences[row], []).append(row)
            return list(labels.items())
        if lines:
            if sequences is not None and len(sequences) != call.batch:
                raise PlacementError(f"call {call.index}: {len(sequences)} sequence numbers for {call.batch} lines of "
                                     f"{call.tokens} tokens; give one for each line or one for each token")
            found = [[row for row in real if row // call.tokens == line] for line in range(call.batch)]
            return [(sequences[line] if sequences else None, run) for line, run in enumerate(found) if run]
        if sequences is not None:
            raise PlacementError(f"call {call.index}: {len(sequences)} sequence numbers for {call.size} tokens; give "
                                 "one for each token")
        if len(real) == len(self.ids) > 1 and (said is None or [said[row] for row in real] != list(range(len(real)))):
            return [(None, [row]) for row in real]  # one new token for every text
        runs: list[list[int]] = []
        for row in real:
            if runs and (said is None or said[row] == said[runs[-1][-1]] + 1):
                runs[-1].append(row)
            else:
                runs.append([row])
        return [(None, run) for run in runs]

    def _find(self, text: list[int], begin: int | None, label: int | None, free: set[int], index: int
              ) -> tuple[int, int]:
        """Which sequence some new tokens belong to and at which position they start; a new one if to none."""
        if label is not None:
            if label not in self.by_label:
                self._check_begin(text, begin, index)
                self.by_label[label] = self._new()
                return self.by_label[label], 0
            number = self.by_label[label]
            return number, self._start(self.ids[number], text, begin)
        candidates = [n for n in sorted(free) if n not in self.by_label.values()]
        again = [n for n in candidates if len(text) > 1 and begin in (None, 0)
                 and text[:len(self.ids[n])] == self.ids[n][:len(text)]]
        if again:
            return again[0], 0
        if len(text) == 1 or begin:
            exact = [n for n in candidates if len(self.ids[n]) == begin]
            if exact or (candidates and (len(text) == 1 or len(candidates) == 1)):
                number = (exact or candidates)[0]
                return number, len(self.ids[number])
        self._check_begin(text, begin, index)
        if begin:
            self.notes.append(f"call {index}: a text begins at position {begin}; the tokens before it were not "
                              "recorded, so it is taken as one that begins here")
        return self._new(), 0

    @staticmethod
    def _check_begin(text: list[int], begin: int | None, index: int) -> None:
        if len(text) == 1 and begin:
            raise PlacementError(f"call {index}: a single token at position {begin} goes on with a text of which "
                                 "nothing was recorded; begin with the call of the prompt (calls= keeps its ids)")

    @staticmethod
    def _start(known: list[int], text: list[int], begin: int | None) -> int:
        again = len(text) > 1 and begin in (None, 0) and text[:len(known)] == known[:len(text)]
        return 0 if again else len(known)

    def _new(self) -> int:
        self.ids.append([])
        return len(self.ids) - 1


def _spread(positions: torch.Tensor | None, batch: int, tokens: int) -> list[int] | None:
    """Positions of any usual shape, one for each row; None if they fit no shape."""
    if positions is None:
        return None
    if positions.numel() == batch * tokens:
        return positions.reshape(-1).tolist()
    return positions.reshape(-1).tolist() * batch if positions.numel() == tokens else None


def _counts_up(entry, ids: torch.Tensor) -> bool:
    """Whether an input whose name says nothing is the positions: each is 0 or one more than the one before."""
    if not entry.path.isdecimal() or math.prod(entry.shape) != ids.numel() or ids.numel() < 2:
        return False
    found = entry.tensor().reshape(-1).tolist()
    return not found[0] and all(b in (0, a + 1) for a, b in zip(found, found[1:]))


def call_inputs(call) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Token ids and positions of a recorded call: those said, else those seen at the door of the outermost module."""
    ids, positions = call.input_ids, call.positions
    for entry in call.entries:
        if entry.kind == "in" and not (entry.dtype.is_floating_point or entry.dtype.is_complex
                                       or entry.dtype == torch.bool) and len(entry.shape) in (1, 2):
            name = entry.path.rpartition(".")[2]
            if ids is None and name in _ID_NAMES:
                ids = entry.tensor()
            elif positions is None and ids is not None and ("pos" in name or _counts_up(entry, ids)):
                positions = entry.tensor()
        elif ids is not None:
            break  # what comes later is about inner modules
    return ids, positions
