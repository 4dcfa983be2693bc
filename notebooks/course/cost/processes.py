"""The processes of a contestant: held still while another one is measured, counted, ended."""

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from select import select
from time import monotonic, sleep

import psutil

from tplab.engine.errors import EngineError


class PeerError(EngineError):
    """A contestant cannot take part; the message says why."""


def tree(pids: Iterable[int]) -> list[psutil.Process]:
    """These processes and all that they have started, parents first."""
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            found += [root, *root.children(recursive=True)]
    return found


def send(pids: Iterable[int], number: int) -> None:
    """A signal to the whole tree; a process that has ended meanwhile needs none."""
    for process in tree(pids):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


@contextmanager
def alone(chosen: Iterable[int], others: Iterable[int]) -> Iterator[None]:
    """``chosen`` may work, ``others`` are stopped: workers that wait for work spin, and would take its cores."""
    send(others, signal.SIGSTOP)
    send(chosen, signal.SIGCONT)
    try:
        yield
    finally:
        send(others, signal.SIGCONT)


@contextmanager
def signals_end_properly() -> Iterator[None]:
    """SIGTERM and SIGHUP end what runs here as Ctrl-C does: else stopped contestants would stay stopped for ever."""
    def end(number, frame):
        signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt the cleaning up
        raise SystemExit(128 + number)

    numbers = [signal.SIGTERM, signal.SIGHUP] if threading.current_thread() is threading.main_thread() else []
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _has_ended(process: psutil.Process) -> bool:
    """Whether it has ended; its parent may not have read its exit code yet."""
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def private_bytes(pids: Iterable[int]) -> int:
    """Memory that the tree holds alone (USS)."""
    total = 0
    for process in tree(pids):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += process.memory_full_info().uss
    return total


class Child:
    """A program that answers lines of JSON with lines of JSON, in a session of its own.

    Lines go to its standard input. Answers come from a descriptor whose number is its first argument, because libraries
    print to standard output; what they print is kept, and its last line is shown if the program fails. `close` ends it
    and all that it has started.
    """

    def __init__(self, python: str, script: str, *arguments: str, env: dict[str, str] | None = None):
        read, write = os.pipe()
        self.answers, self.rest = read, b""
        self.printed = tempfile.TemporaryFile()
        try:
            self.process = subprocess.Popen(
                [python, script, str(write), *arguments], stdin=subprocess.PIPE, stdout=self.printed,
                stderr=subprocess.STDOUT, pass_fds=[write], start_new_session=True, env={**os.environ, **(env or {})})
        except OSError as error:
            os.close(read)
            raise PeerError(f"{python} cannot be started: {error.strerror}") from error
        finally:
            os.close(write)

    @property
    def pid(self) -> int:
        """Of the program itself."""
        return self.process.pid

    def ask(self, question: dict, timeout: float) -> dict:
        """Send one line, wait for one."""
        try:
            self.process.stdin.write(json.dumps(question).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(f"it has ended: {self._last_words()}") from None
        return self.hear(timeout)

    def hear(self, timeout: float) -> dict:
        """Its next line. PeerError if it ends, says something else, or says nothing for ``timeout`` seconds."""
        until = monotonic() + timeout
        while b"\n" not in self.rest:
            if not select([self.answers], [], [], max(0.0, until - monotonic()))[0]:
                raise PeerError(f"no answer in {timeout:.0f} seconds: {self._last_words()}")
            more = os.read(self.answers, 1 << 16)
            if not more:
                raise PeerError(f"it has ended: {self._last_words()}")
            self.rest += more
        line, _, self.rest = self.rest.partition(b"\n")
        try:
            return json.loads(line)
        except ValueError:
            raise PeerError(f"it answers {line[:80]!r}, which is no JSON") from None

    def close(self) -> None:
        """End it and all that it has started, at once."""
        started = tree([self.pid])
        for process in started:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        until = monotonic() + 5
        while not all(map(_has_ended, started)) and monotonic() < until:
            sleep(0.005)
        self.process.stdin.close()
        os.close(self.answers)
        self.printed.close()

    def _last_words(self) -> str:
        self.printed.seek(0)
        lines = [line for line in self.printed.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it has printed nothing"
