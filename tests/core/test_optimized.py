"""`python -O` removes assert statements: the engine works without them, and the tests still check under it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = [
    "tests/core/kv_cache/test_block_manager_walkthrough.py",
    "tests/core/kv_cache/test_block_manager.py",
    "tests/core/kv_cache/test_block_manager_prefix.py",
    "tests/core/scheduler/test_scheduler.py",
    "tests/core/test_engine_faults.py",
]


def run_optimized(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-O", "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)


def test_core_tests_pass_under_python_optimization() -> None:
    result = run_optimized(*FILES)
    assert result.returncode == 0, result.stdout[-4000:]
    assert " passed" in result.stdout


def test_asserts_of_tests_still_fail_under_python_optimization(tmp_path: Path) -> None:
    """pytest rewrites the asserts of test files, so -O does not remove them; the helpers raise KVFaultError."""
    (tmp_path / "test_canary.py").write_text(
        "import sys, pytest\n"
        "from tests.core.fakes import KVFaultError, require\n"
        "def test_optimized(): assert sys.flags.optimize == 1 and not __debug__\n"
        "def test_assert_fails():\n"
        "    with pytest.raises(AssertionError):\n"
        "        assert 1 == 2\n"
        "def test_helper_fails():\n"
        "    with pytest.raises(KVFaultError):\n"
        "        require(False, 'no')\n"
        "def test_canary(): assert 1 == 2\n"
    )
    result = run_optimized(str(tmp_path / "test_canary.py"))
    assert result.returncode == 1
    assert "1 failed, 3 passed" in result.stdout
