"""Public names of the package, and the direction of its internal dependencies."""

import ast
import graphlib
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import draftwise

ROOT = Path(draftwise.__file__).parent

# What each part may import of Draftwise, beside itself.
MAY_IMPORT = {
    "core": set(),
    "errors": set(),
    "values": {"errors"},
    "params": {"errors", "structured_outputs", "values"},
    "speculation": {"core", "errors", "values", "vllm_keys"},
    "vllm_keys": {"core", "errors", "values"},
    "outputs": {"errors"},
    "openmp": set(),
    "processes": set(),
    "prompt_files": {"errors", "values"},
    "prompts": {"chat_templates", "errors", "prompt_files", "values"},
    "chat_templates": {"content_format", "errors", "values"},
    "content_format": set(),
    "structured_outputs": {"errors", "values"},
    "token_bytes": set(),
    "estimators": {"core", "errors"},
    "policies": {"core", "errors", "estimators", "values"},
    "training": {"devices", "errors"},
    "devices": {"errors"},
    "zoo": {"devices", "errors", "training"},
    "checkpoints": {"core", "errors", "values", "zoo"},
    # The descriptions of models and caches that kernels read are in models.
    "kernels": {"checkpoints", "core", "models", "zoo"},
    "models": {"checkpoints", "core", "devices", "errors", "kernels", "token_bytes", "zoo"},
    "engine": {
        "core",
        "errors",
        "estimators",
        "kernels",
        "models",
        "openmp",
        "outputs",
        "params",
        "policies",
        "processes",
        "structured_outputs",
        "speculation",
        "values",
    },
    "profiling": {
        "core",
        "engine",
        "errors",
        "estimators",
        "kernels",
        "models",
        "params",
        "policies",
        "speculation",
        "values",
    },
    "building": {
        "checkpoints",
        "core",
        "engine",
        "errors",
        "estimators",
        "models",
        "policies",
        "profiling",
        "speculation",
        "values",
    },
    "distillation": {
        "checkpoints",
        "core",
        "devices",
        "engine",
        "errors",
        "estimators",
        "llm",
        "models",
        "outputs",
        "params",
        "prompts",
        "training",
        "values",
        "zoo",
        "speculation",
    },
    "llm": {
        "building",
        "devices",
        "engine",
        "errors",
        "models",
        "outputs",
        "params",
        "prompts",
        "values",
        "speculation",
    },
}
# These stand above all others, which never import them.
TOP = {"audit", "benchmark", "cli", "integrations", "serving", "studies"}


def part_of(module):
    """The part of the package to which a dotted name belongs; ``None`` for the package itself."""
    names = module.split(".")
    return names[1] if len(names) > 1 else None


def sources():
    for file in sorted(ROOT.rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        yield file, ".".join(("draftwise", *parts)).removesuffix(".__init__")


def imported(file, module):
    """Dotted names of all Draftwise modules and members that a file imports."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            # `from draftwise import zoo` imports a part, not a name.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "draftwise")


def test_public_names():
    assert draftwise.__all__ == [
        "LLM",
        "RequestOutput",
        "RequestSpeculation",
        "SamplingParams",
        "SpeculationConfig",
        "StructuredOutputs",
    ]
    for name in draftwise.__all__:
        assert getattr(draftwise, name).__doc__


def test_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", draftwise.__version__)
    pyproject = ROOT.parent.parent / "pyproject.toml"
    if pyproject.is_file():
        settings = tomllib.loads(pyproject.read_text())
        assert settings["project"]["dynamic"] == ["version"]
        stated = pyproject.parent / settings["tool"]["hatch"]["version"]["path"]
        assert stated.samefile(draftwise.__file__)
    try:
        installed = metadata.version("draftwise")
    except metadata.PackageNotFoundError:
        return
    assert installed == draftwise.__version__


SOURCES = list(sources())


def test_the_makefile_names_tests_that_exist():
    root = Path(__file__).parents[1]
    named = re.findall(r"tests/[\w/*.]+", (root / "Makefile").read_text(encoding="utf-8"))
    assert len(named) > 5
    assert [each for each in named if not list(root.glob(each))] == []


def test_dependencies_point_downwards():
    for file, module in SOURCES:
        part = part_of(module)
        if part is None or part in TOP:
            continue
        used = {part_of(name) for name in imported(file, module)} - {part}
        assert used <= MAY_IMPORT[part], module


def test_no_files_import_each_other_in_a_circle():
    """Imports within functions and those for types count as well."""
    modules = {module for _, module in SOURCES}
    graph = {}
    for file, module in SOURCES:
        if ".peer_engines." in module:  # they run where Draftwise is not installed
            continue
        names = set(imported(file, module))
        found = {n if n in modules else n.rpartition(".")[0] for n in names}
        graph[module] = {each for each in found if each in modules and each != module}
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as circle:
        pytest.fail(" -> ".join(circle.args[1]))


def test_every_part_is_listed():
    """The table above defines what each part may import."""
    parts = {part_of(module) for _, module in SOURCES} - {None}
    assert parts <= MAY_IMPORT.keys() | TOP


def test_core_imports_only_numerical_libraries():
    """It imports torch, numpy and the standard library, so that any engine can use it."""
    known = {"torch", "numpy", "draftwise", *sys.stdlib_module_names}
    for file in (ROOT / "core").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= known
            elif isinstance(node, ast.ImportFrom):
                assert node.module.split(".")[0] in known
