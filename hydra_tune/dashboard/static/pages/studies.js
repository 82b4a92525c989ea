// All studies: objective, progress and best result of each.

import { get, link } from "../api.js";
import { card, empty, h, replace, state } from "../dom.js";
import { duration, moment, number } from "../format.js";
import { goal, progressMeter, timeLeft } from "../study_head.js";

const PAUSE = 3000;

export async function show(content, { frame }) {
  frame.title([]);
  const place = h("div", {});
  replace(content, h("div", { class: "head" }, h("h1", {}, "Studies")), place);
  let known = "";
  async function load() {
    const studies = await get("/api/studies");
    const text = JSON.stringify(studies);
    if (text !== known) { known = text; replace(place, table(studies)); }
    return studies.some((study) => study.state === "running");
  }
  const running = await load();
  frame.live(running ? "live" : "", "on");
  // Polled, since only single studies have a stream, and browsers allow few at a time.
  const timer = setInterval(() => load().then((some) => frame.live(some ? "live" : "", "on"), () => frame.live("connection lost, trying again", "off")), PAUSE);
  return () => clearInterval(timer);
}

function table(studies) {
  if (!studies.length) return card("Nothing yet", {}, empty("This database has no studies. A search makes the first: hydra-tune search examples/digits.yaml"));
  const heads = ["Study", "State", "Best", "Goal", "Progress", "Last trial ended"];
  return h("section", { class: "card" }, h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, heads.map((text) => h("th", { class: text === "Best" ? "number" : null }, text)))),
    h("tbody", {}, studies.map(row)))));
}

function row(study) {
  const { meter } = progressMeter(study);
  const total = study.planned ?? study.trials;
  const best = study.best ? h("a", { href: link(`/studies/${study.id}/trials/${study.best.number}`), title: `trial ${study.best.number}` }, number(study.best.value)) : study.metrics.length > 1 ? "Pareto front" : "";
  const counts = Object.entries(study.counts).map(([name, count]) => `${count} ${name.toLowerCase().replaceAll("_", " ")}`).join(", ");
  return h("tr", {},
    h("td", { class: "wrap" }, h("a", { href: link(`/studies/${study.id}`) }, h("strong", {}, study.name))),
    h("td", {}, state(study.state)),
    h("td", { class: "number" }, best),
    h("td", { class: "soft" }, goal(study)),
    h("td", {}, meter, h("span", { class: "small soft number" }, `${study.finished}/${total}`, counts ? ` · ${counts}` : "", timeLeft(study) ? ` · ${timeLeft(study)}` : "")),
    h("td", { class: "soft" }, moment(study.ended), study.ended && study.started ? h("div", { class: "small" }, `took ${duration(study.ended - study.started)}`) : null));
}
