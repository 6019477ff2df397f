"""Audits of servers without a network."""

from draftwise.audit.run import audit
from draftwise.audit.settings import AuditSettings

URL = "http://127.0.0.1:9"


def audited(server, **settings):
    """Audit a :class:`TableServer`."""
    chosen = {"requests": 12_000, "num_prompts": 8, "max_tokens": 24, **settings}
    return audit(AuditSettings(url=URL, **chosen), transport=server)


def statuses(result):
    """The result of each check, by its name."""
    return {finding.check: finding.status.value for finding in result.findings}


def failures(result):
    """The checks that failed, with their smallest cases."""
    return {each.check: each.case for each in result.findings if each.status == "failed"}
