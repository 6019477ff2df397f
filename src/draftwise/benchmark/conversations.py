"""Prompts from conversations of several turns, answered by the target."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from draftwise.benchmark.workload import Workload
from draftwise.errors import PromptError
from draftwise.llm import LLM
from draftwise.params import SamplingParams
from draftwise.prompt_files import Question, load_questions


def load_conversations(path: Path) -> list[Question]:
    """Read the conversations of a file of prompts, such as those of MT-Bench and Spec-Bench.

    Args:
        path: file of prompts; see :func:`draftwise.prompt_files.load_questions`. Records with fewer
            than two turns are skipped.

    Raises:
        PromptError: the file cannot be read, or has no conversation.
    """
    found = [each for each in load_questions(path, field="workload") if len(each.turns) > 1]
    if not found:
        raise PromptError("workload", f"{str(path)!r} has no line with two or more turns")
    return found


def load_multi_turn_workload(
    llm: LLM, path: Path, num_prompts: int, longest_prompt: int, max_tokens: int
) -> Workload:
    """Prompts of the last turns of the first conversations that are short enough.

    A prompt has all turns of the user, and the target's answers to all but the last. The answers
    are greedy and end at the end of the sequence.

    Args:
        llm: the target, without speculation.
        path: file of prompts; see :func:`load_conversations`.
        num_prompts: maximum number of prompts.
        longest_prompt: maximum number of prompt tokens; conversations that become longer are
            skipped.
        max_tokens: maximum number of tokens of an earlier answer.

    Raises:
        PromptError: the file cannot be read, or has no conversation that is short enough.
    """
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    remaining = deque(load_conversations(path))
    found: list[_Chat] = []
    while remaining and len(found) < num_prompts:
        num_missing = min(num_prompts - len(found), len(remaining))
        chats = [_Chat(remaining.popleft()) for _ in range(num_missing)]
        found += _last_turns(llm, chats, longest_prompt, params)
    if not found:
        raise PromptError(
            "workload",
            f"no conversation of {str(path)!r} has at most {longest_prompt} tokens before its last "
            "answer",
        )
    categories = [chat.conversation.category for chat in found]
    return Workload(path.stem, [chat.prompt for chat in found], categories)


@dataclass
class _Chat:
    """A conversation up to a turn of the user, and the prompt of that turn."""

    conversation: Question
    messages: list[dict[str, str]] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)

    def ask(self, llm: LLM, number: int) -> int:
        """Append a turn of the user, and return the number of tokens of its prompt."""
        self.messages.append({"role": "user", "content": self.conversation.turns[number]})
        self.prompt = list(llm.tokenize(self.messages))
        return len(self.prompt)


def _last_turns(
    llm: LLM, chats: Sequence[_Chat], longest: int, params: SamplingParams
) -> list[_Chat]:
    """Continue chats to their last turns, in order, without those that become too long."""
    running = list(chats)
    for number in range(max(len(chat.conversation.turns) for chat in chats)):
        due = [chat for chat in running if number < len(chat.conversation.turns)]
        too_long = [chat for chat in due if chat.ask(llm, number) > longest]
        running = [chat for chat in running if chat not in too_long]
        answered = [chat for chat in running if number + 1 < len(chat.conversation.turns)]
        outputs = llm.generate([chat.prompt for chat in answered], params)
        for chat, output in zip(answered, outputs, strict=True):
            chat.messages.append({"role": "assistant", "content": output.text})
    return running
