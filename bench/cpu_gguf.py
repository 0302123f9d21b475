"""Writes a GGUF file again with its matrices in another form, by the `gguf` library."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf

F32, MATRICES = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q4_1


def convert(source: Path, target: Path, form: str) -> None:
    """Write `source` to `target` with its 4-bit matrices as `form`, from what they stand for; F32 widens all tensors."""
    wanted = gguf.GGMLQuantizationType[form]
    reader = gguf.GGUFReader(source)
    draft = target.with_suffix(".draft")
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(draft, architecture)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        kind, data = tensor.tensor_type, tensor.data
        if kind == MATRICES or wanted == F32:
            kind, data = wanted, gguf.quants.quantize(gguf.quants.dequantize(data, kind), wanted)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    draft.rename(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
