// The scenario's form: reading it, filling it, and the link that reproduces it.
import { element } from "./picture.js";

const STRATEGIES = ["static", "dynamic", "continuous", "iteration"];
const SHARED = { lengths: "list", prompts: "list", every: "number", slots: "number", prefillCost: "number" };
const SIDES = [
  ["chunk", "Prompt tokens per step (0: whole prompt)"], ["kvBlocks", "KV blocks (0: enough)"],
  ["maxWait", "Longest wait (dynamic), steps"], ["tpot", "Steps per token at most (iteration)"],
];
const DEFAULTS = { strategy: "continuous", lengths: [8, 2, 2, 2, 6, 4, 4, 4], prompts: [1], every: 0, slots: 4, prefillCost: 0,
  chunk: 0, kvBlocks: 0, maxWait: 15, tpot: 0 };
const byId = (id) => document.getElementById(id);

export function buildSides() {
  for (const field of document.querySelectorAll("fieldset[data-side]")) {
    const side = field.dataset.side;
    const select = element("select", { id: `strategy-${side}` }, ...STRATEGIES.map((name) => element("option", {}, name)));
    field.append(element("label", { class: "wide" }, "Strategy ", select));
    for (const [name, text] of SIDES)
      field.append(element("label", {}, `${text} `, element("input", { id: `${name}-${side}`, type: "number", min: 0, step: name === "tpot" || name === "maxWait" ? "any" : 1 })));
  }
}

const parseList = (text) => text.split(/[\s,;]+/).filter(Boolean).map(Number);
// an empty or unreadable number is sent as text, so that the answer names the field
const parseNumber = (input) => (Number.isNaN(input.valueAsNumber) ? input.value : input.valueAsNumber);

export function read() {
  const shared = {};
  for (const [name, kind] of Object.entries(SHARED)) shared[name] = kind === "list" ? parseList(byId(name).value) : parseNumber(byId(name));
  const side = (letter) => {
    const own = { strategy: byId(`strategy-${letter}`).value };
    for (const [name] of SIDES) own[name] = parseNumber(byId(`${name}-${letter}`));
    return { ...shared, ...own };
  };
  return { a: side("a"), b: side("b") };
}

export function fill(a, b) {
  const [above, below] = [{ ...DEFAULTS, ...a }, { ...DEFAULTS, ...a, ...b }];
  for (const [name, kind] of Object.entries(SHARED)) byId(name).value = kind === "list" ? above[name].join(", ") : above[name];
  for (const [letter, values] of [["a", above], ["b", below]]) {
    byId(`strategy-${letter}`).value = values.strategy;
    for (const [name] of SIDES) byId(`${name}-${letter}`).value = values[name];
  }
}

const changed = (values, base) => Object.fromEntries(Object.entries(values).filter(([name, value]) => JSON.stringify(value) !== JSON.stringify(base[name])));

export function toLink({ a, b }, time) {
  const parts = new URLSearchParams({ a: JSON.stringify(changed(a, DEFAULTS)), b: JSON.stringify(changed(b, a)), t: String(Number(time.toFixed(2))) });
  return `#${parts}`;
}

export function fromLink(hash) {
  try {
    const parts = new URLSearchParams(hash.slice(1));
    return parts.has("a") ? { a: JSON.parse(parts.get("a")), b: JSON.parse(parts.get("b") || "{}"), time: Number(parts.get("t")) || 0 } : null;
  } catch {
    return null; // a link that was cut short: start as usual
  }
}
