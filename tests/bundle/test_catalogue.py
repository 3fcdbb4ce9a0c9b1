"""models.toml: what an entry may say, and that the tracked file says it."""

from pathlib import Path

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runner.bundle.arguments import parse_arguments
from runner.bundle.catalogue import CatalogueEntry, LocalFile, Url, WheelMember, find_entry, parse_origin, read_catalogue
from runner.errors import ConfigError

TRACKED = Path(__file__).resolve().parent.parent.parent / "models.toml"
ENTRY = f"""
[small]
description = "A model"
source = ["small.gguf"]
sha256 = "{"0" * 64}"
size = 10
license = "MIT"
license_text = "LICENSE"
context = 512
"""


def catalogue(tmp_path: Path, text: str) -> dict[str, CatalogueEntry]:
    (tmp_path / "models.toml").write_text(text)
    return read_catalogue(tmp_path / "models.toml")


def test_sources_are_files_of_wheels_https_addresses_and_paths() -> None:
    assert parse_origin("pypi:some-model==1.0:some_model/data/x.gguf") == WheelMember("some-model", "1.0", "some_model/data/x.gguf")
    assert parse_origin("https://example.org/x.gguf") == Url("https://example.org/x.gguf")
    assert parse_origin("models/x.gguf") == LocalFile(Path("models/x.gguf"))


@pytest.mark.parametrize("text", ["http://example.org/x.gguf", "ftp://x", "pypi:name:member", "pypi:name==1", ""])
def test_other_sources_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no source"):
        parse_origin(text)


@pytest.mark.parametrize(
    "change",
    [
        ("size = 10", "size = -1"),
        ("context = 512", ""),
        ("0" * 64, "abc"),
        ('license = "MIT"', 'licence = "MIT"'),
        ("[small]", "[Not-A-Name]"),
        ("=", "=["),
    ],
    ids=["size", "no context", "hash", "unknown key", "name", "no TOML"],
)
def test_wrong_entry_is_named(tmp_path: Path, change: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"models\.toml"):
        catalogue(tmp_path, ENTRY.replace(*change))


def test_unknown_model_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    entries = catalogue(tmp_path, ENTRY)
    assert find_entry(entries, "small") == ("small", entries["small"])
    with pytest.raises(ConfigError, match="'large'; it has small"):
        find_entry(entries, "large")


def test_tracked_catalogue_has_one_default_and_arguments_that_can_travel() -> None:
    entries = read_catalogue(TRACKED)
    assert [name for name, entry in entries.items() if entry.default] == ["smollm2-135m"]
    for entry in entries.values():
        assert parse_arguments(tuple(f"{name}={value}" for name, value in entry.arguments.items())) == entry.arguments


USER, ASSISTANT, SYSTEM = ({"role": role, "content": role[0]} for role in ("user", "assistant", "system"))


def render(name: str, messages: list[dict[str, str]]) -> str:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    template = read_catalogue(TRACKED)[name].chat_template
    assert template is not None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        messages=messages, bos_token="<bos>", add_generation_prompt=True, raise_exception=raise_exception
    )


def test_gemma_template_writes_the_published_turns() -> None:
    turn = "<bos><start_of_turn>user\nu<end_of_turn>\n<start_of_turn>model\n"
    assert render("gemma3-270m", [USER]) == turn
    assert render("gemma3-270m", [USER, ASSISTANT, USER]) == turn + "a<end_of_turn>\n" + turn.removeprefix("<bos>")
    assert render("gemma3-270m", [SYSTEM, USER]) == turn.replace("\nu<", "\ns\n\nu<")


@pytest.mark.parametrize(
    "messages", [[ASSISTANT], [USER, USER], [USER, SYSTEM], [SYSTEM, ASSISTANT], [USER, {"role": "tool", "content": "t"}]]
)
def test_gemma_template_raises_on_wrong_role_order(messages: list[dict[str, str]]) -> None:
    with pytest.raises(jinja2.TemplateError, match="must alternate"):
        render("gemma3-270m", messages)


def test_smollm2_template_adds_a_system_message_where_none_came() -> None:
    turn = "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    assert (
        render("smollm2-135m", [USER]) == f"<|im_start|>system\nYou are a helpful assistant who answers in plain English.<|im_end|>\n{turn}"
    )
    own = {"role": "system", "content": "Be brief."}
    assert render("smollm2-135m", [own, USER]) == f"<|im_start|>system\nBe brief.<|im_end|>\n{turn}"
