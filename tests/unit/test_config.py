"""Settings: precedence, strictness, and the trip from the launcher to its schedulers."""

from __future__ import annotations

import argparse
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpkv_sglang import config
from hpkv_sglang.config import (
    FLAGS,
    SWITCH,
    CrossTp,
    PromotePolicy,
    Settings,
    VerifyPolicy,
    WritePolicy,
)
from hpkv_sglang.errors import ConfigError

ON = {SWITCH: "1"}


def parse(*argv: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    config.add_flags(parser)
    return config.flags_given(parser.parse_args(argv))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8g", 8 << 30),
        ("512m", 512 << 20),
        ("1.5t", 3 << 39),
        ("64K", 64 << 10),
        ("1048576", 1 << 20),
        ("0.1g", (1 << 30) // 10),
    ],
)
def test_a_size_reads_as_binary_units_or_plain_bytes(text: str, expected: int) -> None:
    assert config.parse_size(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "g",
        "8gb",
        "8 g",
        "-1",
        "0",
        "0g",
        "1.5",
        "1e9",
        "0x10",
        "8g8",
        "٣g",
        "1_000",
        ".5g",
        "5.g",
    ],
)
def test_anything_else_is_no_size_and_the_error_shows_what_is(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        config.parse_size(text)
    assert repr(text) in str(error.value)
    assert "512m" in str(error.value)


@given(st.integers(min_value=1, max_value=1 << 50))
def test_a_formatted_size_reads_back(bytes_count: int) -> None:
    assert config.parse_size(config.format_size(bytes_count)) == bytes_count


# One value per flag for each source; the default is neither.
VALUES: dict[str, tuple[str, object, str, object]] = {
    "pool_bytes": ("1g", 1 << 30, "2g", 2 << 30),
    "pool_directory": ("/dev/shm/a", "/dev/shm/a", "/dev/shm/b/", "/dev/shm/b"),
    "write_policy": (
        "write_back",
        WritePolicy.WRITE_BACK,
        "write_through_selective",
        WritePolicy.WRITE_THROUGH_SELECTIVE,
    ),
    "verify": ("always", VerifyPolicy.ALWAYS, "epoch", VerifyPolicy.EPOCH),
    "storage_directory": ("/disk/a", "/disk/a", "/disk/b", "/disk/b"),
    "storage_bytes": ("2t", 2 << 40, "3g", 3 << 30),
    "promote_policy": (
        "best_effort",
        PromotePolicy.BEST_EFFORT,
        "wait_complete",
        PromotePolicy.WAIT_COMPLETE,
    ),
    "cross_tp": ("off", CrossTp.OFF, "on", CrossTp.ON),
}


def test_every_flag_with_a_value_is_tried_below() -> None:
    assert {flag.field for flag in FLAGS if not flag.is_switch} == VALUES.keys()


@pytest.mark.parametrize("flag", [f for f in FLAGS if not f.is_switch], ids=lambda f: f.field)
def test_flag_beats_environment_beats_default(flag: config.Flag) -> None:
    flag_text, flag_value, env_text, env_value = VALUES[flag.field]
    # A size of the disk tier means nothing without its directory.
    on = ON if flag.field == "storage_directory" else {**ON, "HPKV_KV_STORAGE_PATH": "/disk"}
    environment = {**on, flag.environment: env_text}
    default = getattr(Settings.resolve({}, on), flag.field)
    from_environment = getattr(Settings.resolve({}, environment), flag.field)
    from_flag = getattr(Settings.resolve(parse(flag.name, flag_text), environment), flag.field)
    assert (from_flag, from_environment) == (flag_value, env_value)
    assert default != flag_value


@pytest.mark.parametrize("flag", FLAGS, ids=lambda f: f.field)
@pytest.mark.parametrize("blank", ["", " "])
def test_an_empty_variable_is_not_set(flag: config.Flag, blank: str) -> None:
    assert Settings.resolve({}, {**ON, flag.environment: blank} | ON) == Settings.resolve({}, ON)


def test_a_size_of_the_disk_tier_without_its_directory_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"--hpkv-storage-path.*'3g'"):
        Settings.resolve(parse("--hpkv-storage-size", "3g"), ON)


def test_a_size_nobody_gave_is_not_the_default_size() -> None:
    unset = Settings.resolve({}, ON)
    explicit = Settings.resolve(parse("--hpkv-mem-pool-size", "8g"), ON)
    assert unset.pool_bytes is None
    assert explicit.pool_bytes == unset.pool_bytes_to_create == config.POOL_BYTES_DEFAULT


@pytest.mark.parametrize("text", ["1", "true", "YES", " on "])
def test_the_environment_turns_it_on(text: str) -> None:
    assert Settings.resolve({}, {SWITCH: text}).enabled
    assert config.switched_on({SWITCH: text})


@pytest.mark.parametrize("environment", [{}, {SWITCH: "0"}, {SWITCH: ""}, {SWITCH: "off"}])
def test_it_is_off_unless_asked_for(environment: dict[str, str]) -> None:
    assert not Settings.resolve({}, environment).enabled
    assert Settings.resolve(parse("--enable-hpkv"), environment).enabled


@pytest.mark.parametrize(
    ("name", "text", "valid"),
    [
        (SWITCH, "maybe", "true"),
        ("HPKV_KV_MEM_POOL_SIZE", "8gb", "512m"),
        ("HPKV_SHARE_MEM_FILE_PATH", "shm/pool", "absolute"),
        ("HPKV_WRITE_POLICY", "write_around", "write_through_selective"),
        ("HPKV_VERIFY", "never", "always"),
        ("HPKV_KV_STORAGE_PATH", "disk", "absolute"),
        ("HPKV_PROMOTE_POLICY", "forever", "wait_complete"),
        ("HPKV_CROSS_TP", "sometimes", "off"),
    ],
)
def test_a_malformed_variable_is_named_with_what_is_valid(name: str, text: str, valid: str) -> None:
    with pytest.raises(ConfigError) as error:
        Settings.resolve({}, {**ON, name: text})
    message = str(error.value)
    assert name in message
    assert repr(text) in message
    assert valid in message


def test_malformed_variables_do_not_matter_while_off() -> None:
    assert not Settings.resolve({}, {"HPKV_VERIFY": "never", "HPKV_CROSS_TP": "maybe"}).enabled


def test_a_malformed_flag_ends_in_a_usage_error_with_the_valid_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse("--hpkv-write-policy", "sometimes")
    assert "write_through_selective" in capsys.readouterr().err


def test_the_help_text_survives_argparse_and_names_every_default() -> None:
    parser = argparse.ArgumentParser()
    config.add_flags(parser)
    text = " ".join(parser.format_help().split())
    for flag in FLAGS:
        assert flag.name in text
        assert f"Default: {flag.default}." in text


@pytest.mark.parametrize("pool_bytes", [None, 1 << 24])
def test_settings_survive_the_trip_as_json(pool_bytes: int | None) -> None:
    sent = Settings(
        enabled=True,
        pool_bytes=pool_bytes,
        pool_directory="/dev/shm/x",
        write_policy=WritePolicy.WRITE_BACK,
        verify=VerifyPolicy.ALWAYS,
        storage_directory="/disk",
        storage_bytes=None,
        promote_policy=PromotePolicy.WAIT_COMPLETE,
        cross_tp=CrossTp.OFF,
        launch_id="0123",
    )
    assert Settings.from_dict(json.loads(json.dumps(sent.to_dict()))) == sent


@pytest.mark.parametrize("change", [{"new": 1}, {"verify": ...}])
def test_settings_of_another_version_are_an_error(change: dict[str, object]) -> None:
    plain = Settings.resolve({}, ON).to_dict() | change
    plain = {key: value for key, value in plain.items() if value is not ...}
    with pytest.raises(ConfigError, match="one version of hpkv-sglang"):
        Settings.from_dict(plain)


def test_exporting_the_switch_turns_children_on() -> None:
    environment: dict[str, str] = {}
    config.export_switch(environment)
    assert config.switched_on(environment)


def test_the_markdown_table_has_every_flag_and_variable_once() -> None:
    table = config.flags_markdown()
    for flag in FLAGS:
        assert table.count(f"`{flag.name}`") == 1
        assert table.count(flag.environment) == 1
