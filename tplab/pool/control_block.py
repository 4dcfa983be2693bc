"""The control block of a pool: one shared mapping that the parent and every rank read and write.

Commands, answers, progress and the op logs are plain numbers at fixed places. So they can be read at any moment, also
when a rank is dead or stuck in C++. A reader that is interrupted loses nothing. Pipes carry only wake-up bytes.
"""

import threading
from typing import NamedTuple

from tplab.pool.shared_file import SharedFile
from tplab.ranks.oplog import LOG_BYTES, OpLog

JOIN, SETUP, RUN, DROP = 1, 2, 3, 4  # the parent's commands; DROP closes gloo's connections and has no answer
OK, FAILED = 1, 2  # outcomes of a command

# Words of the pool's block.
ABANDONED = 0  # ranks of this epoch and of earlier ones leave every collective
NUMBER, KIND, EPOCH, LENGTH = 1, 2, 3, 4  # the current command; NUMBER is written last

# Words of a rank's block.
ANSWERED = 0  # number of the last command that this rank has finished
OUTCOME = 1
ANSWER_LENGTH = 2
ANSWERED_AT = 3  # time.monotonic_ns
PRINTED = 4  # bytes that Python code has printed during the command
STARTED = 5  # number of the last command that this rank has begun
STEP = 6  # number of exchanges of data that this rank has published in this epoch
BIRTH = 7  # the epoch in which this rank's process was started: an older process must end
SLEEPING = 8  # 1 while the rank sleeps until another one publishes a step
CONTENDED = 9  # 1 while other processes compete for this rank's core
BLOCK_WORDS = 64
SLOT_BYTES = 256 * 1024  # one chunk of a tensor; two slots per rank, used in turn


class Command(NamedTuple):
    number: int
    kind: int
    epoch: int
    length: int


class ControlBlock:
    """Fixed layout: pool block, a block per rank, a log per rank, two data slots per rank."""

    def __init__(self, memory: SharedFile, size: int):
        self.size = size
        self.map = memory.map()
        self.bytes = memoryview(self.map)
        self.words = self.bytes[: self.log_offset(0)].cast("q")
        logs = self.bytes[self.log_offset(0) : self.log_offset(size)]
        self.logs = [OpLog(logs[r * LOG_BYTES : (r + 1) * LOG_BYTES]) for r in range(size)]
        logs.release()

    @staticmethod
    def bytes_needed(size: int) -> int:
        return _slots_at(size) + 2 * size * SLOT_BYTES

    def log_offset(self, rank: int) -> int:
        return _logs_at(self.size) + rank * LOG_BYTES

    def slot_offset(self, rank: int, parity: int) -> int:
        return _slots_at(self.size) + (2 * rank + parity) * SLOT_BYTES

    def word(self, rank: int, name: int) -> int:
        return self.words[BLOCK_WORDS * (rank + 1) + name]

    def set_word(self, rank: int, name: int, value: int) -> None:
        self.words[BLOCK_WORDS * (rank + 1) + name] = value

    def post(self, command: Command) -> None:
        self.words[KIND], self.words[EPOCH], self.words[LENGTH] = command[1:]
        fence()
        self.words[NUMBER] = command.number

    def command(self) -> Command:
        while True:
            number = self.words[NUMBER]
            fence()
            command = Command(number, self.words[KIND], self.words[EPOCH], self.words[LENGTH])
            fence()
            if self.words[NUMBER] == number:
                return command

    def clear_rank(self, rank: int, birth: int) -> None:
        """Prepare the rank's block for a new process."""
        for name in range(BLOCK_WORDS):
            self.set_word(rank, name, 0)
        self.set_word(rank, BIRTH, birth)
        self.logs[rank].clear()

    def close(self) -> None:
        for log in self.logs:
            log.close()
        self.words.release()
        self.bytes.release()
        self.map.close()


def _logs_at(size: int) -> int:
    return 8 * BLOCK_WORDS * (size + 1)


def _slots_at(size: int) -> int:
    return -(-(_logs_at(size) + size * LOG_BYTES) // 4096) * 4096


_lock = threading.Lock()


def fence() -> None:
    """A memory fence: accesses before this call come before those after it, also on processors (ARM) that reorder them.

    Python has none. To take a lock twice has the same effect.
    """
    for _ in range(2):
        with _lock:
            pass
