"""Collects the documents of a run: answers of the target, and texts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwise.distillation.answers import AnswerCache, Job, answer
from draftwise.distillation.documents import Document
from draftwise.distillation.settings import Machine, TrainingSettings
from draftwise.engine.suffix.loading import read_texts
from draftwise.errors import InvalidParameterError, PromptError
from draftwise.llm import LLM
from draftwise.prompts import Prompt, load_prompts
from draftwise.speculation import SpeculationConfig

# Answers to one prompt at temperatures above 0, before the prompts are exhausted.
_MAX_ROUNDS = 4
# Largest share of the time for answers that held-out prompts take.
_HELD_OUT_SHARE = 1 / 3
# Pieces of texts that are shorter than this teach nothing.
_SHORTEST_PIECE = 8


@dataclass(frozen=True)
class Collected:
    """Documents of a run.

    Attributes:
        training: documents to train on.
        held_out: answers to prompts that are not trained on.
        end_tokens: end-of-sequence tokens of the target.
        seconds: time that answering took.
    """

    training: list[Document]
    held_out: list[Document]
    end_tokens: frozenset[int]
    seconds: float


def _read_prompts(settings: TrainingSettings) -> list[str]:
    """The prompts of all files in a random order, without repetitions.

    Raises:
        PromptError: a file cannot be read, or there are fewer than two prompts.
    """
    texts = [text for name in settings.prompts for text in load_prompts(name)]
    texts = list(dict.fromkeys(texts))
    if len(texts) < 2:
        raise PromptError("prompts", "training needs at least two prompts, one of them held out")
    random.Random(settings.seed).shuffle(texts)
    return texts


def collect(
    settings: TrainingSettings, machine: Machine, on_status: Callable[[str], None]
) -> Collected:
    """Let the target answer the prompts, and tokenise the texts.

    Args:
        settings: settings of the run.
        machine: where the target runs, and the folder of earlier answers.
        on_status: called with a description of what is done.

    Raises:
        DraftwiseError: prompts cannot be read or are too long, or the target cannot be loaded.
    """
    prompts = _read_prompts(settings)
    llm = LLM(
        settings.target,
        SpeculationConfig("suffix"),
        dtype=machine.dtype,
        device=machine.device,
        max_model_len=settings.length,
        trust_remote_code=machine.trust_remote_code,
        on_status=on_status,
    )
    with llm:
        tokenized = _tokenized(llm, settings, prompts)
        num_held_out = min(settings.num_held_out, max(1, len(tokenized) // 10))
        held_out, training = tokenized[:num_held_out], tokenized[num_held_out:]
        seconds = 0.0
        cache = AnswerCache(llm.target.fingerprint, settings.max_tokens, machine.answers)

        def answers(jobs: list[Job], what: str, **limits: Any) -> list[Document]:
            def on_progress(num_answers: int, num_tokens: int) -> None:
                on_status(f"{what}: {num_answers} answers, {num_tokens:,} tokens")

            nonlocal seconds
            found = answer(llm, jobs, cache, settings.max_tokens, on_progress=on_progress, **limits)
            seconds += found.seconds
            return [
                Document((*job.prompt, *tokens), len(job.prompt), job.temperature)
                for job, tokens in found.answers
            ]

        # Every held-out prompt is answered at every temperature, as far as the time allows.
        tests = [Job(prompt, each) for prompt in held_out for each in settings.temperatures]
        budget = None
        limits: dict[str, float] = {}
        if settings.minutes is not None:
            budget = 60 * settings.minutes * settings.answer_share
            limits = {"seconds": budget * _HELD_OUT_SHARE}
        tested = answers(tests, "held-out prompts", **limits)
        if not tested:
            raise InvalidParameterError(
                "minutes", "no held-out prompt was answered in this time; give more time"
            )
        jobs = _jobs(training, settings.temperatures)
        if budget is not None:
            limits = {"seconds": max(budget - seconds, 0.0)}
        else:
            assert settings.tokens is not None
            limits = {"num_tokens": max(1, round(settings.tokens * settings.answer_share))}
        documents = answers(jobs, "prompts", **limits) if jobs else []
        documents += _pieces(llm, settings)
        if not documents:
            raise InvalidParameterError(
                "minutes", "no prompt was answered in this time; give more time, or texts"
            )
        return Collected(documents, tested, llm.target.eos_token_ids, seconds)


def _tokenized(llm: LLM, settings: TrainingSettings, texts: Sequence[str]) -> list[tuple[int, ...]]:
    """Tokens of all prompts that leave room for an answer."""
    chat = settings.chat
    if chat is None:
        chat = getattr(llm.target.tokenizer, "chat_template", None) is not None
    prompts: list[Prompt] = [
        [{"role": "user", "content": text}] if chat else text for text in texts
    ]
    longest = min(settings.length, llm.target.max_model_len) - settings.max_tokens
    tokens = [tuple(llm.tokenize(prompt)) for prompt in prompts]
    fitting = [each for each in tokens if len(each) <= longest]
    if len(fitting) < 2:
        raise PromptError(
            "prompts",
            f"only {len(fitting)} have at most {longest} tokens, which leaves room for an answer "
            f"of {settings.max_tokens}; set a larger length or smaller max_tokens",
        )
    return fitting


def _jobs(prompts: Sequence[tuple[int, ...]], temperatures: Sequence[float]) -> list[Job]:
    """Answers in the order in which they are generated: all prompts once, then further rounds.

    The temperatures take turns. A greedy answer is generated once, as another one is the same.
    """
    jobs: dict[Job, None] = {}
    for turn in range(_MAX_ROUNDS * len(temperatures)):
        for index, prompt in enumerate(prompts):
            temperature = temperatures[(index + turn) % len(temperatures)]
            jobs[Job(prompt, temperature, turn // len(temperatures) if temperature else 0)] = None
    return list(jobs)


def _pieces(llm: LLM, settings: TrainingSettings) -> list[Document]:
    """The given texts in pieces of one row."""
    documents = []
    for name in settings.texts:
        for strings in read_texts(Path(name), "texts"):
            text = "\n".join(strings)
            tokens = llm.tokenize(text) if text else []
            for start in range(0, len(tokens), settings.length):
                piece = tokens[start : start + settings.length]
                if len(piece) >= _SHORTEST_PIECE:
                    documents.append(Document(tuple(piece)))
    return documents
