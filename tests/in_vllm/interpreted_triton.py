"""vLLM's second model runner on a machine for which Triton compiles nothing.

Its kernels are then interpreted: slowly, and with the same results. What is mended
here is Triton's interpreter; of vLLM nothing but a function of the device's library.
"""

import os
import types


def switch_on():
    """Let vLLM take Triton for usable; before either is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton import backends
    from triton.runtime import interpreter

    driver = types.SimpleNamespace(is_active=lambda: True)
    backends.backends["cpu"] = types.SimpleNamespace(driver=driver)
    builder = interpreter.InterpreterBuilder
    for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
        setattr(builder, name, _with_booleans(getattr(builder, name), place))
    _make_ready_once(interpreter)


def give_a_logarithm():
    """To a kernel of vLLM, which is imported by now: the interpreter knows no device's library."""
    from triton import language as tl
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    rejection_sampler_utils.tldevice = types.SimpleNamespace(log1p=lambda x: tl.log(1.0 + x))


def _with_booleans(operation, place):
    """The interpreter computes some masks as integers, and then does not take them."""

    def mended(self, *arguments):
        mask = arguments[place]
        mask.data = mask.data.astype(bool)
        return operation(self, *arguments)

    return mended


def _make_ready_once(interpreter):
    """The interpreter makes the language ready for each call of a function, and that takes long.

    Once for each function is enough while a kernel runs: at its end all is as it was.
    """
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
