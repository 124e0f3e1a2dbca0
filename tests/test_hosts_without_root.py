"""test_hosts.py where this user is not root: in a user namespace, of which any user is root."""

import os
import subprocess
import sys
from pathlib import Path

import hosts
import pytest

pytestmark = [pytest.mark.alone, pytest.mark.skipif(os.geteuid() == 0, reason="root runs test_hosts.py itself")]


def test_two_hosts_in_a_user_namespace(tmp_path):
    try:
        tried = subprocess.run(hosts.as_root("true"), capture_output=True, text=True)
    except FileNotFoundError as error:
        pytest.skip(f"no user namespaces: {error}")
    if tried.returncode:
        pytest.skip(f"no user namespaces: {tried.stderr.strip()}")
    tests = [str(Path(__file__).with_name("test_hosts.py")), f"--basetemp={tmp_path / 'inside'}", "-rs"]
    command = hosts.as_root(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout + done.stderr
