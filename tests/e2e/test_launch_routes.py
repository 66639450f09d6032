"""Every way of starting a server turns the tiers on, and a refusal names what is wrong.

Each test asks the same: a prompt that left the device comes back from the host pool.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpkv_testing.faults import faults_env
from hpkv_testing.fixtures import ServerFactory
from hpkv_testing.server import Server, ServerConfig, ServerStartError
from tests.e2e.support import UNHURRIED, ask, cacheable, prompts, tiered

pytestmark = pytest.mark.server


def assert_comes_back_from_the_pool(server: Server, page: int = 16) -> None:
    (tokens,) = prompts(1, 300)
    server.generate(ask(tokens))
    server.flush_cache()
    answer = server.generate(ask(tokens))
    assert answer.cached_on("host") == answer.cached_tokens == cacheable(300, page)


def test_flags_of_launch_server(
    server_factory: ServerFactory, llama_checkpoint: Path, pool: Path
) -> None:
    """The page size is left to the plugin here: 64."""
    flags = ("--enable-hpkv", "--hpkv-mem-pool-size", "32m", "--hpkv-share-mem-path", str(pool))
    (server,) = server_factory.fresh(
        ServerConfig(
            model=llama_checkpoint,
            flags=flags,
            page_size=None,
            new_python=True,
            env=faults_env(UNHURRIED),
        )
    )
    assert_comes_back_from_the_pool(server, page=64)
    assert "hpkv: page size 64" in server.log_text()
    assert "hpkv: pool " in server.log_text()
    server.kill()


def test_sglang_serve_with_a_config_file(
    server_factory: ServerFactory, llama_checkpoint: Path, pool: Path, tmp_path: Path
) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(f"enable-hpkv: true\nhpkv-mem-pool-size: 32m\nhpkv-share-mem-path: {pool}\n")
    (server,) = server_factory.fresh(
        ServerConfig(
            model=llama_checkpoint,
            flags=("--config", str(path)),
            launcher="serve",
            env=faults_env(UNHURRIED),
        )
    )
    assert_comes_back_from_the_pool(server)
    server.kill()


def test_environment_alone_turns_it_on(
    server_factory: ServerFactory, llama_checkpoint: Path, pool: Path
) -> None:
    environment = (
        *faults_env(UNHURRIED),
        ("SGLANG_ENABLE_HPKV", "1"),
        ("HPKV_KV_MEM_POOL_SIZE", "32m"),
        ("HPKV_SHARE_MEM_FILE_PATH", str(pool)),
    )
    (server,) = server_factory.fresh(ServerConfig(model=llama_checkpoint, env=environment))
    assert_comes_back_from_the_pool(server)
    server.kill()


ENGINE = """
import json, sys
import sglang

def main():
    engine = sglang.Engine(
        model_path=sys.argv[1], device="cpu", attention_backend="torch_native",
        max_total_tokens=2048, page_size=16, dtype="bfloat16", enable_cache_report=True,
        random_seed=0,
    )
    ids = json.loads(sys.argv[2])
    sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    engine.generate(input_ids=ids, sampling_params=sampling)
    engine.flush_cache()
    meta = engine.generate(input_ids=ids, sampling_params=sampling)["meta_info"]
    print("RESULT", json.dumps(meta.get("cached_tokens_details")))
    engine.shutdown()

if __name__ == "__main__":
    main()
"""


def test_an_engine_is_turned_on_by_the_environment(
    llama_checkpoint: Path, pool: Path, tmp_path: Path
) -> None:
    """`sgl.Engine` rejects keywords it does not know, so the environment is the only way in."""
    program = tmp_path / "engine.py"  # a file, because SGLang spawns
    program.write_text(ENGINE)
    (tokens,) = prompts(1, 300)
    config = ServerConfig(
        model=llama_checkpoint,
        env=(
            *faults_env(UNHURRIED),
            ("SGLANG_ENABLE_HPKV", "1"),
            ("HPKV_KV_MEM_POOL_SIZE", "32m"),
            ("HPKV_SHARE_MEM_FILE_PATH", str(pool)),
        ),
    )
    done = subprocess.run(
        [sys.executable, str(program), str(llama_checkpoint), json.dumps(tokens)],
        env=config.environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, done.stderr[-3000:]
    assert json.loads(results[0].removeprefix("RESULT "))["host"] == cacheable(300)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--speculative-algorithm", "NGRAM"), "speculative decoding (draft KV)"),
        (("--enable-hierarchical-cache",), "HiCache"),
        (("--hpkv-mem-pool-size", "64mb"), "Use a positive number with k, m, g or t"),
        (("--hpkv-mem-pool-size", "900t"), "ask for a smaller pool"),
        (("--hpkv-storage-path", "/no/such/store"), "make that one, or choose another"),
    ],
)
def test_a_refusal_ends_the_start_with_one_clear_error(
    flags: tuple[str, ...], said: str, llama_checkpoint: Path, pool: Path
) -> None:
    server = Server(tiered(llama_checkpoint, pool, *flags))
    with pytest.raises(ServerStartError), server:
        pass
    assert said in server.log_text()
    assert "Load weight begin" not in server.log_text()


def test_a_server_without_the_switch_has_no_tier_and_makes_no_pool(
    server_factory: ServerFactory, llama_checkpoint: Path, pool: Path
) -> None:
    server = server_factory(
        ServerConfig(
            model=llama_checkpoint,
            env=(("HPKV_SHARE_MEM_FILE_PATH", str(pool)),),
        )
    )
    (tokens,) = prompts(1, 300)
    server.generate(ask(tokens))
    server.flush_cache()
    assert server.generate(ask(tokens)).cached_tokens == 0
    assert not pool.exists()
    assert "HpkvRadixCache" not in server.log_text()
