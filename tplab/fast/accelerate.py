"""``accelerate(runner)``: the same steps from the same weights, as compiled code."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from tplab import patch
from tplab.cache import Segment, rope_parts, slot_mapping
from tplab.engine.runner import ModelRunner
from tplab.fast import linear
from tplab.fast.all_reduce import Ranks
from tplab.fast.attention import TILE
from tplab.fast.compiled import compile_ahead
from tplab.fast.simd import WIDTH
from tplab.fast.step import IN_PLACE, Batch, Shape, Weights, Work, step
from tplab.fast.untouched import Watch
from tplab.pool.shared_memory import SharedMemoryGroup
from tplab.ranks.context import current
from tplab.ranks.oplog import ALL_REDUCE


def accelerate(runner: ModelRunner) -> None:
    """Have a loaded runner on a pool's rank take the fast path, unless its model is observed or changed.

    :func:`tplab.fast.why_not` must return None for the model. The reference stays on logical ranks, under torchrun, and
    if a patch was in force while the model was loaded.
    """
    if isinstance(current(), SharedMemoryGroup) and not patch.in_force():
        fast = FastModel(runner)
        runner.__class__, runner.fast = FastRunner, fast


class FastRunner(ModelRunner):
    """A runner whose weights are packed until its ``model`` is read."""

    @property
    def model(self):
        """The reference model with its weights. A caller can change it, so it keeps its weights from now on."""
        self.fast.unpack()
        self.fast.is_shown = True
        return self.fast.model

    def forward(self, ids, positions, segments, rows):
        fast = self.fast
        if not fast.watch.is_untouched():
            fast.unpack()
            return super().forward(ids, positions, segments, rows)
        return fast.forward(ids, positions, segments, rows), None


class FastModel:
    """A rank's packed weights and its memory for the work."""

    def __init__(self, runner: ModelRunner):
        self.model, self.cache, self.config = vars(runner).pop("model"), runner.cache, runner.config
        self.dtype = runner.config.dtype
        self.watch, self.is_shown, self.weights = Watch(self.model), False, None
        self.shape = _shape(self.model, self.cache)
        self.k, self.v = (_numbers(cache.flatten(1)) for cache in (self.cache.k_cache, self.cache.v_cache))
        self.rotation = None if self.model.rotary.per_sequence else _rotation(self.model, self.config)
        self.linears = [weight for layer in self.model.layers for weight in (
            layer.self_attn.qkv_proj.weight, layer.self_attn.o_proj.weight, layer.mlp.gate_up_proj.weight,
            layer.mlp.down_proj.weight)] + [self.model.lm_head.weight]
        self.sizes = [tuple(weight.shape) for weight in self.linears]
        self.words = [linear.panels(outputs) * WIDTH * linear.padded(inputs, self.dtype) // self.shape.per_word
                      for outputs, inputs in self.sizes]
        self.memory = self.room = None
        self.threads = ThreadPoolExecutor(thread_name_prefix="compute")
        self._pack()
        batch = self._batch(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long),
                            [Segment(0, 1, (0,), 1)], [0])
        compile_ahead(str(self.dtype), step, self.shape, self.weights, batch, self._work(batch, 1),
                      self._ranks(current(), 1), 0)

    def unpack(self) -> None:
        """Return the weights to the reference model."""
        if self.weights is None:
            return
        if not self.is_shown:
            at = 0
            for weight, size, words in zip(self.linears, self.sizes, self.words):
                weight.data = linear.unpack_weight(self.weights.panels[at:at + words], *size, self.dtype)
                at += words
        self.weights = None

    def _pack(self) -> None:
        """Copy the weights in the order in which a step reads them. The model's own are freed, unless it is in use."""
        panels, at = np.empty(sum(self.words), _WORDS[self.dtype]), 0
        for weight, words in zip(self.linears, self.words):
            panels[at:at + words] = linear.pack_weight(weight.data)
            at += words
            if not self.is_shown:
                weight.data = weight.data.new_empty(0)
        model, layers = self.model, self.model.layers
        tied = model.lm_head.weight is model.embed_tokens.weight
        attention, mlps = [layer.self_attn for layer in layers], [layer.mlp for layer in layers]
        norms = [norm.weight for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
        adds_bias = current().rank == 0  # a row-parallel layer's
        reads = np.searchsorted(model.shard.kv_for_q, np.arange(self.shape.kv_heads + 1))
        self.weights = Weights(
            panels, self._as_numbers(panels), _rows([*norms, model.norm.weight]),
            _rows([layer.q_norm and layer.q_norm.weight for layer in attention]),
            _rows([layer.k_norm and layer.k_norm.weight for layer in attention]),
            _rows([layer.qkv_proj.bias for layer in attention]),
            _rows([layer.o_proj.bias if adds_bias else None for layer in attention]),
            _rows([mlp.gate_up_proj.bias for mlp in mlps]),
            _rows([mlp.down_proj.bias if adds_bias else None for mlp in mlps]),
            _numbers(model.embed_tokens.weight.data.flatten() if not tied else torch.empty(0, dtype=self.dtype)),
            model.shard.vocab.start, reads)

    def forward(self, ids, positions, segments, rows) -> torch.Tensor:
        """This rank's logits ``[rows, vocabulary here]`` in float32; arguments as :meth:`ModelRunner.forward`'s."""
        if self.weights is None or self.is_shown and self.watch.disturbed:
            self._pack()
        self.watch.disturbed = False
        wanted, group, threads = rows or [len(ids) - 1], current(), torch.get_num_threads()
        batch = self._batch(ids, positions, segments, wanted)
        work, ranks = self._work(batch, threads), self._ranks(group, threads)
        others = [self.threads.submit(step, self.shape, self.weights, batch, work, ranks, thread)
                  for thread in range(1, threads)]
        finished = step(self.shape, self.weights, batch, work, ranks, 0)
        finished = all([other.result() for other in others]) and finished
        group.end_step(int(ranks.state[0]), int(ranks.state[1]), stopped=not finished)
        logits = work.logits[:len(wanted) * linear.panels(self.shape.vocab) * WIDTH].reshape(len(wanted), -1)
        return torch.from_numpy(logits[:len(rows), :self.shape.vocab])

    def hidden(self, rows: int) -> torch.Tensor:
        """What the last layer gave for the ``rows`` wanted rows of the last step, ``[rows, hidden]``."""
        return torch.from_numpy(self.memory.hidden[:rows])

    def _batch(self, ids, positions, segments, wanted) -> Batch:
        slots, blocks = [], len(self.cache.k_cache[0])
        tables = np.zeros((len(segments), max(len(segment.block_ids) for segment in segments)), np.int64)
        for table, segment in zip(tables, segments):
            table[:len(segment.block_ids)] = segment.block_ids
            slots += slot_mapping(segment.block_ids, range(segment.start, segment.start + segment.count),
                                  self.cache.block_size)
        if tables.min() < 0 or tables.max() >= blocks:
            raise IndexError(f"block tables name blocks {tables.min()} to {tables.max()}; there are 0 to {blocks - 1}")
        if self.rotation is None:
            lengths = [part for segment in segments for part in rope_parts(segment)]
            cos, sin = (table[0].numpy() for table in self.model.rotary(_NUMBER, positions, lengths))
        else:
            cos, sin = (table[positions.numpy()] for table in self.rotation)
        return Batch(self.k, self.v, ids.numpy(), np.array(slots), cos, sin,
                     np.array([segment.start for segment in segments]),
                     np.array([segment.count for segment in segments]), tables, np.array(wanted))

    def _work(self, batch: Batch, threads: int) -> Work:
        """Memory for a step of this size: that of the steps before, or more."""
        tokens, shape = len(batch.ids), self.shape
        longest = int((batch.starts + batch.counts).max())
        tiled = int(((batch.starts + batch.counts) * (batch.counts > IN_PLACE)).max())
        needs = tokens, len(batch.wanted), longest, tiled, threads
        if self.room is None or any(need > have for need, have in zip(needs, self.room)) or threads != self.room[4]:
            self.room = tokens, wanted, longest, tiled, _ = tuple(map(_rounded_up, needs[:4])) + (threads,)
            group = max(np.diff(self.weights.first_q))
            product_rows = max(shape.hidden_words, shape.heads_words, shape.columns_words)
            outputs = max(shape.hidden, (shape.heads + 2 * shape.kv_heads) * shape.head_dim, 2 * shape.columns)
            tile_words = TILE * group * max(shape.head_dim_words, tiled)
            per_thread = (tile_words, tiled * shape.head_dim_words, linear.panels(shape.head_dim) * WIDTH * tiled)
            x, tile, keys, values = (np.zeros(words, _WORDS[self.dtype]) for words in (
                tokens * product_rows, *((threads, max(1, words)) for words in per_thread)))
            scores = np.zeros((threads, max(2 * group * (longest + 8), TILE * group * max(
                tiled, linear.panels(shape.head_dim) * WIDTH))), np.float32)
            self.memory = Work(
                np.zeros((tokens, shape.hidden), np.float32), self._as_numbers(x), x,
                np.zeros(tokens * linear.panels(outputs) * WIDTH, np.float32),
                np.zeros((tokens, shape.heads, shape.head_dim), np.float32),
                np.zeros(wanted * linear.panels(shape.vocab) * WIDTH, np.float32),
                self._as_numbers(tile), tile, scores, self._as_numbers(keys), keys, self._as_numbers(values), values)
        return self.memory

    def _as_numbers(self, words: np.ndarray) -> np.ndarray:
        return words if self.dtype is torch.float32 else words.view(np.uint16)

    def _ranks(self, group: SharedMemoryGroup, threads: int) -> Ranks:
        shared, size = group.control, range(group.size)
        record = group.log.expect(step.py_func.__code__, ALL_REDUCE, torch.float32, (0, self.shape.hidden),
                                  2 * self.shape.layers + 1)
        return Ranks(group.rank, group.size, np.frombuffer(shared.map, np.int64), np.frombuffer(shared.map, np.float32),
                     np.array(group.step_at),
                     np.array([[shared.slot_offset(rank, parity) // 4 for parity in (0, 1)] for rank in size]),
                     np.array([shared.log_offset(rank) // 8 for rank in size]), np.array(record),
                     np.array([group.step, group.log.seq, group.epoch, group.spin.compiled, 0]),
                     np.zeros(8 * threads, np.int64))


def _shape(model, cache) -> Shape:
    config, shard, dtype = model.config, model.shard, cache.k_cache.dtype
    heads, per_word = len(shard.q_heads), linear.per_word(dtype)
    words = (linear.padded(inputs, dtype) // per_word for inputs in (
        config.hidden_size, heads * config.head_dim, len(shard.mlp), config.head_dim))
    return Shape(config.num_layers, config.hidden_size, heads, len(shard.kv_heads), config.head_dim, len(shard.mlp),
                 len(shard.vocab), cache.block_size, per_word, *words, np.float32(config.rms_norm_eps),
                 np.float32(model.layers[0].self_attn.scaling))


def _rotation(model, config) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of all positions, ``[max_model_len, head_dim]`` each, by the model's own module."""
    positions = torch.arange(config.max_model_len)
    return tuple(table[0].numpy() for table in model.rotary(_NUMBER, positions, [config.max_model_len]))


def _numbers(x: torch.Tensor) -> np.ndarray:
    """The same memory as float32 numbers, or as uint16 where they are bfloat16."""
    return x.numpy() if x.dtype == torch.float32 else x.view(torch.int16).numpy().view(np.uint16)


def _rows(parameters: list[torch.Tensor | None]) -> np.ndarray:
    """``[layers, …]`` in float32; of no width where there are no such parameters."""
    return torch.stack([torch.empty(0) if x is None else x.data.float() for x in parameters]).numpy()


def _rounded_up(count: int) -> int:
    return -(-count // 64) * 64


_NUMBER = torch.zeros(1)  # of which the rotary module reads the dtype
_WORDS = {torch.float32: np.float32, torch.bfloat16: np.uint32}
