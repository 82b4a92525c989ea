// The frame of every page: the bar, the theme, and the module that draws the page of the address.

import { get, link, report, Trouble } from "./api.js";
import { h, replace } from "./dom.js";

const ROUTES = [
  [/^\/$/, () => import("./pages/studies.js")],
  [/^\/login$/, () => import("./pages/login.js")],
  [/^\/api$/, () => import("./pages/api.js")],
  [/^\/studies\/(\d+)$/, () => import("./pages/study.js")],
  [/^\/studies\/(\d+)\/devices$/, () => import("./pages/devices.js")],
  [/^\/studies\/(\d+)\/compare$/, () => import("./pages/compare.js")],
  [/^\/studies\/(\d+)\/trials\/(\d+)$/, () => import("./pages/trial.js")],
];

const content = document.getElementById("content");
const live = h("span", { class: "live", role: "status", hidden: true });
const crumbs = h("nav", { "aria-label": "Where you are" });
let leave = null;

function bar() {
  const theme = h("button", { class: "quiet", title: "Light or dark", "aria-label": "Switch between light and dark", onclick: switchTheme }, "◐");
  const brand = h("a", { class: "brand", href: link(report ? report.home : "/") }, mark(), h("span", {}, "Hydra Tune"));
  const api = report ? null : h("a", { class: "api small soft", href: "/api" }, "API");
  replace(document.getElementById("bar"), brand, crumbs, live, api, theme);
}

function mark() {
  return h("img", { src: document.querySelector("link[rel=icon]").href, alt: "" });
}

function switchTheme() {
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("hydra-tune-theme", root.dataset.theme); } catch { /* without storage the theme lasts for this page only */ }
  dispatchEvent(new Event("themechange"));
}

/** Functions by which pages change the frame. */
const frame = {
  title(parts) {
    document.title = [...parts.map(([text]) => text).reverse(), "Hydra Tune"].join(" · ");
    replace(crumbs, parts.map(([text, path]) => [h("span", { "aria-hidden": "true" }, "/"), path ? h("a", { href: link(path) }, text) : h("span", {}, text)]));
  },
  live(word, how) {
    live.hidden = !word;
    live.className = `live ${how || ""}`;
    live.textContent = word || "";
  },
};

async function show() {
  leave?.();
  leave = null;
  const address = report ? new URL(location.hash.slice(1) || report.home, "http://report") : location;
  frame.live("");
  for (const [pattern, load] of ROUTES) {
    const found = pattern.exec(address.pathname);
    if (!found) continue;
    try {
      const page = await load();
      const context = { frame, server, query: new URLSearchParams(address.search) };
      leave = await page.show(content, context, ...found.slice(1).map(Number));
    } catch (error) {
      replace(content, h("p", { class: "notice bad", role: "alert" }, error.message));
      if (!(error instanceof Trouble)) throw error;
    }
    return;
  }
  replace(content, h("p", { class: "notice" }, "There is no such page. ", h("a", { href: link("/") }, "All studies")));
}

/** Facts about the server, fetched once, when a page first needs them. */
let known = null;
function server() {
  if (report) return Promise.resolve({ actions: false });
  known ||= get("/api/server");
  return known;
}

bar();
show();
if (report) addEventListener("hashchange", show);
