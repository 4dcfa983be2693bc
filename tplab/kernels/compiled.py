"""Functions in LLVM's language, compiled for this processor by llvmlite, which numba is built on.

What Python calls thousands of times a second must be one call; PyTorch has no single call for some of it.
"""

import ctypes
import threading
from collections.abc import Callable
from functools import lru_cache
from itertools import product
from string import Template

import llvmlite.binding as llvm
import torch

from tplab.kernels.bfloat16 import with_integers

# How LLVM calls the numbers in memory, and how they become float32 and are rounded again.
NUMBERS = {torch.float32: {"T": "float", "widen": "bitcast", "round": "bitcast"},
           torch.bfloat16: {"T": "bfloat", "widen": "fpext", "round": "fptrunc"}}
_WORTH_SHARING = 1 << 15  # numbers, as in PyTorch
_KINDS = {"ptr": ctypes.c_void_p, "i64": ctypes.c_int64, "float": ctypes.c_float}
_lock = threading.Lock()  # logical ranks compile at the same time
_engines = []  # what they have compiled lives as long as they do
noting = threading.local()  # ``calls``: what this thread is asked to note of its calls, see ``graph.py``


class Compiled:
    """A function that was compiled.

    Attributes:
        function: as ctypes calls it.
        kinds: the types of its arguments.
        from_array: address of a function that calls it with arguments of eight bytes each, which stand in an array.
    """

    __slots__ = "from_array", "function", "kinds"

    def __init__(self, function: Callable, kinds: list[type], from_array: int):
        self.function, self.kinds, self.from_array = function, kinds, from_array

    def __call__(self, *arguments: float) -> None:
        self.function(*arguments)
        calls = getattr(noting, "calls", None)
        if calls is not None:
            calls.append(self, arguments)


def compiled(ir: str) -> Compiled:
    """The one function that ``ir`` defines for others, which returns nothing; pointers are given as addresses."""
    with _lock:
        module = llvm.parse_assembly(ir if has("avx512bf16") else with_integers(ir))
        module.verify()
        function = next(function for function in module.functions if function.linkage == llvm.Linkage.external
                        and not function.is_declaration)
        name, types = function.name, [str(argument.type) for argument in function.arguments]
        module.link_in(llvm.parse_assembly(_from_array(name, types)))
        _engines.append(llvm.create_mcjit_compiler(module, _machine()))
        _engines[-1].finalize_object()
        kinds = [_KINDS[each] for each in types]
        return Compiled(ctypes.CFUNCTYPE(None, *kinds)(_engines[-1].get_function_address(name)), kinds,
                        _engines[-1].get_function_address("from_array"))


def _from_array(name: str, types: list[str]) -> str:
    lines = [f"""
  %at.{n} = getelementptr i64, ptr %given, i64 {n}
  %argument.{n} = load {kind}, ptr %at.{n}, align 8""" for n, kind in enumerate(types)]
    arguments = ", ".join(f"{kind} %argument.{n}" for n, kind in enumerate(types))
    return (f"declare void @{name}({', '.join(types)})\n"
            f"define void @from_array(ptr %given) {{{''.join(lines)}\n  call void @{name}({arguments})\n  ret void\n}}")


_SHARED = Template("""
$declared
define internal void @part(ptr %given) {
  $loads
  %number = $number
  %number.next = add i32 %number, 1
  %together = $together
  %n = zext i32 %number to i64
  %n.next = zext i32 %number.next to i64
  %n.all = zext i32 %together to i64
  %first.times = mul i64 %n, %units
  %first = udiv i64 %first.times, %n.all
  %end.times = mul i64 %n.next, %units
  %end = udiv i64 %end.times, %n.all
  %some = icmp ult i64 %first, %end
  br i1 %some, label %work, label %done

work:
  call void @work($passed, i64 %first, i64 %end)
  br label %done

done:
  ret void
}

define void @shared($taken, i64 %threads) {
  %given = alloca [$count x i64]
  $stores
  %alone = icmp eq i64 %threads, 1
  br i1 %alone, label %one, label %several

one:
  call void @part(ptr %given)
  ret void

several:
  %threads.32 = trunc i64 %threads to i32
  $begin
  ret void
}
""")


def shared(ir: str) -> Compiled:
    """``@work(..., i64 first, i64 end)`` of ``ir``, which does one or more units of work, up to the one before ``end``.

    The function returned takes what stands for the dots, how many units there are, and how many threads share them.
    """
    head = ir[ir.index("@work(") + len("@work("):]
    *arguments, _, _ = (argument.split() for argument in head[:head.index(")")].split(","))
    given = [*arguments, ["i64", "%units"]]
    places = [f"{name}.at = getelementptr i64, ptr %given, i64 {n}" for n, (_, name) in enumerate(given)]
    calls = {"number": "call i32 @omp_get_thread_num()", "together": "call i32 @omp_get_num_threads()",
             "begin": "call void @GOMP_parallel(ptr @part, ptr %given, i32 %threads.32, i32 0)",
             "declared": "declare i32 @omp_get_thread_num()\ndeclare i32 @omp_get_num_threads()\n"
                         "declare void @GOMP_parallel(ptr, ptr, i32, i32)"}
    if not has_threads():
        calls = {"number": "add i32 0, 0", "together": "add i32 0, 1", "begin": "call void @part(ptr %given)",
                 "declared": ""}
    return compiled(ir + _SHARED.substitute(
        calls, count=len(given), passed=", ".join(map(" ".join, arguments)), taken=", ".join(map(" ".join, given)),
        loads="\n".join(places + [f"{name} = load {kind}, ptr {name}.at" for kind, name in given]),
        stores="\n".join(places + [f"store {kind} {name}, ptr {name}.at" for kind, name in given])))


_ROW_BY_ROW = Template("""
$declared
define internal void @$name($arguments, i64 %first, i64 %end) {
begin:
  br label %row

row:
  %r = phi i64 [%first, %begin], [%r.next, %row.end]
  $row

row.end:
  %r.next = add i64 %r, 1
  %r.more = icmp ult i64 %r.next, %end
  br i1 %r.more, label %row, label %done

done:
  ret void
}
""")


def row_by_row(arguments: str, row: str, declared: str = "", name: str = "work") -> str:
    """The ``@work`` that :func:`shared` wants, where the units are rows: ``row`` is done for each, as number ``%r``.

    Its lines begin in the block ``%row`` and end by a branch to ``%row.end``. By another ``name``, it is called by it.
    """
    return _ROW_BY_ROW.substitute(arguments=arguments, row=row, declared=declared, name=name)


def threads_for(x: torch.Tensor, steps: int = 1) -> int:
    """Torch's, where so many ``steps`` for each number of ``x`` are worth waking them."""
    return torch.get_num_threads() if x.numel() * steps >= _WORTH_SHARING else 1


@lru_cache
def has_threads() -> bool:
    """Whether work can be shared: by the threads of torch's own OpenMP."""
    library = ctypes.CDLL(torch._C.__file__)
    names = "GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"
    if not all(hasattr(library, name) for name in names):
        return False
    for name in names:
        llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    return True


def each(text: str, **counts: int) -> str:
    """Each line of ``text`` for every number below those counts whose names stand in it, in braces."""
    lines = []
    for line in text.splitlines():
        named = [name for name in counts if "{" + name + "}" in line]
        for numbers in product(*(range(counts[name]) for name in named)):
            lines.append(line.format(**dict(zip(named, numbers))))
    return "\n".join(lines)


@lru_cache
def has(feature: str) -> bool:
    """Whether the processor has it, by LLVM's name: ``"avx512f"``."""
    return llvm.get_host_cpu_features().get(feature, False)


@lru_cache
def _machine() -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3)
