// Requests to the process that runs a study; only if the server was started with --allow-actions.

import { get, send } from "./api.js";
import { h, replace } from "./dom.js";

export function actionBar(study) {
  const says = h("span", { class: "small soft", role: "status" });
  const count = h("input", { type: "number", min: 1, max: 100000, value: 10, "aria-label": "How many trials to add", style: { width: "5.5rem" } });
  const ask = (wish, question) => askFor(study.id, wish, says, question);
  return h("div", { class: "row" }, says, count,
    h("button", { onclick: () => ask({ kind: "add-trials", count: Number(count.value) }) }, "Add trials"),
    h("button", { class: "danger", onclick: () => ask({ kind: "stop-study" }, "Stop this study? Running trials are checkpointed; `hydra-tune resume` goes on.") }, "Stop study"));
}

/** `says` is kept outside of the buttons, which are recreated when the trial changes. */
export function trialActions(study, trial, says) {
  const ask = (kind, question) => askFor(study.id, { kind, number: trial.number }, says, question);
  const ended = !["RUNNING", "WAITING", "COMPLETE"].includes(trial.state);
  return h("div", { class: "row" }, says,
    trial.state === "RUNNING" ? h("button", { class: "danger", onclick: () => ask("stop-trial", `Stop trial ${trial.number}? It counts as pruned.`) }, "Stop trial") : null,
    ended ? h("button", { onclick: () => ask("retry-trial") }, "Retry trial") : null);
}

async function askFor(study, wish, says, question) {
  if (question && !confirm(question)) return;
  try {
    const asked = await send("POST", `/api/studies/${study}/actions`, wish);
    says.textContent = "asked; waiting for an answer";
    await answered(study, asked.action_id, says);
  } catch (error) {
    replace(says, h("span", { class: "error" }, error.message));
  }
}

/** Wait until the process that runs the study has answered; a stopped study answers when it is resumed. */
async function answered(study, action, says) {
  for (let tries = 0; tries < 20; tries += 1) {
    const found = (await get(`/api/studies/${study}/actions`)).find((one) => one.action_id === action);
    if (found?.answered) { says.textContent = found.answer; return; }
    await new Promise((resolve) => setTimeout(resolve, 500));
  }
  says.textContent = "nobody runs this study now: it will be done when the study is resumed";
}
