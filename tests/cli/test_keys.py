"""The key file: a key a line, and what its owner may do."""

from pathlib import Path

import pytest

from runner.cli.keys import check_api_keys, read_key_file
from runner.config import ApiKey, ServerConfig
from runner.errors import ConfigError


def read(path: Path, text: str) -> tuple[ApiKey, ...]:
    path.write_text(text, encoding="utf-8")
    return read_key_file(path)


def test_key_may_have_attributes_in_any_order(tmp_path: Path) -> None:
    text = "# ours\n\nsk-1\n  sk-2 name=team-a weight=2 tier=high admin  # the boss\nsk-3 admin weight=0.5 name=B.2_x\nsk-4 tier=batch\n"
    assert read(tmp_path / "keys", text) == (
        ApiKey.plain("sk-1"),
        ApiKey(secret="sk-2", name="team-a", weight=2.0, best_tier="high", is_admin=True),
        ApiKey(secret="sk-3", name="B.2_x", weight=0.5, is_admin=True),
        ApiKey(secret="sk-4", name=ApiKey.plain("sk-4").name, best_tier="batch"),
    )


def test_plain_key_has_a_name_that_does_not_tell_it() -> None:
    key = ApiKey.plain("secret")
    assert (key.name, key.weight, key.best_tier, key.is_admin) == ("key:2bb80d53", 1.0, "normal", False)


BAD = [
    ("sk name=", "'name' is ''"),
    ("sk name=a/b", "'name' is 'a/b'"),
    ("sk name=" + "x" * 65, "'name' is"),
    ("sk weight=x", "'weight' is 'x'"),
    ("sk weight=nan", "'weight' is 'nan'"),
    ("sk weight=0", "'weight' is '0'"),
    ("sk weight=-1", "'weight' is '-1'"),
    ("sk weight=101", "'weight' is '101'"),
    ("sk tier=best", "'tier' is 'best'"),
    ("sk tier=HIGH", "'tier' is 'HIGH'"),
    ("sk admin=yes", "'admin' takes no value"),
    ("sk colour=red", "'colour=red' is no attribute"),
    ("sk two", "'two' is no attribute"),
    ("sk tier=low tier=high", "'tier' is given twice"),
    ("clé", "printable ASCII"),
    ("first", "this key was there before"),
    ("sk name=one weight=3", "'weight' differs"),
]


@pytest.mark.parametrize(("line", "what"), BAD)
def test_bad_line_is_an_error_that_names_file_line_and_attribute(tmp_path: Path, line: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path / "keys", f"# keys\nfirst name=one\n{line}\n")
    assert caught.value.message.startswith(f"The API key file {tmp_path / 'keys'}, line 3: ")
    assert what in caught.value.message
    assert "sk " not in caught.value.message


def test_keys_of_one_name_are_one_client(tmp_path: Path) -> None:
    assert {key.name for key in read(tmp_path / "keys", "old name=a\nnew name=a\n")} == {"a"}


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n"])
def test_file_without_a_key_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="holds no key"):
        read(tmp_path / "keys", text)


def test_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key_file(tmp_path / "missing")


@pytest.mark.parametrize("key", ["", "a b", "clé", "a\tb"])
def test_option_that_is_no_key_is_an_error(key: str) -> None:
    with pytest.raises(ConfigError, match="printable ASCII"):
        check_api_keys(("fine", key))


def test_file_counts_where_a_key_is_given_twice() -> None:
    named = ApiKey(secret="b", name="team")
    assert ServerConfig(api_keys=("a", "b"), file_keys=(named,)).keys == (ApiKey.plain("a"), named)
