"""Whatever the schema allows, and much that it does not, is answered, and never by a 5xx."""

from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok

from saguaro import LLM
from saguaro.serve.http.limits import ServerLimits
from tests.serve.http.driver import running

MODES = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
EXAMPLES = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.filterwarnings("ignore")  # schemathesis' own dependencies warn of each other
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_no_request_makes_the_server_fail(llm: LLM, mode: schemathesis.GenerationMode) -> None:
    statuses: Counter[int] = Counter()
    with running(llm, ServerLimits(max_n=2)) as server:
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        for found in schema.get_all_operations():
            assert isinstance(found, Ok)
            operation = found.ok()
            if mode is schemathesis.GenerationMode.NEGATIVE and operation.method == "get":
                continue  # nothing about it can be wrong

            @EXAMPLES
            @given(case=operation.as_strategy(generation_mode=mode))
            def ask(case: schemathesis.Case[Any]) -> None:
                answer = case.call(timeout=30)
                case.validate_response(answer, checks=[not_a_server_error])
                assert answer.status_code != 422
                statuses[answer.status_code] += 1

            ask()
        assert server.client.get("/health").status_code == 200
    assert statuses.total() >= 100
    assert statuses[400] > 0, statuses
