import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from draftwise.training.llama import new_llama
from draftwise.training.schedule import Schedule
from draftwise.zoo import train as train_module
from draftwise.zoo.recipe import MIXTURE, Distillation, HybridShape, ModelShape, Stage
from draftwise.zoo.tokens import Corpus, joined

TINY = ModelShape(
    hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=16
)
TINY_HYBRID = HybridShape(**{**asdict(TINY), "num_layers": 4})
TINY_SCHEDULE = Schedule(
    tokens=3 * 64, batch_tokens=64, micro_batch_tokens=32, length=16, long_length=32
)


def tiny_stage(name, seed, *, distilled=False, shape=TINY):
    distillation = None
    if distilled:
        distillation = Distillation(
            TINY_SCHEDULE, num_continuations=4, prompt_length=8, continuation_length=8
        )
    return Stage(name, shape, TINY_SCHEDULE, seed, distillation)


def new_model(stage):
    return new_llama(stage.shape.config(), stage.seed)


def random_source(seed, num_documents=40):
    generator = np.random.default_rng(seed)
    lengths = generator.integers(3, 60, num_documents)
    return joined(generator.integers(1, 4096, length).tolist() for length in lengths)


@pytest.fixture(scope="session")
def corpus():
    return Corpus(
        training={name: random_source(i) for i, name in enumerate(MIXTURE)},
        held_out={name: random_source(100 + i, 5) for i, name in enumerate(MIXTURE)},
    )


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A small data folder with training and evaluation files."""
    folder = tmp_path / "data"
    folder.mkdir()
    gsm8k = [
        {"question": f"What is {i}+1?", "answer": f"It is {i}+1=<<{i}+1={i + 1}>>{i + 1}."}
        for i in range(200)
    ]
    mbpp = [
        {
            "task_id": i,
            "text": f"Write function number {i}.",
            "code": f"def f():\r\n\treturn {i}",
            "test_list": [f"assert f() == {i}"],
        }
        for i in range(1, 975)
    ]
    for name, records in {"gsm8k_train": gsm8k, "mbpp": mbpp}.items():
        lines = [json.dumps(record) for record in records]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    for name in ("gsm8k_test", "humaneval", "humanevalpack_python", "spec_bench", "mt_bench"):
        (folder / f"{name}.jsonl").write_text("FORBIDDEN, and not even JSON\n")
    library = tmp_path / "library"
    (library / "test").mkdir(parents=True)
    (library / "site-packages").mkdir()
    source = (
        "def twice(value):\n    return 2 * value  # a comment that makes the file long enough\n"
    )
    for i in range(60):
        (library / f"module_{i}.py").write_text(f"# module {i}\n" + source * 20)
        (library / "test" / f"test_{i}.py").write_text(f"# test {i}\n" + source * 20)
    (library / "site-packages" / "other.py").write_text("FORBIDDEN\n" * 20)
    (library / "table.py").write_text("0x1234, 5678,\n" * 100)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(library))
    return folder


@pytest.fixture
def tiny_stages(monkeypatch):
    stages = {
        "target": tiny_stage("target", 1, shape=replace(TINY, num_layers=4)),
        "draft": tiny_stage("draft", 2, distilled=True),
        "hybrid": tiny_stage("hybrid", 3, distilled=True, shape=TINY_HYBRID),
    }
    monkeypatch.setattr(train_module, "STAGES", stages)
    monkeypatch.setattr("draftwise.zoo.export.STAGES", stages)
    return stages
