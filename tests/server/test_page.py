"""The live page in a browser, against a real server over a real socket."""

import colorsys
import itertools
import json
import os
import re
import shutil
import socket
import threading
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from playwright.sync_api import Browser, Dialog, Page, expect, sync_playwright

import penstock
from penstock.engine.events import GenerationRequest
from penstock.engine.llm import LLM
from penstock.engine.service import Service
from penstock.engine.status import SpanRecord, StepRecord
from penstock.frontends.server.app import create_app
from penstock.frontends.server.metrics import Telemetry
from penstock.frontends.server.pages import FOLDER
from penstock.frontends.server.settings import ServerSettings
from penstock.plan.step import SpanKind

QUIET = ("gpu", "quic", "background-networking", "component-update", "sync")
PHONE = {"width": 360, "height": 740}
# A model's name may be anything.
MODEL_NAME = "tiny <img src=x onerror=alert(1)>"
PROMPT_TOKENS = 5000  # most of the tiny model's context
CHUNK = 16
RULES = ("default", "tuned", "balanced", "memory", "small", "end")
# Nothing here should take as long: who waits for that is told that it does not come.
PATIENCE_S = 60


class Site:
    """A server on a port of its own, which may be stopped and started again."""

    def __init__(
        self, service: Service, telemetry: Telemetry, api_key: str | None = None, port: int = 0
    ) -> None:
        self.service = service
        self._first = itertools.count()
        settings = ServerSettings(MODEL_NAME, api_keys=() if api_key is None else (api_key,))
        self._app = create_app(service, settings, telemetry)
        self.port = port
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        listener = socket.create_server(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(self._app, log_level="warning", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]})
        self._thread.start()
        wait_for(lambda: self._server.started)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    def get(self, path: str) -> tuple[bytes, dict[str, str]]:
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE_S) as response:
            return response.read(), dict(response.headers)

    def submit(self, num_prompt: int, max_tokens: int) -> str:
        """A prompt that begins unlike all before it, so that it is read."""
        ids = [next(self._first), *(index % 200 for index in range(1, num_prompt))]
        request = GenerationRequest(ids, max_tokens, ignore_eos=True)
        return self.service.submit(request, lambda event: None)


class Held(Telemetry):
    """Keeps the engine after a number of steps until it may go on: what the page is to show of it stays as it is,
    however long that takes."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._num_steps = 0
        self._num_let: int | None = None

    def on_step(self, record: StepRecord) -> None:
        super().on_step(record)
        with self._changed:
            self._num_steps += 1
            self._changed.wait_for(self._may_go_on, 2 * PATIENCE_S)

    def let(self, num_steps: int) -> None:
        """So many steps more than were let before, or than there have been."""
        with self._changed:
            self._num_let = (self._num_steps if self._num_let is None else self._num_let) + num_steps
            self._changed.notify_all()

    def free(self) -> None:
        with self._changed:
            self._num_let = None
            self._changed.notify_all()

    def _may_go_on(self) -> bool:
        return self._num_let is None or self._num_steps < self._num_let


class Slow(Telemetry):
    """Lets time pass after every step that reads: long prompts take minutes."""

    def on_step(self, record: StepRecord) -> None:
        super().on_step(record)
        if record.num_chunk_tokens:
            time.sleep(0.05)


def wait_for(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def llm(model_folder: Path) -> LLM:
    """Small chunks, so that a prompt takes many steps."""
    return LLM(model_folder, dtype="float32", chunk=CHUNK, threads=1)


@pytest.fixture(scope="module")
def plain_llm(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A model without a chat template."""
    folder = tmp_path_factory.mktemp("models") / "plain"
    shutil.copytree(model_folder, folder)
    (folder / "tokenizer_config.json").write_text("{}")
    return LLM(folder, dtype="float32", chunk=CHUNK, threads=1)


@contextmanager
def serving(
    llm: LLM, api_key: str | None = None, port: int = 0, telemetry: Telemetry | None = None
) -> Iterator[Site]:
    telemetry = telemetry or Telemetry()
    with Service(llm, observers=[telemetry]) as service:
        site = Site(service, telemetry, api_key, port)
        try:
            yield site
        finally:
            if isinstance(telemetry, Held):
                telemetry.free()
            site.stop()


@pytest.fixture
def site(llm: LLM) -> Iterator[Site]:
    with serving(llm) as site:
        yield site


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None:
        if os.environ.get("CI"):
            pytest.fail("chromium is not installed, and the page must be tested here")
        pytest.skip("chromium is not installed")
    arguments = ["--no-sandbox", "--no-first-run", *(f"--disable-{what}" for what in QUIET)]
    expect.set_options(timeout=PATIENCE_S * 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=arguments, timeout=3 * PATIENCE_S * 1000
        )
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, site: Site, *, complaints: str = "(?!)", **settings: Any) -> Iterator[Page]:
    """The page of a site. At its end: it asked no other host, and complained of nothing but what is expected."""
    context = browser.new_context(**settings)
    context.set_default_timeout(PATIENCE_S * 1000)
    page = context.new_page()
    heard: list[str] = []
    asked: list[str] = []

    def refuse(dialog: Dialog) -> None:
        heard.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    page.on("console", lambda message: heard.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: heard.append(f"thrown: {error}"))
    page.on("dialog", refuse)
    page.on("request", lambda request: asked.append(request.url))
    try:
        page.goto(site.url)
        yield page
    finally:
        context.close()
    assert [text for text in heard if not re.search(complaints, text)] == []
    assert {urlsplit(url).netloc for url in asked} == {urlsplit(site.url).netloc}


def connection(page: Page, text: str) -> None:
    expect(page.locator("#connection-text")).to_have_text(text)


def test_a_prompt_moves_its_bar(browser: Browser, llm: LLM) -> None:
    held = Held()
    with serving(llm, telemetry=held) as site, opened(browser, site) as page:
        connection(page, "live")
        expect(page.locator("#requests-none")).to_be_visible()
        page.evaluate(
            """() => {
                window.seen = [];
                new MutationObserver(() => {
                    const bar = document.querySelector("#requests .part.prompt");
                    if (bar) window.seen.push(Number(bar.getAttribute("aria-valuenow")));
                }).observe(document.getElementById("requests"), {subtree: true, childList: true, attributes: true});
            }"""
        )
        held.let(50)
        request_id = site.submit(PROMPT_TOKENS, 800)
        row = page.locator(".request", has_text=request_id[-6:])
        bar = row.locator(".part.prompt")
        expect(bar).to_have_attribute("aria-valuenow", str(50 * CHUNK))
        expect(row.locator(".name")).to_have_text("Request 1")
        expect(row.locator(".eta")).to_have_text(re.compile("first token in about .* s"))
        held.let(100)
        expect(bar).to_have_attribute("aria-valuenow", str(150 * CHUNK))
        held.let(-(-PROMPT_TOKENS // CHUNK) - 150 + 10)  # and some of the answer
        expect(row.locator(".phase")).to_have_text("generating")
        expect(bar).to_have_attribute("aria-valuenow", str(PROMPT_TOKENS))
        expect(row.locator(".eta")).to_have_text(re.compile("up to about .* left"))
        seen = page.evaluate("window.seen")
        assert seen == sorted(seen)
        assert {50 * CHUNK, 150 * CHUNK, PROMPT_TOKENS} <= set(seen)
        site.service.cancel(request_id)
        held.free()
        expect(row).to_have_count(0)


def test_the_timeline_draws_spans(browser: Browser, site: Site) -> None:
    # The browser minds that the test reads pixels; the page never does.
    with opened(browser, site, complaints="willReadFrequently") as page:
        connection(page, "live")
        expect(page.locator("#step-detail")).to_have_text("No steps yet.")
        assert colours_drawn(page) == {"chunk": 0, "decode": 0, "stall": 0}
        drawn: dict[str, int] = {}

        def are_all_drawn() -> bool:
            if not site.service.status().requests:  # none yet, or all were over before the page had looked
                site.submit(10, 700)
                site.submit(PROMPT_TOKENS, 1)
            drawn.update(colours_drawn(page))
            return min(drawn.values()) > 20

        wait_for(are_all_drawn)
        expect(page.locator("#inter-token td").first).to_have_text(re.compile(r"^[\d.]+ m?s$"))


def test_the_timeline_is_walked_by_keyboard(browser: Browser, site: Site) -> None:
    with opened(browser, site) as page:
        connection(page, "live")
        site.submit(3 * CHUNK, 3)
        timeline, detail = page.locator("#timeline"), page.locator("#step-detail")
        expect(timeline).to_have_attribute("aria-valuemax", "4")  # three chunks, then two decodes
        timeline.focus()
        page.keyboard.press("End")
        expect(detail).to_have_text(re.compile(r"^Step 4 · [\d.]+ m?s · 1 decode: #1$"))
        expect(timeline).to_have_attribute("aria-valuetext", detail.inner_text())
        page.keyboard.press("Home")
        expect(detail).to_have_text(re.compile(rf"^Step 0 · [\d.]+ m?s · 1 chunk: #1 0.{CHUNK}$"))
        page.keyboard.press("Escape")
        expect(detail).to_have_text(re.compile("Point at a step"))


def test_the_step_that_runs_grows(browser: Browser, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    attend, gate = llm.model.kernels.attend, threading.Event()

    def waiting(*arguments: Any) -> Any:
        gate.wait(PATIENCE_S)
        return attend(*arguments)

    with serving(llm) as site, opened(browser, site, complaints="willReadFrequently") as page:
        connection(page, "live")
        monkeypatch.setattr(llm.model.kernels, "attend", waiting)
        site.submit(10, 1)
        detail = page.locator("#step-detail")
        expect(detail).to_have_text(re.compile(r"^Running: Step 0 · .* · 1 chunk: #1 0.10$"))
        (step,) = json.loads(site.get("/status")[0])["in_flight"]
        assert step["seconds"] > 0
        first = pixels_drawn(page)
        wait_for(lambda: pixels_drawn(page) > first + 1000)
        gate.set()
        expect(detail).to_have_text(re.compile("Point at a step"))


def test_after_a_pause_the_last_steps_stay(browser: Browser, site: Site) -> None:
    with opened(browser, site, complaints="willReadFrequently") as page:
        connection(page, "live")
        page.get_by_role("button", name="10 s").click()  # where several steps share a pixel
        blank = pixels_drawn(page)
        site.submit(2 * CHUNK, 600)
        expect(page.locator("#step-detail")).to_have_text(
            re.compile(r"^Nothing runs; the last step was [5-9]\.\d s ago\.")
        )
        assert pixels_drawn(page, saturation=100) == 0  # dimmed
        assert pixels_drawn(page) > blank + 100  # steps of a fast machine are thin


def test_labels_of_the_axis_do_not_overlap(browser: Browser, site: Site) -> None:
    with opened(browser, site, viewport=PHONE) as page:
        connection(page, "live")
        page.evaluate(
            """() => {
                const kind = CanvasRenderingContext2D.prototype;
                const {clearRect, fillText} = kind;
                kind.clearRect = function (...all) { window.drawn = []; clearRect.apply(this, all); };
                kind.fillText = function (text, x, y) {
                    const wide = this.measureText(text).width;
                    const part = {left: 0, center: 0.5, right: 1}[this.textAlign];
                    window.drawn.push([y, x - part * wide, x + (1 - part) * wide]);
                    fillText.call(this, text, x, y);
                };
            }"""
        )
        site.submit(CHUNK, 5)
        expect(page.locator("#step-detail")).to_have_text(re.compile("^Nothing runs; the last step was"))
        drawn = page.evaluate("window.drawn")
        axis = sorted(ends for y, *ends in drawn if y == max(drawn)[0])
        assert len(axis) > 2
        assert all(before[1] < after[0] for before, after in itertools.pairwise(axis))


def test_steps_that_were_missed_count_and_are_no_wait(browser: Browser, llm: LLM) -> None:
    """The server tells of its last steps alone, and there were more while nobody looked."""
    held = Held()
    trouble = "willReadFrequently|Failed to load resource"
    with serving(llm, telemetry=held) as site, opened(browser, site, complaints=trouble) as page:
        connection(page, "live")
        held.let(20)
        site.submit(10, 3000)
        expect(page.locator("#timeline")).to_have_attribute("aria-valuemax", "19")
        page.route("**/status*", lambda route: route.abort())
        connection(page, "no answer")
        held.let(2000)
        wait_for(lambda: held.num_tokens()["generated"] >= 2000)
        page.unroute("**/status*")
        connection(page, "live")
        shown = float(page.locator("#write-rate").inner_text().replace(",", ""))
        assert shown * site.service.status().uptime_s > 1000
        page.locator("#timeline").focus()
        page.keyboard.press("End")  # time stands still
        sunken = page.evaluate(
            """() => {
                const canvas = document.getElementById("timeline");
                const ground = getComputedStyle(canvas).getPropertyValue("--sunken").trim();
                const row = Math.floor(Math.min((canvas.height - 30) / 4, 48) / 2);
                const {data} = canvas.getContext("2d").getImageData(0, row, canvas.width, 1);
                const at = (x) => "#" + [0, 1, 2].map((i) => data[4 * x + i].toString(16).padStart(2, "0")).join("");
                return [...Array(canvas.width).keys()].filter((x) => at(x) === ground).length;
            }"""
        )
        assert sunken > 30


def test_estimates_are_smoothed(browser: Browser, site: Site) -> None:
    """Guesses that jump up and down by half of what is left become times that go down evenly."""
    with opened(browser, site) as page:
        left = page.evaluate(
            """async () => {
                const {Estimate} = await import("/page/estimate.js");
                const estimate = new Estimate();
                const left = [];
                for (let now = 0; now < 50; now += 0.5) {
                    left.push(estimate.left((100 - now) * (now % 1 ? 1.5 : 0.5), now));
                }
                return left;
            }"""
        )
    jumps = [after - before for before, after in itertools.pairwise(left[10:])]
    assert max(map(abs, jumps)) < 20  # of 100
    assert left[-1] == pytest.approx(50, rel=0.4)


def test_a_busy_machine_is_told(browser: Browser, llm: LLM) -> None:
    held = Held()
    with serving(llm, telemetry=held) as site, opened(browser, site) as page:
        connection(page, "live")
        expect(page.locator("#pace")).to_be_hidden()
        for index in range(300):
            span = SpanRecord("other", SpanKind.DECODE, 100, 101)
            held.pace.add(StepRecord(index, 0.0, 0.01 if index < 200 else 0.03, (span,), 0))
        held.let(3)
        site.submit(PROMPT_TOKENS, 1)
        expect(page.locator("#pace")).to_have_text(
            re.compile(r"^The machine seems busy: steps take [23]\.\d times")
        )


def pixels_drawn(page: Page, saturation: int = 60) -> int:
    """How many pixels of the timeline have a colour that is neither of a grid line nor of text."""
    drawn: int = page.evaluate(
        """(saturation) => {
            const canvas = document.getElementById("timeline");
            const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            let drawn = 0;
            for (let at = 0; at < data.length; at += 4) {
                const parts = [data[at], data[at + 1], data[at + 2]];
                if (data[at + 3] && Math.max(...parts) - Math.min(...parts) > saturation) drawn += 1;
            }
            return drawn;
        }""",
        saturation,
    )
    return drawn


def colours_drawn(page: Page) -> dict[str, int]:
    """How many pixels of the timeline have a colour of each kind."""
    drawn: dict[str, int] = page.evaluate(
        """() => {
            const canvas = document.getElementById("timeline");
            const style = getComputedStyle(canvas);
            const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            const pixels = new Map();
            for (let at = 0; at < data.length; at += 4) {
                const name = "#" + [0, 1, 2].map((i) => data[at + i].toString(16).padStart(2, "0")).join("");
                if (data[at + 3] === 255) pixels.set(name, (pixels.get(name) ?? 0) + 1);
            }
            const count = (name) => pixels.get(style.getPropertyValue("--" + name).trim()) ?? 0;
            return {chunk: count("chunk"), decode: count("decode"), stall: count("stall")};
        }"""
    )
    return drawn


def test_a_prompt_can_be_tried(browser: Browser, llm: LLM) -> None:
    held = Held()
    with serving(llm, telemetry=held) as site, opened(browser, site) as page:
        connection(page, "live")
        expect(page.locator("#try-kind")).to_have_text("as a chat, without sampling")
        prompt = "<b>Why</b> is the sky blue? " * 60
        page.get_by_label("Prompt", exact=True).fill(prompt)
        page.get_by_label("Answer at most").fill("120")
        held.let(10)
        with page.expect_request(f"{site.url}/v1/chat/completions"):
            page.get_by_role("button", name="Send").click()
        state = page.locator("#try-state")
        expect(state).to_have_text(re.compile(r"^Reading: [\d,]+ of [\d,]+ tokens"))
        held.let(-(-len(llm.tokenize(prompt)) // CHUNK) - 10)
        length = 0
        for _ in range(3):  # it comes in pieces
            held.let(30)
            page.wait_for_function(
                "(n) => document.getElementById('try-text').textContent.length > n", arg=length
            )
            length = page.evaluate("document.getElementById('try-text').textContent.length")
        held.free()
        expect(state).to_have_text(re.compile(r"^(Reached its limit|Done): .* tokens/s"))
        assert page.evaluate("document.getElementById('try-text').children.length") == 0
        expect(page.locator("#try-bar")).to_have_attribute("aria-valuenow", "100")
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
        expect(page.get_by_role("button", name="Cancel")).to_be_disabled()


def test_a_model_without_a_chat_template_gets_plain_text(browser: Browser, plain_llm: LLM) -> None:
    with serving(plain_llm) as site, opened(browser, site) as page:
        connection(page, "live")
        page.get_by_label("Prompt", exact=True).fill("Once upon a time")
        page.get_by_label("Answer at most").fill("20")
        with page.expect_request(f"{site.url}/v1/completions"):
            page.get_by_role("button", name="Send").click()
        expect(page.locator("#try-state")).to_have_text(re.compile("^(Reached its limit|Done): "))


def test_cancel_ends_the_request(browser: Browser, llm: LLM) -> None:
    held = Held()
    with serving(llm, telemetry=held) as site, opened(browser, site) as page:
        connection(page, "live")
        page.get_by_label("Prompt", exact=True).fill("Go on and on. " * 250)
        page.get_by_label("Answer at most").fill("1500")
        held.let(5)
        page.get_by_role("button", name="Send").click()
        wait_for(lambda: site.service.status().num_running == 1)
        page.get_by_role("button", name="Cancel").click()
        expect(page.locator("#try-state")).to_have_text(re.compile("^Cancelled: "))
        held.free()
        wait_for(lambda: not site.service.status().requests)
        site.service.check_integrity()
        wait_for(lambda: b"penstock_cancels_total 1.0" in site.get("/metrics")[0])


def test_a_refusal_is_shown(browser: Browser, site: Site) -> None:
    with opened(browser, site, complaints="status of 400") as page:
        connection(page, "live")
        page.get_by_label("Prompt", exact=True).fill("too long " * 1000)
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#try-state")).to_have_text(re.compile("tokens"))
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
        expect(page.locator("#errors")).to_contain_text("0failed, 1 refused")
        expect(page.locator("#refused")).to_have_attribute("title", "1 with status 400")


def test_a_phone_has_nothing_beside_its_screen(browser: Browser, llm: LLM) -> None:
    with (
        serving(llm, telemetry=Slow()) as site,
        opened(browser, site, viewport=PHONE, has_touch=True, is_mobile=True) as page,
    ):
        site.submit(1, 1)
        expect(page.locator(".past")).to_be_visible()
        site.submit(PROMPT_TOKENS, 500)
        # Alone at first, in whole chunks; with others it has a part of each.
        wait_for(lambda: site.service.status().requests[0].num_prompt_done >= 20 * CHUNK)
        for _ in range(19):
            site.submit(PROMPT_TOKENS, 500)
        connection(page, "live")
        page.get_by_label("Prompt", exact=True).fill("word" * 200)
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#requests-more")).to_have_text("and 1 more waiting")
        page.locator("#timeline").tap(position={"x": 300, "y": 60})
        expect(page.locator("#step-detail")).to_have_text(re.compile("^Step "))
        page.locator(".request .name").first.tap()
        expect(page.locator("#explain-rows tr").first).to_be_visible()
        page.locator("#explain-chart").tap(position={"x": 52, "y": 60})
        expect(page.locator("#explain-detail")).to_have_text(re.compile(r"^[\d,]+.[\d,]+ · 16 tokens"))
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
        places = [page.locator(f"#{name}-title").bounding_box() for name in ("steps", "requests", "try")]
        assert [place["y"] for place in places if place] == sorted(place["y"] for place in places if place)
        beyond = page.evaluate(
            "[...document.querySelectorAll('body *')].filter((e) => e.getBoundingClientRect().right > 360.5).length"
        )
        assert beyond == 0


def test_what_was_in_the_cache_is_seen(browser: Browser, llm: LLM) -> None:
    held = Held()
    num_prompt, num_shared = 2000, 1984
    ids = [index % 200 for index in range(num_prompt)]
    with serving(llm, telemetry=held) as site, opened(browser, site) as page:
        connection(page, "live")
        expect(page.locator("#blocks-text")).to_have_text(re.compile("^0 used, [\\d,]+ free$"))
        site.service.run(GenerationRequest(ids, 1, ignore_eos=True))
        expect(page.locator("#blocks-text")).to_have_text(re.compile("^0 used, 31 idle, [\\d,]+ free$"))
        expect(page.locator("#found")).to_have_text("0 of 2,000 prompt tokens")
        kept = page.locator("#blocks .kept")
        page.wait_for_function("(kept) => kept.getBoundingClientRect().width > 1", arg=kept.element_handle())
        held.let(10)
        request_id = site.service.submit(GenerationRequest(ids, 3000, ignore_eos=True), lambda event: None)
        row = page.locator(".request", has_text=request_id[-6:])
        expect(row.locator(".from-cache")).to_have_text("1,984 from cache")
        part, cached = (row.locator(f".prompt{inner}").bounding_box() for inner in ("", " .cached"))
        assert part is not None
        assert cached is not None
        assert cached["width"] / part["width"] == pytest.approx(num_shared / num_prompt, abs=0.01)
        shades = [
            row.locator(f".prompt .{name}").evaluate("(e) => getComputedStyle(e).backgroundColor")
            for name in ("fill", "cached")
        ]
        assert shades[0] != shades[1]
        expect(page.locator("#found")).to_have_text("1,984 of 4,000 prompt tokens")
        expect(page.locator("#found-where")).to_have_text("1,984 in memory")
        expect(page.locator("#hits")).to_have_text("1 of 2 found some")
        expect(page.locator("#disk")).to_be_hidden()
        site.service.cancel(request_id)
        held.free()
        # The box to try a prompt tells of it too.
        for told in ("", r".* from cache$"):
            page.get_by_label("Prompt", exact=True).fill("Why is the sky blue? " * 60)
            page.get_by_label("Answer at most").fill("2")
            page.get_by_role("button", name="Send").click()
            expect(page.locator("#try-state")).to_have_text(
                re.compile(f"^Reached its limit: 2 tokens, {told}")
            )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(browser: Browser, site: Site, scheme: str) -> None:
    with opened(browser, site, color_scheme=scheme) as page:
        names = ["ground", "surface", "sunken", "ink", "muted", "accent", "on-accent", "warn-ground"]
        spans = ["chunk", "decode", "stall"]
        rules = ["good", "idle", *(f"rule-{name}" for name in RULES)]
        colour = colours(page, [*names, *spans, *rules, "bad"])
        assert (luminance(colour["ground"]) > 0.5) == (scheme == "light")
        texts = [("on-accent", "accent"), ("ink", "warn-ground")]
        texts += [(ink, ground) for ink in ("ink", "muted", "accent") for ground in ("ground", "surface")]
        texts += [("surface", "chunk"), ("bad", "surface")]  # the sizes of chunks, and what failed
        bars = [(span, ground) for span in spans for ground in ("surface", "sunken")]
        bars += [(rule, "surface") for rule in rules]
        for pairs, least in ((texts, 4.5), (bars, 3)):
            for ink, ground in pairs:
                dark, light = sorted((luminance(colour[ink]), luminance(colour[ground])))
                assert (light + 0.05) / (dark + 0.05) >= least, (ink, ground)
        # The legend's colours are those of the blocks and bars, and none of them is that of an error.
        for name in spans:
            swatch = page.locator(f"main > section .swatch.{name}").evaluate(
                "(e) => getComputedStyle(e).backgroundColor"
            )
            assert swatch == f"rgb({', '.join(str(round(255 * part)) for part in parts_of(colour[name]))})"
            gap = abs(hue(colour[name]) - hue(colour["bad"]))
            assert min(gap, 1 - gap) > 0.08, name


def colours(page: Page, names: list[str]) -> dict[str, str]:
    values = page.evaluate(
        "(names) => names.map((n) => getComputedStyle(document.body).getPropertyValue('--' + n).trim())",
        names,
    )
    return dict(zip(names, values, strict=True))


def luminance(colour: str) -> float:
    """The relative luminance of WCAG 2."""
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts_of(colour)
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def parts_of(colour: str) -> list[float]:
    return [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]


def hue(colour: str) -> float:
    red, green, blue = parts_of(colour)
    return colorsys.rgb_to_hls(red, green, blue)[0]


def test_the_chunks_of_a_request_are_explained(browser: Browser, llm: LLM) -> None:
    held = Held()
    with (
        serving(llm, telemetry=held) as site,
        opened(browser, site, complaints="ERR_CONNECTION|ERR_EMPTY") as page,
    ):
        connection(page, "live")
        panel, rows = page.locator("#explain"), page.locator("#explain-rows tr")
        state = page.locator("#explain-state")
        expect(panel).to_be_hidden()
        held.let(20)
        request_id = site.submit(PROMPT_TOKENS, 900)
        name = page.locator(f'[data-id="{request_id}"] button')
        page.locator(f'[data-id="{request_id}"] .facts').click()
        expect(name).to_have_attribute("aria-expanded", "true")
        expect(state).to_have_text("Reading its prompt")
        expect(rows).to_have_count(20)
        held.let(20)
        expect(rows).to_have_count(40)
        held.free()
        expect(state).to_have_text(re.compile("Generating|Reached its limit"))
        all_read = f"5,000 tokens in {-(-PROMPT_TOKENS // 16)} chunks of 8 to 16"
        expect(page.locator("#explain-read")).to_have_text(all_read)
        # The table is what the server says; the chart has a bar of every chunk.
        records = site.service.explain(request_id)
        assert records is not None
        assert rows.count() == len(records)
        cells = rows.nth(1).locator("td")
        assert cells.all_inner_texts()[:5] == ["16\N{EN DASH}32", "16", "16", "0", "fixed"]
        assert rows.last.locator("td").all_inner_texts()[:5] == [
            "4,992\N{EN DASH}5,000",
            "8",
            "4,992",
            "0",
            "end",
        ]
        expect(page.locator("#explain-rules li")).to_have_text(
            [f"fixed, {len(records) - 1} chunks: the fixed size", "end, 1 chunk: what was left of the prompt"]
        )
        for path, num_bars in (
            (".rule-fixed", len(records) - 1),
            (".rule-end", 1),
            (".measured", len(records)),
        ):
            drawn = page.locator(f"#explain-chart {path}").get_attribute("d") or ""
            assert drawn.count("M") == num_bars
        page.locator("#explain-chart").hover(position={"x": 52, "y": 60})
        expect(page.locator("#explain-detail")).to_have_text(
            re.compile(r"^[\d,]+.[\d,]+ · 16 tokens · .* the fixed size$")
        )
        # By keyboard alone, on a request that has ended.
        expect(state).to_have_text("Reached its limit")
        page.get_by_role("button", name="Close").press("Enter")
        expect(panel).to_be_hidden()
        past = page.locator(f'.past[data-id="{request_id}"]')
        facts = [f"Request 1{request_id[-6:]}", "reached its limit", "5,000", "900"]
        columns = past.locator("th, td")
        for column, fact in enumerate(facts):
            expect(columns.nth(column)).to_have_text(fact)
        expect(past.locator("button")).to_have_attribute("aria-expanded", "false")
        past.locator("button").press("Enter")
        expect(rows).to_have_count(len(records))
        page.locator(".chunks").press("Escape")
        expect(panel).to_be_hidden()
        expect(past.locator("button")).to_be_focused()
        past.locator("button").press(" ")
        expect(rows).to_have_count(len(records))
        # Another server knows nothing of it: the page keeps what it has, and says so.
        site.stop()
        with serving(llm, port=site.port):
            expect(state).to_have_text("The server knows no more of this request.")
            connection(page, "live")
            assert rows.count() == len(records)
            expect(past).to_have_count(0)
        site.start()


def test_a_key_is_asked_for(browser: Browser, llm: LLM) -> None:
    with (
        serving(llm, api_key="right-key") as site,
        opened(browser, site, complaints="status of 401") as page,
    ):
        connection(page, "locked")
        key = page.get_by_label("API key")
        key.fill("wrong-key")
        key.press("Enter")
        expect(page.locator("#key-text")).to_have_text("The server does not accept this key.")
        key.fill("right-key")
        key.press("Enter")
        connection(page, "live")
        expect(key).to_be_hidden()
        page.reload()
        connection(page, "live")
        page.get_by_label("Prompt", exact=True).fill("Hello")
        page.get_by_label("Answer at most").fill("5")
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#try-state")).to_have_text(re.compile("^(Reached its limit|Done): "))


def test_a_server_that_is_gone_is_missed(browser: Browser, site: Site) -> None:
    with opened(
        browser, site, complaints="ERR_CONNECTION_REFUSED|ERR_SOCKET|ERR_EMPTY|ERR_CONNECTION"
    ) as page:
        connection(page, "live")
        site.stop()
        connection(page, "no answer")
        expect(page.locator("#notice")).to_contain_text("the next try is in")
        # It tries by itself, too: those tries are to fail, so that the button is there, and is what helps.
        page.evaluate(
            """() => {
                const {fetch} = window;
                let isTrying = false;
                document.getElementById("retry").addEventListener("click", () => {
                    isTrying = true;
                    setTimeout(() => { isTrying = false; });
                }, {capture: true});
                window.fetch = async (...asked) => {
                    if (!isTrying) throw new TypeError("held back");
                    window.fetch = fetch;
                    return fetch(...asked);
                };
            }"""
        )
        site.start()
        page.get_by_role("button", name="Try now").click()
        connection(page, "live")
        expect(page.locator("#notice")).to_be_hidden()


def test_requests_have_names_and_come_before_what_one_may_try(browser: Browser, llm: LLM) -> None:
    with serving(llm) as site, opened(browser, site) as page:
        titles = page.locator("main h2").all_text_contents()
        order = [titles.index(title) for title in ("Steps", "Requests", "Try a prompt")]
        assert order == sorted(order)
        for number in (1, 2):
            site.submit(5, 3)
            row = page.locator("#ended tr").first  # the newest
            expect(row.locator("th button")).to_have_text(f"Request {number}")
        heads = page.locator(".ended-list thead th").all_text_contents()
        cells = dict(zip(heads, row.locator("th, td").all_text_contents(), strict=True))
        assert cells["End"] == "reached its limit"
        assert (cells["Prompt"], cells["Answer"]) == ("5", "3")


def test_every_part_has_a_name(browser: Browser, llm: LLM) -> None:
    held = Held()
    with serving(llm, telemetry=held) as site, opened(browser, site) as page:
        held.let(5)
        site.submit(PROMPT_TOKENS, 100)
        expect(page.locator(".request")).to_have_count(1)
        nameless = page.evaluate(
            """() => [...document.querySelectorAll("input, textarea, button, canvas, [role=progressbar], section")]
                .filter((e) => !(e.labels?.length || e.textContent.trim() || e.getAttribute("aria-label"))
                    || (e.matches("[role]") && !e.getAttribute("aria-label")))
                .map((e) => e.outerHTML)"""
        )
        assert nameless == []
        expect(page.locator("#model")).to_have_text(MODEL_NAME)


def test_responses_are_safe(site: Site) -> None:
    explain = f"/explain/{site.submit(10, 1)}"
    for path in ("/", "/status", "/metrics", explain, *(f"/page/{file.name}" for file in FOLDER.iterdir())):
        _, headers = site.get(path)
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "*" not in policy
        assert headers["x-content-type-options"] == "nosniff"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        site.get("/page/..%2Fpages.py")


def test_status_tells_all(site: Site) -> None:
    site.submit(100, 3)

    def told() -> Any:
        return json.loads(site.get("/status")[0])

    # The last token is told a moment after its step.
    wait_for(lambda: (told()["latency"]["inter_token"] or {"count": 0})["count"] == 2)
    wait_for(lambda: not site.service.status().requests)
    status = told()
    assert status["model"]["name"] == MODEL_NAME
    assert status["settings"]["chunk"]["effective"] == 16
    assert status["settings"]["policy"] == "mixed"
    assert status["cache"]["blocks_total"] == site.service.status().cache.blocks_total
    assert status["latency"]["first_token"]["count"] == 1
    assert status["latency"]["inter_token"]["count"] == 2
    spans = [span for step in status["steps"] for span in step["spans"]]
    chunks = [(span["start"], span["end"]) for span in spans if span["kind"] == "chunk"]
    assert chunks == [(start, min(start + 16, 100)) for start in range(0, 100, 16)]
    assert sum(span["kind"] == "decode" for span in spans) == 2
    after = status["steps"][3]["index"]
    rest = json.loads(site.get(f"/status?steps_after={after}")[0])["steps"]
    assert rest == status["steps"][4:]


def test_text_is_never_read_as_html() -> None:
    for file in FOLDER.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", file.read_text()
        )


def test_its_files_ship() -> None:
    root = Path(penstock.__file__).parent
    project = tomllib.loads((root.parents[1] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["penstock"]
    for file in FOLDER.iterdir():
        assert any(fnmatch(str(file.relative_to(root)), pattern) for pattern in patterns)
