"""Every widget is operated in a browser, and what it shows is compared with the library."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from tilewise import mods
from tilewise.costs.devices import device
from tilewise.costs.explain import explain
from tilewise.costs.waves import matmul_blocks, waves
from tilewise.reference import attention as rung
from tilewise.spec import AttentionError
from tilewise_lab import trace
from tilewise_lab.explore.data import answer
from tilewise_lab.machine import coalesce, pipeline

CHAPTERS = ("softmax", "tiles", "roof", "waves", "layout", "pipeline", "autograd", "masks")


class Widget:
    def __init__(self, page, name):
        self.page, self.name, self.node = page, name, page.locator(f"#{name}")
        self.node.scroll_into_view_if_needed()
        page.wait_for_function(f"document.getElementById('{name}').dataset.ready")

    def shows(self, **values):
        """What the elements with these data-values say; waits for it."""
        from playwright.sync_api import expect

        expect.set_options(timeout=20_000)
        for name, text in values.items():
            expect(self.node.locator(f"[data-value='{name.replace('_', '-')}']")).to_have_text(text)

    def settled(self, **state):
        """The picture is that of this state."""
        self.page.wait_for_function(
            "([name, state]) => { const now = document.getElementById(name).dataset.ready;"
            "return Object.entries(state).every(([key, value]) => JSON.parse(now)[key] === value); }",
            arg=[self.name, state],
        )

    def slide(self, key, value):
        """Move a slider: to a value, or, where it counts positions, to a position."""
        self.node.locator(f"input[type=range][name={self.name}-{key}]").evaluate(
            "(e, v) => { e.value = v; e.dispatchEvent(new Event('input', {bubbles: true})); }", value
        )

    def choose(self, key, value):
        self.node.locator(f"input[type=radio][name={self.name}-{key}][value='{value}']").check(force=True)

    def select(self, key, value):
        self.node.locator(f"select[name={self.name}-{key}]").select_option(value)

    def toggle(self, key):
        self.node.locator(f"input[role=switch][name={self.name}-{key}]").click()

    def step(self, which):
        self.node.locator(f"[data-step={which}]").click()


def fixed(x: float, digits: int = 6) -> str:
    return f"{x:.{digits}f}".replace("-", "−")


def size(x: float) -> str:
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if x >= scale:
            return f"{float(f'{x / scale:.3g}'):g} {unit}"
    return f"{x} B"


def seconds(x: float) -> str:
    scale, unit = (1e-3, "ms") if x >= 1e-3 else (1e-6, "µs")
    return f"{float(f'{x / scale:.3g}'):g} {unit}"


def percent(x: float, digits: int = 1) -> str:
    return f"{100 * x:.{digits}f} %"


def test_softmax_of_the_readers_numbers(visit, live):
    widget = Widget(visit(live), "softmax")
    widget.shows(l="1.185122", factor="0.135335", m="5")  # the notes' example, third element
    widget.node.locator("input[type=text]").fill("1, 4 2.5")
    widget.node.locator("input[type=text]").press("Enter")
    widget.shows(l="0.000000")
    told = trace.softmax([1, 4, 2.5])
    for step in told["right"]["steps"]:
        widget.step("next")
        widget.shows(l=fixed(step["l"]), factor=fixed(step["factor"]))
    widget.step("last")
    widget.shows(
        sum="1.000000",
        lse=fixed(told["right"]["lse"]),
        **{f"p{i}": fixed(p) for i, p in enumerate(told["right"]["out"])},
    )
    widget.toggle("fix")
    widget.shows(l=fixed(told["wrong"]["steps"][-1]["l"]), sum=fixed(sum(told["wrong"]["out"])))
    assert widget.node.locator(".readouts .bad").count() == 2


def test_bad_numbers_are_refused_in_words(visit, live):
    widget = Widget(visit(live), "softmax")
    widget.node.locator("input[type=text]").fill("3, two")
    widget.node.locator("input[type=text]").press("Enter")
    notice = widget.node.locator(".notice")
    notice.wait_for()
    assert "numbers, with commas between them" in notice.inner_text()
    assert ["400" in complaint for complaint in visit.complaints] == [True]
    visit.complaints.clear()


@pytest.mark.parametrize(("order", "mask", "backward"), [("fa1", "none", False), ("fa2", "causal", True)])
def test_tiles_count_what_the_trace_counts(visit, live, order, mask, backward):
    widget = Widget(visit(live), "tiles")
    widget.choose("order", order)
    widget.choose("mask", mask)
    widget.slide("n", 10)
    widget.slide("rows", 4)
    if backward:
        widget.toggle("backward")
    widget.settled(order=order, mask=mask, n=10, rows=4, backward=int(backward))
    widget.step("last")
    told = trace.attention(
        10, 10, d=4, rows=4, columns=2, order=order, causal=mask == "causal", backward=backward, itemsize=2
    )
    end, total = told["steps"][-1], told["totals"]
    widget.shows(
        loaded=size(end["loaded"]), stored=size(end["stored"]), moved=size(end["loaded"] + end["stored"]),
        flops=f"{end['flops']:,}", sram=size(end["sram"]), visited=f"{total['visited']} / {3 * 5}",
    )  # fmt: skip
    assert total["visited"] + total["skipped"] == 3 * 5
    assert widget.node.locator("[data-tile]").count() == 3 * 5
    widget.step("back")
    widget.shows(loaded=size(told["steps"][-2]["loaded"]))


def test_tiles_play(visit, live):
    widget = Widget(visit(f"{live}#tiles.step=0"), "tiles")
    widget.shows(loaded="0 B")
    widget.step("play")
    widget.page.wait_for_function("Number(new URLSearchParams(location.hash.slice(1)).get('tiles.step')) >= 2")
    widget.step("play")


def test_roofline_is_what_explain_says(visit, live):
    widget = Widget(visit(live), "roof")
    here = {"b": 4, "s": 4096, "h": 16, "d": 128, "causal": 0}
    (point,) = (p for p in answer("measured", {"device": "H200"})["points"] if here.items() <= p.items())
    widget.shows(measured=seconds(point["seconds"]))
    widget.select("device", "A100")
    widget.toggle("causal")
    widget.toggle("backward")
    shape = (4, 4096, 16, 128)
    told = explain(shape, shape, shape, causal=True, backward=True, device="A100")
    widget.shows(naive=size(told.traffic.naive), tiled=size(told.traffic.tiled), binding=told.binding)
    assert widget.node.locator("[data-value=measured]").count() == 0  # no A100 was measured
    assert widget.node.locator("[data-point=naive]").count() == 1


@pytest.mark.parametrize(
    ("name", "n", "efficiency"), [("A100", 1792, "90.7 %"), ("A100", 1793, "55.6 %"), ("H200", 2049, None)]
)
def test_waves(visit, live, name, n, efficiency):
    widget = Widget(visit(live), "waves")
    widget.select("device", name)
    widget.slide("n", n)
    told = waves(matmul_blocks(n, n, (256, 128)), device(name).sms)
    widget.shows(
        blocks=str(told.blocks),
        waves=str(told.waves),
        sms=str(told.slots),
        efficiency=efficiency or percent(told.efficiency),
    )
    assert widget.node.locator("figure").count() == told.waves
    cliff = widget.node.locator("[data-cliff]").last
    there = int(cliff.get_attribute("data-cliff"))
    cliff.click()
    widget.shows(blocks=str(matmul_blocks(there, there, (256, 128))))


def test_waves_of_attention(visit, live):
    widget = Widget(visit(f"{live}#waves.device=H200&waves.n=2049"), "waves")
    widget.choose("what", "attention")
    shape = (1, 2049, 16, 128)
    told = explain(shape, shape, shape, device="H200").kernels[0].waves
    widget.shows(
        blocks=f"{told.blocks:,}", waves=str(told.waves), sms=str(told.slots), efficiency=percent(told.efficiency)
    )


def test_layout_and_coalescing(visit, live):
    widget = Widget(visit(live), "layout")
    widget.shows(shape="[3, 2]", strides="[1, 3]", contiguous="no", copies="yes", offset="3")
    widget.choose("shape", "2x4x3")
    widget.shows(strides=str(list(torch.empty(2, 4, 3).stride())), contiguous="yes")
    widget.choose("view2x4x3", "transpose")
    widget.shows(strides=str(list(torch.empty(2, 4, 3).transpose(1, 2).stride())), contiguous="no")
    widget.choose("part", "coalescing")
    for pattern, lanes in (("thread", coalesce.row_per_thread(64, 0)), ("warp", coalesce.row_per_warp(64, 0))):
        widget.choose("pattern", pattern)
        told = coalesce.touched(lanes, 4)
        widget.shows(lines=str(told.lines), sectors=str(told.sectors), efficiency=percent(told.efficiency))


def test_pipelines(visit, live):
    widget = Widget(visit(live), "pipeline")
    widget.shows(sequential="28", pipelined="10")
    widget.slide("iterations", 6)
    plan = pipeline.pipelined(6)
    widget.shows(
        sequential="24", pipelined=str(pipeline.slots(plan)), busy_after=percent(pipeline.utilisation(plan), 0)
    )
    widget.choose("part", "gpus")
    widget.shows(bubble=percent(pipeline.bubble(4, 4)))


def test_the_emulated_kernel(visit, live):
    try:
        told = answer("hopper", {})
    except AttentionError as error:
        pytest.skip(str(error))
    widget = Widget(visit(f"{live}#pipeline.part=hopper"), "pipeline")
    widget.shows(cycles=f"{told['length']:,}")
    assert widget.node.locator("svg title").count() > 50


def test_gradients(visit, live):
    widget = Widget(visit(live), "autograd")
    widget.shows(phi="49", dw1="28", da="42", db1="14")
    widget.slide("a", -1.5)
    graph = {node["name"]: node for node in trace.notes_example(-1.5, 3.0, 1.0)["nodes"]}
    widget.shows(phi=f"{graph['φ']['value']:g}", dw1=f"{graph['w1']['gradient']:g}".replace("-", "−"))
    widget.choose("part", "flash")
    made = torch.Generator().manual_seed(0)
    q, k, v, do = torch.randn(4, 4, 2, generator=made, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    dq, dk, _ = torch.autograd.grad(rung.naive(*leaves), leaves, do)
    widget.shows(matrix="dQ", where="HBM", first=fixed(float(dq[0, 0]), 4))
    widget.step("back")
    widget.shows(matrix="dK", first=fixed(float(dk[0, 0]), 4))


def test_masks(visit, live):
    widget = Widget(visit(live), "masks")
    widget.shows(full="28", part="8", empty="28", sees="71")
    widget.select("kind", "window")
    kinds = mods.block_mask(mods.window_with_globals(16, 0), 128, 128, block=(16, 16)).tiles
    widget.shows(full=str(int((kinds == 2).sum())), part=str(int((kinds == 1).sum())), sees="33")


def test_the_address_holds_the_state(visit, live):
    widget = Widget(visit(live), "softmax")
    widget.toggle("fix")
    widget.step("next")
    widget.shows(l="2.386195")
    again = Widget(visit(widget.page.url), "softmax")
    again.shows(l="2.386195")
    again.page.evaluate("location.hash = '#softmax.step=1'")
    again.shows(l="1.000000")


def test_a_keyboard_is_enough(visit, live):
    widget = Widget(visit(live), "softmax")
    card = widget.node.locator(".card")
    card.focus()
    for key, l in (("ArrowRight", "1.203438"), ("ArrowLeft", "1.185122"), ("Home", "0.000000"), ("End", "1.203438")):
        card.press(key)
        widget.shows(l=l)
    widget.page.keyboard.press("Tab")
    assert widget.page.evaluate("document.activeElement.name") == "softmax-x"
    widget.page.keyboard.press("Tab")
    widget.page.keyboard.press("Space")
    widget.shows(l="2.386195")


@pytest.mark.parametrize("where", ["live", "copy"])
def test_two_languages_two_themes_and_a_phone(visit, request, where):
    """Every chapter is drawn, without a complaint, in both languages; and nothing is wider than a phone."""
    page = visit(request.getfixturevalue(where), width=390, color_scheme="dark")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.locator("#theme").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    headings = []
    for language in ("en", "zh-Hans"):
        assert page.evaluate("document.documentElement.lang") == language
        for name in CHAPTERS:
            widget = Widget(page, name)
            assert widget.node.locator(".notice").is_hidden()
            assert widget.node.locator(".figure").inner_text()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        headings.append(page.locator("h2").all_inner_texts())
        page.locator("#language").click()
    assert not set(headings[0]) & set(headings[1])


def test_the_copy_needs_no_server(visit, copy):
    page = visit(copy, offline=True)
    widget = Widget(page, "softmax")
    widget.select("x", "100,101,99")
    widget.step("last")
    widget.shows(lse=fixed(trace.softmax([100, 101, 99])["right"]["lse"]))
    tiles = Widget(page, "tiles")
    tiles.choose("order", "fa1")
    tiles.slide("n", 1)  # the second of the lengths that the copy holds
    tiles.settled(order="fa1", n=12)
    tiles.step("last")
    told = trace.attention(12, 12, d=4, rows=2, columns=2, order="fa1", itemsize=2)["steps"][-1]
    tiles.shows(loaded=size(told["loaded"]), stored=size(told["stored"]))
    masks = Widget(page, "masks")
    masks.select("kind", "document")
    masks.shows(sees="32")
    page.evaluate("location.hash = '#softmax.x=9,9,9'")
    notice = page.locator("#softmax .notice")
    notice.wait_for()
    assert "tilewise explore" in notice.inner_text()


def test_the_copy_is_small_and_alone(copy):
    text = Path(urlsplit(copy).path).read_text(encoding="utf-8")
    assert len(text.encode()) < 3e6
    loads = re.findall(r"""<(?:script|link|img)[^>]*(?:src|href)=["'](?!data:)[^"']*""", text)
    assert loads == []
