"""Cross-origin requests, and model names with slashes."""

import openai
import pytest

from draftwise.errors import InvalidParameterError
from draftwise.serving.settings import ServerSettings

from .conftest import ZOO
from .running import running

pytestmark = pytest.mark.slow

PAGE = "https://page.example"


@pytest.fixture(scope="module")
def shared():
    """A server that allows one origin, with an API key and a model name with slashes."""
    settings = ServerSettings(
        allowed_origins=(PAGE,),
        api_keys=("key",),
        max_body_bytes=1000,
        served_model_name="org/some model",
    )
    with running(ZOO, settings) as server:
        yield server


def allowed(response):
    return response.headers.get("access-control-allow-origin")


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        ({"prompt": "a", "max_tokens": 1}, {"Authorization": "Bearer key"}, 200),
        ({"prompt": "a", "max_tokens": 1}, {}, 401),
        ({"prompt": "a" * 2000}, {"Authorization": "Bearer key"}, 413),
        ({"prompt": 5}, {"Authorization": "Bearer key"}, 400),
    ],
)
def test_an_allowed_origin_can_read_answers_and_errors(shared, body, headers, status):
    with shared.client(headers=headers) as client:
        for origin, expected in ((PAGE, PAGE), ("https://other.example", None)):
            answer = client.post("/v1/completions", json=body, headers={"Origin": origin})
            assert answer.status_code == status
            assert allowed(answer) == expected


def test_the_key_is_checked_before_the_body_is_read(shared):
    kinds = {"Content-Type": "application/json"}, {"Content-Type": "text/plain"}
    path = "/v1/chat/completions"
    with shared.client() as client:
        for headers in (*kinds, {**kinds[0], "Authorization": "Basic key"}):
            answer = client.post(path, content=b"{", headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["param"] == "api_key"
        known = {"Authorization": "bearer key"}
        assert client.post(path, content=b"{", headers=kinds[0] | known).status_code == 400
        assert client.post(path, content=b"{", headers=kinds[1] | known).status_code == 415


def test_preflight_requests_are_answered(shared):
    asked = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    with shared.client() as client:
        answer = client.options("/v1/chat/completions", headers=asked)
        assert answer.status_code == 200
        assert allowed(answer) == PAGE
        assert "authorization" in answer.headers["access-control-allow-headers"]
        other = client.options(
            "/v1/chat/completions", headers=asked | {"Origin": "https://other.example"}
        )
        assert other.status_code == 400


def test_cross_origin_requests_are_denied_by_default(client):
    answer = client.get("/v1/models", headers={"Origin": PAGE})
    assert answer.status_code == 200
    assert allowed(answer) is None


def test_invalid_origins_are_refused():
    for origin in ("page.example", "https://page.example/path", "", "https://"):
        with pytest.raises(InvalidParameterError, match="allowed_origins"):
            ServerSettings(allowed_origins=(origin,))


def test_a_model_is_found_by_its_quoted_name(shared):
    with shared.client(headers={"Authorization": "Bearer key"}) as client:
        for name in ("org/some model", "org%2Fsome%20model", "org/some%20model"):
            found = client.get(f"/v1/models/{name}")
            assert found.status_code == 200
            assert found.json() == client.get("/v1/models").json()["data"][0]


def test_openai_client_retrieves_a_model(server, shared):
    for each, name in ((server, "zoo:target"), (shared, "org/some model")):
        with openai.OpenAI(base_url=f"{each.url}/v1", api_key="key") as tools:
            assert [model.id for model in tools.models.list()] == [name]
            assert tools.models.retrieve(name).id == name
            with pytest.raises(openai.NotFoundError) as refused:
                tools.models.retrieve("org/other")
            assert refused.value.param == "model"
            assert "'org/other'" in refused.value.message
