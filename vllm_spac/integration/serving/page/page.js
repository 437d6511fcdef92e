"use strict";
// Reads the stream of GET /spac/events and draws it. Bits of an expert's code: see live_view.py.
const STORE = 0, HOST = 1, SLOT = 2, TIER = 3, ON_CPU = 4, LOADED = 8, EVICTED = 16;
const FLASH = 900; // milliseconds
const RETRY = 3000;
const KEPT = 120; // hit rates of the curve
const WINDOW = 60000, RECENT = 5000; // milliseconds that means of requests, and tokens per second, are taken over
const TIMES = { // colour of each part of a token's time
  "experts": "--slot", "rest of the forward": "--pale", "waiting for loads": "--evicted",
  "waiting for CPU experts": "--host", "drafts": "--loaded", "policies and predictors": "--teal",
  "sampling and the rest of the step": "--store", "between steps": "--edge",
};
const $ = (id) => document.getElementById(id);
const state = { report: null, before: null, rates: [], flashes: null, last: null, layout: null, stop: null, model: null,
  counted: [] };

// -- the stream ---------------------------------------------------------------------------------------

async function read() {
  const stop = state.stop = new AbortController();
  const key = sessionStorage.getItem("spac-key");
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  let answer;
  try {
    answer = await fetch("events", { headers, signal: stop.signal, cache: "no-store" });
  } catch (error) {
    return again(stop);
  }
  if (answer.status === 401) return ask(key !== null);
  if (!answer.ok) return again(stop);
  $("ask").hidden = true;
  const text = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await text.read();
      if (done) break;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      events.forEach(take);
    }
  } catch (error) {
    if (!stop.signal.aborted && !(error instanceof TypeError)) console.warn("spac:", error);
  }
  again(stop);
}

function take(event) {
  const [, name, content] = event.match(/^event: (\w+)\ndata: (.*)$/s);
  if (name === "report") {
    state.last = new Date();
    state.failed = false;
    show(JSON.parse(content));
    say("live", "good");
  } else if (name === "busy") {
    say(`the workers are busy${since()}`, "");
  } else {
    state.failed = true;
    say(`the engine has failed: ${JSON.parse(content).reason}${since()}`, "bad");
    $("main").classList.add("stale");
  }
}

function again(stop) {
  if (stop.signal.aborted) return;
  if (!state.failed) say(`connection lost${since()}`, "bad");
  $("main").classList.add("stale");
  setTimeout(() => { if (!document.hidden && state.stop === stop) read(); }, RETRY);
}

function since() {
  return state.last ? `, last update ${state.last.toLocaleTimeString()}` : "";
}

function say(text, kind) {
  const pill = $("state");
  if (pill.textContent !== text) pill.textContent = text;
  pill.className = `pill ${kind}`;
  if (kind === "good") $("main").classList.remove("stale");
}

function ask(refused) {
  $("ask").hidden = false;
  say(refused ? "the server refuses this key" : "a key is needed", "bad");
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("spac-key", $("key").value);
  read();
});

document.addEventListener("visibilitychange", () => { // nobody looks at a hidden page
  state.stop?.abort();
  if (!document.hidden) read();
});

// -- a report -----------------------------------------------------------------------------------------

function show(report) {
  state.before = state.report;
  state.report = report;
  $("main").hidden = false;
  $("model").textContent = report.model;
  const workers = report.workers.length;
  $("choose").hidden = workers < 2;
  while ($("worker").length < workers) $("worker").add(new Option($("worker").length));
  if (report.requests?.tokens < state.counted.at(-1)?.tokens) state.counted = []; // the server was started again
  if (report.requests) state.counted.push({ at: 1000 * report.at, ...report.requests });
  draw();
}

function draw() {
  const index = Number($("worker").value || 0), worker = state.report.workers[index];
  const before = state.before?.workers[index];
  const stats = worker.stats;
  $("mode").hidden = false;
  $("mode").textContent = stats.mode;
  $("mode").classList.toggle("bad", stats.mode === "lossy");
  requests();
  experts(worker);
  time(worker.time);
  hits(stats, before?.stats);
  drafts(stats, worker.drafts);
  ahead(stats, worker.queued);
  budget(worker);
  rows($("counters"), Object.entries(worker.shown));
}

function requests() {
  const counted = state.counted, now = counted.at(-1);
  if (!now) {
    $("requests-of").textContent = "not counted: the server was started with --disable-log-stats";
    return;
  }
  while (now.at - counted[0].at > WINDOW) counted.shift();
  const minute = counted[0], recent = counted.find(({ at }) => now.at - at <= RECENT);
  $("requests-of").textContent = "means: of the last minute, or since the start where none ended in it";
  $("speed").textContent = recent === now ? "–" : (1000 * (now.tokens - recent.tokens) / (now.at - recent.at)).toFixed(1);
  [["running", now.running], ["waiting", now.waiting]].forEach(([id, count]) => { $(id).textContent = count; });
  $("ttft").textContent = mean(now, minute, "first_token_seconds", "first_tokens");
  $("tpot").textContent = mean(now, minute, "token_seconds", "finished");
}

function mean(now, before, seconds, count) {
  const since = now[count] > before[count] ? before : { [seconds]: 0, [count]: 0 }, number = now[count] - since[count];
  return number ? milliseconds(1e9 * (now[seconds] - since[seconds]) / number) : "–";
}

function time(split) {
  const total = Object.values(split.parts).reduce((sum, part) => sum + part, 0);
  const each = split.tokens || split.steps;
  const unit = split.tokens ? "token of all requests together" : "step";
  $("time-of").textContent = split.steps
    ? `${milliseconds(total / each)} per ${unit}, over the last ${split.steps} generating steps`
    : "no step that generates yet";
  const parts = Object.keys(TIMES).map((name) => [name, split.parts[name] ?? 0]);
  bar($("time"), $("time-legend"), parts.filter(([, part]) => part > 0).map(([name, part]) =>
    ({ name, share: part / total, color: TIMES[name], text: `${milliseconds(part / each)} · ${percent(part / total)}` })));
}

function hits(stats, before) {
  const asked = stats.hits + stats.misses;
  $("hit-all").textContent = asked ? percent(stats.hits / asked) : "–";
  if (before) {
    const [hit, missed] = [stats.hits - before.hits, stats.misses - before.misses];
    $("hit-now").textContent = hit + missed > 0 ? percent(hit / (hit + missed)) : "–";
    if (hit + missed > 0) {
      state.rates.push(hit / (hit + missed));
      state.rates = state.rates.slice(-KEPT);
    }
  }
  curve($("hit-line"), state.rates);
  rows($("bytes"), Object.entries(stats.bytes).map(([path, count]) => {
    const gone = before ? count - (before.bytes[path] ?? 0) : 0;
    return [path, before ? `${bytes(gone / state.report.seconds)}/s` : "–", bytes(count)];
  }));
}

function drafts(stats, speculates) {
  const guard = stats.guard, trees = stats.trees;
  $("draft-length").textContent = guard ? guard.draft_length : speculates ? "on" : "off";
  $("draft-of").textContent = guard ? (trees ? "nodes of the tree" : "draft tokens per request") : "";
  const found = [];
  if (guard) {
    found.push(["tokens per step", guard.tokens_per_step.toFixed(2)], ["speed-up by drafts", `${guard.speedup.toFixed(2)}×`]);
    found.push(...Object.entries(guard.steps).map(([length, count]) => [`steps with ${length}`, count.toLocaleString()]));
  }
  if (trees) {
    const verified = Object.entries(stats.tree_accepted), all = verified.reduce((sum, [, count]) => sum + count, 0);
    const accepted = verified.reduce((sum, [tokens, count]) => sum + tokens * count, 0);
    found.push(["trees verified", trees.trees.toLocaleString()], ["draft tokens verified", trees.nodes.toLocaleString()]);
    found.push(["accepted per tree", all ? (accepted / all).toFixed(2) : "–"]);
  }
  if (!found.length) found.push([speculates ? "vLLM chooses their length" : "start with --speculative-config", ""]);
  rows($("drafts"), found);
}

function ahead(stats, queued) {
  $("queued").textContent = queued;
  const useful = stats.prefetch_hits - stats.prefetch_late;
  const done = stats.prefetches + stats.prefetch_failed;
  const parts = [
    ["useful", Math.max(0, useful), "--loaded"], ["late", stats.prefetch_late, "--host"],
    ["wasted", stats.prefetch_wasted, "--evicted"], ["failed", stats.prefetch_failed, "--cpu"],
    ["not used yet", Math.max(0, done - useful - stats.prefetch_late - stats.prefetch_wasted - stats.prefetch_failed), "--store"],
  ];
  bar($("ahead"), $("ahead-legend"), parts.map(([name, count, color]) =>
    ({ name, share: done ? count / done : 0, color, text: count.toLocaleString() })));
}

function budget(worker) {
  const { stats, experts: shape, budget: { settings, least } } = worker;
  const counted = stats.budget;
  $("budget").textContent = stats.mode === "lossy" ? counted.setting : "none: exact";
  rows($("dropped"), [
    ["routing weight dropped", counted.rows ? percent(counted.dropped_share) : "–"],
    ["rows under a budget", counted.rows.toLocaleString()],
    ["experts per shortlist", counted.shortlists ? (counted.experts / counted.shortlists).toFixed(1) : "–"],
    ["rows emptied", counted.emptied.toLocaleString()],
  ]);
  $("control").hidden = !state.report.control;
  const slider = $("slider");
  if ($("control").hidden || document.activeElement === slider || document.activeElement === $("when")) return;
  slider.min = least;
  slider.max = Math.max(...shape.layers); // all experts: no budget
  slider.value = typeof settings.budget === "number" ? settings.budget : slider.max;
  $("when").value = stats.mode === "lossy" || worker.drafts ? settings.when : "decode";
  asked();
}

function asked() {
  const slider = $("slider");
  $("asked").textContent = slider.value === slider.max ? "all (exact)" : slider.value;
}

async function change() {
  const slider = $("slider"), { settings } = state.report.workers[Number($("worker").value || 0)].budget;
  const exact = slider.value === slider.max;
  const wanted = exact ? {} : { ...settings, budget: Number(slider.value), mass: null, when: $("when").value };
  const key = sessionStorage.getItem("spac-key");
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  $("refused").textContent = "";
  try {
    const answer = await fetch("budget", { method: "POST", headers, body: JSON.stringify(wanted) });
    if (!answer.ok) $("refused").textContent = (await answer.json()).detail;
  } catch (error) {
    $("refused").textContent = "the server does not answer";
  }
  slider.blur();
  $("when").blur();
}

$("slider").addEventListener("input", asked);
$("slider").addEventListener("change", change);
$("when").addEventListener("change", change);
$("worker").addEventListener("change", () => { state.before = null; state.rates = []; state.flashes = null; draw(); });

// -- the map of experts -------------------------------------------------------------------------------

function experts(worker) {
  const { layers } = worker.experts, codes = decoded(worker.experts.codes), heat = decoded(worker.experts.heat);
  state.model = { layers, codes, heat };
  const now = performance.now();
  if (state.flashes?.length !== codes.length) state.flashes = Array(codes.length).fill(null);
  const counts = [0, 0, 0];
  let computed = 0;
  codes.forEach((code, key) => {
    counts[code & TIER] += 1;
    computed += (code & ON_CPU) !== 0;
    if (code & (LOADED | EVICTED)) state.flashes[key] = { color: code & LOADED ? "--loaded" : "--evicted", from: now };
  });
  $("shape").textContent = `${layers.length} layers, ${codes.length.toLocaleString()} experts`;
  [["in-store", counts[STORE]], ["in-host", counts[HOST]], ["in-slot", counts[SLOT]], ["on-cpu", computed]]
    .forEach(([id, count]) => { $(id).textContent = count.toLocaleString(); });
  [["of-store", counts[STORE]], ["of-host", counts[HOST]], ["of-cpu", worker.stats.cpu_experts]]
    .forEach(([id, count]) => { $(id).hidden = !count; });
  paint();
}

function place(layers, width) {
  // A layer's cells are folded into as many lines as keep a cell at least 5 pixels wide.
  const label = 26, most = Math.max(...layers), room = width - label;
  const lines = Math.max(1, Math.ceil(most * 5 / room)), across = Math.ceil(most / lines);
  const size = room / across, tall = Math.max(5, Math.min(size, 14)), gap = layers.length > 1 ? 2 : 0;
  const tops = [], firsts = [];
  let top = 0, first = 0;
  layers.forEach((count) => {
    tops.push(top);
    firsts.push(first);
    top += Math.ceil(count / across) * tall + gap;
    first += count;
  });
  return { label, across, size, tall, tops, firsts, layers, height: top };
}

function paint() {
  const canvas = $("map"), { layers, codes, heat } = state.model;
  const width = canvas.parentElement.clientWidth - 24;
  const layout = state.layout = place(layers, width);
  const pen = sharp(canvas, width, layout.height), style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  const tiers = [color("--store"), color("--host"), color("--slot")], cpu = color("--cpu"), edge = layout.size > 6 ? 1 : 0.5;
  const now = performance.now();
  let moving = false;
  pen.font = "10px system-ui, 'DejaVu Sans', sans-serif";
  layers.forEach((count, layer) => {
    pen.globalAlpha = 1;
    pen.fillStyle = color("--soft");
    if (layout.tall >= 9 || layer % 2 === 0) pen.fillText(layer, 0, layout.tops[layer] + Math.min(layout.tall, 10) - 1);
    for (let expert = 0; expert < count; expert += 1) {
      const key = layout.firsts[layer] + expert, code = codes[key];
      const x = layout.label + (expert % layout.across) * layout.size;
      const y = layout.tops[layer] + Math.floor(expert / layout.across) * layout.tall;
      pen.globalAlpha = 0.22 + 0.78 * Math.sqrt(heat[key] / 255);
      pen.fillStyle = code & ON_CPU ? cpu : tiers[code & TIER];
      pen.fillRect(x, y, layout.size - edge, layout.tall - edge);
      const flash = state.flashes[key];
      if (flash) {
        const left = 1 - (now - flash.from) / FLASH;
        if (left > 0) {
          moving = true;
          pen.globalAlpha = left;
          pen.strokeStyle = color(flash.color);
          pen.lineWidth = 2;
          pen.strokeRect(x + 1, y + 1, layout.size - edge - 2, layout.tall - edge - 2);
        } else {
          state.flashes[key] = null;
        }
      }
    }
  });
  canvas.dataset.painted = Number(canvas.dataset.painted || 0) + 1;
  if (moving) requestAnimationFrame(paint);
}

$("map").addEventListener("pointermove", (event) => {
  const { layout, model } = state;
  if (!layout) return;
  const box = $("map").getBoundingClientRect(), y = event.clientY - box.top;
  const layer = layout.tops.findLastIndex((top) => top <= y);
  const column = Math.floor((event.clientX - box.left - layout.label) / layout.size);
  const expert = Math.floor((y - layout.tops[layer]) / layout.tall) * layout.across + column;
  if (layer < 0 || column < 0 || column >= layout.across || expert >= layout.layers[layer]) return;
  const key = layout.firsts[layer] + expert, code = model.codes[key];
  const where = ["on disk", "in host memory", "in a slot"][code & TIER];
  const how = code & ON_CPU ? ", computed on the CPU" : "";
  $("hover").textContent = `layer ${layer}, expert ${expert}: ${where}${how}, heat ${percent(model.heat[key] / 255)}`;
});

// -- small parts --------------------------------------------------------------------------------------

function decoded(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

function sharp(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  return pen;
}

function curve(canvas, values) {
  const width = canvas.parentElement.clientWidth - 24, height = 56, pen = sharp(canvas, width, height);
  const style = getComputedStyle(document.documentElement);
  pen.strokeStyle = style.getPropertyValue("--edge");
  pen.strokeRect(0.5, 0.5, width - 1, height - 1);
  pen.strokeStyle = style.getPropertyValue("--slot");
  pen.lineWidth = 2;
  pen.beginPath();
  values.forEach((value, index) => pen.lineTo(2 + index * (width - 4) / (KEPT - 1), height - 3 - value * (height - 6)));
  pen.stroke();
}

function bar(target, legend, parts) {
  target.replaceChildren(...parts.map(({ name, share, color, text }) => {
    const part = document.createElement("div");
    part.style.width = `${100 * share}%`;
    part.style.background = `var(${color})`;
    part.title = `${name}: ${text}`;
    return part;
  }));
  target.setAttribute("aria-label", parts.map(({ name, text }) => `${name} ${text}`).join(", "));
  legend.replaceChildren(...parts.map(({ name, color, text }) => {
    const item = document.createElement("li"), mark = document.createElement("i"), value = document.createElement("b");
    mark.style.background = `var(${color})`;
    value.textContent = text;
    item.append(mark, `${name} `, value);
    return item;
  }));
}

function rows(table, entries) {
  table.tBodies[0].replaceChildren(...entries.map((cells) => {
    const row = document.createElement("tr");
    cells.forEach((text) => { row.insertCell().textContent = text; });
    return row;
  }));
}

function bytes(count) {
  const unit = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]].find(([, size]) => count >= size) ?? ["KiB", 2 ** 10];
  return `${(count / unit[1]).toFixed(unit[0] === "GiB" ? 2 : 1)} ${unit[0]}`;
}

function percent(share) {
  return `${(100 * share).toFixed(1)}%`;
}

function milliseconds(nanoseconds) {
  return `${(nanoseconds / 1e6).toFixed(2)} ms`;
}

window.addEventListener("resize", () => { if (state.model) { paint(); curve($("hit-line"), state.rates); } });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (state.model) draw(); });
read();
