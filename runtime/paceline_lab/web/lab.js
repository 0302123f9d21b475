// Scenarios: plays two settings of the same requests side by side.
import { buildSides, fill, fromLink, read, toLink } from "./controls.js";
import { breakdown, colour, draw, element, emphasise, round } from "./picture.js";
import { startLive, stopLive, whom } from "./live.js";

const byId = (id) => document.getElementById(id);
const state = { scenes: [], pictures: [], time: 0, end: 1, playing: null, chosen: null, asked: 0 };

async function post(path, body) {
  const answer = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  const document_ = await answer.json();
  if (!answer.ok) throw new Error(document_.error || `the server answered ${answer.status}`);
  return document_;
}

async function play({ time = 0, announce = true } = {}) {
  const wanted = read(), asked = ++state.asked;
  try {
    const scenes = await Promise.all([post("api/run", wanted.a), post("api/run", wanted.b)]);
    if (asked !== state.asked) return; // a newer question is on its way
    byId("error").textContent = "";
    state.scenes = scenes;
    state.end = Math.max(...scenes.map((scene) => scene.duration));
    byId("time").max = state.end;
    show();
    seek(time || state.end, announce);
  } catch (error) {
    if (asked === state.asked) byId("error").textContent = error.message;
  }
}

function show() {
  const root = byId("pictures");
  const panels = state.scenes.map((scene, index) => panel(scene, index));
  root.replaceChildren(...panels.map((one) => one.node));
  state.pictures = panels.map((one) => ({ ...one, ...one.render(one.stage.clientWidth) }));
  choose(state.chosen !== null && state.scenes[0].requests[state.chosen] ? state.chosen : null);
}

function panel(scene, index) {
  const names = scene.requests.map((request) => request.name), heading = `${index ? "Below" : "Above"}: ${scene.strategy}`;
  const stage = element("div"), queue = element("div", { class: "queue" });
  const node = element("section", { class: "picture", "aria-label": heading },
    element("div", { class: "head" }, element("h2", {}, scene.strategy), figures(scene)),
    element("div", { class: "stage" }, stage, queue), table(scene));
  stage.style.cssText = "flex:1 1 auto;min-width:0";
  const render = (width) => {
    const label = `${scene.strategy}: ${scene.slots} slots over ${round(scene.duration)} steps, ${Math.round(100 * scene.figures.slotUtilisation)} % used; the table below lists the requests`;
    const picture = draw({ slots: scene.slots, stays: scene.stays, ends: scene.steps.map(([end]) => end), from: 0, until: state.end, names, label, onPick: choose, width });
    stage.replaceChildren(picture.svg);
    return picture;
  };
  return { node, stage, queue, scene, render };
}

function figures(scene) {
  const f = scene.figures;
  const rows = [["steps", round(f.duration)], ["slots used", `${Math.round(100 * f.slotUtilisation)} %`], ["mean latency", round(f.meanLatency)],
    ["mean TTFT", round(f.meanTtft)], ["longest pause", round(f.longestPause)], ["tokens/step", round(f.tokensPerStep, 2)]];
  if (f.preemptions) rows.push(["preemptions", f.preemptions]);
  return element("dl", {}, ...rows.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, String(value)))));
}

function table(scene) {
  const rows = scene.requests.map((request, index) => {
    const button = element("button", { type: "button" }, request.name);
    button.addEventListener("click", () => choose(index));
    const cells = [request.arrival, request.started, request.firstToken, request.released, request.released - request.arrival];
    return element("tr", {}, element("th", { scope: "row" }, button), ...cells.map((value) => element("td", {}, value === null ? "–" : round(value))));
  });
  const titles = ["Request", "arrives", "starts", "first token", "answered", "latency"].map((title) => element("th", { scope: "col" }, title));
  return element("details", {}, element("summary", {}, "Requests as a table"),
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Requests under ${scene.strategy}` },
      element("table", {}, element("thead", {}, element("tr", {}, ...titles)), element("tbody", {}, ...rows))));
}

function seek(time, announce = true) {
  state.time = Math.min(Math.max(0, time), state.end);
  byId("time").value = state.time;
  byId("time").setAttribute("aria-valuetext", `step ${round(state.time)} of ${round(state.end)}`);
  byId("clock").textContent = `${round(state.time)} of ${round(state.end)}`;
  for (const picture of state.pictures) {
    picture.seek(state.time);
    showQueue(picture);
  }
  if (announce) byId("says").textContent = state.pictures.map(({ scene }) => inWords(scene)).join(" ");
}

const waits = (request, time) => (request.arrival <= time && time < (request.started ?? request.released)) || request.waits.some(([from, until]) => from <= time && time < until);
const waiting = (scene) => scene.requests.map((request, index) => [request, index]).filter(([request]) => waits(request, state.time));
const running = (scene) => scene.stays.filter(([, , kind, start, end]) => start <= state.time && state.time < end && kind !== "held");

function showQueue({ scene, queue }) {
  const list = waiting(scene), shown = list.slice(0, 40);
  const items = shown.map(([request, index]) => element("li", { style: `background:${colour(index)}` }, request.name));
  queue.replaceChildren(`${list.length} waiting`, element("ol", {}, ...items));
}

function inWords(scene) {
  const who = running(scene).map(([, request]) => scene.requests[request].name).join(", ") || "nobody";
  return `${scene.strategy}: ${who} running, ${waiting(scene).length} waiting.`;
}

function choose(index) {
  state.chosen = index;
  emphasise(byId("pictures"), index);
  byId("chosen").hidden = index === null;
  if (index === null) return;
  byId("chosen-title").textContent = `Where request ${state.scenes[0].requests[index].name}'s time went`;
  byId("chosen-body").replaceChildren(...state.scenes.flatMap((scene) => story(scene, scene.requests[index])));
}

function story(scene, request) {
  const blamed = Object.entries(request.delayedBy).map(([name, steps]) => `${name} (${round(steps)})`).join(", ");
  const lost = Object.keys(request.preemptedBy).join(", ");
  const text = [`${scene.strategy}: ${round(request.released - request.arrival)} steps from arrival to answer.`,
    request.slotOf ? `It got the slot of ${request.slotOf}.` : "", blamed ? `Delayed by the prompts of ${blamed}.` : "",
    lost ? `Lost its memory to ${lost}.` : ""].filter(Boolean).join(" ");
  return [element("p", {}, text), ...breakdown(request.parts, "steps")];
}

function togglePlay() {
  if (state.playing !== null) return pause();
  if (state.time >= state.end) seek(0, false);
  byId("playing").textContent = "Pause";
  byId("playing").setAttribute("aria-pressed", "true");
  const speed = state.end / 12; // the whole scene in 12 seconds
  let before = performance.now();
  const frame = (now) => {
    seek(state.time + ((now - before) / 1000) * speed, false);
    before = now;
    if (state.time >= state.end) return pause();
    state.playing = requestAnimationFrame(frame);
  };
  state.playing = requestAnimationFrame(frame);
}

function pause() {
  cancelAnimationFrame(state.playing);
  state.playing = null;
  byId("playing").textContent = "Play";
  byId("playing").setAttribute("aria-pressed", "false");
}

function stepBy(sign) {
  pause();
  const ends = [...new Set(state.scenes.flatMap((scene) => scene.steps.flatMap(([end, seconds]) => [end - seconds, end])))].sort((x, y) => x - y);
  const next = sign > 0 ? ends.find((end) => end > state.time + 1e-6) : ends.findLast((end) => end < state.time - 1e-6);
  seek(next ?? (sign > 0 ? state.end : 0));
}

async function presets() {
  const list = await (await fetch("api/presets")).json();
  for (const preset of list) {
    const button = element("button", { type: "button", "data-preset": preset.id, "aria-pressed": "false" }, preset.title);
    button.addEventListener("click", () => usePreset(preset));
    byId("presets").append(button);
  }
  return list;
}

function markPreset(preset) {
  byId("preset-text").textContent = preset ? preset.text : "";
  for (const button of byId("presets").children) button.setAttribute("aria-pressed", String(preset !== null && button.dataset.preset === preset.id));
}

function usePreset(preset) {
  pause();
  state.chosen = null;
  fill(preset.scenario, preset.compare);
  markPreset(preset);
  return play();
}

function relength(make) {
  const count = byId("lengths").value.split(/[\s,;]+/).filter(Boolean).length || 8;
  byId("lengths").value = Array.from({ length: count }, make).join(", ");
  edited();
}

let typing = 0;
function edited() {
  markPreset(null);
  clearTimeout(typing);
  typing = setTimeout(() => { pause(); play(); }, 250);
}

function switchMode(live) {
  pause();
  byId("play").hidden = live;
  byId("live").hidden = !live;
  byId("mode-play").setAttribute("aria-pressed", String(!live));
  byId("mode-live").setAttribute("aria-pressed", String(live));
  if (live) startLive();
  else { stopLive(); show(); seek(state.time, false); }
}

async function start() {
  const pod = await whom();
  byId("mode-live").hidden = pod === null;
  if (pod && !pod.scenarios) { // a pod shows itself and plays nothing
    document.querySelector("nav").hidden = true;
    byId("play").hidden = true;
    byId("live").hidden = false;
    return startLive();
  }
  buildSides();
  byId("scenario").addEventListener("input", edited);
  byId("scenario").addEventListener("submit", (event) => event.preventDefault());
  byId("even").addEventListener("click", () => relength(() => 4));
  byId("vary").addEventListener("click", () => relength((_, i) => [8, 2, 2, 2, 6, 4, 4, 4][i % 8]));
  byId("playing").addEventListener("click", togglePlay);
  byId("forward").addEventListener("click", () => stepBy(1));
  byId("back").addEventListener("click", () => stepBy(-1));
  byId("rewind").addEventListener("click", () => { pause(); seek(0); });
  byId("time").addEventListener("input", (event) => { pause(); seek(event.target.valueAsNumber); });
  byId("link").addEventListener("click", copyLink);
  byId("mode-play").addEventListener("click", () => switchMode(false));
  byId("mode-live").addEventListener("click", () => switchMode(true));
  addEventListener("resize", () => { if (state.scenes.length && !byId("play").hidden) { show(); seek(state.time, false); } });
  const list = await presets(), linked = fromLink(location.hash);
  if (pod && location.hash === "#live") { await usePreset(list[0]); return switchMode(true); }
  if (!linked) return usePreset(list[0]);
  fill(linked.a, linked.b);
  await play({ time: linked.time });
}

async function copyLink() {
  history.replaceState(null, "", toLink(read(), state.time));
  let text = "Link is in the address bar";
  try { await navigator.clipboard.writeText(location.href); text = "Copied"; } catch { /* no permission: the address bar has it */ }
  byId("link").textContent = text;
  setTimeout(() => { byId("link").textContent = "Copy link"; }, 2000);
}

start();
