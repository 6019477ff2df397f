"""Compiles the Triton kernels for a GPU that is not there, and prints their shared memory.

Nothing is run. The argument is a compute capability, such as 90.
"""

import sys
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from draftwise.kernels.triton import attention as attention_kernel
from draftwise.kernels.triton.layers import add_norm, gated, rotate_and_store
from draftwise.models.attention_scores import Scores
from draftwise.models.decoder_spec import Activation, NormSpec
from draftwise.models.kv_cache import KVCache
from draftwise.models.layer_shape import LayerShape
from draftwise.models.norm import Norm

CPU = torch.device("cpu")
DTYPE = torch.bfloat16


def compile_only(target):
    """Let every launch of a kernel compile it and print its shared memory."""
    run = JITFunction.run

    def compiled(self, *arguments, grid, warmup, **options):
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        print(self.__name__, kernel.metadata.shared)
        return kernel

    JITFunction.run = compiled
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_current_stream=lambda _: 0,
        )
    )


def main():
    compile_only(GPUTarget("cuda", int(sys.argv[1]), 32))
    hidden = torch.zeros(4, 1152, dtype=DTYPE)
    norm = Norm(NormSpec(torch.randn(1152), 1e-6), DTYPE)
    add_norm(hidden, hidden, None, norm, 1.0)
    add_norm(hidden, hidden, norm, norm, 0.5)
    for activation in Activation:
        gated(hidden, activation)
    attention(32, LayerShape(8, 128, 128), Scores(), None)
    of_head = Norm(NormSpec(torch.randn(256), 1e-6), DTYPE)
    attention(4, LayerShape(1, 256, 256, window=512), Scores(None, 50.0, torch.zeros(4)), of_head)


def attention(heads, shape, scores, norm):
    """The kernels of a layer's attention, with a rotation of three quarters of the heads."""
    cache = KVCache([shape], 2, 4096, DTYPE, CPU, 64)
    for trees in (False, True):
        attention_kernel.compile_for(heads, cache, scores, trees)
    width = (heads + 2 * shape.num_heads) * shape.key_size
    angles = torch.zeros(4, shape.key_size * 3 // 8, dtype=DTYPE)
    qkv, slots = torch.zeros(4, width, dtype=DTYPE), torch.zeros(4, dtype=torch.long)
    rotate_and_store(qkv, angles, angles, norm, norm, slots, *cache.token_slots(0), heads)


if __name__ == "__main__":
    main()
