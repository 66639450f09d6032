"""What a checkpoint contains, as digests of its content.

Owns: `weights_fingerprint` (a sample of every tensor), `config_fingerprint` (what shapes the
computation beside the weights), `adapter_fingerprint` (an adapter, every byte).

Invariants: independent of path, file names, how tensors are spread over files, and times; every
tensor's name, type, shape and sampled bytes count. Reads are bounded: at most `SAMPLES_MAX` windows
of `WINDOW` bytes a tensor (4 KiB at its head, at its tail, and about every 8 MiB between),
whatever its size.

What a sample cannot see: a change confined to bytes between the windows of a large tensor. Training
changes a tensor everywhere; an edit of single rows of a large table may be missed. Tensors up to
`WHOLE` bytes are read whole. Zip checkpoints (.bin, .pt) also carry a CRC of every byte.

Threading: own short-lived threads; callers may be anywhere. Blocks on file reads.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from hpkv_sglang.errors import IdentityError
from hpkv_sglang.namespace import canonical_json, digest_of

__all__ = ["Weights", "adapter_fingerprint", "config_fingerprint", "weights_fingerprint"]

WINDOW = 4096
WHOLE = 4 * WINDOW
STRIDE = 8 << 20
SAMPLES_MAX = 64
_THREADS = 16
_TENSORS_A_TASK = 256
_HEADER_MAX = 512 << 20

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Configuration that names the checkpoint or its tools and does not shape the computation.
_IRRELEVANT_KEYS = ("_name_or_path", "transformers_version")
_CONFIGS = (
    "config.json",
    "params.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "quantization_config.json",
    "preprocessor_config.json",
    "adapter_config.json",
)


class Span(NamedTuple):
    """One tensor, or the closest thing a format has: `label` says all about it but its bytes.

    `named` is False where the format keeps tensor names elsewhere.
    """

    path: Path
    offset: int
    size: int
    label: str
    named: bool = True


class Weights(NamedTuple):
    """`content` identifies names and bytes; `names` only which tensors there are, where the format
    tells (else it equals `content`)."""

    content: str
    names: str
    tensors: int
    bytes_read: int


def weights_fingerprint(model: Path) -> Weights:
    """Fingerprint the checkpoint in directory `model`, or the single file `model`.

    Raises IdentityError when there are no weights there, or a file is cut short or malformed.
    """
    files = [model] if model.is_file() else _files(model, _WEIGHTS)
    if not files:
        raise IdentityError.build(
            "fingerprinting weights",
            str(model),
            "no weight file",
            f"Expected files ending in {', '.join(_WEIGHTS)}.",
        )
    # By file and position, so that a task keeps few files open and reads forwards.
    spans = sorted(span for path in files for span in _spans(path))
    tasks = [spans[i : i + _TENSORS_A_TASK] for i in range(0, len(spans), _TENSORS_A_TASK)]
    with ThreadPoolExecutor(_THREADS) as threads:
        samples = [sample for part in threads.map(_sample_all, tasks) for sample in part]
    # Sorted by what they are and hold: the same tensors in other files are the same weights.
    digests = sorted(
        digest_of(span.label, digest) for span, (digest, _) in zip(spans, samples, strict=True)
    )
    content = digest_of("hpkv-weights-1", *digests).hex()
    names = digest_of("hpkv-names-1", *sorted(span.label for span in spans)).hex()
    return Weights(
        content=content,
        names=names if all(span.named for span in spans) else content,
        tensors=len(spans),
        bytes_read=sum(read for _, read in samples),
    )


def config_fingerprint(model: Path) -> str:
    """Digest of the configuration and the model code in directory `model`; empty for a lone file.

    JSON counts by its values, not its formatting. Raises IdentityError on malformed JSON.
    """
    parts: list[str | bytes] = ["hpkv-config-1"]
    for path in _files(model, (".json", ".py")) if model.is_dir() else []:
        if path.suffix == ".py":
            parts += [path.name, path.read_bytes()]
        elif path.name in _CONFIGS:
            parts += [path.name, canonical_json(_relevant(_load_json(path)))]
    return digest_of(*parts).hex()


def adapter_fingerprint(adapter: Path) -> str:
    """Digest of every byte of an adapter's weights and of its configuration.

    Raises IdentityError when the directory holds no weights.
    """
    # As SGLang loads it: safetensors if there are any, else what PyTorch wrote.
    files = _files(adapter, _WEIGHTS[:1]) or _files(adapter, _WEIGHTS[1:])
    if not files:
        raise IdentityError.build(
            "fingerprinting an adapter", str(adapter), "no weight file", "Check its path."
        )
    whole: list[bytes] = []
    for path in files:
        with path.open("rb") as stream:
            whole.append(hashlib.file_digest(stream, "sha256").digest())
    return digest_of("hpkv-adapter-1", config_fingerprint(adapter), *sorted(whole)).hex()


# ---- which files, which tensors ----


def _files(directory: Path, suffixes: tuple[str, ...]) -> list[Path]:
    return sorted(p for p in directory.iterdir() if p.suffix in suffixes and p.is_file())


def _spans(path: Path) -> Iterable[Span]:
    readers: dict[str, Callable[[Path], Iterator[Span]]] = {
        ".safetensors": _safetensors_spans,
        ".gguf": _gguf_spans,
    }
    try:
        spans = list(readers.get(path.suffix, _archive_spans)(path))
        if any(span.size < 0 for span in spans):
            raise ValueError("a tensor ends before it begins")
        return spans
    except (OSError, ValueError, KeyError, TypeError, struct.error, zipfile.BadZipFile) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: object) -> IdentityError:
    return IdentityError.build(
        "fingerprinting weights",
        str(path),
        str(error),
        "The file is cut short or malformed: fetch it again.",
    )


def _safetensors_spans(path: Path) -> Iterator[Span]:
    """8 bytes header length, JSON header, data; offsets are relative to the data."""
    with path.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > _HEADER_MAX:
            raise ValueError(f"header of {length} bytes")
        header = json.loads(stream.read(length))
    if not isinstance(header, dict):
        raise ValueError("the header is not a map")
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        begin, end = tensor["data_offsets"]
        if not 0 <= begin <= end:
            raise ValueError(f"{name} lies at {begin} to {end}")
        label = canonical_json([name, tensor["dtype"], tensor["shape"]])
        yield Span(path, 8 + length + begin, end - begin, label)


def _archive_spans(path: Path) -> Iterator[Span]:
    """PyTorch's zip archives by entry, each with the CRC of all its bytes.

    The format before it hides its tensors in a pickle, which is not opened: every byte counts.
    """
    if not zipfile.is_zipfile(path):
        with path.open("rb") as stream:
            whole = hashlib.file_digest(stream, "sha256").hexdigest()
        yield Span(path, 0, 0, f"file {whole}", named=False)
        return
    with zipfile.ZipFile(path) as archive, path.open("rb") as stream:
        for entry in archive.infolist():
            name = entry.filename.partition("/")[2]  # without the archive's own name
            label = canonical_json([name, entry.file_size, entry.CRC])
            offset = _zip_data_offset(stream, entry)
            yield Span(path, offset, entry.compress_size, label, named=False)


def _zip_data_offset(stream: BinaryIO, entry: zipfile.ZipInfo) -> int:
    """The local header repeats name and extra field, with lengths of its own."""
    stream.seek(entry.header_offset + 26)
    name_length, extra_length = struct.unpack("<HH", stream.read(4))
    return int(entry.header_offset) + 30 + int(name_length) + int(extra_length)


# GGUF value types by number: width in bytes, or a string (8) or an array (9).
_GGUF_WIDTH = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def _gguf_spans(path: Path) -> Iterator[Span]:
    """Magic, version, counts, key-value pairs, tensor table, then aligned data to the end."""
    with path.open("rb") as stream:
        magic, version, tensor_count, pair_count = struct.unpack("<4sIQQ", stream.read(24))
        if magic != b"GGUF" or version < 2:
            raise ValueError(f"not a GGUF file of version 2 or later: {magic!r} {version}")
        alignment = 32
        for _ in range(pair_count):
            name = _gguf_string(stream)
            value = _gguf_value(stream, _read_int(stream, 4))
            if name == b"general.alignment":
                alignment = int.from_bytes(value, "little")
        tensors = []
        for _ in range(tensor_count):
            name = _gguf_string(stream)
            shape = [_read_int(stream, 8) for _ in range(_read_int(stream, 4))]
            kind, offset = _read_int(stream, 4), _read_int(stream, 8)
            label = canonical_json([name.decode(errors="replace"), kind, shape])
            tensors.append((offset, label))
        table_end = stream.tell()
    data = -(-table_end // alignment) * alignment
    ends = [offset for offset, _ in sorted(tensors)[1:]] + [path.stat().st_size - data]
    # All that precedes the data is one more span: it holds the whole configuration.
    yield Span(path, 0, table_end, "gguf header", named=False)
    for (offset, label), end in zip(sorted(tensors), ends, strict=True):
        yield Span(path, data + offset, end - offset, label)


def _read_int(stream: BinaryIO, width: int) -> int:
    raw = stream.read(width)
    if len(raw) != width:
        raise ValueError("the file ends inside its header")
    return int.from_bytes(raw, "little")


def _gguf_string(stream: BinaryIO) -> bytes:
    length = _read_int(stream, 8)
    if length > _HEADER_MAX:
        raise ValueError(f"string of {length} bytes")
    return stream.read(length)


def _gguf_value(stream: BinaryIO, kind: int) -> bytes:
    if kind == 8:
        return _gguf_string(stream)
    if kind != 9:
        return stream.read(_GGUF_WIDTH[kind])
    element, count = _read_int(stream, 4), _read_int(stream, 8)
    if element in _GGUF_WIDTH:
        stream.seek(_GGUF_WIDTH[element] * count, os.SEEK_CUR)
    else:
        for _ in range(count):
            _gguf_value(stream, element)
    return b""


# ---- samples ----


def _sample_all(spans: list[Span]) -> list[tuple[bytes, int]]:
    """(digest, bytes read) of each span; neighbours in one file share a descriptor."""
    samples: list[tuple[bytes, int]] = []
    opened: dict[Path, int] = {}
    try:
        for span in spans:
            if span.path not in opened:
                opened[span.path] = os.open(span.path, os.O_RDONLY | os.O_CLOEXEC)
                os.posix_fadvise(opened[span.path], 0, 0, os.POSIX_FADV_RANDOM)
            samples.append(_sample(opened[span.path], span))
    finally:
        for descriptor in opened.values():
            os.close(descriptor)
    return samples


def _sample(descriptor: int, span: Span) -> tuple[bytes, int]:
    state = hashlib.sha256(span.size.to_bytes(8, "little"))
    read = 0
    for offset, length in _windows(span.size):
        part = os.pread(descriptor, length, span.offset + offset)
        if len(part) != length:
            raise _unreadable(span.path, f"{span.label} ends {length - len(part)} bytes early")
        state.update(part)
        read += length
    return state.digest(), read


def _windows(size: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of what is read of a span: whole if small, else head, strides and tail."""
    if size <= WHOLE:
        yield 0, size
        return
    count = min(SAMPLES_MAX, 3 + size // STRIDE)
    for index in range(count):
        yield (size - WINDOW) * index // (count - 1), WINDOW


def _load_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise IdentityError.build(
            "reading a model's configuration", str(path), str(error), "Repair the file."
        ) from error


def _relevant(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _relevant(v) for k, v in value.items() if k not in _IRRELEVANT_KEYS}
    return [_relevant(item) for item in value] if isinstance(value, list) else value
