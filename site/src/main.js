import { address, h, language, measure, offline, onAddress, remember, t } from "./core.js";
import { example, shared } from "./example.js";
import { Stage } from "./stage.js";
import { opening, strip } from "./thread.js";
import { attention, traffic } from "./math/attention.js";
import { chain } from "./math/graph.js";
import { plan } from "./math/kv.js";
import { ring } from "./math/ring.js";
import * as machine from "./math/machine.js";
import { mask } from "./math/masks.js";
import { softmax } from "./math/softmax.js";
import { chapters } from "./widgets/index.js";

window.tilewise = { example, softmax, attention, traffic, chain, mask, plan, ring, ...machine }; // what the tests compare with the library

const byId = (id) => document.getElementById(id);
const stages = chapters.map((widget, index) => new Stage(widget, index + 1, refresh));

const LOGO =
  '<svg viewBox="0 0 26 26" aria-hidden="true"><path d="M0 0h8v8H0zM0 9h8v8H0zM9 9h8v8H9zM0 18h8v8H0zM9 18h8v8H9zM18 18h8v8h-8z"/><path opacity="0.2" d="M9 0h8v8H9zM18 0h8v8h-8zM18 9h8v8h-8z"/></svg>';

function frame() {
  document.documentElement.lang = language() === "zh" ? "zh-Hans" : "en";
  document.title = t("page.title");
  const named = chapters.map(({ id }, index) => [id, `${index + 1} ${t(`${id}.short`)}`]);
  byId("bar").replaceChildren(
    h("a.mark", { href: "#", "aria-label": "tilewise", html: `${LOGO}<span>tilewise</span>`, onclick: (event) => (event.preventDefault(), scrollTo({ top: 0, behavior: "smooth" })) }),
    h("nav", { "aria-label": t("page.chapters") },
      named.map(([id, name]) => h("a", { href: `#at=${id}`, "data-chapter": id, onclick: (event) => (event.preventDefault(), goTo(id)) }, name)),
      h("select", { "aria-label": t("page.chapters"), onchange: (event) => goTo(event.target.value) }, named.map(([id, name]) => h("option", { value: id }, name)))),
    h("div.switches", {},
      h("button", { type: "button", id: "language", lang: language() === "zh" ? "en" : "zh-Hans", onclick: () => remember({ lang: language() === "zh" ? "en" : "zh" }) }, t("page.language")),
      h("button", { type: "button", id: "theme", "aria-label": t("page.theme"), title: t("page.theme"), onclick: () => remember({ theme: dark() ? "light" : "dark" }) }, "◐")));
  byId("intro").replaceChildren(
    h("h1", {}, t("page.heading")),
    h("p.lead", { html: t("page.lead") }),
    opening(refresh),
    ...(offline ? [h("p.small", { html: t("offline.about") })] : []));
  byId("thread").setAttribute("aria-label", t("thread.title"));
  byId("footer").replaceChildren(h("p", { html: t("page.footer") }));
}

function dark() {
  const chosen = address.get("theme");
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function goTo(id) {
  byId(id).scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
  remember({ at: id }, { quiet: true });
}

/** The example has changed: every chapter is about it. */
function refresh() {
  strip(byId("thread"), refresh);
  const text = byId("example-text");
  if (text !== document.activeElement) text.value = shared().text;
  stages.forEach((stage) => stage.follow());
}

function everything() {
  document.documentElement.dataset.theme = dark() ? "dark" : "light";
  frame();
  stages.forEach((stage) => stage.build());
  measure(stages[0].figure);
  refresh();
}

const marker = new IntersectionObserver(
  (entries) => {
    for (const entry of entries.filter(({ isIntersecting }) => isIntersecting)) {
      document.querySelectorAll("[data-chapter]").forEach((link) => {
        const here = link.dataset.chapter === entry.target.id;
        if (here) link.setAttribute("aria-current", "true");
        else link.removeAttribute("aria-current");
        if (here) link.parentNode.scrollTo({ left: link.offsetLeft - 80, behavior: "smooth" });
      });
      document.querySelector("nav select").value = entry.target.id;
    }
  },
  { rootMargin: "-30% 0px -60% 0px" },
);

byId("chapters").append(...stages.map((stage) => stage.node));
everything();
stages.forEach((stage) => marker.observe(stage.node));
if (address.get("at")) byId(address.get("at"))?.scrollIntoView();
onAddress(everything);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", everything);
let [before, timer] = [innerWidth, 0];
addEventListener("resize", () => {
  if (innerWidth === before) return; // a phone's bars come and go
  before = innerWidth;
  clearTimeout(timer);
  timer = setTimeout(everything, 150);
});
