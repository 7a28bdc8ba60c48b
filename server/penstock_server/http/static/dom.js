// Elements and figures. All text goes in as text: nothing here makes HTML of strings.

export const byId = (id) => document.getElementById(id);

export function make(tag, name = "", ...children) {
  const found = document.createElement(tag);
  if (name) found.className = name;
  found.append(...children);
  return found;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text; // a selection in it survives
}

/** Makes the children of `parent` those of `items`: one for each, made by `make`, and kept as long as its key lasts. */
export function keyed(parent, items, key, make, update) {
  const kept = new Map(parent.kept ?? []);
  const found = new Map();
  let place = parent.firstChild;
  for (const item of items) {
    const name = key(item);
    const child = kept.get(name) ?? make(item);
    kept.delete(name);
    found.set(name, child);
    if (child === place) place = place.nextSibling;
    else parent.insertBefore(child, place);
    update(child, item);
  }
  for (const child of kept.values()) child.remove();
  parent.kept = found;
}

/** A row of buttons, of which one is chosen. The choice is kept in this browser. */
export function choice(parent, name, options, changed) {
  let chosen = stored(name) ?? Object.keys(options)[0];
  if (!(chosen in options)) chosen = Object.keys(options)[0];
  const buttons = Object.entries(options).map(([value, text]) => {
    const button = make("button", "", text);
    button.type = "button";
    button.onclick = () => {
      chosen = value;
      store(name, value);
      show();
      changed();
    };
    return [value, button];
  });
  const show = () => buttons.forEach(([value, button]) => button.setAttribute("aria-pressed", value === chosen));
  show();
  parent.replaceChildren(...buttons.map(([, button]) => button));
  return () => chosen;
}

function stored(name) {
  try {
    return localStorage.getItem("penstock." + name);
  } catch {
    return null; // the browser keeps nothing for this page
  }
}

function store(name, value) {
  try {
    localStorage.setItem("penstock." + name, value);
  } catch {
    // as above
  }
}

export function number(value) {
  if (value === null || value === undefined) return "";
  if (value >= 100) return Math.round(value).toLocaleString("en");
  if (value < 0.005) return "0";
  return String(Number(value.toPrecision(3)));
}

export const percent = (share) => (share === null || share === undefined ? "" : `${Math.round(100 * share)} %`);

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (bytes >= 1024 && power < 4) {
    bytes /= 1024;
    power++;
  }
  return `${number(bytes)} ${units[power]}`;
}

export function ago(seconds) {
  for (const [unit, length] of [
    ["d", 86400],
    ["h", 3600],
    ["min", 60],
  ]) {
    if (seconds >= 2 * length) return `${Math.round(seconds / length)} ${unit}`;
  }
  return `${Math.round(seconds)} s`;
}

export const count = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;

const TIME = {hour: "2-digit", minute: "2-digit", second: "2-digit"};
export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB", TIME);
export const exactClock = (seconds) =>
  new Date(seconds * 1000).toLocaleTimeString("en-GB", {...TIME, fractionalSecondDigits: 1});

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Shows lines of text beside the pointer, or nothing. */
export function tip(event, lines) {
  const box = byId("tip");
  box.hidden = !lines;
  if (!lines) return;
  box.replaceChildren(...lines.map((line) => make("div", "", line)));
  const left = Math.min(event.clientX + 14, document.documentElement.clientWidth - box.offsetWidth - 8);
  const below = event.clientY + 16;
  box.style.left = `${left}px`;
  box.style.top = `${below + box.offsetHeight < innerHeight ? below : event.clientY - box.offsetHeight - 12}px`;
}
