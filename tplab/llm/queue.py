"""``RequestQueue``: the requests of an LLM, of all its callers."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tplab.checks import quoted, whole_number
from tplab.engine.core import Engine
from tplab.engine.errors import EngineError, RequestError
from tplab.llm.requests import Request

Inbox = dict[Request, int]  # requests that changed since their caller last fetched them → how many tokens they got


class RequestQueue:
    """All requests of an engine, and an inbox for each of their callers.

    A call of ``generate``, a stream, and ``LLM.step`` are callers. A step of any caller advances the requests of all
    callers, and puts each request that changed into the inbox of the caller that added it. So no caller misses a
    token, or an end, that came in another caller's step.

    Everything but :meth:`abandon` happens while :meth:`locked`.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.unfinished: dict[int, Request] = {}
        self.for_step: Inbox = {}  # of callers of LLM.add_request and LLM.step
        self.ranks_may_be_stale = True  # since the last step, ranks may have been restarted, and have lost the model
        self._inboxes: dict[int, Inbox] = {}
        self._abandoned: deque[Request] = deque()
        self._gate, self._lock = threading.Lock(), threading.RLock()
        self._owner: int | None = None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """The lock on requests and engine. Threads get it in the order in which they ask for it.

        Raises EngineError if this thread holds it (a signal handler or a patch calls the LLM in the middle of a step).
        """
        if self._owner == threading.get_ident():
            raise EngineError("this LLM is in the middle of a call of the same thread; call it again when that is over")
        with self._gate:  # without it, a thread that steps in a loop would never let another one in
            self._lock.acquire()
        try:
            self._owner = threading.get_ident()
            self._end_abandoned()
            yield
        finally:
            self._owner = None
            self._lock.release()

    def add(self, request: Request, inbox: Inbox) -> None:
        """Queue a request; its changes are reported to ``inbox``."""
        request.sequence = self.engine.add(request.prompt_token_ids, request.params)
        self.unfinished[request.request_id], self._inboxes[request.request_id] = request, inbox
        self.ranks_may_be_stale = True

    def step(self) -> None:
        """One step for all requests. Errors as in :meth:`Engine.step`; an error loses no token."""
        self.ranks_may_be_stale = True
        try:
            self.engine.step()
            self.ranks_may_be_stale = False
        finally:
            # Also when the step failed: the tokens may have been applied before, as when its last check fails.
            for request in list(self.unfinished.values()):
                tokens = request.advance(self.engine)
                if tokens or request.finished:
                    self._report(request, tokens)

    def abort(self, number: int) -> Request:
        """End a request of any caller now. Raises RequestError if no unfinished request has this number."""
        found = whole_number(number)
        request = None if found is None else self.unfinished.get(found)
        if request is None:
            raise RequestError(f"there is no unfinished request {quoted(number)}; there are: "
                               f"{', '.join(map(str, self.unfinished)) or 'none'}")
        self.engine.finish(request.sequence, "abort")
        self._report(request, 0)
        return request

    def abandon(self, requests: Iterable[Request]) -> None:
        """End the unfinished ones: their caller no longer reads them.

        It never raises and never waits, since a stream can be dropped at any moment, even by the garbage collector in
        the middle of another caller's step. In that case they end when the lock is taken next.
        """
        self._abandoned.extend(requests)
        if self._owner != threading.get_ident() and self._lock.acquire(blocking=False):
            try:
                self._end_abandoned()
            finally:
                self._lock.release()

    def clear(self) -> None:
        """End all requests; outputs that were not fetched are dropped."""
        for request in self.unfinished.values():
            self.engine.finish(request.sequence, "abort")
        for requests in (self.unfinished, self._inboxes, self.for_step):
            requests.clear()

    def _report(self, request: Request, tokens: int) -> None:
        inbox = self._inboxes[request.request_id]
        inbox[request] = inbox.get(request, 0) + tokens
        if request.finished:
            del self.unfinished[request.request_id], self._inboxes[request.request_id]

    def _end_abandoned(self) -> None:
        while self._abandoned:
            request = self._abandoned.popleft()
            if request.request_id in self.unfinished:
                self.abort(request.request_id)
