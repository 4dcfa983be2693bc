"""``LLM``: text in, text out, over tensor-parallel ranks."""

import threading
import time
from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial

import torch

from tplab.checkpoint import Checkpoint, open_checkpoint
from tplab.checks import quoted, readable, whole_number
from tplab.engine.config import EngineConfig
from tplab.engine.core import Engine
from tplab.engine.errors import EngineError, GenerationError, RequestError
from tplab.fast import why_not
from tplab.invariant import refuse_unknown
from tplab.llm.executor import LogicalExecutor, PoolExecutor
from tplab.llm.outputs import RequestOutput, StreamChunk
from tplab.llm.requests import Request, as_list, check_messages, parse_prompts
from tplab.llm.sampling_params import SamplingParams
from tplab.model.dtypes import parse_dtype
from tplab.patch import applied, as_patches, in_force
from tplab.pool import RankPool
from tplab.ranks import RankError
from tplab.shard import ShardPlan

MOST_STEPS, CALL_SECONDS = 8, 0.1  # of one call of the ranks


class LLM:
    """A model on tensor-parallel ranks, with vLLM's names.

    Args:
        model: ``"fable"``, ``"fable-moe"``, ``"smollm2"``, a folder, a hub id, or an opened checkpoint.
        tensor_parallel_size: number of ranks.
        dtype: ``"float32"``, ``"float64"`` or ``"bfloat16"``; of weights, activations and cache.
        enable_expert_parallel: deal whole experts out, rather than cut each over all ranks.
        block_size: tokens per cache block.
        num_blocks: blocks in the cache; None: room for ``max_num_seqs`` sequences of full length within 1 GiB over
            all ranks. Memory is committed as it is used.
        max_model_len: longest prompt and output together; None: the model's own limit.
        max_num_seqs: sequences that run at the same time.
        max_num_batched_tokens: tokens computed in one step; longer prompts are read in chunks.
        enable_prefix_caching: share the blocks of equal beginnings.
        strict: check caches, tables and ranks after every step.
        enforce_eager: the reference, plain PyTorch, computes every step; else :mod:`tplab.fast` does where it can.
        batch_invariant: the same bits for a sequence in any batch, whole or in chunks, and on any number of ranks
            (:mod:`tplab.invariant`; slower).
        num_speculative_tokens: the most draft tokens of a greedy request in one step (n-gram drafts); those that the
            model itself would have chosen are kept.
        patches: faults (``tplab.faults.fault(name)``) or :class:`tplab.patch.Patch` objects, applied while loading and
            in every step, on the ranks and in the scheduler.
        pool: the ranks; ``shared_pool(tensor_parallel_size)`` if None.
        logical: run the ranks as threads of this process instead (for wide sweeps in tests).
        executor: ``tensor_parallel_size`` → another way to reach the ranks (see ``executor.py``).

    Use as a context manager, or call :meth:`close`: the ranks forget the model; the pool stays open.

    Raises:
        CheckpointError, ShardPlanError, CacheError, EngineError: the engine cannot be made like that.
    """

    def __init__(self, model: str | Checkpoint, tensor_parallel_size: int = 2, dtype: str | torch.dtype = "float32", *,
                 enable_expert_parallel: bool = False, block_size: int = 16, num_blocks: int | None = None,
                 max_model_len: int | None = None, max_num_seqs: int = 16, max_num_batched_tokens: int = 512,
                 enable_prefix_caching: bool = True, strict: bool = False, enforce_eager: bool = False,
                 batch_invariant: bool = False, num_speculative_tokens: int = 0, patches: Many = (),
                 pool: RankPool | None = None, logical: bool = False, executor=None):
        self.checkpoint = open_checkpoint(model)
        self.dtype = parse_dtype(dtype)
        self.plan = ShardPlan.from_config(self.checkpoint.config, tensor_parallel_size,
                                          enable_expert_parallel=enable_expert_parallel)
        ranks = self.plan.tensor_parallel_size
        if not isinstance(pool, RankPool | None):
            raise EngineError(f"pool must be a RankPool, such as RankPool({ranks}), or None, not {quoted(pool)}")
        if pool is not None and pool.size != ranks:
            raise EngineError(f"the pool has {pool.size} ranks, tensor_parallel_size is {ranks}")
        self.patches = as_patches(patches)
        if batch_invariant:
            refuse_unknown(self.checkpoint.config, self.dtype, ranks)
        config = EngineConfig.for_model(
            self.checkpoint.config, self.plan, self.dtype, block_size=block_size, num_blocks=num_blocks,
            max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching, strict=strict, enforce_eager=enforce_eager,
            batch_invariant=batch_invariant, num_speculative_tokens=num_speculative_tokens)
        make_executor = executor or (LogicalExecutor if logical else partial(PoolExecutor, pool=pool))
        self.engine = Engine(make_executor(ranks), config)
        self.unfinished: dict[int, Request] = {}
        self._lock, self._caller = threading.Lock(), 0  # the thread that is in a call
        alone = strict or enforce_eager or logical or executor or self.patches or num_speculative_tokens
        self._num_steps = 1 if alone or why_not(self.checkpoint.config, self.dtype) else MOST_STEPS
        self._step_seconds = 0.0
        self.closed = False
        with applied(*self.patches):
            self._load()

    def _load(self) -> None:
        self.load_stats = self.engine.executor.load(self.checkpoint, self.plan, self.engine.config)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        """End all requests, also those of a stream that is not at its end, and forget the model on every rank. Can be
        called twice.
        """
        with nullcontext() if self._caller == threading.get_ident() else self._turn():
            if not self.closed:
                self.closed = True
                self._abort(list(self.unfinished.values()))
                self.engine.executor.close()

    def __repr__(self) -> str:
        pool = self.engine.pool
        return (f"<LLM {self.checkpoint.name}: {self.plan.tensor_parallel_size} ranks, {str(self.dtype)[6:]}, "
                f"{pool.num_blocks} blocks of {pool.block_size}{', closed' if self.closed else ''}>")

    @property
    def scheduler(self):
        """The scheduler, to be looked at and printed between steps."""
        return self.engine.scheduler

    @cached_property
    def tokenizer(self):
        """The checkpoint's tokenizer; None for a checkpoint that has none."""
        return self.checkpoint.tokenizer() if (self.checkpoint.folder / "tokenizer.json").exists() else None

    # Whole generations.

    def generate(self, prompts, sampling_params: SamplingParams | Many[SamplingParams] | None = None, *,
                 use_tqdm: bool | None = None) -> list[RequestOutput]:
        """Continue every prompt.

        Args:
            prompts: a text, a list of token ids, or a list of texts and lists of token ids.
            sampling_params: for all prompts, or one per prompt; :class:`SamplingParams` of defaults if None.
            use_tqdm: show a progress bar; None: in a terminal, when it takes longer than two seconds.

        Returns:
            One :class:`RequestOutput` per prompt, in their order.

        Raises:
            RequestError: a prompt cannot run; none has been computed. Or a request's logits became NaN.
            GenerationError: the ranks failed; carries what had been generated.
        """
        from tqdm import tqdm

        bar = tqdm(desc="generate", unit=" tokens", leave=False, delay=0 if use_tqdm else 2,
                   disable=None if use_tqdm is None else not use_tqdm)
        with bar, self._call(prompts, sampling_params) as requests:
            for changed in self._run(requests):
                bar.update(sum(changed.values()))
        return [request.output() for request in requests]

    def chat(self, messages, sampling_params: SamplingParams | None = None, *, use_tqdm: bool | None = None
             ) -> list[RequestOutput]:
        """:meth:`generate`'s answer to a conversation: ``[{"role": "user", "content": "…"}, …]``."""
        return self.generate([self.chat_prompt(messages)], sampling_params, use_tqdm=use_tqdm)

    def chat_prompt(self, messages) -> list[int]:
        """A conversation as token ids, by the checkpoint's chat template, up to where the answer begins."""
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise RequestError(f"{self.checkpoint.name} has no chat template; use generate with a prompt of its own "
                               "form")
        check_messages(messages)
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program from the checkpoint: it can fail in any way
            raise RequestError(f"the chat template of {self.checkpoint.name} cannot write this conversation: "
                               f"{' '.join(str(error).split()) or type(error).__name__}") from error
        return self.tokenizer(readable(text, RequestError), add_special_tokens=False).input_ids

    def stream(self, prompts, sampling_params: SamplingParams | Many[SamplingParams] | None = None
               ) -> Iterator[StreamChunk]:
        """Like :meth:`generate`, but yields every piece of text, of one token or some, as soon as it is certain.

        ``for chunk in llm.stream(prompt): print(chunk, end="")``. Leaving the loop early aborts what is unfinished.
        Until then, other calls of this LLM wait (in other threads) or are refused (in this one).
        """
        with self._call(prompts, sampling_params) as requests:
            index = {request: i for i, request in enumerate(requests)}
            for changed in self._run(requests):
                for request in changed:
                    chunk = StreamChunk(index[request], request.take_certain(), request.output())
                    if chunk.text or chunk.output.finished:
                        yield chunk

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One call at a time; those of other threads wait. A stream is one call, until its end or its ``close()``.

        Raises EngineError if this thread is in a call already: in a stream, a signal handler, or a patch.
        """
        if self._caller == threading.get_ident():
            raise EngineError("this LLM is in the middle of a call of the same thread, such as a stream that was not "
                              "read to its end; call it again when that is over (a stream ends with its close())")
        with self._lock:
            self._caller = threading.get_ident()
            try:
                yield
            finally:
                self._caller = 0

    @contextmanager
    def _call(self, prompts, sampling_params) -> Iterator[list[Request]]:
        """A call with its requests; those that have not ended after it are aborted."""
        with self._turn():
            if self.unfinished:
                raise EngineError(f"requests {', '.join(map(str, self.unfinished))} of add_request have not ended; "
                                  "call step until they have, or abort them")
            requests = self._add(as_list(prompts), sampling_params)
            try:
                yield requests
            finally:
                self._abort(requests)

    def _run(self, requests: list[Request]) -> Iterator[dict[Request, int]]:
        """Step until ``requests`` are done; yields those of them that changed, and how many tokens they got."""
        is_last = False
        while not is_last:
            self._refuse_closed()  # which would have ended them
            changed, is_last = self._step(requests), all(request.finished for request in requests)
            yield changed
        if failed := [request.error for request in requests if request.error]:
            raise failed[0]

    # Step by step.

    def add_request(self, prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue one prompt for :meth:`step`; returns its number. Errors as in :meth:`generate`."""
        with self._turn():
            (request,) = self._add([prompt], sampling_params)
        return request.request_id

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether :meth:`step` has something to compute."""
        return bool(self.unfinished)

    def step(self) -> list[RequestOutput]:
        """Compute one step. Returns the outputs, as they are now, of the requests that got a token or ended."""
        with self._turn():
            self._refuse_closed()
            return [request.output() for request in self._step()] if self.unfinished else []

    def abort(self, request_id: int) -> RequestOutput:
        """End an unfinished request now; what it has so far. Its blocks are free at once. RequestError for others."""
        with self._turn():
            number = whole_number(request_id)
            if number is None or number not in self.unfinished:
                raise RequestError(f"there is no unfinished request {quoted(request_id)}; there are: "
                                   f"{', '.join(map(str, self.unfinished)) or 'none'}")
            request = self.unfinished[number]
            self._abort([request])
            return request.output()

    # Parts.

    def _add(self, prompts, sampling_params) -> list[Request]:
        """Queue all prompts, or none if one of them cannot run."""
        self._refuse_closed()
        requests = []
        for number, (prompt, params) in enumerate(pairs := parse_prompts(prompts, sampling_params)):
            try:
                requests.append(Request(self, prompt, params))
            except RequestError as error:
                raise RequestError(f"prompt {number}: {error}" if len(pairs) > 1 else str(error)) from None
        for request in requests:
            request.sequence = self.engine.add(request.prompt_token_ids, request.params)
            self.unfinished[request.request_id] = request
        return requests

    def _abort(self, requests: list[Request]) -> None:
        """End those of ``requests`` that have not ended."""
        for request in requests:
            if self.unfinished.pop(request.request_id, None):
                self.engine.finish(request.sequence, "abort")

    def _refuse_closed(self) -> None:
        if self.closed:
            raise EngineError("this LLM is closed; make a new one")

    def _step(self, requests: Many[Request] = ()) -> dict[Request, int]:
        """One step for all requests: those that changed, and how many tokens they got. If it fails, ``requests`` are
        reported in the error.
        """
        try:
            with applied(*self.patches):
                if not self.engine.executor.loaded():  # ranks that were restarted have lost the model
                    self._load()
                    self.engine.recompute()
                # Where there is nothing to decide for several quick steps, the ranks wait only once for this process.
                several = requests and not in_force() and self._step_seconds * self._num_steps < CALL_SECONDS
                begin, number = time.perf_counter(), self.scheduler.step_number
                self.engine.step(self._num_steps if several else 1)
                self._step_seconds = (time.perf_counter() - begin) / max(1, self.scheduler.step_number - number)
                changed = {request: tokens for request in self.unfinished.values()
                           if (tokens := request.advance(self.engine)) or request.finished}
        except RankError as error:
            if not requests:
                raise
            outputs = [request.output() for request in requests]
            generated = sum(len(output.outputs[0].token_ids) for output in outputs)
            raise GenerationError(f"{error}\n{generated} tokens had been generated by then; they are in this error's "
                                  f".outputs", outputs) from error
        for request in changed:
            if request.finished:
                del self.unfinished[request.request_id]
        return changed
