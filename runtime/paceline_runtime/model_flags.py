"""Command-line options that say where models may come from; they set the environment that every process inherits."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from paceline_runtime.hub_settings import ALLOWED_HOSTS_ENV
from paceline_runtime.uri import ALLOWED_SCHEMES_ENV

__all__ = ["model_source_options"]

F = TypeVar("F", bound=Callable[..., Any])


def model_source_options(command: F) -> F:
    """Decorate a click command with `--allowed-model-schemes` and `--allowed-model-hosts`."""
    command = _option("--allowed-model-hosts", ALLOWED_HOSTS_ENV, "huggingface.co,*.hf.co", "hosts of hf:// models")(command)
    return _option("--allowed-model-schemes", ALLOWED_SCHEMES_ENV, "pvc,hf", "schemes of --model")(command)


def _option(name: str, variable: str, example: str, what: str) -> Callable[[F], F]:
    def export(_context: click.Context, _parameter: click.Parameter, value: str | None) -> None:
        if value is not None:
            os.environ[variable] = value

    text = f"Allow only these {what}, as in {example}.  [env: {variable}; default: all]"
    return click.option(name, metavar="LIST", expose_value=False, callback=export, help=text)
