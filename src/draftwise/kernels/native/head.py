"""Passes of a drafting head with the native kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.kernels.native.decoder import NativeDecoder, release_weight
from draftwise.kernels.native.library import NativeLibrary
from draftwise.kernels.native.projection import projector
from draftwise.kernels.native.structures import StateInput
from draftwise.models.decoder_spec import DecoderSpec
from draftwise.models.kv_cache import KVCache


class NativeHead(NativeDecoder):
    """A head that Draftwise's kernels compute; see :class:`NativeDecoder`."""

    def __init__(
        self,
        spec: DecoderSpec,
        library: NativeLibrary,
        bits: int,
        output_ids: Tensor | None,
        target: NativeDecoder | None = None,
    ) -> None:
        """Pack the weights of a head. Its own linear layers lose their weights.

        Args:
            spec: the head.
            library: the compiled kernels.
            bits: stored bits per number of a linear layer; see :class:`NativeDecoder`.
            output_ids: ``[draft_vocab]`` int64 token ids of the logits; ``None`` if they are 0, 1,
                2, …
            target: the target whose projection to the vocabulary computes the logits; ``None`` for
                the head's own, or where the caller projects the output.
        """
        super().__init__(spec, library, bits)
        reads = spec.state_input
        assert reads is not None
        size, num_states = reads.state_size, max(1, len(reads.norms))
        norms = None
        if reads.norms:
            norms = self._keep(torch.cat([norm.weight for norm in reads.norms]))
        self._state_input = StateInput(
            self._keep_matrix(reads.projection),
            self._keep_norm(reads.embedding_norm),
            self._keep_norm(reads.joint_norm),
            norms,
            self._keep_norm(reads.state_norm),
            num_states,
            size // num_states,
            reads.norm_before_residual,
            reads.norm_output,
            reads.is_context,
        )
        release_weight(reads.projection)
        self._model.state_input = ctypes.addressof(self._state_input)
        if output_ids is not None:
            self._model.output_ids = self._keep(output_ids)
        if target is not None:
            # The weights are the target's, in whatever format it has them.
            self._target, self.vocab_size = target, target.vocab_size
            self._projector = projector(target, self._model.norm)
            self._model.vocab = target.vocab_size
            self._model.projector = ctypes.addressof(self._projector)

    @torch.inference_mode()
    def read(
        self,
        cache: KVCache,
        tokens: Sequence[int] | Tensor,
        segments: Sequence[tuple[int, int, int]],
        logit_rows: Sequence[int],
        states: Tensor | None,
        carried: Tensor | None,
        tree: NDArray[np.void] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute packed tokens and write their keys and values.

        Args:
            cache: this head's cache.
            tokens: ``[tokens]`` token ids of the target, segment after segment.
            segments: cache slot, start and number of tokens of each request.
            logit_rows: indices of the packed tokens whose results are returned. Within a draft
                they are all tokens.
            states: ``[tokens, size]`` the target's states, in the dtype of the weights; ``None``
                within a draft.
            carried: ``[tokens, hidden]`` float32, what the pass before returned; ``None`` with
                ``states``.
            tree: ``[tokens]`` of ``TREE_TOKEN``; ``None`` if no segment is part of a token tree.

        Returns:
            Logits ``[rows, draft_vocab]`` float32, and what the next token of each draft reads in
            place of states, ``[rows, hidden]`` float32.
        """
        ids, where = self.checked(cache, tokens, segments)
        wanted = np.asarray(logit_rows, dtype=np.int64)
        logits = self.logits_memory(len(wanted))
        call = self.prepare(cache, ids, where, wanted, logits)
        # The kernels read and write the same rows.
        out = torch.empty(len(wanted), self.hidden_size) if carried is None else carried.clone()
        rows = np.arange(len(out))
        call.carried, call.carried_rows = out.data_ptr(), rows.ctypes.data
        if states is not None:
            states = states.contiguous()
            call.states = states.data_ptr()
        if tree is not None:
            call.tree = tree.ctypes.data
        self._library.decode(ctypes.byref(call))
        return logits, out
