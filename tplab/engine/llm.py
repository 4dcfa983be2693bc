"""``LLM``: text in, text out, over tensor-parallel ranks."""

import time
import warnings
from collections.abc import Iterator, Sequence as Many

import torch

from tplab.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from tplab.engine.core import Engine
from tplab.engine.errors import EngineError, GenerationError, RequestError
from tplab.engine.executor import LogicalExecutor, PoolExecutor
from tplab.engine.outputs import RequestOutput, StreamChunk
from tplab.engine.progress import Progress
from tplab.engine.requests import Request, parse_messages, parse_prompts, rejected
from tplab.engine.sampling_params import SamplingParams
from tplab.engine.sizes import cache_size
from tplab.model.dtypes import parse_dtype
from tplab.patch import applied
from tplab.ranks import RankError, RankPool
from tplab.shard import ShardPlan


class LLM:
    """A model on tensor-parallel ranks, with vLLM's names.

    Args:
        model: ``"fable"``, ``"smollm2"``, a folder, a hub id, or an opened checkpoint.
        tensor_parallel_size: number of ranks.
        dtype: ``"float32"``, ``"float64"`` or ``"bfloat16"``; of weights, activations and cache.
        block_size: tokens per cache block.
        num_blocks: blocks in the cache; None: room for ``max_num_seqs`` sequences of full length within 1 GiB over
            all ranks. Memory is committed as it is used.
        max_model_len: longest prompt and output together; None: the model's own limit.
        max_num_seqs: sequences that run at the same time.
        max_num_batched_tokens: tokens computed in one step; longer prompts are read in chunks.
        enable_prefix_caching: share the blocks of equal beginnings.
        strict: check caches, tables and ranks after every step.
        patches: faults or :class:`tplab.patch.Patch` objects, applied while loading and in every step, on the ranks
            and in the scheduler.
        pool: the ranks; ``shared_pool(tensor_parallel_size)`` if None.
        logical: run the ranks as threads of this process instead (for wide sweeps in tests).

    Use as a context manager, or call :meth:`close`: the ranks forget the model; the pool stays open.

    Raises:
        CheckpointError, ShardPlanError, CacheError, EngineError: the engine cannot be made like that.
    """

    def __init__(self, model: str | Checkpoint, tensor_parallel_size: int = 2, dtype: str | torch.dtype = "float32", *,
                 block_size: int = 16, num_blocks: int | None = None, max_model_len: int | None = None,
                 max_num_seqs: int = 16, max_num_batched_tokens: int = 512, enable_prefix_caching: bool = True,
                 strict: bool = False, patches: Many = (), pool: RankPool | None = None, logical: bool = False,
                 executor=None):
        self.checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model)
        config, self.dtype = self.checkpoint.config, parse_dtype(dtype)
        self.plan = ShardPlan.from_config(config, tensor_parallel_size)
        if pool is not None and pool.size != tensor_parallel_size:
            raise EngineError(f"the pool has {pool.size} ranks, tensor_parallel_size is {tensor_parallel_size}")
        self.patches = tuple(p for patchable in patches for p in patchable.patches)
        with applied(*self.patches):
            pass  # a patch that does not fit is refused before any rank is touched
        max_model_len, num_blocks = cache_size(config, self.plan, self.dtype, block_size, num_blocks, max_model_len,
                                               max_num_seqs)
        if executor is None:
            executor = (LogicalExecutor(tensor_parallel_size, self.patches) if logical
                        else PoolExecutor(tensor_parallel_size, self.patches, pool))
        self.engine = Engine(
            executor, vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids, max_model_len=max_model_len,
            num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens, strict=strict, patches=self.patches,
            enable_prefix_caching=enable_prefix_caching and not depends_on_length(config))
        self._load_arguments = (self.checkpoint, self.plan, self.dtype, num_blocks, block_size, strict)
        self._requests: dict[int, Request] = {}
        self._tokenizer = None
        self.closed = False
        self._load()

    def _load(self) -> None:
        begin = time.perf_counter()
        self.load_stats = self.engine.executor.load(*self._load_arguments)
        self.load_seconds = time.perf_counter() - begin

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        """Forget the model on every rank. Can be called twice."""
        if not self.closed:
            self.closed = True
            self.engine.executor.close()

    def __repr__(self) -> str:
        pool = self.engine.pool
        return (f"<LLM {self.checkpoint.name}: {self.plan.tensor_parallel_size} ranks, {str(self.dtype)[6:]}, "
                f"{pool.num_blocks} blocks of {pool.block_size}{', closed' if self.closed else ''}>")

    @property
    def scheduler(self):
        """The scheduler, to be looked at and printed between steps."""
        return self.engine.scheduler

    @property
    def tokenizer(self):
        """The checkpoint's tokenizer; None for a checkpoint that has none."""
        if self._tokenizer is None:
            try:
                self._tokenizer = self.checkpoint.tokenizer()
            except CheckpointError:
                if (self.checkpoint.folder / "tokenizer.json").exists():
                    raise
        return self._tokenizer

    # Whole generations.

    def generate(self, prompts, sampling_params: SamplingParams | Many[SamplingParams] | None = None, *,
                 use_tqdm: bool | None = None) -> list[RequestOutput]:
        """Continue every prompt.

        Args:
            prompts: a text, a list of token ids, or a list of texts and lists of token ids.
            sampling_params: for all prompts, or one per prompt; :class:`SamplingParams` of defaults if None.
            use_tqdm: show a progress bar; None: when it takes longer than two seconds.

        Returns:
            One :class:`RequestOutput` per prompt, in their order. Among several prompts, one that cannot run does not
            keep the others from running: it comes back with ``finish_reason="error"`` and its ``error``, and a
            warning says so.

        Raises:
            RequestError: the only prompt, or every one, cannot run.
            GenerationError: the ranks failed; carries what had been generated.
        """
        requests = self._add_all(prompts, sampling_params)
        for _ in self._drive(requests, use_tqdm):
            pass
        return [request.output() for request in requests]

    def chat(self, messages, sampling_params: SamplingParams | Many[SamplingParams] | None = None, *,
             use_tqdm: bool | None = None) -> list[RequestOutput]:
        """Answer a conversation, or several: ``[{"role": "user", "content": "…"}, …]``; otherwise like :meth:`generate`."""
        return self.generate([self.chat_prompt(m) for m in parse_messages(messages)], sampling_params, use_tqdm=use_tqdm)

    def chat_prompt(self, messages) -> list[int]:
        """A conversation as token ids, by the checkpoint's chat template, up to where the answer begins."""
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise RequestError(f"{self.checkpoint.name} has no chat template; use generate with a prompt of its own form")
        (messages,) = parse_messages(messages)
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def stream(self, prompts, sampling_params: SamplingParams | Many[SamplingParams] | None = None
               ) -> Iterator[StreamChunk]:
        """Like :meth:`generate`, giving out every piece of text as soon as it is certain.

        ``for chunk in llm.stream(prompt): print(chunk, end="")``. Leaving the loop early aborts what is unfinished.
        """
        requests = self._add_all(prompts, sampling_params)
        index = {id(request): i for i, request in enumerate(requests)}
        for i, request in enumerate(requests):
            if request.error:
                yield StreamChunk(i, "", request.output())
        for changed in self._drive(requests, use_tqdm=False):
            for request in changed:
                piece = request.take_certain()
                if piece or request.finished:
                    yield StreamChunk(index[id(request)], piece, request.output())

    def _drive(self, requests: list[Request], use_tqdm: bool | None) -> Iterator[list[Request]]:
        """Step until ``requests`` are done, giving out after every step those that changed."""
        open_ids = {request.number for request in requests if not request.error}
        with Progress(len(open_ids), use_tqdm) as progress:
            try:
                self._prepare()
                while open_ids:
                    changed = self._step()
                    mine = [request for request in changed if request.number in open_ids]
                    open_ids -= {request.number for request in mine if request.finished}
                    progress.show(len(mine), sum(request.finished for request in mine))
                    yield mine
            except RankError as error:
                outputs = [request.output() for request in requests]
                generated = sum(len(output.outputs[0].token_ids) for output in outputs)
                raise GenerationError(f"{error}\n{generated} tokens had been generated by then; they are in this error's "
                                      f".outputs", outputs) from error
            finally:
                for number in open_ids:
                    self.abort(number)
                for request in requests:
                    self._requests.pop(request.number, None)

    # Step by step.

    def add_request(self, prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue one prompt for :meth:`step`; returns its number. Errors as in :meth:`generate`."""
        (request,) = self._add_all([prompt], sampling_params)
        return request.number

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether :meth:`step` has something to do."""
        return self.scheduler.has_unfinished

    def step(self) -> list[RequestOutput]:
        """Compute one step; the outputs of all requests that got a token in it."""
        self._prepare()
        changed = self._step()
        for request in changed:
            if request.finished:
                self._requests.pop(request.number)
        return [request.output() for request in changed]

    def abort(self, request_id: int) -> RequestOutput:
        """End a request now; what it has so far. Its blocks are free at once.

        Raises:
            RequestError: there is no unfinished request with this number.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            raise RequestError(f"there is no unfinished request {request_id!r}; there are: "
                               f"{', '.join(map(str, self._requests)) or 'none'}")
        self.engine.finish(request.sequence, "abort")
        return request.output()

    # Parts.

    def _add_all(self, prompts, sampling_params) -> list[Request]:
        if self.closed:
            raise EngineError("this LLM is closed; make a new one")
        requests = []
        for prompt, params in parse_prompts(prompts, sampling_params):
            try:
                request = Request(self, prompt, params)
            except RequestError as error:
                request = rejected(prompt, error)
            requests.append(request)
        errors = [request.error for request in requests if request.error]
        if errors and len(errors) == len(requests):
            for request in requests[1:]:
                errors[0].add_note(f"also: {request.error}")
            raise errors[0]
        for i, request in enumerate(requests):
            if request.error:
                warnings.warn(f"prompt {i} cannot run, the others do: {request.error}", stacklevel=4)
            else:
                request.sequence = self.engine.add(request.prompt_token_ids, request.params)
                self._requests[request.number] = request
        return requests

    def _prepare(self) -> None:
        """Make sure that the ranks hold the model: a rank that was restarted does not."""
        if self.closed:
            raise EngineError("this LLM is closed; make a new one")
        if not self.engine.executor.loaded():
            self._load()
            self.engine.recompute()

    def _step(self) -> list[Request]:
        advanced = self.engine.step()
        changed = [self._requests[sequence.number] for sequence in advanced]
        for request in changed:
            request.advance(self.engine)
        return changed


def depends_on_length(config) -> bool:
    """Whether a token's key depends on how long its prompt is (rope types dynamic and longrope).

    Then equal beginnings of unequal prompts have unequal keys, and prefixes cannot be shared.
    """
    return config.hf.rope_parameters["rope_type"] in ("dynamic", "longrope")
