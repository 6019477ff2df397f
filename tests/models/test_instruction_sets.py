"""Compiled kernels of a wheel: which library a processor gets, and that it needs no compiler."""

import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from draftwise.kernels.native import compilation, instruction_sets
from draftwise.kernels.native.instruction_sets import INSTRUCTION_SETS, compiled_kernels

ROOT = Path(__file__).parents[2]
AVX2 = "fpu avx avx2 bmi1 bmi2 f16c fma abm movbe"
AVX512 = f"{AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"
BF16 = f"{AVX512} avx512_vnni avx512_bf16"
PROCESSORS = [
    ("x86_64", {"flags": "fpu sse4_2"}, None),
    ("x86_64", {"flags": AVX2}, "avx2"),
    ("x86_64", {"flags": f"{AVX2} avx_vnni"}, "avx-vnni"),
    ("x86_64", {"flags": AVX512}, "avx512"),
    ("x86_64", {"flags": f"{AVX512} avx512_vnni"}, "avx512-vnni"),
    ("x86_64", {"flags": BF16, "vendor_id": "AuthenticAMD"}, "avx512-bf16"),
    ("x86_64", {"flags": BF16, "vendor_id": "GenuineIntel"}, "avx512-bf16-intel"),
    ("x86_64", {"flags": f"{BF16} amx_tile amx_int8 amx_bf16"}, "amx"),
    ("x86_64", {"flags": f"{BF16} amx_tile amx_bf16", "vendor_id": "GenuineIntel"}, BF16),
    ("aarch64", {"Features": "fp asimd"}, "neon"),
    ("aarch64", {"Features": "fp asimd asimddp"}, "dotprod"),
    ("aarch64", {"Features": "fp asimd asimddp i8mm"}, "i8mm"),
    ("riscv64", {}, None),
]


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """The folder of a wheel with a library for each instruction set."""
    monkeypatch.setattr(instruction_sets, "COMPILED", tmp_path)
    for each in (each for sets in INSTRUCTION_SETS.values() for each in sets):
        each.library.write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize(("machine", "processor", "expected"), PROCESSORS)
def test_a_processor_gets_the_fastest_library_that_it_runs(compiled, machine, processor, expected):
    expected = "avx512-bf16-intel" if expected == BF16 else expected
    found = compiled_kernels(machine, processor)
    assert found == (None if expected is None else compiled / f"{expected}.so")


def test_a_library_that_the_wheel_lacks_is_not_chosen(compiled):
    (compiled / "avx512.so").unlink()
    assert compiled_kernels("x86_64", {"flags": AVX512}) == compiled / "avx2.so"


def test_the_wheel_is_preferred_unless_a_compiler_or_options_are_named(compiled, monkeypatch):
    for variable in ("CXX", "DRAFTWISE_NATIVE_FLAGS", "DRAFTWISE_NATIVE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(compilation, "_processor_fields", lambda: {"flags": AVX2})
    monkeypatch.setattr(compilation.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(compilation.sys, "platform", "linux")
    assert compilation.compiled_library() == compiled / "avx2.so"
    for variable, value in (("CXX", "no-such-compiler"), ("DRAFTWISE_NATIVE", "0")):
        with monkeypatch.context() as patched:
            patched.setenv(variable, value)
            with pytest.raises(compilation.NativeUnavailableError):
                compilation.compiled_library()


RUN = """
from draftwise.kernels.native.library import kernel_in_use
from draftwise.kernels.native.instruction_sets import COMPILED
from draftwise import LLM, SamplingParams
assert kernel_in_use() == "native", kernel_in_use()
libraries = [line.split()[-1] for line in open("/proc/self/maps") if line.endswith(".so\\n")]
assert any(each.startswith(str(COMPILED)) for each in libraries)
print(LLM("zoo:target").generate(["Once"], SamplingParams(temperature=0, max_tokens=8))[0].text)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in INSTRUCTION_SETS,
    reason="no instruction sets are listed for this machine",
)
def test_a_wheel_runs_without_a_compiler(tmp_path):
    environment = {**os.environ, "DRAFTWISE_WHEEL_KERNELS": "1"}
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", tmp_path, ROOT]
    subprocess.run(command, env=environment, check=True)
    (wheel,) = tmp_path.glob("draftwise-*.whl")
    assert "linux" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name).stem for name in archive.namelist() if name.endswith(".so")}
        archive.extractall(tmp_path / "installed")
    assert names == {each.name for each in INSTRUCTION_SETS[platform.machine()]}
    run = {
        "PATH": "",
        "PYTHONPATH": str(tmp_path / "installed"),
        "DRAFTWISE_CACHE": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN], env=run, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert not (tmp_path / "cache" / "native").exists()
