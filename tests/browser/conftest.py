"""What a browser test starts from: JupyterLab on copies of the notebooks, and a browser without a network.

Nothing of this machine's own Jupyter is read or written: settings, workspaces, kernels and trust lie in a temporary
folder, and so do the notebooks.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent.parent
BROWSERS = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]
START = 90  # seconds for JupyterLab to answer on a busy machine


@pytest.fixture
def lab(tmp_path) -> Iterator[Lab]:
    """A running JupyterLab whose root folder holds copies of the notebooks, without outputs.

    One for each test: JupyterLab opens again what was open before, and a kernel that is about to end may be found.
    """
    notebooks = tmp_path / "notebooks"
    notebooks.mkdir()
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        nbformat.write(unrun(nbformat.read(path, as_version=4)), notebooks / path.name)
    with Lab(tmp_path, notebooks) as running:
        yield running


def unrun(nb):
    """Without stored outputs and counts: what is there later comes from this run."""
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return nb


class Lab:
    """JupyterLab as `make lab` starts it, but on a port, with a token and in folders of its own."""

    def __init__(self, folder: Path, notebooks: Path):
        self.folder, self.notebooks, self.token = folder, notebooks, secrets.token_hex(16)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"http://127.0.0.1:{probe.getsockname()[1]}"

    def __enter__(self) -> Lab:
        environment = os.environ | {
            "IPYTHONDIR": str(self.folder / "ipython"),
            "JUPYTER_CONFIG_DIR": str(self.folder / "config"),
            "JUPYTER_DATA_DIR": str(self.folder / "data"),
            "JUPYTER_RUNTIME_DIR": str(self.folder / "runtime"),
            "JUPYTERLAB_SETTINGS_DIR": str(self.folder / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(self.folder / "workspaces"),
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        }
        quiet = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}  # it asks about news
        (self.folder / "config" / "labconfig").mkdir(parents=True)
        (self.folder / "config" / "labconfig" / "page_config.json").write_text(json.dumps(quiet))
        environment.pop("MPLBACKEND", None)  # else figures would not be shown inline
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser"]
        command += [f"--ServerApp.root_dir={self.notebooks}", f"--IdentityProvider.token={self.token}"]
        command += [f"--port={self.address.rpartition(':')[2]}", "--ServerApp.port_retries=0"]
        self.log = (self.folder / "lab.log").open("w")
        self.process = subprocess.Popen(command, env=environment, stdout=self.log, stderr=subprocess.STDOUT)
        self._wait()
        return self

    def _wait(self) -> None:
        end = time.monotonic() + START
        while self.process.poll() is None and time.monotonic() < end:
            try:
                urllib.request.urlopen(f"{self.address}/api/status?token={self.token}", timeout=5).close()
                return
            except OSError:
                time.sleep(0.2)
        self.__exit__()
        pytest.fail(f"JupyterLab does not answer:\n{(self.folder / 'lab.log').read_text()[-3000:]}", pytrace=False)

    def __exit__(self, *_error) -> None:
        """Ends the server, which ends its kernels."""
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


@pytest.fixture(scope="session")
def browser():
    """Chromium or Chrome as the system's package manager installs it, without a window."""
    found = next((path for path in map(shutil.which, BROWSERS) if path), None)
    if found is None:
        pytest.exit(
            f"There is no browser here: looked for {', '.join(BROWSERS)} on PATH.\n"
            "On Debian: apt install chromium. On Ubuntu, where chromium is a snap: install Google Chrome's package.",
            returncode=1,
        )
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.exit("playwright is missing: pip install -e '.[browser]'. It need not download a browser.", returncode=1)
    flags = [
        "--no-sandbox",
        "--disable-gpu",
        # What the pages show must not depend on the internet: no name is resolved.
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ]
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, headless=True, args=flags)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def pictures() -> Path:
    """The folder for screenshots."""
    folder = ROOT / "build" / "browser"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def page(browser):
    """A browser window of a laptop's size, without history."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.set_default_timeout(60_000)
    yield context.new_page()
    context.close()
