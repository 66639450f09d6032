"""The weights fingerprint: sees every tensor, reads little, and does not look at names of files."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpkv_sglang import fingerprint
from hpkv_sglang.errors import IdentityError
from hpkv_sglang.fingerprint import (
    WINDOW,
    adapter_fingerprint,
    config_fingerprint,
    weights_fingerprint,
)

Tensors = dict[str, bytes]
TENSORS: Tensors = {
    "embed": bytes(range(256)) * 200,
    "layers.0.q": b"q" * 5000,
    "layers.1.q": b"r" * 5000,
    "norm": b"n" * 64,
    "empty": b"",
}


def write_safetensors(path: Path, tensors: Tensors, dtype: str = "U8", pad: int = 0) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, data in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": [len(data)],
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
    text = json.dumps(header).encode() + b" " * pad
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))


def write_gguf(path: Path, tensors: Tensors, context: int = 2048) -> None:
    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text)) + text.encode()

    pairs = string("general.name") + struct.pack("<I", 8) + string("tiny")
    pairs += string("general.alignment") + struct.pack("<II", 4, 64)
    pairs += string("context") + struct.pack("<II", 4, context)
    pairs += string("tokens") + struct.pack("<IIQ", 9, 8, 2) + string("a") + string("b")
    pairs += string("scores") + struct.pack("<IIQ", 9, 6, 2) + struct.pack("<ff", 0, 1)
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), 5) + pairs
    data = b""
    for name, raw in tensors.items():
        data += bytes(-len(data) % 64)
        head += string(name) + struct.pack("<IQIQ", 1, len(raw), 0, len(data))
        data += raw
    path.write_bytes(head + bytes(-len(head) % 64) + data)


def write_torch(path: Path, tensors: Tensors) -> None:
    import torch

    loaded = {n: torch.frombuffer(bytearray(d), dtype=torch.uint8) for n, d in tensors.items() if d}
    torch.save(loaded, path)


def write_legacy(path: Path, tensors: Tensors) -> None:
    path.write_bytes(b"\x80\x02" + b"".join(n.encode() + d for n, d in tensors.items()))


WRITERS = {
    "model.safetensors": write_safetensors,
    "model.gguf": write_gguf,
    "pytorch_model.bin": write_torch,
    "old.pt": write_legacy,
}
each_format = pytest.mark.parametrize(("name", "write"), WRITERS.items(), ids=WRITERS)


@each_format
@pytest.mark.parametrize("tensor", [name for name, data in TENSORS.items() if data])
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_change_in_any_tensor_is_another_checkpoint(
    tmp_path: Path,
    name: str,
    write: Callable[[Path, Tensors], None],
    tensor: str,
    place: str,
) -> None:
    write(tmp_path / name, TENSORS)
    before = weights_fingerprint(tmp_path)
    data = bytearray(TENSORS[tensor])
    data[0 if place == "first" else -1] ^= 1
    write(tmp_path / name, TENSORS | {tensor: bytes(data)})
    assert weights_fingerprint(tmp_path).content != before.content


@each_format
def test_path_and_times_do_not_count(
    tmp_path: Path, name: str, write: Callable[[Path, Tensors], None]
) -> None:
    here, there = tmp_path / "here", tmp_path / "there" / "deep"
    here.mkdir()
    write(here / name, TENSORS)
    before = weights_fingerprint(here)
    shutil.copytree(here, there)
    os.utime(there / name, (1, 1))
    assert weights_fingerprint(there) == before


def test_file_names_and_how_tensors_are_spread_do_not_count(tmp_path: Path) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    one.mkdir()
    many.mkdir()
    write_safetensors(one / "model.safetensors", TENSORS)
    for index, tensor in enumerate(reversed(TENSORS)):
        write_safetensors(many / f"part-{index}.safetensors", {tensor: TENSORS[tensor]}, pad=index)
    assert weights_fingerprint(many).content == weights_fingerprint(one).content


def test_tensor_names_types_and_places_count(tmp_path: Path) -> None:
    variants = [
        (TENSORS, "U8"),
        (TENSORS, "I8"),
        ({**TENSORS, "layers.0.q": TENSORS["layers.1.q"], "layers.1.q": b"q" * 5000}, "U8"),
        ({("new" if k == "norm" else k): v for k, v in TENSORS.items()}, "U8"),
        ({k: v for k, v in TENSORS.items() if k != "empty"}, "U8"),
    ]
    contents = set()
    for tensors, dtype in variants:
        write_safetensors(tmp_path / "model.safetensors", tensors, dtype)
        contents.add(weights_fingerprint(tmp_path).content)
    assert len(contents) == len(variants)


def test_the_digest_of_names_ignores_bytes_and_sees_a_missing_tensor(tmp_path: Path) -> None:
    def names(tensors: Tensors) -> str:
        write_safetensors(tmp_path / "model.safetensors", tensors)
        return weights_fingerprint(tmp_path).names

    whole = names(TENSORS)
    assert names(TENSORS | {"norm": b"m" * 64}) == whole
    assert names({k: v for k, v in TENSORS.items() if k != "norm"}) != whole


def test_where_names_are_not_known_only_equal_content_has_equal_names(tmp_path: Path) -> None:
    write_torch(tmp_path / "model.bin", TENSORS)
    before = weights_fingerprint(tmp_path)
    write_torch(tmp_path / "model.bin", TENSORS | {"norm": b"m" * 64})
    assert weights_fingerprint(tmp_path).names != before.names


def test_the_gguf_configuration_counts(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", TENSORS)
    before = weights_fingerprint(tmp_path / "a.gguf")
    write_gguf(tmp_path / "a.gguf", TENSORS, context=4096)
    assert weights_fingerprint(tmp_path / "a.gguf").content != before.content


@given(size=st.integers(0, 1 << 34))
def test_windows_cover_head_and_tail_in_order_and_are_bounded(size: int) -> None:
    windows = list(fingerprint._windows(size))
    assert windows[0][0] == 0
    assert sum(windows[-1]) == size
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(windows))
    assert sum(n for _, n in windows) <= fingerprint.SAMPLES_MAX * WINDOW
    if size > fingerprint.WHOLE:
        assert len(windows) >= 3


@settings(max_examples=50)
@given(data=st.data())
def test_a_file_cut_anywhere_is_an_error_that_names_it(data: st.DataObject) -> None:
    folder = Path(os.environ["PYTEST_CUT_FOLDER"])
    name = data.draw(st.sampled_from(["model.safetensors", "model.gguf"]))
    WRITERS[name](folder / name, TENSORS)
    raw = (folder / name).read_bytes()
    (folder / name).write_bytes(raw[: data.draw(st.integers(0, len(raw) - 1))])
    with pytest.raises(IdentityError, match=name):
        weights_fingerprint(folder / name)


@pytest.fixture(autouse=True, scope="module")
def _cut_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["PYTEST_CUT_FOLDER"] = str(tmp_path_factory.mktemp("cut"))


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[8,4]}}',
        b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[-9,4]}}',
        b'{"a":{"shape":[4]}}',
        b'{"a":7}',
    ],
)
def test_a_malformed_header_is_an_error_that_names_the_file(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "bad.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    with pytest.raises(IdentityError, match=r"bad\.safetensors"):
        weights_fingerprint(tmp_path)


def test_a_directory_without_weights_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(IdentityError, match="no weight file"):
        weights_fingerprint(tmp_path)


def test_a_huge_checkpoint_is_read_in_small_parts(tmp_path: Path) -> None:
    """Sparse files of 700 GB: what is read depends on the number of tensors, not on sizes."""
    per_tensor, tensors_a_file, files = 700 << 20, 200, 5
    for index in range(files):
        header = {
            f"layers.{index}.{t}": {
                "dtype": "BF16",
                "shape": [per_tensor // 2],
                "data_offsets": [t * per_tensor, (t + 1) * per_tensor],
            }
            for t in range(tensors_a_file)
        }
        text = json.dumps(header).encode()
        path = tmp_path / f"{index}.safetensors"
        path.write_bytes(struct.pack("<Q", len(text)) + text)
        os.truncate(path, 8 + len(text) + per_tensor * tensors_a_file)
    weights = weights_fingerprint(tmp_path)
    assert weights.tensors == files * tensors_a_file
    assert weights.bytes_read == weights.tensors * fingerprint.SAMPLES_MAX * WINDOW


# ---- configuration and adapters ----


def test_configuration_counts_by_value_and_not_by_form_or_origin(tmp_path: Path) -> None:
    def digest(config: dict[str, object], **dump: object) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config, **dump))  # type: ignore[arg-type]
        return config_fingerprint(tmp_path)

    base: dict[str, object] = {"rope_theta": 1e4, "nested": {"a": 1, "_name_or_path": "x"}}
    same = digest(base)
    assert digest(dict(reversed(base.items())), indent=4) == same
    assert digest(base | {"_name_or_path": "/models/a", "transformers_version": "9"}) == same
    assert digest(base | {"rope_theta": 5e5}) != same
    assert digest(base | {"nested": {"a": 2}}) != same


@pytest.mark.parametrize("name", ["hf_quant_config.json", "modeling_x.py", "params.json"])
def test_quantisation_and_model_code_count_and_the_tokenizer_does_not(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    before = config_fingerprint(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    assert config_fingerprint(tmp_path) == before
    (tmp_path / name).write_text('{"a": 1}')
    assert config_fingerprint(tmp_path) != before


def test_every_byte_of_an_adapter_counts(tmp_path: Path) -> None:
    data = bytearray(1 << 20)
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    write_safetensors(tmp_path / "adapter_model.safetensors", {"a": bytes(data)})
    before = adapter_fingerprint(tmp_path)
    data[300_001] = 1  # between the windows of a sampled tensor
    write_safetensors(tmp_path / "adapter_model.safetensors", {"a": bytes(data)})
    after = adapter_fingerprint(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"r": 16}')
    assert len({before, after, adapter_fingerprint(tmp_path)}) == 3


def test_an_adapter_is_the_same_wherever_it_lies(tmp_path: Path) -> None:
    one = tmp_path / "one"
    one.mkdir()
    (one / "adapter_config.json").write_text('{"r": 8}')
    write_safetensors(one / "adapter_model.safetensors", {"a": b"1"})
    shutil.copytree(one, tmp_path / "two")
    (tmp_path / "two" / "optimizer.pt").write_bytes(b"not loaded")
    assert adapter_fingerprint(one) == adapter_fingerprint(tmp_path / "two")
