// Access to data: from the server, or in a report from the page itself.

const embedded = document.getElementById("report-data");
export const report = embedded ? JSON.parse(embedded.textContent) : null;

export class Trouble extends Error {}

export async function get(path) {
  if (report) return fromReport(path);
  return answered(await fetch(path, { headers: { accept: "application/json" } }));
}

export async function send(method, path, body) {
  const answer = await fetch(path, { method, headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
  return answered(answer);
}

async function answered(answer) {
  if (answer.status === 401) {
    location.assign(`/login?next=${encodeURIComponent(location.pathname + location.search)}`);
    throw new Trouble("the token is needed");
  }
  if (answer.status === 204) return null;
  const body = await answer.json().catch(() => ({ detail: `the server answered ${answer.status}` }));
  if (answer.ok) return body;
  const detail = Array.isArray(body.detail) ? body.detail.map((one) => one.msg).join("; ") : body.detail;
  throw new Trouble(detail || `the server answered ${answer.status}`);
}

/**
 * Follow a study; `on` has change(news), end(news), connected(bool). Returns a function that stops.
 * A hidden page does not listen: browsers allow six connections to a server for all tabs together.
 */
export function follow(study, since, on) {
  let source = null, version = since;
  const listen = () => {
    source = new EventSource(`/api/studies/${study}/live?since=${version}`);
    source.addEventListener("open", () => on.connected(true));
    source.addEventListener("error", () => on.connected(false));
    source.addEventListener("change", (event) => { const news = JSON.parse(event.data); version = news.study.version; on.change(news); });
    source.addEventListener("end", (event) => on.end(JSON.parse(event.data)));
  };
  const stop = () => { source?.close(); source = null; };
  const look = () => { if (document.hidden) stop(); else if (!source) listen(); };
  document.addEventListener("visibilitychange", look);
  addEventListener("pagehide", stop);
  look();
  return () => { document.removeEventListener("visibilitychange", look); removeEventListener("pagehide", stop); stop(); };
}

/** A link to a page: by address on a server, by the part after # in a report. */
export function link(path) {
  return report ? `#${path}` : path;
}

function fromReport(path) {
  const [place, query] = path.split("?");
  const found = report[path] ?? report[place];
  if (found === undefined) throw new Trouble("this report does not hold that; the dashboard does");
  return place.endsWith("/trials") ? someTrials(found, new URLSearchParams(query)) : found;
}

/** Sorting and paging of the trials that a report holds. */
function someTrials(all, query) {
  const study = Object.values(report).find((one) => one && one.metrics);
  const sort = query.get("sort"), down = query.get("descending") === "true", words = (query.get("filter") || "").toLowerCase();
  const key = (row) => {
    if (sort === "value" || study.metrics.includes(sort)) return row.values[Math.max(0, study.metrics.indexOf(sort))];
    if (sort === "memory") return row.peak_device_bytes;
    return sort in row.params ? row.params[sort] : row[sort];
  };
  let rows = all.rows.filter((row) => !words || JSON.stringify(row).toLowerCase().includes(words));
  if (sort) {
    const rank = (a, b) => (a === b ? 0 : a > b ? 1 : -1) * (down ? -1 : 1);
    const missing = (value) => value === null || value === undefined;
    rows = [...rows].sort((a, b) => missing(key(a)) - missing(key(b)) || rank(key(a), key(b)) || a.number - b.number);
  }
  const offset = Number(query.get("offset") || 0), limit = Number(query.get("limit") || 50);
  return { ...all, matching: words ? rows.length : all.matching, offset, rows: rows.slice(offset, offset + limit) };
}
