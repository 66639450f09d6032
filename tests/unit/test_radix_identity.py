"""The identity of a rank, read from SGLang's arguments: what differs, and what must not."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

msgspec = pytest.importorskip("msgspec")
pytest.importorskip("sglang")

from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.arg_groups import model_override_base  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from hpkv_sglang.radix import identity  # noqa: E402
from hpkv_sglang.radix.identity import RankIdentity  # noqa: E402

FIELDS = {
    field.name: None if field.default is msgspec.NODEFAULT else field.default
    for field in msgspec.structs.fields(ServerArgs)
}
Make = Callable[..., RankIdentity]


def write_checkpoint(folder: Path, content: bytes = b"seed 0") -> Path:
    folder.mkdir(exist_ok=True)
    header = {"a": {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + content)
    (folder / "config.json").write_text('{"hidden_size": 64}')
    return folder


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Identities of a plain server; keywords change its arguments, `rank_` ones its place."""
    model_path = write_checkpoint(tmp_path / "model")

    def make_identity(
        model: Any = None,
        pool: Any = None,
        launch: str = "launch",
        own_only: bool = False,
        **changes: Any,
    ) -> RankIdentity:
        place = {k.removeprefix("rank_"): v for k, v in changes.items() if k.startswith("rank_")}
        arguments = FIELDS | {k: v for k, v in changes.items() if not k.startswith("rank_")}
        arguments["model_path"] = changes.get("model_path", str(model_path))
        arguments["load_format"] = changes.get("load_format", "auto")
        arguments["unified_cache_external_linker_config"] = {
            "linker_extra_config": {"launch_id": launch}
        }
        config = {
            "model_path": arguments["model_path"],
            "dtype": "torch.bfloat16",
            "quantization": None,
            "get_total_num_kv_heads": lambda: 8,
            "hf_text_config": SimpleNamespace(rope_scaling={"type": "yarn"}),
            **(model or {}),
        }
        parallel = {
            "tp_size": 1,
            "attn_tp_size": 1,
            "attn_dp_size": 1,
            "pp_size": 1,
            "attn_tp_rank": 0,
            "tp_rank": place.get("attn_tp_rank", 0),
            "dp_rank": None,
            "attn_dp_rank": 0,
            **place,
        }
        memory = {"dtype": "torch.bfloat16", "store_dtype": "torch.bfloat16"} | (pool or {})
        monkeypatch.setattr(
            model_override_base, "model_config_of", lambda _: SimpleNamespace(**config)
        )
        monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(**parallel))
        monkeypatch.setattr(identity, "view_of", lambda server_args: server_args)
        allocator = SimpleNamespace(get_kvcache=lambda: SimpleNamespace(**memory))
        return RankIdentity.of_server(
            SimpleNamespace(**arguments),
            SimpleNamespace(page_size=16, token_to_kv_pool_allocator=allocator),
            SimpleNamespace(
                name=place.get("layout", "gqa"),
                geometry={"layers": 2, "kv_heads": place.get("kv_heads", 8)},
                replicated=str(place.get("layout")).startswith("mla"),
            ),
            own_only=own_only,
        )

    return make_identity


def test_the_same_server_twice_is_the_same_identity(make: Make) -> None:
    assert make(launch="one").scope_mask == make(launch="two").scope_mask


def test_a_rank_is_named_by_the_heads_it_holds(make: Make) -> None:
    first, second = (
        make(rank_attn_tp_rank=rank, rank_attn_tp_size=2, rank_tp_size=2, rank_kv_heads=4)
        for rank in (0, 1)
    )
    assert (first.shard, second.shard) == ("heads 0:4/8", "heads 4:8/8")
    assert first.namespace.id == second.namespace.id
    assert first.namespace.words()["geometry"]["kv_heads_total"] == 8
    assert first.turn.count == 1


def test_ranks_that_hold_the_same_head_share_a_scope_and_take_turns(make: Make) -> None:
    ranks = [
        make(rank_attn_tp_rank=rank, rank_attn_tp_size=16, rank_tp_size=16, rank_kv_heads=1)
        for rank in (4, 5, 6)
    ]
    assert [rank.shard for rank in ranks] == ["heads 2:3/8", "heads 2:3/8", "heads 3:4/8"]
    assert [(r.turn.index, r.turn.count) for r in ranks] == [(0, 2), (1, 2), (0, 2)]


def test_a_server_that_uses_only_its_own_blocks_shares_a_namespace_with_such_servers(
    make: Make,
) -> None:
    assert make(own_only=True).namespace.id == make(own_only=True).namespace.id
    assert make(own_only=True).namespace.id != make().namespace.id


def test_heads_that_a_cpu_server_pads_are_named_by_the_rank(make: Make) -> None:
    """SGLang's CPU servers pad the heads to a multiple of the ranks instead of sharing them."""
    place = {"rank_attn_tp_size": 16, "rank_tp_size": 16, "rank_kv_heads": 1}
    ranks = [make(rank_attn_tp_rank=rank, **place, device="cpu") for rank in (0, 1)]
    assert [rank.shard for rank in ranks] == ["tp0/16", "tp1/16"]
    assert {rank.turn.count for rank in ranks} == {1}


@pytest.mark.parametrize(
    ("device", "config", "order"),
    [
        ("cpu", {"rope_scaling": {"type": "yarn"}}, "pairs"),
        ("cuda", {}, "pairs"),
        ("cuda", {"rope_interleave": False}, "halves"),
        ("npu", {"rope_scaling": {"type": "yarn"}}, "halves"),
        ("npu", {}, "unknown"),
        ("npu", {"rope_scaling": {"rope_type": "yarn"}}, "halves"),
        ("npu", {"rope_scaling": {"rope_type": "default", "rope_theta": 1e4}}, "unknown"),
        ("npu", {"rope_scaling": {"type": "yarn"}, "rope_interleave": False}, "unknown"),
    ],
)
def test_the_order_of_rotated_elements_is_said_where_it_is_known(
    make: Make, device: str, config: dict[str, Any], order: str
) -> None:
    model = {"hf_text_config": SimpleNamespace(**config)}
    rank = make(model=model, rank_layout="mla-fused", device=device)
    assert rank.namespace.words()["geometry"]["rope_order"] == order


def test_heads_that_are_not_an_even_share_are_named_by_the_rank(make: Make) -> None:
    odd = make(rank_attn_tp_rank=1, rank_attn_tp_size=2, rank_tp_size=2, rank_kv_heads=5)
    assert odd.shard == "tp1/2" and odd.heads is None and odd.turn.count == 1


def test_latent_attention_is_one_scope_written_in_turns_on_each_node(make: Make) -> None:
    ranks = [
        make(
            rank_layout="mla",
            rank_attn_tp_rank=rank,
            rank_attn_tp_size=4,
            rank_tp_size=4,
            nnodes=2,
        )
        for rank in range(4)
    ]
    assert len({rank.scope_mask for rank in ranks}) == 1
    assert [(r.turn.index, r.turn.count) for r in ranks] == [(0, 2), (1, 2), (0, 2), (1, 2)]


def test_path_and_served_name_do_not_count(make: Make, tmp_path: Path) -> None:
    elsewhere = write_checkpoint(tmp_path / "elsewhere")
    moved = make(model_path=str(elsewhere), served_model_name="another", weight_version="v7")
    assert moved.scope_mask == make().scope_mask
    assert moved.namespace.words()["model"] == "another"


def test_other_weights_at_the_same_path_are_another_namespace(make: Make, tmp_path: Path) -> None:
    """Field report F02."""
    before = make()
    write_checkpoint(tmp_path / "model", b"seed 1")
    assert make().namespace.id != before.namespace.id


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"dtype": "torch.float16"}},
        {"model": {"quantization": "fp8"}},
        {"pool": {"dtype": "torch.float16", "store_dtype": "torch.float16"}},
        {"pool": {"dtype": "torch.float8_e5m2", "store_dtype": "torch.uint8"}},
        {"json_model_override_args": '{"rope_theta": 5}'},
        {"context_length": 4096},
        {"attention_backend": "fa3"},
        {"rl_quant_profile": "profile"},
        {"enable_deterministic_inference": True},
        {"rank_tp_size": 2},
        {"rank_attn_dp_size": 2},
    ],
    ids=str,
)
def test_what_changes_the_numbers_is_another_namespace(make: Make, change: Any) -> None:
    """Field report F01: bf16 then fp16, for one, have blocks of the same size."""
    assert make(**change).namespace.id != make().namespace.id


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("SGLANG_NPU_USE_MLAPO", True),
        ("SGLANG_SIMULATE_UNIFORM_EXPERTS", True),
        ("SGLANG_FP8_IGNORED_LAYERS", True),
        ("SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR", True),
        ("SGLANG_RECORD_STEP_TIME", False),
    ],
)
def test_variables_that_change_the_numbers_count_by_their_names(
    make: Make, monkeypatch: pytest.MonkeyPatch, name: str, counts: bool
) -> None:
    from sglang.srt.environ import envs

    assert hasattr(envs, name), "SGLang has no such variable"
    before = make().namespace.id
    monkeypatch.setenv(name, "1")
    assert (make().namespace.id != before) == counts
    monkeypatch.setenv(name, "")
    assert make().namespace.id == before


def test_code_that_nobody_can_read_makes_the_weights_private(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make(forward_hooks=[{"hook_factory": "mine:steer"}]).weight_version.startswith("private")
    assert make().weight_version.startswith("content:")
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "mine")
    assert make().weight_version.startswith("private:")


def test_the_form_of_the_overrides_does_not_count(make: Make) -> None:
    one = make(json_model_override_args='{"a":1,"b":2}')
    two = make(json_model_override_args='{ "b": 2, "a": 1 }')
    assert one.namespace.id == two.namespace.id


def test_scales_of_a_quantised_cache_count_by_content(make: Make, tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"
    ids = set()
    for text in ("1", "2"):
        scales.write_text(text)
        ids.add(make(quantization_param_path=str(scales)).namespace.id)
    assert len(ids) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"load_format": "dummy"},
        {"load_format": "remote"},
        {"load_format": "unheard_of"},
        {"custom_weight_loader": ["my.loader"]},
        {"checkpoint_engine_wait_weights_before_ready": True},
        {"weight_cache_mode": "client"},
        {"model_path": "/nowhere/at/all"},
    ],
    ids=str,
)
def test_weights_that_are_not_files_are_private_to_one_launch_and_replica(
    make: Make, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "_config_digest", lambda *_: "config")
    here = make(**change)
    assert here.weight_version.startswith("private:")
    assert make(**change).scope_mask == here.scope_mask
    assert make(**change, launch="restarted").scope_mask != here.scope_mask
    assert make(**change, rank_dp_rank=1).scope_mask != here.scope_mask


def test_a_damaged_checkpoint_is_private_and_no_error(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "model" / "model.safetensors").write_bytes(b"short")
    assert make().weight_version.startswith("private:")
    assert "private to this server" in caplog.text


def test_ranks_hold_different_heads_but_the_same_latent(make: Make) -> None:
    sizes = {"rank_tp_size": 2, "rank_attn_tp_size": 2}
    gqa = [make(**sizes, rank_attn_tp_rank=rank) for rank in (0, 1)]
    mla = [make(**sizes, rank_attn_tp_rank=rank, rank_layout="mla") for rank in (0, 1)]
    assert gqa[0].namespace.id == gqa[1].namespace.id
    assert gqa[0].scope_mask != gqa[1].scope_mask
    assert mla[0].scope_mask == mla[1].scope_mask


def test_other_weights_and_back_is_the_same_namespace(make: Make) -> None:
    start = make()
    away = start.with_weights("private:1")
    assert away.namespace.id != start.namespace.id
    assert away.with_weights(start.weight_version).scope_mask == start.scope_mask


@pytest.mark.parametrize("name", [*identity._NUMERIC_SETTINGS, *identity._FOREIGN_WEIGHTS])
def test_every_setting_that_is_looked_at_exists(name: str) -> None:
    assert name in FIELDS
