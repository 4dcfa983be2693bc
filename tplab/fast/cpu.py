"""The features of this processor, and numba's settings for it.

Import this before anything that numba compiles: the settings hold for the whole process, which is a rank's.
"""

import ctypes
import platform
import sys

import llvmlite.binding as llvm
from numba.core import config


def _features() -> dict[str, bool]:
    """LLVM's names of what numba may use: as ``NUMBA_CPU_FEATURES`` says, or all that this processor has."""
    if config.CPU_FEATURES is None:
        return dict(llvm.get_host_cpu_features())
    return {name[1:]: name[0] == "+" for name in config.CPU_FEATURES.split(",") if name}


def _may_use_tiles() -> bool:
    """Ask Linux for AMX's registers. Without its permission, the first tile instruction ends the process."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    arch_prctl, require_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None, use_errno=True).syscall(arch_prctl, require_permission, tile_data) == 0


HAS = _features()
HAS_AVX512 = HAS.get("avx512f", False)
LANES = 16 if HAS_AVX512 else 8  # float32 numbers of a vector; on arm64, LLVM makes two registers of it
VECTORS = 4 if HAS_AVX512 or platform.machine() in ("aarch64", "arm64") else 2  # of a panel: see linear.py
HAS_BF16_DOT = HAS.get("avx512bf16", False) and HAS_AVX512
HAS_TILES = HAS_BF16_DOT and HAS.get("amx-bf16", False) and _may_use_tiles()
PAUSES = platform.machine() in ("x86_64", "AMD64")

if HAS_AVX512 and config.CPU_FEATURES is None:  # without it, LLVM uses half registers
    config.CPU_NAME = llvm.get_host_cpu_name()
    config.CPU_FEATURES = llvm.get_host_cpu_features().flatten() + ",-prefer-256-bit"


def form() -> str:
    """In words, for ``launch doctor``: which vectors the compiled loops use."""
    vectors = "AVX-512" if HAS_AVX512 else "AVX2" if HAS.get("avx2") else platform.machine()
    return vectors + ", bfloat16 products" * HAS_BF16_DOT + ", AMX tiles" * HAS_TILES
