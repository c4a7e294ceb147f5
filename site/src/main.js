import { address, h, language, offline, onAddress, remember, t } from "./core.js";
import { Stage } from "./stage.js";
import { softmax } from "./widgets/softmax.js";
import { tiles } from "./widgets/tiles.js";
import { roof } from "./widgets/roof.js";
import { waves } from "./widgets/waves.js";
import { layout } from "./widgets/layout.js";
import { pipeline } from "./widgets/pipeline.js";
import { autograd } from "./widgets/autograd.js";
import { masks } from "./widgets/masks.js";

const widgets = [softmax, tiles, roof, waves, layout, pipeline, autograd, masks];
const stages = widgets.map((widget, index) => new Stage(widget, index + 1));

const LOGO =
  '<svg viewBox="0 0 26 26" aria-hidden="true"><path d="M0 0h8v8H0zM0 9h8v8H0zM9 9h8v8H9zM0 18h8v8H0zM9 18h8v8H9zM18 18h8v8h-8z"/><path opacity="0.2" d="M9 0h8v8H9zM18 0h8v8h-8zM18 9h8v8h-8z"/></svg>';

function frame() {
  const [bar, intro, footer] = ["bar", "intro", "footer"].map((id) => document.getElementById(id));
  document.documentElement.lang = language() === "zh" ? "zh-Hans" : "en";
  document.title = t("page.title");
  bar.replaceChildren(
    h("a.mark", { href: "#", html: `${LOGO}<span>tilewise</span>`, onclick: (event) => (event.preventDefault(), scrollTo({ top: 0, behavior: "smooth" })) }),
    h("nav", { "aria-label": t("page.chapters") },
      widgets.map(({ id }, index) =>
        h("a", { href: `#at=${id}`, "data-chapter": id, onclick: (event) => (event.preventDefault(), goTo(id)) }, `${index + 1} ${t(`${id}.short`)}`))),
    h("div.switches", {},
      h("button", { type: "button", id: "language", lang: language() === "zh" ? "en" : "zh-Hans", onclick: () => remember({ lang: language() === "zh" ? "en" : "zh" }) }, t("page.language")),
      h("button", { type: "button", id: "theme", "aria-label": t("page.theme"), title: t("page.theme"), onclick: switchTheme }, "◐")));
  intro.replaceChildren(
    h("h1", {}, t("page.heading")),
    h("p.lead", { html: t("page.lead") }),
    ...(offline ? [h("p.copy", { html: t("offline.about") })] : []));
  footer.replaceChildren(h("p", { html: t("page.footer") }));
}

function dark() {
  const chosen = address.get("theme");
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function switchTheme() {
  remember({ theme: dark() ? "light" : "dark" });
}

function goTo(id) {
  document.getElementById(id).scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
  remember({ at: id }, { quiet: true });
}

function everything() {
  document.documentElement.dataset.theme = dark() ? "dark" : "light";
  frame();
  stages.forEach((stage) => stage.build());
}

const watcher = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) if (entry.isIntersecting) stages.find((stage) => stage.node === entry.target).show();
  },
  { rootMargin: "600px" },
);

const marker = new IntersectionObserver(
  (entries) => {
    for (const entry of entries)
      if (entry.isIntersecting)
        document.querySelectorAll("[data-chapter]").forEach((link) => {
          const here = link.dataset.chapter === entry.target.id;
          link.toggleAttribute("aria-current", here);
          if (here) link.parentNode.scrollTo({ left: link.offsetLeft - 80, behavior: "smooth" });
        });
  },
  { rootMargin: "-30% 0px -60% 0px" },
);

document.getElementById("chapters").append(...stages.map((stage) => stage.node));
everything();
stages.forEach((stage) => (watcher.observe(stage.node), marker.observe(stage.node)));
if (address.get("at")) document.getElementById(address.get("at"))?.scrollIntoView();
onAddress(everything);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", everything);
matchMedia("(max-width: 639px)").addEventListener("change", everything);
