"""The story in a browser: every chapter operated, wide and on a phone, in both languages, live and as a file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tilewise_lab import trace
from tilewise_lab.explore.data import answer

CHAPTERS = ["softmax", "online", "tiles", "masks", "backward", "layout", "pipeline", "waves", "roof", "cache", "plans"]
WIDE, PHONE = 1280, 360


class Chapter:
    def __init__(self, page: Any, name: str) -> None:
        self.page, self.name, self.node = page, name, page.locator(f"#{name}")
        self.node.scroll_into_view_if_needed()
        page.wait_for_function(f"document.getElementById('{name}').dataset.ready")

    def shows(self, **values: str) -> None:
        """What the elements with these data-values say; waits for it."""
        from playwright.sync_api import expect

        expect.set_options(timeout=20_000)
        for name, text in values.items():
            expect(self.node.locator(f"[data-value='{name.replace('_', '-')}']")).to_have_text(text)

    def slide(self, key: str, value: float) -> None:
        """Move a slider: to a value, or, where it counts positions, to a position."""
        self.node.locator(f"input[type=range][name={self.name}-{key}]").evaluate(
            "(e, v) => { e.value = v; e.dispatchEvent(new Event('input', {bubbles: true})); }", value
        )

    def choose(self, key: str, value: object) -> None:
        self.node.locator(f"input[type=radio][name={self.name}-{key}][value='{value}']").check(force=True)

    def select(self, key: str, value: str) -> None:
        self.node.locator(f"select[name={self.name}-{key}]").select_option(value)

    def toggle(self, key: str) -> None:
        self.node.locator(f"input[role=switch][name={self.name}-{key}]").click()

    def step(self, which: str) -> None:
        self.node.locator(f"[data-step={which}]").click()

    def drag(self, key: str, dx: float, dy: float) -> None:
        """With the mouse, from the upper edge of what has this key."""
        self.node.locator(f"[data-key='{key}']").scroll_into_view_if_needed()
        box = self.node.locator(f"[data-key='{key}']").bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + min(box["height"] / 2, 24)
        self.page.mouse.move(x, y)
        self.page.mouse.down()
        self.page.mouse.move(x + dx, y + dy, steps=4)
        self.page.mouse.up()

    def touch(self, key: str, text: str) -> None:
        """Tap what has this key; the panel says this."""
        self.node.locator(f"[data-key='{key}']").first.dispatch_event("click")
        panel = self.node.locator(f"[data-panel='{key.partition('/')[0]}']")
        assert text in panel.inner_text(), panel.inner_text()


def fixed(x: float, digits: int = 6) -> str:
    return f"{x:.{digits}f}".replace("-", "−")


def size(x: float) -> str:
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if x >= scale:
            return f"{float(f'{x / scale:.3g}'):g} {unit}"
    return f"{x} B"


@pytest.mark.parametrize(
    ("where", "width", "language"),
    [
        ("copy", WIDE, "en"),
        ("copy", PHONE, "zh"),
        pytest.param("live", PHONE, "en", marks=pytest.mark.slow),
        pytest.param("live", WIDE, "zh", marks=pytest.mark.slow),
    ],
)
def test_every_chapter_is_operated(visit, request, where, width, language):
    """One visit, from the top to the bottom, with an example of the reader's own."""
    page = visit(request.getfixturevalue(where), width=width, offline=where == "copy", has_touch=width == PHONE)
    if language == "zh":
        page.locator("#language").click()
    assert page.evaluate("document.documentElement.lang") == {"en": "en", "zh": "zh-Hans"}[language]
    own_example(page)
    softmax_and_online(page)
    tiles_and_backward(page)
    machine(page)
    serving(page)
    for name in CHAPTERS:
        assert page.locator(f"#{name} .notice").is_hidden(), name
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(SMALL_TEXT) == []
    assert page.evaluate(CUT_OFF) == []


def own_example(page):
    text, problem = page.locator("#example-text"), page.locator("#example-problem")
    text.fill("")
    assert len(problem.inner_text()) > 10  # a sentence, and the page stays as it was
    assert page.locator("#thread .token").count() == 8
    text.fill(" ".join("abcdefghijklm"))
    assert "13" in problem.inner_text()
    page.locator("[data-preset=sentence]").click()
    assert page.locator("#thread .token").nth(1).inner_text() == "animal"
    text.fill("1 4 2.5 3")
    assert problem.inner_text() == ""
    assert page.locator("#thread [aria-checked=true]").inner_text() == "3"


def softmax_and_online(page):
    told = trace.softmax([1, 4, 2.5, 3])
    chapter = Chapter(page, "softmax")
    chapter.shows(max="4", total="1.000000")
    chapter.touch("softmax/1", fixed(told["right"]["out"][1]))
    chapter.node.locator("[data-key=softmax-x0]").press("ArrowUp")
    assert page.locator("#example-text").input_value() == "2 4 2.5 3"
    chapter.node.locator("[data-key=softmax-x0]").press("ArrowDown")  # it has kept the focus
    chapter.drag("softmax-x3", 0, -60)
    assert float(page.locator("#example-text").input_value().split()[3]) == 5  # 29 pixels each
    page.locator("#example-text").fill("1 4 2.5 3")
    online = Chapter(page, "online")
    online.step("first")
    online.shows(l="0.000000")
    for step in told["right"]["steps"]:
        online.step("next")
        online.shows(l=fixed(step["l"]), factor=fixed(step["factor"]))
    online.step("last")
    online.shows(sum="1.000000", lse=fixed(told["right"]["lse"]))
    online.toggle("fix")
    online.shows(l=fixed(told["wrong"]["steps"][-1]["l"]), sum=fixed(sum(told["wrong"]["out"])))
    online.toggle("fix")


def tiles_and_backward(page):
    page.locator("#example-text").fill("3 2 5 1 4 0 6 2")
    chapter = Chapter(page, "tiles")
    told = trace.attention(8, 8, d=4, rows=4, columns=4, itemsize=2)
    end = told["steps"][-1]
    chapter.step("last")
    whole = {"fa2": end["loaded"] + end["stored"]}
    chapter.shows(loaded=size(end["loaded"]), stored=size(end["stored"]), visited="4 / 4", whole=size(whole["fa2"]))
    numbers = [chapter.node.locator(f"[data-value={name}]").inner_text() for name in ("whole", "other", "naive")]
    assert numbers == sorted(numbers), "by default the story is true: FA2 moves less than FA1, FA1 less than naive"
    chapter.touch("tiles/tile 1,1", "0.37")  # the correction of the last row: e^(5 - 6)
    chapter.node.locator("[data-tile='0,1']").hover()
    assert "(1, 2)" in chapter.node.locator("[data-panel=tiles]").inner_text()
    wide = chapter.node.locator("[data-tile='0,0']").bounding_box()["width"]
    chapter.drag("tiles-columns", -wide / 2, 0)  # four keys wide: now two
    assert chapter.node.locator("[data-tile]").count() == 8
    chapter.choose("order", "fa1")
    chapter.step("last")
    told = trace.attention(8, 8, d=4, rows=4, columns=2, order="fa1", itemsize=2)["steps"][-1]
    chapter.shows(loaded=size(told["loaded"]), stored=size(told["stored"]))
    page.locator("input[name=causal]").click()
    chapter.shows(visited="6 / 8")
    chapter.touch("tiles/q,1", "Q₂")
    chapter.choose("order", "fa2")
    masks(page)
    backward = Chapter(page, "backward")
    backward.step("last")
    told = trace.attention(8, 8, d=4, rows=4, columns=2, causal=True, backward=True, itemsize=2)
    begun = next(step for step in reversed(told["steps"]) if "lse" in [name for name, _ in step["stores"]])
    backward.shows(loaded=size(told["steps"][-1]["loaded"] - begun["loaded"]))
    backward.touch("backward/tile 1,0", "dS")
    backward.choose("part", "matrices")
    backward.shows(matrix="dQ")
    backward.touch("matrices/p", "0.00")
    backward.choose("part", "chain")
    backward.shows(phi="49", dw1="28")
    page.locator("input[name=causal]").click()


def masks(page):
    """Eight tokens in blocks of 4 x 2, and causal."""
    chapter = Chapter(page, "masks")
    chapter.shows(sees="3", full="0", part="5", empty="3")  # a window of 2 to the left
    chapter.touch("masks/3,0", "“1”")  # which makes its row the chosen query
    assert page.locator("#thread [aria-checked=true]").inner_text() == "1"
    chapter.select("kind", "causal")
    chapter.shows(sees="4", full="2", part="4", empty="2")
    chapter.choose("at", "128")
    chapter.shows(full="28", part="8", empty="28", sees="71")


def machine(page):
    layout = Chapter(page, "layout")
    layout.shows(shape="[4, 8]", strides="[1, 4]")
    first = layout.node.locator("[data-key='layout/view 1']")
    first.focus()
    first.press("ArrowDown")
    layout.shows(offset="5")  # row 1, column 1 of the transpose: 1 · 1 + 1 · 4
    layout.choose("part", "coalescing")
    layout.shows(lines="32")
    layout.choose("pattern", "warp")
    layout.shows(lines="1")
    pipeline = Chapter(page, "pipeline")
    tiles = page.locator("#tiles [data-value=visited]").inner_text().partition(" ")[0]  # those of the example
    pipeline.shows(sequential=str(4 * int(tiles)), pipelined=str(int(tiles) + 3))
    pipeline.choose("part", "hopper")
    pipeline.shows(cycles=f"{answer('hopper', {})['length']:,}")
    spans = pipeline.node.locator("svg .touch").count()
    assert spans > 50
    pipeline.node.locator("[data-remark='2']").click()
    page.wait_for_function("location.hash.includes('pipeline.zoom=8')")
    assert pipeline.node.locator("svg .touch").count() < spans
    waves = Chapter(page, "waves")
    waves.shows(blocks="8", sms="6", waves="2")  # 4 heads, 8 tokens in blocks of 4
    waves.choose("what", "matmul")
    waves.shows(blocks="120", waves="2", efficiency="55.6 %")
    waves.node.locator("[data-key=waves-n]").press("ArrowLeft")
    waves.shows(blocks="98", waves="1", efficiency="90.7 %")
    waves.select("device", "H200")
    waves.choose("what", "attention")
    told = answer("grid", {"device": "H200", "heads": "16"})
    waves.shows(sms=str(told["sms"]))
    roof = Chapter(page, "roof")
    told = answer("roof", {"causal": "0"})
    roof.shows(naive=size(told["naive"]), tiled=size(told["tiled"]))
    assert page.evaluate(HIDDEN_POINTS) == []
    roof.select("device", "A100")
    roof.slide("s", 1)
    told = answer("roof", {"device": "A100", "s": "1024"})
    roof.shows(naive=size(told["naive"]), tiled=size(told["tiled"]), measured="–")
    assert page.evaluate(HIDDEN_POINTS) == []


def serving(page):
    cache = Chapter(page, "cache")
    cache.shows(units="28", most="9", alone="13")  # 8 tokens of the example, and 3, 12 and 5; 12 is divided
    cache.node.locator("[data-key=cache-1]").press("ArrowRight")
    cache.shows(units="29")
    cache.choose("at", "server")
    cache.shows(units="444", divided="6 / 12")
    cache.node.locator("[data-key=cache-0]").press("ArrowLeft")
    cache.shows(units="440")
    cache.choose("processors", "H200")
    cache.touch("cache/program 0", "0")
    plans = Chapter(page, "plans")
    told = answer("plans", {"tokens": "1M", "ranks": "64"})
    plans.shows(advice=told["advice"])
    plans.node.locator("[data-strategy=ring]").click()
    ring = next(x for x in told["strategies"] if x["name"] == "ring")
    own = 4 * 4  # steps of the example on 4 GPUs
    assert plans.node.locator("svg .touch").count() == own + len(ring["passes"][0]["bars"])
    plans.toggle("back")
    plans.choose("mask", "window")
    plans.shows(advice=answer("plans", {"tokens": "1M", "ranks": "64", "mask": "window"})["advice"])


# What is too small to read, what does not fit, and which labels lie on points: lists of words, empty if all is well.
SEEN = "const seen = (e) => { const b = e.getBoundingClientRect(); return b.width > 0 && b.height > 0; };"
SMALL_TEXT = f"""() => {{ {SEEN}
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
  for (let node; (node = walker.nextNode()); ) {{
    const e = node.parentElement;
    if (!node.data.trim() || ["SCRIPT", "STYLE", "SUP", "SUB", "OPTION"].includes(e.tagName) || !seen(e)) continue;
    const scale = e.ownerSVGElement ? e.getScreenCTM().a : 1;
    if (parseFloat(getComputedStyle(e).fontSize) * scale < 11) found.push(node.data.trim());
  }}
  return found;
}}"""
CUT_OFF = f"""() => {{ {SEEN}
  return [...document.querySelectorAll("main svg text, main p, main dd, main button, main label, main h2")].filter(seen)
    .filter((e) => !e.closest(".scroll, .tokens, .formula, [clip-path]"))
    .filter((e) => {{ const b = e.getBoundingClientRect(); return b.left < -1 || b.right > innerWidth + 1; }})
    .map((e) => e.closest("section")?.id + ": " + e.textContent);
}}"""
HIDDEN_POINTS = """() => {
  const boxes = (what) => [...document.querySelectorAll(`#roof ${what}`)].map((e) => e.getBoundingClientRect());
  return boxes("[data-label]").flatMap((a) => boxes("[data-point]").filter((b) =>
    a.left < b.right && b.left < a.right && a.top + 3 < b.bottom && b.top < a.bottom - 3).map((b) => [a.x, b.x]));
}"""


@pytest.mark.parametrize("language", ["en", "zh"])
def test_nothing_of_the_two_bars_is_cut(visit, copy, language):
    """All chapters in the one, wide or not; in the other the chosen query, on a phone too."""
    page = visit(f"{copy}#lang={language}", width=WIDE)
    Chapter(page, "softmax")
    nav = page.locator("#bar nav")
    assert nav.evaluate("node => node.scrollWidth <= node.clientWidth")
    assert nav.locator("a >> visible=true").count() == len(CHAPTERS)
    page.set_viewport_size({"width": 1000, "height": 900})
    assert nav.locator("select >> visible=true").count() == 1
    page = visit(f"{copy}#lang={language}&row=7", width=PHONE)
    Chapter(page, "softmax")
    seen, chosen = (page.locator(one).bounding_box() for one in (".tokens", ".token[aria-checked=true]"))
    assert seen["x"] <= chosen["x"]
    assert chosen["x"] + chosen["width"] <= seen["x"] + seen["width"]


def test_the_address_holds_the_state(visit, copy):
    page = visit(copy + "#online.step=2&text=9+9+9&theme=dark&rows=2")
    Chapter(page, "online").shows(l="2.000000")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.locator("#thread select[data-key=rows]").input_value() == "2"
    page.evaluate("location.hash = '#online.step=1&text=9+9+9'")
    online = Chapter(page, "online")
    online.shows(l="1.000000")
    card = online.node.locator(".card")
    card.focus()
    for key, l in (("ArrowRight", "2.000000"), ("End", "3.000000"), ("Home", "0.000000")):
        card.press(key)
        online.shows(l=l)
    online.step("play")
    page.wait_for_function("Number(new URLSearchParams(location.hash.slice(1)).get('online.step')) >= 2")


@pytest.mark.parametrize(("width", "scheme"), [(WIDE, "light"), pytest.param(PHONE, "dark", marks=pytest.mark.slow)])
def test_axe_finds_nothing_serious(visit, copy, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python")
    page = visit(copy + "#pipeline.part=hopper", width=width, color_scheme=scheme)
    found = axe.Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    serious = {one["id"]: one["nodes"][0]["html"][:200] for one in found if one["impact"] in ("serious", "critical")}
    assert serious == {}


def test_the_copy_is_small_alone_quick_and_still(visit, copy):
    """No more than 3 MB and 2 s, nothing loaded, and nothing jumps while a reader scrolls."""
    text = Path(urlsplit(copy).path).read_text(encoding="utf-8")
    assert len(text.encode()) < 3e6
    assert re.findall(r"""<(?:script|link|img)[^>]*(?:src|href)=["'](?!data:)[^"']*""", text) == []
    page = visit(copy, offline=True)
    took = []
    for _ in range(3):  # other tests run beside this one
        took.append(page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd"))
        page.reload()
    assert min(took) < 2000
    page.evaluate("""() => { window.jumps = 0;
      new PerformanceObserver((list) => list.getEntries().forEach((e) => (window.jumps += e.value)))
        .observe({ type: "layout-shift", buffered: true }); }""")
    for at in range(0, page.evaluate("document.documentElement.scrollHeight"), 1500):
        page.evaluate(f"scrollTo(0, {at})")
        page.wait_for_timeout(20)
    assert page.evaluate("window.jumps") < 0.02
