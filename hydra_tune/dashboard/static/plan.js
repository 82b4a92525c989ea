// Shows any strategy's plan: facts as pairs, lists of objects as tables, in the recorded order.

import { empty, h, pairs } from "./dom.js";
import { bytes, duration, number } from "./format.js";

export function plan(trial) {
  const how = trial.strategy ? h("p", {}, "Trained by ", h("strong", {}, trial.strategy), trial.shards > 1 ? ` in ${trial.shards} parts` : "", trial.device ? `, last on ${trial.device}` : "", trial.seed === null ? "" : `, seed ${trial.seed}`, ".") : null;
  if (!trial.plan) return h("div", {}, how);
  const { choice: chosen, ...rest } = trial.plan;
  const known = chosen && typeof chosen === "object";
  return h("div", {}, how, known ? choice(chosen, trial) : null, contents(known ? rest : trial.plan, trial));
}

const OPTION = { strategy: "Strategy", seconds: "Predicted time", device_bytes: "Device memory", host_bytes: "Host memory", communicated_bytes: "Communicated", refused: "Why not" };

/** The planner's reason for this strategy, and its estimate of each strategy. */
function choice({ strategy, because, predicted_seconds: predicted, options, ...rest }, trial) {
  const some = Array.isArray(options) ? options.filter((one) => one && typeof one === "object") : [];
  const others = [...new Set(some.flatMap(Object.keys))].filter((name) => !(name in OPTION));
  const { refused, ...first } = OPTION;
  const heads = { ...first, ...Object.fromEntries(others.map((name) => [name, words(name)])), refused };
  const used = Object.keys(heads).filter((name) => some.some((one) => ![undefined, null, ""].includes(one[name])));
  const numeric = (name) => some.some((one) => typeof one[name] === "number");
  const row = (one) => h("tr", { class: one.strategy === strategy ? "chosen" : one.refused ? "soft" : null }, used.map((name) => h("td", { class: numeric(name) ? "number" : name === "refused" ? "wrap" : null }, one.refused && numeric(name) && !one[name] ? "" : cell(name, one[name]))));
  return h("div", { class: "choice" }, h("h3", {}, "Why this strategy"),
    h("p", {}, h("strong", {}, String(strategy ?? trial.strategy)), because ? `: ${because}` : "", typeof predicted === "number" ? ` (predicted ${duration(predicted)})` : ""),
    some.length ? h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, used.map((name) => h("th", { class: numeric(name) ? "number" : null }, heads[name])))), h("tbody", {}, some.map(row)))) : null,
    Object.keys(rest).length ? contents(rest, trial) : null);
}

function contents(found, trial) {
  if (Array.isArray(found)) return list("plan", found, trial);
  if (found === null || typeof found !== "object") return h("p", {}, String(found));
  const simple = Object.entries(found).filter(([, value]) => plain(value));
  const nested = Object.entries(found).filter(([, value]) => !plain(value));
  return h("div", {}, simple.length ? pairs(simple.map(([name, value]) => [words(name), cell(name, value)])) : null,
    nested.map(([name, value]) => h("div", {}, h("h3", {}, words(name)), Array.isArray(value) ? list(name, value, trial) : things(value, trial))));
}

/** An object of objects is shown as a table, with its keys in the first column. */
function things(value, trial) {
  const entries = Object.entries(value);
  if (entries.length && entries.every(([, one]) => one && typeof one === "object" && !Array.isArray(one))) {
    return list("", entries.map(([name, one]) => ({ name, ...one })), trial);
  }
  return contents(value, trial);
}

function list(name, values, trial) {
  if (!values.length) return empty("none");
  if (!values.every((one) => one && typeof one === "object" && !Array.isArray(one))) return h("p", {}, values.map((one) => cell(name, one)).join(", "));
  const columns = [...new Set(values.flatMap((one) => Object.keys(one)))];
  const numeric = (column) => values.some((one) => typeof one[column] === "number") && values.every((one) => one[column] === undefined || one[column] === null || typeof one[column] === "number");
  const chosen = (one) => one.chosen === true || [one.strategy, one.name].includes(trial.strategy);
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, columns.map((column) => h("th", { class: numeric(column) ? "number" : null }, words(column))))),
    h("tbody", {}, values.map((one) => h("tr", { class: chosen(one) ? "chosen" : null }, columns.map((column) => h("td", { class: numeric(column) ? "number" : "wrap" }, cell(column, one[column]))))))));
}

function plain(value) {
  return value === null || typeof value !== "object" || (Array.isArray(value) && value.every((one) => one === null || typeof one !== "object"));
}

function words(name) {
  return name.replaceAll("_", " ").replace(/ ms$/, "").replace(/ seconds$/, "").replace(/ bytes$/, "");
}

function cell(name, value) {
  if (value === null || value === undefined) return "";
  if (Array.isArray(value)) return value.length <= 4 ? value.map((one) => cell("", one)).join(", ") : `${cell("", value[0])} to ${cell("", value.at(-1))} (${value.length})`;
  if (typeof value === "object") return JSON.stringify(value);
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "number") return String(value);
  if (/bytes|memory/.test(name)) return bytes(value);
  if (/(^|_)ms$/.test(name)) return `${number(value, 4)} ms`;
  if (/seconds?$/.test(name)) return duration(value);
  return number(value);
}
