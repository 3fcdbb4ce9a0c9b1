"""Fixtures that need a real model: fetched once, as models.toml says, into the checkout's cache."""

from pathlib import Path

import pytest

from build.fetch import Cache, fetch_model
from runner.bundle.catalogue import find_entry, read_catalogue
from runner.config import EngineConfig, ModelFile
from tests.llama.recurrent import write_hybrid_gguf, write_recurrent_gguf, write_window_gguf

ROOT = Path(__file__).resolve().parent.parent


def model_path(name: str) -> Path:
    """A model of models.toml, downloaded and verified where it is not there yet."""
    found, entry = find_entry(read_catalogue(ROOT / "models.toml"), name)
    return fetch_model(found, entry, Cache(root=ROOT / ".cache", base=ROOT))


def engine_config(path: Path, *, n_slots: int, n_ctx_slot: int, n_batch: int = 512, chat_template: str | None = None) -> EngineConfig:
    """A config for a plain GGUF."""
    return EngineConfig(
        model=ModelFile(str(path), 0, path.stat().st_size),
        model_name=path.stem,
        n_slots=n_slots,
        n_ctx_slot=n_ctx_slot,
        n_batch=n_batch,
        chat_template=chat_template,
    )


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2 135M Instruct, in the form that ships."""
    return model_path("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M (base): sliding windows of 512, SPM vocabulary."""
    return model_path("gemma3-270m")


@pytest.fixture(scope="session")
def gemma3_template() -> str:
    """The chat template that models.toml supplies for Gemma 3."""
    template = find_entry(read_catalogue(ROOT / "models.toml"), "gemma3-270m")[1].chat_template
    assert template is not None
    return template


@pytest.fixture(scope="session")
def recurrent_path(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mamba of random weights with SmolLM2's vocabulary: one state a slot, no cells."""
    path = tmp_path_factory.mktemp("recurrent") / "mamba.gguf"
    write_recurrent_gguf(path, smollm2_path)
    return path


@pytest.fixture(scope="session")
def hybrid_path(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Jamba of random weights: layers with a state and layers with cells."""
    path = tmp_path_factory.mktemp("hybrid") / "jamba.gguf"
    write_hybrid_gguf(path, smollm2_path)
    return path


@pytest.fixture(scope="session")
def window_path(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 3 of random weights with a window of 32 tokens."""
    path = tmp_path_factory.mktemp("window") / "window.gguf"
    write_window_gguf(path, smollm2_path)
    return path
