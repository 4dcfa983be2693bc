"""Finds the token behind each row of a recorded tensor: calls of any shape → rows by sequence and position."""

import math
from dataclasses import dataclass, field

import torch

from tplab.align.recording import PlacementError

_ID_NAMES = ("input_ids", "ids", "tokens", "token_ids", "idx", "input", "x", "0", "")
_MASKS = ("attention_mask", "padding_mask", "attn_mask", "mask")
FLAT, AFTER, BEFORE = "heads in one dimension", "heads after tokens", "heads before tokens"


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
    declared: list[int] | None = None  # the positions that the engine gave `rows`
    cut: dict[int, int] = field(default_factory=dict)  # text → the position from which on it lost its tokens

    @property
    def size(self) -> int:
        """All rows, padding included."""
        return self.batch * self.tokens

    def without_cut(self, known: dict[tuple[int, int], object]) -> dict:
        """``known`` without the places that the texts lost in this call."""
        return {place: found for place, found in known.items() if place[1] < self.cut.get(place[0], place[1] + 1)}

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


def as_heads(tensor: torch.Tensor, call: CallRows, head_dim: int) -> dict[str, torch.Tensor]:
    """Every way to read a tensor as ``[call.size, heads, head_dim]``, the usual ones first. Of a whole cache's keys
    the last rows are taken, where all texts have one length."""
    if tensor.dim() < 2 or tensor.shape[-1] % head_dim or not tensor.numel():
        return {}
    ways, columns = {}, tensor.shape[-1]
    if tensor.numel() // columns == call.size:
        ways[FLAT] = tensor.reshape(call.size, columns // head_dim, head_dim)
    if columns == head_dim and tensor.dim() in (3, 4):
        lines = tensor if tensor.dim() == 4 else tensor[None]
        if len(lines) != call.batch and tensor.dim() == 3 and tensor.shape[0] == call.size:
            lines = tensor.reshape(call.batch, call.tokens, *tensor.shape[1:])
        keys = call.keys[0] if len(set(call.keys)) == 1 and len(call.rows) == call.size else call.tokens
        for way, lined in (AFTER, lines), (BEFORE, lines.transpose(1, 2)):  # [batch, tokens, heads, head_dim]
            if len(lined) == call.batch and lined.shape[1] in (call.tokens, keys):
                ways[way] = lined[:, -call.tokens:].reshape(call.size, lined.shape[2], head_dim)
    return ways


class Texts:
    """The sequences as they grow from call to call.

    Tokens follow one another as they come, and positions are judged. With ``trust_positions``, they say where tokens
    stand: a drafted token that stood there was rejected, and a text that does not begin at 0 begins with another one's
    tokens, or, with ``unknown_start``, with tokens that were not recorded.
    """

    def __init__(self, trust_positions: bool = False, unknown_start: bool = False):
        self.trust_positions, self.unknown_start, self.index = trust_positions, unknown_start, 0
        self.ids: list[list[int]] = []
        self.begun: list[list[int]] = []  # per sequence and token, where the call that computed it last began
        self.by_label: dict[int, int] = {}  # the engine's own number of a sequence → ours
        self.notes: list[str] = []
        self.again: dict[int, dict[int, int]] = {}  # call → text → how many known tokens were computed once more
        self.unseen_start: dict[int, int] = {}  # sequence → how many of its first tokens were not recorded, if any
        self.lone_tokens: dict[int, int | None] = {}  # sequence of one token beside longer ones → the first call of it
        self.unjudged: list[str] = []  # texts that cannot be looked at, one sentence each
        self.doubts: list[str] = []  # where the positions, taken for right, would give other texts

    def add_call(self, index: int, input_ids: torch.Tensor, positions: torch.Tensor | None,
                 sequences: list[int] | None, mask: torch.Tensor | None = None) -> CallRows:
        """Say which token each row of a call is; the texts grow by the new ones. ``input_ids`` and ``positions`` are
        ``[tokens]`` of one or several texts, or ``[batch, tokens]``; ``sequences`` the engine's own number of the text
        of each row, or of each line. What is negative in any of them is padding, and what is 0 in ``mask`` ``[batch,
        past and new tokens]``."""
        if input_ids.dim() not in (1, 2):
            raise PlacementError(f"call {index}: token ids of shape {list(input_ids.shape)}; they are [tokens] or "
                                 "[batch, tokens]")
        batch, tokens = (1, len(input_ids)) if input_ids.dim() == 1 else input_ids.shape
        self.index, call, ids = index, CallRows(index, batch, tokens), input_ids.reshape(-1).tolist()
        said = _spread(positions, batch, tokens)
        if positions is not None and said is None:
            self.notes.append(f"call {index}: positions of shape {list(positions.shape)} do not belong to ids of shape "
                              f"{list(input_ids.shape)}; they were ignored")
        seen = [True] * call.size
        if mask is not None and mask.dim() == 2 and len(mask) == batch and mask.shape[1] >= tokens:
            seen = mask[:, mask.shape[1] - tokens:].reshape(-1).bool().tolist()
        real = [row for row, token in enumerate(ids) if seen[row] and token >= 0 and (said is None or said[row] >= 0)]
        free = set(range(len(self.ids)))
        declared = []
        for label, run in self._runs(call, real, said, sequences, input_ids.dim() > 1):
            text, begin = [ids[row] for row in run], None if said is None else said[run[0]]
            number, start = self._find(text, begin, label, free)
            free.discard(number)
            alone = start == begin == 0 and len(text) == 1 and max(map(len, self.ids)) > 1  # it may be padding
            self.lone_tokens[number] = self.lone_tokens.get(number, index) if alone else None
            known, end = self.ids[number], start + len(text)
            if start < len(known):
                self.again.setdefault(index, {})[number] = min(len(known), end) - start
            if known[start:end] != text[:len(known) - start]:  # drafted tokens stood there, and were rejected
                del known[start:], self.begun[number][start:]
                call.cut[number] = start
            known[start:end], self.begun[number][start:end] = text, [start] * len(text)
            call.rows += run
            call.places += [(number, start + i) for i in range(len(run))]
            call.ends.append(run[-1])
            call.keys += [end] * len(run)
            declared += [] if said is None else [said[row] for row in run]
        call.declared = None if said is None else declared
        return call

    def settle(self) -> None:
        """After the last call: note the texts that may be padding."""
        for number, index in self.lone_tokens.items():
            if index is not None:
                self.doubts.append(f"call {index}: a token alone at position 0 may be padding")
                if self.trust_positions:
                    self.unseen_start[number] = 1

    def _runs(self, call: CallRows, real: list[int], said: list[int] | None, sequences: list[int] | None,
              lines: bool) -> list[tuple[int | None, list[int]]]:
        """The rows of each text in a call, with the engine's own number of it if it gave one."""
        if sequences is not None and len(sequences) != call.size and not (lines and len(sequences) == call.batch):
            raise PlacementError(f"call {call.index}: {len(sequences)} sequence numbers for " + (
                f"{call.batch} lines of {call.tokens} tokens; give one for each line or " if lines else
                f"{call.size} tokens; give ") + "one for each token")
        runs: dict[object, list[int]] = {}
        if sequences is not None or lines:
            per_row = sequences is not None and len(sequences) == call.size
            for row in real:
                line = row // call.tokens
                label = None if sequences is None else sequences[row if per_row else line]
                if label is None or label >= 0:
                    runs.setdefault((label, None if per_row else line), []).append(row)
            return [(label, run) for (label, _), run in runs.items()]
        # Each text has one new token; or a text continues as long as its positions count up.
        apart = len(real) == len(self.ids) > 1 and (said is None or [said[row] for row in real] != [*range(len(real))])
        for at, row in enumerate(real):
            if not runs or apart or said is not None and said[row] != said[real[at - 1]] + 1:
                runs[row] = []
            runs[next(reversed(runs))].append(row)
        return [(None, run) for run in runs.values()]

    def _find(self, text: list[int], begin: int | None, label: int | None, free: set[int]) -> tuple[int, int]:
        """The sequence to which new tokens belong, and the position at which they begin."""
        if label is not None:
            if label not in self.by_label:
                self.by_label[label], start = self._new(text, begin)
                return self.by_label[label], start
            number = self.by_label[label]
            return number, self._start(number, text, begin)
        candidates = [n for n in sorted(free) if n not in self.by_label.values()]
        if len(text) > 1 and begin in (None, 0):
            for n in candidates:
                if text[:len(self.ids[n])] == self.ids[n][:len(text)]:
                    return n, 0
        if len(text) == 1 or begin:
            exact = [n for n in candidates if len(self.ids[n]) == begin]
            back = [n for n in candidates if self.trust_positions and begin and self._start(n, text, begin) == begin]
            if exact or back or (candidates and (len(text) == 1 or len(candidates) == 1)):
                number = (exact or back or candidates)[0]
                return number, self._start(number, text, begin)
        return self._new(text, begin)

    def _start(self, number: int, text: list[int], begin: int | None) -> int:
        """The position at which tokens of a known text begin: behind it; at 0 if the text comes once more; or, with
        ``trust_positions``, at their own position, if the tokens that stood there can have been drafted. A token of the
        text's first call was not drafted, and neither was the first token of any call."""
        known, begun = self.ids[number], self.begun[number]
        if len(text) > 1 and begin in (None, 0) and text[:len(known)] == known[:len(text)]:
            return 0
        if begin is None or begin >= len(known):
            return len(known)
        drafted = 0 < begun[begin] < begin or text == known[begin:begin + len(text)]
        if not drafted and not begin == 0 < len(text) == len(known) == 1:  # padding, said to be a text of its own
            return len(known)
        self.doubts.append(f"call {self.index} begins at position {begin} of a text of {len(known)} tokens")
        return begin if self.trust_positions else len(known)

    def _new(self, text: list[int], begin: int | None) -> tuple[int, int]:
        """A new sequence: its number, and the position of its first token."""
        number, call = len(self.ids), f"call {self.index}: a"
        self.ids.append([])
        self.begun.append([])
        if not begin:
            return number, 0
        if not self.trust_positions:
            if len(text) == 1:
                raise PlacementError(f"{call} single token at position {begin} continues a text that was not "
                                     "recorded; begin with the call of the prompt (calls= keeps its ids)")
            self.doubts.append(f"{call} text begins at position {begin}")
            self.notes.append(f"{call} text begins at position {begin}, and the tokens before it were not recorded; it "
                              "is judged as a text that begins here")
            return number, 0
        before = {tuple(other[:begin]) for n, other in enumerate(self.ids) if len(other) >= begin
                  and n not in self.unseen_start and not self.unknown_start}
        self.doubts.append(f"{call} text continues at position {begin}")
        if len(before) != 1:
            self.unseen_start[number] = begin
            self.unjudged.append(f"{call} text continues at position {begin}, and the tokens before it were not "
                                 "recorded: its rows were not judged; record the call that computed those tokens, too")
        self.ids[number] = list(before.pop()) if len(before) == 1 else [0] * begin
        self.begun[number] = [0] * begin
        return number, begin


def _spread(positions: torch.Tensor | None, batch: int, tokens: int) -> list[int] | None:
    """Positions of any usual shape, one for each row; None if they fit no shape."""
    if positions is None or positions.numel() not in (tokens, batch * tokens):
        return None
    return positions.reshape(-1).tolist() * (batch * tokens // max(1, positions.numel()))


def _counts_up(entry, ids: torch.Tensor) -> bool:
    """Whether an input without a telling name holds positions: each is 0 or one more than the one before."""
    if not entry.path.isdecimal() or math.prod(entry.shape) != ids.numel() or ids.numel() < 2:
        return False
    found = entry.tensor().reshape(-1).tolist()
    return not found[0] and all(b in (0, a + 1) for a, b in zip(found, found[1:]))


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
        elif entry.dtype != torch.bool and positions is None and ids is not None and (
                "pos" in name or _counts_up(entry, ids)):
            positions = entry.tensor()
    return ids, positions, mask
