// Login: the token from the address that the server printed (after the #, which is not sent), or typed.

import { send } from "../api.js";
import { h, replace } from "../dom.js";

// Browsers drop tabs and turn backslashes round, so only they can say where an address leads.
function ours(next) {
  try {
    const there = new URL(next, location.origin);
    return there.origin === location.origin ? there.href : "/";
  } catch { return "/"; }
}

export async function show(content, { frame, query }) {
  frame.title([["Log in"]]);
  const says = h("p", { class: "error", role: "alert" });
  const field = h("input", { type: "password", "aria-label": "Token", autocomplete: "off", style: { width: "100%" } });
  const enter = async (token) => {
    try {
      await send("POST", "/api/login", { token });
      location.replace(ours(query.get("next") || "/"));
    } catch (error) { says.textContent = error.message; }
  };
  const form = h("form", { onsubmit: (event) => { event.preventDefault(); enter(field.value.trim()); } }, field, h("p", {}, h("button", { class: "main" }, "Log in")));
  replace(content, h("section", { class: "card login" }, h("h1", {}, "Log in"), h("p", { class: "soft" }, "The token is in the file that the server named when it started."), form, says));
  field.focus();
  const given = decodeURIComponent(location.hash.slice(1));
  if (given) {
    history.replaceState(null, "", location.pathname + location.search);
    await enter(given);
  }
  return null;
}
