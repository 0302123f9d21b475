"""Settings fail fast, with one line that names the variable; so does the command."""

import os
import subprocess
import sys

import pytest
from operator_kit import ENVIRONMENT, KEY

from paceline_operator.errors import SettingsError
from paceline_operator.settings import TemplatePolicy, load_settings, settings_help


def test_defaults_are_strict():
    found = load_settings(ENVIRONMENT)
    assert found.template_policy is TemplatePolicy.NONE
    assert found.allowed_images == ()
    assert "file" not in found.allowed_model_schemes
    assert found.watch_namespaces == ()
    assert found.metrics_port == 0
    assert KEY not in repr(found)


@pytest.mark.parametrize(
    ("name", "text", "attribute", "value"),
    [
        ("PACELINE_WATCH_NAMESPACES", "a, b c", "watch_namespaces", ("a", "b", "c")),
        ("PACELINE_ALLOW_TEMPLATE", "true", "template_policy", TemplatePolicy.ANY),
        ("PACELINE_ALLOW_TEMPLATE", "False", "template_policy", TemplatePolicy.NONE),
        ("PACELINE_ALLOW_TEMPLATE", "restricted", "template_policy", TemplatePolicy.RESTRICTED),
        ("PACELINE_ADMIN_TIMEOUT", "0.5", "admin_timeout", 0.5),
        ("PACELINE_METRICS_PORT", "9090", "metrics_port", 9090),
        ("PACELINE_LOG_LEVEL", "debug", "log_level", "DEBUG"),
        ("PACELINE_WORKERS", " 3 ", "workers", 3),
    ],
)
def test_each_variable_is_read(name, text, attribute, value):
    assert getattr(load_settings(ENVIRONMENT | {name: text}), attribute) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("PACELINE_ALLOW_TEMPLATE", "maybe"),
        ("PACELINE_ADMIN_TIMEOUT", "soon"),
        ("PACELINE_ADMIN_TIMEOUT", "-1"),
        ("PACELINE_ADMIN_TIMEOUT", "nan"),
        ("PACELINE_METRICS_PORT", "70000"),
        ("PACELINE_WORKERS", "0"),
        ("PACELINE_LOG_LEVEL", "loud"),
        ("PACELINE_RUNTIME_IMAGE", ""),
        ("PACELINE_OPERATOR_KEY", ""),
        ("PACELINE_OPERATOR_KEY", "short"),
        ("PACELINE_OPERATOR_KEY_FILE", "/nowhere/key"),
    ],
)
def test_what_cannot_be_used_is_named(name, text):
    with pytest.raises(SettingsError, match=name.removesuffix("_FILE")) as raised:
        load_settings(ENVIRONMENT | {name: text})
    assert "\n" not in str(raised.value)


def test_a_short_keys_message_does_not_show_it():
    with pytest.raises(SettingsError) as raised:
        load_settings(ENVIRONMENT | {"PACELINE_OPERATOR_KEY": "hunter2"})
    assert "hunter2" not in str(raised.value)


def test_the_key_may_be_in_a_file(tmp_path):
    path = tmp_path / "key"
    path.write_text(KEY + "\n")
    found = load_settings({"PACELINE_RUNTIME_IMAGE": "x", "PACELINE_OPERATOR_KEY_FILE": str(path)})
    assert found.operator_key == KEY.encode()


def test_the_help_lists_every_variable():
    text = settings_help()
    assert "PACELINE_OPERATOR_KEY_FILE" in text
    assert text.count("PACELINE_") >= 15


def run(*arguments, **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PACELINE_", "KUBE"))}
    command = [sys.executable, "-m", "paceline_operator", *arguments]
    return subprocess.run(command, check=False, env=clean | environment, capture_output=True, text=True, timeout=60)


def test_the_command_explains_itself():
    found = run("--help")
    assert found.returncode == 0
    assert "PACELINE_RUNTIME_IMAGE" in found.stdout


def test_the_command_fails_with_one_line(tmp_path):
    for environment, word in [
        ({}, "PACELINE_OPERATOR_KEY"),
        ({"PACELINE_OPERATOR_KEY": KEY}, "PACELINE_RUNTIME_IMAGE"),
        (ENVIRONMENT | {"KUBECONFIG": str(tmp_path / "none")}, "KUBECONFIG"),
    ]:
        found = run(**environment)
        assert found.returncode == 2
        assert len(found.stderr.strip().splitlines()) == 1, found.stderr
        assert found.stderr.startswith("error: ")
        assert word in found.stderr
