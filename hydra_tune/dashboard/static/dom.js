// Elements from data. Text always becomes a text node: no name, error or traceback is ever read as HTML.

/** h("a", {href: "/x", class: "y", onclick: f}, "text", child, [more]) */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(element, child);
    else element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

export function replace(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

export function card(title, attributes, ...children) {
  const { aside, ...rest } = attributes || {};
  return h("section", { class: "card", "aria-label": title, ...rest }, h("header", {}, h("h2", {}, title), aside), ...children);
}

export function fact(name, value, small) {
  return h("div", { class: "fact" }, h("dt", {}, name), h("dd", {}, value, small ? h("small", {}, small) : null));
}

export function state(word) {
  return h("span", { class: `state ${String(word).toLowerCase().replace(/[^a-z_]/g, "")}` }, String(word).toLowerCase().replaceAll("_", " "));
}

export function pairs(entries) {
  return h("dl", { class: "pairs" }, entries.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

export function empty(text) {
  return h("p", { class: "empty" }, text);
}

/** Call `draw` when the element comes near the screen, once. */
export function whenSeen(element, draw) {
  const watch = new IntersectionObserver((entries) => {
    if (entries.some((entry) => entry.isIntersecting)) { watch.disconnect(); draw(); }
  }, { rootMargin: "300px" });
  watch.observe(element);
}

/** At most one call in `pause` ms; the last one always happens. */
export function throttled(call, pause) {
  let timer = null, last = 0;
  return () => {
    if (timer !== null) return;
    timer = setTimeout(() => { timer = null; last = Date.now(); call(); }, Math.max(0, last + pause - Date.now()));
  };
}
