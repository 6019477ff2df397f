"""Records what llama.cpp computes for tiny GGUF files: the reference of ``tests/models``.

    python tools/gguf_reference [NAME ...]

Makes the file of every case of ``tests/models/gguf_files`` (or of the named cases), and asks
llama.cpp for the log-probabilities of a fixed token sequence, or for the tokens that end a
generation. The answers go to ``tests/models/gguf_reference.json``. Run it in an environment with
``llama-cpp-python``, ``gguf`` and NumPy. A case has a process of its own, as llama.cpp ends the
process on some files.

The recorded object has, for each case:

- ``architecture``, ``keys``, ``tensors`` (and ``context``, ``special``, if not the usual ones): the
  case;
- ``sha256``: of its file;
- ``sum``: the sum of the log-probabilities of all tokens after the first, each given those before;
- ``every_20th``: the first of them, and then every twentieth;
- ``refused`` instead of both where llama.cpp loads no such file: its reason;
- ``ends`` instead of both for a vocabulary: the texts of the tokens that end a generation.

Beside the cases it has ``splits``: for the ways in which byte-level vocabularies split texts
(``names``), the tokens of each text, with the one that begins a text where llama.cpp adds one.

Attention is computed without the flash kernel, and keys and values are kept in float32. llama.cpp
reads GELU from a table of float16 values, which moves log-probabilities by up to 0.01 (0.3 in the
deepest files), so the recorded values are those of a build without that table. Unpack the source
package, delete the two lines ``#define GGML_GELU_…`` in
``vendor/llama.cpp/ggml/src/ggml-cpu/vec.h``, and install the folder with pip.

Where transformers has a configuration for a case, its float32 results are within 2e-4 of each
recorded number, and within 2e-3 in the two deepest Gemma files. Every case that changes anything
changes one of its numbers by more than 0.5.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "models"))
files = importlib.import_module("gguf_files")

EVERY = 20


def log_probabilities(path: Path, tokens: list[int], context: int) -> list[float]:
    """llama.cpp's log-probabilities of the tokens after the first.

    Args:
        path: A GGUF file.
        tokens: The sequence, passed as it is.
        context: Context length that llama.cpp allocates.

    Returns:
        One number for each token but the first.
    """
    import llama_cpp
    import numpy as np

    llama_cpp.llama_backend_init()
    options = llama_cpp.llama_model_default_params()
    options.n_gpu_layers = 0
    # Weights stay as they are in the file, in the order of the file.
    options.use_extra_bufts = False
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
    if not model:
        sys.exit("not loaded")
    limits = llama_cpp.llama_context_default_params()
    limits.n_ctx = limits.n_batch = limits.n_ubatch = context
    limits.n_threads = limits.n_threads_batch = 1
    limits.type_k = limits.type_v = llama_cpp.GGML_TYPE_F32
    limits.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    limits.swa_full = True
    found = llama_cpp.llama_init_from_model(model, limits)
    if not found:
        sys.exit("no context")
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for at, token in enumerate(tokens):
        batch.token[at], batch.pos[at], batch.logits[at] = token, at, 1
        batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
    if llama_cpp.llama_decode(found, batch):
        sys.exit("not decoded")
    width = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    pointer = llama_cpp.llama_get_logits(found)
    logits = np.ctypeslib.as_array(pointer, (len(tokens), width)).astype(np.float64)
    greatest = logits.max(axis=1, keepdims=True)
    logits -= greatest + np.log(np.exp(logits - greatest).sum(axis=1, keepdims=True))
    return [float(logits[at, token]) for at, token in enumerate(tokens[1:])]


def ending_tokens(path: Path) -> list[str]:
    """Texts of the tokens that end a generation in llama.cpp, in the order of their ids."""
    import llama_cpp

    options = llama_cpp.llama_model_default_params()
    options.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
    if not model:
        sys.exit("not loaded")
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    return [
        llama_cpp.llama_vocab_get_text(vocabulary, token).decode()
        for token in range(llama_cpp.llama_vocab_n_tokens(vocabulary))
        if llama_cpp.llama_vocab_is_eog(vocabulary, token)
    ]


def tokenized(path: Path, texts: tuple[str, ...]) -> list[list[int]]:
    """llama.cpp's tokens of texts."""
    import llama_cpp

    options = llama_cpp.llama_model_default_params()
    options.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
    if not model:
        sys.exit("not loaded")
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    found = []
    for text in texts:
        data = text.encode()
        buffer = (llama_cpp.llama_token * (len(data) + 2))()
        count = llama_cpp.llama_tokenize(
            vocabulary, data, len(data), buffer, len(buffer), True, True
        )
        found.append(list(buffer[:count]))
    return found


def splits() -> list[dict[str, Any]]:
    """The tokens of all texts, by the names that split them in the same way."""
    found: dict[str, list[str]] = {}
    for name in files.NAMES:
        with tempfile.TemporaryDirectory() as folder:
            path = files.make_vocabulary(name, Path(folder) / "vocabulary.gguf")
            answer = json.dumps(tokenized(path, files.TEXTS))
        found.setdefault(answer, []).append(name)
    return [{"names": names, "tokens": json.loads(answer)} for answer, names in found.items()]


def answer(name: str) -> dict[str, Any]:
    """What llama.cpp says about a case, in this process."""
    case = files.CASES.get(name) or files.VOCABULARIES[name]
    with tempfile.TemporaryDirectory() as folder:
        path = files.make(case, Path(folder) / "case.gguf")
        if name in files.VOCABULARIES:
            return {"ends": ending_tokens(path)}
        found = log_probabilities(path, files.tokens(), case.context)
    rounded = [round(each, 6) for each in found[::EVERY]]
    return {"sum": round(sum(found), 4), "every_20th": rounded}


def reason(errors: str) -> str:
    """Why llama.cpp refused a file, without its paths and line numbers."""
    lines = re.findall(r"GGML_ASSERT\(.*\) failed|error loading model: .*", errors)
    return lines[0].removeprefix("error loading model: ") if lines else errors[-300:]


def record(name: str) -> dict[str, Any]:
    """A case and llama.cpp's answer, from a process of its own."""
    case = files.CASES.get(name) or files.VOCABULARIES[name]
    plain = type(case)(case.architecture)
    described = {
        field.name: getattr(case, field.name)
        for field in dataclasses.fields(case)
        if field.name in {"architecture", "keys", "tensors"}
        or getattr(case, field.name) != getattr(plain, field.name)
    }
    with tempfile.TemporaryDirectory() as folder:
        path = files.make(case, Path(folder) / "case.gguf")
        described["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    command = [sys.executable, str(Path(__file__).parent), "--answer", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return described | {"refused": reason(done.stderr)}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return described | found


def main() -> None:
    """Record the cases named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="cases; the others keep their recorded values")
    parser.add_argument("--answer", help="print llama.cpp's answer for one case")
    arguments = parser.parse_args()
    if arguments.answer:
        print("\n" + json.dumps(answer(arguments.answer)))
        return
    import llama_cpp

    every = [*files.CASES, *files.VOCABULARIES]
    known: dict[str, Any] = files.recorded()["cases"] if arguments.names else {}
    for name in arguments.names or every:
        known[name] = record(name)
        shown = {key: known[name][key] for key in ("sum", "ends", "refused") if key in known[name]}
        print(f"{name}: {shown}", flush=True)
    lines = [f"{json.dumps(name)}: {json.dumps(known[name])}" for name in every if name in known]
    head = f'"llama_cpp_python": "{llama_cpp.__version__}",\n"splits": [\n'
    head += ",\n".join(json.dumps(each) for each in splits()) + '\n],\n"cases": {\n'
    files.writing.REFERENCE.write_text("{\n" + head + ",\n".join(lines) + "\n}\n}\n")


if __name__ == "__main__":
    main()
