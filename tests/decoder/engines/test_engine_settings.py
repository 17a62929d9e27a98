"""The settings of engines: those that a service has, too, mean the same there."""

from pathlib import Path

import pytest
from pydantic import BaseModel

from decoder.drafters.options import DraftOptions
from decoder.engines.engine_options import EngineSettings, resolve_settings
from retriever.errors import SettingsError
from retriever.operations.settings import EmbeddedSettings, Settings


def stated(schema: type[BaseModel], name: str) -> tuple[object, ...]:
    field = schema.model_fields[name]
    return field.annotation, field.default, field.description, str(field.metadata)


def test_what_engines_and_services_share_is_stated_once() -> None:
    shared = EmbeddedSettings.model_fields
    assert {"index", "phrases", "state", "durability", "refresh"} < shared.keys()
    for schema in (EngineSettings, Settings):
        for name in shared:
            assert stated(schema, name) == stated(EmbeddedSettings, name)


def test_engines_and_decoders_say_alike_which_services_draft() -> None:
    for name in ("index", "phrases", "server", "credentials"):
        assert stated(EngineSettings, name) == stated(DraftOptions, name)


def test_an_engine_may_have_a_server_and_an_index_for_while_it_is_away() -> None:
    found = resolve_settings({"server": ["a:1"], "index": ["i"]}, {}, "here")
    assert (found.server, found.index) == (["a:1"], [Path("i")])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"adress": "a"}, "here: adress: there is no such setting"),
        ({"budget_nodes": 257}, "here: budget_nodes: Input should be less than or equal to 256"),
        ({"deadline_s": 0}, "here: deadline_s: Input should be greater than 0"),
    ],
)
def test_what_an_engine_is_told_wrongly_is_named(given: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        resolve_settings(given, {}, "here")
