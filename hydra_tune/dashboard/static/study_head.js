// The common head of a study's pages: its name and state, its tabs, and live updates.

import { follow, link, report } from "./api.js";
import { h, replace, state } from "./dom.js";
import { duration } from "./format.js";

export function tabs(study, current) {
  const entries = [["Overview", `/studies/${study.id}`], ["Devices", `/studies/${study.id}/devices`]];
  return h("nav", { class: "tabs", "aria-label": "Pages of this study" },
    entries.map(([text, path]) => h("a", { href: link(path), "aria-current": text === current ? "page" : null }, text)));
}

export function progressMeter(study) {
  const total = Math.max(study.planned ?? 0, study.trials, 1);
  const order = ["COMPLETE", "PRUNED", "DIVERGED", "FAILED", "FAIL", "OUT_OF_MEMORY", "LOST", "HUNG", "RUNNING"];
  const states = Object.entries(study.counts).sort(([a], [b]) => order.indexOf(a) - order.indexOf(b));
  const meter = h("div", { class: "meter", role: "img", "aria-label": `${study.finished} of ${study.planned ?? study.trials} trials have ended` },
    states.map(([name, count]) => h("i", { class: name.toLowerCase(), style: { width: `${(100 * count) / total}%` } })));
  return { meter, key: h("div", { class: "key" }, states.map(([name, count]) => h("span", { class: "row" }, state(name), h("span", { class: "small number" }, count)))) };
}

export function timeLeft(study) {
  return study.eta_seconds === null ? "" : `about ${duration(study.eta_seconds)} left`;
}

/** The best value as text, or the reason why there is none. */
export function goal(study) {
  return study.metrics.map((metric, i) => `${study.directions[i]} ${metric}`).join(", ");
}

/** Follow a study: show in the frame whether it is live, call `changed(news)` on news, and show a notice at its end. */
export function followStudy(study, frame, notices, changed) {
  if (report) return () => {};
  let running = study.state === "running";
  const say = (connected) => frame.live(running ? (connected ? "live" : "connection lost, trying again") : study.state, running ? (connected ? "on" : "off") : "");
  say(true);
  return follow(study.id, study.version, {
    connected: say,
    change(news) {
      running = news.study.state === "running";
      study.state = news.study.state;
      say(true);
      if (running) notices.replaceChildren();
      changed(news);
    },
    end(news) {
      running = false;
      study.state = news.state;
      say(true);
      const how = news.state === "finished" ? "The search has finished." : "The search was stopped before all its trials ended; resume it to go on.";
      replace(notices, h("p", { class: "notice", role: "status" }, how));
    },
  });
}
