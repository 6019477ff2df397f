"""An audit passes a correct server and notices what is wrong with others."""

import html
import json
import shlex

import httpx
import pytest

from draftwise.audit.greedy import difference
from draftwise.audit.report import report_of, write_audit
from draftwise.audit.rereading import Rereader
from draftwise.audit.settings import AuditSettings
from draftwise.errors import InvalidParameterError, ServerError

from ..levels import exhaustive_unless
from .auditing import URL, audited, failures, statuses
from .table_server import WORDS, TableServer, token_ids

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def right():
    return audited(TableServer())


def test_a_correct_server_passes(right):
    assert not failures(right)
    assert right.status == "passed"
    found = statuses(right)
    assert {check for check, status in found.items() if status == "not audited"} == {
        "structured output",
        "tool calls",
    }
    assert sum(check.startswith("sampling, ") for check in found) == 7
    drafted, accepted = right.drafts
    assert 0 < accepted < drafted
    assert right.num_answers <= 12_000
    seen = right.sampled.seen_bias()
    num_tests, said = len(right.sampled.tests), right.sampled.power(0.03)
    assert f"total variation {seen:.3f} in all {num_tests} distributions would have been" in said
    assert "for 0.95 it takes about" in said
    assert "it takes about" not in right.sampled.power(1.01 * seen)


def test_the_sampling_ends_when_a_bias_would_be_seen():
    result = audited(TableServer(), checks=("sampling",), requests=60_000, bias=0.1)
    assert result.sampled.seen_bias() <= 0.1
    assert result.num_answers < 12_000
    # As many answers as the audit says, and not many more.
    whole, level = result.sampled.whole, result.sampled.level
    needed = whole.num_samples_for(0.1, 0.95, level)
    assert 0.7 * whole.num_samples < needed <= whole.num_samples


def test_tokens_are_counted_in_the_form_of_llama_cpp():
    class LlamaCpp(TableServer):
        def respond(self, request):
            if request.url.path == "/tokenize":
                body = json.loads(request.content)
                tokens = token_ids(body["content"]) if "content" in body else []
                return httpx.Response(200, json={"tokens": tokens})
            return super().respond(request)

    result = audited(LlamaCpp(), checks=("sampling",), requests=4000)
    assert any("logit bias" in check for check in statuses(result))


def test_an_error_that_the_baseline_shares_is_noted():
    """Speculation is not the reason of a wrong count that is there without it."""
    server = TableServer()
    answer = server.answer

    def miscounted(body):
        content = answer(body)
        if body.get("n", 1) > 1 and (both or body.get("speculation") is None):
            content["usage"]["completion_tokens"] //= body["n"]
        return content

    server.answer = miscounted
    for both, status in ((True, "noted"), (False, "failed")):
        result = audited(server, checks=("invariants",), requests=1500)
        found = next(each for each in result.findings if each.check == "n > 1")
        assert (found.status, "counts the tokens" in found.detail) == (status, True)
        assert ("without speculation, too" in found.detail) == both


def test_rounding_of_tokens_that_are_read_in_one_pass_is_no_failure():
    """Verified drafts and prompts round alike, which a baseline shows if it reads its answers."""
    checks = {"checks": ("greedy", "sampling"), "num_prompts": 40, "requests": 20_000}
    result = audited(TableServer(reading=0.05), **checks)
    assert not failures(result)
    assert 0.05 < result.greedy.allowance < 0.5
    assert any(difference(row.reference, row.alone) for row in result.greedy.rows)
    # Without reading, nothing explains the differences.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rereader, "next_token", lambda *given: None)
        blind = audited(TableServer(reading=0.05), **checks)
    assert {"greedy answers", "log-probabilities"} <= set(failures(blind))
    assert blind.greedy.allowance < 1e-3


def test_a_baseline_that_speculates_is_refused():
    """A server ignores the fields that are to switch its speculation off."""
    with pytest.raises(InvalidParameterError, match="do not switch speculation off") as caught:
        audited(TableServer(), off={"seed": 3})
    assert caught.value.field == "off"
    with pytest.raises(InvalidParameterError, match="speculates, too") as caught:
        audited(TableServer(), baseline=URL)
    assert caught.value.field == "baseline"


# What fails, of the checks without chance; and whether the sampling does, if that is certain.
EXPECTED = {
    "residual": (set(), True),
    "lenience": (set(), True),
    "top-p": (set(), True),
    "prefix": ({"the same prefix twice"}, None),
    "stop": ({"stop strings"}, False),
}


@pytest.mark.parametrize("wrong", exhaustive_unless(lambda each: each != "lenience", EXPECTED))
def test_a_wrong_server_fails_with_a_smallest_case(wrong):
    checks, by_sampling = EXPECTED[wrong]
    # 0.9 is a small lenience, which takes more answers to see.
    requests = 60_000 if wrong == "lenience" else 12_000
    server = TableServer(wrong)
    result = audited(server, requests=requests, bias=0.01)
    assert result.status == "failed"
    found = failures(result)
    assert {check for check in found if not check.startswith("sampling")} == checks
    fails = any(check.startswith("sampling") for check in found)
    assert by_sampling is None or fails == by_sampling
    for case in found.values():
        assert case.expected != case.found
        assert len(case.commands) >= 2
        for command in case.commands:
            program, _, url, *_, body = shlex.split(command)
            assert (program, url) == ("curl", f"{URL}/v1/completions")
            assert server.answer(json.loads(body))["choices"]
    if wrong == "top-p":
        assert "sampling, top-p 0.8" in found
        assert "sampling, temperature 1" not in found


def test_the_smallest_case_of_a_stop_string_can_be_repeated():
    server = TableServer("stop")
    case = failures(audited(server, checks=("invariants",)))["stop strings"]
    ours, theirs = (json.loads(shlex.split(command)[-1]) for command in case.commands)
    texts = [server.answer(body)["choices"][0]["text"] for body in (ours, theirs)]
    assert repr(texts[0]) in case.found
    assert repr(texts[1]) in case.expected
    assert texts[0][:-1] == texts[1]


def test_greedy_differences_are_failures_unless_rounding_explains_them(monkeypatch):
    class Greedy(TableServer):
        """Takes the second-best token after three where the best two are this close."""

        margin = 0.0

        def tokens(self, body, context, speculates, rng, drafts):
            tokens = super().tokens(body, context, speculates, rng, drafts)
            if not body.get("temperature", 1.0) and speculates and len(tokens) > 3:
                own = self.logprobs({"logprobs": 4}, context, tokens)["top_logprobs"][3]
                best, second = sorted(own, key=lambda token: -own[token])[:2]
                if own[best] - own[second] < self.margin:
                    tokens = [*tokens[:3], WORDS.index(second)]
            return tokens

    wrong = Greedy()
    wrong.margin = 5.0
    result = audited(wrong, checks=("greedy",))
    found = failures(result)
    assert {"greedy answers", "greedy answers at once"} <= set(found)
    assert "at token 4" in next(f.detail for f in result.findings if f.check == "greedy answers")
    body = json.loads(shlex.split(found["greedy answers"].commands[0])[-1])
    assert body["max_tokens"] == 4
    # The log-probabilities of this baseline vary, and a difference of the same size is explained.
    rounding = Greedy(rounding=0.05)
    rounding.margin = 0.02
    result = audited(rounding, checks=("greedy",), num_prompts=24)
    assert not failures(result)


def test_rounding_of_the_baseline_is_allowed_for():
    assert not failures(audited(TableServer(rounding=0.02)))


def test_without_log_probabilities_the_servers_answers_are_compared():
    result = audited(TableServer(listed=0))
    assert result.status == "passed"
    assert statuses(result)["log-probabilities"] == "not audited"
    assert "log-probabilities" in result.abilities.missing()
    details = [f.detail for f in result.findings if f.check.startswith("sampling, temperature")]
    assert all("against the baseline's answers" in detail for detail in details)
    assert failures(audited(TableServer("residual", listed=0), requests=30_000))


def test_a_law_that_the_baseline_does_not_follow_is_not_used():
    """This server's top-p is its own, with and without speculation."""

    class OwnTopP(TableServer):
        def answer(self, body):
            return super().answer({**body, "top_p": body.get("top_p", 1.0) ** 3})

    result = audited(OwnTopP())
    assert not failures(result)
    details = {f.check: f.detail for f in result.findings}
    assert "the baseline's answers" in details["sampling, top-p 0.8"]
    assert "the exact distribution," in details["sampling, temperature 1"]


def test_filters_that_a_server_applies_by_default_are_switched_off():
    class Defaults(TableServer):
        def answer(self, body):
            return super().answer({"top_p": 0.7, **body})

    result = audited(Defaults())
    assert not failures(result)
    details = {f.check: f.detail for f in result.findings}
    assert "the exact distribution," in details["sampling, temperature 1"]


def test_a_server_that_drafts_nothing_is_not_audited():
    result = audited(TableServer(num_drafted=0), requests=3000)
    assert not failures(result)
    assert result.status == "not audited"


def test_the_limits_hold():
    for requests in (250, 1000):
        server = TableServer()
        result = audited(server, requests=requests)
        assert server.num_requests <= result.num_answers <= requests
        assert statuses(result)["sampling"] == "not audited"
    result = audited(TableServer(), minutes=0.01, requests=10**6)
    assert result.num_answers < 10**6


def test_the_report_has_everything_and_no_key(tmp_path, right):
    report = report_of(right, "draftwise audit URL")
    write_audit(tmp_path, report)
    read = json.loads((tmp_path / "audit.json").read_text())
    assert read["status"] == "passed"
    assert "api_key" not in read["settings"]
    assert len(read["findings"]) == len(right.findings)
    tests = read["sampling"]["tests"]
    assert all(sum(text["num_seen"] for text in test["texts"]) for test in tests)
    page = html.unescape((tmp_path / "audit.html").read_text())
    assert all(finding.check in page for finding in right.findings)
    wrong = audited(TableServer("stop"), checks=("invariants",))
    write_audit(tmp_path, report_of(wrong, "draftwise audit <URL>"))
    page = (tmp_path / "audit.html").read_text()
    assert "draftwise audit &lt;URL&gt;" in page
    assert "curl -s" in page
    assert page.index("The audited server:") < page.index("The baseline:")
    assert page.index("stop strings: the smallest case") < page.index("<h2>Checks</h2>")


def test_there_must_be_a_baseline():
    class Other(TableServer):
        def respond(self, request):
            if request.url.path == "/v1/speculation":
                return httpx.Response(404)
            if f"{request.url}".startswith(plain) and request.content:
                body = json.loads(request.content) | {"speculation": {"enabled": False}}
                request = httpx.Request("POST", request.url, json=body)
            return super().respond(request)

    plain = "http://127.0.0.1:8/"
    with pytest.raises(InvalidParameterError, match="no known field") as refused:
        audited(Other())
    assert refused.value.field == "baseline"
    off = {"speculation": {"enabled": False}}
    assert audited(Other(), off=off, requests=3000).status == "passed"
    result = audited(Other(), baseline=f"{plain}v1", requests=3000)
    assert f"{result.baseline}/" == plain


def test_a_server_that_does_not_respond_is_an_error():
    def refuse(request):
        raise httpx.ConnectError("refused")

    with pytest.raises(ServerError, match="does not list its models"):
        audited(httpx.MockTransport(refuse))
    empty = httpx.MockTransport(lambda request: httpx.Response(200, json={"data": []}))
    with pytest.raises(ServerError, match="lists no model"):
        audited(empty)


def test_a_request_that_ends_the_server_is_a_failure_with_its_command():
    """vLLM 0.32 on a CPU fails so, with a draft model and top-k."""

    class Mortal(TableServer):
        is_alive = True

        def respond(self, request):
            if request.url.path == "/v1/completions":
                body = json.loads(request.content)
                speculates = body.get("speculation", {}).get("enabled", True)
                self.is_alive &= not (speculates and body.get("top_k") == 1)
            if not self.is_alive:
                return httpx.Response(500, json={"error": {"message": "engine is dead"}})
            return super().respond(request)

    result = audited(Mortal())
    assert result.status == "failed"
    (case,) = failures(result).values()
    assert json.loads(shlex.split(case.commands[0])[-1])["top_k"] == 1
    assert case.found == "500: engine is dead"


def test_several_greedy_answers_may_be_refused():
    class OneAnswer(TableServer):
        def respond(self, request):
            body = json.loads(request.content or "{}")
            if body.get("n", 1) > 1 and not body.get("temperature", 1.0):
                return httpx.Response(400, json={"error": {"message": "n must be 1"}})
            return super().respond(request)

    result = audited(OneAnswer(), checks=("invariants",))
    (detail,) = (finding.detail for finding in result.findings if finding.check == "n > 1")
    assert statuses(result)["n > 1"] == "passed"
    assert "n must be 1" in detail


def test_only_this_machine_is_asked_unless_a_host_is_named():
    for url in ("http://127.0.0.1:1/v1", "http://localhost", "http://[::1]:8", "http://127.9.9.9"):
        assert AuditSettings(url).url == url.removesuffix("/v1")
    for url in ("http://example.org", "https://10.0.0.1:8000", "http://localhost.example.org"):
        with pytest.raises(InvalidParameterError, match="--allow-host"):
            AuditSettings(url)
        with pytest.raises(InvalidParameterError, match="--allow-host"):
            AuditSettings(URL, baseline=url)
    assert AuditSettings("http://gpu:8000", allow_hosts=("gpu",)).url == "http://gpu:8000"


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"url": "127.0.0.1:8000"}, "url"),
        ({"url": "http://[::1"}, "url"),
        ({"url": "http://127.0.0.1:x"}, "url"),
        ({"checks": ("speed",)}, "checks"),
        ({"checks": ()}, "checks"),
        ({"requests": 10}, "requests"),
        ({"minutes": 0}, "minutes"),
        ({"concurrency": 0}, "concurrency"),
        ({"baseline": URL, "baseline_model": "zoo:target"}, "baseline_model"),
        ({"baseline": URL, "off": {}}, "off"),
    ],
)
def test_invalid_settings_are_refused(settings, field):
    with pytest.raises(InvalidParameterError) as refused:
        AuditSettings(**{"url": URL, **settings})
    assert refused.value.field == field
