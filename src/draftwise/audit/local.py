"""A model in this process that gives the answers without speculation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftwise.audit.answers import Answer, Response, ScoredToken
from draftwise.audit.budget import Budget
from draftwise.audit.client import Messages
from draftwise.errors import DraftwiseError, ServerError
from draftwise.llm import LLM
from draftwise.outputs import RequestOutput
from draftwise.params import SamplingParams
from draftwise.serving.tokenizing import TokenTexts
from draftwise.structured_outputs import StructuredOutputs

# As a server says of a request that it cannot read.
_REFUSED = 400


class LocalModel:
    """A model that Draftwise loads, with the interface of :class:`draftwise.audit.client.Model`.

    Attributes:
        name: name of the model.
        num_drafted, num_accepted: nothing is drafted.
    """

    def __init__(self, llm: LLM, budget: Budget, chat: bool) -> None:
        """Wrap a loaded model.

        Args:
            llm: the model, without speculation.
            budget: counts the answers.
            chat: ask texts as messages of a user.
        """
        self._llm, self._budget, self._chat = llm, budget, chat
        self._texts = TokenTexts(llm.target.tokenizer)
        self.name = f"{llm.target.name}, loaded by Draftwise"
        self.num_drafted: int | None = 0
        self.num_accepted = 0

    def ask(self, prompt: str | Messages, **fields: Any) -> Response:
        """See :meth:`draftwise.audit.client.Model.ask`."""
        count, seed = fields.pop("n", 1), fields.pop("seed", None)
        self._budget.spend(count)
        try:
            params = [
                SamplingParams.from_dict(
                    _read(fields) | {"seed": None if seed is None else seed + number}
                )
                for number in range(count)
            ]
            outputs = self._llm.generate([self._prompt(prompt)] * count, params)
        except DraftwiseError as error:
            refusal = ServerError(self.name, str(error))
            refusal.status = _REFUSED
            raise refusal from error
        num_prompt_tokens = len(outputs[0].prompt_token_ids)
        num_tokens = sum(len(output.token_ids) for output in outputs)
        usage = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
        }
        answers = tuple(self._answer(output) for output in outputs)
        return Response(answers, usage, tuple(range(count)))

    def token_ids(self, text: str) -> list[int] | None:
        """See :meth:`draftwise.audit.client.Model.token_ids`."""
        return list(self._llm.tokenize(text))

    def command(self, prompt: str | Messages, **fields: Any) -> str:
        """What was asked of the model; the audited server's command has the request."""
        return f"# {self.name}, without speculation, with the same request"

    def close(self) -> None:
        """Free the model."""
        self._llm.close()

    def _prompt(self, prompt: str | Messages) -> Any:
        if isinstance(prompt, str) and self._chat:
            return [{"role": "user", "content": prompt}]
        return prompt if isinstance(prompt, str) else list(prompt)

    def _answer(self, output: RequestOutput) -> Answer:
        reason = output.finish_reason
        tokens = None
        if output.logprobs is not None:
            tokens = tuple(
                ScoredToken(
                    self._texts(token)[0],
                    each.logprob,
                    {self._texts(other)[0]: log_p for other, log_p in reversed(each.top)},
                )
                for token, each in zip(output.token_ids, output.logprobs, strict=True)
            )
        return Answer(output.text, None if reason is None else reason.value, tokens)


def _read(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters of the fields of a request."""
    read = dict(fields)
    if "logit_bias" in read:
        read["logit_bias"] = {int(token): bias for token, bias in read["logit_bias"].items()}
    schema = read.pop("structured_outputs", {}).get("json")
    if "response_format" in read:
        schema = read.pop("response_format")["json_schema"]["schema"]
    if schema is not None:
        read["structured_outputs"] = StructuredOutputs(json_schema=schema)
    return read
