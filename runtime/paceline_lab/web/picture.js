// Draws stays in slots over time as SVG. One picture serves scenarios and live pods.
const NS = "http://www.w3.org/2000/svg";
const ROW = 24, GAP = 4, AXIS = 22, LABEL = 26;
const FINEST = 2; // pixels between two ticks of steps: closer ones are a grey bar
const COLOURS = 12;
let serial = 0;

export const colour = (index) => `var(--c${index % COLOURS})`;

export const CAUSES = {
  intake: "being read", boundary: "for the running step to end", batch: "for its batch to begin", slot: "for a free slot",
  kv: "for KV memory", budget: "for token budget", objective: "for the latency objective", prefill: "own prompt computed",
  delayed: "delayed by others' prompts", preempted: "preempted and recomputed", gap: "engine between steps",
  decode: "generating", held: "ended, held by its batch", delivery: "on the way to the client",
};

export function element(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "rect", "text", "line", "defs", "pattern", "path", "title"].includes(name);
  const node = svg ? document.createElementNS(NS, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// stays: [[slot, request, kind, start, end]], ends: when steps ended; returns {svg, seek(time)}
export function draw({ slots, stays, ends = [], from, until, names, label, marks = [], onPick, width, unit = "" }) {
  const id = `p${serial++}`, wide = Math.max(120, width - LABEL - 1), high = slots * (ROW + GAP);
  const x = (time) => LABEL + ((time - from) / (until - from || 1)) * wide;
  const y = (slot) => slot * (ROW + GAP);
  const svg = element("svg", { width, height: high + AXIS, viewBox: `0 0 ${width} ${high + AXIS}`, role: "img", "aria-label": label });
  svg.append(patterns(id));
  for (let slot = 0; slot < slots; slot++) {
    svg.append(element("text", { x: 0, y: y(slot) + 16, class: "axis" }, String(slot + 1)));
    svg.append(element("rect", { x: LABEL, y: y(slot), width: wide, height: ROW, fill: `url(#${id}idle)` }));
  }
  for (const stay of stays) svg.append(block(stay, { id, x, y, names, onPick }));
  for (const mark of marks) {
    const line = element("line", { x1: x(mark.time), x2: x(mark.time), y1: 0, y2: high, class: "epoch" });
    line.append(element("title", {}, mark.text));
    svg.append(line, element("text", { x: x(mark.time) + 3, y: high + 18, class: "axis" }, mark.text));
  }
  svg.append(ticks(ends, x, high));
  svg.append(...axis(from, until, x, high, unit, marks.length > 0));
  const veil = element("rect", { class: "veil", y: 0, height: high }), now = element("line", { class: "now", y1: 0, y2: high });
  svg.append(veil, now);
  const seek = (time) => {
    const at = Math.min(x(time), LABEL + wide);
    veil.setAttribute("x", at);
    veil.setAttribute("width", Math.max(0, LABEL + wide - at));
    now.setAttribute("x1", at);
    now.setAttribute("x2", at);
  };
  seek(until);
  return { svg, seek };
}

function patterns(id) {
  const pattern = (name, size, path, kind) =>
    element("pattern", { id: id + name, width: size, height: size, patternUnits: "userSpaceOnUse" }, element("path", { d: path, class: kind }));
  return element("defs", {}, pattern("idle", 8, "M-2 10 L10 -2", "hatch"), pattern("prefill", 6, "M-1 7 L7 -1", "texture"),
    pattern("recompute", 4, "M2 0 V4", "texture"));
}

function block([slot, request, kind, start, end], { id, x, y, names, onPick }) {
  const left = x(start), width = Math.max(1, x(end) - left), name = names[request];
  const shape = { x: left, y: y(slot), width, height: ROW, rx: 3 };
  const group = element("g", { class: `stay of-${request}` });
  group.append(element("rect", { ...shape, fill: colour(request), class: `stay ${kind}` }));
  if (kind === "prefill" || kind === "recompute") group.append(element("rect", { ...shape, fill: `url(#${id}${kind})` }));
  if (kind !== "held" && width > 9 + 7 * name.length) group.append(element("text", { x: left + 4, y: y(slot) + 16 }, name));
  group.append(element("title", {}, `${name}: ${kind}, ${round(start)} to ${round(end)}`));
  group.addEventListener("click", () => onPick(request));
  return group;
}

// one tick per step: where they are far apart, everybody waited for a long step
function ticks(ends, x, high) {
  let path = "", before = -Infinity;
  for (const end of ends) {
    const at = x(end);
    if (at - before >= FINEST) { path += `M${at.toFixed(1)} ${high} v5 `; before = at; }
  }
  return element("path", { d: path || "M0 0", class: "tick", fill: "none" });
}

function axis(from, until, x, high, unit, crowded) {
  const span = until - from, rough = span / 8, power = 10 ** Math.floor(Math.log10(rough || 1));
  const tick = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough) || 1, texts = [];
  for (let time = 0; time <= span + 1e-9; time += tick) {
    const at = x(from + time);
    if (!crowded) texts.push(element("text", { x: at, y: high + 18, class: "axis", "text-anchor": time ? (time > 0.96 * span ? "end" : "middle") : "start" }, `${round(time)}${unit}`));
  }
  return texts;
}

export const round = (value, digits = 1) => String(Number(value.toFixed(digits)));

export function emphasise(root, request) {
  for (const group of root.querySelectorAll("g.stay")) group.classList.toggle("dim", request !== null && !group.classList.contains(`of-${request}`));
}

// where a request's time went: a stacked bar, and the same as a table
export function breakdown(parts, unit) {
  const entries = Object.entries(parts).filter(([, value]) => value > 0), total = entries.reduce((sum, [, value]) => sum + value, 0);
  const bar = element("div", { class: "bar", "aria-hidden": "true" });
  const body = element("tbody");
  entries.forEach(([cause, value], index) => {
    const share = total ? value / total : 0;
    bar.append(element("span", { style: `flex-grow:${share};background:${colour(index)}`, title: CAUSES[cause] || cause }));
    body.append(element("tr", {}, element("th", { scope: "row" }, CAUSES[cause] || cause), element("td", {}, `${round(value, unit === "s" ? 3 : 1)} ${unit}`),
      element("td", {}, `${Math.round(share * 100)} %`)));
  });
  return [bar, element("table", {}, body)];
}
