"""Typed errors of models: finding, reading, configuring and sampling them.

```
PacelineError
└── ModelError
    ├── UriError              a model URI that can't be used (scheme, shape, `..`)
    ├── ModelNotFound         nothing there: file, folder, package or repository
    │   └── ModelFetchError   a download that failed: refused, unreachable, or not what the server states
    ├── ModelFormatError      a file that is corrupt, truncated or beyond the reader's bounds
    ├── UnsupportedModel      a well-formed model that this runtime can't run, named exactly
    ├── MemoryBudgetError     not enough memory for weights and a useful KV pool
    ├── ChatTemplateError     a chat template that fails, runs too long or says too much
    ├── GrammarError          a schema, regular expression or grammar that can't be used
    └── SamplingParamsError   a sampling parameter out of its bounds (`field` names it)
```
"""

from __future__ import annotations

from paceline_core.errors import PacelineError

__all__ = [
    "ChatTemplateError",
    "GrammarError",
    "MemoryBudgetError",
    "ModelError",
    "ModelFetchError",
    "ModelFormatError",
    "ModelNotFound",
    "SamplingParamsError",
    "UnsupportedModel",
    "UriError",
]


class ModelError(PacelineError):
    """Base of every error about a model or the use of one."""


class UriError(ModelError):
    """The model URI has an unknown scheme or a shape that its scheme doesn't have."""


class ModelNotFound(ModelError):
    """The URI is fine, but nothing is there."""


class ModelFetchError(ModelNotFound):
    """A model can't be downloaded; the message says why and what to do."""


class ModelFormatError(ModelError):
    """A model file is corrupt, truncated, or claims sizes beyond what the reader accepts."""


class UnsupportedModel(ModelError):
    """The model is well-formed, but this runtime can't run it. The message names the feature."""


class MemoryBudgetError(ModelError):
    """The device doesn't hold the weights and a useful KV pool."""


class ChatTemplateError(ModelError):
    """The model's chat template is missing, broken, too slow or too talkative, or refused the messages."""


class GrammarError(ModelError):
    """A schema, regular expression or grammar is invalid, unsupported or beyond its limits."""


class SamplingParamsError(ModelError):
    """A sampling parameter is out of its bounds. `field` is its name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
