"""Answers of a server, read from the formats of OpenAI's API and its relatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = Mapping[str, Any]
# Drafted tokens that were verified and accepted, and drafts by their number of accepted tokens.
Drafts = tuple[int | None, int, tuple[int, ...]]
# Stands for bytes that are no character yet.
UNCLEAR = "\ufffd"


@dataclass(frozen=True)
class ScoredToken:
    """A generated token and the log-probabilities at its position.

    Attributes:
        text: text of the token.
        log_p: its log-probability.
        top: log-probabilities of the most likely tokens, by text.
    """

    text: str
    log_p: float
    top: Mapping[str, float]

    @property
    def margin(self) -> float | None:
        """Difference of the two best log-probabilities; ``None`` with fewer than two."""
        best = sorted(self.top.values(), reverse=True)[:2]
        return best[0] - best[1] if len(best) == 2 else None


@dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
        text: its text.
        finish_reason: why it ended; ``None`` if the server does not say.
        tokens: its tokens; ``None`` if log-probabilities were not asked for, or not given.
        tool_calls: names and arguments of the functions that it calls.
    """

    text: str
    finish_reason: str | None
    tokens: tuple[ScoredToken, ...] | None = None
    tool_calls: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Response:
    """The answers to one request.

    Attributes:
        answers: in the order of their indices.
        usage: counts of tokens, as far as the server reports them.
        indices: index of each answer, as the server numbers them.
        num_drafted: drafted tokens that were verified; ``None`` if the server does not say.
        num_accepted: those that were accepted.
        acceptance_histogram: number of drafts of which 0, 1, 2, … tokens were accepted; empty if
            the server does not say.
    """

    answers: tuple[Answer, ...]
    usage: Mapping[str, int]
    indices: tuple[int, ...] = (0,)
    num_drafted: int | None = None
    num_accepted: int = 0
    acceptance_histogram: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int | None:
        """Generated tokens; ``None`` if the server does not count them."""
        return self.usage.get("completion_tokens")


def without_blanks(text: str) -> str:
    """A text without its blanks, which tokenizers leave out of tokens that are decoded alone."""
    return "".join(text.split())


def read_response(content: Json) -> Response:
    """Read a response body of completions or chat completions.

    Raises:
        KeyError, TypeError, ValueError: it has another format.
    """
    choices = sorted(content["choices"], key=lambda choice: choice.get("index", 0))
    usage = content.get("usage") or {}
    return Response(
        tuple(_answer(choice) for choice in choices),
        {name: count for name, count in usage.items() if type(count) is int},
        tuple(choice.get("index", 0) for choice in choices),
        *_drafts(content),
    )


def joined_chunks(chunks: Sequence[Json]) -> Response:
    """Join the chunks of a stream with one answer.

    Raises:
        KeyError, TypeError, ValueError: a chunk has another format.
    """
    text, reason = "", None
    usage: Mapping[str, int] = {}
    drafts: Drafts = None, 0, ()
    for chunk in chunks:
        if chunk.get("error"):
            raise ValueError(str(chunk["error"]))
        for choice in chunk.get("choices") or ():
            part = choice.get("delta")
            text += choice.get("text") or "" if part is None else part.get("content") or ""
            reason = choice.get("finish_reason") or reason
        usage = {
            name: count
            for name, count in (chunk.get("usage") or usage).items()
            if type(count) is int
        }
        # llama.cpp may count in every chunk; the last counts are those of the answer.
        own = _drafts(chunk)
        drafts = drafts if own[0] is None else own
    return Response((Answer(text, reason),), usage, (0,), *drafts)


def _answer(choice: Json) -> Answer:
    message = choice.get("message")
    text = choice.get("text") if message is None else message.get("content")
    calls = () if message is None else message.get("tool_calls") or ()
    functions = [call["function"] for call in calls]
    return Answer(
        text or "",
        choice.get("finish_reason"),
        _tokens(choice.get("logprobs")),
        tuple((each["name"], each["arguments"]) for each in functions),
    )


def _tokens(logprobs: Json | None) -> tuple[ScoredToken, ...] | None:
    """Tokens with log-probabilities, of OpenAI's format for chats or of that for completions."""
    if not logprobs:
        return None
    if logprobs.get("content") is not None:
        return tuple(
            ScoredToken(each["token"], each["logprob"], _top(each.get("top_logprobs") or ()))
            for each in logprobs["content"]
        )
    if not logprobs.get("tokens"):
        return None
    tops = logprobs.get("top_logprobs") or [{}] * len(logprobs["tokens"])
    return tuple(
        ScoredToken(text, log_p, top or {})
        for text, log_p, top in zip(
            logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True
        )
    )


def _top(entries: Sequence[Json]) -> dict[str, float]:
    top: dict[str, float] = {}
    for entry in entries:
        # Of tokens with the same text, the first is the most likely.
        top.setdefault(entry["token"], entry["logprob"])
    return top


def _drafts(content: Json) -> Drafts:
    """What became of drafted tokens, as Draftwise, vLLM and llama.cpp report it."""
    own = (content.get("usage") or {}).get("speculation") or {}
    metrics = (content.get("metrics") or {}).get("speculative_decoding") or {}
    histogram = tuple(metrics.get("acceptance_histogram") or ())
    if own:
        return own["num_verified"], own["num_accepted"], histogram
    if metrics:
        return metrics["num_draft_tokens"], metrics["num_accepted_draft_tokens"], histogram
    timings = content.get("timings") or {}
    if "draft_n" in timings:
        return timings["draft_n"], timings.get("draft_n_accepted", 0), ()
    return None, 0, ()
