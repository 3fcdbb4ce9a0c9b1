"""Default arguments in a manifest: names and ranges are those of the options and sampling fields."""

import pytest

from runner.bundle.arguments import parse_arguments, portable_settings
from runner.errors import ConfigError


def test_values_take_the_kind_of_their_option() -> None:
    texts = ("ctx=4096", "temperature=0.2", "top_k=20", "flash-attn=off", "drain-timeout=1.5")
    assert parse_arguments(texts) == {"ctx": 4096, "temperature": 0.2, "top_k": 20, "flash-attn": "off", "drain-timeout": 1.5}
    flags = parse_arguments(("isolate-clients=1", "stateless=False"))
    assert (flags["isolate-clients"], flags["stateless"]) == (True, False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ctx", "name=value"),
        ("ctx=many", "whole number"),
        ("ctx=1", "at least 16"),
        ("slots=257", "1 to 256"),
        ("temperature=nan", "finite"),
        ("top_p=inf", "finite"),
        ("flash-attn=maybe", "auto, on, off"),
        ("stateless=often", "1, true, 0, false"),
        ("stateless=", "1, true, 0, false"),
        ("model=x.gguf", "can travel"),
        ("colour=red", "can travel"),
    ],
)
def test_wrong_argument_is_told_in_one_sentence(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse_arguments((text,))


def test_files_of_this_machine_do_not_travel() -> None:
    assert not {"model", "chat-template", "api-key", "api-key-file", "log-file"} & portable_settings().keys()
