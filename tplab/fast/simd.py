"""The few things that numba cannot say: sums that stay in vector registers, bfloat16 products, AMX tiles, words that
two processes share. Each is one function; everything else in this room is plain Python that numba compiles.

Arrays are flat; ``index`` counts their elements. Vectors have ``LANES`` float32 numbers.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, overload, register_model

from tplab.fast.cpu import HAS_BF16_DOT, LANES, PAUSES, VECTORS

WIDTH = VECTORS * LANES  # numbers of a panel's row, see linear.py
_BYTE, _INT, _LONG, _FLOAT = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_FLOATS, _WORDS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)


class _BFloat(ir.types._BaseFloatType):
    """llvmlite has no bfloat of its own."""

    def __str__(self):
        return "bfloat"


_BFloat._create_instance()


def _call(builder, name, result, args, **options):
    """Call an LLVM intrinsic, or a function of the C library."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), args, **options)


def _address(context, builder, kind, array, index, of=None):
    """The address of ``array[index]``, as a pointer to ``of``."""
    address = builder.gep(context.make_array(kind)(context, builder, array).data, [index])
    return address if of is None else builder.bitcast(address, of.as_pointer())


def _spread(builder, value, vector):
    """A vector with ``value`` in each lane."""
    first_lane = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first_lane, ir.Constant(vector, ir.Undefined), ir.Constant(_WORDS, [0] * LANES))


# Sums of a block of rows: ``rows`` rows, each of one panel's width.


class Sums(types.Type):
    """``rows * VECTORS`` vectors, kept in registers."""

    def __init__(self, rows):
        self.rows = rows
        super().__init__(f"Sums({rows})")


@register_model(Sums)
class _SumsModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, ir.ArrayType(_FLOATS, fe_type.rows * VECTORS))


def _number(index):
    return ir.Constant(_LONG, index)


@intrinsic
def zero_sums(typing, rows):
    """Sums for as many rows as the tuple ``rows`` has elements."""
    kind = Sums(len(rows))
    return kind(rows), lambda context, builder, signature, args: ir.Constant(
        ir.ArrayType(_FLOATS, kind.rows * VECTORS), None)


@intrinsic
def store_sums(typing, sums, y, rows, column, is_first):
    """``y[row + column] = sums`` for each of ``rows``; unless ``is_first``, ``+=``."""
    def code(context, builder, signature, args):
        value, array, starts, column, is_first = args
        places = [_address(context, builder, y, array, builder.add(builder.add(
            builder.extract_value(starts, row), column), _number(n * LANES)), _FLOATS)
            for row in range(sums.rows) for n in range(VECTORS)]
        with builder.if_else(is_first) as (first, later):
            with first:
                for k, place in enumerate(places):
                    builder.store(builder.extract_value(value, k), place, align=4)
            with later:
                for k, place in enumerate(places):
                    so_far = builder.load(place, align=4)
                    builder.store(builder.fadd(so_far, builder.extract_value(value, k)), place, align=4)
        return context.get_dummy_value()
    return types.void(sums, y, rows, types.int64, types.boolean), code


@intrinsic
def add_products(typing, sums, x, rows, i, weight, at):
    """``sums[row] += x[row + i] * weight[at:at + WIDTH]`` for each of ``rows``.

    float32 numbers; or words of two bfloat16 numbers each, whose two products are both added. Against float32 numbers
    of ``x``, the weight may also be single bfloat16 numbers, kept as uint16.
    """
    def code(context, builder, signature, args):
        value, x_array, starts, i, w_array, at = args
        vector = _FLOATS if x.dtype == types.float32 else _WORDS
        factors = [_spread(builder, builder.load(_address(context, builder, x, x_array, builder.add(
            builder.extract_value(starts, row), i))), vector) for row in range(sums.rows)]
        for n in range(VECTORS):
            place = builder.add(at, _number(n * LANES))
            loaded = _load(context, builder, weight, w_array, place, vector)
            for row, factor in enumerate(factors):
                k = row * VECTORS + n
                value = builder.insert_value(value, _multiply_add(
                    builder, builder.extract_value(value, k), factor, loaded), k)
        return value
    return sums(sums, x, rows, types.int64, weight, types.int64), code


def _load(context, builder, kind, array, index, vector):
    if kind.dtype != types.uint16:
        return builder.load(_address(context, builder, kind, array, index, vector), align=4)
    halves = builder.load(_address(context, builder, kind, array, index, ir.VectorType(ir.IntType(16), LANES)), align=2)
    words = builder.shl(builder.zext(halves, _WORDS), ir.Constant(_WORDS, [16] * LANES))
    return builder.bitcast(words, _FLOATS)


def _multiply_add(builder, total, a, b):
    if a.type == _FLOATS:
        return _call(builder, f"llvm.fma.v{LANES}f32", _FLOATS, [a, b, total])
    if HAS_BF16_DOT:
        pairs = ir.VectorType(_BFloat(), 2 * LANES)
        return _call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS,
                     [total, builder.bitcast(a, pairs), builder.bitcast(b, pairs)])
    upper, shift = (ir.Constant(_WORDS, [bits] * LANES) for bits in (0xFFFF0000, 16))
    for half in (lambda words: builder.shl(words, shift), lambda words: builder.and_(words, upper)):
        total = _multiply_add(builder, total, *(builder.bitcast(half(words), _FLOATS) for words in (a, b)))
    return total


# One vector of LANES numbers.


class Vector(types.Type):
    """LANES float32 numbers, kept in a register."""

    def __init__(self):
        super().__init__("Vector")


_VECTOR = Vector()


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, _FLOATS)


@intrinsic
def spread(typing, number):
    """A vector of one number."""
    return _VECTOR(types.float32), lambda context, builder, signature, args: _spread(builder, args[0], _FLOATS)


@intrinsic
def load_vector(typing, array, index):
    """``array[index:index + LANES]``: float32 numbers, or bfloat16 ones kept as uint16."""
    return _VECTOR(array, types.int64), lambda context, builder, signature, args: _load(
        context, builder, array, *args, _FLOATS)


@intrinsic
def multiply_add(typing, a, b, total):
    """``a * b + total``, lane by lane."""
    return _VECTOR(_VECTOR, _VECTOR, _VECTOR), lambda context, builder, signature, args: _multiply_add(
        builder, args[2], *args[:2])


@intrinsic
def store_lane_sums(typing, array, index, vectors):
    """``array[index:index + 8] =`` the sums of the numbers of each of eight vectors."""
    def code(context, builder, signature, args):
        def fold(a, b, apart):  # two lanes that are ``apart`` hold their sum in ``a``, then their sum in ``b``
            both = (ir.Constant(_WORDS, [(lane | apart if later else lane & ~apart) + LANES * bool(lane & apart)
                                         for lane in range(LANES)]) for later in (False, True))
            return builder.fadd(*(builder.shuffle_vector(a, b, mask) for mask in both))

        sums = [builder.extract_value(args[2], n) for n in range(8)]
        for apart in (1, 2, 4):
            sums = [fold(*sums[n:n + 2], apart) for n in range(0, len(sums), 2)]
        halves = [builder.shuffle_vector(sums[0], sums[0], ir.Constant(ir.VectorType(_INT, 8), list(range(n, n + 8))))
                  for n in range(0, LANES, 8)]
        eight = halves[0] if len(halves) == 1 else builder.fadd(*halves)
        builder.store(eight, _address(context, builder, array, *args[:2], eight.type), align=4)
        return context.get_dummy_value()
    return types.void(array, types.int64, types.UniTuple(_VECTOR, 8)), code


@intrinsic
def prefetch(typing, array, index):
    """Prefetch ``array[index]``, which may be beyond the end."""
    def code(context, builder, signature, args):
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), [
            _address(context, builder, array, *args, _BYTE), *(ir.Constant(_INT, n) for n in (0, 3, 1))])
        return context.get_dummy_value()
    return types.void(array, types.int64), code


# bfloat16: the upper half of a float32 number, kept as uint16.


def widened(number):
    """A uint16 that is bfloat16 → float32; a float32 number as it is."""


@overload(widened)
def _widened(number):
    if number == types.float32:
        return lambda number: number
    return lambda number: np.uint32(np.uint32(number) << np.uint32(16)).view(np.float32)


def rounded(array, number):
    """A float32 number as ``array`` keeps it: as it is, or as the nearest bfloat16 number's uint16 (ties to even)."""


@overload(rounded)
def _rounded(array, number):
    if array.dtype == types.float32:
        return lambda array, number: number

    def to_bfloat16(array, number):
        word = np.float32(number).view(np.uint32)
        nearest = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        # Rounding up would carry some NaNs into the sign: they stay NaN.
        return np.uint16(nearest) if number == number else np.uint16(0x7FC0)
    return to_bfloat16


@intrinsic
def largest(typing, a, b):
    """The larger of two float32 numbers; NaN if one of them is."""
    return types.float32(a, b), lambda context, builder, signature, args: _call(
        builder, "llvm.maximum.f32", _FLOAT, args)


# Words that other processes or threads read and write.


@intrinsic
def store_release(typing, words, index, value):
    """Store an int64. A thread that reads it reads everything that was stored before it."""
    def code(context, builder, signature, args):
        builder.store_atomic(args[2], _address(context, builder, words, *args[:2]), "release", 8)
        return context.get_dummy_value()
    return types.void(words, types.int64, types.int64), code


@intrinsic
def load_acquire(typing, words, index):
    """Load an int64 that another process may store at this moment."""
    return types.int64(words, types.int64), lambda context, builder, signature, args: builder.load_atomic(
        _address(context, builder, words, *args), "acquire", 8)


@intrinsic
def pause(typing):
    """Tell the processor that this thread reads a word in a loop."""
    def code(context, builder, signature, args):
        if PAUSES:
            _call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return context.get_dummy_value()
    return types.void(), code


@intrinsic
def nap(typing, microseconds):
    """Leave this core to other processes for some microseconds (C's ``usleep``)."""
    def code(context, builder, signature, args):
        _call(builder, "usleep", _INT, [builder.trunc(args[0], _INT)])
        return context.get_dummy_value()
    return types.void(types.int64), code


# AMX: eight tiles of 16 rows of 64 bytes. Their numbers are literals.


def _tile(name):
    def code(context, builder, signature, args):
        operands = []
        for kind, arg in zip(signature.args, args):
            if isinstance(kind, types.IntegerLiteral):
                operands.append(ir.Constant(_BYTE, kind.literal_value))
            elif isinstance(kind, types.Array):
                operands.append(context.make_array(kind)(context, builder, arg).data)
            else:
                operands.append(arg)
        if len(operands) == 4:
            tile, array, index, row_bytes = operands
            operands = [tile, builder.bitcast(builder.gep(array, [index]), _BYTE.as_pointer()), row_bytes]
        elif operands and operands[0].type != _BYTE:
            operands = [builder.bitcast(operands[0], _BYTE.as_pointer())]
        _call(builder, f"llvm.x86.{name}", ir.VoidType(), operands)
        return context.get_dummy_value()
    return code


TILE_SHAPES = np.zeros(64, np.uint8)  # AMX's configuration: all eight tiles have 16 rows of 64 bytes
TILE_SHAPES[0], TILE_SHAPES[16:32].view(np.uint16)[:], TILE_SHAPES[48:56] = 1, 64, 16


@intrinsic
def configure_tiles(typing, shapes):
    """Make the tiles usable; ``shapes`` is ``TILE_SHAPES``."""
    return types.void(shapes), _tile("ldtilecfg")


@intrinsic
def release_tiles(typing):
    """Release the tiles, so that the system need not save them."""
    return types.void(), _tile("tilerelease")


@intrinsic(prefer_literal=True)
def zero_tile(typing, tile):
    """All numbers of a tile become zero."""
    return types.void(tile), _tile("tilezero")


@intrinsic(prefer_literal=True)
def load_tile(typing, tile, array, index, stride):
    """16 rows of 64 bytes, ``stride`` bytes apart."""
    return types.void(tile, array, types.int64, types.int64), _tile("tileloadd64")


@intrinsic(prefer_literal=True)
def store_tile(typing, tile, array, index, stride):
    """The inverse of ``load_tile``."""
    return types.void(tile, array, types.int64, types.int64), _tile("tilestored64")


@intrinsic(prefer_literal=True)
def multiply_tiles(typing, sums, x, weight):
    """``sums += x @ weight``: 16 rows of 32 bfloat16 numbers, 16 rows of 16 pairs of them."""
    return types.void(sums, x, weight), _tile("tdpbf16ps")
