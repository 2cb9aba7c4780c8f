"""Draws the live page as it is in the docs: a real server with SmolLM2, and several requests at once.

python -m tests.server.live_picture docs/live.png
"""

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from playwright.sync_api import sync_playwright

WORDS = " ".join(topics.values()).split()
QUESTIONS = ("Why is the sky blue?", "What is a penstock?", "Name three rivers of Europe.")


def ask(url: str, content: str, max_tokens: int, timeout_s: float = 300) -> None:
    messages = [{"role": "user", "content": content}]
    body = {"model": "smollm2", "messages": messages, "max_tokens": max_tokens, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        urllib.request.urlopen(request, timeout=timeout_s).read()
    except OSError as error:  # one is too long on purpose, one is given up
        print(f"{max_tokens} tokens: {error}", file=sys.stderr)


def later(*arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=ask, args=arguments, daemon=True)
    thread.start()
    return thread


def work(url: str) -> None:
    """Some requests that end, one of them refused and one given up; then some that run for a while."""
    short = [later(url, question, 24) for question in QUESTIONS]
    later(url, " ".join(WORDS[:300]), 500, 1.5)
    later(url, "word " * 20_000, 9)
    for thread in short:
        thread.join()
    time.sleep(1)
    for question in QUESTIONS:
        later(url, question, 600)
    time.sleep(1)
    later(url, " ".join(WORDS[300:3000]), 300)
    later(url, " ".join(WORDS[3000:4800]), 200)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--width", type=int, default=1200)
    parser.add_argument("--scheme", choices=["light", "dark"], default="light")
    parser.add_argument("--after", type=float, default=6.0, help="seconds of work before the picture")
    given = parser.parse_args()
    command = [sys.executable, "-m", "penstock", "serve", "--port", "0", "--chunk", "256"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        lines = iter(server.stderr.readline, "")
        url = next(found[0] for line in lines if (found := re.search(r"http://127.0.0.1:\d+", line)))
        threading.Thread(target=server.stderr.read, daemon=True).start()
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox"]
            )
            size: Any = {"width": given.width, "height": 900}
            page = browser.new_page(viewport=size, color_scheme=given.scheme)
            page.goto(url)
            work(url)
            time.sleep(given.after)
            page.screenshot(path=given.output, full_page=True, timeout=120_000)
            browser.close()
    finally:
        server.send_signal(signal.SIGINT)
        server.send_signal(signal.SIGINT)
        server.wait()


if __name__ == "__main__":
    main()
