"""Conversion of models to OpenVINO."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version

_EXPORT_TASK = "text-generation-with-past"


def check_export(name: str) -> None:
    """Check that the exporter can convert a model with the transformers of this environment.

    The exporter has the same check, but only after loading the model, and it names no remedy.

    Raises:
        RuntimeError: the model cannot be converted; names the remedy.
    """
    file = os.path.join(name, "config.json")
    if os.path.isdir(_converted_folder(name)) or not os.path.isfile(file):
        return
    with open(file, encoding="utf-8") as config:
        kind = json.load(config).get("model_type")
    from packaging.version import Version

    newest, found = _newest_transformers(kind), version("transformers")
    if newest is not None and Version(found) > Version(newest):
        raise RuntimeError(
            f"the export of {kind} models to OpenVINO requires transformers {newest} or older, but "
            f"its environment has {found}; install it with: "
            f"{sys.executable} -m pip install 'transformers<={newest}'"
        )


def _newest_transformers(kind: str) -> str | None:
    """Newest transformers version that the exporter supports for a model type; ``None`` if any."""
    try:
        import optimum.exporters.openvino.model_configs  # noqa: F401  registers the exporters
        from optimum.exporters.tasks import TasksManager

        made = TasksManager.get_exporter_config_constructor(
            "openvino", model_type=kind, task=_EXPORT_TASK, library_name="transformers"
        )
        newest = made.func.MAX_TRANSFORMERS_VERSION
    except Exception:  # unknown model type or another exporter version: the exporter will report it
        return None
    return None if newest is None else str(newest)


def _converted_folder(name: str) -> str:
    return os.path.join(
        os.environ.get("DRAFTWISE_CACHE", os.path.expanduser("~/.cache/draftwise")),
        "openvino",
        os.path.abspath(name).strip(os.sep).replace(os.sep, "-"),
    )


def converted(name: str) -> str:
    """Return the folder of a model converted to OpenVINO, and convert it if it does not exist.

    Raises:
        RuntimeError: the conversion failed; includes the last line of the exporter's output.
    """
    import subprocess
    import tempfile

    folder = _converted_folder(name)
    if not os.path.isdir(folder):
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        with tempfile.TemporaryDirectory(dir=os.path.dirname(folder)) as new:
            command = [
                *(sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino"),
                *("--model", name, "--task", _EXPORT_TASK, "--weight-format"),
                *("fp16", os.path.join(new, "model")),
            ]
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            ) as export:
                assert export.stdout is not None
                last = "nothing"
                for line in export.stdout:
                    sys.stderr.write(line)
                    last = line.strip() or last
            if export.returncode:
                raise RuntimeError(f"the export of {name!r} to OpenVINO failed: {last}")
            os.rename(os.path.join(new, "model"), folder)
    return folder
