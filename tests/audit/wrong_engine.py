"""An engine's process in which a rejected token is replaced by one from p, not the residual."""

from draftwise.core.rejection import accept as right_accept
from draftwise.core.rejection import sample
from draftwise.engine import acceptance
from draftwise.serving import worker


def run(connection, settings):
    """Run an engine with this rule, in place of :func:`draftwise.serving.worker.run`."""
    acceptance.library_for = lambda device: None
    acceptance.accept = from_the_target
    worker.run(connection, settings)


def from_the_target(p, proposals, tokens, lengths, uniforms, final, lenience, method, *rest):
    accepted = right_accept(p, proposals, tokens, lengths, uniforms, final, None, "token", *rest)
    row = (lengths + 1).cumsum(0) - (lengths + 1) + accepted.num_accepted
    return accepted._replace(next_tokens=sample(p[row], final))
