"""Compiler options of the C++ kernels, and the instruction sets that a wheel has them for.

This module imports nothing but the standard library: building a wheel needs it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).with_name("source")
# Folder of the compiled kernels in a wheel; missing where Draftwise runs from its sources.
COMPILED = Path(__file__).with_name("compiled")

OPTIONS = (
    *("-std=c++17", "-O3", "-ffp-contract=fast", "-fvisibility=hidden", "-fno-strict-aliasing"),
    *("-fPIC", "-shared", "-fno-exceptions", "-fno-rtti"),
)
# For Intel's cores with AVX512-BF16 and without a matrix unit. They begin a dot product every
# second cycle and two float32 products every cycle, which is twice as fast (85 and 172 GFLOPS per
# core measured on Sapphire Rapids without AMX).
FLOAT32_PRODUCTS = "-DDRAFTWISE_FLOAT32_PRODUCTS"

_AVX2 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BF16 = _AVX512 | {"avx512_vnni", "avx512_bf16"}
_AMX = _BF16 | {"amx_tile", "amx_int8", "amx_bf16"}


@dataclass(frozen=True)
class InstructionSet:
    """An instruction set.

    Attributes:
        name: also the name of its library.
        options: compiler options.
        flags: names in ``/proc/cpuinfo`` of what the processor must have.
        vendor: the vendor of the processor; ``None`` for any.
    """

    name: str
    options: tuple[str, ...]
    flags: frozenset[str]
    vendor: str | None = None

    @property
    def library(self) -> Path:
        """Where a wheel has the kernels."""
        return COMPILED / f"{self.name}.so"

    def command(self, compiler: list[str], destination: Path) -> list[str]:
        """The command that compiles the kernels for a wheel."""
        return compile_command([*compiler, *OPTIONS, *self.options], SOURCES, destination)

    def runs_on(self, processor: Mapping[str, str]) -> bool:
        """Whether a processor, given by its fields in ``/proc/cpuinfo``, has the instructions."""
        flags = processor.get("flags", processor.get("Features", "")).split()
        is_vendor = self.vendor in (None, processor.get("vendor_id"))
        return is_vendor and self.flags <= set(flags)


# Otherwise the compiler halves vectors of AVX-512: a pass over one token of a 1.5B model in 4 bits
# took 1.36 times as long.
_WIDE = "-mprefer-vector-width=512"
_BF16_OPTIONS = ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16")
# By the name of the machine, the fastest first.
INSTRUCTION_SETS: Mapping[str, tuple[InstructionSet, ...]] = {
    "x86_64": (
        InstructionSet(
            "amx",
            (*_BF16_OPTIONS, "-mamx-tile", "-mamx-int8", "-mamx-bf16", "-mtune=sapphirerapids"),
            _AMX,
        ),
        InstructionSet(
            "avx512-bf16-intel",
            (*_BF16_OPTIONS, _WIDE, FLOAT32_PRODUCTS),
            _BF16,
            "GenuineIntel",
        ),
        InstructionSet("avx512-bf16", (*_BF16_OPTIONS, _WIDE), _BF16),
        InstructionSet(
            "avx512-vnni", ("-march=x86-64-v4", "-mavx512vnni", _WIDE), _AVX512 | {"avx512_vnni"}
        ),
        InstructionSet("avx512", ("-march=x86-64-v4", _WIDE), _AVX512),
        InstructionSet("avx-vnni", ("-march=x86-64-v3", "-mavxvnni"), _AVX2 | {"avx_vnni"}),
        InstructionSet("avx2", ("-march=x86-64-v3",), _AVX2),
    ),
    "aarch64": (
        InstructionSet("i8mm", ("-march=armv8.2-a+dotprod+i8mm",), frozenset({"asimddp", "i8mm"})),
        InstructionSet("dotprod", ("-march=armv8.2-a+dotprod",), frozenset({"asimddp"})),
        InstructionSet("neon", ("-march=armv8-a",), frozenset({"asimd"})),
    ),
}


def compile_command(command: list[str], sources: Path, destination: Path) -> list[str]:
    """The command of a compiler with options, completed with what to compile.

    Args:
        command: the compiler and its options.
        sources: folder of the kernels.
        destination: the library.
    """
    exports = ["-Xlinker", f"--version-script={sources / 'exports.map'}"]
    return [*command, *exports, "-o", str(destination), str(sources / "library.cpp")]


def compiled_kernels(machine: str, processor: Mapping[str, str]) -> Path | None:
    """The fastest of the wheel's libraries that a processor runs; ``None`` if there is none.

    Args:
        machine: such as ``"x86_64"``.
        processor: its fields in ``/proc/cpuinfo``.
    """
    for each in INSTRUCTION_SETS.get(machine, ()):
        if each.runs_on(processor) and each.library.exists():
            return each.library
    return None
