// Live: the last steps of a running engine, from its timeline and its request records.
import { breakdown, draw, element, emphasise, round } from "./picture.js";

const byId = (id) => document.getElementById(id);
const EVERY = 500, KEPT_SECONDS = 20;
const live = { timer: null, prefix: "api", token: "", steps: [], cursor: 0, instance: "", requests: new Map(), seen: 0, slots: new Map(), names: [], index: new Map(), chosen: null, paused: false };

export function startLive() {
  byId("connect").onsubmit = (event) => { event.preventDefault(); live.token = byId("token").value; watch(); };
  byId("pause").onclick = togglePause;
  whom().then((pod) => {
    if (!pod) return say("No pod to watch: start the Lab with --live URL, or open /lab/ on a pod's admin port.");
    live.prefix = pod.prefix;
    byId("connect").hidden = false;
    for (const part of byId("connect").querySelectorAll("label, [type=submit]")) part.hidden = !pod.needsToken;
    say(pod.needsToken ? `${pod.target}: give its admin token to watch it.` : `Watching ${pod.target}.`);
    if (!pod.needsToken || live.token) watch();
  });
}

// the pod that this Lab watches, or null
export async function whom() {
  try {
    const answer = await fetch("api/live");
    const pod = answer.ok ? await answer.json() : null;
    return pod && pod.target ? pod : null;
  } catch {
    return null;
  }
}

export function stopLive() {
  clearTimeout(live.timer);
  live.timer = null;
}

function say(text) { byId("live-state").textContent = text; }

function togglePause() {
  live.paused = !live.paused;
  byId("pause").setAttribute("aria-pressed", String(live.paused));
  byId("pause").textContent = live.paused ? "Go on" : "Pause";
}

async function get(path) {
  const headers = live.token ? { Authorization: `Bearer ${live.token}` } : {};
  const answer = await fetch(path, { headers });
  if (answer.status === 401 || answer.status === 403) throw new Error("The pod refused the admin token.");
  if (!answer.ok) throw new Error(`The pod answered ${answer.status}.`);
  return answer.json();
}

async function watch() {
  clearTimeout(live.timer);
  byId("pause").hidden = false;
  try {
    const [timeline, observed] = await Promise.all([get(`${live.prefix}/timeline?since=${live.cursor}`), get(`${live.prefix}/observe?since=${live.seen}`)]);
    take(timeline, observed);
    if (!live.paused) show(observed);
  } catch (error) {
    say(`${error.message} Trying again.`);
  }
  live.timer = setTimeout(watch, EVERY);
}

function take(timeline, observed) {
  if (timeline.instance !== live.instance) Object.assign(live, { steps: [], requests: new Map(), slots: new Map(), names: [], index: new Map(), seen: 0 });
  live.instance = timeline.instance;
  live.cursor = timeline.cursor;
  live.seen = observed.cursor;
  live.steps.push(...timeline.steps);
  const oldest = timeline.now - KEPT_SECONDS;
  live.steps = live.steps.filter((step) => step.end > oldest);
  for (const record of observed.requests) live.requests.set(record.requestId, record);
  for (const [id, record] of live.requests) if (record.end && record.end < oldest - 60) live.requests.delete(id);
}

// a request has the lowest slot that is free when it first appears, until the first step without it
function stays() {
  const free = [], taken = new Map(), found = [], indexes = new Map();
  let rows = 0;
  for (const step of live.steps) {
    const here = new Set(step.members.map((member) => member.requestId));
    for (const [id, stay] of taken) if (!here.has(id)) { free.push(stay[0]); taken.delete(id); }
    free.sort((one, other) => one - other);
    for (const member of step.members) {
      const kind = member.prefill ? "prefill" : "decode", start = step.end - step.duration;
      let stay = taken.get(member.requestId);
      if (!indexes.has(member.requestId)) indexes.set(member.requestId, number(member.requestId));
      if (!stay || stay[2] !== kind) {
        const slot = stay ? stay[0] : free.length ? free.shift() : rows++;
        stay = [slot, indexes.get(member.requestId), kind, start, step.end];
        taken.set(member.requestId, stay);
        found.push(stay);
      }
      stay[4] = step.end;
    }
  }
  return { found, rows: Math.max(rows, 1) };
}

function number(id) {
  if (!live.index.has(id)) { live.index.set(id, live.names.length); live.names.push(`#${live.names.length + 1}`); live.slots.set(live.names.length - 1, id); }
  return live.index.get(id);
}

function show(observed) {
  const gauges = observed.gauges, { found, rows } = stays();
  const text = `${gauges.running} running, ${gauges.waiting} waiting, KV ${gauges.kvBlocksUsed} of ${gauges.kvBlocksTotal} blocks, knob epoch ${observed.epoch}`;
  say(live.steps.length ? text : `${text}. No step in the last ${KEPT_SECONDS} s.`);
  if (!live.steps.length) return byId("live-picture").replaceChildren();
  const until = live.steps.at(-1).end, from = Math.max(until - KEPT_SECONDS, live.steps[0].end - live.steps[0].duration);
  const root = byId("live-picture");
  const picture = draw({ slots: rows, stays: found, ends: live.steps.map((step) => step.end), from, until, names: live.names, marks: epochs(), unit: " s", width: root.clientWidth || 800,
    label: `The last ${round(until - from)} seconds: ${text}`, onPick: choose });
  root.replaceChildren(element("section", { class: "picture", "aria-label": "Live slots" }, picture.svg, recent()));
  emphasise(root, live.chosen);
}

function epochs() {
  return live.steps.filter((step, i) => i && step.epoch !== live.steps[i - 1].epoch).map((step) => ({ time: step.end - step.duration, text: `knobs: epoch ${step.epoch}` }));
}

function recent() {
  const ended = [...live.requests.values()].filter((record) => record.end && live.index.has(record.requestId)).slice(-12).reverse();
  const rows = ended.map((record) => {
    const button = element("button", { type: "button" }, live.names[live.index.get(record.requestId)]);
    button.addEventListener("click", () => choose(live.index.get(record.requestId)));
    return element("tr", {}, element("th", { scope: "row" }, button), element("td", {}, `${record.promptTokens} + ${record.outputTokens}`),
      element("td", {}, `${round(record.end - record.arrival, 2)} s`), element("td", {}, record.outcome));
  });
  const titles = ["Request", "tokens in + out", "latency", "outcome"].map((title) => element("th", { scope: "col" }, title));
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Requests that ended" },
    element("table", {}, element("thead", {}, element("tr", {}, ...titles)), element("tbody", {}, ...rows)));
}

function choose(index) {
  live.chosen = index;
  emphasise(byId("live-picture"), index);
  const id = live.slots.get(index), record = live.requests.get(id);
  byId("live-chosen").hidden = false;
  byId("live-chosen-title").textContent = `Where the time of ${live.names[index]} (${id}) went`;
  const body = byId("live-chosen-body");
  if (!record || !record.end) return body.replaceChildren(element("p", {}, "It hasn't ended yet."));
  const blamed = Object.entries(record.delayedBy).map(([other, seconds]) => `${live.index.has(other) ? live.names[live.index.get(other)] : other} (${round(seconds, 3)} s)`);
  const text = [`${record.outcome}, ${round(record.end - record.arrival, 3)} s under knob epoch ${record.epoch}.`, blamed.length ? `Delayed by the prompts of ${blamed.join(", ")}.` : ""].join(" ");
  body.replaceChildren(element("p", {}, text), ...breakdown(record.parts, "s"));
}
