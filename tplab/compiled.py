"""Functions in LLVM's language, compiled for this processor by llvmlite, which numba is built on.

What Python calls thousands of times a second must be one call; PyTorch has no single call for some of it.
"""

import ctypes
import threading
from collections.abc import Callable
from functools import lru_cache
from itertools import product

import llvmlite.binding as llvm

_KINDS = {"ptr": ctypes.c_void_p, "i64": ctypes.c_int64, "float": ctypes.c_float}
_lock = threading.Lock()  # logical ranks compile at the same time
_engines = []  # what they have compiled lives as long as they do


def compiled(ir: str) -> Callable:
    """The one function that ``ir`` defines for others, which returns nothing; pointers are given as addresses."""
    with _lock:
        module = llvm.parse_assembly(ir)
        module.verify()
        function = next(function for function in module.functions if function.linkage == llvm.Linkage.external
                        and not function.is_declaration)
        kind = ctypes.CFUNCTYPE(None, *[_KINDS[str(argument.type)] for argument in function.arguments])
        name = function.name
        _engines.append(llvm.create_mcjit_compiler(module, _machine()))
        _engines[-1].finalize_object()
        return kind(_engines[-1].get_function_address(name))


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
