"""The identity under which KV blocks may be shared: namespaces, and the mask that scopes a key.

Owns: `ModelIdentity` (everything that changes the numbers in a block), `Namespace` (its 256-bit id
and a description in words), `scope_mask` (namespace, shard and format as one mask that the C++
core XORs into SGLang's page hash), `framed_extra_key` and `private_weights`.

Invariants: an id is SHA-256 over length-prefixed fields, so no two lists of fields collide by
concatenation, and it depends on nothing but its fields: not on the process, the path, `hash()`
or the order of a dict. Two identities differ in a field, however small, exactly when their
namespaces differ. Words for people (`model`, `weight_label`) are in the description, not the id.

Threading: frozen values and pure functions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import msgpack

__all__ = [
    "LORA_ID_LENGTH",
    "ModelIdentity",
    "Namespace",
    "canonical_json",
    "digest_of",
    "framed_extra_key",
    "private_weights",
    "scope_mask",
]

# Raised with any change of what a namespace or a key means; old blocks then simply miss.
FORMAT = "hpkv-namespace-1"
LORA_ID_LENGTH = 32
DESCRIPTOR_BYTES_MAX = 960  # the pool's room for the words of a namespace
_ANY = 1 << 20
_DIGEST_CHARS = 32  # of a text that is too long for that room
_FOR_PEOPLE = ("model", "weight_label")


def digest_of(*parts: str | bytes) -> bytes:
    """SHA-256 over the parts, each behind its length in 8 bytes; text and bytes are told apart."""
    state = hashlib.sha256()
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        state.update(b"t" if isinstance(part, str) else b"b")
        state.update(len(raw).to_bytes(8, "little"))
        state.update(raw)
    return state.digest()


def canonical_json(value: Any) -> str:
    """JSON that is equal for equal values: keys sorted, no optional blanks."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def private_weights(launch_id: str, *scope: object) -> str:
    """A weights identity nobody else has: for weights that are not the content of files.

    Equal for all processes of one launch that give the same `scope`.
    """
    return f"private:{digest_of(launch_id, *map(str, scope)).hex()}"


@dataclass(frozen=True, kw_only=True)
class ModelIdentity:
    """What the bytes of a block depend on, beside its tokens. Every field is in the id but two.

    model, weight_label   names for people, not in the id
    config                digest of the model's configuration and code, see `fingerprint`
    weights               `content:<digest>` of the checkpoint, or `private:<digest>`
    dtype, kv_dtype, quantization   as resolved, never "auto"
    overrides             canonical JSON of what the command line changes in the configuration
    numerics              further settings that change numbers, name to value
    layout, geometry      name of the block layout, and its sizes (layers, heads, widths, ...)
    page_size             tokens of a page
    parallel              sizes of the parallel dimensions, for example {"tp": 2, "pp": 1}
    engine                name and version of the program that computes
    """

    model: str
    weight_label: str
    config: str
    weights: str
    dtype: str
    kv_dtype: str
    quantization: str
    overrides: str
    numerics: Mapping[str, str]
    layout: str
    geometry: Mapping[str, int | str]
    page_size: int
    parallel: Mapping[str, int]
    engine: str

    def namespace(self) -> Namespace:
        """The namespace of this identity."""
        words = asdict(self)
        hashed = [
            part
            for field in fields(self)
            if field.name not in _FOR_PEOPLE
            for part in (field.name, canonical_json(words[field.name]))
        ]
        descriptor = _packed({"format": FORMAT, **words})
        return Namespace(id=digest_of(FORMAT, *hashed), descriptor=descriptor)


def _packed(words: dict[str, Any]) -> bytes:
    """`words` in the room a pool has for them: where they are too long, long texts give way.

    A text in an id is replaced by its digest, so two descriptions still differ where it differs; a
    text for people keeps its end.
    """
    people = {key: _shortened(key, words[key], 0) for key in _FOR_PEOPLE}
    for longest, names in ((_ANY, {}), (_ANY, people), (72, people), (0, people)):
        short = {key: _shortened(key, value, longest) for key, value in words.items()} | names
        packed: bytes = msgpack.packb(short)
        if len(packed) <= DESCRIPTOR_BYTES_MAX:
            return packed
    short["numerics"] = _shortened("", canonical_json(words["numerics"]), 0)
    return bytes(msgpack.packb(short))


def _shortened(key: str, value: Any, longest: int) -> Any:
    if isinstance(value, Mapping):
        return {name: _shortened(name, inner, longest) for name, inner in value.items()}
    if not isinstance(value, str) or len(value) <= max(longest, _DIGEST_CHARS):
        return value
    if key in _FOR_PEOPLE:
        return "..." + value[-(_DIGEST_CHARS - 3) :]
    return digest_of(value).hex()[:_DIGEST_CHARS]


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """`id`: 32 bytes. `descriptor`: msgpack map in words, stored in the pool beside the id."""

    id: bytes
    descriptor: bytes

    @classmethod
    def unpack(cls, id_: bytes, descriptor: bytes) -> Self:
        """A namespace as the pool lists it."""
        return cls(id=bytes(id_), descriptor=bytes(descriptor))

    def words(self) -> dict[str, Any]:
        """The description. Empty if the descriptor is not one of ours."""
        try:
            words = msgpack.unpackb(self.descriptor)
        except (ValueError, msgpack.exceptions.UnpackException):
            return {}  # a pool holds other tools' namespaces too: listing them must not fail
        return words if isinstance(words, dict) else {}


def scope_mask(namespace_id: bytes, shard: str, block_format: str) -> bytes:
    """32 bytes to XOR into a page hash: the same page of another scope is another key.

    `shard` says which part of a page the block holds (`tp1/2`, `whole`), `block_format` how its
    bytes are arranged.
    """
    return digest_of("hpkv-scope-1", namespace_id, shard, block_format)


def framed_extra_key(
    extra_key: str | None, lora_digest: str | None, lora_id: str | None
) -> str | None:
    """One string for the three parts; different parts never give the same string.

    None when there is nothing to separate, so that plain requests keep SGLang's plain keys. With an
    adapter the id stays the last 32 characters, where SGLang's KV events look for it; without one
    the string cannot end in an id, because it ends in a colon. `lora_digest` is the adapter's
    content: an adapter replaced under its name, and so under its id, is another adapter.
    """
    if not extra_key and lora_id is None:
        return None
    caller = digest_of(extra_key).hex() if extra_key else "-"
    if lora_id is None:
        return f"hpkv1:{caller}:"
    adapter = digest_of(lora_digest or "", lora_id).hex()
    return f"hpkv1:{caller}:{adapter}:{lora_id}"
