// The JSON API, from its own OpenAPI description.

import { get } from "../api.js";
import { card, h, replace } from "../dom.js";

export async function show(content, { frame }) {
  frame.title([["API"]]);
  const spec = await get("/api/openapi.json");
  const groups = new Map();
  for (const [path, methods] of Object.entries(spec.paths)) {
    for (const [method, one] of Object.entries(methods)) {
      const group = one.tags?.[0] ?? "other";
      groups.set(group, [...(groups.get(group) ?? []), { path, method, ...one }]);
    }
  }
  replace(content, h("h1", {}, "JSON API"), h("p", { class: "soft" }, spec.info.description),
    h("p", {}, h("a", { href: "/api/openapi.json" }, "openapi.json"), " describes it for programs."),
    [...groups].map(([name, operations]) => card(name[0].toUpperCase() + name.slice(1), {}, operations.map((one) => operation(one, spec)))));
  return null;
}

function operation(one, spec) {
  const answer = Object.values(one.responses["200"]?.content ?? one.responses["202"]?.content ?? {})[0]?.schema;
  const rows = (one.parameters ?? []).map((parameter) => h("tr", {}, h("td", {}, h("code", {}, parameter.name)), h("td", { class: "soft" }, parameter.in), h("td", { class: "soft" }, kind(parameter.schema, spec)), h("td", { class: "wrap" }, parameter.description ?? "")));
  const body = one.requestBody?.content?.["application/json"]?.schema;
  return h("details", { style: { padding: ".35rem 0" } },
    h("summary", {}, h("code", {}, `${one.method.toUpperCase()} ${one.path}`), " ", h("span", { class: "small" }, one.description ?? one.summary ?? "")),
    rows.length ? h("div", { class: "scroll" }, h("table", {}, h("tbody", {}, rows))) : null,
    body ? [h("h3", {}, "Body"), fields(body, spec)] : null,
    answer ? [h("h3", {}, "Answer"), fields(answer, spec)] : null);
}

function fields(schema, spec) {
  const found = resolved(schema.items ?? schema, spec);
  const list = schema.type === "array" ? h("p", { class: "small soft" }, "A list of:") : null;
  if (!found.properties) return h("p", { class: "small" }, kind(schema, spec));
  return h("div", { class: "scroll" }, list, h("table", {}, h("tbody", {}, Object.entries(found.properties).map(([name, one]) => h("tr", {}, h("td", {}, h("code", {}, name)), h("td", { class: "soft" }, kind(one, spec)), h("td", { class: "wrap" }, one.description ?? ""))))));
}

function resolved(schema, spec) {
  return schema.$ref ? spec.components.schemas[schema.$ref.split("/").at(-1)] : schema;
}

function kind(schema, spec) {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.anyOf) return [...new Set(schema.anyOf.map((one) => kind(one, spec)))].join(" or ");
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" or ");
  if (schema.type === "array") return `list of ${kind(schema.items, spec) || "anything"}`;
  return schema.type ?? "anything";
}
