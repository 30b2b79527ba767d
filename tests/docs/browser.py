"""A browser without a window, on the pages of the site: scripts run in a page of the site's own server.

A script is the body of an asynchronous function. `await open(path, width)` returns the window of a page of the site, in
a frame of that width; the value that the script returns is the result.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
HARNESS = """<!doctype html><meta charset="utf-8"><title>tests</title><body><script>
const frame = document.body.appendChild(document.createElement("iframe"));
const open = (path, width) => new Promise((resolve) => {
  frame.width = width;
  frame.height = 900;
  frame.onload = () => resolve(frame.contentWindow);
  frame.src = "/" + path;
});
const until = async (condition) => {
  for (let tries = 0; !condition(); tries++) {
    if (tries > 600) throw new Error(`${condition} stays false`);
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
};
const script = async () => {SCRIPT};
const send = (result) => fetch("/result", {method: "POST", body: JSON.stringify(result)});
script().then((value) => send({value}), (error) => send({error: String(error)}));
</script>"""


class _Handler(SimpleHTTPRequestHandler):
    """Serves the site, the page that runs the script, and takes its result."""

    def __init__(self, *args: Any, harness: str, results: Queue[Any], folder: Path) -> None:
        self.harness, self.results = harness, results
        super().__init__(*args, directory=str(folder))

    def do_GET(self) -> None:
        if self.path != "/harness":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(self.harness.encode())

    def do_POST(self) -> None:
        self.results.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def copyfile(self, source: Any, outputfile: Any) -> None:
        """Send a file, unless the browser has left its page."""
        with suppress(ConnectionError):
            super().copyfile(source, outputfile)

    def log_message(self, *args: object) -> None:
        """Write nothing."""


def evaluate(site: Path, script: str, profile: Path, *, timeout: float = 600) -> Any:
    """Return what a script returns. Raise AssertionError if it fails, and queue.Empty after the timeout."""
    results: Queue[Any] = Queue()
    handler = partial(_Handler, harness=HARNESS.replace("SCRIPT", script), results=results, folder=site)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with _chromium(f"http://127.0.0.1:{server.server_port}/harness", profile):
            result = results.get(timeout=timeout)
        server.shutdown()
    assert "value" in result, result
    return result["value"]


@contextmanager
def _chromium(address: str, profile: Path) -> Iterator[None]:
    command = [str(CHROMIUM), *OPTIONS, f"--user-data-dir={profile}", "--remote-debugging-port=0", address]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=60)
