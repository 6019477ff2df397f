"""Compiles grammars of structured outputs to matchers, which know the allowed next tokens."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Mapping
from threading import Lock
from typing import TYPE_CHECKING, Any

from draftwise.engine.matcher import Matcher
from draftwise.errors import InvalidParameterError
from draftwise.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_FIELD = "structured_outputs"
# Compiled grammars to keep. Most requests to a server use one of a few grammars.
_MOST_KEPT = 64
# Allowed whitespace between two JSON tokens. With unlimited whitespace, models may never stop
# writing it.
_BETWEEN = r"[ ]|\n[ ]{0,20}"


class GrammarCompiler:
    """Compiles grammars over the tokens of one target with llguidance.

    Safe to use from several threads, so a server can compile a grammar before it adds a request.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: frozenset[int]) -> None:
        """Set up. The tokenizer and grammars are prepared on first use.

        Args:
            tokenizer: the target's tokenizer; ``None`` if it has none.
            eos_token_ids: the target's end-of-sequence tokens.
        """
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._tokens: LLTokenizer | None = None
        self._grammars: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._making = Lock()
        self._keeping = Lock()

    def knows(self, structure: StructuredOutputs) -> bool:
        """Whether a grammar is compiled already, so that :meth:`matcher` returns at once."""
        with self._keeping:
            return _key(structure) in self._grammars

    def matcher(self, structure: StructuredOutputs) -> Matcher:
        """Create a matcher for one text constrained by a grammar.

        Raises:
            InvalidParameterError: llguidance is not installed, the target has no tokenizer or no
                end-of-sequence token, or the grammar is malformed, too large or unsupported.
        """
        kind = structure.kind
        value = getattr(structure, kind)
        key = _key(structure)
        with self._keeping:
            grammar = self._grammars.get(key)
            if grammar is not None:
                self._grammars.move_to_end(key)
        if grammar is None:
            grammar = self._compile(kind, value)
            with self._keeping:
                self._grammars[key] = grammar
                if len(self._grammars) > _MOST_KEPT:
                    self._grammars.popitem(last=False)
        matcher = Matcher(grammar, self._eos_token_ids, f"{_FIELD}.{kind}")
        if matcher.error is not None:
            raise matcher.error
        return matcher

    def _compile(self, kind: str, value: Any) -> LLMatcher:
        tokens = self._all_tokens()
        from llguidance import LLMatcher, LLParserLimits

        try:
            grammar = LLMatcher(
                tokens, _text(kind, value), log_level=0, limits=LLParserLimits(verbose_errors=False)
            )
        except Exception as error:  # the library raises various types
            raise InvalidParameterError(f"{_FIELD}.{kind}", f"is malformed: {error}") from error
        if grammar.is_error():
            message = " ".join(grammar.get_error().split())
            raise InvalidParameterError(f"{_FIELD}.{kind}", f"cannot be followed: {message}")
        return grammar

    def _all_tokens(self) -> LLTokenizer:
        """The target's tokenizer in llguidance's form."""
        if self._tokenizer is None:
            raise InvalidParameterError(_FIELD, "the target has no tokenizer")
        if not self._eos_token_ids:
            raise InvalidParameterError(_FIELD, "the target has no end-of-sequence token")
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise InvalidParameterError(
                _FIELD, 'llguidance is not installed: pip install "draftwise[serve]"'
            ) from error
        with self._making:
            if self._tokens is None:
                try:
                    self._tokens = from_tokenizer(
                        self._tokenizer, eos_token=_one_or_all(self._eos_token_ids)
                    )
                except Exception as error:  # the library raises various types
                    raise InvalidParameterError(
                        _FIELD, f"the target's tokenizer cannot be used: {error}"
                    ) from error
        return self._tokens


def _one_or_all(ids: Collection[int]) -> int | list[int]:
    """The argument of llguidance, which takes a list since version 1.9 only."""
    return next(iter(ids)) if len(ids) == 1 else sorted(ids)


def _key(structure: StructuredOutputs) -> tuple[str, str]:
    value = getattr(structure, structure.kind)
    return structure.kind, value if isinstance(value, str) else json.dumps(value)


def _json_options(schema: Mapping[str, Any]) -> dict[str, str]:
    """Default options for JSON whitespace, unless the schema sets them."""
    own = schema.get("x-guidance")
    if isinstance(own, dict) and own.keys() & {"whitespace_flexible", "whitespace_pattern"}:
        return {}
    return {"whitespace_pattern": _BETWEEN}


def _text(kind: str, value: Any) -> str:
    """A grammar in llguidance's syntax."""
    from llguidance import LLMatcher

    text: str
    if kind in ("json_schema", "json_object"):
        schema = value if kind == "json_schema" else {"type": "object"}
        text = LLMatcher.grammar_from_json_schema(json.dumps(schema), _json_options(schema))
    elif kind == "regex":
        text = LLMatcher.grammar_from_regex(value)
    elif kind == "choice":
        each = (json.dumps(text, ensure_ascii=False) for text in value)
        text = LLMatcher.grammar_from_lark(f"start: {' | '.join(each)}")
    else:
        text = LLMatcher.grammar_from_lark(value)
    return text
