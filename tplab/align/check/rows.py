"""The token behind each row of a recorded tensor: calls of any shape → rows by sequence and position.

What ``rec.inputs`` says is believed: the sequence of a row, its text (``texts=``), its position. Where it does not say
enough, the sizes must decide; where they do not, one question is asked.
"""

from dataclasses import dataclass, field

import torch

from tplab.align.recording import PlacementError

UNKNOWN = -1  # a token that nothing tells
_ID_NAMES = ("input_ids", "ids", "tokens", "token_ids", "idx", "input", "x", "0", "")
_MASKS = ("attention_mask", "padding_mask", "attn_mask", "mask")


@dataclass
class CallRows:
    """The rows of one call, in the order in which the engine lays them out: ``batch`` times ``tokens`` of them."""

    index: int
    batch: int
    tokens: int
    rows: list[int] = field(default_factory=list)  # of the real tokens: numbers below batch * tokens
    places: list[tuple[int, int]] = field(default_factory=list)  # (sequence, position) of each of them
    ends: list[int] = field(default_factory=list)  # for each text in the call, its last row
    keys: list[int] = field(default_factory=list)  # for each of `rows`, the tokens of its text at the end of the call
    cut: dict[int, int] = field(default_factory=dict)  # text → the position from which on it lost its tokens

    @property
    def size(self) -> int:
        """All rows, padding included."""
        return self.batch * self.tokens

    def without_cut(self, known: dict[tuple[int, int], object]) -> dict:
        """``known`` without the places that the texts lost in this call."""
        return {place: value for place, value in known.items() if place[1] < self.cut.get(place[0], place[1] + 1)}

    def pad(self, size: int) -> None:
        """Count ``size`` rows; those behind the rows of ``rec.inputs`` are padding."""
        self.batch, self.tokens = (1, size) if self.batch == 1 else (size // self.tokens, self.tokens)


def as_rows(tensor: torch.Tensor, call: CallRows) -> torch.Tensor | None:
    """``[rows, columns]`` of a whole call, or of the last row of each of its texts; None if it has other rows."""
    if tensor.dim() < 2:
        return None
    *front, columns = tensor.shape
    if len(front) == 2 and front == [call.tokens, call.batch] and call.tokens != call.batch:
        tensor = tensor.transpose(0, 1)
    rows = tensor.numel() // max(columns, 1)
    return tensor.reshape(rows, columns) if rows in (call.size, len(call.ends)) else None


def as_heads(tensor: torch.Tensor, call: CallRows, head_dim: int) -> torch.Tensor | None:
    """A tensor as ``[call.size, heads, head_dim]``; None if it has other rows. Heads stand in one dimension with
    ``head_dim``, behind the tokens, or before them. Of a whole cache's keys the last rows are taken, where all texts
    have one length."""
    if tensor.dim() < 2 or tensor.shape[-1] % head_dim or not tensor.numel():
        return None
    columns = tensor.shape[-1]
    if columns != head_dim or tensor.dim() == 2 or tensor.numel() == call.size * columns:
        return tensor.reshape(call.size, -1, head_dim) if tensor.numel() // columns == call.size else None
    if tensor.dim() == 3:
        tensor = tensor.unflatten(0, (call.batch, -1)) if len(tensor) == call.size else tensor[None]
    if tensor.dim() != 4 or len(tensor) != call.batch:
        return None
    keys = call.keys[0] if len(set(call.keys)) == 1 and len(call.rows) == call.size else call.tokens
    for tokens in dict.fromkeys((call.tokens, keys)):
        for lines in (tensor, tensor.transpose(1, 2)):  # [batch, tokens, heads, head_dim]
            if lines.shape[1] == tokens >= call.tokens:
                return lines[:, tokens - call.tokens:].reshape(call.size, lines.shape[2], head_dim)
    return None


class Texts:
    """The sequences as they grow from call to call.

    Attributes:
        ids: per sequence its tokens, ``UNKNOWN`` where nothing tells them.
        padding: sequences that are padding: they never have more than one token, at position 0 of decode calls.
    """

    def __init__(self):
        self.ids: list[list[int]] = []
        self.begun: list[list[int]] = []  # per sequence and token, where the call that computed it last began
        self.by_label: dict[object, int] = {}  # the engine's own number of a sequence, or (batch, line) → ours
        self.batch = 0  # of texts without numbers
        self.padding: set[int] = set()
        self.trees: dict[int, str] = {}  # sequence that had a tree of drafts → what is said of it
        self.untold: dict[int, str] = {}  # sequence of which the first tokens were not told → what is said of it

    @property
    def questions(self) -> list[str]:
        """What ``rec.inputs`` should be told, one sentence each."""
        return [*self.trees.values(), *(question for n, question in self.untold.items() if UNKNOWN in self.ids[n])]

    def add_call(self, index: int, input_ids: torch.Tensor, positions: torch.Tensor | None,
                 sequences: list[int] | None, mask: torch.Tensor | None = None,
                 texts: dict[int, list[int]] | None = None) -> CallRows:
        """Say which token each row of a call is; the texts grow by the new ones. ``input_ids`` and ``positions`` are
        ``[tokens]`` of one or several texts, or ``[batch, tokens]``; ``sequences`` the engine's own number of the text
        of each row, or of each line; ``texts`` the whole texts of some of them. What is negative in any of them is
        padding, and what is 0 in ``mask`` ``[batch, past and new tokens]``."""
        if input_ids.dim() not in (1, 2):
            raise PlacementError(f"call {index}: token ids of shape {list(input_ids.shape)}; they are [tokens] or "
                                 "[batch, tokens]")
        batch, tokens = (1, len(input_ids)) if input_ids.dim() == 1 else input_ids.shape
        call, ids = CallRows(index, batch, tokens), input_ids.reshape(-1).tolist()
        if positions is not None:
            if positions.numel() not in (tokens, call.size):
                raise PlacementError(f"call {index}: positions of shape {list(positions.shape)} for ids of shape "
                                     f"{list(input_ids.shape)}; give one for each token")
            positions = positions.reshape(-1).tolist() * (call.size // max(1, positions.numel()))
        seen = [True] * call.size
        if mask is not None and mask.dim() == 2 and len(mask) == batch and mask.shape[1] >= tokens:
            seen = mask[:, mask.shape[1] - tokens:].reshape(-1).bool().tolist()
        real = [row for row, token in enumerate(ids) if seen[row] and token >= 0 and not (
            positions and positions[row] < 0)]
        runs = (self._unlabelled(call, real, ids, positions) if sequences is None else
                self._labelled(call, real, sequences))
        numbers: list[int] = []
        for label, run in runs.items():
            text, places = [ids[row] for row in run], None if positions is None else [positions[row] for row in run]
            if label not in self.by_label:
                self.by_label[label] = len(self.ids)
                self.ids.append([])
                self.begun.append([])
            numbers.append(number := self.by_label[label])
            whole = (texts or {}).get(label)
            if whole is None and self._is_tree(number, places):
                self.trees.setdefault(number, f"call {index} computes a tree of drafts, with two rows of sequence "
                                      f"{self._label(number)} at one position: such rows were not judged; record a run "
                                      "without a tree")
                continue
            start = self._start(number, text, places and places[0], index) if whole is None else self._told(
                call, number, text, whole)
            self._write(call, number, start, text)
            call.rows += run
            call.places += [(number, start + i) for i in range(len(run))]
            call.ends.append(run[-1])
            call.keys += [start + len(text)] * len(run)
        alone = {n for n in numbers if len(self.ids[n]) == 1} if all(len(run) == 1 for run in runs.values()) else set()
        self.padding = {n for n in self.padding if len(self.ids[n]) == 1} | (alone if len(alone) < len(runs) else set())
        return call

    def _labelled(self, call: CallRows, real: list[int], sequences: list[int]) -> dict[object, list[int]]:
        """The rows of each sequence in a call, by the engine's own number of it."""
        per_row = len(sequences) == call.size
        if not per_row and len(sequences) != call.batch:
            raise PlacementError(f"call {call.index}: {len(sequences)} sequence numbers for {call.batch} lines of "
                                 f"{call.tokens} tokens; give one for each line or one for each token")
        runs: dict[object, list[int]] = {}
        for row in real:
            if (label := sequences[row if per_row else row // call.tokens]) >= 0:
                runs.setdefault(label, []).append(row)
        return runs

    def _unlabelled(self, call: CallRows, real: list[int], ids: list[int], positions: list[int] | None
                    ) -> dict[object, list[int]]:
        """The same without numbers: a line of a batch is a text; in flat ids a text goes on while positions count up.
        The texts are those of the call before, in its order, unless all of them begin."""
        runs: list[list[int]] = []
        for before, row in zip([-1, *real], real):
            goes_on = before >= 0 and before // call.tokens == row // call.tokens and (
                call.batch > 1 or positions is None or positions[row] == positions[before] + 1)
            runs[-1].append(row) if goes_on else runs.append([row])
        lines = [run[0] // call.tokens if call.batch > 1 else n for n, run in enumerate(runs)]
        known = [self.ids[n] if (n := self.by_label.get((self.batch, line))) is not None else [] for line in lines]
        texts = [[ids[row] for row in run] for run in runs]
        new = [len(text) > 1 and not (positions and positions[run[0]]) and (
            not old or text[:len(old)] != old[:len(text)]) for run, text, old in zip(runs, texts, known)]
        if all(new) or not self.ids:
            self.batch += 1
        elif call.batch == 1 and len(runs) != sum(isinstance(label, tuple) and label[0] == self.batch
                                                  for label in self.by_label):
            raise PlacementError(f"call {call.index}: the tokens do not say to which text they belong; give "
                                 "rec.inputs(ids, positions, sequences) the number of each token's text")
        return {(self.batch, line): run for line, run in zip(lines, runs)}

    def _label(self, number: int) -> int:
        """The engine's own number of a sequence, if it gave one."""
        label = next(label for label, ours in self.by_label.items() if ours == number)
        return number if isinstance(label, tuple) else label

    def _is_tree(self, number: int, places: list[int] | None) -> bool:
        """Whether a known text goes on with several rows at one position."""
        return bool(places and self.ids[number] and places[0] >= len(self.ids[number]) and places.count(
            places[0]) == 1 and len(set(places)) < len(places))

    def _told(self, call: CallRows, number: int, text: list[int], whole: list[int]) -> int:
        """The position at which new tokens of a text begin that ``rec.inputs`` told."""
        known, start = self.ids[number], len(whole) - len(text)
        if start < 0 or whole[start:] != text:
            raise PlacementError(f"call {call.index}: texts= gives a text that does not end with the call's tokens "
                                 f"{text[:8]} of that sequence; give all its tokens up to the last one of this call")
        for at, (old, new) in enumerate(zip(known, whole[:start])):
            if old not in (new, UNKNOWN):
                call.cut[number] = at
                del known[at:], self.begun[number][at:]
                break
        known[:start] = whole[:start]
        self.begun[number] += [0] * (len(known) - len(self.begun[number]))
        return start

    def _start(self, number: int, text: list[int], begin: int | None, index: int) -> int:
        """The position at which new tokens of a text begin: behind it, or where they are told to be, if the text is
        computed once more there, or can have lost drafted tokens. A token of the text's first call was not drafted, and
        neither was the first token of any call: then the position is wrong, and is judged."""
        known, begun = self.ids[number], self.begun[number]
        if begin is None:
            return 0 if len(text) > 1 and text[:len(known)] == known[:len(text)] else len(known)
        if number in self.trees or not known and begin:
            label = self._label(number)
            self.untold.setdefault(number, f"call {index} goes on with sequence {label} at position {begin}, and not "
                                   "all tokens before it were told: what attention reads there was not judged; give "
                                   f"rec.inputs(ids, positions, sequences, texts={{{label}: all its ids so far}})")
            return begin
        if begin >= len(known):
            return len(known)
        again = known[begin:begin + len(text)] == text[:len(known) - begin] and (
            len(text) > 1 or not begin or begin + 1 < len(known))
        return begin if again or 0 < begun[begin] < begin else len(known)

    def _write(self, call: CallRows, number: int, start: int, text: list[int]) -> None:
        known, begun, end = self.ids[number], self.begun[number], start + len(text)
        for grown, fill in (known, UNKNOWN), (begun, 0):
            grown += [fill] * (start - len(grown))
        if any(old not in (new, UNKNOWN) for old, new in zip(known[start:end], text)):  # drafts that were rejected
            del known[start:], begun[start:]
            call.cut[number] = min(start, call.cut.get(number, start))
        known[start:end], begun[start:end] = text, [start] * len(text)


def call_inputs(call) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Token ids, positions and attention mask ``[batch, tokens so far]`` of a call: as ``rec.inputs`` was told, else as
    the outermost module got them."""
    ids, positions, mask, door = call.input_ids, call.positions, None, None
    for entry in call.entries:
        door = entry.name if door is None or ids is None else door
        if entry.name != door:
            break  # later entries belong to inner modules
        name = entry.path.rpartition(".")[2]
        if entry.kind != "in" or entry.dtype.is_floating_point or entry.dtype.is_complex or len(
                entry.shape) not in (1, 2):
            continue
        if name in _MASKS:
            mask = entry.tensor() if mask is None and len(entry.shape) == 2 else mask
        elif entry.dtype != torch.bool and ids is None and name in _ID_NAMES:
            ids = entry.tensor()
        elif entry.dtype != torch.bool and positions is None and ids is not None and "pos" in name and (
                entry.shape[-1] == ids.shape[-1]):
            positions = entry.tensor()
    return ids, positions, mask
