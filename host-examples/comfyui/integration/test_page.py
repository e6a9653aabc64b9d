"""ComfyUI's server as users start it, and its page in a real browser. Needs chromedriver."""

import contextlib
import json
import os
import shutil
import subprocess
import time

import pytest
from conftest import FOLDER, HERE
from server import COMFYUI, free_port, main, request, running, until, with_nodes

HEADLESS = ["--headless=new", "--no-sandbox", "--disable-gpu"]


@pytest.fixture
def base(tmp_path):
    return with_nodes(tmp_path)


@contextlib.contextmanager
def browser(driver):
    """The address of a browser's session. Killing chromedriver alone would leave the browser running."""
    options = {"goog:chromeOptions": {"args": HEADLESS}}
    session = until(lambda: request("POST", f"{driver}/session", {"capabilities": {"alwaysMatch": options}}))
    url = f"{driver}/session/{session['value']['sessionId']}"
    try:
        yield url
    finally:
        request("DELETE", url)


class Page:
    """ComfyUI's page, by the protocol of WebDriver."""

    def __init__(self, session, address):
        self._url = session
        request("POST", f"{self._url}/url", {"url": address})
        until(lambda: self.run("return Boolean(window.app?.graph && app.extensionManager?.setting)"))

    def run(self, script, *arguments):
        body = {"script": script, "args": arguments}
        return request("POST", f"{self._url}/execute/sync", body)["value"]

    def load(self, workflow) -> str:
        """Opens a workflow, and answers what the page has to say about its schema."""
        body = {"script": "app.loadGraphData(arguments[0]).then(arguments[1])", "args": [workflow]}
        request("POST", f"{self._url}/execute/async", body)
        time.sleep(2)
        return self.run("return (document.body.innerText.match(/.*(zod|Validation error).*/g) ?? []).join()")


@pytest.mark.skipif(shutil.which("chromedriver") is None, reason="no chromedriver")
def test_the_page_takes_the_workflows(base):
    port, driver = free_port(), free_port()
    log = (base / "log").open("w")
    with (
        running(*main(base, "--port", str(port)), cwd=COMFYUI, stdout=log, stderr=log),
        running("chromedriver", f"--port={driver}", stdout=subprocess.DEVNULL),
        browser(f"http://127.0.0.1:{driver}") as session,
    ):
        address = f"http://127.0.0.1:{port}"
        until(lambda: request("GET", f"{address}/object_info/VideoVaeLoader"))
        page = Page(session, address)
        page.run("app.extensionManager.setting.set('Comfy.Validation.Workflows', true)")
        for name in ("workflow.json", "workflow_seedvr2.json"):
            workflow = json.loads((HERE.parent / name).read_text(encoding="utf-8"))
            assert page.load(workflow) == ""
            assert page.run("return app.graph.nodes.length") == len(workflow["nodes"])
        # The page does look.
        assert "Invalid uuid" in page.load({**workflow, "id": "workflow.json"})


def test_a_missing_library_is_shown(base):
    environment = {**os.environ, "VIDEO_VAE_LIBRARY": str(base / "absent.so")}
    words = main(base, "--quick-test-for-ci")
    done = subprocess.run(words, cwd=COMFYUI, env=environment, capture_output=True, text=True, timeout=240)
    said = done.stdout + done.stderr
    (line,) = [line for line in said.splitlines() if line.endswith(str(base / "custom_nodes" / FOLDER.name))]
    assert "IMPORT FAILED" in line and "absent.so" in said and "VIDEO_VAE_LIBRARY" in said
