"""Compiles the C++ kernels into a wheel, so that its users need no compiler.

Hatchling runs this when it builds a wheel. Without ``DRAFTWISE_WHEEL_KERNELS=1`` the wheel has the
sources only, and the kernels are compiled at first use.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "DRAFTWISE_WHEEL_KERNELS"
_MODULE = "src/draftwise/kernels/native/instruction_sets.py"


class WheelKernels(BuildHookInterface):  # type: ignore[misc]
    """Adds a library for each instruction set of this machine's architecture."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the libraries, and mark the wheel as one for this platform."""
        if os.environ.get(VARIABLE) != "1" or version == "editable":
            return
        module = _load(Path(self.root) / _MODULE)
        machine = platform.machine()
        sets = module.INSTRUCTION_SETS.get(machine)
        if sys.platform != "linux" or sets is None:
            raise RuntimeError(f"{VARIABLE}: no instruction sets are listed for {machine}")
        self._folder = tempfile.TemporaryDirectory()
        compiler = shlex.split(os.environ.get("CXX", "c++"))

        def compile_for(each: Any) -> tuple[str, str]:
            destination = Path(self._folder.name) / each.library.name
            self.app.display_info(f"compiling the kernels for {each.name}")
            subprocess.run(each.command(compiler, destination), check=True)
            inside = each.library.relative_to(Path(self.root).resolve() / "src")
            return str(destination), str(inside)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            build_data["force_include"].update(pool.map(compile_for, sets))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{machine}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the libraries, which the wheel has now."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()


def _load(path: Path) -> Any:
    """Load a module without its package, whose requirements are not installed here."""
    spec = spec_from_file_location(path.stem, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
