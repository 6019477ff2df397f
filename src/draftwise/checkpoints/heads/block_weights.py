"""The shapes of the weights of a head that drafts blocks."""

from __future__ import annotations

from draftwise.checkpoints.heads.block_config import BlockHeadConfig, MarkovKind

_Shapes = dict[str, tuple[int, ...]]


def block_shapes(config: BlockHeadConfig) -> tuple[_Shapes, _Shapes]:
    """Shapes of the tensors that a head must have outside its layers, and of optional ones."""
    hidden, own = config.hidden_size, config.draft_vocab_size
    required: _Shapes = {
        "fc.weight": (hidden, len(config.state_layers) * config.target_hidden_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    projection: _Shapes = {"lm_head.weight": (own, hidden)}
    optional: _Shapes = {}
    # The target's projection is over all of its tokens, from its own size.
    if own == config.target_vocab_size and hidden == config.target_hidden_size:
        optional |= projection
    else:
        required |= projection
    read = hidden
    if config.markov is not None:
        rank, name = config.markov.rank, "markov_head."
        required[name + "markov_w1.weight"] = (config.target_vocab_size, rank)
        required[name + "markov_w2.weight"] = (own, rank)
        if config.markov.kind is MarkovKind.GATED:
            required |= _linear(name + "gate_proj", hidden + rank, rank)
        elif config.markov.kind is MarkovKind.RNN:
            required |= _linear(name + "joint_proj", 2 * rank + hidden, 3 * rank)
        read += rank if config.confidence_reads_markov else 0
    if config.convolution is not None:
        taps, groups = config.convolution.taps, hidden // config.convolution.group_size
        for index in range(config.num_layers):
            for part in ("attention_conv", "mlp_conv"):
                name = f"layers.{index}.{part}."
                required[name + "base_kernel"] = (2, taps, hidden)
                required[name + "kernel_projection.weight"] = (2 * taps * groups, hidden)
    if config.selector is not None:
        name, rank = "candidate_selector.", config.selector.rank
        required[name + "predecessor_codebook"] = (own, rank)
        required[name + "successor_codebook"] = (own, rank)
        required[name + "hidden_projection.weight"] = (rank, hidden)
    if config.has_confidence:
        required |= _linear("confidence_head.proj", read, 1)
    return required, optional


def _linear(name: str, inputs: int, outputs: int) -> _Shapes:
    """Shapes of a linear layer with a bias."""
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}
