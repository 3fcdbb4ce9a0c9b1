"""Rewrites a model's weights in another type through llama.cpp's own quantiser. Used when an executable is built."""

import os
from pathlib import Path
from typing import Final, Literal

from runner.errors import ModelError
from runner.llama.library import LOG_ERROR, Library

# Values of enum llama_ftype (llama.h).
FILE_TYPE_IDS: Final = {"Q4_0": 2, "Q8_0": 7}


def quantize(source: Path, target: Path, file_type: Literal["Q4_0", "Q8_0"]) -> None:
    """Write `source` to `target` with the weights as `file_type`; already quantised weights are taken as they are worth.

    Which tensors keep a finer type (token embeddings, norms) is the quantiser's decision. Raises ModelError.
    """
    said: list[str] = []
    # The object must live as long as the call: it owns the callback that llama.cpp logs through.
    library = Library(lambda level, text: said.append(text) if level == LOG_ERROR else None)
    params = library.api.llama_model_quantize_default_params()
    params.ftype = FILE_TYPE_IDS[file_type]
    params.allow_requantize = True
    if library.api.llama_model_quantize(os.fsencode(source), os.fsencode(target), params) != 0:
        raise ModelError(f"{source.name} cannot be quantised to {file_type}: {said[-1] if said else 'llama.cpp gave no reason'}")
