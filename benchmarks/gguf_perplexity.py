"""Perplexity of a GGUF file in Draftwise and in llama.cpp, and the bytes that a token reads.

    python benchmarks/gguf_perplexity.py --model FILE.gguf --text gsm8k_train.jsonl \
        --llama PYTHON --output gguf_perplexity.json

The reference is transformers in float32 on the expanded weights, which is what the file says; it
takes four bytes of memory per weight, and ``accelerate``. All engines score the same tokens, in
chunks that begin with the tokenizer's first token. ``excess`` is the perplexity relative to the
reference less one, with the standard error of its mean over the tokens. PYTHON is the interpreter
of an environment with ``llama-cpp-python``. Bytes are those of all weights that a pass over one
token reads.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GgufConfig

from draftwise import LLM, SamplingParams
from draftwise.benchmark.report import write_report

# Executed by the other environment: one JSON object in, one out.
_LLAMA = """
import json, sys
import llama_cpp as llama
import numpy as np

wanted = json.load(sys.stdin)
options = llama.llama_model_default_params()
options.n_gpu_layers = 0
model = llama.llama_model_load_from_file(wanted["model"].encode(), options)
limits = llama.llama_context_default_params()
limits.n_ctx, limits.n_batch, limits.n_ubatch = 2048, 512, 512
limits.n_threads = limits.n_threads_batch = wanted["threads"]
context = llama.llama_init_from_model(model, limits)
vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
batch = llama.llama_batch_init(512, 0, 1)
values = []
for tokens in wanted["chunks"]:
    llama.llama_memory_clear(llama.llama_get_memory(context), True)
    for start in range(0, len(tokens), 512):
        part = tokens[start : start + 512]
        batch.n_tokens = len(part)
        for at, token in enumerate(part):
            batch.token[at], batch.pos[at], batch.logits[at] = token, start + at, True
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
        assert llama.llama_decode(context, batch) == 0
        logits = np.ctypeslib.as_array(llama.llama_get_logits(context), (len(part), vocab))
        for at, following in enumerate(tokens[start + 1 : start + 1 + len(part)]):
            row = logits[at].astype(np.float64)
            top = row.max()
            values.append(np.log(np.exp(row - top).sum()) + top - row[following])
from importlib.metadata import version
print(json.dumps({"nats": values, "version": version("llama-cpp-python")}))
"""


def chunks_of(llm: LLM, text: Path, num_tokens: int, length: int) -> list[list[int]]:
    """Chunks of a text, each with the tokens that the tokenizer adds at the beginning."""
    tokenizer = llm.target.tokenizer
    first: list[int] = tokenizer("").input_ids
    lines = "\n\n".join(
        " ".join(str(value) for value in json.loads(line).values())
        for line in text.read_text().splitlines()
    )
    tokens = tokenizer(lines[: 8 * num_tokens], add_special_tokens=False).input_ids[:num_tokens]
    assert len(tokens) == num_tokens
    step = length - len(first)
    return [first + tokens[at : at + step] for at in range(0, num_tokens, step)]


def ours(llm: LLM, chunks: list[list[int]]) -> list[float]:
    """Negative log-probability of each of the chunks' tokens, in nats."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    values = []
    for chunk, output in zip(chunks, llm.generate(chunks, params), strict=True):
        found = output.prompt_logprobs
        assert found is not None
        assert len(found) == len(chunk)
        values += [-each.logprob for each in found[1:] if each is not None]
    return values


@torch.inference_mode()
def expected(path: Path, chunks: list[list[int]]) -> list[float]:
    """The same by transformers in float32 on the expanded weights."""
    model = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    values: list[float] = []
    for chunk in chunks:
        tokens = torch.tensor(chunk)
        logits = model(tokens[None, :-1], use_cache=False).logits[0]
        for row, following in zip(logits, tokens[1:], strict=True):
            values.append(float(row.logsumexp(0) - row[following]))
    return values


def weight_bytes(llm: LLM) -> int:
    """Bytes of the weights that a pass of the target reads."""
    native = llm.target.model.native
    if native is None:  # PyTorch's operations read all parameters in float32
        return llm.target.num_parameters * torch.float32.itemsize
    return native.weight_bytes


def theirs(python: Path, model: Path, chunks: list[list[int]]) -> tuple[list[float], str]:
    """The same by llama.cpp, and its version."""
    wanted = {"model": str(model), "chunks": chunks, "threads": torch.get_num_threads()}
    done = subprocess.run(
        [python, "-c", _LLAMA], input=json.dumps(wanted), capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    found = json.loads(done.stdout.splitlines()[-1])
    return found["nats"], found["version"]


def excess(values: list[float], reference: list[float]) -> dict[str, float]:
    """Perplexity relative to the reference less one, and its standard error."""
    more = torch.tensor(values, dtype=torch.float64) - torch.tensor(reference, dtype=torch.float64)
    mean, error = float(more.mean()), float(more.std()) / math.sqrt(len(more))
    return {"mean": math.expm1(mean), "standard_error": error}


def file_bytes(model: Path) -> int:
    """Bytes of the file's tensors that a pass reads: all matrices, and a tied embedding once."""
    from gguf import GGUFReader

    tensors = {tensor.name: tensor for tensor in GGUFReader(model).tensors}
    looked_up = {"token_embd.weight"} if "output.weight" in tensors else set()
    return sum(int(t.n_bytes) for name, t in tensors.items() if name not in looked_up)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--llama", required=True, type=Path, help="python with llama-cpp-python")
    parser.add_argument("--num-tokens", type=int, default=20_000)
    parser.add_argument("--length", type=int, default=1_000, help="tokens of a chunk")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    llm = LLM(arguments.model, max_model_len=arguments.length + 1, enable_prefix_caching=False)
    chunks = chunks_of(llm, arguments.text, arguments.num_tokens, arguments.length)
    nats, num_bytes = {"draftwise": ours(llm, chunks)}, {"draftwise": weight_bytes(llm)}
    llm.close()
    reference = expected(arguments.model, chunks)
    nats["llama.cpp"], version = theirs(arguments.llama, arguments.model, chunks)
    num_bytes["llama.cpp"] = file_bytes(arguments.model)
    print(f"transformers perplexity {perplexity(reference):.4f}  {len(reference)} tokens")
    rows: dict[str, object] = {
        "transformers": {"perplexity": perplexity(reference), "num_tokens": len(reference)}
    }
    for name, values in nats.items():
        more = excess(values, reference)
        rows[name] = {
            "perplexity": perplexity(values),
            "excess": more,
            "bytes": num_bytes[name],
        }
        print(
            f"{name:12} perplexity {perplexity(values):.4f}  {100 * more['mean']:+.3f} % "
            f"(± {100 * more['standard_error']:.3f})  {num_bytes[name] / 1e6:.1f} MB a token"
        )
    if arguments.output:
        settings = vars(arguments) | {"llama": f"llama-cpp-python {version}"}
        write_report(arguments.output, settings, {"engines": rows})


def perplexity(values: list[float]) -> float:
    """The perplexity of tokens by their negative log-probabilities."""
    return math.exp(math.fsum(values) / len(values))


if __name__ == "__main__":
    main()
