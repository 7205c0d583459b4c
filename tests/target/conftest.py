"""A random model, what it says after some prompts, and the whole texts."""

import pytest

from saguaro.model.transformer import Transformer
from tests.target.test_round import new_model, new_requests, true_output


@pytest.fixture(scope="module")
def model() -> Transformer:
    return new_model(seed=0)


@pytest.fixture(scope="module")
def truth(model: Transformer) -> list[list[int]]:
    """The outputs of new_requests()."""
    return [true_output(model, request) for request in new_requests()]


@pytest.fixture(scope="module")
def texts(truth: list[list[int]]) -> list[list[int]]:
    """Prompts and outputs of new_requests()."""
    return [[*request.prompt, *output] for request, output in zip(new_requests(), truth, strict=True)]
