"""vLLM's second model runner on a machine without a GPU.

Its Triton kernels are interpreted, slowly but with the same results. The patches are to Triton's
interpreter, and to one device function in vLLM.
"""

import os
import types


def enable():
    """Make vLLM accept interpreted Triton. Must run before either is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton import backends
    from triton.runtime import interpreter

    driver = types.SimpleNamespace(is_active=lambda: True)
    backends.backends["cpu"] = types.SimpleNamespace(driver=driver)
    builder = interpreter.InterpreterBuilder
    for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
        setattr(builder, name, _with_boolean_mask(getattr(builder, name), place))
    patch_language_once()


def add_logarithm():
    """Replace the device function ``log1p`` in a kernel of vLLM, as the interpreter has none.

    Must run after vLLM is imported.
    """
    from triton import language as tl
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    rejection_sampler_utils.tldevice = types.SimpleNamespace(log1p=lambda x: tl.log(1.0 + x))


def _with_boolean_mask(operation, place):
    """Convert a mask to booleans: the interpreter computes some as integers, but rejects those."""

    def patched(self, *arguments):
        mask = arguments[place]
        mask.data = mask.data.astype(bool)
        return operation(self, *arguments)

    return patched


def patch_language_once():
    """Patch Triton's language once per function and kernel instead of at every call, for speed.

    At the end of a kernel the interpreter restores the language.
    """
    from triton.runtime import interpreter

    ready = set()
    run = interpreter.GridExecutor.__call__

    def run_kernel(self, *given, **named):
        ready.clear()
        return run(self, *given, **named)

    def call(self, *given, **named):
        if self.fn not in ready:
            interpreter._patch_lang(self.fn)
            ready.add(self.fn)
        return self.rewrite()(*given, **named)

    interpreter.GridExecutor.__call__ = run_kernel
    interpreter.InterpretedFunction.__call__ = call
