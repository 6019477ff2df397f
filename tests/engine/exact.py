"""The exact distribution of a request's first tokens, computed without the code under test.

``transformers`` computes the logits after every possible prefix. Its own processors turn them into
probabilities. Plain loops replace missing processors.
"""

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..core.statistics_tools import Tree


def all_sequences(vocab, length):
    """``[vocab ** length, length]`` in the order in which a :class:`Tree` numbers prefixes."""
    columns = torch.meshgrid(*[torch.arange(vocab)] * length, indexing="ij") if length else ()
    return torch.stack([column.flatten() for column in columns], 1) if length else None


@torch.no_grad()
def exact_distribution(model, prompt, params, num_tokens):
    """A :class:`Tree` of the distributions of the next ``num_tokens`` tokens after a prompt."""
    vocab = model.config.vocab_size
    conditionals = []
    for length in range(num_tokens):
        ids = torch.tensor([prompt]).expand(vocab**length, -1)
        output = all_sequences(vocab, length)
        if output is None:
            output = torch.zeros(1, 0, dtype=torch.long)
        ids = torch.cat([ids, output], dim=1)
        logits = torch.cat([model(input_ids=part).logits[:, -1] for part in ids.split(4096)])
        conditionals.append(process(logits, ids, output, params).double())
    normal = [table / table.sum(dim=1, keepdim=True) for table in conditionals]
    return Tree(tuple(normal))


def process(logits, ids, output, params):
    """``[rows, vocab]`` probabilities, by the processors of ``transformers``.

    Args:
        logits: ``[rows, vocab]``.
        ids: ``[rows, length]`` prompt and output.
        output: ``[rows, num_output_tokens]`` output alone.
        params: sampling parameters.
    """
    logits = logits.clone()
    if output.shape[1] < params.min_tokens:
        logits[:, list(params.stop_token_ids)] = float("-inf")
    for token, bias in params.logit_bias.items():
        logits[:, token] += bias
    if params.repetition_penalty != 1.0:
        logits = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, logits)
    for row, said in enumerate(output.tolist()):
        for token in set(said):
            logits[row, token] -= params.presence_penalty
            logits[row, token] -= params.frequency_penalty * said.count(token)
    processors = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    return processors(ids, logits).softmax(dim=-1)
