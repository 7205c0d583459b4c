"""`oneOf` is compiled where its alternatives exclude each other, and refused where a value might match two."""

import json
from typing import Any

import pytest

from saguaro.config import Structured
from saguaro.errors import ConfigError
from saguaro.model.grammar import Grammars
from saguaro.model.one_of import settle
from saguaro.model.tiny import EOS_ID, tiny_tokenizer
from saguaro.model.tokenizer import Tokenizer

KINDS = {
    "cat": {"type": "object", "properties": {"kind": {"const": "cat"}, "n": {"type": "integer"}}, "required": ["kind"]},
    "dog": {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]},
}


@pytest.mark.parametrize(
    "ways",
    [
        [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],  # as pydantic writes a tagged union
        [{"type": "null"}, {"$ref": "#/$defs/cat"}],
        [{"enum": ["a", "b"]}, {"const": "c"}, {"type": ["object", "null"]}],
    ],
)
def test_one_of_several_that_exclude_each_other(ways: list[Any]) -> None:
    settled = json.loads(settle(json.dumps({"properties": {"pet": {"oneOf": ways}}, "$defs": KINDS})))
    assert settled["properties"]["pet"] == {"anyOf": ways}


@pytest.mark.parametrize(
    "ways",
    [
        [{"type": "number"}, {"type": "integer"}],
        [{"const": 1}, {"const": 1.0}],
        [{"type": "string", "maxLength": 5}, {"type": "string", "minLength": 3}],
        [{"$ref": "#/$defs/cat"}, {"type": "object", "required": ["name"]}],
        [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/cat"}],
        [{"$ref": "#/$defs/nobody"}, {"type": "null"}],
        [{"$ref": "#"}, {"const": "x"}],
        [True, {"const": "x"}],
    ],
)
def test_one_of_several_that_may_both_match_stays(ways: list[Any]) -> None:
    schema = {"properties": {"pet": {"oneOf": ways}}, "$defs": KINDS, "const": {"oneOf": [{"type": "null"}]}}
    assert json.loads(settle(json.dumps(schema))) == schema


def test_a_tagged_union_is_compiled() -> None:
    grammars = Grammars(lambda: Tokenizer(tiny_tokenizer(), "tiny"), 264, [EOS_ID])
    pets = [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]
    grammars.start(Structured(json={"oneOf": pets, "$defs": KINDS}))
    with pytest.raises(ConfigError, match="oneOf"):
        grammars.start(Structured(json={"oneOf": [pets[0], pets[0]], "$defs": KINDS}))
    approximate = {"oneOf": [pets[0], pets[0]], "$defs": KINDS, "x-guidance": {"coerce_one_of": True}}
    grammars.start(Structured(json=approximate))
