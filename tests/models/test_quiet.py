"""Loading and generating writes nothing to a user's terminal.

On a processor without a fast path for the model, one warning says so. Other tests check it.
"""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
{before}
import draftwise
import warnings
from draftwise import LLM, SamplingParams
warnings.simplefilter("ignore", draftwise.errors.SlowPathWarning)
llm = LLM({target!r}, {{"draft": {draft!r}, "companion": {companion!r}}})
llm.generate("def f(x):", SamplingParams(max_tokens=3))
try:
    llm.generate("a b " * 3000)
except draftwise.errors.PromptError:
    print(len(llm.tokenize("a b " * 3000)))
"""


@pytest.mark.parametrize(
    ("before", "target", "draft", "companion"),
    [
        ("import transformers", "zoo:target:int8", "zoo:draft", None),
        ("from transformers import AutoModelForCausalLM", "zoo:target", "zoo:draft", "draft:int4"),
        ("", "zoo:hybrid", "mtp", None),
    ],
)
def test_nothing_is_written_to_the_terminal(before, target, draft, companion):
    names = {"target": target, "draft": draft, "companion": companion}
    program = PROGRAM.format(before=before, **names)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert int(done.stdout) > 2048
