"""The shell the project is built and tested with: steps, leftovers, the key of the environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]


def bash(text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_is_well_formed(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_a_step_that_works_is_one_line_without_its_output(tmp_path: Path) -> None:
    done = bash('. scripts/step.sh; step "say it" echo a wall of text', HPKV_LOGS=str(tmp_path))
    assert done.returncode == 0
    assert done.stdout.startswith("say it ") and " ok (" in done.stdout
    assert len(done.stdout.splitlines()) == 1 and "wall" not in done.stdout
    assert (tmp_path / "say-it.log").read_text() == "a wall of text\n"


def test_a_step_that_fails_shows_its_end_and_keeps_its_exit_code(tmp_path: Path) -> None:
    command = '. scripts/step.sh; step "count" bash -c "seq 100; exit 7"'
    done = bash(command, HPKV_LOGS=str(tmp_path), HPKV_LOG_TAIL="5")
    assert done.returncode == 7
    assert "FAILED" in done.stdout and "\n96\n97\n98\n99\n100\n" in done.stdout
    assert "\n95\n" not in done.stdout


def leftovers(started: str, shm: Path) -> subprocess.CompletedProcess[str]:
    begin = ". scripts/leftovers.sh; leftovers_begin"
    return bash(f"{begin}; {started}; leftovers_clear", HPKV_SHM=str(shm))


def test_a_run_that_leaves_nothing_passes(tmp_path: Path) -> None:
    (tmp_path / "hpkv-of-somebody").touch()
    done = leftovers("true", tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert (tmp_path / "hpkv-of-somebody").exists()


def test_a_process_in_another_session_is_found_ended_and_reported(tmp_path: Path) -> None:
    sleeper = f'setsid {sys.executable} -c "import time; time.sleep(600)" >/dev/null 2>&1 & echo $!'
    done = leftovers(sleeper, tmp_path)
    pid = int(done.stdout.splitlines()[0])
    assert done.returncode == 1
    assert f"left behind: process {pid} " in done.stdout
    stat = Path(f"/proc/{pid}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_new_pool_file_is_found_removed_and_reported(tmp_path: Path) -> None:
    done = leftovers(f"mkdir {tmp_path}/hpkv-0; touch {tmp_path}/hpkv-0/pool", tmp_path)
    assert done.returncode == 1
    assert f"left behind: {tmp_path}/hpkv-0" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_new_file_that_another_process_uses_is_left_alone(tmp_path: Path) -> None:
    begin = f". scripts/leftovers.sh; leftovers_begin; mkdir {tmp_path}/hpkv-other"
    opener = f"exec 7<{tmp_path}/hpkv-other/pool; read line"
    holder = f"env -u HPKV_RUN_MARK bash -c '{opener}' <{tmp_path}/pipe &"
    make = (
        f"touch {tmp_path}/hpkv-other/pool; mkfifo {tmp_path}/pipe; {holder} exec 8>{tmp_path}/pipe"
    )
    ready = "until ls -l /proc/$!/fd | grep -q hpkv-other; do :; done"
    end = "leftovers_clear && code=0 || code=$?; echo >&8; wait; exit $code"
    done = bash(f"{begin}; {make}; {ready}; {end}", HPKV_SHM=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "")
    assert (tmp_path / "hpkv-other" / "pool").exists()


def test_what_others_leave_is_removed_in_silence_or_left_alone(tmp_path: Path) -> None:
    done = leftovers(f"touch {tmp_path}/sem.mp-abc {tmp_path}/document", tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert [p.name for p in tmp_path.iterdir()] == ["document"]


def test_the_key_of_the_environment_follows_the_requirement_files(tmp_path: Path) -> None:
    copies = [tmp_path / "a", tmp_path / "b"]
    for copy in copies:
        (copy / "scripts").mkdir(parents=True)
        (copy / "requirements").mkdir()
        (copy / "scripts/venv.sh").write_text((ROOT / "scripts/venv.sh").read_text())
        (copy / "requirements/cpu.txt").write_text("torch==1\n")

    def key(copy: Path) -> str:
        command = ["bash", str(copy / "scripts/venv.sh"), "--key"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert key(copies[0]) == key(copies[1])
    (copies[1] / "requirements/cpu.txt").write_text("torch==2\n")
    assert key(copies[0]) != key(copies[1])
