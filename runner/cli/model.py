"""Which model this run of the program is about: the file that was named, or the one inside the executable."""

from dataclasses import dataclass, field
from pathlib import Path

from runner.bundle.gguf import read_header
from runner.bundle.header import Header
from runner.bundle.locate import Bundle, current_bundle, find_bundle
from runner.bundle.manifest import Argument
from runner.config import ModelFile
from runner.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """A model whose header was checked, and what comes with it."""

    file: ModelFile
    name: str
    header: Header
    arguments: dict[str, Argument] = field(default_factory=dict)
    chat_template: str | None = None
    bundle: Bundle | None = None

    @property
    def sha256(self) -> str | None:
        """Of the GGUF, as the manifest says; None where there is none."""
        return None if self.bundle is None or self.bundle.manifest is None else self.bundle.manifest.sha256


def choose_model(path: Path | None) -> ChosenModel:
    """The model at `path` (a GGUF, or another executable of ours), else the one inside this executable.

    Its header is checked here, before native code sees it. Raises ConfigError and ModelDamaged.
    """
    return _own_model() if path is None else _model_at(path)


def _own_model() -> ChosenModel:
    bundle = current_bundle()
    if bundle is None:
        raise ConfigError("No model is named, and a source checkout holds none", hint="-m FILE.gguf names one")
    return _model_in(bundle)


def _model_at(path: Path) -> ChosenModel:
    bundle = find_bundle(path)
    if bundle is not None:
        return _model_in(bundle)
    file = ModelFile(str(path.absolute()), 0, path.stat().st_size)
    return ChosenModel(file, path.stem, _checked_header(file))


def _model_in(bundle: Bundle) -> ChosenModel:
    if bundle.model is None or bundle.manifest is None:
        raise ConfigError(f"{bundle.path.name} holds no model", hint="-m FILE.gguf names one")
    manifest = bundle.manifest
    header = _checked_header(bundle.model)
    return ChosenModel(bundle.model, manifest.name, header, dict(manifest.arguments), manifest.chat_template, bundle)


def _checked_header(file: ModelFile) -> Header:
    header = read_header(file)
    header.check_usable()
    return header
