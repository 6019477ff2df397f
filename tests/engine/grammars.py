"""The exact distribution of texts that must follow a grammar, computed without the engine."""

from dataclasses import dataclass

import torch

from draftwise import StructuredOutputs

from ..tiny_models import EOS, Recipe, byte_tokenizer
from .exact import process

TOKENIZER = byte_tokenizer()
END = TOKENIZER.get_vocab()[EOS]
# The last two entries of the embedding are not tokens.
RECIPE = Recipe(
    vocab=len(TOKENIZER) + 2,
    seed=3,
    tokenizer=True,
    config={"num_hidden_layers": 1, "eos_token_id": END},
)
_NUM_SPECIAL = 3
_NAMES = {index: name for name, index in TOKENIZER.get_vocab().items() if index >= _NUM_SPECIAL}


@dataclass(frozen=True)
class Form:
    """A grammar with few texts. It never forces more than one token in a row.

    Attributes:
        asked: the constraint of a request.
        words: all texts of the grammar.
    """

    asked: StructuredOutputs
    words: frozenset[str]

    def allowed(self, text):
        """Tokens that may follow a text."""
        tokens = [
            token
            for token, name in _NAMES.items()
            if any(word.startswith(text + name) for word in self.words)
        ]
        return tokens + [END] * (text in self.words)

    @torch.no_grad()
    def law(self, model, prompt, params):
        """Probability of every text as tokens, including the end token if there is one."""
        law = {}
        begun = [((), "", 1.0)]
        while begun:
            ids = torch.tensor([[*prompt, *said] for said, _, _ in begun])
            logits = model(input_ids=ids).logits[:, -1]
            following = []
            for (said, text, before), row in zip(begun, logits, strict=True):
                allowed = self.allowed(text)
                masked = torch.full_like(row, -torch.inf)
                masked[allowed] = row[allowed]
                output = torch.tensor([said], dtype=torch.long).view(1, -1)
                whole = torch.tensor([[*prompt, *said]])
                p = process(masked[None], whole, output, params)[0]
                for token in allowed:
                    here, after = before * float(p[token]), (*said, token)
                    grown = text + _NAMES.get(token, "")
                    if here == 0.0:
                        continue
                    if (
                        token == END
                        or self.allowed(grown) == [END]
                        or len(after) == params.max_tokens
                    ):
                        law[after] = law.get(after, 0.0) + here
                    else:
                        following.append((after, grown, here))
            begun = following
        return law


def _words(letters, most, ends):
    words = [""]
    grown = words
    for _ in range(most):
        grown = [word + letter for word in grown for letter in letters]
        words = words + grown
    return frozenset(word + end for word in words[1:] for end in ends)


LETTERS = Form(StructuredOutputs(regex="[abc]{1,3}[.,]?"), _words("abc", 3, ("", ".", ",")))
CHOICE = Form(
    StructuredOutputs(choice=("a", "ac", "bd", "hg", "b", "fa:")),
    frozenset({"a", "ac", "bd", "hg", "b", "fa:"}),
)
