"""``RequestQueue``: the unfinished requests of an LLM, and whose turn it is."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tplab.checks import quoted, whole_number
from tplab.engine.core import Engine
from tplab.engine.errors import EngineError, RequestError
from tplab.llm.requests import Request


class RequestQueue:
    """All requests of an engine. Everything but reading happens in :meth:`turn`.

    ``changed``: requests of ``LLM.add_request`` that got a token or ended since ``LLM.step`` last returned them.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.unfinished: dict[int, Request] = {}
        self.changed: dict[Request, None] = {}
        self._lock, self._caller = threading.Lock(), 0

    @property
    def is_my_turn(self) -> bool:
        """Whether this thread is in a call already."""
        return self._caller == threading.get_ident()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One call at a time; those of other threads wait. A stream is one call, until its end or its ``close()``.

        Raises EngineError if this thread is in a call already: in a stream, a signal handler, or a patch.
        """
        if self.is_my_turn:
            raise EngineError("this LLM is in the middle of a call of the same thread, such as a stream that was not "
                              "read to its end; call it again when that is over (a stream ends with its close())")
        with self._lock:
            self._caller = threading.get_ident()
            try:
                yield
            finally:
                self._caller = 0

    def add(self, request: Request) -> None:
        """Queue a request."""
        request.sequence = self.engine.add(request.prompt_token_ids, request.params)
        self.unfinished[request.request_id] = request

    def step(self, num_steps: int) -> dict[Request, int]:
        """:meth:`Engine.step` for all requests; those that changed, and how many tokens they got."""
        self.engine.step(num_steps)
        # Also of steps that failed after the engine had taken the tokens in, as where its last check fails.
        changed = {request: tokens for request in list(self.unfinished.values())
                   if (tokens := request.advance(self.engine)) or request.finished}
        for request in changed:
            if request.is_stepped:
                self.changed[request] = None
            if request.finished:
                del self.unfinished[request.request_id]
        return changed

    def abort(self, number: int) -> Request:
        """End a request now. Raises RequestError if no unfinished request has this number."""
        request_id = whole_number(number)
        request = None if request_id is None else self.unfinished.pop(request_id, None)
        if request is None:
            raise RequestError(f"there is no unfinished request {quoted(number)}; there are: "
                               f"{', '.join(map(str, self.unfinished)) or 'none'}")
        self.engine.finish(request.sequence, "abort")
        return request

    def abort_all(self, requests: Iterable[Request]) -> None:
        """End those of ``requests`` that have not ended."""
        for request in list(requests):
            if request.request_id in self.unfinished:
                self.abort(request.request_id)
