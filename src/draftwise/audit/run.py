"""An audit from its settings to its findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import httpx

from draftwise.audit.abilities import Abilities, abilities_of, common
from draftwise.audit.budget import Budget, SpentError
from draftwise.audit.client import Model, Server
from draftwise.audit.context import Context
from draftwise.audit.ends import ROW_CHECKS
from draftwise.audit.findings import Case, Finding, Status, failed, not_audited
from draftwise.audit.formats import STRUCTURED, TOOLS, structured_finding, tool_finding
from draftwise.audit.greedy import Greedy, ask_greedily, greedy_findings
from draftwise.audit.prefixes import PREFIXES, prefix_finding
from draftwise.audit.prompts import audit_prompts
from draftwise.audit.sampling import Sampled, sample, sampling_findings
from draftwise.audit.settings import GREEDY, INVARIANTS, SAMPLING, AuditSettings
from draftwise.audit.several import SEEDS, SEVERAL, seed_finding, several_finding
from draftwise.audit.speculation import DraftCounter, engine_of, fields_without_speculation
from draftwise.errors import InvalidParameterError, ServerError

_SECONDS = 60.0
RESPONSES = "responses"
Progress = Callable[[str, int], None]


@dataclass(frozen=True)
class Audit:
    """Results of an audit.

    Attributes:
        settings: its settings.
        model: name of the model.
        engine: engine of the server.
        baseline: name of the baseline.
        abilities: what both servers can do.
        findings: results of the checks.
        greedy: the greedy answers.
        sampled: the tests of the sampling; ``None`` if they were not asked for.
        drafts: verified and accepted drafted tokens; ``None`` if the server does not say.
        num_answers: answers of both servers.
        seconds: duration.
    """

    settings: AuditSettings
    model: str
    engine: str
    baseline: str
    abilities: Abilities
    findings: tuple[Finding, ...]
    greedy: Greedy
    sampled: Sampled | None
    drafts: tuple[int, int] | None
    num_answers: int
    seconds: float

    @property
    def missing(self) -> list[str]:
        """What not both servers can do; empty if the audit ended before that was known."""
        return self.abilities.missing() if self.greedy.rows else []

    @property
    def status(self) -> Status:
        """Failed if a check failed; passed if checks of something that was drafted passed."""
        statuses = {finding.status for finding in self.findings}
        if Status.FAILED in statuses:
            return Status.FAILED
        nothing_drafted = self.drafts is not None and not self.drafts[0]
        if nothing_drafted or Status.PASSED not in statuses:
            return Status.NOT_AUDITED
        return Status.PASSED


def audit(
    settings: AuditSettings,
    on_progress: Progress = lambda what, num_answers: None,
    baseline_options: Mapping[str, Any] | None = None,
    transport: httpx.BaseTransport | None = None,
) -> Audit:
    """Audit a server.

    Args:
        settings: what is audited, and within which limits.
        on_progress: called with what is being checked and the number of answers so far.
        baseline_options: arguments of :class:`draftwise.LLM` for ``baseline_model``.
        transport: in place of the network.

    Raises:
        InvalidParameterError: there is no baseline.
        PromptError: the prompts cannot be read.
        ServerError: a server does not respond.
    """
    prompts = audit_prompts(settings.prompts)
    budget = Budget(settings.requests, settings.minutes * _SECONDS, on_progress)
    budget.begin("connecting")

    def connected(url: str, model: str | None, fields: Mapping[str, Any] | None = None) -> Server:
        return Server(
            url,
            budget,
            model=model,
            api_key=settings.api_key,
            chat=settings.chat,
            fields=fields,
            transport=transport,
        )

    server = connected(settings.url, settings.model)
    try:
        baseline = _baseline(settings, server, budget, connected, baseline_options or {})
        try:
            return _audited(settings, server, baseline, prompts, budget)
        finally:
            baseline.close()
    finally:
        server.close()


def _baseline(
    settings: AuditSettings,
    server: Server,
    budget: Budget,
    connected: Callable[..., Server],
    options: Mapping[str, Any],
) -> Model:
    if settings.baseline is not None:
        return connected(settings.baseline, None)
    if settings.baseline_model is not None:
        from draftwise.audit.local import LocalModel
        from draftwise.llm import LLM

        budget.begin(f"loading {settings.baseline_model}")
        return LocalModel(LLM(settings.baseline_model, None, **options), budget, settings.chat)
    off = settings.off
    if off is None:
        off = fields_without_speculation(server)
    if off is None:
        raise InvalidParameterError(
            "baseline",
            "this server has no known field that switches its speculation off; name a server of "
            "the same model without speculation, a model to load with --baseline-model, or the "
            "fields of a request that switch it off with --off",
        )
    return connected(settings.url, server.model, off)


def _audited(
    settings: AuditSettings, server: Server, baseline: Model, prompts: list[str], budget: Budget
) -> Audit:
    counter = DraftCounter(server)
    findings: list[Finding] = []
    both, greedy, sampled = Abilities(), Greedy(), None
    try:
        budget.begin("asking what the servers can do")
        own, theirs = abilities_of(server), abilities_of(baseline)
        both = common(own, theirs)
        own = replace(own, has_n=both.has_n)
        context = Context(server, baseline, both, own, prompts, settings, budget)
        budget.begin("greedy answers")
        greedy = ask_greedily(context)
        _check_baseline(settings, baseline)
        if GREEDY in settings.checks:
            findings += greedy_findings(context, greedy)
        if INVARIANTS in settings.checks:
            findings += _invariants(context, greedy)
        if SAMPLING in settings.checks:
            with _refusals(findings, "sampling"):
                sampled = sample(context)
                findings += sampling_findings(context, sampled)
    except SpentError:
        raise InvalidParameterError("minutes", "is over before anything was checked") from None
    except ServerError as error:
        if error.field != server.name or not error.command:
            raise
        findings.append(_failure(RESPONSES, error))
    return Audit(
        settings=settings,
        model=server.model,
        engine=engine_of(server),
        baseline=baseline.name,
        abilities=both,
        findings=tuple(findings),
        greedy=greedy,
        sampled=sampled,
        drafts=counter.count(),
        num_answers=budget.num_asked,
        seconds=budget.seconds,
    )


def _check_baseline(settings: AuditSettings, baseline: Model) -> None:
    """Refuse a baseline that speculates: an audit against it would find nothing.

    Raises:
        InvalidParameterError: tokens were drafted for its answers.
    """
    if not baseline.num_drafted:
        return
    own = settings.baseline is None
    what = (
        "these fields do not switch speculation off, as servers ignore fields that they do not know"
        if own
        else "this server speculates, too"
    )
    raise InvalidParameterError(
        "off" if own else "baseline",
        f"{what}: it drafted {baseline.num_drafted} tokens; start a server of the same model "
        "without speculation and name it with --baseline",
    )


def _failure(check: str, error: ServerError) -> Finding:
    """A request that the audited server should have answered."""
    case = Case((error.command,), "an answer", error.message)
    return failed(check, f"the server failed: {error.message}", case)


def _invariants(context: Context, greedy: Greedy) -> list[Finding]:
    rows = greedy.agreed()
    checks: list[tuple[str, Callable[[], Finding]]] = [
        (name, partial(check, context, rows)) for name, check in ROW_CHECKS
    ]
    checks += [
        (SEVERAL, partial(several_finding, context, rows)),
        (SEEDS, partial(seed_finding, context)),
        (PREFIXES, partial(prefix_finding, context, greedy)),
        (STRUCTURED, partial(structured_finding, context, greedy)),
        (TOOLS, partial(tool_finding, context, greedy)),
    ]
    findings: list[Finding] = []
    for name, check in checks:
        context.budget.begin(name)
        with _refusals(findings, name):
            findings.append(check())
    return findings


@contextmanager
def _refusals(findings: list[Finding], check: str) -> Iterator[None]:
    """Note a check that a server refuses, or for which the limit leaves no answers.

    Raises:
        ServerError: a server does not respond any more.
    """
    try:
        yield
    except SpentError:
        findings.append(not_audited(check, "the limit of requests or time was reached"))
    except ServerError as error:
        if error.status is None:
            raise
        if error.is_failure:
            findings.append(_failure(check, error))
        else:
            findings.append(not_audited(check, f"{error.field} refused a request: {error.message}"))
