"""`RankPool`: the ranks of a notebook, started once and used by every cell."""

import atexit
import itertools
import os
import sys
import tempfile
import threading
import weakref
from contextlib import suppress

from tplab.checks import quoted, whole_number
from tplab.patch import in_force
from tplab.pool import capture, transfer
from tplab.pool.control_block import ANSWERED, JOIN, PRINTED, RUN, SETUP, Command, ControlBlock
from tplab.pool.rank_process import RankProcess, end_all
from tplab.pool.shared_file import SharedFile
from tplab.pool.watch import Watch
from tplab.ranks import context
from tplab.ranks.errors import RankError, seconds

_JOIN_TIMEOUT = 60.0  # starting processes on a busy machine

_births = itertools.count()
_open_pools = weakref.WeakSet()
_shared = {}


class RankPool:
    """`size` rank processes on this machine, with collectives between them.

    ``pool.run(fn, *args)`` calls ``fn`` on all ranks at once and returns their results in rank order. ``timeout`` is
    the longest that a run may take, in seconds, unless the run says otherwise. ``strict=True`` also requires that all
    ranks call a collective from the same source line. A failed run raises `RankError`, and the pool can be used again;
    a rank that had to be ended starts afresh with an empty `state`. Use it as a context manager, or call `close`. Ranks
    never outlive the process that made them.
    """

    def __init__(self, size: int = 2, timeout: float = 60.0, strict: bool = False):
        _refuse_inside_rank("RankPool")
        self.size = size = _pool_size(size)
        self.timeout, self.strict, self.closed = seconds(timeout), strict, False
        self._lock, self._owner = threading.Lock(), None  # the thread that runs at the moment
        self._pid, self._made = os.getpid(), next(_births)
        self._number = self._epoch = 0
        self._fresh = True  # the ranks must join before the next run
        self._set_up = self._watch = None
        self._folder = tempfile.mkdtemp(prefix=f"tplab-{os.getpid()}-")  # for gloo's rendezvous
        try:
            self._memory = SharedFile("control-block", ControlBlock.bytes_needed(size))
            self._inbox = SharedFile("inbox")
            self._control = ControlBlock(self._memory, size)
            self._processes = [RankProcess(self, r) for r in range(size)]
            _open_pools.add(self)
            self._owner = threading.get_ident()
            self._ready()
            self._owner = None
        except BaseException as error:
            self.close()
            _shorten(error, "the ranks that were being started were ended")
            raise

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def __repr__(self):
        return f"<RankPool of {self.size} ranks, {'closed' if self.closed else 'open'}>"

    @property
    def pids(self) -> list[int | None]:
        """Process numbers of the ranks, in rank order; None for a rank that the next run will start."""
        return [None if process.dead() else process.child.pid for process in self._processes]

    @property
    def number_of_runs(self) -> int:
        """How many commands the ranks have been given."""
        return self._number

    def run(self, fn, *args, timeout: float | None = None, **kwargs) -> list:
        """Call ``fn(*args, **kwargs)`` on every rank; the results in rank order.

        `fn` may be defined in a notebook cell. What the ranks print is printed here, in rank order. Patches that are in
        force here (`tplab.patch.applied`) are in force on the ranks until `fn` has returned. Raises `RankError` when a
        rank fails, when the ranks' collectives differ, or after `timeout` seconds (None: the pool's).
        """
        _refuse_inside_rank("RankPool.run")
        self._refuse_unusable()
        timeout = self.timeout if timeout is None else seconds(timeout)
        payload = transfer.dumps_call(fn, args, kwargs, in_force())
        with self._lock:
            self._refuse_unusable()
            self._owner = threading.get_ident()
            try:
                self._ready()
                return self._run(RUN, payload, timeout)
            except KeyboardInterrupt as error:
                _shorten(error, "the ranks were stopped; the pool can be used")
                raise
            finally:
                self._owner = None

    def close(self) -> None:
        """End the ranks and free everything. Can be called twice."""
        if self.closed or self._pid != os.getpid():
            return
        self.closed = True
        end_all(getattr(self, "_processes", []))
        with suppress(OSError):  # a rank whose start was cut short may still write there
            _empty(self._folder)
            os.rmdir(self._folder)
        _open_pools.discard(self)
        # A run in another thread ends when its ranks have died; only then can the memory be freed.
        waited = self._owner != threading.get_ident() and self._lock.acquire(timeout=10)
        try:
            for process in getattr(self, "_processes", []):
                process.release()
            for name in ("_control", "_memory", "_inbox"):
                if hasattr(self, name):
                    getattr(self, name).close()
        finally:
            if waited:
                self._lock.release()

    def __del__(self):
        if hasattr(self, "_folder"):
            self.close()

    def _run(self, kind, payload, timeout):
        before = [log.last_seq() for log in self._control.logs]
        self._fresh = True  # until all ranks have answered well
        self._watch = Watch(self, before, timeout, self._number + 1)
        try:
            self._inbox.put(payload)
            self._post(kind, len(payload))
            answers = self._watch.results()
        except BaseException:
            self._watch.stop()
            self._print()
            raise
        self._watch, self._fresh = None, False
        for file in (self._inbox, *(process.outbox for process in self._processes)):
            file.truncate()
        self._print()
        return [_read(r, answer) for r, answer in enumerate(answers)]

    def _post(self, kind, length=0):
        self._number += 1
        self._control.post(Command(self._number, kind, self._epoch, length))
        for process in self._processes:
            if not process.dead():
                process.wake()

    def _ready(self):
        """Have all ranks alive, in one epoch, and with this process's module path and working folder."""
        if self._fresh or any(process.dead() for process in self._processes):
            self._join()
        folder = os.getcwd()
        if self._set_up != (sys.path, folder):
            self._run(SETUP, transfer.dumps((None, (list(sys.path), folder), {}, ())), _JOIN_TIMEOUT)
            self._set_up = (list(sys.path), folder)

    def _join(self):
        """Bring all ranks into a new epoch; dead ones are started afresh."""
        if self._watch is not None:
            self._watch.stop()  # an interrupt may have cut the last attempt short
        self._epoch += 1
        self._fresh, self._set_up, self._watch = True, None, None
        os.makedirs(self._folder, 0o700, exist_ok=True)  # a cleaner of temporary folders may have removed it
        _empty(self._folder)  # of the last epoch's rendezvous
        dead = [process for process in self._processes if process.dead()]
        for process in dead:
            self._control.clear_rank(process.rank, self._epoch)
        try:
            self._post(JOIN)  # before the start: a new rank must find this command and no older one
            for process in dead:
                process.start(self)
            Watch(self, [0] * self.size, _JOIN_TIMEOUT, self._number).results()
        except BaseException:
            # Those that have not joined wait in gloo's rendezvous for the others.
            end_all([m for m in self._processes if self._control.word(m.rank, ANSWERED) != self._number])
            raise
        finally:
            for process in self._processes:
                process.reader.take(0)  # what libraries print while they start is not the learner's
        self._fresh = False

    def _print(self):
        for process in self._processes:
            capture.show(process.rank, *process.reader.take(self._control.word(process.rank, PRINTED)))
            self._control.set_word(process.rank, PRINTED, 0)

    def _refuse_unusable(self):
        if self._pid != os.getpid():
            raise RankError(f"this pool belongs to process {self._pid}, of which this process ({os.getpid()}) is a "
                            "fork; use it there")
        if self.closed:
            raise RankError(f"this pool of {self.size} ranks is closed; make a new one: RankPool({self.size})")
        if self._owner == threading.get_ident():
            raise RankError("RankPool.run was called while this thread is already in a run of the same pool")


def shared_pool(size: int = 2) -> RankPool:
    """This process's shared pool of `size` ranks: made on first use, and again if it was closed."""
    size = _pool_size(size)
    pool = _shared.get(size)
    if pool is None or pool.closed or pool._pid != os.getpid():
        pool = _shared[size] = RankPool(size)
    return pool


def latest_pool() -> RankPool:
    """The open pool that was made last, else a shared one of two ranks."""
    latest = max((pool for pool in _open_pools if not pool.closed), key=lambda pool: pool._made, default=None)
    return latest or shared_pool(2)


@atexit.register
def _close_all() -> None:
    for pool in list(_open_pools):
        pool.close()


def _empty(folder: str) -> None:
    """Remove the files in a folder. An interrupt in ``shutil.rmtree`` can leave a descriptor open, or become an
    OSError."""
    for name in os.listdir(folder):
        with suppress(FileNotFoundError):  # gloo removes its file itself when the last rank has left
            os.unlink(os.path.join(folder, name))


def _read(rank, answer):
    try:
        return transfer.loads(answer)
    except Exception as error:
        raise RankError(f"the result of rank {rank} cannot be read here: {error}") from error


def _shorten(error: BaseException, words: str) -> None:
    """Have IPython show an interrupt as one line, not as a traceback through the pool."""
    if isinstance(error, KeyboardInterrupt):
        error._render_traceback_ = lambda: [f"KeyboardInterrupt: {words}"]


def _pool_size(size) -> int:
    number = whole_number(size, 1, 64)
    if number is None:
        raise RankError(f"a pool has 1 to 64 ranks, not {quoted(size)}")
    return number


def _refuse_inside_rank(what: str) -> None:
    if context.inside_rank():
        raise RankError(f"{what} was called inside rank {context.rank()}; a rank works with the other ranks by "
                        "collectives and starts no ranks of its own")
